"""An ``.npz`` file in the convention of MedMNIST."""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepbregman.data.images import ArrayImages, Progress, Source, Split
from deepbregman.data.npz import check_room, data_offset, mapped, read_plain, readable, stored
from deepbregman.errors import UserError, shown

MAP_FROM_BYTES = 1 << 30
"""Images that take so much, stored without compression, stay in the file and are read by need."""
_CHUNK_BYTES = 1 << 24


def open_archive(path: Path) -> Source:
    """Open an ``.npz`` with ``train_images`` and, optionally, labels and a test split.

    ``<split>_images`` is uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3); ``<split>_labels`` holds
    integers, (N,) or (N, 1), and may be absent. The test split is ``test_*``, or ``val_*`` where
    there is no ``test_images``; otherwise ``val_*`` is ignored, and with neither there is no test
    split. That is how MedMNIST's files are.

    Beyond that convention, all optional: ``unlabelled_images`` to pretrain on as well;
    ``<split>_sizes``, integers (N, 2), the height and width of images that do not fill their frame
    but lie top left in it; ``<split>_names`` (N,), text; ``class_names`` (C,), text;
    ``imbalanced``, true or false. :func:`~deepbregman.data.cache.write_cache` writes them.

    Images are read in pieces, so the pixels are in memory once, and their checksum is verified.
    Stored without compression and of a GiB or more they are mapped instead: opened at once, read
    from the disk when they are used, shared between processes, and not verified.

    No size is believed: before memory is taken for an array, its shape, the bytes of its entry, the
    bytes of the file and the memory that is free must agree. Names of entries are never paths.

    Raises:
        UserError: When the file is missing, damaged, or not of this form.
    """
    with readable(path) as archive:
        names = archive.namelist()
        keys = [name.removesuffix(".npy") for name in names if name.endswith(".npy")]
        if "train_images" not in keys:
            all_names = ", ".join(name.removesuffix(".npy") for name in names)
            found = shown(all_names) if names else "nothing"
            raise UserError(
                f"data.source {str(path)!r}: has no array 'train_images' (found: {found}); "
                "name the arrays train_images, train_labels, test_images, test_labels"
            )
        train = _read_split(path, archive, "train", keys)
        test_name = next((n for n in ("test", "val") if f"{n}_images" in keys), None)
        test = None if test_name is None else _read_split(path, archive, test_name, keys)
        extra = None
        if "unlabelled_images" in keys:
            extra = Split(_read_split(path, archive, "unlabelled", keys).images)
        classes = _class_names(path, archive, keys, train, test)
        imbalanced = "imbalanced" in keys and bool(read_plain(path, archive, "imbalanced").any())
    return Source(path.stem, train, test, extra, classes, imbalanced=imbalanced)


def verify_checksums(path: Path, progress: Progress | None = None) -> None:
    """Read all of an ``.npz`` file, also what :func:`open_archive` would only map.

    Args:
        path: Of the file.
        progress: Called with the bytes read and the bytes in all.

    Raises:
        UserError: When a checksum is wrong or the file is cut short.
    """
    with readable(path) as archive:
        total, done = sum(info.file_size for info in archive.infolist()), 0
        for info in archive.infolist():
            with archive.open(info) as stream:
                while piece := stream.read(_CHUNK_BYTES):
                    done += len(piece)
                    if progress is not None:
                        progress(done, total)


def _class_names(
    path: Path, archive: zipfile.ZipFile, keys: list[str], *splits: Split | None
) -> tuple[str, ...] | None:
    labels = [split.labels for split in splits if split is not None and split.labels is not None]
    if not labels:
        return None
    num_classes = int(torch.cat(labels).max()) + 1
    if "class_names" not in keys:
        return tuple(str(label) for label in range(num_classes))
    names = _read_text(path, archive, "class_names", _most_classes(sum(map(len, labels))))
    if len(names) < num_classes:
        raise UserError(
            f"data.source {str(path)!r}: class_names has {len(names)} names for labels up to "
            f"{num_classes - 1}; give one for each class"
        )
    return names


