"""From what the user wrote as data source to its splits."""

from collections.abc import Callable
from pathlib import Path

from deepbregman.data.archives import open_archive
from deepbregman.data.folders import open_folder
from deepbregman.data.images import Progress, Source
from deepbregman.data.published import open_cifar10, open_cifar100, open_digits, open_stl10
from deepbregman.errors import UserError, nearest

PUBLISHED: dict[str, Callable[[Path, bool], Source]] = {
    "digits": lambda root, download: open_digits(),
    "cifar10": open_cifar10,
    "cifar100": open_cifar100,
    "stl10": open_stl10,
}
"""Data sets known by name, and the function that opens each under a root folder."""


def open_source(
    spec: str,
    *,
    root: Path = Path("data"),
    image_size: int,
    download: bool = True,
    seed: int = 0,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> Source:
    """Open a data set by name, an ``.npz`` file, or a folder of images.

    Args:
        spec: ``digits``, ``cifar10``, ``cifar100``, ``stl10``, or a path. A name wins over a
            folder of the same name; write ``./digits`` for the folder.
        root: Where the files of published data sets lie, or are downloaded to.
        image_size: Side of the training images; sets the frame that files are decoded into.
        download: Whether to download a published data set that is absent.
        seed: Of the test split set aside from a labelled folder that has none.
        skip_unreadable: Leave unreadable image files out instead of stopping at the first. In
            folders of up to 20,000 files every file is decoded here, so that a truncated one is
            found now; in larger ones only the headers are read now.
        progress: Called with the files checked and the files in all, for a folder.

    Raises:
        UserError: When there is no such source or it cannot be used.
    """
    if image_size < 1:
        raise UserError(f"data.image_size {image_size}: must be at least 1 pixel, e.g. 32")
    if spec in PUBLISHED:
        return PUBLISHED[spec](root.expanduser(), download)
    path = Path(spec).expanduser()
    if spec.strip() and path.is_dir():
        return open_folder(
            path,
            image_size=image_size,
            seed=seed,
            skip_unreadable=skip_unreadable,
            progress=progress,
        )
    if path.suffix.lower() == ".npz":
        return open_archive(path)
    if path.is_file():
        raise UserError(
            f"data.source {spec!r}: a file, but not an .npz file; give a folder of images or an "
            ".npz file with train_images"
        )
    raise UserError(
        f"data.source {spec!r}: no such folder or .npz file, and not one of "
        f"{', '.join(PUBLISHED)}{nearest(spec, PUBLISHED)}"
    )
