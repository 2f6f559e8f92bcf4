"""Train a run from its first step or its last checkpoint to its end, in every process of a job."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from deepbregman.config import Config, override
from deepbregman.data import Source, typical_side, without_unreadable
from deepbregman.data.memory import count_cpus
from deepbregman.data.opening import open_data, select_images, select_labels, split_for_monitor
from deepbregman.data.own import find_own_side
from deepbregman.errors import notify
from deepbregman.evaluation.knn import build_knn_monitor
from deepbregman.files import hold_folder
from deepbregman.launching import find_process
from deepbregman.objectives import OwnParts, build_run_encoder
from deepbregman.runs import Run, is_complete, is_run
from deepbregman.terminal import count_words, say
from deepbregman.training.callbacks import Callback
from deepbregman.training.fabric import Fabric
from deepbregman.training.faults import explain_faults
from deepbregman.training.loggers import check_loggers
from deepbregman.training.loop import Pretraining
from deepbregman.training.notices import describe_job, describe_sharing, find_surprises, show_plan
from deepbregman.training.planning import Facts, Plan, choose_image_size, make_plan, measure_step
from deepbregman.training.processes import (
    ask_first,
    broadcast,
    gather_values,
    launch,
    run_first_then_others,
    run_in_first,
    run_together,
    start_compilers,
)
from deepbregman.training.weights import are_fetched, describe_encoder, find_weights

from .pretrain_options import AutoRequest, describe_complete, read_settings, suggest_more_epochs


class Inputs(NamedTuple):
    """Inputs of a run besides its configuration."""

    own: OwnParts
    source: Source | None = None
    """The dataset, already open."""
    images: Any = None
    callbacks: Sequence[Callback] = ()

    def open(self, config: Config) -> Source:
        """Open the dataset, in whatever form it is given."""
        source = self.source or open_data(config, own=self.images)
        if config.objective.needs_labels and config.data.skip_unreadable:
            source = without_unreadable(source)  # no other may stand in for one that has a label
        return source


def train_run(
    config: Config,
    folder: Path,
    resuming: bool,
    accelerator: str,
    console: Console | None,
    inputs: Inputs,
    request: AutoRequest | None = None,
) -> Run:
    """Train a run from its first step or its last checkpoint to its end, in every process."""
    fabric = launch(accelerator)
    warns = console is None and fabric.is_global_zero  # a program prints nothing itself
    if console is None or not fabric.is_global_zero:
        console = Console(quiet=True)
    # For what the user should look at.
    tell: Callable[[str], None] = notify if warns else partial(say, console, style="yellow")
    folder = broadcast(fabric, folder)  # a default one is named by the clock
    if not resuming and broadcast(fabric, is_run(folder)):
        config = run_together(fabric, lambda: read_settings(folder, config, request))
        words = describe_complete(Run(folder), config, is_auto=request is not None)
        if broadcast(fabric, is_complete(Run(folder))):
            say(console, words)
            return Run(folder)
        if request is not None and request.budget is not None:
            kept = count_words(config.training.epochs, "epoch")
            tell(f"the run keeps the {kept} planned when it began, whatever --budget says")
        resuming, request = True, None
    if config.training.epochs:
        start_compilers(config, fabric)
    if not resuming and are_fetched(config):
        words = "without a network, this gives up after up to a minute"
        say(console, f"fetching the weights of {config.encoder.name} if they are not here; {words}")
    source, enough = inputs.source, 0
    if request is not None:
        plan, source = _choose_settings(config, request, fabric, console, inputs)
        config, enough = plan.config, plan.enough
        show_plan(plan, console)
        if plan.warning:
            tell(plan.warning)
    start = run_first_then_others(fabric, lambda: _try_parts(config, inputs.own, resuming))
    with explain_faults(config, folder), ExitStack() as held:
        if resuming:
            run_in_first(fabric, lambda: held.enter_context(hold_folder(folder)))
        if source is None:
            with console.status(f"opening {escape(config.data.source)} ..."):
                source = run_first_then_others(fabric, lambda: inputs.open(config))
        if source.skipped_notice:
            tell(source.skipped_notice)
        number, earlier = fabric.world_size, fabric.world_size
        if resuming:  # assembling records the processes of today
            earlier = run_together(fabric, lambda: Run(folder).last_processes())
        job, num_held_out = _assemble(config, source, fabric, folder, resuming, inputs)
        sharing = describe_sharing(config, number, earlier, job.step_module)

        def begin() -> None:
            held.enter_context(hold_folder(folder))
            if enough:
                job.run.keep_enough(enough)

        if not resuming:
            run_in_first(fabric, begin)
        for note in (*job.notes, *find_surprises(config, job.num_seen)):
            tell(note)
        for words in (*describe_job(job, source, num_held_out, start, resuming), *sharing):
            say(console, words)
        build = partial(build_knn_monitor, source.train, config, fabric.device)
        # With no epochs there is nothing to monitor, and it takes minutes.
        monitor = run_in_first(fabric, build) if config.training.epochs else None
        begun = job.step
        run = job.fit(monitor, console, warns)
    met = gather_values(fabric, job.batches.skipped) if config.data.skip_unreadable else []
    if skipped := frozenset().union(*met):  # streamed, each process has met those of its share
        unreadable = count_words(len(skipped), "image")
        tell(f"{unreadable} could not be decoded; training used others instead")
    if resuming and job.step == begun:  # its checkpoint and its images have been checked again
        say(console, describe_complete(run, config))
    elif short := suggest_more_epochs(run, config):
        say(console, short)
    return run


def _assemble(
    config: Config, source: Source, fabric: Fabric, folder: Path, resuming: bool, inputs: Inputs
) -> tuple[Pretraining, int]:
    """Put together what is trained; return it, and how many images are held out."""
    kept, held_out = run_together(fabric, lambda: split_for_monitor(source.train, config))
    labels = run_together(fabric, lambda: select_labels(source, kept, config))
    images = select_images(source, kept, labelled=labels is not None)
    job = Pretraining(
        config, images, fabric, folder, resuming, inputs.own, labels, inputs.callbacks
    )
    return job, len(held_out)


def _choose_settings(
    config: Config, request: AutoRequest, fabric: Fabric, console: Console, inputs: Inputs
) -> tuple[Plan, Source]:
    """Look at the images and the machine, and choose settings; process 0 does, for all."""
    # An encoder that starts from a run has the structure of that run's.
    given = {**describe_encoder(config.encoder.weights), **request.given}
    config, on_gpu = override(config, given), fabric.device.type != "cpu"
    with console.status(f"looking at {escape(config.data.source)} ...") as status:
        find_side = partial(typical_side, config.data.source)
        if inputs.images is not None:
            find_side = partial(find_own_side, inputs.images)
        side = run_together(fabric, find_side)
        size = choose_image_size(side, on_gpu)
        sized = override(config, {size.field: given.get(size.field, size.value)})
        run_first_then_others(fabric, lambda: _try_parts(sized, inputs.own, False))
        opened = run_first_then_others(fabric, lambda: inputs.open(sized))
        kept, _ = run_together(fabric, lambda: split_for_monitor(opened.train, sized))
        images = select_images(opened, kept, labelled=sized.objective.needs_labels)
        num_classes = 0 if opened.train.labels is None else len(opened.classes or ())
        facts = Facts(
            num_images=len(images),
            side=side,
            num_classes=num_classes,
            on_gpu=on_gpu,
            processes=fabric.world_size,
            cpus=count_cpus(find_process().local_processes),
            budget=request.budget,
        )

        def measure(tried: Config, seconds: float) -> float:
            processes = fabric.world_size
            return measure_step(tried, images.frame, fabric.device, processes, inputs.own, seconds)

        status.update("measuring the speed of a few steps, to plan the length ...")
        plan = ask_first(fabric, lambda: make_plan(sized, facts, given, size, measure))
    return plan, opened


def _try_parts(config: Config, own: OwnParts, resuming: bool) -> str | None:
    """Build the encoder before images are read; return the origin of its weights, if any."""
    own.check(config)
    check_loggers(config)
    with torch.random.fork_rng(devices=[]):
        built = build_run_encoder(config, trunk=own.encoder)
        if own.objective is not None:
            own.build_objective(config, built)
    found = None if resuming else find_weights(config)
    if found is None:
        return None
    found.put_into(built)
    return found.describe(config)
