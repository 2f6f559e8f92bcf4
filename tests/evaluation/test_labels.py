"""Which labels few-label protocols see: counts, lists, and every way to get them wrong."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepbregman.data import ArrayImages, Source, Split, stratified_split
from deepbregman.errors import UserError
from deepbregman.evaluation.retraining import draw_labelled, list_rounded_up, read_labelled


def made_of(labels: list[int], names: list[str] | None = None, test: list[str] | None = None):  # type: ignore[no-untyped-def]  # a source
    def split(count: int, labels: list[int] | None, names: list[str] | None) -> Split:
        pixels = torch.zeros(count, 3, 2, 2, dtype=torch.uint8)
        numbers = None if labels is None else torch.tensor(labels)
        return Split(ArrayImages(pixels), numbers, None if names is None else tuple(names))

    tested = None if test is None else split(len(test), None, test)
    return Source("toy", split(len(labels), labels, names), tested, classes=("cat", "dog", "eel"))


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=6),
    st.sampled_from([0.01, 0.02, 0.1, 0.25, 0.5]),
    st.integers(0, 3),
)
def test_a_share_of_each_class_and_at_least_one_image(counts, share, seed):
    labels = torch.tensor([c for c, count in enumerate(counts) for _ in range(count)])
    source = made_of(labels.tolist())
    drawn = draw_labelled(source, share, seed)
    found = torch.bincount(labels[drawn], minlength=len(counts)).tolist()
    assert len(set(drawn.tolist())) == len(drawn)
    assert drawn.tolist() == sorted(drawn.tolist())
    for part, count in zip(found, counts, strict=True):
        assert max(1, math.floor(share * count)) <= part <= max(1, math.ceil(share * count))
    if min(counts) * share >= 1:  # no class is rounded up: the total is that of the whole set
        assert abs(len(drawn) - share * sum(counts)) <= 1
        assert torch.equal(drawn, stratified_split(labels, len(labels), share, seed)[1])
    small = [str(label) for label, count in enumerate(counts) if count * share < 1]
    unnamed = dataclasses.replace(source, classes=None)
    assert list_rounded_up(unnamed, share) == small
    assert torch.equal(drawn, draw_labelled(source, share, seed))


def test_another_seed_draws_others_and_one_is_all():
    source = made_of([0] * 50 + [1] * 50)
    assert not torch.equal(draw_labelled(source, 0.1, 0), draw_labelled(source, 0.1, 1))
    assert torch.equal(draw_labelled(source, 1.0, 0), torch.arange(100))


def test_one_per_cent_of_unequal_classes():
    """Class sizes of HAM10000: a hundredth of the smallest is 0.91 of an image."""
    source = made_of([0] * 5338 + [1] * 880 + [2] * 91)
    drawn = draw_labelled(source, 0.01, 0)
    assert torch.bincount(source.train.labels[drawn]).tolist() == [53, 9, 1]
    assert list_rounded_up(source, 0.01) == ["eel"]
    assert list_rounded_up(source, 0.1) == []


PATHS = ["train/cat/a.png", "train/cat/b.png", "train/dog/a.png", "train/dog/c.png"]


@pytest.fixture
def folder() -> Source:
    return made_of([0, 0, 1, 1], PATHS, ["test/cat/t.png"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b.png\nc.png\n", [1, 3]),
        ("dog/a.png\r\n\r\n  b.png \r\n", [1, 2]),
        ("./train/cat/a.png\ntrain/dog/a.png\nb.png\nb.png", [0, 1, 2]),
    ],
)
def test_a_list(folder, tmp_path, text, expected):
    (tmp_path / "list.txt").write_bytes(text.encode())
    assert read_labelled(folder, tmp_path / "list.txt").tolist() == expected


def test_a_whole_path_wins_over_the_end_of_another(tmp_path):
    source = made_of([0, 1], ["cat/a.png", "old/cat/a.png"])
    (tmp_path / "list.txt").write_text("cat/a.png\nold/cat/a.png")
    assert read_labelled(source, tmp_path / "list.txt").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b.png\nx.png\ny.png", "2 of its 3 names are not training images of toy, such as 'x.png'"),
        ("t.png\nb.png", "1 of its 2 names are not training images of toy, such as 't.png'"),
        ("a.png\nb.png", "1 of its names fit several training images, such as 'a.png'"),
        ("at/b.png\nc.png", "'at/b.png'"),  # an end, but not of whole folders
        ("b.png", r"no image of 1 class \('dog'\)"),
        (" \n\n", "names no image"),
        ("\udcff", "cannot be read"),
    ],
)
def test_bad_lists(folder, tmp_path, text, words):
    (tmp_path / "list.txt").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=words):
        read_labelled(folder, tmp_path / "list.txt")


def test_no_list_and_no_names(folder, tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_labelled(folder, tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="have no file names"):
        read_labelled(made_of([0, 1]), tmp_path / "nowhere.txt")
