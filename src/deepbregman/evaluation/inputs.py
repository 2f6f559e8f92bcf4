"""The inputs of an evaluation: a run's networks, a dataset, and options."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from deepbregman.config import Config, override
from deepbregman.data import Source, fingerprint, without_unreadable
from deepbregman.data.datasets import DATASETS, expand_home, lack_of_labels
from deepbregman.data.folders import Listing, list_folder, quote_some
from deepbregman.data.images import FileImages, group_identical
from deepbregman.data.opening import open_data, select_images, split_for_monitor
from deepbregman.data.voc import Voc, open_voc
from deepbregman.errors import Notice, UserError, notify
from deepbregman.files import now, refuse_link
from deepbregman.method.networks import Model
from deepbregman.runs import Record, Run
from deepbregman.terminal import ReportProgress, ignore_progress, say
from deepbregman.training.checkpoints import load_trained
from deepbregman.training.devices import device_name, pick_devices

from .feature_cache import FeatureCache
from .features import LabelledFeatures
from .finished import FinishedParts
from .options import Options
from .results import pack, record_predictions, record_rows, take_predictions

_MOST_COMPARED = 100_000  # files; to look at more would take long


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run's networks, frozen, and how far they are trained."""

    run: Run
    model: Model
    config: Config
    epoch: float
    device: torch.device
    data_fingerprint: str | None = None
    """Fingerprint of the images of pretraining, if it is known."""
    other_devices: tuple[torch.device, ...] = ()
    """Further devices that share the images when features are computed."""

    @cached_property
    def cache(self) -> FeatureCache | None:
        """The cache of features beside the run; None for the user's own encoder."""
        if self.config.encoder.name == "custom":
            return None
        size = self.config.data.image_size
        return FeatureCache.of(self.run.path, self.model, size, self.device)

    def has_data_changed(self, source: Source) -> bool | None:
        """Whether the run's dataset has changed since pretraining, with a note; None if unknown."""
        if self.data_fingerprint is None:
            return None
        kept, _ = split_for_monitor(source.train, self.config)
        changed = (
            fingerprint(select_images(source, kept, self.config.objective.needs_labels))
            != self.data_fingerprint
        )
        if changed:
            notify(
                f"data {self.config.data.source!r} has changed since {self.run.path} was "
                "pretrained: names, sizes or contents of its images differ; to train on them as "
                f"they are now, start a new run with --encoder.weights {self.run.path}",
            )
        return changed

    def name_data(self, data: str | None, source: Source | None) -> str:
        """Name a dataset: as the user does, as the open ``source`` does, or as the run's own."""
        return data or (self.config.data.source if source is None else source.name)

    def open_images(
        self,
        data: str | None,
        source: Source | None,
        progress: ReportProgress,
        listing: Listing | None = None,
    ) -> tuple[Source, bool | None]:
        """Open the run's dataset or another one, and say whether the run's own has changed.

        Where it is asked for, images that cannot be read are left out. Training would put another
        image in their place, which would here get their label or name. ``source`` is the dataset,
        if it is open, and ``listing`` its files, if they are listed.
        """
        opened = source or open_data(self.config, data, listing=listing)
        changed = self.has_data_changed(opened) if data is None and source is None else None
        if self.config.data.skip_unreadable:
            opened = without_unreadable(opened, partial(progress, "looking for unreadable images"))
        return opened, changed


def load_run(
    run: Run | Path | str,
    accelerator: str = "auto",
    encoder: nn.Module | None = None,
    *,
    devices: int | str = 1,
    skip_unreadable: bool = False,
) -> LoadedRun:
    """Load a run's networks from its last checkpoint, in evaluation mode."""
    run = Run.open(run)
    device, *other_devices = pick_devices(accelerator, devices)
    model, config, epoch, data_fingerprint = load_trained(run, device, encoder)
    if skip_unreadable:
        config = override(config, {"data.skip_unreadable": True})
    return LoadedRun(run, model, config, epoch, device, data_fingerprint, tuple(other_devices))


def open_labelled(config: Config, data: str | None = None) -> Source:
    """Open the dataset of an evaluation, and check that it has labels."""
    return require_labelled(open_data(config, data), data or config.data.source)


def require_labelled(source: Source, name: str) -> Source:
    """Return a dataset that has labels in both splits, and no class in the test split only."""
    if source.train.labels is None or source.test is None or source.test.labels is None:
        raise lack_of_labels(name)
    if len(source.test) == 0:  # of a folder whose classes have one image each, none is set aside
        raise UserError(
            f"data {name!r} has no test image: give 2 or more images of some class, or folders "
            "train and test"
        )
    unknown = sorted(set(source.test.labels.tolist()) - set(source.train.labels.tolist()))
    if unknown:
        names = quote_some(map(source.class_name, unknown))
        raise UserError(
            f"data {name!r}: no training image has the class {names}, which the test split has "
            f"({len(unknown)} such classes); both splits need the same classes"
        )
    return source


