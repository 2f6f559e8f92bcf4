"""Search by image: the nearest of a run's data, and how well such searches find classes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from deepbregman.data import FileImages, ResidentBatches, Split, open_files
from deepbregman.data.datasets import expand_home
from deepbregman.errors import UserError
from deepbregman.runs import Record, Run

from .galleries import (
    Gallery,
    Pixels,
    Report,
    Setting,
    chosen,
    decoded,
    features_of,
    image_name,
    joined,
    open_gallery,
    open_setting,
)
from .retrieval import MEASURES, described, ranking, ranking_quality
from .rows import Measured, rows_of


class Image(NamedTuple):
    """An image that was searched for or found."""

    name: str
    class_name: str | None
    """Where its class is known."""
    pixels: Pixels
    """(H, W, 3)."""


class Hit(NamedTuple):
    """One of a query's nearest images."""

    image: Image
    value: float
    """Its cosine with the query, or the divergence D(query || image)."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What was found for one query."""

    query: Image
    hits: dict[str, tuple[Hit, ...]]
    """For each measure the nearest images, the nearest first."""


class _Query(NamedTuple):
    name: str
    images: Split  # of one image
    place: tuple[str, int] | None  # split and index, if it is an image of the data


def search(
    run: Run | Path | str,
    queries: Sequence[Path | str],
    *,
    data: str | None = None,
    k: int = 10,
    by: Sequence[str] = (),
    split: str = "train",
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: str = "auto",
    encoder: nn.Module | None = None,
    report: Report | None = None,
) -> list[Answer]:
    """Find the images most like each query; an image is never found for itself.

    Args:
        run: a run, or its folder.
        queries: each an image file, ``test:17`` or ``train:17`` for an image of the data, or its
            name there.
        data: a source to search; the run's own when None. Labels are not needed.
        k: how many to find.
        by: ``cosine`` of features, ``divergence`` of scores with the query as first argument; all
            that the run has when empty.
        split: ``train``, ``test`` or ``all``: where to search.
        seed: of the shuffle that decides among equals.
        skip_unreadable: go on without images that cannot be read, of which a ``Notice`` says how
            many; queries must be readable.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        encoder: a module of the same structure, for a run whose encoder was your own.
        report: called with what is being done, how much is done, and how much there is.

    Returns:
        An answer for each query.
    """
    if not queries:
        raise UserError("no query was given: name an image file, or an image of the data")
    _check_k(k)
    setting = open_setting(run, data, skip_unreadable, accelerator, encoder)
    measures = chosen(by, MEASURES, setting)
    found = [_find_query(str(query), setting) for query in queries]
    size = sum(map(len, setting.splits(split).values()))
    own = any(query.place and query.place[0] in setting.splits(split) for query in found)
    if k > size - own:
        without = " without the query itself" if own else ""
        raise UserError(f"k is {k}: there are {size - own} images to search{without}; lower it")
    gallery = open_gallery(setting, split, report)
    return _answers(setting, gallery, found, measures, k, seed)


def _answers(
    setting: Setting,
    gallery: Gallery,
    queries: Sequence[_Query],
    measures: Sequence[str],
    k: int,
    seed: int,
) -> list[Answer]:
    smoothing = setting.config.divergence.smoothing
    seen = [ResidentBatches(query.images.images, setting.device) for query in queries]
    features = joined([features_of(setting, batches, "the query") for batches in seen])
    places = [None if q.place is None else gallery.position(*q.place) for q in queries]
    nearest: list[dict[str, list[tuple[int, float]]]] = [{} for _ in queries]
    for measure in measures:
        asked, bank = described(features, measure), described(gallery.features, measure)
        # One more than asked for, since a query that is in the gallery will not count.
        found = ranking(measure, asked, bank, min(k + 1, len(bank)), smoothing=smoothing, seed=seed)
        sign = 1.0 if measure == "cosine" else -1.0
        values = (sign * found.similarities + 0.0).tolist()  # a divergence of -0.0 is 0.0
        for answer, place, indices, row in zip(
            nearest, places, found.indices.tolist(), values, strict=True
        ):
            pairs = zip(indices, row, strict=True)
            answer[measure] = [pair for pair in pairs if pair[0] != place][:k]
    wanted = {index for answer in nearest for row in answer.values() for index, _ in row}
    pixels, names = gallery.pixels(sorted(wanted)), gallery.names
    labels = None if gallery.labels is None else gallery.labels.tolist()

    def image(index: int) -> Image:
        known = None if labels is None else setting.class_name(labels[index])
        return Image(names[index], known, pixels[index])

    answers = []
    for query, batches, rows in zip(queries, seen, nearest, strict=True):
        label = query.images.labels
        known = None if label is None else setting.class_name(int(label[0]))
        (shown,) = decoded(batches, [0])
        hits = {
            measure: tuple(Hit(image(index), value) for index, value in row)
            for measure, row in rows.items()
        }
        answers.append(Answer(Image(query.name, known, shown), hits))
    return answers


