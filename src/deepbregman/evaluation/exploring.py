"""What the explorer shows: a map of images, their neighbours, clusters, labels and subnetworks."""

import importlib.util
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepbregman.data import Split
from deepbregman.data.labels import is_yes, read_table, was_suggested
from deepbregman.errors import UserError, notify
from deepbregman.runs import list_versions
from deepbregman.terminal import ReportProgress, count_words, ignore_progress
from deepbregman.training.randomness import derive_seed

from .clustering import count_clusters, number_by_size
from .features import Features
from .gallery import Gallery, OpenedRun, Pixels, image_name
from .knn import MEASURES, normalise_rows, rank_bank, select_features
from .labelling import ImageFinder

MOST_IMAGES = 50_000
"""Images of a page; of more a seeded sample is shown."""
SHOWN_NEIGHBOURS = 12
IMAGES_PER_SUBNETWORK = 24
"""Images listed for each subnetwork."""
MOST_SUBNETWORKS = 256
"""Listed, those first that win most often."""
SCORE_BYTES = 8_000_000
"""Memory for the scores that images can be coloured by."""
MAP_NEIGHBOURS = 15
FEWEST_FOR_MAP = 10
"""Images that a map by UMAP or t-SNE needs; fewer are placed by their principal components."""
_QUERIES = 2048  # images that are compared at a time
_DECODED = 512
_OBLONG = 1.5  # the longer side of a usual photo: a thumbnail shows the middle


class Ranked(NamedTuple):
    """The images most like each image; the nearest first, never itself."""

    indices: npt.NDArray[np.int32]
    """(N, k); -1 where there are no more."""
    values: npt.NDArray[np.float32]
    """Cosines, or divergences D(image || other)."""


class Winners(NamedTuple):
    """How the subnetworks score the images."""

    winner: npt.NDArray[np.int64]
    """(N,): the subnetwork with the highest score."""
    numbers: tuple[int, ...]
    """The S subnetworks that are listed."""
    wins: tuple[int, ...]
    """How many images each of them wins."""
    highest: npt.NDArray[np.int32]
    """(S, T): the images that each of them scores highest."""
    scores: npt.NDArray[np.uint8] | None
    """(N, S), from 0 for the lowest score of a subnetwork to 255; None if they are too many."""


class Given(NamedTuple):
    """Labels from a table, such as `deepbregman label` writes."""

    labels: list[str | None]
    probabilities: list[float] | None
    by_user: list[bool]
    """Whether the user gave the label; the others are predicted."""
    queue: list[int]
    """Images to label next: first those that the table ranks as `label next`, then those without a
    label, in the order of the table."""
    suggested: list[bool]
    """Whether the image is no random one, also if the user labels it on the page: `label` suggested
    it or predicted its label, or the table does not name it."""


class Exploration(NamedTuple):
    """Everything that the page shows but the pixels, which :func:`read_pixels` reads."""

    gallery: Gallery
    names: tuple[str, ...]
    classes: list[str | None] | None
    points: npt.NDArray[np.float32]  # (N, 2)
    map_method: str
    clusters: npt.NDArray[np.int64]
    ranked: dict[str, Ranked]
    """Neighbours by ``cosine`` and, if the run has it, by ``divergence``."""
    winners: Winners | None
    given: Given | None


def explore_images(
    opened: OpenedRun,
    *,
    labels: Path | None,
    in_run: Mapping[str, Path],
    clusters: int | None,
    split: str,
    seed: int,
    progress: ReportProgress = ignore_progress,
) -> Exploration:
    """Compute what the explorer shows; see :func:`deepbregman.explore`.

    Args:
        in_run: names of the table that are of files in the run's own folder.
    """
    splits = _sample(opened.splits(split), seed)
    parts = {name: opened.features_of(part, name, progress) for name, part in splits.items()}
    gallery = Gallery(parts, opened.source)
    names = gallery.names
    if len(names) < 3:
        number = count_words(len(names), "image")
        raise UserError(f"data {opened.data!r} has {number}: a map needs 3 or more")
    finder = ImageFinder(gallery)

    def find(name: str) -> int | None:
        return finder.find_copy(in_run[name]) if name in in_run else finder.find(name)

    given = None if labels is None else read_given(labels, names, find)
    known = None if gallery.labels is None else gallery.classes
    count = count_clusters(clusters, len(set(known or ())), len(names))
    features = gallery.features
    smoothing = opened.loaded.config.divergence.smoothing
    ranked = {
        measure: rank_all(measure, features, smoothing, seed, progress)
        for measure in MEASURES
        if measure == "cosine" or features.scores is not None
    }
    points, method = _recall_map(opened, features.representation, ranked["cosine"], seed, progress)
    return Exploration(
        gallery=gallery,
        names=names,
        classes=known,
        points=points,
        map_method=method,
        clusters=_cluster(features.representation, count, seed),
        ranked={
            measure: Ranked(found.indices[:, :SHOWN_NEIGHBOURS], found.values[:, :SHOWN_NEIGHBOURS])
            for measure, found in ranked.items()
        },
        winners=None if features.scores is None else find_winners(features.scores),
        given=given,
    )


