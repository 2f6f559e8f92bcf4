"""The registry of datasets, and how a source is opened: by name, as a folder, or as an .npz file.

Importing it needs no torch, so that a command can check its source before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deepbregman.data.folders import (
    Listing,
    has_image,
    list_imagenet,
    list_isic,
    list_tiny_imagenet,
)
from deepbregman.data.formats import index_stored, is_stored
from deepbregman.data.npz import open_npz
from deepbregman.data.stored import HUB, list_parts
from deepbregman.data.tables import TABLE_SUFFIX, is_listed, list_images
from deepbregman.errors import UserError, suggest
from deepbregman.terminal import ignore_progress

if TYPE_CHECKING:
    from deepbregman.data.images import Progress, Source

FILE_SUFFIXES = (".npz", ".tar", ".parquet", TABLE_SUFFIX)
"""Files that are a dataset by themselves."""


@dataclass(frozen=True)
class Dataset:
    """A dataset that is known by name."""

    name: str
    title: str
    num_classes: int
    counts: dict[str, tuple[int, ...]]
    """Images of each split as published; where two editions differ, both, the usual one first."""
    image_size: int
    """Side of the training images that is usual for it."""
    size: str
    layout: str
    """The unpacked files under the root."""
    terms: str
    """Licence, or the terms its authors state."""
    fetch: str
    archives: dict[str, str] = field(default_factory=dict)
    """The archives as they are published, with their MD5 sums."""
    list_files: Callable[[Path], Listing] | None = None
    """Lists the files of a dataset that its user unpacks; others are downloaded."""
    landmark: str = ""
    """A file or folder that cannot be missing, in the folder of the dataset under the root."""

    @property
    def downloadable(self) -> bool:
        """Whether it is downloaded where it is absent."""
        return self.list_files is None

    def find(self, root: Path) -> Path:
        """Return the folder of its files under a root, or the root itself."""
        landmark = root / self.landmark
        for path in (landmark, root / landmark.name):
            if path.exists():
                return path.parent
        raise UserError(f"{str(landmark)!r} is not there")

    @contextmanager
    def explain_failure(self) -> Iterator[None]:
        """Add to an error of the block which dataset it is, and how to get it."""
        try:
            yield
        except UserError as error:
            raise UserError(
                f"data.source {self.name!r}: {error}; get it: {self.fetch}; or set data.root to "
                "the folder that holds it"
            ) from error


DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "digits",
            title="Optical recognition of handwritten digits (8 x 8 px)",
            num_classes=10,
            counts={"train": (1297,), "test": (500,)},
            image_size=8,
            size="0.1 MB",
            layout="",
            terms="CC BY 4.0 (UCI)",
            fetch="it comes with scikit-learn",
        ),
        Dataset(
            "cifar10",
            title="CIFAR-10 (32 x 32 px)",
            num_classes=10,
            counts={"train": (50_000,), "test": (10_000,)},
            image_size=32,
            size="170 MB",
            layout="cifar-10-batches-py/data_batch_1 ... data_batch_5, test_batch, batches.meta",
            terms="no licence stated; cite Krizhevsky (2009)",
            fetch="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz, unpacked in the root",
            archives={"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
        ),
        Dataset(
            "cifar100",
            title="CIFAR-100, fine labels (32 x 32 px)",
            num_classes=100,
            counts={"train": (50_000,), "test": (10_000,)},
            image_size=32,
            size="169 MB",
            layout="cifar-100-python/train, test, meta",
            terms="no licence stated; cite Krizhevsky (2009)",
            fetch="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz, unpacked in the root",
            archives={"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
        ),
        Dataset(
            "stl10",
            title="STL-10 (96 x 96 px)",
            num_classes=10,
            counts={"train": (5_000,), "test": (8_000,), "unlabelled": (100_000,)},
            image_size=96,
            size="2.6 GB",
            layout="stl10_binary/{train,test}_{X,y}.bin, unlabeled_X.bin, class_names.txt",
            terms="images of ImageNet, for research; cite Coates et al. (2011)",
            fetch="http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz, unpacked in the root",
            archives={"stl10_binary.tar.gz": "91f7769df0f17e558f3565bffb0c7dfb"},
        ),
        Dataset(
            "tiny-imagenet",
            title="Tiny ImageNet (64 x 64 px)",
            num_classes=200,
            counts={"train": (100_000,), "test": (10_000,)},
            image_size=64,
            size="248 MB",
            layout=(
                "tiny-imagenet-200/wnids.txt, words.txt; "
                "tiny-imagenet-200/train/<wnid>/images/*.JPEG; "
                "tiny-imagenet-200/val/val_annotations.txt, val/images/*.JPEG"
            ),
            terms="images of ImageNet, for non-commercial research and education",
            fetch="http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked in the root",
            archives={"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"},
            list_files=list_tiny_imagenet,
            landmark="tiny-imagenet-200/wnids.txt",
        ),
        Dataset(
            "imagenet",
            title="ImageNet (ILSVRC 2012)",
            num_classes=1000,
            counts={"train": (1_281_167,), "test": (50_000,)},
            image_size=224,
            size="155 GB",
            layout="imagenet/train/<wnid>/*.JPEG; imagenet/val/<wnid>/*.JPEG",
            terms="non-commercial research and education, after agreeing to its terms of access",
            fetch=(
                "agree to the terms at https://image-net.org/download.php; unpack "
                "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar so that each class is a "
                "folder (torchvision.datasets.ImageNet does that)"
            ),
            archives={
                "ILSVRC2012_img_train.tar": "1d675b47d978889d74fa0da5fadfb00e",
                "ILSVRC2012_img_val.tar": "29b22e2961454d5413ddabcf34fc5622",
            },
            list_files=list_imagenet,
            landmark="imagenet/train",
        ),
        Dataset(
            "isic2018",
            title="ISIC 2018, task 3: skin lesions",
            num_classes=7,
            counts={"train": (10_015,), "test": (1_512, 1_511)},
            image_size=128,
            size="3 GB",
            layout=(
                "isic2018/ISIC2018_Task3_Training_Input/*.jpg; "
                "isic2018/ISIC2018_Task3_Training_GroundTruth/"
                "ISIC2018_Task3_Training_GroundTruth.csv; "
                "isic2018/ISIC2018_Task3_Training_LesionGroupings.csv (optional); "
                "isic2018/ISIC2018_Task3_Test_Input/*.jpg and "
                "isic2018/ISIC2018_Task3_Test_GroundTruth/ISIC2018_Task3_Test_GroundTruth.csv "
                "(both optional)"
            ),
            terms="CC BY-NC 4.0; cite Tschandl et al. (2018) and Codella et al. (2019)",
            fetch=(
                "the archives of task 3 at https://challenge.isic-archive.com/data/#2018, unpacked "
                "in the root or in isic2018 there"
            ),
            list_files=list_isic,
            landmark="isic2018/ISIC2018_Task3_Training_Input",
        ),
        Dataset(
            "voc",
            title="Pascal VOC 2007 and 2012, for detection",
            num_classes=20,
            counts={"2007 trainval": (5_011,), "2007 test": (4_952,), "2012 trainval": (11_540,)},
            image_size=224,
            size="2.9 GB",
            layout="VOCdevkit/VOC2007, VOCdevkit/VOC2012: JPEGImages, Annotations, ImageSets/Main",
            terms="photographs of Flickr under its terms of use; for research",
            fetch=(
                "http://host.robots.ox.ac.uk/pascal/VOC/: VOCtrainval_06-Nov-2007.tar, "
                "VOCtest_06-Nov-2007.tar and VOCtrainval_11-May-2012.tar, unpacked in the root"
            ),
            archives={
                "VOCtrainval_06-Nov-2007.tar": "c52e279531787c972589f7e41ab4ae64",
                "VOCtest_06-Nov-2007.tar": "b6e924de25625d8de591ea690078ad9f",
                "VOCtrainval_11-May-2012.tar": "6cd6e144f989b92b3379bac3b3de84fd",
            },
        ),
    )
}
"""Every dataset of the paper, and digits."""


def expand_home(path: Path) -> Path:
    """Put a home folder in the place of ``~``."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise UserError(
            f"path {str(path)!r}: there is no user of that name; write ./ before a folder that "
            "begins with ~"
        ) from None


