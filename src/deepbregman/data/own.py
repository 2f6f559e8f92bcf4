"""Images of the user's own program: an array or tensor in memory, or a map-style dataset."""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFile
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from deepbregman.data.images import (
    ArrayImages,
    Images,
    Source,
    Split,
    StoredImage,
    read_content,
    share_pixels,
    spread_places,
)
from deepbregman.data.listings import ensure_test_split, find_median_side, frame_store
from deepbregman.data.stored import IMAGES, LABELS, Store, find_column, number_labels, refuse_gaps
from deepbregman.errors import UserError, abbreviate

OWN = "custom"
"""``data.source`` of a run that was trained on images of the user's program."""
_READING = threading.Lock()
_READ_TWICE = 8  # images of a dataset; a flip of one in two is missed once in 256
RULE = "images are uint8: (N, 3, H, W), (N, 1, H, W), (N, H, W, 3), (N, H, W, 1) or (N, H, W)"


class DatasetStore(Store):
    """The images of a map-style dataset: ``len(dataset)`` and ``dataset[i]``.

    An item is an image, or a tuple or list that begins with one, or a dict with ``image``. The
    image is a PIL image, or a uint8 tensor or array of shape (3, H, W), (1, H, W), (H, W, 3),
    (H, W, 1) or (H, W).
    """

    advice = "mend the dataset, or leave the item out with torch.utils.data.Subset"

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.title = dataset, type(dataset).__name__

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> Image.Image:
        """Return an image, decoded; one thread at a time, which few datasets are made for more."""
        with _READING:
            return to_image(find_image(self.dataset[index]))

    def label(self, index: int) -> object:
        """Return the label of an item, or None."""
        try:
            return find_label(self.dataset[index])
        except Exception as error:  # the user's code may raise anything
            raise UserError(
                f"{self.name(index)}: cannot be read ({type(error).__name__}: {error}); "
                f"{self.advice}"
            ) from error

    @cached_property
    def _identity(self) -> str:
        hashed = hashlib.sha256()
        for index in range(len(self)):
            hashed.update(hashlib.sha256(read_content(StoredImage(self, index))).digest())
        return hashed.hexdigest()

    def identity(self) -> str:
        """Return a digest of all images: images in memory have no date of change."""
        return self._identity


def find_image(item: Any) -> Any:
    """Return the image of a dataset's item: the item, its first part, or its image by name."""
    if isinstance(item, tuple | list):
        return item[0] if item else None
    if isinstance(item, Mapping):
        found = next((name for name in IMAGES if name in item), None)
        if found is None:
            raise ValueError(
                f"an item is a dict with {', '.join(map(str, item)) or 'nothing'}: call the image "
                f"one of {', '.join(IMAGES)}"
            )
        return item[found]
    return item


def find_label(item: Any) -> Any:
    """Return the label of an item: its second part, or the part of that name; else None."""
    if isinstance(item, tuple | list):
        return item[1] if len(item) > 1 else None
    if isinstance(item, Mapping):
        return next((item[name] for name in LABELS if name in item), None)
    return None


def to_image(found: Any) -> Image.Image:
    """Take a PIL image, or a uint8 tensor or array, as an image.

    Decoding closes a file and may shrink a JPEG, and the program may keep the object. So a file
    that it has opened but not read is opened again.
    """
    if isinstance(found, ImageFile.ImageFile):
        if found.tile and found.filename:
            again = Image.open(found.filename)
            again.seek(found.tell())  # one of several pages
            return again
        found.load()
    if isinstance(found, Image.Image):
        return found
    if isinstance(found, Tensor):
        found = found.as_subclass(Tensor).detach().cpu().numpy()
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8:
        kind = str(found.dtype) if isinstance(found, np.ndarray) else type(found).__name__
        why = "leave out transforms such as ToTensor that make floats"
        if isinstance(found, list | tuple):
            why = "leave out transforms that make several views; they belong to augment="
        elif not isinstance(found, np.ndarray):
            why = "an item is an image, or a tuple that begins with it, or a dict"
        raise ValueError(
            f"the image of an item is of type {kind}: it must be a PIL image or uint8; {why}"
        )
    if found.ndim == 3 and found.shape[0] in (1, 3) and found.shape[2] not in (1, 3):
        found = found.transpose(1, 2, 0)  # (3, H, W)
    if found.ndim == 3 and found.shape[2] == 1:
        found = found[..., 0]
    if found.ndim not in (2, 3) or (found.ndim == 3 and found.shape[2] != 3):
        raise ValueError(f"an item has shape {found.shape}: an image has 1 or 3 channels")
    return Image.fromarray(np.ascontiguousarray(found))