def _sample(splits: dict[str, Split], seed: int) -> dict[str, Split]:
    """Take at most ``MOST_IMAGES``, the same share of each split; names stay as they were."""
    total = sum(map(len, splits.values()))
    if total <= MOST_IMAGES:
        return splits
    words = f"{total:,} images are too many for a page: a sample of {MOST_IMAGES:,} is shown"
    notify(words)
    sampled, seen = {}, 0
    for name, part in splits.items():
        seen += len(part)
        share = seen * MOST_IMAGES // total - (seen - len(part)) * MOST_IMAGES // total
        generator = torch.Generator().manual_seed(derive_seed(seed, f"sample of {name}"))
        chosen = torch.randperm(len(part), generator=generator)[:share].sort().values
        names = tuple(image_name(name, part, index) for index in chosen.tolist())
        sampled[name] = replace(part.select(chosen), names=names)
    return sampled


def rank_all(
    measure: str,
    features: Features,
    smoothing: float,
    seed: int,
    progress: ReportProgress = ignore_progress,
) -> Ranked:
    """Find the images most like each image, as many as the map and the page need."""
    bank = select_features(features, measure)
    k = min(max(SHOWN_NEIGHBOURS, MAP_NEIGHBOURS), len(bank) - 1)
    indices, values = [], []
    for start in range(0, len(bank), _QUERIES):
        queries = bank[start : start + _QUERIES]
        found = rank_bank(measure, queries, bank, k + 1, smoothing=smoothing, seed=seed)
        own = torch.arange(start, start + len(queries), device=bank.device)[:, None]
        # Itself goes to the end and is cut off there; a copy may stand before it.
        last = (found.indices == own).to(torch.int8).sort(dim=1, stable=True).indices[:, :k]
        indices.append(found.indices.gather(1, last).cpu().int())
        values.append(found.similarities.gather(1, last).cpu())
        progress(f"nearest by {measure}", start + len(queries), len(bank))
    sign = 1.0 if measure == "cosine" else -1.0
    return Ranked(torch.cat(indices).numpy(), (sign * torch.cat(values) + 0.0).numpy())


def place_on_map(
    representation: Tensor, nearest: Ranked, method: str, seed: int
) -> npt.NDArray[np.float32]:
    """Place images on a map, those with a large cosine close to each other.

    The largest side of the map is 1.
    """
    vectors = normalise_rows(representation).cpu().numpy()
    if method == "principal components":
        points = _principal(vectors)
    elif method == "UMAP":
        points = _umap(vectors, nearest, seed)
    else:
        from sklearn.manifold import TSNE

        perplexity = min(30.0, (len(vectors) - 1) / 3)
        tsne = TSNE(metric="cosine", init="pca", perplexity=perplexity, random_state=seed)
        vectors[~vectors.any(axis=1), 0] = 1.0  # a zero vector has no cosine: give it a direction
        points = tsne.fit_transform(vectors)
    points = points - points.min(axis=0)
    scale = float(points.max()) or 1.0
    placed: npt.NDArray[np.float32] = (points / scale).astype(np.float32)
    return placed


def _recall_map(
    opened: OpenedRun, representation: Tensor, nearest: Ranked, seed: int, progress: ReportProgress
) -> tuple[npt.NDArray[np.float32], str]:
    """Return the map that a page had before, if it is kept beside the run, or make it."""
    method = choose_map(len(representation))
    work = "map by UMAP, which compiles first" if method == "UMAP" else "map"

    def compute() -> Tensor:
        progress(work, 0, 1)
        found = torch.from_numpy(place_on_map(representation, nearest, method, seed))
        progress(work, 1, 1)
        return found

    cache = opened.loaded.cache
    if cache is None:
        return compute().numpy(), method
    values = representation.float().cpu().contiguous().numpy().tobytes()
    made_by = json.dumps([method, seed, list_versions("umap-learn", "scikit-learn")])
    return cache.keep("map", compute, made_by.encode(), values).numpy(), method


def choose_map(count: int) -> str:
    """Choose how a number of images are placed: by UMAP if umap-learn is installed, or t-SNE."""
    if count < FEWEST_FOR_MAP:
        return "principal components"
    return "UMAP" if importlib.util.find_spec("umap") is not None else "t-SNE"