def find_source(spec: str, *, with_boxes: bool = False) -> tuple[Dataset | None, Path]:
    """Return the dataset of this name, or a path; a path of the hub begins with ``hf:``.

    A dataset for detection, whose images have boxes, is refused unless ``with_boxes`` is set.
    """
    names = [name for name in DATASETS if with_boxes or name != "voc"]
    if spec in names:
        return DATASETS[spec], Path()
    if spec == "voc":
        raise UserError(
            "data.source 'voc': Pascal VOC has boxes, not one class an image, and is for "
            "`deepbregman evaluate RUN --protocol detect`; pretrain on another source"
        )
    if spec == "custom":
        raise UserError(
            "data.source is 'custom': the images are your own program's, which the command line "
            "cannot name; give them in Python, as `data=` to deepbregman.pretrain and resume, as "
            "`source=own_data(...)` to the others, or name another dataset with --data"
        )
    path = expand_home(Path(spec))
    if spec.startswith(HUB) or (spec.strip() and path.is_dir()):
        return None, path
    if path.suffix.lower() in FILE_SUFFIXES:
        return None, path
    if path.is_file():
        raise UserError(
            f"data.source {spec!r}: a file, but not one of {' '.join(FILE_SUFFIXES)}; give "
            "one of these, or a folder: of images, of shards, or one that save_to_disk wrote"
        )
    # A run may be looked at from another folder than that it was started in.
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise UserError(
        f"data.source {spec!r}: no such folder or .npz file{where}, and not one of "
        f"{', '.join(names)}{suggest(spec, names)}"
    )


