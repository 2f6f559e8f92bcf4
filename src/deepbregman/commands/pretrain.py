"""deepbregman pretrain: train an encoder on images, by a recipe."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro
from rich.console import Console
from rich.markup import escape

from deepbregman.config import (
    SECTIONS,
    Config,
    differing_fields,
    load_recipe,
    override,
    recipes,
)
from deepbregman.errors import UserError
from deepbregman.files import hold_folder
from deepbregman.launching import (
    find_process,
    must_start_processes,
    run_in_processes,
    under_srun,
    under_torchrun,
)
from deepbregman.runs import Run, is_complete, is_run, name_run_folder
from deepbregman.terminal import (
    MaybeNumber,
    MaybePath,
    MaybeText,
    count_words,
    parse_duration,
    say,
)

from .parameters import Accelerator, MaybeDevices, PythonOnly, check_dataset
from .words import (
    AUTO,
    add_tables,
    check_first_word,
    check_new_settings,
    find_given,
    name_recipe,
    suggest_longer,
)

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch import nn

    from deepbregman.data import Source
    from deepbregman.objectives import OwnParts
    from deepbregman.objectives.own import Augment, MakeObjective
    from deepbregman.training.callbacks import Callback
    from deepbregman.training.loop import Monitor, Pretraining
    from deepbregman.training.planning import Plan

LONG_ENOUGH = 0.5
"""Share of the epochs that images are worth, below which a run says how to train longer."""


def pretrain(
    recipe: str | Config,
    *,
    data: PythonOnly[Any] = None,
    run: MaybePath = None,
    budget: MaybeText = None,
    changes: PythonOnly[Mapping[str, Any] | None] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    augment: PythonOnly["Augment | Mapping[str, Augment] | None"] = None,
    objective: PythonOnly["MakeObjective | None"] = None,
    callbacks: PythonOnly["Sequence[Callback]"] = (),
    accelerator: Accelerator = "auto",
    devices: MaybeDevices = None,
    nodes: MaybeNumber = None,
    console: PythonOnly[Console | None] = None,
    source: PythonOnly["Source | None"] = None,
) -> Run:
    """Pretrain an encoder: deepbregman pretrain DATA, pretrain RECIPE [options], or --resume RUN.

    With a folder, an .npz file or a dataset instead of a recipe, the recipe auto chooses settings
    that fit the images and the machine, and prints them. Most people need --run and --budget only.
    Every other field of the recipe is an option; the defaults below are the recipe's. An option of
    a table that the recipe does not have adds the table. To continue an interrupted run:
    deepbregman pretrain --resume RUN

    Args:
        recipe: Name of a recipe, a .toml file, or a configuration.
        data: A dataset instead of the recipe's: digits, cifar10, a folder, an .npz file; or images
            of your program, as :func:`own_data` takes them: a uint8 array or tensor, with labels in
            a pair (images, labels), or a map-style dataset.
        run: Folder of the run. A new one is started; an interrupted one of the same settings is
            continued; of a complete one that is said. By default a new folder in runs/.
        budget: Time that pretraining may take, such as 30m or 2h; the recipe auto fits the length
            to it, by the speed that it measures. By default 30m on a CPU and 2h on a GPU.
        changes: Fields by their dotted names, such as {"training.epochs": 10}.
        encoder: A module of your own instead of the recipe's encoder. It maps images (N, 3, H, W),
            normalised floats, to vectors (N, d). A copy is trained, starting from its weights; your
            module does not change. To load the run, give a module of the same structure again.
        augment: Your own views instead of the recipe's: called with a uint8 batch (n, 3, H, W) on
            the device, once for each view, it returns uint8, or floats in [0, 1]. Transforms of
            torchvision.transforms.v2 are called image by image. A mapping such as {"weak_views": f}
            names the tables whose views it makes.
        objective: Your own method: a subclass of :class:`Objective` whose constructor takes an
            encoder and the settings of the heads, or a function that makes one.
        callbacks: Told of steps and epochs, see :class:`Callback`.
        accelerator: Device to train on; auto takes a GPU if there is one.
        devices: Number of processes on this machine, one for each GPU, or all. By default one, or
            as many as torchrun or srun started.
        nodes: Number of machines, each with the same number of processes. Without torchrun or srun,
            run the command on each machine and set MASTER_ADDR, MASTER_PORT and NODE_RANK.
        console: Where to print; nothing is printed when None.
        source: The dataset, already open, for a caller that trains many runs on it.

    Returns:
        The finished run; give its ``path`` to :func:`load_encoder`.
    """
    config = load_recipe(recipe) if isinstance(recipe, str) else recipe
    _check_callbacks(callbacks)
    given = dict(changes or {})
    own, images = _collect_own(encoder, augment, objective), None
    if isinstance(data, str | Path):
        given["data.source"] = str(data)
    elif data is not None:
        given["data.source"], images = "custom", data
    if own is not None:
        given = {**own.as_changes(), **given}
    config = override(config, given)
    request = _read_request(recipe, given, budget)
    name = Path(recipe).stem if isinstance(recipe, str) else "run"
    folder = name_run_folder(name) if run is None else Path(run)
    if not is_run(folder):
        Run.check_free(folder)
    if source is None and images is None:
        check_dataset(config)
    number = _count_processes(devices, accelerator)
    if must_start_processes(number, nodes):
        _start_processes(number or 1, nodes or 1, folder, ["--run", str(folder)])
    parts = Parts(own, source, images, tuple(callbacks))
    return _train(config, folder, False, accelerator, console, parts, request)


def _check_callbacks(callbacks: object) -> None:
    """Refuse callbacks that are none, without loading torch when there are no callbacks."""
    if isinstance(callbacks, list | tuple) and not callbacks:
        return
    from deepbregman.training.callbacks import Callback

    found = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in found:
        if found is not callbacks or not isinstance(callback, Callback):
            raise UserError(
                f"callbacks has {callback!r}: give a list of deepbregman.Callback objects, each of "
                "a subclass with the events that you need"
            )
        events = [name for name in dir(Callback) if name.startswith("on_")]
        for name in dir(callback):
            if name.startswith("on_") and name not in events:
                raise UserError(
                    f"{type(callback).__name__} has {name}, which nothing calls: the events are "
                    f"{', '.join(events)}"
                )


class Parts(NamedTuple):
    """What a run is given in addition to its configuration."""

    own: "OwnParts | None"
    source: "Source | None" = None
    """The dataset, already open."""
    images: Any = None
    callbacks: "Sequence[Callback]" = ()

    def open(self, config: Config) -> "Source":
        """Open the dataset, in whatever form it is given."""
        from deepbregman.data.opening import open_data

        return self.source or open_data(config, own=self.images)


def _collect_own(
    encoder: "nn.Module | None",
    augment: "Augment | Mapping[str, Augment] | None",
    objective: "MakeObjective | None",
) -> "OwnParts | None":
    """Collect the parts of the user's own; without any, torch is not loaded yet."""
    if encoder is None and augment is None and objective is None:
        return None
    from deepbregman.objectives import OwnParts

    return OwnParts(encoder, augment, objective)


