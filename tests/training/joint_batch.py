"""What each process of the tests for several processes runs; see test_processes.py.

usage: joint_batch.py FOLDER [methods], with torchrun's variables in the environment for several
processes; ``methods`` trains each of them, and nothing else.
"""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepbregman.config import Config, load_recipe, override
from deepbregman.data.images import ArrayImages
from deepbregman.method.networks import Model
from deepbregman.method.views import Views
from deepbregman.objectives import build
from deepbregman.training.loop import Pretraining
from deepbregman.training.processes import launch, synchronise_norms

BASE: Mapping[str, Any] = {
    "training.batch_size": 16,
    "training.epochs": 2,
    "training.tensorboard": False,
    "training.health_every": 0,
    "training.precision": "32-true",
    "encoder.projection_hidden": 12,
    "encoder.embedding": 6,
    "divergence.num_subnetworks": 5,
    "divergence.hidden": 4,
    "divergence.sigma": 0.7,
    # Adam would turn the rounding of a gradient that is zero into a step of full length.
    "optimiser.name": "sgd",
    "optimiser.learning_rate": 0.05,
    "optimiser.warmup_epochs": 0.0,
}
sys.path.insert(0, str(Path(__file__).parents[1] / "objectives"))
METHODS: Mapping[str, Mapping[str, Any]] = importlib.import_module("methods").CASES
CASES: Mapping[str, Mapping[str, Any]] = {
    "NT-Xent alone": {"divergence.weight": 0.0},
    "NT-Logistic, hard": {"objective.loss": "nt_logistic", "divergence.smoothing": 0.0},
    "pairs all, hard, learned sigma": {
        "divergence.pairs": "all",
        "divergence.smoothing": 0.0,
        "divergence.learn_sigma": True,
    },
    "pairs views, smooth, learned sigma, usage": {
        "divergence.learn_sigma": True,
        "divergence.usage_bonus": 0.5,
    },
    "scores without a gain": {"divergence.norm": "standard"},
    "hidden norm, relu": {"divergence.norm": "hidden", "divergence.activation": "relu"},
    "two passes a step": {"training.accumulate": 2},
    "sets of four views": {"views.num_views": 4, "divergence.sets": "halves"},
    "each view against the rest": {
        "views.num_views": 3,
        "objective.sets": "rest",
        "divergence.sets": "rest",
    },
    "turned small views": {
        "rotation.weight": 0.4,
        "rotation.hidden": 8,
        "small_views.num_views": 4,
    },
    "teacher, queue, predictor and a weak view": {
        "objective.name": "toy",
        "weak_views.num_views": 2,
    },
    "labels, a memory of every image and draws": {"objective.name": "informed"},
    "teacher beside it, bank, matched": {
        "teacher.momentum": 0.9,
        "weak_views.num_views": 2,
        "divergence.source": "bank",
        "divergence.compare": "match",
        "divergence.num_subnetworks": 40,  # full in the second step
        "divergence.smoothing": 0.2,
        "divergence.target_smoothing": 0.1,
        "divergence.info_nce": 0.5,
        "optimiser.name": "muon",
    },
    "prototypes, contrasted with a teacher": {
        "teacher.schedule": "cosine",
        "weak_views.num_views": 1,
        "divergence.source": "prototypes",
        "divergence.centring": "sinkhorn",
        "divergence.smoothing": 0.2,
    },
    "learned sigma without a use": {
        "divergence.kernel": "inverse",
        "divergence.learn_sigma": True,
    },
}
STEPS = 3
NUM_IMAGES = 103  # leaves a short batch in every epoch


class Float32Views(Views):
    """Views as they are, while everything else here is in float64."""

    def forward(self, *arguments: Any) -> Tensor:
        torch.set_default_dtype(torch.float32)
        try:
            return super().forward(*arguments).double()
        finally:
            torch.set_default_dtype(torch.float64)


def images(count: int = NUM_IMAGES) -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    return ArrayImages(
        torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    )


def configured(changes: Mapping[str, Any]) -> Config:
    return override(load_recipe("digits"), {**BASE, **changes})


def state(job: Pretraining) -> dict[str, Tensor]:
    """Everything that is trained or tracked, running statistics among it."""
    return dict(job.step_module.state_dict())


