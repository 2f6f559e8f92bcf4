"""A source is refused in a moment, before torch is loaded, with the words of opening it."""

from pathlib import Path

import numpy as np
import pytest

from deepbregman.data import check_source, open_source
from deepbregman.errors import UserError


def _npz(path: Path, name: str = "train_images") -> Path:
    np.savez(path, **{name: np.zeros((2, 4, 4), dtype=np.uint8)})
    return path


def test_what_can_be_opened_passes(tmp_path, save_picture):
    save_picture(tmp_path / "photos" / "deep" / "below" / "a.png")
    save_picture(tmp_path / "imagenet" / "train" / "n01440764" / "a.JPEG")
    for spec in ("digits", "cifar10", str(tmp_path / "photos"), "imagenet"):
        check_source(spec, tmp_path)
    check_source(str(_npz(tmp_path / "a.npz")))


@pytest.mark.parametrize(
    "spec",
    ["", "digit", "voc", "gone/folder", "gone.npz", "a.txt", "b.npz", "c.npz", "empty", "imagenet"],
)
def test_what_cannot_be_opened_is_refused_in_the_same_words(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("")
    _npz(Path("b.npz"), "pictures")
    Path("c.npz").write_bytes(b"PK")
    Path("empty").mkdir()
    Path("empty", "notes.txt").write_text("")
    with pytest.raises(UserError) as opened:
        open_source(spec, root=tmp_path, image_size=8)
    with pytest.raises(UserError) as checked:
        check_source(spec, tmp_path)
    assert str(checked.value) == str(opened.value)
