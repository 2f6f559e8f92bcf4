"""A run with data, views, a method and a callback of one's own: python examples/own_parts.py RUN.

Stop it with Ctrl-C and start it again: it continues. A run of one's own parts cannot be continued
from the command line, which does not know the code.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from torchvision.transforms import v2

from deepbregman import (
    Callback,
    Objective,
    Outputs,
    build_head,
    evaluate,
    own_data,
    pretrain,
    resume,
)


class Agreement(Objective):
    """Two views of an image shall have the same embedding, and all embeddings unit variance."""

    def __init__(self, encoder, widths) -> None:
        weights = {"distance": 1.0, "variance": 1.0}
        super().__init__(encoder, build_head(encoder, widths), weights)

    def forward(self, views, gather, samples) -> Outputs:
        h, z = self.embed(views.main)
        z = gather(z)
        terms = {
            "distance": (z[0] - z[1]).square().mean(),
            "variance": (1 - z.flatten(0, 1).std(dim=0)).clamp_min(0).mean(),
        }
        return Outputs(terms, student=z, teacher=None, representation=h.detach())


class Printer(Callback):
    """Prints the loss of each epoch."""

    def on_start(self, run, step, total_steps) -> None:
        print(f"from step {step} of {total_steps}")

    def on_epoch(self, record, model) -> None:
        print(f"epoch {record['epoch']}: loss {record['total']:.4f}")


def main(folder: Path) -> None:
    """Train, or continue, and evaluate."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images * 15.9).to(torch.uint8)
    dataset = TensorDataset(pixels, torch.from_numpy(digits.target))  # any map-style dataset
    parts = {
        "data": dataset,
        "augment": v2.Compose([v2.RandomResizedCrop(8, (0.4, 1.0)), v2.RandomRotation(10)]),
        "objective": Agreement,
        "callbacks": [Printer()],
    }
    changes = {
        "training.epochs": 2,
        "optimiser.warmup_epochs": 0.5,
        "training.save_seconds": 0.0,
        "divergence.weight": 0.2,
    }
    if (folder / "config.toml").exists():
        run = resume(folder, **parts)
    else:
        run = pretrain("digits", run=folder, changes=changes, **parts)
    rows = evaluate(run, protocols=["knn"], source=own_data(dataset, image_size=8))
    print(f"kNN: {rows[0]['value']:.1f} %")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