def to_pixels(values: "Tensor | npt.NDArray[Any]") -> Tensor:
    """Take an array or tensor in memory as pixels (N, 3, H, W); three channels are not copied."""
    pixels = values if isinstance(values, Tensor) else share_pixels(np.ascontiguousarray(values))
    shape = tuple(pixels.shape)
    if pixels.dtype != torch.uint8:
        raise UserError(
            f"data is {pixels.dtype} of shape {shape}: {RULE}; convert it, such as by "
            "(255 * x).to(torch.uint8)"
        )
    if pixels.ndim == 3:
        pixels = pixels.unsqueeze(1)
    elif pixels.ndim == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3):
        pixels = pixels.permute(0, 3, 1, 2)
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3) or 0 in shape:
        raise UserError(f"data has shape {shape}: {RULE}, and at least one of them")
    return pixels.detach().cpu().expand(-1, 3, -1, -1)


def own_data(
    train: Any,
    labels: "Sequence[int] | Tensor | npt.NDArray[Any] | None" = None,
    *,
    test: Any = None,
    test_labels: "Sequence[int] | Tensor | npt.NDArray[Any] | None" = None,
    classes: Sequence[str] | None = None,
    image_size: int = 32,
) -> Source:
    """Make a data source of images of your program, for ``source=`` of :func:`evaluate` and others.

    A map-style dataset is decoded by worker processes when it does not fit into memory. Its items
    must not change from one call to the next; random transforms belong to ``augment=``.

    Args:
        train: uint8 images as an array or tensor, a pair of images and labels, or a map-style
            dataset of PIL images or uint8 images, alone or with labels.
        labels: (N,) from 0, or words, if ``train`` has none; -1 is not allowed.
        test: like ``train``; without it, a seeded fifth of labelled images is taken.
        test_labels: (N,)
        classes: their names.
        image_size: side of the images that are trained on, which sets the frame of a dataset's.
    """
    parts = {"train": _open_part(train, labels, image_size)}
    if test is not None:
        parts["test"] = _open_part(test, test_labels, image_size)
    given, words = _number_words({name: found for name, (_, found) in parts.items()})
    classes = words if classes is None else classes
    splits = {
        name: Split(images, to_labels(given[name], len(images), name))
        for name, (images, _) in parts.items()
    }
    made, tested = ensure_test_split(splits["train"], splits.get("test"))
    known = [part.labels for part in (made, tested) if part is not None and part.labels is not None]
    if classes is None and known:
        given_labels = torch.cat(known)
        refuse_gaps(int(given_labels.max()), len(given_labels))
        classes = [str(label) for label in range(int(given_labels.max()) + 1)]
    return Source(OWN, made, tested, classes=None if classes is None else tuple(classes))


def _open_part(values: Any, labels: Any, image_size: int) -> tuple[Images, Any]:
    """Open an array, a pair of images and labels, or a dataset; return images and labels."""
    if isinstance(values, tuple) and len(values) == 2 and _has_items(values[0]):
        values, labels = values[0], values[1] if labels is None else labels
    if isinstance(values, Tensor | np.ndarray):
        return ArrayImages(to_pixels(values)), labels
    if not _has_items(values):
        raise UserError(
            f"data is a {type(values).__name__}: it must be a name, a folder, a uint8 array or "
            "tensor, or a map-style dataset with len(dataset) and dataset[i]; an iterable dataset "
            "has no order to resume in: write tar shards instead"
        )
    if isinstance(values, Mapping):
        raise UserError(
            f"data is a {type(values).__name__} of {', '.join(map(str, values)) or 'nothing'}: "
            "give one of them, such as data['train']; own_data takes another as test="
        )
    if len(values) == 0:
        raise UserError(f"data is an empty {type(values).__name__}: give at least one image")
    store = DatasetStore(values)
    images = frame_store(store, image_size)
    _refuse_random_items(store)
    return images, _read_labels(store) if labels is None else labels


