"""The protocol ``corruptions``: noisy, compressed, blurred and low-contrast test images.

The strengths are 1, 3 and 5 of CIFAR-10-C (Hendrycks and Dietterich, 2019); a blur is scaled with
the side of the images. Classifiers learn from clean images only.
"""

import io
from collections.abc import Callable
from functools import partial
from statistics import fmean

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from deepbregman.runs import Record
from deepbregman.training.randomness import derive_seed

from .features import Change, Features, LabelledFeatures, compute_features
from .inputs import Evaluation
from .knn import find_neighbours, vote
from .linear import fit_best
from .results import Measurement, make_rows

STRENGTHS: dict[str, tuple[float, float, float]] = {
    "noise": (0.04, 0.08, 0.1),
    "JPEG": (80, 58, 40),
    "blur": (0.4, 0.7, 1.0),
    "contrast": (0.75, 0.4, 0.15),
}
"""Deviation of the noise, quality, sigma in pixels of 32, and what is left of the contrast."""
NEIGHBOURS = 20

Predict = Callable[[Features], Tensor]


def compress_jpeg(images: Tensor, quality: float) -> Tensor:
    """Write and read images (N, 3, H, W) in [0, 1] as JPEG."""
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    read = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=int(quality))
        read.append(np.asarray(Image.open(file)))
    joined = torch.from_numpy(np.stack(read)).permute(0, 3, 1, 2)
    return joined.to(images.device).float() / 255


def blur(images: Tensor, sigma: float) -> Tensor:
    """Blur by a Gaussian of sigma pixels of an image of 32, cut off at 4 sigma."""
    sigma *= images.shape[-1] / 32
    radius = min(max(1, round(4 * sigma)), images.shape[-1] - 1)
    blurred: Tensor = gaussian_blur(images, [2 * radius + 1] * 2, [sigma] * 2)
    return blurred


def lower_contrast(images: Tensor, share: float) -> Tensor:
    """Move every channel towards its mean over the image."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    return ((images - mean) * share + mean).clamp(0, 1)


def corrupt(name: str, strength: float, seed: int) -> Change:
    """Return the function that corrupts the batches of one pass over the images."""
    if name != "noise":
        change = {"JPEG": compress_jpeg, "blur": blur, "contrast": lower_contrast}[name]
        return lambda images, number: change(images, strength)

    def add_noise(images: Tensor, number: int) -> Tensor:
        # On the host, by the number of the batch: one device and several see the same.
        batch_seed = derive_seed(seed, f"corruption {name} {strength:g}", number)
        generator = torch.Generator().manual_seed(batch_seed)
        noise = torch.randn(images.shape, generator=generator).to(images.device)
        return (images + strength * noise).clamp(0, 1)

    return add_noise


def corruptions(evaluation: Evaluation) -> list[Record]:
    """Classify corrupted test images: linear, and by neighbours by cosine and by the divergence."""
    labelled, seeds = evaluation.labelled, []
    total = len(evaluation.options.each_seed) * (1 + sum(map(len, STRENGTHS.values())))
    done = 0

    def measure(classifiers: dict[str, Predict], features: Features) -> dict[str, dict[str, float]]:
        return {name: labelled.measure(predict(features)) for name, predict in classifiers.items()}

    for seed in evaluation.options.each_seed:
        classifiers = fit_classifiers(labelled, seed)
        found = {"clean": measure(classifiers, labelled.test.features)}
        done += 1
        for name, strengths in STRENGTHS.items():
            for number, strength in enumerate(strengths, start=1):
                size, change = labelled.config.data.image_size, corrupt(name, strength, seed)
                features = compute_features(
                    labelled.model, labelled.test.shared_batches, size, change=change
                )
                found[f"{name} {number}"] = measure(classifiers, features.require_finite())
                done += 1
                evaluation.progress("corruptions", done, total)
        seeds.append(_list_measurements(labelled, found))
    return make_rows(seeds)


def fit_classifiers(labelled: LabelledFeatures, seed: int) -> dict[str, Predict]:
    """Fit every classifier to the clean training images."""
    train, labels = labelled.train.features, labelled.train.labels
    fit, _ = fit_best(train.representation, labels, labelled.num_classes, seed)
    k = min(NEIGHBOURS, len(labels))

    def ask_neighbours(measure: str, features: Features) -> Tensor:
        found = find_neighbours(labelled, features, measure, k, seed)
        return vote(found, labels, labelled.num_classes)

    fitted: dict[str, Predict] = {
        "linear": lambda features: fit.predict(features.representation).argmax(dim=1),
        f"kNN by cosine, k={k}": partial(ask_neighbours, "cosine"),
    }
    if train.scores is not None:
        fitted[f"kNN by divergence, k={k}"] = partial(ask_neighbours, "divergence")
    return fitted


def _list_measurements(
    labelled: LabelledFeatures, found: dict[str, dict[str, dict[str, float]]]
) -> list[Measurement]:
    """Make a measurement of every corruption, and of the mean over all of them."""
    corrupted = [name for name in found if name != "clean"]
    measured = []
    for classifier, clean in found["clean"].items():
        mean = {
            metric: fmean(found[name][classifier][metric] for name in corrupted) for metric in clean
        }
        values = {name: found[name][classifier] for name in found} | {"mean of all": mean}
        measured += [
            Measurement(f"{classifier}, {name}", value, *labelled.counts)
            for name, value in values.items()
        ]
    return measured
