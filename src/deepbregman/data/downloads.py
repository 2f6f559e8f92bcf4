"""Datasets that come by themselves: scikit-learn's digits, and what torchvision downloads."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepbregman.data.images import ArrayImages, Source, Split
from deepbregman.errors import UserError

_CHUNK = 4096
_NETWORK_TIMEOUT = 30.0
"""Seconds without an answer after which a download has failed."""


def open_download(name: str, root: Path, download: bool) -> Source:
    """Open digits, CIFAR-10, CIFAR-100 (fine labels) or STL-10."""
    if name == "digits":
        return _open_digits()
    kind = _find_torchvision_class(name)
    with _explain_failure(name, root, kind.base_folder, kind.url):
        if name == "stl10":
            return _open_stl10(root, kind(str(root), split="test", download=download))
        train = kind(str(root), train=True, download=download)
        test = kind(str(root), train=False, download=False)
    # The arrays are channels-last views of channels-first memory, so this copies only if need be.
    splits = [
        Split(
            ArrayImages(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()),
            torch.tensor(part.targets, dtype=torch.int64),
        )
        for part in (train, test)
    ]
    return Source(name, splits[0], splits[1], classes=tuple(train.classes))


def download_voc(root: Path) -> None:
    """Download Pascal VOC 2007 and 2012 to ``root`` and unpack them there."""
    from torchvision.datasets import VOCDetection

    with _explain_failure("voc", root, "VOCdevkit", "http://host.robots.ox.ac.uk/pascal/VOC/"):
        for year, image_set in (("2007", "trainval"), ("2007", "test"), ("2012", "trainval")):
            VOCDetection(str(root), year=year, image_set=image_set, download=True)


def list_checksums(name: str) -> dict[str, str]:
    """Return the unpacked files of CIFAR or STL-10 under their root, with their MD5 sums."""
    if name == "digits":
        return {}
    kind = _find_torchvision_class(name)
    listed = [*kind.train_list, *kind.test_list]
    if hasattr(kind, "meta"):
        listed.append([kind.meta["filename"], kind.meta["md5"]])
    return {f"{kind.base_folder}/{file}": md5 for file, md5 in listed}


def _find_torchvision_class(name: str) -> Any:
    """Return the class of torchvision that downloads a dataset and knows its checksums."""
    from torchvision.datasets import CIFAR10, CIFAR100, STL10

    return {"cifar10": CIFAR10, "cifar100": CIFAR100, "stl10": STL10}[name]


def _open_digits() -> Source:
    """Return scikit-learn's 1,797 digits of 8 x 8: 1,297 to train on, 500 to test on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), values were 0..16
    pixels = torch.from_numpy(grey)[:, None].repeat(1, 3, 1, 1)
    everything = Split(ArrayImages(pixels), torch.from_numpy(digits.target.astype(np.int64)))
    train, test = train_test_split(
        np.arange(len(grey)), test_size=500, random_state=0, stratify=digits.target
    )
    return Source(
        "digits",
        everything.select(torch.from_numpy(np.sort(train))),
        everything.select(torch.from_numpy(np.sort(test))),
        classes=tuple(str(digit) for digit in range(10)),
    )


def _open_stl10(root: Path, verified: Any) -> Source:
    """Return 5,000 images to train on, 8,000 to test on, and 100,000 unlabelled, of 96 x 96."""
    folder = root / verified.base_folder
    train, test, unlabelled = (_read_stl10(folder, x) for x in ("train", "test", "unlabeled"))
    classes = tuple(verified.classes) if hasattr(verified, "classes") else None
    return Source("stl10", train, test, unlabelled, classes)


def _read_stl10(folder: Path, name: str) -> Split:
    """Read one split from its binary files, whose images are stored column by column.

    torchvision would hold the 2.8 GB of the unlabelled split twice.
    """
    columns = np.memmap(folder / f"{name}_X.bin", dtype=np.uint8, mode="r").reshape(-1, 3, 96, 96)
    pixels = torch.empty(columns.shape, dtype=torch.uint8)
    for start in range(0, len(columns), _CHUNK):
        chunk = np.array(columns[start : start + _CHUNK])
        pixels[start : start + _CHUNK] = torch.from_numpy(chunk).transpose(2, 3)
    labels: Tensor | None = None
    if name != "unlabeled":
        stored = np.fromfile(folder / f"{name}_y.bin", dtype=np.uint8)  # counted from 1
        labels = torch.from_numpy(stored.astype(np.int64) - 1)
    return Split(ArrayImages(pixels), labels)


@contextmanager
def _explain_failure(name: str, root: Path, base_folder: str, url: str) -> Iterator[None]:
    """Limit the wait for the network, and explain what to do if files are missing or damaged."""
    timeout, was_there = socket.getdefaulttimeout(), root.exists()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT)
    try:
        yield
    except Exception as error:  # the network, the disk, the archive, the checksum
        if not was_there:
            with suppress(OSError):  # it holds a part that the next download goes on with
                root.rmdir()
        folder, reason = str(root / base_folder), str(error) or type(error).__name__
        raise UserError(
            f"data.source {name!r}: no whole copy of its files in {folder!r}"
            f" and none downloaded ({reason}); fetch {url} and unpack it in "
            f"{str(root)!r}, or set data.root to the folder that holds {base_folder!r}"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)
