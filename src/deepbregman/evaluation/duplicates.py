"""Duplicates among images: those with the same content, and those with nearly the same features."""

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from deepbregman.data import ArrayImages, FileImages, Progress
from deepbregman.data.images import ImagePlace, count_bytes, group_identical
from deepbregman.errors import UserError
from deepbregman.files import create_csv
from deepbregman.runs import Record
from deepbregman.terminal import ReportProgress, ignore_progress

from . import search_index
from .gallery import Gallery, OpenedRun, Pixels, open_gallery
from .knn import normalise_rows

SAMPLED_IMAGES = 200
"""Images of which slightly changed copies are made to find the threshold."""
FOUND_SHARE = 0.75
"""Share of these copies that the threshold finds."""
CUT_SHARE = 0.03
"""Share of the side that is cut off each edge of a copy."""
JPEG_QUALITY = 70
ALIKE_SHARE = 0.95
"""Share of such copies whose pixels count as alike."""
THUMBNAIL = 16
"""Side of the thumbnails whose pixels are compared."""
MOST_PAIRS = 50
"""Largest number of pairs for each image, on average; with more, the threshold is too low."""
SHOWN_GROUPS, SHOWN_IMAGES = 50, 20
"""Groups of a contact sheet, and images of each."""
_ENTRIES = 2**24  # entries of the matrix of all pairs that are computed at a time
_DECODED = 512  # images at a time


@dataclass(frozen=True, eq=False)
class Copy(search_index.Image):
    """An image of a group of duplicates."""

    kind: str
    """``first`` of its group, ``exact`` copy of one before it, or ``near``."""
    cosine: float
    num_bytes: int | None
    """Size of its file."""


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Groups of images that are alike; the largest file of a group comes first."""

    groups: list[list[Copy]]
    threshold: float
    """Cosine from which two images count as near-duplicates."""
    num_images: int
    table: Path | None = None
    sheet: Path | None = None

    def count(self, kind: str) -> int:
        """Count the copies of a kind."""
        return sum(copy.kind == kind for group in self.groups for copy in group)


def find_pairs(
    representation: Tensor, threshold: float, progress: Progress = ignore_progress
) -> Tensor:
    """Return the pairs (P, 2), int64 on the CPU, with at least a cosine; the lower index first."""
    points = normalise_rows(representation)
    chunk = max(1, _ENTRIES // len(points))
    pairs, count = [], 0
    for start in range(0, len(points), chunk):
        rows = points[start : start + chunk]
        later = torch.arange(start, len(points), device=points.device)
        alike = rows @ points[start:].T >= threshold
        alike &= later > torch.arange(start, start + len(rows), device=points.device)[:, None]
        found = alike.nonzero()
        count += len(found)
        if count > MOST_PAIRS * len(points):
            raise UserError(
                f"threshold is {threshold:g}: more than {MOST_PAIRS} images on average are that "
                "alike, so the features hardly tell images apart; raise --threshold, or train "
                "longer"
            )
        pairs.append(found.cpu() + start)
        progress(min(start + chunk, len(points)), len(points))
    return torch.cat(pairs)


def connect(pairs: Tensor, num_images: int) -> list[list[int]]:
    """List the groups of two or more images that pairs (P, 2) connect, directly or not."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(len(pairs), dtype=bool)
    graph = coo_matrix((ones, (pairs[:, 0], pairs[:, 1])), shape=(num_images, num_images))
    _, component = connected_components(graph, directed=False)
    groups: dict[int, list[int]] = {}
    for index in sorted(set(pairs.flatten().tolist())):
        groups.setdefault(int(component[index]), []).append(index)
    return list(groups.values())


def find_duplicates(
    opened: OpenedRun,
    *,
    threshold: float | None,
    out: Path | None,
    progress: ReportProgress = ignore_progress,
) -> Duplicates:
    """Find duplicates in all of a run's data; see :func:`deepbregman.duplicates`."""
    gallery = open_gallery(opened, "all", progress)
    images = [part.split.images for part in gallery.parts.values()]
    identical = group_identical(*images)
    features = gallery.features.representation
    alike = None
    if threshold is None:
        threshold, alike = choose_thresholds(opened, gallery, features)
    report = partial(progress, "comparing images")
    near = find_pairs(features, threshold, report)
    if alike is not None:
        near = near[compare_pixels(gallery, near) >= alike]
    exact = [(group[0], other) for group in identical for other in group[1:]]
    pairs = torch.cat([near, torch.tensor(exact, dtype=torch.int64).view(-1, 2)])
    groups = connect(pairs, len(features))
    names, sizes = gallery.names, None
    files = [part for part in images if isinstance(part, FileImages)]
    if len(files) == len(images):
        places = [place for part in files for place in part.paths]
        sizes = {i: count_bytes(places[i]) for group in groups for i in group}
        lengths = [len(name.rpartition("/")[2]) for name in names]  # a copy's is longer: "a (1)"
        # Who keeps the first and deletes the others must not be left with a link to nothing.
        links = {i: _count_links(places[i]) for i in sizes}
        groups = [sorted(g, key=lambda i: (-sizes[i], links[i], lengths[i], i)) for g in groups]
    groups.sort(key=lambda group: (-len(group), group[0]))
    shown = gallery.show([i for group in groups for i in group])
    original = {i: group[0] for group in identical for i in group}  # the first of equal content

    def describe(group: Sequence[int]) -> list[Copy]:
        first = features[group[0]][None]
        cosines = functional.cosine_similarity(features[list(group)], first).tolist()
        copies: list[Copy] = []
        seen: set[int] = set()
        for index, cosine in zip(group, cosines, strict=True):
            content = original.get(index, index)
            kind = "exact" if content in seen else "near" if copies else "first"
            seen.add(content)
            size = None if sizes is None else sizes[index]
            copies.append(Copy(*shown[index], kind, cosine, size))
        return copies

    found = Duplicates([describe(group) for group in groups], threshold, len(features), out)
    if out is not None:
        _write(out, found)
    return found