def _read_split(path: Path, archive: zipfile.ZipFile, name: str, keys: list[str]) -> Split:
    pixels = _read_images(path, archive, f"{name}_images")
    labels, sizes, names = None, None, None
    if f"{name}_labels" in keys:
        labels = _read_labels(path, archive, f"{name}_labels", len(pixels))
    if f"{name}_sizes" in keys:
        sizes = _read_sizes(path, archive, f"{name}_sizes", pixels)
    if f"{name}_names" in keys:
        names = _read_text(path, archive, f"{name}_names", len(pixels))
        if len(names) != len(pixels):
            raise UserError(
                f"data.source {str(path)!r}: {name}_names has {len(names)} names for {len(pixels)} "
                "images: give one for each"
            )
    return Split(ArrayImages(pixels, sizes), labels, names)


def _read_images(path: Path, archive: zipfile.ZipFile, key: str) -> Tensor:
    """Read an array of images piece by piece, or map it, as a uint8 (N, 3, H, W) tensor."""
    where, info = f"data.source {str(path)!r}: {key}", archive.getinfo(f"{key}.npy")
    with stored(path, archive, key) as (stream, header):
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
        plain = info.compress_type == zipfile.ZIP_STORED
        if plain and num_images * item_bytes >= MAP_FROM_BYTES:
            start = data_offset(path, info) + stream.tell()
            return mapped(path, start, (num_images, *item)).expand(-1, 3, -1, -1)
        check_room(where, num_images * 3 * height * width + _CHUNK_BYTES)
        pixels = torch.empty((num_images, 3, height, width), dtype=torch.uint8)
        step = max(1, _CHUNK_BYTES // item_bytes)
        for first in range(0, num_images, step):
            stop = min(first + step, num_images)
            piece = bytearray(stream.read((stop - first) * item_bytes))
            chunk = torch.frombuffer(piece, dtype=torch.uint8).view(stop - first, *item)
            pixels[first:stop] = chunk.permute(0, 3, 1, 2)  # (n, 1 or 3, H, W), grey is repeated
    return pixels


def _read_text(path: Path, archive: zipfile.ZipFile, key: str, most: int) -> tuple[str, ...]:
    """Read an array of text, of at most so many words."""
    words = read_plain(path, archive, key)
    if words.dtype.kind != "U" or words.ndim != 1:
        raise UserError(
            f"data.source {str(path)!r}: {key} is of type {words.dtype} and shape {words.shape}: "
            "names are a list of text; save numpy.array of strings"
        )
    if len(words) > most:
        raise UserError(
            f"data.source {str(path)!r}: {key} has {len(words)} names for {most} at most: give one "
            "for each"
        )
    return tuple(words.tolist())


def _read_sizes(path: Path, archive: zipfile.ZipFile, key: str, pixels: Tensor) -> Tensor | None:
    """Read true sizes as int64 (N, 2), or None where every image fills its frame."""
    sizes, (num_images, _, height, width) = read_plain(path, archive, key), pixels.shape
    frame = np.array([height, width])
    good = sizes.dtype.kind in "iu" and sizes.shape == (num_images, 2)
    if not good or (sizes < 1).any() or (sizes > frame).any():
        raise UserError(
            f"data.source {str(path)!r}: {key} is of type {sizes.dtype} and shape {sizes.shape}: "
            f"it holds a height and a width for each of {num_images} images, from 1 to {height} "
            f"and {width}; write the file again"
        )
    return None if (sizes == frame).all() else torch.from_numpy(sizes.astype(np.int64))


def _read_labels(path: Path, archive: zipfile.ZipFile, key: str, num_images: int) -> Tensor:
    """Read labels as int64 (N,)."""
    where = f"data.source {str(path)!r}: {key}"
    labels = read_plain(path, archive, key)
    if labels.dtype.kind not in "iu":
        raise UserError(f"{where} is of type {labels.dtype}: labels are integers; convert them")
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise UserError(
            f"{where} has shape {labels.shape}: several labels an image, as ChestMNIST has, but "
            "one class is told from another here; leave the labels out to pretrain, and name "
            "another source to evaluate"
        )
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
    if labels.max() >= _most_classes(num_images):
        raise UserError(
            f"{where} holds {labels.max()} for {num_images} images: classes are numbered from 0 "
            "without large gaps; renumber them"
        )
    return torch.from_numpy(labels.astype(np.int64).reshape(-1))


def _most_classes(num_images: int) -> int:
    """Return how many classes so many images could have; more are taken for a mistake."""
    return max(1000, 10 * num_images)