class AutoRequest(NamedTuple):
    """What the user asks of the recipe ``auto``."""

    given: Mapping[str, Any]
    budget: float | None
    """Seconds."""


def _read_request(
    recipe: str | Config, given: Mapping[str, Any], budget: str | None
) -> AutoRequest | None:
    """Return the user's constraints if the recipe is ``auto``, else None."""
    if recipe != AUTO:
        if budget is not None:
            raise UserError(
                f"--budget {budget}: only the recipe auto fits its length to a time; leave the "
                "option out and set training.epochs, or pretrain with auto"
            )
        return None
    if "data.source" not in given:
        raise UserError(
            "the recipe auto needs images: name a folder, an .npz file or a dataset, such as "
            "`deepbregman pretrain my_photos`"
        )
    return AutoRequest(given, None if budget is None else parse_duration(budget, "budget"))


def resume(
    run: Annotated[Path, tyro.conf.arg(name="resume")],
    *,
    data: PythonOnly[Any] = None,
    changes: PythonOnly[Mapping[str, Any] | None] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    augment: PythonOnly["Augment | Mapping[str, Augment] | None"] = None,
    objective: PythonOnly["MakeObjective | None"] = None,
    callbacks: PythonOnly["Sequence[Callback]"] = (),
    accelerator: Accelerator = "auto",
    devices: MaybeDevices = None,
    nodes: MaybeNumber = None,
    console: PythonOnly[Console | None] = None,
    source: PythonOnly["Source | None"] = None,
) -> Run:
    """Continue an interrupted run exactly from its last checkpoint.

    Fields that say where, how often or how fast, such as --data.workers, may be given anew; all
    others stay. A run with parts of your own is continued from Python, where you give them again.

    Args:
        run: Folder of the run.
        changes: Fields to change that do not affect what is trained, such as {"data.workers": 4}.
        data: If the run trained on images of your program: the same images.
        encoder: If the run trained an encoder of your own: a module of the same structure.
        augment: If the run had views of your own: the same code.
        objective: If the run had a method of your own: the same code.
        callbacks: Told of steps and epochs, see :class:`Callback`.
        accelerator: Device to train on; auto takes a GPU if there is one.
        devices: Number of processes on this machine, or all; it may differ from before.
        nodes: Number of machines, each with the same number of processes.
        console: Where to print; nothing is printed when None.
        source: The run's dataset, already open.
    """
    _check_callbacks(callbacks)
    opened = Run.open(Path(run))
    opened.check_links()
    config, folder = override(opened.config, changes or {}), opened.path
    if isinstance(data, str | Path) or (data is not None and config.data.source != "custom"):
        raise UserError(
            f"data was given, but {folder} was trained on {config.data.source!r} and goes on with "
            "that: leave the argument out; for other images, start a new run"
        )
    if source is None and data is None:
        check_dataset(config)
    number = _count_processes(devices, accelerator)
    if must_start_processes(number, nodes):
        _start_processes(number or 1, nodes or 1, folder, [])
    own = _collect_own(encoder, augment, objective)
    parts = Parts(own, source, data, tuple(callbacks))
    return _train(config, folder, True, accelerator, console, parts)


