"""An ``.npz`` file in the convention of MedMNIST."""

import zipfile
import zlib
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepbregman.data.images import ArrayImages, Source, Split
from deepbregman.errors import UserError

_CHUNK_BYTES = 1 << 24


class _Header(NamedTuple):
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: "np.dtype[np.generic]"


def open_archive(path: Path) -> Source:
    """Open an ``.npz`` with ``train_images`` and, optionally, labels and a test split.

    ``<split>_images`` is uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3); ``<split>_labels`` holds
    integers, (N,) or (N, 1), and may be absent. The test split is ``test_*``, or ``val_*`` where
    there is no ``test_images``; otherwise ``val_*`` is ignored, and with neither there is no test
    split. Images are read in pieces, so the pixels are in memory once.

    Raises:
        UserError: When the file is missing, damaged, or not of this form.
    """
    if not path.is_file():
        raise UserError(f"data.source {str(path)!r}: no such file; give the path of an .npz file")
    try:
        with zipfile.ZipFile(path) as archive:
            keys = [name.removesuffix(".npy") for name in archive.namelist()]
            if "train_images" not in keys:
                found = ", ".join(keys) or "nothing"
                raise UserError(
                    f"data.source {str(path)!r}: has no array 'train_images' (found: {found}); "
                    "name the arrays train_images, train_labels, test_images, test_labels"
                )
            train = _read_split(path, archive, "train", keys)
            test_name = next((n for n in ("test", "val") if f"{n}_images" in keys), None)
            test = None if test_name is None else _read_split(path, archive, test_name, keys)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UserError(
            f"data.source {str(path)!r}: not a readable .npz file ({error}); "
            "write it again with numpy.savez, or copy it again"
        ) from error
    except OSError as error:
        raise UserError(f"data.source {str(path)!r}: cannot be read ({error})") from error
    return Source(path.stem, train, test, classes=_class_names(train, test))


def _class_names(*splits: Split | None) -> tuple[str, ...] | None:
    labels = [split.labels for split in splits if split is not None and split.labels is not None]
    if not labels:
        return None
    return tuple(str(label) for label in range(int(torch.cat(labels).max()) + 1))


def _read_split(path: Path, archive: zipfile.ZipFile, name: str, keys: list[str]) -> Split:
    pixels = _read_images(path, archive, f"{name}_images")
    if f"{name}_labels" not in keys:
        return Split(ArrayImages(pixels))
    return Split(ArrayImages(pixels), _read_labels(path, f"{name}_labels", len(pixels)))


def _read_images(path: Path, archive: zipfile.ZipFile, key: str) -> Tensor:
    """Read an array of images piece by piece into a uint8 (N, 3, H, W) tensor."""
    where = f"data.source {str(path)!r}: {key}"
    with archive.open(f"{key}.npy") as stream:
        header = _read_header(stream, where)
        shape = header.shape
        rule = "images are uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3)"
        if header.dtype != np.uint8:
            raise UserError(f"{where} is of type {header.dtype}, but {rule}; convert it")
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
            raise UserError(f"{where} has shape {shape}, but {rule}; reshape or transpose it")
        if 0 in shape:
            raise UserError(f"{where} has shape {shape}: there is no image in it")
        if header.fortran_order:
            raise UserError(
                f"{where} is stored in Fortran order; save numpy.ascontiguousarray of it"
            )
        num_images, height, width = shape[:3]
        item = (height, width, shape[3] if len(shape) == 4 else 1)
        item_bytes = item[0] * item[1] * item[2]
        left = archive.getinfo(f"{key}.npy").file_size - stream.tell()
        if left != num_images * item_bytes:
            raise UserError(
                f"{where} has shape {shape} but {left} bytes of pixels; write the file again"
            )
        pixels = torch.empty((num_images, 3, height, width), dtype=torch.uint8)
        step = max(1, _CHUNK_BYTES // item_bytes)
        for start in range(0, num_images, step):
            stop = min(start + step, num_images)
            piece = bytearray(stream.read((stop - start) * item_bytes))
            chunk = torch.frombuffer(piece, dtype=torch.uint8).view(stop - start, *item)
            pixels[start:stop] = chunk.permute(0, 3, 1, 2)  # (n, 1 or 3, H, W), grey is repeated
    return pixels


def _read_header(stream: IO[bytes], where: str) -> _Header:
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            header = _Header(*np.lib.format.read_array_header_1_0(stream))
        else:
            header = _Header(*np.lib.format.read_array_header_2_0(stream))
    except ValueError as error:
        raise UserError(f"{where} is not a NumPy array ({error}); use numpy.savez") from error
    if header.dtype.hasobject:
        raise UserError(
            f"{where} holds pickled Python objects, which are never loaded; save plain arrays"
        )
    return header


def _read_labels(path: Path, key: str, num_images: int) -> Tensor:
    """Read labels as int64 (N,)."""
    where = f"data.source {str(path)!r}: {key}"
    try:
        with np.load(path, allow_pickle=False) as archive:
            labels = np.asarray(archive[key])
    except ValueError as error:
        raise UserError(
            f"{where} cannot be read ({error}); pickled objects are never loaded: save plain "
            "integers"
        ) from error
    if labels.dtype.kind not in "iu":
        raise UserError(f"{where} is of type {labels.dtype}: labels are integers; convert them")
    if labels.shape not in ((len(labels),), (len(labels), 1)):
        raise UserError(
            f"{where} has shape {labels.shape}: labels are (N,) or (N, 1), one class an image"
        )
    if len(labels) != num_images:
        raise UserError(
            f"{where} has {len(labels)} labels for {num_images} images: give one for each"
        )
    if labels.min() < 0:
        raise UserError(f"{where} holds {labels.min()}: classes are numbered from 0; renumber them")
    if labels.max() >= max(1000, 10 * num_images):
        raise UserError(
            f"{where} holds {labels.max()} for {num_images} images: classes are numbered from 0 "
            "without large gaps; renumber them"
        )
    return torch.from_numpy(labels.astype(np.int64).reshape(-1))
