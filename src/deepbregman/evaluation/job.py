"""What a protocol is handed."""

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from rich.console import Console
from torch import nn

from deepbregman.config import override
from deepbregman.data import Source, without_unreadable
from deepbregman.data.voc import Voc, open_voc
from deepbregman.errors import UserError
from deepbregman.method.base_network import measure_width
from deepbregman.runs import Run
from deepbregman.training.checkpoints import Trained, load_trained

from .features import BATCH_SIZE
from .finetuning import progress_bar
from .finished_arms import FinishedArms
from .options import Options
from .subject import Averaged, Subject, open_labelled, require_labelled


@dataclass(frozen=True, eq=False)
class Job:
    """A run to judge, the options, and what several protocols share, made when first asked for."""

    run: Run
    options: Options
    device: torch.device
    console: Console
    source: Source | None = None
    """What to judge by, where it is open already."""
    encoder: nn.Module | None = None
    """Of the structure of the run's, where that was the user's own."""
    _averaged: list[Averaged] = field(default_factory=list, init=False)
    """The last that was computed; more would fill the memory of a large data set."""

    @cached_property
    def trained(self) -> Trained:
        """The run's networks and how far they are trained; the size is that to judge at."""
        trained = load_trained(self.run, self.device, self.encoder)
        size = self.options.image_size
        if size not in (0, trained.config.data.image_size):
            try:
                measure_width(trained.model.encoder.trunk, size)
            except ValueError as error:
                raise UserError(
                    f"image_size is {size}, which the run's encoder does not take: {error}; leave "
                    "--image-size out"
                ) from None
            # No views are shown here, and their share of a small image may be too small.
            sizes = {"data.image_size": size, "views.relative_size": 1.0}
            trained = trained._replace(config=override(trained.config, sizes))
        if self.options.skip_unreadable:
            config = override(trained.config, {"data.skip_unreadable": True})
            trained = trained._replace(config=config)
        return trained

    @cached_property
    def arms(self) -> FinishedArms:
        """Those that were measured before an evaluation was stopped."""
        return FinishedArms(self.run, self.console)

    @cached_property
    def voc(self) -> Voc:
        """The boxes to judge detection by: of a devkit, or ``voc`` in the run's data.root."""
        data = self.options.data
        assert data is not None  # check_detect has made sure
        return open_voc(self.trained.config.data.root if data == "voc" else data)

    @cached_property
    def subject(self) -> Subject:
        """The networks with the labelled source to judge them by."""
        model, config, _ = self.trained
        if self.source is None:
            source = open_labelled(config, self.options.data)
        else:
            source = require_labelled(self.source, self.options.data or self.source.name)
        if config.data.skip_unreadable:
            source = self._readable(source)
        balanced = self.options.balanced or source.imbalanced
        return Subject(model, config, source, self.device, balanced)

    def _readable(self, source: Source) -> Source:
        """Leave out, and count, what would otherwise be judged by an image that stands in for it.

        Pretraining needs no such pass: it has no labels for a stand-in to be wrong about.
        """
        words = "looking for unreadable images"
        with self.console.status(f"{words} ...") as status:
            source = without_unreadable(
                source, lambda done, total: status.update(f"{words}, {done:,} of {total:,} ...")
            )
        if source.skipped_notice:
            self.console.print(source.skipped_notice, style="yellow", highlight=False)
        return require_labelled(source, self.options.data or source.name)

    def averaged(self, seed: int) -> Averaged:
        """Average the features over ``options.crops`` crops; protocols share those of one seed."""
        if not self._averaged or self._averaged[0].seed != seed:
            subject, crops = self.subject, self.options.crops
            splits = subject.train.split, subject.test.split
            steps = sum(math.ceil(len(split) / BATCH_SIZE) for split in splits)
            self._averaged.clear()
            with progress_bar(self.console, f"{crops} crops, seed {seed}", steps) as advance:
                self._averaged.append(subject.averaged(crops, seed, lambda *_: advance()))
        return self._averaged[0]
