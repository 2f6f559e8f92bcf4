"""The formats that store many images together: tar shards, Parquet tables, Hugging Face datasets.

The reader of a format and its libraries are loaded when a dataset needs them. Needs no torch.
"""

from pathlib import Path

from deepbregman.data.folders import has_image
from deepbregman.data.stored import HUB, StoredData, list_parts


def is_stored(path: Path) -> bool:
    """Whether a dataset has one of these formats; a folder of images and an .npz file have not."""
    if _is_hugging_face(path):
        return True
    if path.is_dir() and has_image(path):  # stops at the first; a listing of all takes time
        return False
    return _holds(path, ".tar") or _holds(path, ".parquet")


def index_stored(path: Path) -> StoredData:
    """Read where the images of such a dataset are, and their labels; no image is decoded."""
    if _is_hugging_face(path):
        from deepbregman.data.hugging_face import index_dataset

        return index_dataset(path)
    if _holds(path, ".tar"):
        from deepbregman.data.shards import index_shards

        return index_shards(path)
    from deepbregman.data.parquet import index_parquet

    return index_parquet(path)


def _holds(path: Path, suffix: str) -> bool:
    if not path.is_dir():
        return path.suffix.lower() == suffix
    return bool(list_parts(path, suffix))


def _is_hugging_face(path: Path) -> bool:
    if path.as_posix().startswith(HUB) or (path / "dataset_dict.json").is_file():
        return True
    return all((path / name).is_file() for name in ("dataset_info.json", "state.json"))
