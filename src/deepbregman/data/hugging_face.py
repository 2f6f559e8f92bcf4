"""Hugging Face datasets: a name of the hub, or a folder that ``save_to_disk`` wrote.

They lie in Arrow files that are mapped into memory, so that each image is at hand in any order.
Needs no torch.
"""

from pathlib import Path
from typing import Any

from deepbregman.data.stored import (
    HUB,
    LABELS,
    Store,
    StoredData,
    StoredSplit,
    choose_splits,
    find_column,
    number_labels,
    read_splits,
)
from deepbregman.errors import UserError, abbreviate


class HuggingFaceStore(Store):
    """The images of one split, encoded as they are stored."""

    def __init__(self, rows: Any, column: str, name: str) -> None:
        self._rows, self._column, self.title = rows, column, name

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> bytes:
        """Return an image as it is stored."""
        found = self._rows[index][self._column]
        if found is None or (found["bytes"] is None and not found["path"]):
            raise ValueError("the row has no image")
        content: bytes | None = found["bytes"]
        return Path(found["path"]).read_bytes() if content is None else content

    def identity(self) -> str:
        """Return the fingerprint that the library keeps of each dataset."""
        return str(self._rows._fingerprint)


def index_dataset(path: Path) -> StoredData:
    """Open a dataset by ``hf:NAME`` or ``hf:NAME@CONFIGURATION``, or a folder that was saved."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data.source {str(path)!r} needs the package datasets: install it with `pip install "
            "'deepbregman[datasets]'`"
        ) from None
    splits = _load(path, datasets)
    train = splits.get("train")
    if train is None:
        raise UserError(
            f"data.source {str(path)!r}: has the splits {', '.join(splits) or 'none'} and no "
            "train; save it with a split of this name, or give a split to data= in Python"
        )
    kinds = {"train": "train", "test": "test", "validation": "val", "val": "val"}
    parts = {kinds[name]: split for name, split in splits.items() if name in kinds}
    image = _find_image_column(path, train, datasets)
    label = find_column(LABELS, train.column_names)
    names = getattr(train.features[label], "names", None) if label else None
    texts = read_splits(
        parts,
        lambda name: None if label is None else list(parts[name].with_format(None)[label]),
        lambda found: found,
    )
    chosen = choose_splits(texts)
    labels, classes = number_labels({role: given for role, (_, given) in chosen.items()}, names)
    encoded = datasets.Image(decode=False)  # Pillow decodes images here as it does files
    made = {
        role: StoredSplit(
            HuggingFaceStore(
                parts[name].select_columns([image]).cast_column(image, encoded), image, role
            ),
            labels[role],
        )
        for role, (name, _) in chosen.items()
    }
    return StoredData(path.as_posix().removeprefix(HUB), made, classes)


def _load(path: Path, datasets: Any) -> dict[str, Any]:
    spec = path.as_posix()
    try:
        if not spec.startswith(HUB):
            found = datasets.load_from_disk(str(path))
        else:
            name, _, configuration = spec.removeprefix(HUB).partition("@")
            found = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # library, network or file: the user can mend each
        raise UserError(
            f"data.source {spec!r}: cannot be opened ({type(error).__name__}: "
            f"{abbreviate(str(error))}); check the name and the network, or save the dataset with "
            "save_to_disk and give the folder"
        ) from error
    return dict(found) if hasattr(found, "keys") else {"train": found}


def _find_image_column(path: Path, rows: Any, datasets: Any) -> str:
    good: list[str] = [
        name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)
    ]
    if len(good) != 1:
        raise UserError(
            f"data.source {path.as_posix()!r}: {len(good)} columns hold images "
            f"({', '.join(good)}) of {', '.join(rows.column_names)}; one is needed"
        )
    return good[0]