def _has_items(values: Any) -> bool:
    return hasattr(values, "__len__") and hasattr(values, "__getitem__")


def _refuse_random_items(store: DatasetStore) -> None:
    """Refuse a dataset whose images change, by reading a few twice: they would be kept as drawn."""
    for index in spread_places(len(store), _READ_TWICE):
        place = StoredImage(store, index)
        try:
            is_same = read_content(place) == read_content(place)
        except Exception:  # decoding will report it
            continue
        if not is_same:
            raise UserError(
                f"{place} gave two different images: dataset[i] must be the same each time; move "
                "random transforms to augment="
            )


def _number_words(
    labels: Mapping[str, Any],
) -> tuple[Mapping[str, Any], tuple[str, ...] | None]:
    """Number labels that are words, over all splits; return them with the names of the classes."""
    given = [found for found in labels.values() if found is not None]
    lists = [found for found in given if not isinstance(found, Tensor)]
    kinds = {isinstance(label, str) for found in lists for label in found}
    if True not in kinds:
        return labels, None
    if False in kinds or len(lists) < len(given):
        raise UserError(
            "some labels are words and others are not: give each image a word, or each a whole "
            "number from 0"
        )
    return number_labels({n: None if found is None else list(found) for n, found in labels.items()})


def _read_labels(store: DatasetStore) -> list[Any] | None:
    """Return the labels of a dataset, without decoding images if it has a list of labels."""
    known = _list_labels(store.dataset)
    if known is None and store.label(0) is not None:
        known = [store.label(index) for index in range(len(store))]
    return None if known is None or all(label is None for label in known) else known


def _list_labels(dataset: Any) -> list[Any] | None:
    """Return the list of labels that a dataset or its parts have; None if they have none."""
    if getattr(dataset, "target_transform", None) is not None:  # it makes other labels of them
        return None
    for attribute in ("targets", "labels"):  # attributes of torchvision datasets
        found = getattr(dataset, attribute, None)
        if found is not None and not callable(found) and len(found) == len(dataset):
            return list(found)
    if hasattr(dataset, "with_format") and hasattr(dataset, "column_names"):  # Hugging Face
        column = find_column(LABELS, dataset.column_names)
        return None if column is None else list(dataset.with_format(None)[column])
    if type(dataset) is Subset:  # a class of the user's may change the labels
        whole = _list_labels(dataset.dataset)
        return None if whole is None else [whole[index] for index in dataset.indices]
    if type(dataset) is ConcatDataset:
        parts = [_list_labels(part) for part in dataset.datasets]
        return None if None in parts else [label for part in parts if part for label in part]
    return None


def to_labels(values: Any, count: int, what: str) -> Tensor | None:
    """Take labels as int64 (N,), whole numbers from 0."""
    if values is None:
        return None
    rule = "give one whole number from 0, or one word, for each image, or labels to none"
    try:
        given = torch.as_tensor(np.asarray(values).copy())  # those of pandas are read-only
    except (TypeError, ValueError):
        some = [value for value in values if not isinstance(value, int)]
        odd = f" such as {abbreviate(some[0])}" if some else ""
        raise UserError(f"{what} labels{odd} are not whole numbers: {rule}") from None
    labels = given.flatten()
    whole = not labels.is_floating_point() and not labels.is_complex()
    if len(labels) != count or not whole:
        raise UserError(
            f"{what} labels are {given.dtype} of shape {tuple(given.shape)} for {count} images: "
            f"{rule}"
        )
    if count and int(labels.min()) < 0:
        raise UserError(f"a {what} label is {int(labels.min())}: {rule}")
    return labels.to(torch.int64)


def find_own_side(data: Any) -> int:
    """Return the median of the shorter sides of images of the user's own, in pixels."""
    images, _ = _open_part(data, None, 10_000)
    return min(images.frame) if isinstance(images, ArrayImages) else find_median_side(images.paths)
