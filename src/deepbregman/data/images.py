"""What a dataset holds: pixels or files, labels and names; how its contents are told apart."""

import hashlib
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from deepbregman.data.stored import Store
from deepbregman.errors import UserError
from deepbregman.terminal import count_words

_SIZED, _HASHED = 2048, 256  # images of a fingerprint: the sizes of 2048, and all bytes of 256
_HASHED_BYTES = 1 << 20  # bytes read of each file

Progress = Callable[[int, int], None]
"""Called now and then with the number of images done and the number in all."""


@dataclass(frozen=True, eq=False)
class ArrayImages:
    """Decoded images, all in frames of one size."""

    pixels: Tensor  # uint8 (N, 3, H, W)
    sizes: Tensor | None = None
    """int64 (N, 2): each true height and width, top left in zeros; None: all fill the frame."""

    def __len__(self) -> int:
        return int(self.pixels.shape[0])

    @property
    def frame(self) -> tuple[int, int]:
        """Height and width of the frame of every image."""
        return int(self.pixels.shape[2]), int(self.pixels.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels."""
        return self.pixels.numel()

    def true_sizes(self) -> Tensor:
        """Return height and width of each image in its frame, int64 (N, 2)."""
        if self.sizes is not None:
            return self.sizes
        return torch.tensor(self.frame).repeat(len(self), 1)

    def select(self, indices: Tensor) -> "ArrayImages":
        """Return a copy of the images at ``indices``, int64 (M,), in that order."""
        sizes = None if self.sizes is None else self.sizes[indices]
        return ArrayImages(self.pixels[indices], sizes)


@dataclass(frozen=True)
class StoredImage:
    """One image of a store: what a path is among files."""

    store: Store
    index: int

    def __str__(self) -> str:
        return self.store.name(self.index)

    def read(self) -> bytes | Image.Image:
        """Return the image, encoded or decoded."""
        return self.store.read(self.index)


@dataclass(frozen=True, eq=False)
class StoredImages(Sequence[StoredImage]):
    """Some images of a store, in an order; a million take eight megabytes."""

    store: Store
    indices: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> StoredImage: ...
    @overload
    def __getitem__(self, place: slice) -> "StoredImages": ...
    def __getitem__(self, place: int | slice) -> "StoredImage | StoredImages":
        """Return the image at a place, or those of a slice."""
        if isinstance(place, slice):
            return StoredImages(self.store, self.indices[place])
        return StoredImage(self.store, int(self.indices[place]))

    @property
    def shards(self) -> npt.NDArray[np.int64] | None:
        """The shard of each image (N,), where the store has any."""
        return None if self.store.shards is None else self.store.shards[self.indices]


ImagePlace = Path | StoredImage
"""Location of an image that is decoded when asked for."""


def read_content(place: ImagePlace, most: int = -1) -> bytes:
    """Return the bytes of an image, or the first of them: encoded, or its pixels."""
    if isinstance(place, Path):
        with place.open("rb") as file:
            return file.read(most)
    found = place.read()
    content = found if isinstance(found, bytes) else found.tobytes()
    return content if most < 0 else content[:most]


def count_bytes(place: ImagePlace) -> int:
    """Return how many bytes an image has; of a file without reading it."""
    return place.stat().st_size if isinstance(place, Path) else len(read_content(place))


def digest_content(place: ImagePlace) -> bytes:
    """Return a digest of all bytes of an image, as it is stored."""
    return hashlib.blake2b(read_content(place), digest_size=16).digest()


@dataclass(frozen=True, eq=False)
class FileImages:
    """Images that are decoded when asked for, into square frames: files, or those of a store."""

    paths: tuple[Path, ...] | StoredImages
    side: int
    """Side of the frame; an image longer than this is shrunk to it, none is enlarged."""
    fills_frame: bool = False
    """Whether every image is known to fill its frame, so that sizes need not be carried."""

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def frame(self) -> tuple[int, int]:
        """Height and width of the frame of every image."""
        return self.side, self.side

    @property
    def nbytes(self) -> int:
        """Bytes of the pixels once they are decoded."""
        return len(self.paths) * 3 * self.side * self.side

    def select(self, indices: Tensor) -> "FileImages":
        """Return the files at ``indices``, int64 (M,), in that order."""
        if isinstance(self.paths, StoredImages):
            chosen = self.paths.indices[indices.numpy()]
            return replace(self, paths=StoredImages(self.paths.store, chosen))
        return replace(self, paths=tuple(self.paths[i] for i in indices.tolist()))

    @property
    def shards(self) -> Tensor | None:
        """The shard of each image, int64 (N,), where shards are best read in turn."""
        found = self.paths.shards if isinstance(self.paths, StoredImages) else None
        return None if found is None else torch.from_numpy(found)


Images = ArrayImages | FileImages


def share_pixels(pixels: npt.NDArray[np.uint8]) -> Tensor:
    """Take pixels as a tensor in the same memory, which may be read-only: nothing is written there.

    torch warns of that, once, as if somebody would write.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(pixels)


def join_arrays(first: ArrayImages, second: ArrayImages) -> ArrayImages:
    """Return the images of both, first those of ``first``; they are copied."""
    if first.frame != second.frame:
        raise UserError(
            f"images of {first.frame} and of {second.frame} pixels cannot be trained on together; "
            "prepare both with the same image size"
        )
    sizes = None
    if first.sizes is not None or second.sizes is not None:
        sizes = torch.cat([first.true_sizes(), second.true_sizes()])
    return ArrayImages(torch.cat([first.pixels, second.pixels]), sizes)


def group_identical(*parts: Images) -> list[list[int]]:
    """List groups of two or more images with the same content: bytes of a file, or pixels.

    Images are counted through all parts. Only those are read that have the size of another.
    """
    sizes: list[Hashable] = []
    digests: list[Callable[[], bytes]] = []
    for images in parts:
        if isinstance(images, FileImages):
            sizes += map(count_bytes, images.paths)
            digests += (partial(digest_content, place) for place in images.paths)
            continue
        for pixels, (height, width) in zip(
            images.pixels, images.true_sizes().tolist(), strict=True
        ):
            sizes.append((height, width))
            digests.append(partial(_digest_pixels, pixels[:, :height, :width]))
    return [
        group
        for candidates in _group(enumerate(sizes))
        for group in _group((i, digests[i]()) for i in candidates)
    ]


def _digest_pixels(pixels: Tensor) -> bytes:
    return hashlib.blake2b(pixels.contiguous().numpy().tobytes(), digest_size=16).digest()


def _group(keys: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, key in keys:
        groups.setdefault(key, []).append(index)
    return [group for group in groups.values() if len(group) > 1]


def fingerprint(images: Images) -> str:
    """Return 32 digits that change when the images change.

    Files count by their names below the folder they share, and a sample of them by their sizes and
    bytes; arrays by their shape and the pixels of a sample. So a folder may be moved, and the
    version of the decoder does not matter. At most 256 images are read, however many there are.
    """
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(images, ArrayImages):
        chosen = torch.tensor(spread_places(len(images), _HASHED), dtype=torch.int64)
        digest.update(repr(tuple(images.pixels.shape)).encode())
        for values in (images.pixels[chosen], images.true_sizes()[chosen]):
            digest.update(values.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()
    names = [p.as_posix() if isinstance(p, Path) else str(p) for p in images.paths]
    ends = [os.path.dirname(name) for name in (min(names), max(names))] if names else [""]
    start = len(os.path.join(os.path.commonpath(ends), ""))  # folder that all names share
    digest.update("\0".join(name[start:] for name in names).encode("utf-8", "surrogateescape"))
    for i in spread_places(len(images), _SIZED):
        digest.update(f"{_measure_file(images.paths[i])} ".encode())
    for i in spread_places(len(images), _HASHED):
        with suppress(Exception):  # a table or a program may raise anything; decoding reports it
            digest.update(read_content(images.paths[i], _HASHED_BYTES))
    return digest.hexdigest()


def spread_places(count: int, most: int) -> list[int]:
    """Return at most ``most`` positions, evenly spread over ``count``."""
    return [i * count // min(count, most) for i in range(min(count, most))]


def _measure_file(place: ImagePlace) -> int:
    try:
        return count_bytes(place) if isinstance(place, Path) else 0
    except OSError:
        return -1


@dataclass(frozen=True, eq=False)
class Split:
    """Images of one split, with labels and names where there are any."""

    images: Images
    labels: Tensor | None = None  # int64 (N,)
    names: tuple[str, ...] | None = None
    """File names relative to the folder that was opened."""

    def __len__(self) -> int:
        return len(self.images)

    @property
    def known_labels(self) -> Tensor:
        """The labels, where the caller knows that there are any."""
        assert self.labels is not None
        return self.labels

    def select(self, indices: Tensor) -> "Split":
        """Return the images at ``indices``, int64 (M,), with their labels and names."""
        return Split(
            self.images.select(indices),
            None if self.labels is None else self.labels[indices],
            None if self.names is None else tuple(self.names[i] for i in indices.tolist()),
        )


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset: a training split, and other splits if there are any."""

    name: str
    train: Split
    test: Split | None = None
    unlabelled: Split | None = None
    """Images without labels to pretrain on as well, such as the 100,000 of STL-10."""
    classes: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Files that were passed over, since they are not images by their extension: of each kind."""

    @property
    def has_unequal_classes(self) -> bool:
        """Whether the largest class has over ten times the training images of the smallest."""
        if self.train.labels is None:
            return False
        counts = torch.unique(self.train.labels, return_counts=True)[1]
        return bool(counts.max() > 10 * counts.min())

    def class_name(self, label: int) -> str:
        """Name a class, by its number where it has no other name."""
        known = self.classes is not None and label < len(self.classes)
        return self.classes[label] if self.classes and known else str(label)

    @property
    def known_test(self) -> Split:
        """The test split, where the caller knows that there is one."""
        assert self.test is not None
        return self.test

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that are there, by name."""
        named = {"train": self.train, "test": self.test, "unlabelled": self.unlabelled}
        return {name: split for name, split in named.items() if split is not None}

    @property
    def skipped_notice(self) -> str:
        """A sentence for the user about images that were left out; empty where none was."""
        if not self.skipped:
            return ""
        named = ", ".join(self.skipped[:3]) + ", ..." * (len(self.skipped) > 3)
        return f"left out {count_words(len(self.skipped), 'unreadable image')} ({named})"
