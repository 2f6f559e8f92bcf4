"""Which of the formats that store many images together a path is: found here, and indexed.

A reader and its libraries are loaded when a dataset needs them. Needs no torch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepbregman.data.folders import has_image
from deepbregman.data.stored import HUB, StoredData, list_parts


@dataclass(frozen=True)
class Format:
    """A way in which many images are stored together."""

    title: str
    matches: Callable[[Path], bool]
    index: Callable[[Path], StoredData]
    """Reads where the images are, and their labels; decodes none."""


def find_format(path: Path) -> Format | None:
    """Return the format of a dataset, or None of a folder of images, an .npz file and others."""
    return next((kind for kind in FORMATS if kind.matches(path)), None)


def _holds(path: Path, suffix: str) -> bool:
    if path.suffix.lower() == suffix:
        return True
    return path.is_dir() and bool(list_parts(path, suffix)) and not has_image(path)


def _index_tar(path: Path) -> StoredData:
    from deepbregman.data.shards import index_shards

    return index_shards(path)


def _index_parquet(path: Path) -> StoredData:
    from deepbregman.data.parquet import index_parquet

    return index_parquet(path)


def _index_hugging_face(path: Path) -> StoredData:
    from deepbregman.data.hugging_face import index_dataset

    return index_dataset(path)


def _is_hugging_face(path: Path) -> bool:
    if path.as_posix().startswith(HUB):
        return True
    landmarks: Iterable[Sequence[str]] = (
        ("dataset_dict.json",),
        ("dataset_info.json", "state.json"),
    )
    return any(all((path / name).is_file() for name in names) for names in landmarks)


FORMATS = (
    Format("a Hugging Face dataset", _is_hugging_face, _index_hugging_face),
    Format("tar shards", lambda path: _holds(path, ".tar"), _index_tar),
    Format("Parquet tables", lambda path: _holds(path, ".parquet"), _index_parquet),
)
"""In the order in which they are tried."""