def _principal(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    points: npt.NDArray[np.float64] = left[:, :2] * sizes[:2]
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


def _umap(vectors: npt.NDArray[np.float32], nearest: Ranked, seed: int) -> npt.NDArray[np.float64]:
    with warnings.catch_warnings():  # numba and umap warn about themselves
        warnings.simplefilter("ignore")
        import umap

        own = np.arange(len(vectors), dtype=np.int32)[:, None]
        indices = np.hstack([own, nearest.indices])
        far = np.hstack([np.zeros_like(own, dtype=np.float32), 1.0 - nearest.values])
        reducer = umap.UMAP(
            n_neighbors=indices.shape[1],
            metric="cosine",
            precomputed_knn=(indices, far.clip(min=0.0).astype(np.float32), None),
            init=_principal(vectors).astype(np.float32),
            random_state=seed,
        )
        threads = torch.get_num_threads()
        points: npt.NDArray[np.float64] = reducer.fit_transform(vectors)
        torch.set_num_threads(threads)  # numba has given it all CPUs
    if not np.isfinite(points).all():  # such as for images that are all the same
        return _principal(vectors)
    return points


def _cluster(representation: Tensor, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Group images for their colour; `deepbregman cluster` does it with more care."""
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    points = normalise_rows(representation).cpu().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct images than clusters
        means = MiniBatchKMeans(count, n_init=3, random_state=seed).fit(points)
    found: npt.NDArray[np.int64] = number_by_size(
        torch.from_numpy(means.labels_.astype(np.int64)), count
    ).numpy()
    return found


def find_winners(scores: Tensor) -> Winners:
    """Collect the wins of each subnetwork, the most first, and what each scores highest."""
    winner = scores.argmax(dim=1)
    wins = torch.bincount(winner, minlength=scores.shape[1])
    chosen = wins.argsort(descending=True, stable=True)[:MOST_SUBNETWORKS]
    shown = scores[:, chosen]
    highest = shown.topk(min(IMAGES_PER_SUBNETWORK, len(scores)), dim=0).indices.T
    levels = None
    if shown.numel() <= SCORE_BYTES:
        low, high = shown.amin(dim=0), shown.amax(dim=0)
        levels = (255 * (shown - low) / (high - low).clamp_min(1e-12)).round()
    return Winners(
        winner=winner.cpu().numpy(),
        numbers=tuple(chosen.tolist()),
        wins=tuple(wins[chosen].tolist()),
        highest=highest.int().cpu().numpy(),
        scores=None if levels is None else levels.to(torch.uint8).cpu().numpy(),
    )


def _read_probability(row: dict[str, str], path: Path) -> float:
    """Read the probability of a predicted label; a label of the user's need not have one."""
    text = row.get("probability", "0").replace(",", ".")  # a spreadsheet may write 0,25
    if not row["label"]:  # an image that is still to be labelled
        return 0.0
    if not text and is_yes(row.get("given") or ""):
        return 1.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise UserError(
            f"labels {str(path)!r}: the probability of {row['image']!r} is {text!r}: it must be a "
            "number from 0 to 1, or empty in a line where given is yes"
        )
    return value


def read_given(path: Path, names: Sequence[str], find: Callable[[str], int | None]) -> Given:
    """Read labels and, where they are, probabilities; None for images that are not in the table.

    Args:
        find: returns the position of an image that a table names, as `label` finds it.
    """
    found: dict[int, dict[str, str]] = {}
    for row in read_table(path):
        if (place := find(row["image"])) is not None:
            found[place] = row
    if not found:
        raise UserError(
            f"labels {str(path)!r}: it names no image of the data; names are relative to the "
            f"data's folder, such as {names[0]!r}"
        )
    rows = [found.get(place) or {"label": ""} for place in range(len(names))]
    probabilities = None
    if "probability" in next(iter(found.values())):
        probabilities = [_read_probability(row, path) for row in rows]
    unsaid = "yes" if probabilities is None else "no"
    asked = {
        place: int(rank) if (rank := row.get("label next") or "").isdecimal() else math.inf
        for place, row in found.items()
        if row.get("label next") or not row["label"]
    }
    by_user = [bool(row["label"]) and is_yes(row.get("given") or unsaid) for row in rows]
    drawn = by_user if probabilities else [place in found for place in range(len(rows))]
    return Given(
        labels=[row["label"] or None for row in rows],
        probabilities=probabilities,
        by_user=by_user,
        queue=sorted(asked, key=asked.__getitem__),
        suggested=[
            not is_drawn or was_suggested(row) for is_drawn, row in zip(drawn, rows, strict=True)
        ],
    )


def read_pixels(
    found: Exploration, side: int, progress: ReportProgress = ignore_progress
) -> Iterator[Pixels]:
    """Decode all images in turn, a few at a time, for square thumbnails of a side."""
    report = partial(progress, "thumbnails")
    count = len(found.names)
    for start in range(0, count, _DECODED):
        stop = min(start + _DECODED, count)
        decoded = found.gallery.pictures(range(start, stop), math.ceil(_OBLONG * side))
        yield from (decoded[index] for index in range(start, stop))
        report(stop, count)
