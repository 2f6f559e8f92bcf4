"""A source written as one ``.npz`` file of decoded frames, which opens at once."""

import io
import zipfile
from collections.abc import Iterator
from typing import IO

import numpy as np
import numpy.typing as npt

from deepbregman.data.frames import Pixels, decode_frames
from deepbregman.data.images import ArrayImages, FileImages, Images, Progress, Source, Split

_CHUNK_BYTES = 1 << 27
_WRITTEN = (1980, 1, 1, 0, 0, 0)  # the same source gives the same bytes, whenever it is written


def cache_bytes(source: Source) -> int:
    """Return about how many bytes :func:`write_cache` will write: the pixels and what is small."""
    splits = [split for _, split in _splits(source)]
    small = 1 << 20
    for split in splits:
        longest = max(map(len, split.names), default=0) if split.names is not None else 0
        small += len(split) * (8 + 2 * 8 + 4 * longest)
    return small + sum(split.images.nbytes for split in splits)


def write_cache(
    source: Source,
    file: IO[bytes],
    *,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a source in the convention of :func:`~deepbregman.data.archives.open_archive`.

    Files are decoded as for training: shrunk, never enlarged, until the longer side fits into the
    frame, top left in zeros, with their true sizes beside them; nothing is cropped. Opened again,
    the source has the same pixels, sizes, labels, names and classes. Arrays are stored without
    compression and written in pieces, so that memory stays bounded.

    Args:
        source: What to write.
        file: Where to, opened for writing.
        skip_unreadable: Put the nearest following readable image in the place of one that cannot
            be decoded, as training does, instead of stopping.
        progress: Called with the images written and the images in all.

    Returns:
        How many images another stands in for.

    Raises:
        UnreadableImage: When a file cannot be decoded.
    """
    splits = _splits(source)
    total, done, num_replaced = sum(len(split) for _, split in splits), 0, 0
    with zipfile.ZipFile(file, "w") as archive:
        for name, split in splits:
            images, sizes = split.images, []
            shape = (len(images), *_frame(images), 3)
            with _member(archive, f"{name}_images") as stream:
                np.lib.format.write_array_header_1_0(
                    stream, {"descr": "|u1", "fortran_order": False, "shape": shape}
                )
                for pixels, fitted, broken in _pieces(images, skip_unreadable):
                    stream.write(pixels.data.cast("B"))
                    sizes.append(fitted)
                    num_replaced += len(broken)
                    done += len(pixels)
                    if progress is not None:
                        progress(done, total)
            _write_small(archive, name, split, np.concatenate(sizes))
        if source.classes is not None:
            _write_array(archive, "class_names", np.array(source.classes, dtype=np.str_))
        if source.imbalanced:
            _write_array(archive, "imbalanced", np.array(True))
    return num_replaced


def _splits(source: Source) -> list[tuple[str, Split]]:
    named = [("train", source.train), ("test", source.test), ("unlabelled", source.unlabelled)]
    return [(name, split) for name, split in named if split is not None and len(split)]


def _frame(images: Images) -> tuple[int, int]:
    if isinstance(images, FileImages):
        return images.side, images.side
    return int(images.pixels.shape[2]), int(images.pixels.shape[3])


def _pieces(
    images: Images, skip_unreadable: bool
) -> Iterator[tuple[Pixels, npt.NDArray[np.int64], list[int]]]:
    """Yield frames (n, H, W, 3), their true sizes (n, 2), and which have a stand-in."""
    height, width = _frame(images)
    step = max(1, _CHUNK_BYTES // (height * width * 3))
    for start in range(0, len(images), step):
        piece = slice(start, start + step)
        if isinstance(images, FileImages):
            yield decode_frames(images.paths[piece], images.side, skip_unreadable)
            continue
        sizes = None if images.sizes is None else images.sizes[piece]
        part = ArrayImages(images.pixels[piece], sizes)
        yield part.pixels.permute(0, 2, 3, 1).contiguous().numpy(), part.true_sizes().numpy(), []


def _write_small(
    archive: zipfile.ZipFile, name: str, split: Split, sizes: npt.NDArray[np.int64]
) -> None:
    if not (sizes == np.array(_frame(split.images))).all():
        _write_array(archive, f"{name}_sizes", sizes)
    if split.labels is not None:
        _write_array(archive, f"{name}_labels", split.labels.numpy()[:, None])
    if split.names is not None:
        _write_array(archive, f"{name}_names", np.array(split.names, dtype=np.str_))


def _write_array(archive: zipfile.ZipFile, key: str, values: npt.NDArray[np.generic]) -> None:
    content = io.BytesIO()
    np.lib.format.write_array(content, values, allow_pickle=False)
    with _member(archive, key) as stream:
        stream.write(content.getbuffer())


def _member(archive: zipfile.ZipFile, key: str) -> IO[bytes]:
    return archive.open(zipfile.ZipInfo(f"{key}.npy", _WRITTEN), "w", force_zip64=True)