def show(run: Run, console: Console) -> None:
    """Name the run, and what to do next."""
    say(console, f"run: {run.path}")
    first, *others = suggest_next(run)
    say(console, f"next: deepbregman {first}")
    for command in others:
        say(console, f"or:   deepbregman {command}")


def suggest_next(run: Run) -> list[str]:
    """Return commands that fit the run's data: only data with labels can be judged by them."""
    from deepbregman.data.datasets import has_labels

    try:
        labelled = has_labels(run.config.data.source)
    except UserError:  # a source that is gone, or that only the program knows
        labelled = True
    found = [f"explore {run.path} --out map.html"]
    if labelled:
        return [f"evaluate {run.path}", *found]
    return [*found, f"label {run.path} --out few.csv --sheet few.png"]


def choose(words: list[str]) -> tuple[Callable[..., Run], str, list[str]]:
    """Choose the function for a command line: resume, or pretrain with the fields of a recipe.

    Returns:
        The function, the words that the user has written for it, and the words of its options.
    """
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if "--resume" in options:
        fields = [option for option in options if option[2:].partition(".")[0] in SECTIONS]
        function = _resume_with_fields(fields, words) if fields else resume
        return function, "deepbregman pretrain", words
    words = name_recipe(words)
    if words and not words[0].startswith("-"):
        check_first_word(words[0])
    named = bool(words) and not words[0].startswith("-")
    if not named and not {"-h", "--help"} & set(words):
        raise UserError(
            "pretrain needs a recipe or images first: a folder, an .npz file, a dataset, one of "
            f"{', '.join(recipes())}, or a .toml file; for example `deepbregman pretrain my_photos`"
        )
    name = words[0] if named else AUTO
    config = add_tables(load_recipe(name), words[named:])

    @functools.wraps(pretrain)
    def with_fields(recipe: Config, run: Path | None, **rest: Any) -> Run:
        folder = run or name_run_folder(Path(name).stem)
        if name == AUTO:
            given = find_given(load_recipe(name), recipe, words)
            return pretrain(AUTO, run=folder, changes=given, **rest)
        return pretrain(recipe, run=folder, **rest)

    signature = inspect.signature(pretrain)
    first, *others = signature.parameters.values()
    first = first.replace(default=config, kind=inspect.Parameter.KEYWORD_ONLY)
    changed = signature.replace(parameters=[first, *others])
    with_fields.__signature__ = changed  # type: ignore[attr-defined]  # inspect reads it
    return with_fields, f"deepbregman pretrain {name if named else 'RECIPE'}", words[named:]


def _resume_with_fields(options: list[str], words: list[str]) -> Callable[..., Run]:
    """Make the function for a run that goes on with other fields, as far as it may change them."""
    from deepbregman.training.checkpoints import CHANGEABLE

    config = Run.open(check_new_settings(options, words, CHANGEABLE)).config

    @functools.wraps(resume)
    def with_fields(run: Path, recipe: Config, **rest: Any) -> Run:
        changed = differing_fields(Run.open(run).config, recipe)
        return resume(run, changes={name: new for name, (_, new) in changed.items()}, **rest)

    signature = inspect.signature(resume)
    fields = inspect.Parameter("recipe", inspect.Parameter.KEYWORD_ONLY, default=config)
    changed = signature.replace(parameters=[*signature.parameters.values(), fields])
    with_fields.__signature__ = changed  # type: ignore[attr-defined]  # inspect reads it
    return with_fields


