"""Data are opened with the settings of the run: its frames, its held-out images, what it skips."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from deepbregman.config import Config, load_recipe, override
from deepbregman.data import ArrayImages, Source, Split, UnreadableImage
from deepbregman.data.opening import (
    batch_images,
    open_data,
    select_images,
    select_labels,
    split_for_monitor,
)
from deepbregman.errors import UserError

CPU = torch.device("cpu")


def change(**settings: object) -> Config:
    return override(load_recipe("digits"), {f"data.{name}": x for name, x in settings.items()})


def test_frames_follow_the_image_size_of_the_run(tmp_path):
    large = [Image.new("RGB", (300, 200)) for _ in range(2)]
    for index, image in enumerate(large):
        image.save(tmp_path / f"{index}.png")
    config = change(source=str(tmp_path), image_size=64)
    for source in (open_data(config), open_data(config, own=large)):
        assert source.train.images.side == 144  # 2.25 times


def test_only_images_that_are_not_judged_may_be_replaced(tmp_path, save_picture):
    for index in range(3):
        save_picture(tmp_path / f"{index}.png", seed=index)
    (tmp_path / "3.png").write_bytes(b"no image")
    with pytest.raises(UnreadableImage, match=r"3\.png"):
        open_data(change(source=str(tmp_path)))
    config = change(source=str(tmp_path), skip_unreadable=True)
    images = open_data(config).train.images
    assert [Path(path).name for path in images.paths] == ["0.png", "1.png", "2.png"]
    (tmp_path / "1.png").write_bytes(b"damaged since")
    assert batch_images(images, config, CPU, may_replace=True).skipped == {1}
    with pytest.raises(UnreadableImage, match=r"1\.png"):
        batch_images(images, config, CPU)


def test_what_is_trained_on():
    pixels = torch.arange(9, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    train = Split(ArrayImages(pixels[:6]), torch.arange(6) % 2)
    source = Source("any", train, unlabelled=Split(ArrayImages(pixels[6:])))
    kept = torch.tensor([0, 2, 3])

    def marks(indices: torch.Tensor, labelled: bool = False) -> list[int]:
        images = select_images(source, indices, labelled)
        assert isinstance(images, ArrayImages)
        return images.pixels[:, 0, 0, 0].tolist()

    assert marks(kept) == [0, 2, 3, 6, 7, 8]
    assert marks(kept, labelled=True) == [0, 2, 3]
    assert marks(torch.arange(6), labelled=True) == [0, 1, 2, 3, 4, 5]
    assert select_labels(source, kept, load_recipe("digits")) is None
    labels = select_labels(source, kept, load_recipe("supcon"))
    assert labels is not None
    assert labels.tolist() == [0, 0, 1]
    with pytest.raises(UserError, match="it learns from labels, and any has none"):
        select_labels(replace(source, train=Split(train.images)), kept, load_recipe("supcon"))


def test_held_out_images_follow_the_seed_of_the_run():
    train = Split(ArrayImages(torch.zeros(100, 3, 2, 2, dtype=torch.uint8)), torch.arange(100) % 5)
    held = []
    for seed in (0, 1, 1):
        kept, out = split_for_monitor(train, override(change(holdout=0.2), {"seed": seed}))
        assert sorted([*kept.tolist(), *out.tolist()]) == list(range(100))
        assert torch.bincount(out % 5).tolist() == [4] * 5
        held.append(out.tolist())
    assert held[0] != held[1] == held[2]
