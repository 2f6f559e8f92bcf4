"""Archives by somebody else: nothing in them runs, and no size is believed unchecked."""

import io
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepbregman.data import Source, open_source
from deepbregman.data import archives as archives_module
from deepbregman.data.archives import verify_checksums
from deepbregman.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
ARRAYS: dict[str, np.ndarray] = {
    "train_images": IMAGES,
    "train_labels": np.array([0, 2, 1, 1, 0]),
    "train_sizes": np.full((5, 2), 3),
    "train_names": np.array(["a", "b", "c", "d", "e"]),
    "class_names": np.array(["x", "y", "z"]),
    "unlabelled_images": IMAGES,
    "test_images": IMAGES,
}
pytestmark = pytest.mark.usefixtures("little_memory")
SMALL = ("train_labels", "train_sizes", "train_names", "class_names")


class Bomb:
    """What it was pickled with runs when it is unpickled carelessly."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, values)
    return buffer.getvalue()


def claimed(shape: tuple[int, ...], kind: str, data: bytes = b"") -> bytes:
    """An array that says to have a shape, and has these bytes."""
    buffer = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + data


def write(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for key, content in members.items():
            archive.writestr(f"{key}.npy", content)
    return path


def members(**changes: bytes) -> dict[str, bytes]:
    return {key: npy(values) for key, values in ARRAYS.items()} | changes


def opened(path: Path) -> Source:
    return open_source(str(path), image_size=4)


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        opened(path)
    words = str(caught.value)
    assert repr(str(path)) in words
    assert len(words) < 1500
    return words


def test_the_table_is_sound(tmp_path):
    source = opened(write(tmp_path / "a.npz", members()))
    assert source.train.names == ("a", "b", "c", "d", "e")
    assert source.classes == ("x", "y", "z")
    assert source.train.images.true_sizes().tolist() == [[3, 3]] * 5
    assert np.array_equal(source.train.images.pixels.numpy(), IMAGES.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("key", ARRAYS)
def test_pickled_objects_do_not_run(tmp_path, key):
    target = tmp_path / "ran"
    live = npy(np.array([Bomb(target)] * 5, dtype=object))
    assert "pickled" in refusal(write(tmp_path / "a.npz", members(**{key: live})))
    plain = pickle.dumps(Bomb(target))
    refusal(write(tmp_path / "b.npz", members(**{key: plain})))
    assert not target.exists()
    np.load(io.BytesIO(live), allow_pickle=True)
    assert target.exists()  # the bomb was a live one


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("key", ARRAYS)
@pytest.mark.parametrize(
    "shape",
    [(10**12,), (10**6, 10**6, 3), (2**62, 4), (2**63, 2**63, 2), (-5, -4, 6), (-1,)],
    ids=str,
)
def test_shape_that_the_bytes_do_not_bear_out(tmp_path, key, shape, method):
    kind = "<U9" if "names" in key else "|u1" if "images" in key else "<i8"
    path = write(tmp_path / "a.npz", members(**{key: claimed(shape, kind, bytes(72))}), method)
    assert key in refusal(path)


@pytest.mark.parametrize("key", SMALL)
@pytest.mark.parametrize("kind", ["<U0", "|V0", "|S0"])
def test_items_without_bytes(tmp_path, key, kind):
    refusal(write(tmp_path / "a.npz", members(**{key: claimed((10**15,), kind)})))


@pytest.mark.parametrize("key", ["train_images", "class_names"])
def test_bomb_that_really_unpacks(tmp_path, key):
    """400 MB of zeros in 2 MB: true to its header, and refused for the memory it would take."""
    kind = "<U1" if "names" in key else "|u1" if "images" in key else "<i8"
    count = 400_000_000 // np.dtype(kind).itemsize
    shape = (count // 8, 2, 4) if "images" in key else (count,)
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members().items():
            if name != key:
                archive.writestr(f"{name}.npy", content)
        with archive.open(f"{key}.npy", "w") as stream:
            stream.write(claimed(shape, kind))
            for _ in range(40):
                stream.write(bytes(10_000_000))
    assert (tmp_path / "a.npz").stat().st_size < 4_000_000
    words = refusal(tmp_path / "a.npz")
    assert key in words
    assert "GB are free" in words


def rewritten(path: Path, change: Callable[[bytearray], object]) -> Path:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


def entry_of(content: bytes, name: str) -> int:
    """Where the entry of a member in the directory at the end begins."""
    return content.rindex(b"PK\x01\x02", 0, content.rindex(name.encode()))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("lies", [(None, 2**31), (2**31, 2**31), (2**31, None)])
@pytest.mark.parametrize("mapped", [False, True])
def test_directory_that_lies_about_sizes(tmp_path, monkeypatch, method, lies, mapped):
    shape = (2**31 // 24, 4, 6) if lies[1] else (5, 4, 6)
    monkeypatch.setattr(archives_module, "MAP_FROM_BYTES", 1 if mapped else 1 << 40)
    path = write(tmp_path / "a.npz", {"train_images": claimed(shape, "|u1", bytes(120))}, method)

    def lie(content: bytearray) -> None:
        at = entry_of(content, "train_images.npy")
        header = len(claimed(shape, "|u1"))
        packed, unpacked = lies
        if packed is not None:
            content[at + 20 : at + 24] = struct.pack("<I", packed)
        if unpacked is not None:
            size = shape[0] * 24 + header
            content[at + 24 : at + 28] = struct.pack("<I", size)

    refusal(rewritten(path, lie))


def test_entry_that_is_cut_short_but_has_the_right_checksum(tmp_path):
    path = write(tmp_path / "a.npz", {"train_images": npy(IMAGES)[:-50]}, zipfile.ZIP_DEFLATED)

    def lie(content: bytearray) -> None:
        at = entry_of(content, "train_images.npy")
        content[at + 24 : at + 28] = struct.pack("<I", len(npy(IMAGES)))

    refusal(rewritten(path, lie))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_that_numpy_does_not_write(tmp_path, method):
    assert "numpy.savez" in refusal(write(tmp_path / "a.npz", members(), method))


def test_encrypted(tmp_path):
    path = write(tmp_path / "a.npz", members())

    def encrypt(content: bytearray) -> None:
        at = 0
        for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            at = content.find(signature)
            while at >= 0:
                content[at + offset] |= 1
                at = content.find(signature, at + 4)

    assert "encrypted" in refusal(rewritten(path, encrypt))


def test_array_that_lacks_its_ending(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("train_images", npy(IMAGES))
    assert "train_images" in refusal(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "..\\outside", "a/../../b"])
def test_names_of_entries_are_never_paths(tmp_path, name):
    folder = tmp_path / "deep" / "deeper"
    folder.mkdir(parents=True)
    path = write(folder / "a.npz", members(**{name: npy(IMAGES)}))
    before = sorted(tmp_path.rglob("*"))
    opened(path)
    verify_checksums(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_million_names_make_no_endless_error(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for index in range(2000):
            archive.writestr(f"{index}{'x' * 50}.npy", b"")
    assert "train_images" in refusal(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (5, 4, 6, 3), ",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (5, 4, 6, 3), 'x': 1}",
        b"__import__('os').mkdir('ran')",
        b"(" * 3000,
        b"{'descr': [('a', '|u1', (10**9,))], 'fortran_order': False, 'shape': (1,)}",
        b"{'descr': [('a', '|u1', (1000000000,))], 'fortran_order': False, 'shape': (1000000000,)}",
        b"{'descr': 'O', 'fortran_order': False, 'shape': (5,)}",
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (True, 4, 6, 3)}",
        b"\x00\xff" * 40,
        b"'" * 31,
        b"  {\n  1",
        b"9" * 9000,
    ],
    ids=lambda header: str(header[:24]),
)
@pytest.mark.parametrize("key", ["train_images", "train_labels"])
@pytest.mark.parametrize("version", [1, 2, 3, 9])
def test_headers_are_data(tmp_path, monkeypatch, key, version, header):
    monkeypatch.chdir(tmp_path)
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    content = b"\x93NUMPY" + bytes([version, 0]) + length + header + IMAGES.tobytes()
    refusal(write(tmp_path / "a.npz", members(**{key: content})))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_any_bytes_changed(tmp_path, method):
    """A changed file is refused by name, or what it holds is what it held."""
    whole = write(tmp_path / "whole.npz", members(), method).read_bytes()
    expected, chance, refused = opened(tmp_path / "whole.npz"), random.Random(method), 0
    path = tmp_path / "a.npz"
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3])):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(
            content[: chance.choice([len(content)] * 3 + [chance.randrange(len(content))])]
        )
        try:
            source = opened(path)
        except UserError as error:
            assert repr(str(path)) in str(error)  # noqa: PT017  # both outcomes are right
            refused += 1
            continue
        assert np.array_equal(source.train.images.pixels, expected.train.images.pixels)
    assert 200 < refused < 400
