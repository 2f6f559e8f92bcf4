"""Read arrays of an untrusted ``.npz`` file: no size is believed, no object is unpickled.

Needs no torch, so that a command can check a file before torch is loaded.
"""

import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from deepbregman.data.memory import find_free_memory
from deepbregman.errors import UserError, abbreviate

_MAX_RATIO = 1032
"""Most bytes that deflate makes of one; a directory that claims more is wrong."""


class Header(NamedTuple):
    """The header of an array."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: "np.dtype[np.generic]"


@contextmanager
def open_npz(path: Path) -> Iterator["NpzReader"]:
    """Open a file for a ``with`` block, and explain what is wrong with it."""
    where = f"data.source {str(path)!r}"
    if not path.is_file():
        raise UserError(f"{where}: no such file; give the path of an .npz file")
    try:
        with zipfile.ZipFile(path) as archive:
            yield NpzReader(path, archive)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error})") from error
    except Exception as error:  # zipfile raises many kinds of errors
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{where}: not a readable .npz file ({abbreviate(reason)}); write it again with "
            "numpy.savez, or copy it again"
        ) from error


class NpzReader:
    """The arrays of an open file; ``train_images`` is among them."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self.archive = path, archive
        names = archive.namelist()
        self.keys = {name.removesuffix(".npy") for name in names if name.endswith(".npy")}
        if "train_images" not in self.keys:
            all_names = ", ".join(name.removesuffix(".npy") for name in names)
            raise UserError(
                f"data.source {str(path)!r}: has no array 'train_images' (found: "
                f"{abbreviate(all_names) if names else 'nothing'}); name the arrays train_images, "
                "train_labels, test_images, test_labels"
            )

    def error(self, key: str, words: str) -> UserError:
        """Return an error about an array."""
        return UserError(f"data.source {str(self.path)!r}: {key} {words}")

    @contextmanager
    def open(self, key: str) -> Iterator[tuple[IO[bytes], Header]]:
        """Open an array for a ``with`` block, behind its header, once all sizes agree."""
        info = self.archive.getinfo(f"{key}.npy")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise self.error(key, "is compressed as numpy.savez never does; write it with that")
        packed, size = info.compress_size, info.file_size
        ratio = 1 if info.compress_type == zipfile.ZIP_STORED else _MAX_RATIO
        if info.header_offset + packed > self.path.stat().st_size or size > ratio * packed:
            raise self.error(
                key,
                f"claims {size:,} bytes, {packed:,} in the file, which is not possible; write "
                "the file again, or copy it again",
            )
        with self.archive.open(info) as stream:
            header = self._read_header(key, stream)
            left, width = size - stream.tell(), header.dtype.itemsize
            true = width > 0 and min(header.shape, default=0) >= 0
            if not true or math.prod(header.shape) * width != left:
                raise self.error(
                    key,
                    f"has shape {abbreviate(header.shape)} but {left} bytes of type "
                    f"{abbreviate(header.dtype)[:80]}; write the file again",
                )
            yield stream, header

    def read(self, key: str) -> npt.NDArray[Any]:
        """Read a small array; never a pickled one."""
        with self.open(key) as (stream, header):
            count = math.prod(header.shape)
            num_bytes = count * header.dtype.itemsize
            self.check_room(key, num_bytes + 8 * count)  # later also as int64
            content = bytearray(stream.read(num_bytes))
            order: Literal["F", "C"] = "F" if header.fortran_order else "C"
            return np.ndarray(header.shape, header.dtype, content, order=order)

    def check_room(self, key: str, num_bytes: int) -> None:
        """Refuse what would not fit into the memory that is free."""
        free = find_free_memory()
        if num_bytes > free:
            raise self.error(
                key,
                f"takes {num_bytes / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free; store "
                "images of more than a GiB without compression, and they stay in the file",
            )

    def find_stored(self, key: str) -> int | None:
        """Return where an entry begins in the file, or None where it is compressed."""
        info = self.archive.getinfo(f"{key}.npy")
        if info.compress_type != zipfile.ZIP_STORED:
            return None
        with self.path.open("rb") as file:  # a local header of its own length precedes the entry
            file.seek(info.header_offset)
            lengths: tuple[int, int] = struct.unpack("<26x2H", file.read(30))
        return info.header_offset + 30 + sum(lengths)

    def _read_header(self, key: str, stream: IO[bytes]) -> Header:
        if np.lib.format.read_magic(stream) == (1, 0):
            header = Header(*np.lib.format.read_array_header_1_0(stream))
        else:
            header = Header(*np.lib.format.read_array_header_2_0(stream))
        if header.dtype.hasobject:
            raise self.error(
                key, "holds pickled Python objects, which are never loaded; save plain arrays"
            )
        return header
