"""Images of a run's data with their features, names and labels: what one searches or clusters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from deepbregman.config import Config, override
from deepbregman.data import Batches, Source, Split
from deepbregman.errors import UserError, nearest
from deepbregman.method.model import Model
from deepbregman.runs import Record, Run
from deepbregman.training.assembly import batches_of
from deepbregman.training.checkpoints import load_trained
from deepbregman.training.processes import pick_device

from .features import Features, compute_features
from .rows import keep, stamped
from .subject import open_readable

Pixels = npt.NDArray[np.uint8]
Report = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""
SPLITS = ("train", "test", "all")


class Setting(NamedTuple):
    """A run's frozen networks and the data they are to look at."""

    run: Run
    model: Model
    config: Config
    epoch: float
    device: torch.device
    source: Source
    data: str

    def splits(self, choice: str) -> dict[str, Split]:
        """Return the splits that ``train``, ``test`` or ``all`` names."""
        if choice not in SPLITS:
            raise UserError(f"split {choice!r} is not one of {', '.join(SPLITS)}")
        present = {"train": self.source.train}
        if self.source.test is not None:
            present["test"] = self.source.test
        if choice == "all":
            return present
        if choice not in present:
            raise UserError(f"data {self.data!r} has no test split: use --split train or all")
        return {choice: present[choice]}

    def class_name(self, label: int) -> str:
        """Name a class, by its number where it has no other name."""
        classes = self.source.classes
        return str(label) if classes is None else classes[label]

    def kept(self, rows: Sequence[Record], protocol: str, seed: int) -> list[Record]:
        """Complete rows of a measurement and write them into the run's result."""
        complete = stamped(
            rows,
            protocol=protocol,
            data=self.data,
            seed=seed,
            epoch=self.epoch,
            config=self.config,
            device=self.device,
        )
        keep(self.run, complete)
        return complete


@dataclass(frozen=True, eq=False)
class Gallery:
    """Images of one or both splits, one after the other."""

    splits: dict[str, Split]
    batches: dict[str, Batches]
    features: Features
    labels: Tensor | None
    """(N,) on the device, where every split has them."""

    def __len__(self) -> int:
        return len(self.features.representation)

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each image; as ``split:index`` where it has no file."""
        return tuple(
            image_name(name, split, index)
            for name, split in self.splits.items()
            for index in range(len(split))
        )

    def position(self, split: str, index: int) -> int | None:
        """Return where an image of a split is in the gallery, None if its split is not in it."""
        start = 0
        for name, part in self.splits.items():
            if name == split:
                return start + index
            start += len(part)
        return None

    def pixels(self, indices: Sequence[int]) -> dict[int, Pixels]:
        """Return images (H, W, 3), each in its own size."""
        pixels, start = {}, 0
        for name, part in self.splits.items():
            wanted = sorted({i - start for i in indices if 0 <= i - start < len(part)})
            for index, image in zip(wanted, decoded(self.batches[name], wanted), strict=True):
                pixels[start + index] = image
            start += len(part)
        return pixels


def image_name(split: str, images: Split, index: int) -> str:
    """Name an image by its file, or by its split and position, which a query may be named by."""
    return f"{split}:{index}" if images.names is None else images.names[index]


def decoded(batches: Batches, indices: list[int]) -> list[Pixels]:
    """Return images (H, W, 3) in the order asked for, without the padding of their frames."""
    images = []
    for batch in batches.iterate(torch.tensor(indices, dtype=torch.int64), 256):
        for position, image in enumerate(batch.images):
            if batch.sizes is not None:
                height, width = batch.sizes[position].tolist()
                image = image[:, :height, :width]
            images.append(image.permute(1, 2, 0).contiguous().cpu().numpy())
    return images


def open_setting(
    run: Run | Path | str,
    data: str | None,
    skip_unreadable: bool,
    accelerator: str,
    encoder: nn.Module | None = None,
) -> Setting:
    """Load a run's networks and open its own data, or other data in its place."""
    run = run if isinstance(run, Run) else Run.open(Path(run))
    device = pick_device(accelerator)
    model, config, epoch = load_trained(run, device, encoder)
    if skip_unreadable:
        config = override(config, {"data.skip_unreadable": True})
    source = open_readable(config, data, stacklevel=4)
    return Setting(run, model, config, epoch, device, source, data or config.data.source)


def open_gallery(setting: Setting, split: str, report: Report | None = None) -> Gallery:
    """Compute the features of ``train``, ``test`` or ``all`` of the data."""
    splits = setting.splits(split)
    batches, features = {}, []
    for name, part in splits.items():
        batches[name] = batches_of(part.images, setting.config, setting.device)
        features.append(features_of(setting, batches[name], name, report))
    labels = [part.labels for part in splits.values() if part.labels is not None]
    whole = torch.cat(labels).to(setting.device) if len(labels) == len(splits) else None
    return Gallery(splits, batches, joined(features), whole)


def joined(parts: Sequence[Features]) -> Features:
    """Join features of several sets of images, by the same networks, one after the other."""
    scores = [part.scores for part in parts if part.scores is not None]
    representation = torch.cat([part.representation for part in parts])
    return Features(representation, torch.cat(scores) if scores else None)


def features_of(
    setting: Setting, batches: Batches, name: str, report: Report | None = None
) -> Features:
    """Compute features, which must be numbers that can be compared."""

    def progress(done: int, total: int) -> None:
        if report is not None:
            report(f"features of {name}", done, total)

    features = compute_features(setting.model, batches, setting.config.data.image_size, progress)
    if not all(part.isfinite().all() for part in features if part is not None):
        raise UserError(
            f"run {setting.run.path}: its networks give features that are not finite; training has "
            "diverged, so train it again with a lower optimiser.learning_rate"
        )
    return features


def chosen(by: Sequence[str], known: Sequence[str], setting: Setting) -> tuple[str, ...]:
    """Check which measures are asked for; none asked for are all that the run has.

    Args:
        by: what the user asks for.
        known: all there are; ``divergence`` among them needs the run's divergence network.
        setting: whose run it is.
    """
    for name in by:
        if name not in known:
            raise UserError(f"by {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    has_scores = setting.model.divergence_network is not None
    if "divergence" in by and not has_scores:
        raise UserError(
            f"run {setting.run.path} has no divergence network (divergence.weight is 0), so there "
            f"is no learned divergence: use --by {known[0]}"
        )
    return tuple(
        name for name in known if (name in by or not by) and (has_scores or name != "divergence")
    )
