"""An encoder's features as a measure between images, and what the bank's divergence changes.

    python benchmarks/measures.py encoder.safetensors cifar10.npz [--out FILE.json]
        [--against ham10000.npz noise]

- few: some training images are labelled at random, 1 to 20 of each class, and the rules of the
  protocol `few` predict test images.
- label: `predict_labels`, which the command label uses, predicts the other training images, with
  the divergence over a bank among its classifiers and without.
- retrieval: training images are ranked for each test image.
- cluster: k-means of the test images.
- ood: test images are told from those of other datasets, or from noise.

Accuracies are means over the classes. The features are kept beside the encoder.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console
from safetensors.torch import load_file, save_file
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from torch import Tensor
from torch.nn import functional

from deepbregman import load_encoder
from deepbregman.data import open_source
from deepbregman.data.images import ArrayImages, Split
from deepbregman.evaluation.classes import FeatureBank
from deepbregman.evaluation.features import Features
from deepbregman.evaluation.few import BY_DIVERGENCE, RULES, Task, draw_labels
from deepbregman.evaluation.knn import cosine_neighbours
from deepbregman.evaluation.ood import auroc, draw_noise, mahalanobis_to
from deepbregman.evaluation.predicting import predict_labels
from deepbregman.evaluation.results import balanced_accuracy
from deepbregman.evaluation.retrieval import ranking_quality
from deepbregman.files import write_json
from deepbregman.method.views import centre_view
from deepbregman.runs import collect_provenance
from deepbregman.statistics import summarise
from deepbregman.training.devices import device_name, pick_device

SIDE = 32
KINDS = {"without the bank": ("knn", "linear"), "with the bank": ("knn", "linear", "bank")}
MOST_LABELLED = 500
"""Beyond this number of labels, cross-validation of linear classifiers takes too long here."""
NEIGHBOUR = 50
"""Of the distances from the training images: the default of the protocol ood."""
NOISE = 1000

Record = dict[str, Any]


def measure(
    encoder: tyro.conf.Positional[Path],
    data: tyro.conf.Positional[str],
    against: tuple[str, ...] = (),
    train: int = 7000,
    test: int = 3000,
    labels: tuple[int, ...] = (1, 2, 3, 5, 10, 20),
    draws: int = 10,
    out: Path | None = None,
) -> None:
    """Measure what an encoder's features make of a dataset.

    Args:
        encoder: A file that `deepbregman export` wrote.
        data: A labelled dataset that fits into memory.
        against: Other such datasets, whose test images are to be told from those of data; or noise.
        train: Number of training images, drawn at random; all where there are fewer.
        test: Number of test images, drawn at random; all where there are fewer.
        labels: Numbers of labelled images of each class.
        draws: Number of draws of labelled images, and of starts of k-means.
        out: A JSON file for the record.
    """
    console, rows = Console(), list[Record]()
    here = look(encoder, data, train, test)
    others = {name: look(encoder, name, 1, test)["test"] for name in against}
    for row in chain(
        measure_labels(here, labels, draws),
        measure_retrieval(here),
        measure_clusters(here, draws),
        measure_others(here, others),
    ):
        rows.append(row)
        console.print({key: value for key, value in row.items() if key != "values"})
    if out is not None:
        sizes = {"num_train": len(here["train"]), "num_test": len(here["test"])}
        sizes |= {f"num_{Path(name).stem}": len(found) for name, found in others.items()}
        about = collect_provenance(device_name(pick_device("auto")))
        write_json(out, {**about, "data": Path(data).stem, **sizes, "rows": rows})


def look(encoder: Path, data: str, train: int, test: int) -> dict[str, Tensor]:
    """Return features and labels of some images of both splits, kept from an earlier run if any."""
    device = pick_device("auto")
    kept = encoder.with_suffix(f".{Path(data).stem}-{train}-{test}.features")
    if not kept.exists():
        network, found = load_encoder(encoder, device), dict[str, Tensor]()
        if data == "noise":
            found["test"] = embed(draw_noise(NOISE, SIDE, 0), torch.arange(NOISE), network, device)
        else:
            source, random = open_source(data, image_size=SIDE), np.random.default_rng(0)
            parts = {"test": (source.known_test, test), "train": (source.train, train)}
            for name, (split, count) in parts.items():
                drawn = np.sort(random.permutation(len(split))[:count])
                places = torch.from_numpy(drawn)
                found[name] = embed(split, places, network, device)
                found[f"{name}_labels"] = split.known_labels[places]
        save_file(found, kept)
    return load_file(kept, device=str(device))


def embed(split: Split, places: Tensor, network: torch.nn.Module, device: torch.device) -> Tensor:
    """Return the features of some images of a split."""
    assert isinstance(split.images, ArrayImages)
    with torch.no_grad():
        parts = [
            network(centre_view(part.to(device), None, SIDE))
            for part in split.images.pixels[places].split(100)
        ]
    return torch.cat(parts).cpu()


def measure_labels(
    here: dict[str, Tensor], labels: tuple[int, ...], draws: int
) -> Iterator[Record]:
    """Measure every rule of `few`, and the choice of `label`, for each number of labels."""
    images, truth, asked, answers = read(here)
    bank, num_classes = FeatureBank.gather(images), int(truth.max()) + 1
    for count in labels:
        values: dict[tuple[str, str], list[float]] = {}
        for draw in range(draws):
            rows = draw_labels(truth, count, draw).to(truth.device)
            known = Features(images[rows], None)
            task = Task(known, truth[rows], Features(asked, None), num_classes, 0.0, bank)
            for name, rule in RULES.items():
                if name in BY_DIVERGENCE or "embeddings" in name:
                    continue  # an exported encoder has no projection
                found = balanced_accuracy(rule(task), answers)
                values.setdefault(("few", name), []).append(found)
            if count == 1 or len(rows) > MOST_LABELLED:
                continue  # label needs two of each class
            given = torch.full_like(truth, -1)
            given[rows] = truth[rows]
            for name, kinds in KINDS.items():
                found = label_rest(images, given, truth, kinds, draw)
                values.setdefault(("label", name), []).append(found)
        for (protocol, name), found in values.items():
            about = {"protocol": protocol, "variant": name, "labels_per_class": count}
            yield {**about, "metric": "balanced", **summarise(found), "values": found}


def label_rest(
    images: Tensor, given: Tensor, truth: Tensor, kinds: tuple[str, ...], seed: int
) -> float:
    """Return the accuracy of `label` on the images without a given label."""
    found = predict_labels(
        Features(images, None), given, num_classes=int(truth.max()) + 1, kinds=kinds, seed=seed
    )
    guesses = found.probabilities.argmax(dim=1).to(truth.device)
    return balanced_accuracy(guesses[given < 0], truth[given < 0])


def measure_retrieval(here: dict[str, Tensor]) -> Iterator[Record]:
    """Rank the training images for each test image."""
    images, truth, asked, answers = read(here)
    for name, vectors in list_vectors(images).items():
        found = ranking_quality("cosine", vectors(asked), answers, vectors(images), truth)
        about = {"protocol": "retrieval", "variant": name}
        yield {**about, "metric": "mAP", "mean": 100.0 * found.mean_average_precision}
        yield {**about, "metric": "precision@10", "mean": 100.0 * found.precision}


def measure_clusters(here: dict[str, Tensor], draws: int) -> Iterator[Record]:
    """Cluster the test images by k-means, and compare the clusters with the classes."""
    images, _, asked, answers = read(here)
    truth, metrics = (
        answers.cpu(),
        {"NMI": normalized_mutual_info_score, "ARI": adjusted_rand_score},
    )
    for name, vectors in list_vectors(images).items():
        points = functional.normalize(vectors(asked).double(), dim=1).cpu().numpy()
        starts = [
            KMeans(len(truth.unique()), n_init=3, random_state=seed).fit_predict(points)
            for seed in range(draws)
        ]
        for metric, compare in metrics.items():
            found = [100.0 * float(compare(truth, start)) for start in starts]
            about = {"protocol": "cluster", "variant": name, "metric": metric}
            yield {**about, **summarise(found), "values": found}


def measure_others(here: dict[str, Tensor], others: dict[str, Tensor]) -> Iterator[Record]:
    """Tell the test images from others by their distance from the training images."""
    images, truth, asked, _ = read(here)
    num_classes = int(truth.max()) + 1
    bank, one = FeatureBank.gather(images), torch.zeros_like(truth)
    distances: dict[str, Callable[[Tensor], Tensor]] = {
        f"{name}, neighbour {NEIGHBOUR}": lambda rows, vectors=vectors: (
            -cosine_neighbours(vectors(rows), vectors(images), NEIGHBOUR).similarities[:, -1]
        )
        for name, vectors in list_vectors(images).items()
    }
    distances |= {
        "divergence over a bank, nearest class": lambda rows: (
            -bank.class_logits(images, truth, rows, num_classes).amax(dim=1)
        ),
        "Mahalanobis, one Gaussian": mahalanobis_to(images, one, 1),
        "Mahalanobis, nearest class": mahalanobis_to(images, truth, num_classes),
    }
    for name, distance in distances.items():
        inside = distance(asked)
        for other, rows in others.items():
            about = {"protocol": "ood", "variant": name, "against": Path(other).stem}
            yield {**about, "metric": "AUROC", "mean": auroc(inside, distance(rows))}


def list_vectors(images: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what is compared by cosine: features, features without their mean, and scores."""
    bank = FeatureBank.gather(images)
    return {
        "cosine": lambda rows: rows,
        "cosine of centred features": bank.centre,
        "divergence over a bank": bank.score,
    }


def read(here: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the features and the labels of training and of test images."""
    return here["train"], here["train_labels"], here["test"], here["test_labels"]


if __name__ == "__main__":
    tyro.cli(measure)
