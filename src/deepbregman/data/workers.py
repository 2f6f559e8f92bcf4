"""What runs in the worker processes: lists of indices to decoded batches."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from deepbregman.data.frames import (
    UnreadableImage,
    decode_to,
    quiet_pillow,
    replace_unreadable,
)
from deepbregman.data.images import FileImages


class Decoded(NamedTuple):
    """A batch as a worker hands it over; errors travel as text, not as exceptions."""

    pixels: Tensor
    """uint8 (B, side, side, 3), as decoders write it."""
    sizes: Tensor | None
    broken: list[tuple[int, str]]
    """Index and message of each unreadable file."""
    replaced: bool
    """Whether there was a readable image to stand in for them."""


class BatchOrder(Sampler[list[int]]):
    """The batches of the coming pass."""

    def __init__(self) -> None:
        self.batches: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class FrameDataset(Dataset[Decoded]):
    """Files by lists of indices.

    Paths are kept in one array of bytes: a million Python objects would be copied into every
    worker, page by page, as their reference counts change.
    """

    def __init__(self, images: FileImages) -> None:
        names = [os.fsencode(path) for path in images.paths]
        self._names = np.frombuffer(b"".join(names), dtype=np.uint8)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self._side = images.side
        self._fills_frame = images.fills_frame

    def __getitem__(self, indices: list[int]) -> Decoded:
        pixels = np.zeros((len(indices), self._side, self._side, 3), dtype=np.uint8)
        sizes = np.zeros((len(indices), 2), dtype=np.int64)
        broken: dict[int, str] = {}
        with quiet_pillow():
            for position, index in enumerate(indices):
                try:
                    sizes[position] = decode_to(self._path(index), pixels[position])
                except UnreadableImage as error:
                    broken[position] = str(error)
        replaced = len(broken) < len(indices)
        if replaced:
            replace_unreadable(pixels, sizes, list(broken))
        return Decoded(
            torch.from_numpy(pixels),
            None if self._fills_frame else torch.from_numpy(sizes),
            [(indices[position], message) for position, message in broken.items()],
            replaced,
        )

    def _path(self, index: int) -> Path:
        start = int(self._ends[index - 1]) if index else 0
        return Path(os.fsdecode(self._names[start : int(self._ends[index])].tobytes()))


def unchanged(decoded: Any) -> Any:
    """Return what a worker made: it is a whole batch, so there is nothing to collate."""
    return decoded
