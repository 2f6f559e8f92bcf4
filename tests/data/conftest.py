"""Pictures on disk that the tests of this folder share."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from deepbregman.data.decoding import decode_to

SavePicture = Callable[..., np.ndarray]


class Frame(NamedTuple):
    """A decoded image (3, side, side), top left in black, and its true height and width."""

    pixels: np.ndarray
    size: tuple[int, int]


def decode_frame(path: Path, side: int) -> Frame:
    pixels = np.full((side, side, 3), 7, dtype=np.uint8)
    size = decode_to(path, pixels)
    return Frame(pixels.transpose(2, 0, 1), size)


@pytest.fixture
def save_picture() -> SavePicture:
    """Return a function that saves a random RGB picture and returns its pixels, (H, W, 3)."""

    def save(path: Path, height: int = 6, width: int = 6, seed: int = 0) -> np.ndarray:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        return pixels

    return save


@pytest.fixture
def truncate() -> Callable[[Path], None]:
    """Return a function that cuts an image file to its first two thirds."""

    def cut(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])

    return cut
