"""Label all images of a run's data from labels for a few, and say what to label next."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deepbregman.data import FileImages, open_files
from deepbregman.data.images import digest_content
from deepbregman.data.labels import (
    CHANCE,
    GivenLabel,
    check_counts,
    index_last_parts,
    join_accents,
    refuse_names,
)
from deepbregman.errors import UserError
from deepbregman.files import create_csv
from deepbregman.runs import Record
from deepbregman.terminal import ReportProgress, ignore_progress
from deepbregman.training.randomness import derive_seed

from .gallery import Gallery, OpenedRun, join_features, open_gallery
from .predicting import KINDS, Prediction, predict_labels, suggest_images
from .search_index import PLACE, Image


def draw_images(opened: OpenedRun, count: int, seed: int) -> list[Image]:
    """Draw images in random order."""
    gallery = open_gallery(opened, "all")
    generator = torch.Generator().manual_seed(derive_seed(seed, "images to label"))
    drawn = torch.randperm(len(gallery.names), generator=generator)[:count].tolist()
    return [Image(*shown) for shown in gallery.show(drawn).values()]


@dataclass(frozen=True, eq=False)
class Suggestion(Image):
    """An image whose label would teach much."""

    guess: str
    probability: float
    """Probability of the guess."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Labelling(Prediction):
    """Labels for all images of a dataset."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    given: Tensor  # (N,) bool: labelled by the user
    suggested: Tensor
    """(N,) bool: labelled by the user, but no random image: `label` had suggested it or predicted
    its label."""
    num_suggested: int
    """Such images, those from outside the data among them."""
    suggestions: list[Suggestion]
    class_sizes: tuple[int, ...]
    """Labelled images of each class, those from outside the data among them."""
    is_balanced: bool
    """Whether every class counted the same."""
    run: Path
    data: str | None
    """The dataset, if it is not the run's own."""
    measured: tuple[float, int] | None
    """Accuracy in per cent, and of how many images, where the data have labels of their own."""
    table: Path | None
    sheet: Path | None = None

    @property
    def num_examples(self) -> int:
        """Labelled images, those from outside the data among them."""
        return sum(self.class_sizes)

    @property
    def has_outside(self) -> bool:
        """Whether some labelled images are from outside the data."""
        return self.num_examples > int(self.given.sum())

    @property
    def labels(self) -> list[str]:
        """The label of each image, given or predicted."""
        return [self.classes[index] for index in self.probabilities.argmax(dim=1).tolist()]


def label_images(
    opened: OpenedRun,
    given: Sequence[GivenLabel],
    *,
    kinds: Sequence[str],
    balanced: bool,
    suggest: int,
    out: Path | None,
    seed: int,
    progress: ReportProgress = ignore_progress,
) -> Labelling:
    """Label all images of a run's data from labels for a few; see :func:`deepbregman.label`."""
    allowed = opened.choose_measures(kinds, KINDS)
    gallery = open_gallery(opened, "all", progress)
    names, features = gallery.names, gallery.features
    known, outside, suggested = match_images(given, gallery)
    every = list(known.values())
    check_counts(every, "labels")
    if len(known) - len(outside) == len(names):
        place = shlex.quote(str(opened.loaded.run.path))
        raise UserError(
            f"all {len(names)} images of {opened.data!r} have labels: none is left; to label other "
            "photos by these, name their folder with --data; to see the labels on the map, run "
            f"`deepbregman explore {place} --labels` with the same table"
        )
    classes = tuple(sorted(set(every)))
    labels = torch.full((len(names) + len(outside),), -1)
    labels[list(known)] = torch.tensor(list(map(classes.index, every)))
    if outside:
        files = open_files(outside, image_size=opened.loaded.config.data.image_size)
        features = join_features([features, opened.compute(files)])
    is_suggested = torch.zeros(len(labels), dtype=torch.bool)
    is_suggested[list(suggested)] = True
    found = predict_labels(
        features,
        labels,
        suggested=is_suggested,
        num_classes=len(classes),
        smoothing=opened.loaded.config.divergence.smoothing,
        kinds=allowed,
        balanced=balanced,
        seed=seed,
        progress=partial(progress, "cross-validation"),
    )
    is_given = labels >= 0
    chosen = suggest_images(features.representation, found.probabilities, is_given, suggest)
    found = replace(found, probabilities=found.probabilities[: len(names)])
    is_given = is_given[: len(names)]
    best, guesses = found.probabilities.max(dim=1)
    labelling = Labelling(
        **vars(found),
        names=names,
        classes=classes,
        given=is_given,
        suggested=is_suggested[: len(names)],
        num_suggested=len(suggested),
        suggestions=[
            Suggestion(*shown, classes[int(guesses[i])], float(best[i]))
            for i, shown in gallery.show(chosen).items()
        ],
        class_sizes=tuple(map(every.count, classes)),
        is_balanced=balanced,
        run=opened.loaded.run.path,
        data=opened.other_data,
        measured=_measure(gallery, classes, guesses, is_given),
        table=out,
    )
    if out is not None:
        write_labels(out, labelling, chosen)
    return labelling


