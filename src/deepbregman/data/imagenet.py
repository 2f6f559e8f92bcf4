"""ImageNet (ILSVRC 2012) as class folders, named by WordNet number."""

import re
from pathlib import Path

from deepbregman.data.folders import Tree, by_class, read_tree, some
from deepbregman.data.listings import Listing
from deepbregman.errors import UserError

_WNID = re.compile(r"n\d{8}")


def list_imagenet(root: Path) -> Listing:
    """List ``train/<wnid>/...`` and ``val/<wnid>/...`` of ``root/imagenet``, or of ``root``.

    Classes are in the order of their WordNet numbers, as everywhere. Some of the 1,000 will do, and
    without ``val`` there is no test split; ``deepbregman data check imagenet`` counts.

    Raises:
        UserError: When there is no training folder, or a folder is not in this layout.
    """
    folder = root / "imagenet" if (root / "imagenet").is_dir() else root
    if not (folder / "train").is_dir():
        raise UserError(
            f"data.source 'imagenet': {str(root / 'imagenet' / 'train')!r} is not there; unpack "
            "ILSVRC2012_img_train.tar to train/<wnid>/*.JPEG there, or set data.root to the folder "
            "that holds train and val"
        )
    train = _read_classes(folder / "train")
    test = _read_classes(folder / "val") if (folder / "val").is_dir() else None
    classes = tuple(sorted(train.groups))
    unknown = [] if test is None else sorted(set(test.groups) - set(classes))
    if unknown:
        raise UserError(
            f"data.source 'imagenet': {str(folder / 'val')!r} has classes that train has not "
            f"({some(unknown)}); unpack them into train or remove them from val"
        )
    return Listing(
        folder,
        by_class(train, classes),
        None if test is None else by_class(test, classes),
        classes,
        num_ignored=train.num_ignored + (0 if test is None else test.num_ignored),
        sets_test_aside=False,  # a number on a part of train would pass for one on val
    )


def _read_classes(folder: Path) -> Tree:
    tree = read_tree(folder)
    if tree.here:
        raise UserError(
            f"data.source 'imagenet': {str(folder)!r} has {len(tree.here):,} images directly in it "
            f"({some(path.name for path in tree.here)}); move each into a folder named by its "
            "class, n01440764 and so on: torchvision.datasets.ImageNet does so for the archives"
        )
    if not tree.groups:
        raise UserError(f"data.source 'imagenet': {str(folder)!r} has no image in it; unpack it")
    strange = [name for name in sorted(tree.groups) if not _WNID.fullmatch(name)]
    if strange:
        raise UserError(
            f"data.source 'imagenet': {str(folder)!r} has folders that are not classes of ImageNet "
            f"({some(strange)}; they are called n01440764 and so on); give a folder of other "
            "classes by its path"
        )
    return tree
