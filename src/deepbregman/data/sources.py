"""From what the user wrote as data source to its splits."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepbregman.data.archives import open_archive
from deepbregman.data.folders import open_folder
from deepbregman.data.imagenet import list_imagenet
from deepbregman.data.images import Progress, Source
from deepbregman.data.isic import list_isic
from deepbregman.data.listings import Listing, open_listing
from deepbregman.data.published import open_cifar10, open_cifar100, open_digits, open_stl10
from deepbregman.data.tiny_imagenet import list_tiny_imagenet
from deepbregman.errors import UserError, nearest


@dataclass(frozen=True)
class _Opening:
    """How a source is to be opened; as the arguments of :func:`open_source`."""

    root: Path
    image_size: int
    download: bool
    seed: int
    skip_unreadable: bool
    progress: Progress | None

    def files(self, name: str, listing: Listing, *, imbalanced: bool = False) -> Source:
        # ImageNet's million headers take minutes to read and would tell nothing new: its largest
        # images are larger than any frame. Smaller sets are looked at file by file.
        return open_listing(
            listing,
            name=name,
            image_size=self.image_size,
            seed=self.seed,
            skip_unreadable=self.skip_unreadable,
            progress=self.progress,
            read_headers=name != "imagenet",
            imbalanced=imbalanced,
        )


def expanded(path: Path) -> Path:
    """Put a home folder in the place of ``~``.

    Raises:
        UserError: When there is no such user.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise UserError(
            f"path {str(path)!r}: there is no user of that name; write ./ before a folder that "
            "begins with ~"
        ) from None


PUBLISHED: dict[str, Callable[[_Opening], Source]] = {
    "digits": lambda how: open_digits(),
    "cifar10": lambda how: open_cifar10(how.root, how.download),
    "cifar100": lambda how: open_cifar100(how.root, how.download),
    "stl10": lambda how: open_stl10(how.root, how.download),
    "tiny-imagenet": lambda how: how.files("tiny-imagenet", list_tiny_imagenet(how.root)),
    "imagenet": lambda how: how.files("imagenet", list_imagenet(how.root)),
    "isic2018": lambda how: how.files("isic2018", list_isic(how.root), imbalanced=True),
}
"""Data sets known by name, and the function that opens each."""


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
        spec: ``digits``, ``cifar10``, ``cifar100``, ``stl10``, ``tiny-imagenet``, ``imagenet``,
            ``isic2018``, or a path. A name wins over a folder of the same name; write ``./digits``
            for the folder.
        root: Where the files of published data sets lie, or are downloaded to: the first four. The
            others are unpacked there by hand; ``deepbregman data check NAME`` says how.
        image_size: Side of the training images; sets the frame that files are decoded into.
        download: Whether to download a published data set that is absent.
        seed: Of the test split set aside from labelled files that have none.
        skip_unreadable: Leave unreadable image files out instead of stopping at the first. In
            sets of up to 20,000 files every file is decoded here, so that a truncated one is
            found now; in larger ones only the headers are read now, and in ImageNet nothing is.
        progress: Called with the files checked and the files in all, where there are files.

    Raises:
        UserError: When there is no such source or it cannot be used.
    """
    if image_size < 1:
        raise UserError(f"data.image_size {image_size}: must be at least 1 pixel, e.g. 32")
    if spec in PUBLISHED:
        how = _Opening(expanded(root), image_size, download, seed, skip_unreadable, progress)
        return PUBLISHED[spec](how)
    if spec == "voc":
        raise UserError(
            "data.source 'voc': Pascal VOC has boxes, not one class an image, and is for "
            "`deepbregman evaluate RUN --protocol detect`; pretrain on another source"
        )
    path = expanded(Path(spec))
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
