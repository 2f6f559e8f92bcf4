"""Images with the same content: the same bytes of a file, or the same pixels."""

from collections.abc import Hashable, Iterable
from hashlib import blake2b
from pathlib import Path

from deepbregman.data.images import (
    ArrayImages,
    ImagePlace,
    Images,
    content_size,
    read_content,
)


def digest_file(place: ImagePlace) -> bytes:
    """Return a digest of all bytes of an image, as it is stored."""
    digest = blake2b(digest_size=16)
    if not isinstance(place, Path):
        digest.update(read_content(place))
        return digest.digest()
    with place.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.digest()


def group_identical(images: Images) -> list[list[int]]:
    """List groups of two or more images with the same content; only files of one size are read."""
    if isinstance(images, ArrayImages):
        sizes = images.true_sizes().tolist()
        keys: list[tuple[int, Hashable]] = []
        for index, (pixels, size) in enumerate(zip(images.pixels, sizes, strict=True)):
            content = pixels[:, : size[0], : size[1]].contiguous().numpy().tobytes()
            keys.append((index, (*size, blake2b(content, digest_size=16).digest())))
        return _group(keys)
    same_size = _group((i, content_size(place)) for i, place in enumerate(images.places))
    return [
        group
        for candidates in same_size
        for group in _group((i, digest_file(images.paths[i])) for i in candidates)
    ]


def _group(keys: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, key in keys:
        groups.setdefault(key, []).append(index)
    return [group for group in groups.values() if len(group) > 1]
