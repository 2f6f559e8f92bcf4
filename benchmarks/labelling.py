"""Does `label` keep what it promises? Draw labels at random, and look at the other images.

    python benchmarks/labelling.py RUN --out coverage.csv [--labels 20 50] [--suggest 20]

The run's data must have labels. For each number of labels the file has the means over the draws:
the accuracy that was expected, the accuracy on all other images, the standard deviation of their
difference, and how often the 95 % interval held the latter.
"""

from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console

from deepbregman.commands.parameters import open_images
from deepbregman.evaluation.gallery import open_gallery
from deepbregman.evaluation.predicting import predict_labels, suggest_images
from deepbregman.files import create_csv


def measure(
    run: tyro.conf.Positional[Path],
    out: Path,
    labels: tuple[int, ...] = (20, 30, 50, 100, 200),
    draws: int = 40,
    suggest: int = 0,
) -> None:
    """Compare the expected accuracy with the true one.

    Args:
        run: Folder of a run.
        out: CSV file; it must not exist.
        labels: Numbers of images that are drawn at random and labelled.
        draws: Number of draws for each.
        suggest: Label as many more images, those that `label` suggests after the draw.
    """
    opened = open_images(run, None, None, "auto", 1, None, False)
    gallery = open_gallery(opened, "train")
    features, smoothing = gallery.features, opened.loaded.config.divergence.smoothing
    assert gallery.labels is not None, "the data has no labels"
    truth = gallery.labels.cpu()
    num_classes, rows = int(truth.max()) + 1, []

    def predict(is_given: torch.Tensor, suggested: torch.Tensor, seed: int):
        given = torch.where(is_given, truth, -1)
        options = {"num_classes": num_classes, "smoothing": smoothing, "suggested": suggested}
        return predict_labels(features, given, **options, seed=seed)

    for count in labels:
        found = []
        for seed in range(draws):
            random = np.random.default_rng([count, seed])
            chosen = torch.from_numpy(random.permutation(len(truth))[:count])
            if int((torch.bincount(truth[chosen]) > 1).sum()) < 2:
                continue  # `label` refuses them
            is_given = torch.zeros(len(truth), dtype=torch.bool)
            is_given[chosen] = True
            suggested = torch.zeros_like(is_given)
            said = predict(is_given, suggested, seed)
            if suggest:
                more = suggest_images(
                    features.representation, said.probabilities, is_given, suggest
                )
                suggested[more] = True
                said = predict(is_given | suggested, suggested, seed)
            hits = (said.probabilities.argmax(dim=1) == truth)[~(is_given | suggested)]
            right = 100.0 * hits.double().mean().item()
            value, low, high = said.expected
            found.append((value, right, value - right, low <= right <= high, high - low))
        table = np.array(found, dtype=float)
        said_mean, right_mean, _, held, width = table.mean(axis=0)
        rows.append(
            {
                "data": Path(opened.data).stem,
                "labels": count,
                "suggested": suggest,
                "draws": len(table),
                "expected %": f"{said_mean:.1f}",
                "right %": f"{right_mean:.1f}",
                "deviation of the difference": f"{table[:, 2].std(ddof=1):.1f}",
                "interval holds %": f"{100 * held:.1f}",
                "width of the interval": f"{width:.1f}",
            }
        )
        Console().print(rows[-1])
    create_csv(out, rows)


if __name__ == "__main__":
    tyro.cli(measure)
