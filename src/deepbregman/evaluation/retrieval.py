"""Search by image: the nearest images of a run's data, and how well such searches find classes."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepbregman.data import FileImages, Progress, Split, open_files
from deepbregman.data.datasets import expand_home
from deepbregman.errors import UserError
from deepbregman.method.bregman import find_tangents
from deepbregman.runs import Record
from deepbregman.terminal import ReportProgress, ignore_progress
from deepbregman.training.randomness import epoch_order

from . import search_index
from .features import SplitFeatures
from .gallery import (
    PICTURE,
    Gallery,
    OpenedRun,
    image_name,
    join_features,
    open_gallery,
    read_pictures,
)
from .inputs import Evaluation
from .knn import MEASURES, VARIANTS, normalise_rows, rank_bank, select_features, similarity_to
from .results import Measurement, make_rows
from .search_index import Answer, Hit, Image, Names, Planes, SearchIndex, find_place, write_index

PRECISION_AT = 10
_ENTRIES = 2**24  # similarities of queries and bank at a time: 64 MiB


class RankingQuality(NamedTuple):
    """Quality of rankings, over the queries whose label is in the bank."""

    mean_average_precision: float
    precision: float
    """Share of the first k that have the query's label, averaged."""
    num_queries: int


def ranking_quality(
    measure: str,
    queries: Tensor,
    query_labels: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    *,
    k: int = 10,
    smoothing: float = 0.0,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> RankingQuality:
    """Measure the rankings of the whole bank: an item is relevant if it has the query's label.

    The average precision of a query is the mean of the precisions at the ranks of its relevant
    items. Ties are ordered by one seeded shuffle of the bank, the same for all queries. Queries
    whose label is not in the bank are left out; at least one must remain. Memory does not grow with
    their number.

    Args:
        queries: (Q, d) features, or (Q, K) scores; the bank likewise.
        k: of the precision among the first k, from 1 to B.
    """
    order = epoch_order(len(bank), seed, 0).to(bank.device)
    similarity_of, labels = similarity_to(measure, bank[order], smoothing), bank_labels[order]
    ranks = torch.arange(1, len(bank) + 1, device=bank.device)
    averages, precisions, num_queries = 0.0, 0.0, 0
    chunk = max(1, _ENTRIES // len(bank))
    for start in range(0, len(queries), chunk):
        similarities = similarity_of(queries[start : start + chunk])  # (c, B)
        ranked = similarities.sort(dim=1, descending=True, stable=True).indices
        relevant = labels[ranked] == query_labels[start : start + chunk, None]  # (c, B)
        found = relevant.cumsum(dim=1)
        total = found[:, -1]
        answerable = total > 0
        precision = torch.where(relevant, found.double() / ranks, 0.0)
        average = precision.sum(dim=1) / total.clamp_min(1)
        averages += average[answerable].sum().item()
        precisions += (found[:, k - 1].double() / k)[answerable].sum().item()
        num_queries += int(answerable.sum())
        progress(min(start + chunk, len(queries)), len(queries))
    return RankingQuality(averages / num_queries, precisions / num_queries, num_queries)


class _Query(NamedTuple):
    name: str
    images: Split  # holds one image
    row: int | None  # position in the gallery, if it is one of its images


def search_images(
    opened: OpenedRun,
    queries: Sequence[str],
    *,
    k: int,
    by: Sequence[str],
    split: str,
    seed: int,
    key: str | None,
    progress: ReportProgress,
) -> list[Answer]:
    """Find the images most like each query; an image is never found for itself.

    The arguments are those of :func:`deepbregman.search`; ``key`` names an index to keep.
    """
    measures = opened.choose_measures(by, MEASURES)
    gallery = open_gallery(opened, split, progress)
    found = [_find_query(query, opened, gallery.starts) for query in queries]
    rows = [query.row for query in found if query.row is not None]
    size = sum(len(part.split) for part in gallery.parts.values()) - bool(rows)
    if k > size:
        without = " without the query itself" if rows else ""
        raise UserError(f"k is {k}: there are {size} images to search{without}; lower it")
    index = _make_index(opened, gallery, seed)
    cache = opened.loaded.cache
    # Each search tells the user of changed data or of an unfinished run, so it has to load the run.
    is_kept = opened.is_finished and not opened.data_changed
    if index is not None and key is not None and cache is not None and is_kept:
        write_index(cache.folder, cache.networks, key, index)
        with suppress(OSError):  # a folder that cannot be written to has no index either
            cache.make_room()
    if index is not None and len(rows) == len(found):  # as the next search: both print the same
        return [index.answer(row, measures, k) for row in rows]
    return _answer_queries(opened, gallery, found, measures, k, seed)


def _answer_queries(
    opened: OpenedRun,
    gallery: Gallery,
    queries: Sequence[_Query],
    measures: Sequence[str],
    k: int,
    seed: int,
) -> list[Answer]:
    smoothing = opened.loaded.config.divergence.smoothing
    parts = [
        opened.compute(query.images.images)
        if query.row is None
        else gallery.features.select(torch.tensor([query.row]))
        for query in queries
    ]
    features = join_features(parts)
    answers = [Answer(_show_query(query, opened), {}) for query in queries]
    for measure in measures:
        asked, bank = select_features(features, measure), select_features(gallery.features, measure)
        # One more than asked for, since a query that is in the gallery will not count.
        found = rank_bank(
            measure, asked, bank, min(k + 1, len(bank)), smoothing=smoothing, seed=seed
        )
        sign = 1.0 if measure == "cosine" else -1.0
        values = (sign * found.similarities + 0.0).tolist()  # a divergence of -0.0 is 0.0
        columns = (answers, queries, found.indices.tolist(), values)
        for answer, query, indices, row in zip(*columns, strict=True):
            pairs = zip(indices, row, strict=True)
            others = [pair for pair in pairs if pair[0] != query.row][:k]
            shown = gallery.show([index for index, _ in others])
            answer.hits[measure] = tuple(Hit(Image(*shown[i]), value) for i, value in others)
    return answers


def _show_query(query: _Query, opened: OpenedRun) -> Image:
    label = query.images.labels
    known = None if label is None else opened.source.class_name(int(label[0]))
    return Image(query.name, known, lambda: read_pictures(query.images.images)[0])


def _make_index(opened: OpenedRun, gallery: Gallery, seed: int) -> SearchIndex | None:
    """Collect what searches in a gallery need; None if its images are not files, or too many."""
    known = {name: _list_names(part.split) for name, part in gallery.parts.items()}
    files = [os.path.abspath(file) for names in known.values() for file in names.files]
    if len(files) < len(gallery.names):
        return None
    features = gallery.features
    if features.representation.nbytes > search_index.LARGEST_BYTES:
        return None
    unit = normalise_rows(features.representation).cpu().numpy()
    measures = {"cosine": Planes(unit, np.zeros(len(unit), np.float32), unit)}
    if features.scores is not None:
        tangents = find_tangents(features.scores, opened.loaded.config.divergence.smoothing)
        points = tangents.reduce(features.scores)
        if points is None:
            return None
        parts = (tangents.slopes, tangents.offsets, points)
        if sum(part.nbytes for part in parts) > search_index.LARGEST_BYTES:
            return None
        measures["divergence"] = Planes(*(part.cpu().numpy() for part in parts))
    images = next(iter(gallery.parts.values())).split.images
    skips = opened.loaded.config.data.skip_unreadable
    return SearchIndex(
        sizes={name: names.size for name, names in known.items()},
        names=list(gallery.names),
        files=files,
        classes=gallery.classes,
        side=max(PICTURE, *images.frame),
        notice=opened.source.skipped_notice if skips else "",
        order=epoch_order(len(files), seed, 0).numpy(),
        measures=measures,
    )


def _find_query(words: str, opened: OpenedRun, starts: Mapping[str, int]) -> _Query:
    """Find the image that a query names: a place in the data, a file, or a name in the data."""
    splits = opened.splits("all")
    known = {name: _list_names(split) for name, split in splits.items()}
    place = find_place(words, known, opened.data)
    if place is not None:
        name, index = place
        image = splits[name].select(torch.tensor([index]))
        row = starts[name] + index if name in starts else None
        return _Query(image_name(name, splits[name], index), image, row)
    path = expand_home(Path(words))
    images = open_files([path], image_size=opened.loaded.config.data.image_size)
    return _Query(words, Split(images), None)


def _list_names(split: Split) -> Names:
    files = split.images.paths if isinstance(split.images, FileImages) else ()
    return Names(len(split), split.names, files if isinstance(files, tuple) else ())


def measure_retrieval(
    bank: SplitFeatures,
    queries: SplitFeatures,
    measures: Sequence[str],
    k: int,
    smoothing: float,
    seed: int,
    progress: ReportProgress = ignore_progress,
) -> list[Measurement]:
    """Search a bank for every query by each measure, and measure how often its class is found."""

    def vectors(part: SplitFeatures, measure: str) -> Tensor:
        if measure == "bank":
            return bank.feature_bank.score(part.features.representation)
        return select_features(part.features, measure)

    measured = []
    for measure in measures:
        asked, known = vectors(queries, measure), vectors(bank, measure)
        rank = partial(ranking_quality, measure, asked, queries.labels, known, bank.labels)
        report = partial(progress, f"search by {measure}")
        found = rank(k=k, smoothing=smoothing, seed=seed, progress=report)
        mean = found.mean_average_precision
        values = {"mAP": 100.0 * mean, f"precision@{k}": 100.0 * found.precision}
        counts = len(bank.labels), len(queries.labels)
        details = {"num_queries": found.num_queries}
        measured.append(Measurement(VARIANTS[measure], values, *counts, details))
    return measured


def retrieval(evaluation: Evaluation) -> list[Record]:
    """Search the training images for every test image, by each measure that the run allows.

    The seed matters only for ties, of which the hard divergence has many.
    """
    labelled = evaluation.labelled
    smoothing = labelled.config.divergence.smoothing
    measure = partial(measure_retrieval, labelled.train, labelled.test, smoothing=smoothing)
    k = min(PRECISION_AT, len(labelled.train.labels))
    first, progress = evaluation.options.seed, evaluation.progress
    measures = ["cosine", "bank"]
    if labelled.train.features.embedding is not None:
        measures.append("embedding")
    rows = make_rows([measure(measures, k, seed=first, progress=progress)])
    if labelled.train.features.scores is not None:
        drawn = evaluation.options.each_seed[: 1 if smoothing > 0 else None]
        found = [measure(("divergence",), k, seed=seed, progress=progress) for seed in drawn]
        rows += make_rows(found)
    return rows
