"""A cache of features beside the run, so that the next command need not compute them again.

``RUN/features/`` holds a file for each set of images. Its name is a digest of all that the features
depend on: the networks, the images, their size, the device and the versions. So a file is never
out of date, two processes that write it write the same, and a file may be deleted at any time.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepbregman.data import Images
from deepbregman.data.images import ArrayImages, FileImages, StoredImages
from deepbregman.data.own import DatasetStore
from deepbregman.errors import UserError
from deepbregman.files import digest, digest_files, is_temporary, refuse_link
from deepbregman.method.networks import Model
from deepbregman.runs import list_versions
from deepbregman.training import checkpoints

from .search_index import FOLDER

LARGEST_TOTAL = 2 * 2**30
"""Bytes of all files of a run; those that were used longest ago are deleted first."""
_ABANDONED_SECONDS = 3600.0  # after which a temporary file is that of a killed process


def digest_images(images: Images) -> str:
    """Tell images apart by all their pixels, or by the paths, sizes and times of their files."""
    if isinstance(images, ArrayImages):
        sizes = images.true_sizes().contiguous().numpy().tobytes()
        return digest(sizes, images.pixels.contiguous().numpy().data.cast("B"))
    if isinstance(images.paths, StoredImages):
        indices = images.paths.indices.tobytes()
        return digest(str(images.side).encode(), images.paths.store.identity().encode(), indices)
    return digest(str(images.side).encode(), digest_files(images.paths).encode())


def must_be_decoded(images: Images) -> bool:
    """Whether images can be identified only by decoding all of them."""
    if isinstance(images, FileImages) and isinstance(images.paths, StoredImages):
        return isinstance(images.paths.store, DatasetStore)
    return False


@dataclass(frozen=True)
class FeatureCache:
    """The cached features of a run's networks."""

    folder: Path
    networks: str
    settings: str
    """Digest of whatever else the features depend on, apart from the images."""
    device: torch.device

    @classmethod
    def of(cls, run: Path, model: Model, image_size: int, device: torch.device) -> "FeatureCache":
        """Open the cache in a run's folder for one kind of device; nothing is written yet."""
        folder = run / FOLDER
        refuse_link(folder)
        settings = {"image_size": image_size, "device": device.type, "versions": list_versions()}
        networks = checkpoints.fingerprint_weights(model)
        return cls(folder, networks, digest(json.dumps(settings).encode()), device)

    def read(self, images: Images) -> dict[str, Tensor] | None:
        """Return the cached tensors of some images; None if there are none."""
        if must_be_decoded(images):
            return None
        return self._load(self._path(images), self.device) or None

    def write(self, images: Images, tensors: Mapping[str, Tensor]) -> None:
        """Cache tensors, a row for each image, if the folder can be written to and has room."""
        size = sum(part.nbytes for part in tensors.values())
        if size <= LARGEST_TOTAL and not must_be_decoded(images):
            self._save(self._path(images), tensors)

    def keep(self, name: str, compute: Callable[[], Tensor], *parts: bytes) -> Tensor:
        """Return what was computed from features and ``parts`` before, or compute and cache it."""
        path = self.folder / f"{self.networks}-{name}-{digest(self.settings.encode(), *parts)}.pt"
        found = self._load(path).get(name)
        if found is None:
            found = compute()
            self._save(path, {name: found})
        return found

    def _load(self, path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        try:
            state = checkpoints.load(path, device) if path.is_file() else {}
        except (OSError, UserError):  # damaged, or deleted by another process
            return {}
        with suppress(OSError):  # the run may belong to another user
            os.utime(path)  # it was used
        return {name: part for name, part in state.items() if isinstance(part, Tensor)}

    def _save(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        with suppress(OSError):  # a full disk: it is only computed again
            self.folder.mkdir(exist_ok=True)
            # A view of a larger tensor would be saved with all of it.
            checkpoints.save(path, {name: part.cpu().clone() for name, part in tensors.items()})
            self.make_room()

    def _path(self, images: Images) -> Path:
        key = digest(self.settings.encode(), digest_images(images).encode())
        return self.folder / f"{self.networks}-{key}.pt"

    def make_room(self) -> None:
        """Delete files of other networks; if the cache is full, also the least recently used."""
        found = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process makes room, too
                status = path.lstat()
                found.append((status.st_mtime, status.st_size, path))
        total = 0
        for used, size, path in sorted(found, reverse=True):
            if is_temporary(path):
                if time.time() - used > _ABANDONED_SECONDS:
                    path.unlink(missing_ok=True)
                continue
            total += size
            if total > LARGEST_TOTAL or not path.name.startswith(self.networks):
                path.unlink(missing_ok=True)
