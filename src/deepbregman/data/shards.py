"""Tar shards in the layout of WebDataset, read in any order by an index of their members.

Files of one name up to the first dot are one sample: ``0017.jpg``, and ``0017.cls`` with its class.
The index makes every promise of a folder of files hold: order, exact resume, any number of
processes and workers. Needs no torch.
"""

import json
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from deepbregman.data.folders import SUFFIXES, quote_some
from deepbregman.data.stored import (
    Store,
    StoredData,
    StoredSplit,
    choose_splits,
    group_by_split,
    list_parts,
    number_labels,
    read_splits,
)
from deepbregman.errors import UserError, abbreviate
from deepbregman.files import digest_files, find_user_cache, replace_file

_OPEN_FILES = 64
_READ_AHEAD = 8 << 20  # bytes that the system is asked to read in one piece
_LARGEST_LABEL = 4096  # bytes of a .cls file that are read, however many its header claims


class Index(NamedTuple):
    """Locations of the images of some shards."""

    names: list[str]
    """``shard.tar/member`` of each image."""
    shards: npt.NDArray[np.int64]  # (N,) the shard of each
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    labels: list[str] | None
    """The text of each .cls file."""


class TarStore(Store):
    """The images of some shards.

    Training reads shards in turn (``shards``), each image by its place. Where the system allows it,
    a piece of several megabytes around an image is asked for at once, so that a disk or a network
    reads sequentially.
    """

    def __init__(self, paths: Sequence[Path], index: Index) -> None:
        self.paths = tuple(paths)
        self._index = index
        self.shards = index.shards
        self._files: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()
        self._asked: OrderedDict[tuple[int, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._index.names)

    def name(self, index: int) -> str:
        """Name an image by its shard and member."""
        return self._index.names[index]

    def read(self, index: int) -> bytes:
        """Return an image as it is stored."""
        shard, offset = int(self._index.shards[index]), int(self._index.offsets[index])
        size = int(self._index.sizes[index])
        with self._lock:  # another thread might close the file
            handle = self._open(shard)
            self._ask_ahead(handle, shard, offset)
            content = os.pread(handle, size, offset)
        if len(content) != size:
            raise OSError(f"the shard ends within it: {len(content)} of {size} bytes")
        return content

    def _open(self, shard: int) -> int:
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        handle = os.open(self.paths[shard], os.O_RDONLY)
        self._files[shard] = handle
        return handle

    def _ask_ahead(self, handle: int, shard: int, offset: int) -> None:
        piece = (shard, offset // _READ_AHEAD)
        if piece in self._asked or not hasattr(os, "posix_fadvise"):
            return
        self._asked[piece] = None
        if len(self._asked) > 1024:
            self._asked.popitem(last=False)
        with suppress(OSError):  # it is only advice
            os.posix_fadvise(handle, piece[1] * _READ_AHEAD, _READ_AHEAD, os.POSIX_FADV_WILLNEED)

    def identity(self) -> str:
        """Return a digest of the paths, sizes and times of the shards."""
        return digest_files(self.paths)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": OrderedDict(), "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()


def index_shards(path: Path) -> StoredData:
    """Index the shards of a folder, or one shard."""
    groups = group_by_split(path, list_parts(path, ".tar"))
    found = read_splits(groups, lambda name: read_index(groups[name]), _labels_of)
    chosen = choose_splits({name: _labels_of(index) for name, index in found.items()})
    labels, classes = number_labels({role: given for role, (_, given) in chosen.items()})
    splits = {
        role: StoredSplit(
            TarStore(groups[name], found[name]),
            labels[role],
            _name_images(path, groups[name], found[name]),
        )
        for role, (name, _) in chosen.items()
    }
    return StoredData(path.resolve().stem, splits, classes)


def _name_images(path: Path, shards: Sequence[Path], index: Index) -> tuple[str, ...]:
    """Name each image by its shard, with the shard's folder if that is not the dataset's."""
    root = path if path.is_dir() else path.parent
    folders = ["" if shard.parent == root else f"{shard.parent.name}/" for shard in shards]
    pairs = zip(index.shards.tolist(), index.names, strict=True)
    return tuple(f"{folders[shard]}{name}" for shard, name in pairs)


def _labels_of(index: Index) -> list[str | int] | None:
    return _to_labels(index.labels) if index.labels else None


def _to_labels(texts: Sequence[str]) -> list[str | int]:
    """Take labels as whole numbers if all of them are."""
    if all(text.isdecimal() for text in texts):
        return [int(text) for text in texts]
    return list(texts)


def read_index(paths: Sequence[Path]) -> Index:
    """Read the headers of shards, or what is known of them from the last time."""
    cache = _cache_file(paths)
    if cache is not None and (known := _load_index(cache)) is not None:
        return known
    names: list[str] = []
    labels: list[str | None] = []
    places: list[tuple[int, int, int]] = []
    for shard, path in enumerate(paths):
        for name, offset, size, label in _read_shard(path):
            names.append(f"{path.name}/{name}")
            places.append((shard, offset, size))
            labels.append(label)
    if not names:
        raise UserError(
            f"data.source: no image in {quote_some(paths)}; images end in "
            f"{' '.join(sorted(SUFFIXES))}"
        )
    without = [name for name, label in zip(names, labels, strict=True) if label is None]
    if without and len(without) < len(names):
        raise UserError(
            f"{len(without)} of {len(names)} images have no .cls file beside them "
            f"({quote_some(without)}); give one to each, or to none"
        )
    columns = np.array(places, dtype=np.int64).reshape(-1, 3).T
    texts = None if without else [label for label in labels if label is not None]
    index = Index(names, columns[0], columns[1], columns[2], texts)
    if cache is not None:
        _save_index(cache, index)
    return index


def _read_shard(path: Path) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield name, offset, size and label of each image of a shard."""
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            waiting: list[tuple[str, int, int]] = []
            key, label = "", None
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # a million would stay in memory
                if not member.isreg():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if not stem:  # a hidden file
                    continue
                if f"{folder}/{stem}" != key:
                    yield from ((*image, label) for image in waiting)
                    waiting, key, label = [], f"{folder}/{stem}", None
                if f".{extension.rpartition('.')[2].lower()}" in SUFFIXES:
                    waiting.append((member.name, member.offset_data, member.size))
                elif extension.lower() == "cls":
                    size = min(member.size, _LARGEST_LABEL)
                    content = os.pread(file.fileno(), size, member.offset_data)
                    label = content.decode("utf-8", "replace").strip()
            yield from ((*image, label) for image in waiting)
            _check_end(file, archive)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:  # a size may fit no file
        raise UserError(
            f"shard {str(path)!r}: cannot be read ({abbreviate(str(error))}); copy it again; if "
            "it is compressed, uncompress it, since no image can be found in it without reading all"
        ) from error


def _check_end(file: IO[bytes], archive: tarfile.TarFile) -> None:
    """Refuse a shard that is cut or damaged: tarfile takes an invalid header for the end.

    Behind the end there are only zeros, unless a header was lost or archives were joined.
    """
    end = archive.offset  # offset of the first invalid header
    file.seek(end)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it ends early, at byte {end:,}, so that images are lost")
    if any(block):
        raise tarfile.ReadError(f"it is damaged at byte {end:,}, so that images are lost")
    while block := file.read(_READ_AHEAD):
        if block.strip(b"\0"):
            raise tarfile.ReadError(
                f"something follows its end at byte {end:,}: a block was lost, or two archives "
                "were joined, so that images are lost"
            )


def _cache_file(paths: Sequence[Path]) -> Path | None:
    try:
        return find_user_cache("shards") / f"{digest_files(paths)}.npz"
    except (OSError, RuntimeError):  # a file is gone, or there is no home: nothing is kept
        return None


def _load_index(cache: Path) -> Index | None:
    with (
        suppress(OSError, ValueError, EOFError, KeyError, BadZipFile),
        np.load(cache, allow_pickle=False) as arrays,
    ):
        names, labels = json.loads(arrays["texts"].tobytes())
        return Index(names, arrays["shards"], arrays["offsets"], arrays["sizes"], labels)
    return None


def _save_index(cache: Path, index: Index) -> None:
    """Keep an index for the next time; if that fails, do without."""
    texts = np.frombuffer(json.dumps([index.names, index.labels]).encode(), dtype=np.uint8)
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(cache) as file:
            np.savez(
                file, texts=texts, shards=index.shards, offsets=index.offsets, sizes=index.sizes
            )
