from pathlib import Path

import pytest
import torch

from deepbregman.data import ArrayImages, FileImages, Split, join_arrays, open_source
from deepbregman.errors import UserError


def test_unknown_source_suggests_the_nearest():
    with pytest.raises(UserError) as caught:
        open_source("digit", image_size=8)
    here = f" in {Path.cwd()}, and not one of digits, cifar10, cifar100, stl10"
    for part in ("'digit'", here, "did you mean 'digits'?"):
        assert part in str(caught.value)


def test_pascal_voc_is_for_detection():
    with pytest.raises(UserError, match=r"'voc'.*--protocol detect"):
        open_source("voc", image_size=224)


def test_empty_source_is_not_the_working_folder():
    with pytest.raises(UserError, match=r"data\.source ''"):
        open_source("", image_size=8)


def test_file_of_another_kind(tmp_path):
    path = tmp_path / "images.zip"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"images\.zip.*not one of \.npz"):
        open_source(str(path), image_size=8)


def test_image_size_must_be_positive():
    with pytest.raises(UserError, match=r"data\.image_size 0"):
        open_source("digits", image_size=0)


def test_selection_keeps_everything_aligned():
    pixels = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 3, 2, 2)
    sizes = torch.tensor([[1, 1], [1, 2], [2, 1], [2, 2]])
    split = Split(ArrayImages(pixels, sizes), torch.tensor([5, 6, 7, 8]), ("a", "b", "c", "d"))
    chosen = split.select(torch.tensor([3, 1]))
    assert chosen.images.pixels[:, 0, 0, 0].tolist() == [3, 1]
    assert chosen.images.sizes.tolist() == [[2, 2], [1, 2]]
    assert chosen.labels.tolist() == [8, 6]
    assert chosen.names == ("d", "b")
    assert (len(chosen), chosen.images.nbytes) == (2, 2 * 3 * 2 * 2)


def test_files_are_counted_as_if_decoded():
    files = FileImages((Path("a"), Path("b"), Path("c")), side=10, fills_frame=True)
    assert files.nbytes == 3 * 3 * 10 * 10
    chosen = files.select(torch.tensor([2, 0]))
    assert chosen == chosen
    assert (chosen.paths, chosen.side, chosen.fills_frame) == ((Path("c"), Path("a")), 10, True)


def test_joined_images_keep_their_sizes():
    pixels = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8)
    sizes = torch.tensor([[1, 2], [4, 6]])
    joined = join_arrays(ArrayImages(pixels[:3]), ArrayImages(pixels[3:], sizes))
    assert torch.equal(joined.pixels, pixels)
    assert joined.sizes.tolist() == [[4, 6]] * 3 + sizes.tolist()
    bare = join_arrays(ArrayImages(pixels[:3]), ArrayImages(pixels[3:]))
    assert bare.sizes is None
    with pytest.raises(UserError, match=r"of \(4, 6\) and of \(6, 4\) pixels"):
        join_arrays(ArrayImages(pixels), ArrayImages(pixels.transpose(2, 3)))