def _count_links(place: ImagePlace) -> int:
    """Count the symbolic links on the way to a file; the data's own folder may be behind one."""
    return sum(map(os.path.islink, (place, *place.parents))) if isinstance(place, Path) else 0


def choose_thresholds(opened: OpenedRun, gallery: Gallery, features: Tensor) -> tuple[float, float]:
    """Return what most images reach with a slightly changed copy: of features, and of pixels.

    A copy has lost its edges and was compressed anew, as photographs are when they are passed on.
    """
    chosen = np.unique(
        np.linspace(0, len(features) - 1, SAMPLED_IMAGES).round().astype(int)
    ).tolist()
    originals = list(gallery.pictures(chosen, 0).values())
    copies = [_change_slightly(image) for image in originals]
    height = max(copy.shape[0] for copy in copies)
    width = max(copy.shape[1] for copy in copies)
    frames = torch.zeros(len(copies), 3, height, width, dtype=torch.uint8)
    for frame, copy in zip(frames, copies, strict=True):
        frame[:, : copy.shape[0], : copy.shape[1]] = torch.from_numpy(copy).permute(2, 0, 1)
    sizes = torch.tensor([copy.shape[:2] for copy in copies])
    seen = opened.compute(ArrayImages(frames, sizes)).representation
    cosines = functional.cosine_similarity(seen, features[chosen])
    pixels = (shrink(originals) * shrink(copies)).sum(dim=1)
    found, alike = cosines.double().cpu(), pixels.double()
    return float(found.quantile(1.0 - FOUND_SHARE)), float(alike.quantile(1.0 - ALIKE_SHARE))


def compare_pixels(gallery: Gallery, pairs: Tensor) -> Tensor:
    """Return the correlation (P,) of the thumbnails of pairs (P, 2), as they are or mirrored.

    A weak encoder takes other pictures with the same background for copies; their pixels differ.
    """
    involved = torch.unique(pairs)
    if len(involved) == 0:
        return torch.zeros(0)
    parts = [gallery.pictures(some.tolist(), 0) for some in involved.split(_DECODED)]
    thumbnails = torch.cat([shrink(list(part.values())) for part in parts])
    first, second = thumbnails[torch.searchsorted(involved, pairs)].unbind(dim=1)
    mirrored = second.reshape(-1, 3, THUMBNAIL, THUMBNAIL).flip(3).flatten(1)
    return torch.maximum((first * second).sum(dim=1), (first * mirrored).sum(dim=1))


def shrink(images: Sequence[Pixels]) -> Tensor:
    """Return thumbnails of images (H, W, 3) as rows, each colour centred, of unit length."""
    size = (THUMBNAIL, THUMBNAIL)
    small = [np.array(Image.fromarray(i).resize(size, Image.Resampling.BOX)) for i in images]
    rows = torch.from_numpy(np.stack(small)).float().permute(0, 3, 1, 2)  # (n, 3, t, t)
    return functional.normalize((rows - rows.mean(dim=(2, 3), keepdim=True)).flatten(1), dim=1)


def _change_slightly(image: Pixels) -> Pixels:
    height, width = image.shape[:2]
    top, left = round(CUT_SHARE * height), round(CUT_SHARE * width)
    file = io.BytesIO()
    kept = np.ascontiguousarray(image[top : height - top, left : width - left])
    Image.fromarray(kept).save(file, "JPEG", quality=JPEG_QUALITY)
    return np.array(Image.open(file))


def _write(path: Path, found: Duplicates) -> None:
    rows: list[Record] = []
    columns = ("group", "image", "copy", "cosine")
    for number, group in enumerate(found.groups, start=1):
        for copy in group:
            row = {"group": number, "image": copy.name, "copy": copy.kind}
            row["cosine"] = f"{copy.cosine:.4f}"
            more = {"bytes": copy.num_bytes, "class": copy.class_name}
            rows.append(row | {key: value for key, value in more.items() if value is not None})
    create_csv(path, rows, columns)
