"""Write a folder of images, with a sub-folder for each class, as tar shards in a random order.

    python examples/write_shards.py imagenet/train shards/train
    python examples/write_shards.py imagenet/val shards/val

The first command writes shards/train-00000.tar and so on, 10,000 images in each. Train on them by
deepbregman pretrain best-imagenet --data shards
"""

import io
import random
import sys
import tarfile
from pathlib import Path

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file to an archive."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def main(folder: Path, prefix: Path, images_per_shard: int = 10_000) -> None:
    """Write all images of a folder, each with its class."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    random.Random(0).shuffle(paths)  # sorted by class, a batch would have few classes
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(paths), images_per_shard):
        shard = Path(f"{prefix}-{start // images_per_shard:05d}.tar")
        with tarfile.open(shard, "x") as archive:
            for place, path in enumerate(paths[start : start + images_per_shard], start):
                add(archive, f"{place:09d}{path.suffix.lower()}", path.read_bytes())
                add(archive, f"{place:09d}.cls", path.parent.name.encode())
        print(shard)


if __name__ == "__main__":
    if not sys.argv[2:]:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