def _measure(
    gallery: Gallery, classes: Sequence[str], guesses: Tensor, given: Tensor
) -> tuple[float, int] | None:
    """Compare predictions with the data's own labels, where they have the same classes."""
    if gallery.labels is None:
        return None
    truth = gallery.classes
    judged = [i for i, known in enumerate(given.tolist()) if not known]
    if not set(classes) <= set(truth):
        return None
    right = sum(classes[int(guesses[i])] == truth[i] for i in judged)
    return 100.0 * right / len(judged), len(judged)


def match_images(
    given: Sequence[GivenLabel], gallery: Gallery
) -> tuple[dict[int, str], list[Path], set[int]]:
    """Find the images that labels are given to.

    A name is that of the gallery, a path, or the last part of a path if it is unique, with or
    without its extension. Any other file is the image with the same bytes, or an example of its
    own.

    Returns:
        The label by position; the files from elsewhere, whose positions follow those of the
        gallery; and the positions of images that had been suggested.
    """
    finder, names = ImageFinder(gallery), gallery.names
    labels: dict[int, str] = {}
    outside: dict[Path, int] = {}
    suggested: set[int] = set()
    unknown = []
    ordered = sorted(given, key=lambda item: Path(item.image))  # as a folder lists its images
    for image, label, is_file, is_suggested in ordered:
        path = Path(os.path.expanduser(image))
        index = None if is_file else finder.find(image)
        if index is None and (is_file or path.is_file()):
            index = finder.find_copy(path)
            if index is None:
                index = outside.setdefault(path, len(names) + len(outside))
        if index is None:
            unknown.append(image)
            continue
        if labels.setdefault(index, label) != label:
            name = names[index] if index < len(names) else image
            raise UserError(
                f"labels: {name!r} is {labels[index]!r} and {label!r}; give each image one label"
            )
        if is_suggested:
            suggested.add(index)
    if unknown:
        raise refuse_names(unknown, len(given), names[0])
    return labels, list(outside), suggested


class ImageFinder:
    """Finds the images of a gallery by their names, paths or contents."""

    def __init__(self, gallery: Gallery) -> None:
        self._names = {name: index for index, name in enumerate(gallery.names)}
        self._joined = {join_accents(name): index for name, index in self._names.items()}
        self._last = index_last_parts(gallery.names)
        self._parts, self._starts = gallery.parts, gallery.starts
        self._paths: dict[str, int] = {}
        self._sizes: dict[int, list[tuple[Path, int]]] = {}
        for name, start in gallery.starts.items():
            images = gallery.parts[name].split.images
            if isinstance(images, FileImages) and isinstance(images.paths, tuple):
                for index, path in enumerate(images.paths, start=start):
                    self._paths[os.path.abspath(path)] = index

    def find(self, name: str) -> int | None:
        """Return the position of an image by its name, path, last part, or place in a split."""
        if name in self._names:
            return self._names[name]
        if (path := os.path.abspath(name)) in self._paths:
            return self._paths[path]
        found = self._last.get(name, self._joined.get(join_accents(name)))
        place = PLACE.fullmatch(name)
        if found is not None or place is None:
            return found
        split, index = place[1], int(place[2])
        size = len(self._parts[split].split) if split in self._parts else 0
        return self._starts[split] + index if index < size else None

    def find_copy(self, path: Path) -> int | None:
        """Return the position of the image with the content of a file."""
        if (place := os.path.abspath(path)) in self._paths:
            return self._paths[place]
        if not self._sizes:
            for other, index in self._paths.items():
                size = os.stat(other).st_size
                self._sizes.setdefault(size, []).append((Path(other), index))
        same = self._sizes.get(path.stat().st_size, [])
        if not same:
            return None
        content = digest_content(path)
        return next((index for other, index in same if digest_content(other) == content), None)


def write_labels(path: Path, found: Labelling, suggested: Sequence[int]) -> None:
    """Write a line for each image, so that `read_labels` can take the file again."""
    ranks = {index: rank for rank, index in enumerate(suggested, start=1)}
    rows: list[Record] = []
    # A probability of 1 says that the user gave the label.
    predicted = found.probabilities.clamp(max=0.9999)
    values = torch.where(found.given[:, None], found.probabilities, predicted).tolist()
    for index, (name, label) in enumerate(zip(found.names, found.labels, strict=True)):
        row: Record = {
            "image": name,
            "label": label,
            "probability": f"{max(values[index]):.4f}",
            "given": "yes" if found.given[index] else "no",
            "label next": ranks.get(index, ""),
            "suggested": "yes" if found.suggested[index] else "",
        }
        for kind, value in zip(found.classes, values[index], strict=True):
            row[CHANCE + kind] = f"{value:.4f}"
        rows.append(row)
    create_csv(path, rows)
