"""The pretraining loop: from images to a trained encoder."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from rich.console import Console
from torch import Tensor

from deepbregman.config import Config, to_toml
from deepbregman.data import Batch, FileImages, Images, channel_statistics, fingerprint
from deepbregman.data.batches import cut_orders
from deepbregman.data.opening import batch_images
from deepbregman.errors import ReportedElsewhere, notify
from deepbregman.files import now
from deepbregman.method.networks import Model
from deepbregman.objectives import (
    OwnParts,
    OwnViews,
    Samples,
    Step,
    StepOutputs,
    build_step,
    gather_alone,
)
from deepbregman.runs import SATURATED, Record, Run, collect_provenance
from deepbregman.terminal import count_words, say

from . import checkpoints, diagnostics
from .callbacks import Callback, collect_metrics
from .checkpoints import FoundCheckpoint
from .devices import device_name, is_mixed, measure_peak_memory, reset_peak_memory
from .display import Display, closing_events, open_events, write_events
from .fabric import Fabric
from .faults import Guard, Interrupted, StoppedAtOnce, format_resume_command, watch_signals
from .health import Health, judge, should_stop
from .loggers import Loggers
from .optimisers import build_optimiser, set_learning_rates
from .processes import (
    Vote,
    ask_first,
    compile_step,
    gather_views,
    run_in_first,
    run_together,
    synchronise_norms,
)
from .randomness import BatchShare, count_steps
from .weights import find_weights

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Monitor = Callable[[Model], dict[str, float]]
"""Evaluates the networks between epochs; its values are added to the metrics."""


class Pretraining:
    """A run in progress: its networks, its position and its folder.

    Args:
        folder: of the run; new, or an interrupted run's when resuming.
        labels: (N,) of the images, where the method learns from labels.
    """

    def __init__(
        self,
        config: Config,
        images: Images,
        fabric: Fabric,
        folder: Path,
        resume: bool = False,
        own: OwnParts = OwnParts(),  # noqa: B008  # immutable
        labels: Tensor | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.fabric, self.run = config, fabric, Run(folder)
        self.labels = None if labels is None else labels.to(fabric.device)
        self.num_classes = 0 if labels is None else int(labels.max()) + 1
        self.own, self.callbacks = own, callbacks
        self.loggers: Loggers | None = None
        self.events: SummaryWriter | None = None
        optimiser, found = run_together(fabric, partial(self._assemble, images, resume))
        self.is_restored = found is not None
        self.notes: list[str] = [] if found is None else found.notes
        self.changes: checkpoints.Changes = {} if found is None else found.changes
        self.wrapped_step, self.optimiser = fabric.setup(self.step_module, optimiser)
        # A GPU finishes a small step before the host has launched it. So a run of one process does
        # without the wrapper, which looks through all inputs and outputs.
        self.called_step = self.step_module if fabric.world_size == 1 else self.wrapped_step
        # The loss of a step is the mean of the totals of its batches.
        self.gradient_of_total = torch.tensor(
            1.0 / config.training.accumulate, device=fabric.device
        )
        self.term_names = ("total", *self.step_module.weights)
        self.guard = Guard(self.step_module, self.term_names, optimiser, fabric, config)
        self.step = self.saved_step = 0
        self.sums = torch.zeros(len(self.term_names), device=fabric.device)  # in this epoch
        self.peak: dict[str, float] = {}  # peak memory since this process began
        self.seconds_before = 0.0
        self.started = self.last_saved = time.monotonic()
        self.vote = Vote(fabric)
        run_together(fabric, partial(self._open_folder, resume, found))

    def _assemble(
        self, images: Images, resume: bool
    ) -> tuple[torch.optim.Optimizer, FoundCheckpoint | None]:
        """Build what is trained, and read where an interrupted run stood."""
        config, fabric = self.config, self.fabric
        several = fabric.world_size > 1
        self.steps_per_epoch = count_steps(config, len(images), fabric.world_size)
        shards = images.shards if isinstance(images, FileImages) else None
        rank, world_size = fabric.global_rank, fabric.world_size
        self.share = BatchShare(config, len(images), fabric.device, rank, world_size, shards)
        self.data_fingerprint = fingerprint(images)
        there = Run.open(self.run.path) if resume else None
        found = None if there is None else checkpoints.find_checkpoint(there)
        if found is not None:
            data = self.data_fingerprint
            found = checkpoints.check_resumable(found, config, len(images), data)
        elif there is not None:  # it was killed before it saved
            checkpoints.check_settings(there.config, config, 0.0, str(there.path))
        start = find_weights(config) if found is None else None
        self.start_record: Record = {}
        self.batches = batch_images(images, config, fabric.device, may_replace=True)
        pixels = channel_statistics(images, skip_unreadable=config.data.skip_unreadable)
        self.step_module: Step = build_step(
            config,
            *pixels,
            gather=gather_views if several else gather_alone,
            mixed=is_mixed(config, fabric.device),
            own=self.own,
            num_images=len(images),
            num_classes=self.num_classes,
            prepare=None if start is None else start.put_into,
        )
        diagnostics.check_names(self.step_module)
        if start is not None:
            digest = checkpoints.fingerprint_weights(self.step_module.objective.encoder.trunk)
            self.start_record = {"weights": {**start.record, "sha256": digest}}
        if several and config.training.sync_norm:
            synchronise_norms(self.step_module.objective, fabric.device)
            if self.step_module.teacher is not None:
                synchronise_norms(self.step_module.teacher, fabric.device)
        self.step_module.to(memory_format=torch.channels_last)
        self.step_module.to(fabric.device)
        self._try_own_views()
        self.health: Health | None = None
        if config.training.health_every and fabric.is_global_zero:  # process 0 measures for all
            self.health = Health(images, config, self.step_module.views.main, fabric.device)
        optimiser = build_optimiser(
            config.optimiser, self.step_module.parameter_groups(), fabric.device
        )
        self._is_compiling = compile_step(self.step_module, config, fabric)
        return optimiser, found

    def _try_own_views(self) -> None:
        """Make views of two images by the user's code, so that an error comes before the run."""
        for views in self.step_module.views:
            if isinstance(views, OwnViews):
                views.to(self.fabric.device)
                batch = next(self.batches.iterate(torch.arange(2), self.share.batch_size))
                views(batch.images, batch.sizes)

    def _open_folder(self, resume: bool, found: FoundCheckpoint | None) -> None:
        if self.fabric.is_global_zero:
            record = collect_provenance(device_name(self.fabric.device))
            record |= {"processes": self.fabric.world_size, **self.start_record}
            if own := self.own.describe():
                record["own"] = own
            if resume:
                self.run.checkpoints.mkdir(exist_ok=True)  # a study removes it from finished runs
                self.run.clear_temporaries()
                self.run.add_resumption({**record, **(found.record if found else {})})
                self.run.keep_config(self.config)
            else:
                Run.create(self.run.path, self.config, record)
        if found is not None:
            self.restore(found)
        if resume and self.fabric.is_global_zero:
            if found is not None and found.origin == str(self.run.previous_checkpoint):
                checkpoints.replace_last_by_previous(self.run)
            self.run.truncate_metrics(self.step // self.steps_per_epoch)

    def fit(
        self, monitor: Monitor | None = None, console: Console | None = None, warns: bool = False
    ) -> Run:
        """Train to the end, or until training is saturated if the run is to stop then.

        Args:
            warns: tell what the user should look at by a :class:`Notice`, not on the console.
        """
        settings = self.config.training
        self.events = run_in_first(self.fabric, self._open_events)
        console = console or Console(quiet=True)
        display = Display(
            console,
            epochs=settings.epochs,
            steps_per_epoch=self.steps_per_epoch,
            report_every=settings.knn_every,
            weights=self.step_module.weights,
            tell=notify if warns else None,
        )
        record: Record = {}
        feed = self.feed(*divmod(self.step, self.steps_per_epoch))
        announces = self.fabric.is_global_zero and not console.quiet
        ends = self._is_over()
        # Metrics that are lost are told wherever nothing is printed.
        if self.fabric.is_global_zero:  # it writes for all
            tell = notify if console.quiet else display.warn
            self.loggers = Loggers(self.run, self.config, tell)
        again = format_resume_command(self.config, self.run.path) if announces else ""
        signals = watch_signals(again, lambda: self._is_compiling)
        events, loggers = closing_events(self.events), self.loggers or nullcontext()
        with display, events, loggers, self._leave_if_compiling(), signals as received:
            where = self.run, self.step, self.total_steps
            run_in_first(self.fabric, partial(self._call_callbacks, "on_start", *where))
            if self.total_steps == 0 and not self.is_restored:
                record = {"epoch": 0, "step": 0}
                close = partial(self._close_epoch, record, monitor, display)
                run_in_first(self.fabric, close)
            if not (ends or self._is_compiling) and self.fabric.device.type == "cpu":
                # So that the first step, which may take minutes, counts.
                display.show_step(self.step)
            while not ends:
                record = self._run_epoch(feed, display, received)
                close = partial(self._close_epoch, record, monitor, display)
                run_in_first(self.fabric, close)
                ends = self._is_over()
                self.vote.cast(received)
                self.vote.close()
                if self.vote.outcome and not ends:
                    self._save_and_leave(self.vote.outcome)
        if self.fabric.is_global_zero:
            self._write_result(record, console)
            self._call_callbacks("on_end", self.run)
        if self.vote.outcome:  # a study must not go on with its other runs
            self._leave(self.vote.outcome, "the run is complete")
        return self.run

    def _open_events(self) -> "SummaryWriter | None":
        """Open the TensorBoard events where they are wanted; in process 0 only."""
        settings = self.config.training
        is_wanted = settings.tensorboard or "tensorboard" in settings.logger
        return open_events(self.run, self.step) if is_wanted else None

    def _write_result(self, last: Record, console: Console) -> None:
        """Write what pretraining ended with, unless it is written already.

        Args:
            last: metrics of the last epoch; empty if it was trained before this process began.
        """
        known = self.run.result().get("pretrain") or {}
        if not last and known.get("step") == self.step:
            return
        if not last:  # killed after the last save
            counts = {"epoch": self.step // self.steps_per_epoch, "step": self.step}
            rows = self.run.metrics()  # perhaps without the last, if somebody removed it
            last = next((row for row in rows if row.get("step") == self.step), counts)
        early = self.step < self.total_steps
        why = last.get("stopped", SATURATED)
        stopped = {"stopped": f"after epoch {last['epoch']}: {why}"} if early else {}
        self.run.add_result(
            pretrain={**last, **stopped, "seconds": self.seconds(), "finished": now()}
        )
        if early:
            why = last.get("stopped") or last["reason"]
            epochs = self.config.training.epochs
            say(console, f"stopped after epoch {last['epoch']} of {epochs}: {why}")

    def _call_callbacks(self, event: str, *details: object) -> None:
        """Call the method of this name of every callback, in process 0 only."""
        for callback in self.callbacks:
            getattr(callback, event)(*details)

    def _is_over(self) -> bool:
        """Whether all steps are taken, or the run stops early, which process 0 decides."""
        if self.step >= self.total_steps:
            return True
        may_stop = self.config.training.stop_when_saturated
        # A callback may have ended the run, also before this process resumed it.
        if not (may_stop or self.callbacks or self.is_restored):
            return False

        def stops() -> bool:
            records = self.run.metrics()
            if not records or records[-1].get("step") != self.step:
                return False
            return "stopped" in records[-1] or (may_stop and should_stop(records))

        return ask_first(self.fabric, stops)

    def advance(self, feed: Iterator[Batch]) -> StepOutputs:
        """Take one optimiser step on the next batches; nothing here waits for the device."""
        accumulate = self.config.training.accumulate
        set_learning_rates(self.config, self.step, self.steps_per_epoch, self.optimiser)
        self.step_module.follow_schedule(self.step, self.steps_per_epoch)
        self.guard.keep_buffers()
        losses = torch.zeros_like(self.sums)
        for part in range(accumulate):
            batch = next(feed)
            draw = self.step * accumulate + part
            uniforms = self.share.draw_uniforms(self.step_module.views, draw)
            samples = self._collect_samples(batch, draw)
            self.share.seed_dropout(draw)
            more = part < accumulate - 1
            with self.fabric.no_backward_sync(self.wrapped_step, enabled=more):
                outputs: StepOutputs = self.called_step(
                    batch.images, batch.sizes, uniforms, samples
                )
                torch.autograd.backward(outputs.total, self.gradient_of_total)
            losses.add_(outputs.losses, alpha=1.0 / accumulate)
        if not self.guard.should_skip(losses, self.step):
            self.sums += losses
            self.optimiser.step()
            self.step_module.after_step((self.step + 1) / self.total_steps)
        self.optimiser.zero_grad()
        self.guard.count(self.sums)
        self.step += 1
        self._is_compiling = False
        for callback in self.callbacks:
            callback.on_step(self.step, dict(zip(self.term_names, losses.unbind(), strict=True)))
        return outputs

    def _collect_samples(self, batch: Batch, draw: int) -> Samples:
        """Collect what the method needs of the images in addition to views."""
        labels = None
        if self.labels is not None and batch.indices is not None:
            labels = self.labels.index_select(0, batch.indices)
        indices = batch.indices if self.config.objective.needs_indices else None
        random = self.share.draw_for(self.step_module.objective, draw)
        return Samples(indices, labels, random, self.share.rank * self.share.batch_size)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.config.training.epochs * self.steps_per_epoch

    @property
    def num_seen(self) -> int:
        """Images that the whole run trains on, those of every epoch counted."""
        settings = self.config.training
        return self.total_steps * settings.batch_size * settings.accumulate

    def _run_epoch(self, feed: Iterator[Batch], display: Display, received: list[int]) -> Record:
        """Train until the end of the epoch; until then the host never waits for the device."""
        settings = self.config.training
        epoch, offset = divmod(self.step, self.steps_per_epoch)
        self.step_module.train()
        self.guard.start_counting(self.step)
        reset_peak_memory(self.fabric.device)
        started = time.monotonic()
        outputs: StepOutputs | None = None
        for _ in range(offset, self.steps_per_epoch):
            outputs = self.advance(feed)
            display.show_step(self.step)
            self.vote.cast(received)
            if self.vote.outcome and self.step % self.steps_per_epoch:  # within the epoch
                self._save_and_leave(self.vote.outcome)
        assert outputs is not None  # an epoch has at least one step
        if self.fabric.world_size > 1:
            outputs = outputs._replace(representation=gather_views(outputs.representation))
        run_together(self.fabric, partial(self.guard.check, self.step))
        counted = self.guard.end_epoch(self.steps_per_epoch)
        means = (self.sums / counted).tolist()
        self.sums.zero_()
        seconds = time.monotonic() - started
        # Of the steps, without the diagnostics. With CUDA graphs only the first epoch allocates.
        found = measure_peak_memory(self.fabric.device)
        self.peak = {name: max(value, self.peak.get(name, 0.0)) for name, value in found.items()}
        images = (self.steps_per_epoch - offset) * settings.accumulate * settings.batch_size
        views = images * sum(group.num_views for group in self.config.view_groups.values())
        diagnose = partial(diagnostics.diagnose, self.step_module, outputs)
        return {
            "epoch": epoch + 1,
            "step": self.step,
            **dict(zip(self.term_names, means, strict=True)),
            "learning_rate": self.optimiser.param_groups[0]["lr"],
            **({} if self.guard.skipped_last else run_together(self.fabric, diagnose)),
            **({"skipped": self.steps_per_epoch - counted} if settings.skip_nonfinite else {}),
            "images_per_second": images / seconds,
            "views_per_second": views / seconds,
            **self.peak,
        }

    def _save_and_leave(self, number: int) -> NoReturn:
        """Save the run, unless it is saved already, and end it because of a signal."""
        run_together(self.fabric, partial(self.save, "last.pt", again=False))
        self._leave(number)

    def _leave(self, number: int, advice: str | None = None) -> NoReturn:
        """End the run because of a signal; process 0 says how to continue, or gives the advice."""
        if self.fabric.is_global_zero:
            again = f"continue with: {format_resume_command(self.config, self.run.path)}"
            raise Interrupted(number, advice or again)
        raise ReportedElsewhere(128 + number)

    @contextmanager
    def _leave_if_compiling(self) -> Iterator[None]:
        """Leave without a step when a signal comes before the first one is compiled.

        Compiling takes up to a minute. A signal to all processes of a job also ends those that
        compile for this one, and it would wait for them: with some versions of torch, for ever.
        """
        try:
            yield
        except StoppedAtOnce as stopped:
            self._leave(stopped.signal_number)

    def feed(self, epoch: int, offset: int) -> Iterator[Batch]:
        """Iterate over this process's share of the batches, from a step on to the end of training.

        There is one iterator for all epochs, so that streaming does not restart at each of them.
        """

        def orders() -> Iterator[Tensor]:
            for later in range(epoch, self.config.training.epochs):
                yield self.share.order(later, offset if later == epoch else 0)

        size, method = self.share.batch_size, self.config.objective
        batches = self.batches.chain(orders(), size)
        if not (method.needs_indices or method.needs_labels):
            return batches
        places = cut_orders(orders(), size, self.fabric.device)
        return (
            batch._replace(indices=indices) for batch, indices in zip(batches, places, strict=True)
        )

    def _warnings(self, record: Record) -> list[str]:
        words = []
        if record.get("skipped"):
            skipped = count_words(record["skipped"], "batch")
            words.append(f"skipped {skipped} of non-finite loss or gradient")
        if "effective_rank" in record:  # absent if the batch was skipped
            samples = self.config.training.batch_size * self.config.views.num_views
            words += diagnostics.find_collapse(record)
            words += self.step_module.warn(record, samples)
        return words

    def _close_epoch(self, record: Record, monitor: Monitor | None, display: Display) -> None:
        """Evaluate the networks, then write and show the epoch's metrics; in process 0 only."""
        settings, epoch = self.config.training, record["epoch"]
        ends = epoch == settings.epochs
        self.step_module.eval()
        model = self.step_module.model.eval()
        if self.health is not None and epoch and (ends or epoch % settings.health_every == 0):
            record |= self.health.measure(model.encoder)
            earlier = self.run.metrics()
            record |= judge([*earlier, record])
            ends = ends or (settings.stop_when_saturated and should_stop([*earlier, record]))
        due = settings.knn_every and epoch % settings.knn_every == 0
        if monitor is not None and (ends or due):
            record |= monitor(model)
        if self.callbacks:
            with torch.no_grad():
                record |= collect_metrics(self.callbacks, record, model)
                wishes = [callback.stop for callback in self.callbacks if callback.stop]
                if wishes and not ends:
                    ends, record["stopped"] = True, wishes[0]
                    if monitor is not None and not due:
                        record |= monitor(model)
        self._write_epoch(record, ends)
        display.show_epoch(record)
        if "verdict" in record:
            display.show_verdict(record)
        display.warn_of_epoch(epoch, self._warnings(record))

    def _write_epoch(self, record: Record, is_last: bool) -> None:
        """Write an epoch's metrics and, where due, checkpoints.

        The checkpoint is written last. A run that is killed here resumes after the steps that the
        checkpoint counts, so their metrics must be on disk already.
        """
        settings = self.config.training
        self.run.append_metrics(record)
        if self.events is not None:
            write_events(self.events, record)
        if self.loggers is not None:
            self.loggers.write(record)
        if settings.checkpoint_every and record["epoch"] % settings.checkpoint_every == 0:
            self.save(f"epoch-{record['epoch']:04d}.pt")
        if is_last or time.monotonic() - self.last_saved >= settings.save_seconds:
            self.save("last.pt")
            self.last_saved = time.monotonic()

    def seconds(self) -> float:
        """Return how long the run has trained, before it was resumed included."""
        return self.seconds_before + time.monotonic() - self.started

    def save(self, name: str, again: bool = True) -> None:
        """Write a checkpoint, unless the run has diverged; every process must call this.

        Args:
            again: write even if the last checkpoint is of the same step.
        """
        if not self.fabric.is_global_zero or (not again and self.step == self.saved_step):
            return
        self.guard.check(self.step)
        is_last = name == "last.pt"
        keep = self.run.previous_checkpoint if is_last else None
        checkpoints.save(self.run.checkpoints / name, self.take_snapshot(), keep)
        self.saved_step = self.step if is_last else self.saved_step

    def take_snapshot(self) -> checkpoints.State:
        """Collect what the run needs to continue to the bit; randomness follows from the step."""
        return {
            **checkpoints.collect_networks(self.step_module),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "num_images": self.batches.num_images,
            "num_classes": self.num_classes,
            "data": self.data_fingerprint,
            "config": to_toml(self.config),
            "sums": dict(zip(self.term_names, self.sums.unbind(), strict=True)),
            "seconds": self.seconds(),
            "skipped": self.guard.skipped,
            "skipped_in_epoch": self.guard.skipped_in_epoch,
            "neighbours": None if self.health is None else self.health.neighbours,
        }

    def restore(self, found: FoundCheckpoint) -> None:
        """Return to where the run was saved."""
        saved = found.state
        checkpoints.load_networks(self.step_module, saved, found.origin)
        self.optimiser.load_state_dict(saved["optimiser"])
        self.step = self.saved_step = saved["step"]
        self.sums.copy_(torch.stack([saved["sums"][name] for name in self.term_names]))
        self.seconds_before = saved["seconds"]
        self.guard.start_counting(self.step)
        self.guard.skipped = saved["skipped"]
        self.guard.skipped_in_epoch = saved["skipped_in_epoch"]
        if self.health is not None:
            self.health.neighbours = saved["neighbours"] or []
