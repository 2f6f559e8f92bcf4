"""Pairs by cosine, groups by chains of pairs, copies by content."""

from itertools import combinations
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deepbregman.data.images import ArrayImages, FileImages, group_identical
from deepbregman.errors import UserError
from deepbregman.evaluation import duplicates
from deepbregman.evaluation.duplicates import compare_pixels, connect, find_pairs
from deepbregman.evaluation.gallery import Gallery


@given(st.integers(2, 12), st.integers(1, 40), st.integers(0, 99))
def test_pairs_are_those_of_a_loop(n, entries, seed):
    points = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    expected = [
        (i, j)
        for i, j in combinations(range(n), 2)
        if torch.cosine_similarity(points[i], points[j], dim=0) >= 0.8
    ]
    with pytest.MonkeyPatch.context() as patch:  # so many entries of the matrix at a time
        patch.setattr(duplicates, "_ENTRIES", entries)
        found = find_pairs(points, 0.8)
    assert [tuple(pair) for pair in found.tolist()] == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_chains_become_groups(drawn):
    pairs = [(min(pair), max(pair)) for pair in drawn if pair[0] != pair[1]]
    groups = [{index} for index in range(10)]
    for i, j in pairs:  # join them one after the other
        joined = next(g for g in groups if i in g) | next(g for g in groups if j in g)
        groups = [g for g in groups if not g & joined] + [joined]
    expected = sorted(sorted(group) for group in groups if len(group) > 1)
    found = connect(torch.tensor(pairs, dtype=torch.int64).view(-1, 2), 10)
    assert sorted(found) == expected


def test_features_that_tell_nothing_apart_are_refused():
    with pytest.raises(UserError, match=r"threshold is 0.9: more than 50 images"):
        find_pairs(torch.ones(200, 3), 0.9)


def test_files_with_the_same_bytes(tmp_path):
    contents = [b"one", b"two", b"one", b"four", b"", b"two", b"one", b""]
    paths = [tmp_path / f"{index}.png" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    found = group_identical(FileImages(tuple(paths), 8))
    assert sorted(found) == [[0, 2, 6], [1, 5], [4, 7]]


def test_arrays_with_the_same_pixels():
    pixels = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    pixels[1, 0, 0, 0] = 1
    assert group_identical(ArrayImages(pixels)) == [[0, 2, 3]]
    # What lies outside the true size does not count, the size does.
    pixels[3, :, 1] = 9
    sizes = torch.tensor([[1, 2], [1, 2], [2, 2], [1, 2]])
    assert group_identical(ArrayImages(pixels, sizes)) == [[0, 3]]


def test_pixels_tell_copies_from_other_pictures_with_the_same_background():
    """Correlations of thumbnails, by numpy; a mirrored copy counts as a copy."""
    random = np.random.default_rng(0)

    def picture() -> Image.Image:
        pixels = np.full((64, 96, 3), (20, 60, 200), dtype=np.uint8)  # a blue sky
        x, y = random.integers(8, 40, 2)
        pixels[x : x + 16, y : y + 24] = random.integers(0, 256, 3)
        return Image.fromarray(pixels)

    first, other = picture(), picture()
    images = {
        2: first,
        5: first.resize((48, 32), Image.Resampling.BICUBIC),
        7: first.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        9: other,
    }
    pixels = {index: np.array(image) for index, image in images.items()}
    gallery = SimpleNamespace(pictures=lambda chosen, side: {i: pixels[i] for i in chosen})
    pairs = torch.tensor([[2, 5], [2, 7], [2, 9], [5, 9]])
    found = compare_pixels(cast("Gallery", gallery), pairs)

    def row(image: Image.Image) -> npt.NDArray[np.float64]:
        small = np.array(image.resize((16, 16), Image.Resampling.BOX), dtype=np.float64)
        centred = (small - small.mean(axis=(0, 1))).ravel()
        return centred / np.linalg.norm(centred)

    for (one, two), value in zip(pairs.tolist(), found.tolist(), strict=True):
        mirrored = images[two].transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        expected = max(row(images[one]) @ row(images[two]), row(images[one]) @ row(mirrored))
        assert value == pytest.approx(expected, abs=0.02)  # thumbnails are mirrored, not images
    assert found[:2].min() > 0.95
    assert found[2:].max() < 0.7
    assert compare_pixels(cast("Gallery", gallery), pairs[:0]).shape == (0,)
