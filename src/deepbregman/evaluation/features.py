"""Features of a frozen encoder, computed once and handed to every protocol."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.config import Config
from deepbregman.data import Batches, Progress
from deepbregman.method.model import Model
from deepbregman.method.transformation import Views, centre_view

BATCH_SIZE = 512


class Features(NamedTuple):
    """What the networks make of a set of images, in its order."""

    representation: Tensor  # (N, d), the encoder's output
    scores: Tensor | None  # (N, K), the subnetworks' outputs, or None without divergence


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Run a block in which a module must stay as it is: evaluation mode, no gradient, no change.

    Parameters and buffers (running statistics of batch normalisation among them) are compared
    afterwards; a difference is an error, since every number measured in the block would be wrong.
    """
    modes = {part: part.training for part in module.modules()}
    module.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    try:
        with torch.no_grad():
            yield
        training = [name for name, part in module.named_modules() if part.training]
        after = module.state_dict()
        changed = [
            name for name in {**before, **after} if not _same(before.get(name), after.get(name))
        ]
        if training or changed:
            raise RuntimeError(
                f"a frozen network was touched: in training mode {training}, changed {changed}"
            )
    finally:
        for part, mode in modes.items():
            part.training = mode


def _same(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether two tensors are equal to the bit, NaN being equal to itself."""
    if before is None or after is None or before.shape != after.shape:
        return False
    if before.dtype != after.dtype:
        return False
    return torch.equal(before, after) or bool(
        ((before == after) | (before.isnan() & after.isnan())).all()
    )


def compute_features(
    model: Model, batches: Batches, image_size: int, progress: Progress | None = None
) -> Features:
    """Pass every image, resized and centre-cropped, through the frozen networks.

    Args:
        model: of a run.
        batches: the images.
        image_size: side of the view.
        progress: called with the images done and the images in all.

    Returns:
        In the order of the images, float32, on their device.
    """
    representation, scores = [], []
    done = 0
    with frozen(model):
        for batch in batches.iterate(torch.arange(batches.num_images), BATCH_SIZE):
            h, _, o = model(centre_view(batch.images, batch.sizes, image_size))
            representation.append(h)
            if o is not None:
                scores.append(o)
            done += len(h)
            if progress is not None:
                progress(done, batches.num_images)
    return Features(torch.cat(representation), torch.cat(scores) if scores else None)


def compute_crop_features(
    model: Model, batches: Batches, views: Views, seed: int, progress: Progress | None = None
) -> Tensor:
    """Average the frozen encoder's output over the random views of every image.

    Each image draws after the one before it, on the host: its views depend on the seed and its
    place alone, not on the device or on how the images are cut into batches.

    Args:
        model: of a run.
        batches: the images.
        views: M of each image.
        seed: of the views.
        progress: called with the images done and the images in all.

    Returns:
        (N, d), in the order of the images, float32, on their device.
    """
    generator = torch.Generator().manual_seed(seed)
    # As many views in one pass as whole images elsewhere, so that it takes no more memory.
    together = max(1, BATCH_SIZE // views.num_views)
    means = []
    done = 0
    with frozen(model):
        for images, sizes in batches.iterate(torch.arange(batches.num_images), BATCH_SIZE):
            drawn = views.draw(len(images), device="cpu", generator=generator)  # (M, B, R)
            uniforms = drawn.reshape(len(images), views.num_views, -1).transpose(0, 1)
            for start in range(0, len(images), together):
                part = slice(start, start + together)
                there = uniforms[:, part].to(images.device)
                shown = views(images[part], None if sizes is None else sizes[part], there)
                h = model.encoder(shown.flatten(0, 1)).float()  # (M * b, d)
                means.append(h.unflatten(0, shown.shape[:2]).mean(dim=0))
            done += len(images)
            if progress is not None:
                progress(done, batches.num_images)
    return torch.cat(means)


def crop_and_flip(config: Config, num_views: int = 1) -> Views:
    """Build the one augmentation that classifiers are trained with: a crop and a flip, no colour.

    Both as in the run's own views, but as large as the images that are judged; a data set whose
    flipped images mean something else says so there.
    """
    return Views(
        config.data.image_size,
        num_views=num_views,
        crop_area=config.views.crop_area,
        crop_aspect=config.views.crop_aspect,
        flip=config.views.flip,
        without=("rotation", "jitter", "greyscale", "blur"),
    )
