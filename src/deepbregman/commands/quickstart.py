"""deepbregman quickstart: pretrain on digits and compare the features."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deepbregman.config import Config, load_recipe, override
from deepbregman.errors import UserError
from deepbregman.runs import Record, Run, name_run_folder
from deepbregman.statistics import format_spread, summarise
from deepbregman.terminal import MaybeNumber, MaybePath, say

from .parameters import PythonOnly
from .pretrain import pretrain

if TYPE_CHECKING:
    from torch import Tensor

    from deepbregman.data import Split

FIGURE = "quickstart.png"
LABELS_PER_CLASS = 5
DRAWS = 20

Labelled = tuple["Tensor", "Tensor"]
"""Features (N, d) and labels (N,)."""


def quickstart(
    *, run: MaybePath = None, epochs: MaybeNumber = None, console: PythonOnly[Console | None] = None
) -> Run:
    """Pretrain on digits and compare the features; takes 1 to 6 minutes on two cores.

    The features of the trained encoder are compared with raw pixels and an untrained encoder.

    Args:
        run: Folder of the run; it must not exist. By default a new folder in runs/.
        epochs: Number of epochs, instead of the recipe's.
        console: Where to print; nothing is printed when None.

    Returns:
        The run; its result holds the table, its folder the figure.
    """
    if epochs is not None and epochs < 1:
        raise UserError(f"--epochs {epochs}: a trained encoder is compared, so give 1 or more")
    console = console or Console(quiet=True)
    config = load_recipe("digits")
    if epochs is not None:
        config = override(config, {"training.epochs": epochs})
    folder = name_run_folder("quickstart") if run is None else Path(run)
    finished = pretrain(config, run=folder, accelerator="cpu", console=console)
    features = _compute_features(finished, config)
    rows = [measure(name, *parts, seed=config.seed) for name, parts in features.items()]
    finished.add_result(quickstart=rows)
    _draw(finished, features)
    return finished


def show(run: Run, console: Console) -> None:
    """Print the table, and where the figure and the run are."""
    from deepbregman.reporting.screen import draw_rows

    columns = ("features", "linear, all labels", "linear, 5 labels per class", "kNN (k=20)")
    rows = []
    for row in run.result()["quickstart"]:
        few = format_spread(row["few_labels"], row["few_labels_deviation"], 1)
        rows.append((row["features"], f"{row['linear']:.1f}", few, f"{row['knn']:.1f}"))
    console.print(draw_rows("Accuracy on 500 test digits, %", columns, rows))
    say(console, f"figure: {run.path / FIGURE}")
    say(console, f"run:    {run.path}")


def measure(name: str, train: Labelled, test: Labelled, seed: int) -> Record:
    """Measure one kind of features: linear accuracy, accuracy with few labels, kNN."""
    from deepbregman.evaluation.few import PENALTY, draw_labels
    from deepbregman.evaluation.knn import knn_accuracy
    from deepbregman.evaluation.linear import fit_best, fit_linear
    from deepbregman.evaluation.results import top_k_accuracy

    num_classes = 1 + int(train[1].max())
    subsets = [draw_labels(train[1], LABELS_PER_CLASS, draw) for draw in range(DRAWS)]
    classifier, _ = fit_best(*train, num_classes, seed)
    fit = partial(fit_linear, num_classes=num_classes, l2=PENALTY, one_scale=True)
    few_labels = (fit(*(part[rows] for part in train)) for rows in subsets)
    few = summarise([top_k_accuracy(each.predict(test[0]), test[1]) for each in few_labels])
    return {
        "features": name,
        "linear": top_k_accuracy(classifier.predict(test[0]), test[1]),
        "few_labels": few["mean"],
        "few_labels_deviation": few["deviation"],
        "few_labels_draws": DRAWS,
        "knn": knn_accuracy(*test, *train, k=20),
    }


def _compute_features(run: Run, config: Config) -> dict[str, tuple[Labelled, Labelled]]:
    """Compute three kinds of features of the training and the test split."""
    import torch

    from deepbregman.data import ArrayImages, channel_statistics
    from deepbregman.data.opening import batch_images
    from deepbregman.evaluation.features import compute_features
    from deepbregman.evaluation.inputs import open_labelled
    from deepbregman.objectives import build_step
    from deepbregman.training.checkpoints import load_trained

    source = open_labelled(config)
    device = torch.device("cpu")
    models = {
        "untrained encoder": build_step(config, *channel_statistics(source.train.images)).model,
        "pretrained encoder": load_trained(run, device)[0],
    }

    def features_of(split: "Split", kind: str) -> Labelled:
        assert isinstance(split.images, ArrayImages)
        if kind == "raw pixels":
            return split.images.pixels[:, 0].flatten(1).float() / 255.0, split.known_labels
        batches = batch_images(split.images, config, device)
        features = compute_features(models[kind], batches, config.data.image_size)
        return features.representation, split.known_labels

    return {
        kind: (features_of(source.train, kind), features_of(source.known_test, kind))
        for kind in ("raw pixels", *models)
    }


def _draw(run: Run, features: dict[str, tuple[Labelled, Labelled]]) -> None:
    """Draw the course of training, and the test digits as t-SNE maps before and after it."""
    import numpy as np
    from sklearn.manifold import TSNE

    from deepbregman.reporting.figures import FeatureMap, save_quickstart_figure

    maps = []
    for kind in ("raw pixels", "pretrained encoder"):
        points, labels = features[kind][1]
        plane = TSNE(random_state=0, init="pca", perplexity=30).fit_transform(points.numpy())
        maps.append(FeatureMap(f"t-SNE of test digits: {kind}", np.asarray(plane)))
    classes = [str(index) for index in range(1 + int(labels.max()))]
    save_quickstart_figure(run.path / FIGURE, run.metrics(), maps, labels.numpy(), classes)
