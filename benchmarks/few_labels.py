"""What a few labels are worth with an encoder: rules of the protocol few, and the choice of label.

    python benchmarks/few_labels.py encoder.safetensors cifar10.npz [--out FILE.json]

Some training images are labelled at random, 1 to 20 of each class. The rules of `few` predict test
images. `predict_labels`, which the command label uses, predicts the other training images, with the
divergence over a bank among its classifiers and without. The features are kept beside the encoder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepbregman import load_encoder
from deepbregman.data import open_source
from deepbregman.data.images import ArrayImages, Split
from deepbregman.evaluation.classes import FeatureBank
from deepbregman.evaluation.features import Features
from deepbregman.evaluation.few import BY_DIVERGENCE, RULES, Task, draw_labels
from deepbregman.evaluation.labelling import predict_labels
from deepbregman.files import write_json
from deepbregman.runs import provenance
from deepbregman.statistics import summarise
from deepbregman.training.devices import device_name, pick_device

KINDS = {"without the bank": ("knn", "linear"), "with the bank": ("knn", "linear", "bank")}


def few_labels(
    encoder: tyro.conf.Positional[Path],
    data: tyro.conf.Positional[str],
    train: int = 7000,
    test: int = 3000,
    labels: tuple[int, ...] = (1, 2, 3, 5, 10, 20),
    draws: int = 10,
    out: Path | None = None,
) -> None:
    """Measure what rules make of a few labels.

    Args:
        encoder: A file that `deepbregman export` wrote.
        data: A labelled dataset that fits into memory.
        train: Number of training images, drawn at random.
        test: Number of test images, drawn at random.
        labels: Numbers of labelled images of each class.
        draws: Number of draws of labelled images.
        out: A JSON file for the record.
    """
    console, device = Console(), pick_device("auto")
    kept = encoder.with_suffix(".features")
    if not kept.exists():
        source = open_source(data, image_size=32)
        network = load_encoder(encoder, device)
        parts = {"test": (source.known_test, test), "train": (source.train, train)}
        random, found = np.random.default_rng(0), {}
        for name, (split, count) in parts.items():
            chosen = np.sort(random.permutation(len(split))[:count])
            pair = embed_some(split, torch.from_numpy(chosen), network, device)
            found[name], found[f"{name}_labels"] = pair
        save_file(found, kept)
    kept_features = load_file(kept, device=str(device))
    images, truth, asked, answers = (
        kept_features[name] for name in ("train", "train_labels", "test", "test_labels")
    )
    rows: list[dict[str, Any]] = []
    for count in labels:
        values = measure(images, truth, asked, answers, count, draws)
        rows += [
            {"labels_per_class": count, "rule": rule, **summarise(found), "values": found}
            for rule, found in values.items()
        ]
        for row in rows[-len(values) :]:
            console.print(f"{count} labels, {row['rule']}: {row['mean']:.1f} %")
    if out is not None:
        sizes = {"num_train": len(images), "num_test": len(asked)}
        write_json(out, {**provenance(device_name(device)), **sizes, "rows": rows})


def embed_some(
    split: Split, places: Tensor, network: torch.nn.Module, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the features and the labels of some images of a split."""
    assert isinstance(split.images, ArrayImages)
    pixels = split.images.pixels[places]
    with torch.no_grad():
        parts = [network(part.to(device)) for part in pixels.split(100)]
    return torch.cat(parts).cpu(), split.known_labels[places]


def measure(
    images: Tensor, truth: Tensor, asked: Tensor, answers: Tensor, count: int, draws: int
) -> dict[str, Sequence[float]]:
    """Return the accuracies in per cent of every rule, one for each draw."""
    bank, num_classes = FeatureBank.draw(images), int(truth.max()) + 1
    values: dict[str, list[float]] = {}
    for draw in range(draws):
        rows = draw_labels(truth, count, draw).to(truth.device)
        known = Features(images[rows], None)
        task = Task(known, truth[rows], Features(asked, None), num_classes, 0.0, bank)
        for name, rule in RULES.items():
            if name in BY_DIVERGENCE or "embeddings" in name:
                continue  # an exported encoder has no projection
            values.setdefault(f"few: {name}", []).append(share(rule(task) == answers))
        if count == 1:
            continue  # label needs two of each class
        given = torch.full_like(truth, -1)
        given[rows] = truth[rows]
        for name, kinds in KINDS.items():
            found = predict_labels(
                Features(images, None), given, num_classes=num_classes, kinds=kinds, seed=draw
            )
            right = found.probabilities.argmax(dim=1).to(truth.device) == truth
            values.setdefault(f"label: {name}", []).append(share(right[given < 0]))
    return values


def share(right: Tensor) -> float:
    """Return the percentage that is right."""
    return 100.0 * right.double().mean().item()


if __name__ == "__main__":
    tyro.cli(few_labels)