def _check_k(k: int) -> None:
    if k < 1:
        raise UserError(f"k is {k}: it must be at least 1")


def _find_query(words: str, setting: Setting) -> _Query:
    """Find what a query's words mean: a place in the data, a file, or a name in the data."""
    splits = setting.splits("all")
    place = re.fullmatch(r"(train|test):(\d{1,18})", words)
    if place is not None:
        name, index = place[1], int(place[2])
        size = len(splits[name]) if name in splits else 0
        if index >= size:
            raise UserError(
                f"query {words!r}: the {name} split of {setting.data!r} has {size} images, counted "
                "from 0"
            )
        return _own(splits, name, index)
    path = expand_home(Path(words))
    if path.is_file():
        for name, split in splits.items():
            paths = split.images.paths if isinstance(split.images, FileImages) else ()
            for index, other in enumerate(paths):
                if other.name == path.name and other.resolve() == path.resolve():
                    return _own(splits, name, index)
        images = open_files([path], image_size=setting.config.data.image_size)
        return _Query(words, Split(images), None)
    for name in reversed(splits):  # the test split first
        names = splits[name].names
        if names is not None and words in names:
            return _own(splits, name, names.index(words))
    raise UserError(
        f"query {words!r}: neither an image file nor an image of {setting.data!r}; give a file, "
        "the name of an image relative to the data's folder, or its place, such as test:17"
    )


def _own(splits: dict[str, Split], name: str, index: int) -> _Query:
    images = splits[name].select(torch.tensor([index]))
    return _Query(image_name(name, splits[name], index), images, (name, index))


def evaluate_search(
    run: Run | Path | str,
    *,
    data: str | None = None,
    k: int = 10,
    by: Sequence[str] = (),
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: str = "auto",
    encoder: nn.Module | None = None,
    report: Report | None = None,
) -> list[Record]:
    """Search the training split for each image of the test split, and see whose class is found.

    Args:
        run: a run, or its folder.
        data: a labelled source; the run's own when None.
        k: of the precision among the first k.
        by: as for :func:`search`.
        seed: of the shuffle that decides among equals.
        skip_unreadable: go on without images that cannot be read; a ``Notice`` says how many.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        encoder: a module of the same structure, for a run whose encoder was your own.
        report: as for :func:`search`.

    Returns:
        Rows of protocol ``search``, also written into the run's result: ``mAP`` and
        ``precision@k`` in per cent, for each measure.
    """
    _check_k(k)
    setting = open_setting(run, data, skip_unreadable, accelerator, encoder)
    measures = chosen(by, MEASURES, setting)
    splits = setting.splits("all")
    if "test" not in splits or any(split.labels is None for split in splits.values()):
        raise UserError(
            f"data {setting.data!r} has no labels to judge searches by: give a labelled source "
            "with --data, or search for an image with --query"
        )
    if k > len(splits["train"]):
        raise UserError(f"k is {k}: there are {len(splits['train'])} images to search; lower it")
    bank, asked = (open_gallery(setting, name, report) for name in ("train", "test"))
    assert bank.labels is not None  # looked at above
    assert asked.labels is not None
    if not torch.isin(asked.labels, bank.labels).any():
        raise UserError(f"data {setting.data!r}: no test image is of a class in the training split")
    measured = []
    for measure in measures:

        def progress(done: int, total: int, measure: str = measure) -> None:
            if report is not None:
                report(f"search by {measure}", done, total)

        quality = ranking_quality(
            measure,
            described(asked.features, measure),
            asked.labels,
            described(bank.features, measure),
            bank.labels,
            k=k,
            smoothing=setting.config.divergence.smoothing,
            seed=seed,
            progress=progress,
        )
        metrics = {"mAP": quality.mean_average_precision, f"precision@{k}": quality.precision}
        measured.append(
            Measured(
                measure,
                {metric: 100.0 * value for metric, value in metrics.items()},
                len(splits["train"]),
                len(splits["test"]),
                sum(len(part.skipped) for side in (bank, asked) for part in side.batches.values()),
                {"num_queries": quality.num_queries},
            )
        )
    return setting.kept(rows_of([measured]), "search", seed)
