"""What is known of each published data set: its counts, its layout, its terms, where it is."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Archive:
    """A file as it is published."""

    name: str
    """Relative to the root."""
    md5: str


@dataclass(frozen=True)
class Dataset:
    """A data set that has a name here."""

    name: str
    title: str
    num_classes: int
    counts: dict[str, tuple[int, ...]]
    """Images of each split as published; where two editions differ, both, the usual one first."""
    image_size: int
    """Side of the training images that is usual for it."""
    size: str
    """Of the archives."""
    layout: tuple[str, ...]
    """What lies under the root once it is unpacked."""
    terms: str
    """Licence, or the terms its authors state."""
    fetch: str
    """How to get it."""
    downloadable: bool
    """Whether torchvision downloads it."""
    optional: tuple[str, ...] = ()
    """Splits that may be absent."""
    archives: tuple[Archive, ...] = ()
    """Archives whose checksums are published and torchvision does not know."""


DATASETS: dict[str, Dataset] = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            "digits",
            "Optical recognition of handwritten digits (8 x 8 px)",
            10,
            {"train": (1297,), "test": (500,)},
            8,
            "0.1 MB",
            (),
            "CC BY 4.0 (UCI)",
            "it comes with scikit-learn",
            True,
        ),
        Dataset(
            "cifar10",
            "CIFAR-10 (32 x 32 px)",
            10,
            {"train": (50_000,), "test": (10_000,)},
            32,
            "170 MB",
            ("cifar-10-batches-py/data_batch_1 ... data_batch_5, test_batch, batches.meta",),
            "no licence stated; cite Krizhevsky (2009)",
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz, unpacked in the root",
            True,
        ),
        Dataset(
            "cifar100",
            "CIFAR-100, fine labels (32 x 32 px)",
            100,
            {"train": (50_000,), "test": (10_000,)},
            32,
            "169 MB",
            ("cifar-100-python/train, test, meta",),
            "no licence stated; cite Krizhevsky (2009)",
            "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz, unpacked in the root",
            True,
        ),
        Dataset(
            "stl10",
            "STL-10 (96 x 96 px)",
            10,
            {"train": (5_000,), "test": (8_000,), "unlabelled": (100_000,)},
            96,
            "2.6 GB",
            ("stl10_binary/{train,test}_{X,y}.bin, unlabeled_X.bin, class_names.txt",),
            "images of ImageNet, for research; cite Coates et al. (2011)",
            "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz, unpacked in the root",
            True,
        ),
        Dataset(
            "tiny-imagenet",
            "Tiny ImageNet (64 x 64 px)",
            200,
            {"train": (100_000,), "test": (10_000,)},
            64,
            "248 MB",
            (
                "tiny-imagenet-200/wnids.txt, words.txt",
                "tiny-imagenet-200/train/<wnid>/images/*.JPEG",
                "tiny-imagenet-200/val/val_annotations.txt, val/images/*.JPEG",
            ),
            "images of ImageNet, for non-commercial research and education",
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked in the root",
            False,
            archives=(Archive("tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),),
        ),
        Dataset(
            "imagenet",
            "ImageNet (ILSVRC 2012)",
            1000,
            {"train": (1_281_167,), "test": (50_000,)},
            224,
            "155 GB",
            ("imagenet/train/<wnid>/*.JPEG", "imagenet/val/<wnid>/*.JPEG"),
            "non-commercial research and education, after agreeing to its terms of access",
            "agree to the terms at https://image-net.org/download.php; unpack "
            "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar so that each class is a folder "
            "(torchvision.datasets.ImageNet does that)",
            False,
        ),
        Dataset(
            "isic2018",
            "ISIC 2018, task 3: skin lesions",
            7,
            {"train": (10_015,), "test": (1_512, 1_511)},
            128,
            "3 GB",
            (
                "isic2018/ISIC2018_Task3_Training_Input/*.jpg",
                "isic2018/ISIC2018_Task3_Training_GroundTruth/"
                "ISIC2018_Task3_Training_GroundTruth.csv",
                "isic2018/ISIC2018_Task3_Training_LesionGroupings.csv (optional)",
                "isic2018/ISIC2018_Task3_Test_Input/*.jpg (optional)",
                "isic2018/ISIC2018_Task3_Test_GroundTruth/"
                "ISIC2018_Task3_Test_GroundTruth.csv (optional)",
            ),
            "CC BY-NC 4.0; cite Tschandl et al. (2018) and Codella et al. (2019)",
            "the archives of task 3 at https://challenge.isic-archive.com/data/#2018, unpacked in "
            "the root or in isic2018 there",
            False,
            optional=("test",),
        ),
        Dataset(
            "voc",
            "Pascal VOC 2007 and 2012, for detection",
            20,
            {"2007 trainval": (5_011,), "2007 test": (4_952,), "2012 trainval": (11_540,)},
            224,
            "2.9 GB",
            ("VOCdevkit/VOC2007, VOCdevkit/VOC2012: JPEGImages, Annotations, ImageSets/Main",),
            "photographs of Flickr under its terms of use; for research",
            "http://host.robots.ox.ac.uk/pascal/VOC/: VOCtrainval_06-Nov-2007.tar, "
            "VOCtest_06-Nov-2007.tar and VOCtrainval_11-May-2012.tar, unpacked in the root",
            True,
        ),
    )
}
"""Every data set of the paper, and digits."""


def published_archives(dataset: Dataset) -> tuple[Archive, ...]:
    """Return the archives of a data set whose checksums are known, most of them to torchvision."""
    from torchvision.datasets.imagenet import ARCHIVE_META
    from torchvision.datasets.voc import DATASET_YEAR_DICT

    if dataset.name in ("cifar10", "cifar100", "stl10"):
        kind = _torchvision_class(dataset.name)
        return (Archive(kind.filename, kind.tgz_md5),)
    if dataset.name == "imagenet":
        return tuple(Archive(*ARCHIVE_META[part]) for part in ("train", "val"))
    if dataset.name == "voc":
        parts = [DATASET_YEAR_DICT[year] for year in ("2007", "2007-test", "2012")]
        return tuple(Archive(part["filename"], part["md5"]) for part in parts)
    return dataset.archives


def published_files(dataset: Dataset) -> tuple[Archive, ...]:
    """Return the unpacked files of CIFAR or STL-10 under their root, with their checksums."""
    kind = _torchvision_class(dataset.name)
    listed = [*kind.train_list, *kind.test_list]
    if hasattr(kind, "meta"):
        listed.append([kind.meta["filename"], kind.meta["md5"]])
    return tuple(Archive(f"{kind.base_folder}/{name}", md5) for name, md5 in listed)


def _torchvision_class(name: str) -> Any:
    from torchvision.datasets import CIFAR10, CIFAR100, STL10

    return {"cifar10": CIFAR10, "cifar100": CIFAR100, "stl10": STL10}[name]
