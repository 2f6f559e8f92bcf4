"""The newcomer's first command: pretrain on digits, then see what it was good for."""

from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from deepbregman.config import Config, load_recipe, override
from deepbregman.data import (
    ArrayImages,
    Split,
    channel_statistics,
    labelled_subset,
    stratified_split,
)
from deepbregman.evaluation.features import compute_features
from deepbregman.evaluation.frozen_protocols import CHOICE_SHARE
from deepbregman.evaluation.knn import knn_accuracy
from deepbregman.evaluation.linear import few_label_accuracy, linear_accuracy
from deepbregman.evaluation.subject import open_labelled
from deepbregman.reporting.figures import quickstart_figure
from deepbregman.reporting.tables import comparison_table
from deepbregman.runs import Record, Run, default_folder
from deepbregman.training.assembly import batches_of, build_objective
from deepbregman.training.checkpoints import load_model

from .pretraining import pretrain

LABELS_PER_CLASS = 5
DRAWS = 20
FEW_LABEL_L2 = 1e-2
"""Of the linear classifiers on few labels, which leave nothing to choose it on."""


def quickstart(
    *, run: Path | str | None = None, epochs: int | None = None, console: Console | None = None
) -> Run:
    """Pretrain on digits and compare its features with raw pixels and an untrained encoder.

    Args:
        run: folder of the run; by default a new one under ``runs/``.
        epochs: in place of the recipe's.
        console: to draw on; quiet when None.

    Returns:
        The run; its result holds the table, its folder the figure.
    """
    console = console or Console(quiet=True)
    config = load_recipe("digits")
    if epochs is not None:
        config = override(config, {"training.epochs": epochs})
    folder = default_folder("quickstart") if run is None else Path(run)
    finished = pretrain(config, run=folder, accelerator="cpu", console=console)
    features = _features(finished, config)
    rows = [compare(name, *sides, seed=config.seed) for name, sides in features.items()]
    finished.add_result(quickstart=rows)
    console.print(comparison_table(rows, "Accuracy on 500 test digits, %"))
    figure = _draw(finished, features)
    for words in (f"figure: {figure}", f"run:    {finished.path}"):
        console.print(words, soft_wrap=True, highlight=False, markup=False)
    return finished


Side = tuple[Tensor, Tensor]
"""Features (N, d) and labels (N,)."""


def _features(run: Run, config: Config) -> dict[str, tuple[Side, Side]]:
    """Compute the three kinds of features on the training and the test split."""
    source = open_labelled(config)
    device = torch.device("cpu")
    trained, _ = load_model(run, device)
    untrained = build_objective(config, *channel_statistics(source.train.images)).model

    def side(split: Split | None, kind: str) -> Side:
        assert split is not None
        assert split.labels is not None
        assert isinstance(split.images, ArrayImages)
        if kind == "raw pixels":
            return split.images.pixels[:, 0].flatten(1).float() / 255.0, split.labels
        model = untrained if kind == "untrained encoder" else trained
        size = config.data.image_size
        batches = batches_of(split.images, config, device)
        return compute_features(model, batches, size).representation, split.labels

    kinds = ("raw pixels", "untrained encoder", "pretrained encoder")
    return {kind: (side(source.train, kind), side(source.test, kind)) for kind in kinds}


def compare(name: str, train: Side, test: Side, seed: int) -> Record:
    """Judge one kind of features by the three measures of the table."""
    num_classes = 1 + int(train[1].max())
    _, held_out = stratified_split(train[1], len(train[1]), CHOICE_SHARE, seed)
    subsets = [labelled_subset(train[1], LABELS_PER_CLASS, draw) for draw in range(DRAWS)]
    few = few_label_accuracy(*train, *test, subsets, num_classes=num_classes, l2=FEW_LABEL_L2)
    linear = linear_accuracy(*train, *test, num_classes=num_classes, held_out=held_out)
    return {
        "features": name,
        "linear": linear.accuracy,
        "few_labels": few.mean,
        "few_labels_deviation": few.deviation,
        "few_labels_draws": DRAWS,
        "knn": knn_accuracy(*test, *train, k=20),
    }


def _draw(run: Run, features: dict[str, tuple[Side, Side]]) -> Path:
    """Map the test digits to the plane before and after pretraining, and draw all."""
    from sklearn.manifold import TSNE  # a second to import

    maps = []
    for kind in ("raw pixels", "pretrained encoder"):
        points, labels = features[kind][1]
        plane = TSNE(random_state=0, init="pca", perplexity=30).fit_transform(points.numpy())
        maps.append((f"t-SNE of test digits: {kind}", np.asarray(plane)))
    path = run.path / "quickstart.png"
    classes = [str(index) for index in range(1 + int(labels.max()))]
    quickstart_figure(path, run.metrics(), maps, labels.numpy(), classes)
    return path