def has_labels(spec: str) -> bool:
    """Whether a source has labels to judge by, in both splits, without reading an image."""
    dataset, path = find_source(spec)
    if dataset is not None:
        return True
    if is_stored(path):
        return index_stored(path).splits["train"].labels is not None
    if path.suffix.lower() == ".npz":
        with open_npz(path) as arrays:
            test = "test" if "test_images" in arrays.keys else "val"  # as in open_archive
            return {"train_labels", f"{test}_images", f"{test}_labels"} <= arrays.keys
    return list_images(path).has_labels


def list_source(spec: str) -> Listing | None:
    """List the files of a folder or a table, for :func:`open_source`; None for another source."""
    dataset, path = find_source(spec)
    has_files = dataset is None and not is_stored(path) and is_listed(path)
    return list_images(path) if has_files else None


def check_labels(spec: str) -> Listing | None:
    """Refuse images or an ``.npz`` file without labels to judge by, before torch is loaded.

    Returns:
        The files of a folder or a table, which take a while to list, for :func:`open_source`.
    """
    dataset, path = find_source(spec)
    if dataset is not None or is_stored(path):
        return None  # the first have labels; to look at the others takes long
    listing = list_images(path) if is_listed(path) else None
    if not (has_labels(spec) if listing is None else listing.has_labels):
        raise lack_of_labels(spec)
    return listing


def lack_of_labels(name: str) -> UserError:
    """Return the error about a dataset without labels to judge by."""
    return UserError(
        f"data {name!r} lacks labels to evaluate with: its training and its test images need them; "
        "give a labelled dataset with --data, such as a folder with one subfolder for each class, "
        "a CSV file with the columns image and label, or an .npz file with train_labels, "
        "test_images and test_labels; to get labels for all images from labels for a few, use "
        "deepbregman label"
    )


def check_source(spec: str, root: Path = Path("data")) -> None:
    """Refuse a source that cannot be opened, as far as that shows in a moment and without torch.

    A dataset known by name must be there if it cannot be downloaded; a folder must hold an image;
    an ``.npz`` file must have ``train_images``.
    """
    dataset, path = find_source(spec)
    if dataset is not None:
        if not dataset.downloadable:
            with dataset.explain_failure():
                dataset.find(expand_home(root))
    elif is_stored(path):
        if not spec.startswith(HUB) and not path.exists():
            list_parts(path, path.suffix.lower())  # its error says what to give
    elif is_listed(path):
        if not path.is_dir() or not has_image(path):
            list_images(path)  # the error about a folder counts its other files
    else:
        with open_npz(path):
            pass


def typical_side(spec: str) -> int:
    """Return the median shorter side of a source's training images; of files, of a sample."""
    import numpy as np

    from deepbregman.data.images import StoredImages
    from deepbregman.data.listings import find_median_side

    dataset, path = find_source(spec)
    if dataset is not None:
        return dataset.image_size
    if is_stored(path):
        store = index_stored(path).splits["train"].store
        return find_median_side(StoredImages(store, np.arange(len(store))))
    if not is_listed(path):
        with open_npz(path) as reader, reader.open("train_images") as (_, header):
            return int(min(header.shape[1:3], default=1))
    return find_median_side(list_images(path).train.paths)


def open_source(
    spec: str,
    *,
    root: Path = Path("data"),
    image_size: int,
    download: bool = True,
    skip_unreadable: bool = False,
    listing: Listing | None = None,
    progress: Progress = ignore_progress,
) -> Source:
    """Open a dataset by name or path, whichever way its images are stored.

    Args:
        spec: A name of ``DATASETS``, a path, or ``hf:NAME`` of the Hugging Face hub. A name wins
            over a folder of the same name; write ``./digits`` for the folder.
        image_size: Side of the training images; sets the frame that files are decoded into.
        skip_unreadable: Leave unreadable image files out instead of stopping at the first. In
            datasets of up to 20,000 files every file is decoded here, so that a truncated one is
            found now; in larger ones only the headers are read now, and in ImageNet nothing is.
        listing: The files of the folder or table ``spec``, if they are listed already.
    """
    from deepbregman.data.archives import open_archive
    from deepbregman.data.downloads import open_download
    from deepbregman.data.listings import open_listing, open_stored

    if image_size < 1:
        raise UserError(f"data.image_size {image_size}: must be at least 1 pixel, e.g. 32")
    dataset, path = find_source(spec)
    if dataset is None and listing is None and is_stored(path):
        return open_stored(index_stored(path), image_size, skip_unreadable, progress)
    if dataset is None and not is_listed(path):
        return open_archive(path)
    if dataset is None:
        name, listing = path.resolve().name, listing or list_images(path)
    elif dataset.list_files is None:
        return open_download(spec, expand_home(root), download)
    else:
        with dataset.explain_failure():
            name, listing = spec, dataset.list_files(dataset.find(expand_home(root)))
    return open_listing(listing, name, image_size, skip_unreadable, progress)