def _count_processes(devices: int | str | None, accelerator: str) -> int | None:
    """Return the number of processes on this machine; None leaves it to who starts them."""
    if devices is None or isinstance(devices, int):
        return devices
    if under_torchrun() or under_srun():  # one that --devices all started, among others
        return None
    from deepbregman.training.devices import pick_devices

    return len(pick_devices(accelerator, devices))


def _start_processes(devices: int, nodes: int, folder: Path, extra: list[str]) -> None:
    # Several machines take the folder of process 0, which this one need not know.
    again = f"deepbregman pretrain --resume {folder if nodes == 1 else 'RUN'} --devices {devices}"
    run_in_processes(devices, nodes, extra, f"continue with: {again}")


def _train(
    config: Config,
    folder: Path,
    resuming: bool,
    accelerator: str,
    console: Console | None,
    parts: Parts,
    request: AutoRequest | None = None,
) -> Run:
    """Train a run from its first step or its last checkpoint to its end, in every process."""
    from deepbregman.evaluation.knn import build_knn_monitor
    from deepbregman.objectives import OwnParts
    from deepbregman.training.faults import explain_faults
    from deepbregman.training.notices import (
        describe_job,
        describe_sharing,
        find_surprises,
        show_plan,
    )
    from deepbregman.training.processes import (
        broadcast,
        gather_values,
        launch,
        run_first_then_others,
        run_together,
        start_compilers,
    )
    from deepbregman.training.weights import are_fetched

    fabric = launch(accelerator)
    if console is None or not fabric.is_global_zero:
        console = Console(quiet=True)
    folder = broadcast(fabric, folder)  # a default one is named by the clock
    if not resuming and broadcast(fabric, is_run(folder)):
        config = run_together(fabric, lambda: _read_settings(folder, config, request))
        words = _say_complete(Run(folder), config if request is not None else None)
        resuming, request = True, None
        if broadcast(fabric, is_complete(Run(folder))):
            say(console, words)
            return Run(folder)
    start_compilers(config, fabric)
    was_complete = resuming and is_complete(Run(folder))
    source = parts.source
    short = ""
    if request is not None:
        plan, source = _choose_settings(config, request, fabric, console, parts)
        config = plan.config
        show_plan(plan, console)
        is_short = config.training.epochs < LONG_ENOUGH * plan.enough
        if is_short and config.data.source != "custom":  # which no command can name
            short = f"up to {plan.enough} epochs help: {suggest_longer(folder, config)}"
    if not resuming and are_fetched(config):
        words = "without a network, this gives up after up to a minute"
        say(console, f"fetching the weights of {config.encoder.name} if they are not here; {words}")
    own = parts.own or OwnParts()
    start = run_first_then_others(fabric, lambda: _try_parts(config, own, resuming))
    with explain_faults(config, folder), ExitStack() as held:

        def hold() -> None:
            """Keep other processes out of the run's folder."""
            if fabric.is_global_zero:
                held.enter_context(hold_folder(folder))

        if resuming:
            run_together(fabric, hold)
        if source is None:
            with console.status(f"opening {escape(config.data.source)} ..."):
                source = run_first_then_others(fabric, lambda: parts.open(config))
        if source.skipped_notice:
            say(console, source.skipped_notice, "yellow")
        before = Run(folder) if resuming else None
        sharing = run_together(fabric, lambda: describe_sharing(config, fabric.world_size, before))
        job, num_held_out = _assemble(config, source, fabric, folder, resuming, parts)
        if not resuming:
            run_together(fabric, hold)
        for note in (*job.notes, *find_surprises(config)):
            say(console, note, "yellow")
        for words in (*describe_job(job, source, num_held_out, start, resuming), *sharing):
            say(console, words)

        def build_monitor() -> "Monitor | None":
            if not fabric.is_global_zero:  # process 0 measures for all
                return None
            return build_knn_monitor(source.train, config, fabric.device)

        run = job.fit(run_together(fabric, build_monitor), console)
    met = gather_values(fabric, job.batches.skipped) if config.data.skip_unreadable else []
    if skipped := frozenset().union(*met):  # streamed, each process has met those of its share
        words = f"{len(skipped)} images could not be decoded and were replaced by others"
        say(console, words, "yellow")
    if short:
        say(console, short)
    if was_complete:  # its checkpoint and its images have been checked again
        say(console, _say_complete(run, None))
    return run


def _say_complete(run: Run, auto: Config | None) -> str:
    """Say that a run is complete, and how to train longer; see :func:`suggest_longer`."""
    done = count_words(run.result().get("pretrain", {}).get("epoch", 0), "epoch")
    longer = f"to train longer from its weights: {suggest_longer(run.path, auto)}"
    return f"run {run.path} is complete: {done} trained; {longer}"