def _warn_of_training(run: Run, trained_on: str, source: Source, name: str) -> None:
    """Tell of test images that are files of the folder without labels that a run trained on."""
    images, folder = source.known_test.images, expand_home(Path(trained_on))
    if trained_on in DATASETS or not isinstance(images, FileImages) or not folder.is_dir():
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Notice)  # they were told when it was trained
            files = list_folder(folder).train
        if files.labels is not None or len(files.paths) + len(images) > _MOST_COMPARED:
            return
        groups = group_identical(images, FileImages(tuple(files.paths), images.side))
    except (OSError, UserError):  # it holds shards, or has changed since: no reason to stop
        return
    found = sum(
        place < len(images) for group in groups if group[-1] >= len(images) for place in group
    )
    if found:
        notify(
            f"{found:,} of the {len(images):,} test images of {name!r} are among those that "
            f"{run.path} was trained on, without labels; for a strict test, set images aside "
            "before pretraining",
        )


@dataclass(eq=False)
class Evaluation:
    """A run to evaluate, the options, and what protocols share, computed when first used."""

    run: Run
    options: Options
    accelerator: str = "auto"
    source: Source | None = None
    """The dataset, if it is open already."""
    encoder: nn.Module | None = None
    """A module of the run's structure, if the run trained an encoder of the user's own."""
    listing: Listing | None = None
    """The files of the dataset, if they are listed already."""
    console: Console = field(default_factory=lambda: Console(quiet=True))
    progress: ReportProgress = ignore_progress
    devices: int | str = 1
    """How many compute features, or ``all``."""
    with_references: bool = True
    """Also measure what needs no run: raw pixels, guessing, and in transfer random weights. Studies
    do not, or only once: their runs share one dataset."""
    _data_changed: bool | None = field(default=None, init=False)
    """Whether the run's own dataset has changed since pretraining."""

    @cached_property
    def can_record(self) -> bool:
        """Whether the run's folder can be written to; if not, print a note.

        A link in place of the lock of its records is an error, before the work begins.
        """
        path = self.run.path
        refuse_link(path / ".records.lock")
        if not os.access(path, os.W_OK):
            words = f"{path} cannot be written to: results are printed, not recorded"
            notify(words)
            return False
        return True

    @cached_property
    def loaded(self) -> LoadedRun:
        """The run's networks."""
        return load_run(
            self.run,
            self.accelerator,
            self.encoder,
            devices=self.devices,
            skip_unreadable=self.options.skip_unreadable,
        )

    @property
    def data(self) -> str:
        """The name of the dataset."""
        return self.loaded.name_data(self.options.data, self.source)

    @cached_property
    def finished(self) -> FinishedParts:
        """The parts that were measured before an evaluation was stopped."""
        return FinishedParts(self.run, self.say, self.can_record)

    @cached_property
    def voc(self) -> Voc:
        """The boxes for detection: of a devkit, or ``voc`` in the run's data.root."""
        data = self.options.data
        assert data is not None  # check_detect has made sure
        return open_voc(self.loaded.config.data.root if data == "voc" else data)

    @cached_property
    def labelled(self) -> LabelledFeatures:
        """The networks with the labelled dataset of the evaluation."""
        loaded, data = self.loaded, self.options.data
        source, self._data_changed = loaded.open_images(
            data, self.source, self.progress, self.listing
        )
        name = self.data
        if loaded.config.data.skip_unreadable and source.skipped_notice:
            self.say(f"{source.skipped_notice} of {name}")
        source = require_labelled(source, name)
        tested = torch.unique(source.known_test.known_labels).tolist()
        if len(tested) == 1:
            notify(
                f"every test image of {name!r} has the class {source.class_name(tested[0])!r}: "
                "a classifier that always answers so is right, and the accuracies mean little",
            )
        if data is not None and self.source is None:
            _warn_of_training(self.run, loaded.config.data.source, source, name)
        balanced = self.options.balanced or source.has_unequal_classes
        return LabelledFeatures(
            loaded.model, loaded.config, source, loaded.device, balanced, loaded.other_devices
        )

    def record(self, rows: Sequence[Record], protocol: str) -> list[Record]:
        """Complete the rows of a protocol, and write them into the run's result if possible."""
        loaded = self.loaded
        shared = {
            "data_changed": self._data_changed,
            "seed": self.options.seed,
            "epoch": loaded.epoch,
            "epochs": loaded.config.training.epochs,
            "device": device_name(loaded.device),
            "finished": now(),
        }
        names = {"protocol": protocol, "data": self.data}
        complete = [{**names, **row, **shared} for row in rows]
        predicted = take_predictions(complete)
        if self.can_record:
            record_rows(self.run, complete)
            if predicted:
                labels = pack(self.labelled.test.labels)
                classes = self.labelled.source.classes
                record_predictions(self.run, predicted, labels, classes, loaded.epoch)
            self.finished.forget()
            self.say(f"{protocol}: done, kept in {self.run.path / 'result.json'}")
        return complete

    def say(self, words: str) -> None:
        """Print a plain line."""
        say(self.console, words)
