"""Parquet tables with a column of image bytes, as exported from the Hugging Face hub.

The encoded images are held in memory, so that each is at hand in any order. Needs no torch.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepbregman.data.memory import find_free_memory
from deepbregman.data.stored import (
    IMAGES,
    LABELS,
    Store,
    StoredData,
    StoredSplit,
    choose_splits,
    find_column,
    group_by_split,
    list_parts,
    number_labels,
    read_splits,
)
from deepbregman.errors import UserError, abbreviate
from deepbregman.files import digest_files
from deepbregman.launching import find_process


class ParquetStore(Store):
    """The images of some tables, encoded, in memory that worker processes share."""

    def __init__(self, paths: Sequence[Path], chunks: Sequence[Any], name: str) -> None:
        self.paths = tuple(paths)
        self._chunks = chunks
        self._ends = np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64)
        self.title = name

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int) -> bytes:
        """Return an image as it is stored."""
        chunk = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[chunk - 1]) if chunk else 0
        found = self._chunks[chunk][index - start]
        if not found.is_valid:
            raise ValueError("the row has no bytes")
        content: bytes = found.as_buffer().to_pybytes()
        return content

    def identity(self) -> str:
        """Return a digest of the paths, sizes and times of the tables."""
        return digest_files(self.paths)


def index_parquet(path: Path) -> StoredData:
    """Read the tables of a folder, or one table."""
    groups = group_by_split(path, list_parts(path, ".parquet"))
    first = [name for name in groups if name != "val" or "test" not in groups]
    _require_room(path, [file for name in first for file in groups[name]])

    def read_split(name: str) -> Tables:
        if name not in first:
            _require_room(path, groups[name])
        return _read_tables(groups[name], name)

    read = read_splits(groups, read_split, lambda tables: tables[1])
    names = next((found for _, _, found in read.values() if found), None)
    chosen = choose_splits({name: texts for name, (_, texts, _) in read.items()})
    labels, classes = number_labels({role: given for role, (_, given) in chosen.items()}, names)
    splits = {role: StoredSplit(read[name][0], labels[role]) for role, (name, _) in chosen.items()}
    return StoredData(path.resolve().stem, splits, classes)


def _import_pyarrow() -> Any:
    try:
        import pyarrow.compute
        import pyarrow.parquet  # noqa: F401  # a part of what is returned
    except ImportError:
        raise UserError(
            "Parquet tables need the package pyarrow: install it with `pip install "
            "'deepbregman[parquet]'`"
        ) from None
    return pyarrow


def _find_image_column(schema: Any, path: Path) -> str:
    """Return the name of the column of images: bytes, or a struct that has ``bytes``."""
    arrow = _import_pyarrow()
    good = []
    for field in schema:
        kind = field.type
        if arrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            kind = kind.field("bytes").type
        if arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind):
            good.append(field.name)
    named = [name for name in good if name.lower() in IMAGES]
    chosen = named or good
    if len(chosen) != 1:
        raise UserError(
            f"table {str(path)!r}: {len(chosen)} columns may hold images ({', '.join(chosen)}) of "
            f"{', '.join(schema.names)}; have one column `image` of bytes"
        )
    return str(chosen[0])


def _require_room(path: Path, files: Sequence[Path]) -> None:
    """Refuse tables that do not fit into memory, before any is read."""
    needed = sum(file.stat().st_size for file in files)
    processes = find_process().local_processes
    free = find_free_memory()
    if needed * processes > 0.8 * free:
        raise UserError(
            f"data.source {str(path)!r}: the tables take {needed / 1e9:.1f} GB of memory in "
            f"each of {processes} processes and {free / 1e9:.1f} GB are free; write tar shards, "
            "which stay on the disk, or give it as a Hugging Face dataset, hf:PATH"
        )


Tables = tuple[ParquetStore, list[str | int] | None, list[str] | None]
"""The images, the labels and the names of the classes of a split."""


def _read_tables(paths: Sequence[Path], name: str) -> Tables:
    """Read the images, the labels and the names of the classes of one split."""
    arrow = _import_pyarrow()
    chunks: list[Any] = []
    labels: list[str | int] = []
    names: list[str] | None = None
    for path in paths:
        try:
            table = arrow.parquet.ParquetFile(path)
            schema = table.schema_arrow
            image = _find_image_column(schema, path)
            label = find_column(LABELS, schema.names)
            columns = [image] if label is None else [image, label]
            read = table.read(columns=columns, use_threads=False)
        except (OSError, arrow.ArrowException) as error:
            raise UserError(
                f"table {str(path)!r}: cannot be read ({abbreviate(str(error))}); write or copy it "
                "again"
            ) from error
        for chunk in read[image].chunks:
            whole = arrow.types.is_struct(chunk.type)
            chunks.append(arrow.compute.struct_field(chunk, "bytes") if whole else chunk)
        if label is not None:
            labels += read[label].to_pylist()
            names = names or _read_class_names(schema, label)
    store = ParquetStore(paths, chunks, name)
    if not len(store):
        raise UserError(f"data.source: no row in {', '.join(map(str, paths[:3]))}")
    if labels and len(labels) != len(store):
        raise UserError(
            f"{name}: {len(labels)} labels for {len(store)} images; give one to each, or leave the "
            "column out"
        )
    return store, labels or None, names


def _read_class_names(schema: Any, label: str) -> list[str] | None:
    """Return the names that the Hugging Face hub keeps in a table's metadata."""
    try:
        known = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = known["info"]["features"][label]["names"]
        return [str(name) for name in names]
    except (ValueError, KeyError, TypeError):
        return None