def _assemble(
    config: Config,
    source: "Source",
    fabric: "Fabric",
    folder: Path,
    resuming: bool,
    parts: Parts,
) -> tuple["Pretraining", int]:
    """Put together what is trained; return it, and how many images are held out."""
    from deepbregman.data.opening import (
        select_images,
        select_labels,
        split_for_monitor,
    )
    from deepbregman.objectives import OwnParts
    from deepbregman.training.loop import Pretraining
    from deepbregman.training.processes import run_together

    kept, held_out = run_together(fabric, lambda: split_for_monitor(source.train, config))
    labels = run_together(fabric, lambda: select_labels(source, kept, config))
    images = select_images(source, kept, labelled=labels is not None)
    own = parts.own or OwnParts()
    job = Pretraining(config, images, fabric, folder, resuming, own, labels, parts.callbacks)
    return job, len(held_out)


def _choose_settings(
    config: Config,
    request: AutoRequest,
    fabric: "Fabric",
    console: Console,
    parts: Parts,
) -> tuple["Plan", "Source"]:
    """Look at the images and the machine, and choose settings; process 0 does, for all."""
    from deepbregman.data import typical_side
    from deepbregman.data.memory import count_cpus
    from deepbregman.data.opening import select_images, split_for_monitor
    from deepbregman.data.own import find_own_side
    from deepbregman.objectives import OwnParts
    from deepbregman.training.planning import Facts, choose_image_size, make_plan, measure_step
    from deepbregman.training.processes import broadcast, run_first_then_others, run_together
    from deepbregman.training.weights import describe_encoder

    # An encoder that starts from a run has the structure of that run's.
    given = {**describe_encoder(config.encoder.weights), **request.given}
    config, on_gpu = override(config, given), fabric.device.type != "cpu"
    with console.status(f"looking at {escape(config.data.source)} ..."):
        side = run_together(
            fabric,
            lambda: (
                typical_side(config.data.source)
                if parts.images is None
                else find_own_side(parts.images)
            ),
        )
        size = choose_image_size(side, on_gpu)
        sized = override(config, {size.field: given.get(size.field, size.value)})
        opened = run_first_then_others(fabric, lambda: parts.open(sized))
        kept, _ = run_together(fabric, lambda: split_for_monitor(opened.train, sized))
        images = select_images(opened, kept, labelled=sized.objective.needs_labels)
        labels = opened.train.labels
        facts = Facts(
            len(images),
            side,
            len(opened.classes or ()) if labels is not None else 0,
            on_gpu,
            fabric.world_size,
            count_cpus(find_process().local_processes),
            request.budget,
        )

        def measure(tried: Config, seconds: float) -> float:
            own, processes = parts.own or OwnParts(), fabric.world_size
            return measure_step(tried, images.frame, fabric.device, processes, own, seconds)

        def choose() -> "Plan | None":
            return make_plan(sized, facts, given, size, measure) if fabric.is_global_zero else None

        plan = broadcast(fabric, run_together(fabric, choose))
    assert plan is not None  # process 0 made one
    return plan, opened


def _read_settings(folder: Path, config: Config, request: AutoRequest | None) -> Config:
    """Return the settings that a run that is there goes on with; refuse what it must not change.

    Of ``auto``, only what the user has given counts: the rest was chosen when the run began.
    """
    from deepbregman.training.checkpoints import CHANGEABLE

    opened = Run.open(folder)
    opened.check_links()
    there = opened.config
    differing = differing_fields(there, config)
    if request is not None:
        differing = {field: pair for field, pair in differing.items() if field in request.given}
    changed = {field: pair[1] for field, pair in differing.items() if field in CHANGEABLE}
    words = [
        f"{field} is {a!r} there and {b!r} here"
        for field, (a, b) in differing.items()
        if field not in changed
    ]
    if words:
        raise UserError(
            f"run folder {folder} exists with other settings: {'; '.join(words[:3])}; continue it "
            f"as it is with --resume {folder}, or name another folder with --run, with "
            f"--encoder.weights {folder} to start from its weights"
        )
    return override(there, changed)


def _try_parts(config: Config, own: "OwnParts", resuming: bool) -> str | None:
    """Build the encoder once, so that an error comes before the images are read.

    Returns:
        The origin of the weights that it starts from; None of random ones, and of a run that goes
        on.
    """
    import torch

    from deepbregman.objectives import build_run_encoder
    from deepbregman.training.loggers import check_loggers
    from deepbregman.training.weights import find_weights

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
    return found.origin