def trained(fabric: Any, folder: Path, changes: Mapping[str, Any]) -> dict[str, Tensor]:
    labels = torch.arange(NUM_IMAGES) * 7 % 5
    job = Pretraining(configured(changes), images(), fabric, folder, labels=labels)
    feed = job.feed(0, 0)
    job.step_module.train()
    for _ in range(STEPS):
        job.advance(feed)
    return state(job)


def views(fabric: Any, folder: Path) -> Tensor:
    """This process's share of the views of the second step."""
    job = Pretraining(configured({}), images(), fabric, folder)
    feed = job.feed(0, 1)
    batch = next(feed)
    uniforms = job.share.draw_uniforms(job.step_module.views, 1)
    drawn: Tensor = job.step_module.views.main(batch.images, batch.sizes, uniforms.main)
    return drawn


def dropped(fabric: Any, folder: Path) -> Tensor:
    """Which of 1000 units this process drops in the first and again in the second step."""
    job = Pretraining(configured({"divergence.dropout": 0.5}), images(), fabric, folder)
    masks = []
    for draw in (0, 1, 0):
        job.share.seed_dropout(draw)
        masks.append(nn.functional.dropout(torch.ones(1000), 0.5) > 0.0)
    return torch.stack(masks)


def fitted(fabric: Any, folder: Path) -> None:
    """A whole run, its metrics written; its monitor judges by the last layer in evaluation mode."""

    def monitor(model: Model) -> dict[str, float]:
        assert not model.training
        images = torch.linspace(0, 1, 2 * 192).view(2, 3, 8, 8)
        return {"knn": float(model(images)[1].detach().sum())}

    config = configured({"training.knn_every": 1, "training.checkpoint_every": 1})
    Pretraining(config, images(), fabric, folder).fit(monitor)


def normalised(rank: int, processes: int) -> dict[str, Tensor]:
    """Batch norms of uneven shares of one batch far from zero, and the gradients of a loss."""
    generator = torch.Generator().manual_seed(1)
    result: dict[str, Tensor] = {}
    for name, norm, shape in (
        ("flat", nn.BatchNorm1d(3), (9, 3)),
        ("images", nn.BatchNorm2d(3, momentum=None), (9, 3, 2, 2)),
        ("plain", nn.BatchNorm1d(3, eps=0.1, affine=False), (9, 3)),
    ):
        joint = 1000.0 + torch.randn(shape, generator=generator)
        weights = torch.randn(shape, generator=generator)
        for parameter in norm.parameters():
            nn.init.normal_(parameter, generator=generator)
        module = nn.Sequential(norm)
        if processes > 1:
            synchronise_norms(module, torch.device("cpu"))
        sizes = [9 // processes] * processes
        sizes[0] += 9 - sum(sizes)
        mine = joint.split(sizes)[rank].clone().requires_grad_()
        for _ in range(2):
            outputs = module(mine)
        (outputs.sin() * weights.split(sizes)[rank]).sum().backward()
        result |= {f"{name} output": outputs.detach(), f"{name} input": mine.grad}
        result |= {f"{name} grad {k}": p.grad for k, p in module.named_parameters()}
        result |= {f"{name} {k}": v.detach() for k, v in module.state_dict().items()}
        module.eval()
        result[f"{name} judged"] = module(mine).detach()
    return result


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    importlib.import_module("toy")
    build.Views = Float32Views  # type: ignore[misc]  # in its place
    folder = Path(sys.argv[1])
    fabric = launch("cpu")
    cases = METHODS if sys.argv[2:] == ["methods"] else CASES
    found: dict[str, Any] = {
        name: trained(fabric, folder / f"run{index}", changes)
        for index, (name, changes) in enumerate(cases.items())
    }
    if cases is CASES:
        found["views"] = views(fabric, folder / "views")
        found["dropped"] = dropped(fabric, folder / "dropped")
        found["normalised"] = normalised(fabric.global_rank, fabric.world_size)
        apart = {"training.sync_norm": False}
        found["norm apart"] = trained(fabric, folder / "apart", apart)
        fitted(fabric, folder / "fitted")
    torch.save(found, folder / f"found{fabric.global_rank}.pt")


if __name__ == "__main__":
    main()
