"""A dataset in one ``.npz`` file, in the convention of MedMNIST: open it, verify it, write it."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepbregman.data.decoding import Pixels
from deepbregman.data.frames import Sizes, decode_frames
from deepbregman.data.images import (
    ArrayImages,
    FileImages,
    Images,
    Progress,
    Source,
    Split,
    share_pixels,
)
from deepbregman.data.npz import NpzReader, open_npz
from deepbregman.data.stored import limit_classes
from deepbregman.terminal import ignore_progress

MAP_FROM_BYTES = 1 << 30
"""Images that take so much, stored without compression, stay in the file and are read by need."""
_READ_BYTES, _WRITTEN_BYTES = 1 << 24, 1 << 27  # bytes at a time


def open_archive(path: Path) -> Source:
    """Open an ``.npz`` with ``train_images`` and, optionally, labels and a test split.

    ``<split>_images`` is uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3); ``<split>_labels`` holds
    integers, (N,) or (N, 1), and may be absent. The test split is ``test_*``, or ``val_*`` where
    there is no ``test_images``; otherwise ``val_*`` is ignored, and with neither there is no test
    split. That is how MedMNIST's files are.

    Beyond that convention, all optional: ``unlabelled_images`` to pretrain on as well;
    ``<split>_sizes``, integers (N, 2), the height and width of images that do not fill their frame
    but lie top left in it; ``<split>_names`` (N,), text; ``class_names`` (C,), text.
    :func:`write_archive` writes them.

    Images are read in pieces, so the pixels are in memory once, and their checksum is verified.
    Stored without compression and of a GiB or more they are mapped instead: opened at once, read
    from the disk when they are used, shared between processes, and not verified.

    No size is believed: before memory is taken for an array, its shape, the bytes of its entry, the
    bytes of the file and the memory that is free must agree. Names of entries are never paths.
    """
    with open_npz(path) as reader:
        train = _read_split(reader, "train")
        tests = [name for name in ("test", "val") if f"{name}_images" in reader.keys]
        labelled = [name for name in tests if f"{name}_labels" in reader.keys]
        test_name = next(iter(labelled or tests), None)
        test = None if test_name is None else _read_split(reader, test_name)
        extra = None
        if "unlabelled_images" in reader.keys:
            extra = Split(_read_split(reader, "unlabelled").images)
        classes = _read_class_names(reader, train, test)
    return Source(path.stem, train, test, extra, classes)


def verify_checksums(path: Path) -> None:
    """Read all of an ``.npz`` file, also what :func:`open_archive` would only map."""
    with open_npz(path) as reader:
        if damaged := reader.archive.testzip():
            raise reader.error(
                damaged, "does not have the CRC checksum stored with it; copy it again"
            )


def _read_class_names(reader: NpzReader, *splits: Split | None) -> tuple[str, ...] | None:
    labels = [split.labels for split in splits if split is not None and split.labels is not None]
    if not labels:
        return None
    num_classes = int(torch.cat(labels).max()) + 1
    if "class_names" not in reader.keys:
        return tuple(str(label) for label in range(num_classes))
    return _read_text(reader, "class_names", num_classes, limit_classes(sum(map(len, labels))))


def _read_split(reader: NpzReader, name: str) -> Split:
    pixels = _read_images(reader, f"{name}_images")
    labels, sizes, names = None, None, None
    if f"{name}_labels" in reader.keys:
        labels = _read_labels(reader, f"{name}_labels", len(pixels))
    if f"{name}_sizes" in reader.keys:
        sizes = _read_sizes(reader, f"{name}_sizes", pixels)
    if f"{name}_names" in reader.keys:
        names = _read_text(reader, f"{name}_names", len(pixels), len(pixels))
    return Split(ArrayImages(pixels, sizes), labels, names)


def _read_images(reader: NpzReader, key: str) -> Tensor:
    """Read an array of images piece by piece, or map it, as a uint8 (N, 3, H, W) tensor."""
    with reader.open(key) as (stream, header):
        shape = header.shape
        is_image = len(shape) in (3, 4) and shape[3:] in ((), (1,), (3,)) and 0 not in shape
        if header.dtype != np.uint8 or not is_image or header.fortran_order:
            order = " in Fortran order" if header.fortran_order else ""
            raise reader.error(
                key,
                f"is of type {header.dtype} and shape {shape}{order}: images are uint8 (N, H, W), "
                "(N, H, W, 1) or (N, H, W, 3), at least one, in C order; convert or reshape it",
            )
        num_images, height, width = shape[:3]
        item = (height, width, shape[3] if len(shape) == 4 else 1)
        item_bytes = item[0] * item[1] * item[2]
        start = reader.find_stored(key) if num_images * item_bytes >= MAP_FROM_BYTES else None
        if start is not None:
            start += stream.tell()
            return _map_pixels(reader.path, start, (num_images, *item)).expand(-1, 3, -1, -1)
        reader.check_room(key, num_images * 3 * height * width + _READ_BYTES)
        pixels = torch.empty((num_images, 3, height, width), dtype=torch.uint8)
        step = max(1, _READ_BYTES // item_bytes)
        for first in range(0, num_images, step):
            stop = min(first + step, num_images)
            piece = bytearray(stream.read((stop - first) * item_bytes))
            chunk = torch.frombuffer(piece, dtype=torch.uint8).view(stop - first, *item)
            pixels[first:stop] = chunk.permute(0, 3, 1, 2)  # (n, 1 or 3, H, W), grey is repeated
    return pixels


def _read_text(reader: NpzReader, key: str, least: int, most: int) -> tuple[str, ...]:
    """Read a list of names; too many of them are refused before Python makes them all strings."""
    words = reader.read(key)
    if words.dtype.kind != "U" or words.ndim != 1:
        raise reader.error(
            key,
            f"is of type {words.dtype} and shape {words.shape}: names are a list of text; save "
            "numpy.array of strings",
        )
    if not least <= len(words) <= most:
        raise reader.error(key, f"has {len(words)} names for {least}: give one for each")
    return tuple(words.tolist())


def _read_sizes(reader: NpzReader, key: str, pixels: Tensor) -> Tensor | None:
    """Read true sizes as int64 (N, 2), or None where every image fills its frame."""
    sizes, (num_images, _, height, width) = reader.read(key), pixels.shape
    frame = np.array([height, width])
    good = sizes.dtype.kind in "iu" and sizes.shape == (num_images, 2)
    if not good or (sizes < 1).any() or (sizes > frame).any():
        raise reader.error(
            key,
            f"is of type {sizes.dtype} and shape {sizes.shape}: it holds a height and a width for "
            f"each of {num_images} images, from 1 to {height} and {width}; write the file again",
        )
    return None if (sizes == frame).all() else torch.from_numpy(sizes.astype(np.int64))


def _read_labels(reader: NpzReader, key: str, num_images: int) -> Tensor:
    """Read labels as int64 (N,)."""
    labels = reader.read(key)
    problem = None
    if labels.dtype.kind not in "iu" or labels.shape not in ((labels.size,), (labels.size, 1)):
        problem = (
            f"is of type {labels.dtype} and shape {labels.shape}: labels are integers, (N,) or "
            "(N, 1), one class an image; convert them, or leave them out if an image has "
            "several, as in ChestMNIST"
        )
    elif len(labels) != num_images:
        problem = f"has {len(labels)} labels for {num_images} images: give one for each"
    elif labels.min() < 0:
        problem = f"holds {labels.min()}: classes are numbered from 0; renumber them"
    elif labels.max() >= limit_classes(num_images):
        problem = (
            f"holds {labels.max()} for {num_images} images: classes are numbered from 0 without "
            "large gaps; renumber them"
        )
    if problem is not None:
        raise reader.error(key, problem)
    return torch.from_numpy(labels.astype(np.int64).reshape(-1))


def _map_pixels(path: Path, offset: int, shape: tuple[int, ...]) -> Tensor:
    """Map (N, H, W, C) bytes of a file as (N, C, H, W)."""
    # A private writable mapping is refused by Linux where it is larger than the memory.
    pixels = np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=shape)
    return share_pixels(pixels).permute(0, 3, 1, 2)


def write_archive(
    source: Source,
    file: IO[bytes],
    *,
    skip_unreadable: bool = False,
    progress: Progress = ignore_progress,
) -> int:
    """Write a source with its images decoded, so that :func:`open_archive` opens it at once.

    Files are decoded as for training: shrunk, never enlarged, until the longer side fits into the
    frame, top left in zeros, with their true sizes beside them; nothing is cropped. Opened again,
    the source has the same pixels, sizes, labels, names and classes. Arrays are stored without
    compression and written in pieces, so that memory stays bounded.

    With ``skip_unreadable`` the nearest following readable image takes the place of one that cannot
    be decoded, as in training; it returns how many were replaced.
    """
    splits = {name: split for name, split in source.splits.items() if len(split)}
    total, done, num_replaced = sum(map(len, splits.values())), 0, 0
    with zipfile.ZipFile(file, "w") as archive:
        for name, split in splits.items():
            images, sizes = split.images, []
            shape = (len(images), *images.frame, 3)
            with _open_member(archive, f"{name}_images") as stream:
                np.lib.format.write_array_header_1_0(
                    stream, {"descr": "|u1", "fortran_order": False, "shape": shape}
                )
                for pixels, fitted, broken in _read_pieces(images, skip_unreadable):
                    stream.write(pixels.data.cast("B"))
                    sizes.append(fitted)
                    num_replaced += len(broken)
                    done += len(pixels)
                    progress(done, total)
            true_sizes = np.concatenate(sizes)
            if not (true_sizes == np.array(images.frame)).all():
                _write_array(archive, f"{name}_sizes", true_sizes)
            if split.labels is not None:
                _write_array(archive, f"{name}_labels", split.labels.numpy()[:, None])
            if split.names is not None:
                _write_array(archive, f"{name}_names", np.array(split.names, dtype=np.str_))
        if source.classes is not None:
            _write_array(archive, "class_names", np.array(source.classes, dtype=np.str_))
    return num_replaced


def _read_pieces(
    images: Images, skip_unreadable: bool
) -> Iterator[tuple[Pixels, Sizes, list[int]]]:
    """Yield frames (n, H, W, 3), their true sizes (n, 2), and which have a stand-in."""
    height, width = images.frame
    step = max(1, _WRITTEN_BYTES // (height * width * 3))
    for indices in torch.split(torch.arange(len(images)), step):
        part = images.select(indices)
        if isinstance(part, FileImages):
            yield decode_frames(part.paths, part.side, skip_unreadable)
        else:
            pixels = part.pixels.permute(0, 2, 3, 1).contiguous().numpy()
            yield pixels, part.true_sizes().numpy(), []


def _write_array(archive: zipfile.ZipFile, key: str, values: npt.NDArray[np.generic]) -> None:
    content = io.BytesIO()
    np.lib.format.write_array(content, values, allow_pickle=False)
    with _open_member(archive, key) as stream:
        stream.write(content.getbuffer())


def _open_member(archive: zipfile.ZipFile, key: str) -> IO[bytes]:
    # Dated 1980, so that the same source gives the same bytes at any time.
    return archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True)
