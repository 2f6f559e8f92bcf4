"""Every method in small, for the tests that hold for all of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepbregman.config import Config, load_recipe, override
from deepbregman.objectives import Step, StepOutputs, build_step

TINY: Mapping[str, Any] = {
    "data.holdout": 0.0,
    "training.batch_size": 32,
    "training.epochs": 2,
    "training.knn_every": 0,
    "training.tensorboard": False,
    "training.precision": "32-true",
    "encoder.projection_hidden": 12,
    "encoder.embedding": 6,
    "divergence.num_subnetworks": 5,
    "divergence.hidden": 4,
}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "amdim": {},
    "barlow-twins": {},
    "byol": {"predictor_hidden": 8},
    "dino": {
        **{"prototypes": 7, "freeze_prototypes": 0.2},
        **{"first_target_temperature": 0.04, "target_temperature": 0.07, "target_warmup": 0.5},
    },
    "moco-v2": {"queue": 40, "symmetric": False},
    "moco-v2plus": {"queue": 40, "final_momentum": 0.999},
    "moco-v3": {"queue": 0, "predictor_hidden": 8},
    "cmc": {"negatives": 20, "loss": "nce"},
    "cpc": {"negatives": 20, "patch": 0.5, "steps": 1, "directions": 2, "layers": 1},
    "deep-divergence": {"num_subnetworks": 6, "hidden": 3},
    "dim": {},
    "instdisc": {"negatives": 20, "proximal": 0.1, "loss": "nce"},
    "nnclr": {"predictor_hidden": 8, "queue": 40},
    "ressl": {"queue": 40},
    "sce": {"queue": 40},
    "simclr": {},
    "simclr-v2": {},
    "simsiam": {"predictor_hidden": 8},
    "swav": {"prototypes": 7, "queue": 40, "queue_from": 0.2, "freeze_prototypes": 0.2},
    "pirl": {"negatives": 20, "grid": 2},
    "ssl-hsic": {"predictor_hidden": 8, "features": 9},
    "supcon": {},
    "supervised": {"label_smoothing": 0.1},
    "vicreg": {},
    "wmse": {"whitening_batch": 8},
}
"""Recipe -> the fields of its objective that make it small."""
GROUPS: Mapping[str, Mapping[str, Any]] = {
    "dino": {"small_views.num_views": 2, "small_views.relative_size": 0.5},
    "ressl": {"views.num_views": 1, "weak_views.num_views": 1},
    "sce": {"views.num_views": 1, "weak_views.num_views": 2},
    "cmc": {"views.num_views": 1},
    "cpc": {"views.num_views": 2},  # as a divergence without a teacher needs, and so below
    "deep-divergence": {"views.num_views": 2},
    "dim": {"views.num_views": 2},
    "instdisc": {"views.num_views": 1},
    "simclr-v2": {"encoder.projection_layers": 3},
    "supervised": {"views.num_views": 2},
    "swav": {"small_views.num_views": 2, "small_views.relative_size": 0.5},
}
"""Recipe -> its groups of views, and its projection."""


def shrink(name: str) -> dict[str, Any]:
    """The changes of a configuration that make it one of this method, in small."""
    method = load_recipe(name).objective.name
    fields = {f"objective.{key}": value for key, value in METHODS[name].items()}
    return {"objective.name": method, **fields, **GROUPS.get(name, {})}


def configure(name: str, **changes: Any) -> Config:
    """A method in small, on digits, without the divergence."""
    base = override(load_recipe("digits"), {**TINY, "divergence.weight": 0.0})
    return override(base, {**shrink(name), **changes})


def carry(name: str, **changes: Any) -> Config:
    """A method in small with the divergence, by the teacher, bank and views of its recipe."""
    small = {**TINY, **shrink(name), "data.image_size": 8, "encoder.name": "small"}
    small |= {"divergence.weight": 0.5, "optimiser.warmup_epochs": 0.0}
    small.pop("views.num_views", None)
    return override(load_recipe(name), {**small, **changes})


def build_objective(name: str, **changes: Any) -> Any:
    """The objective of a method in small, in float64."""
    return build_step(configure(name, **changes)).objective.double()


def build_taught(name: str, **changes: Any) -> Any:
    """The same, of a method whose teacher is no longer the student."""
    objective = build_objective(name, **changes)
    with torch.no_grad():
        for parameter in objective.teacher.parameters():
            parameter.mul_(1.1)
    return objective


def draw_views(num_views: int, num_images: int, size: int = 8) -> Tensor:
    """Noise in float64, the same at each call."""
    generator = torch.Generator().manual_seed(num_views + size)
    shape = (num_views, num_images, 3, size, size)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def name_terms(step: Step, outputs: StepOutputs) -> dict[str, Tensor]:
    """The loss terms of a step by their names."""
    return dict(zip(step.weights, outputs.losses[1:].unbind(), strict=True))


LEARNING: Mapping[str, Mapping[str, Any]] = {
    "instdisc": {"objective.negatives": 512, "objective.loss": "softmax"},
    "pirl": {"objective.negatives": 512},
    "ssl-hsic": {"objective.predictor_hidden": 128, "objective.features": 256},
    "byol": {
        "objective.predictor_hidden": 128,
        "objective.momentum": 0.9,
        "objective.final_momentum": 0.99,
        "training.batch_size": 64,
        "training.epochs": 60,
    },
    "dino": {
        "objective.prototypes": 64,
        "objective.momentum": 0.95,
        "small_views.crop_area": [0.4, 0.8],
    },
    "moco-v2": {"objective.queue": 512},
    "moco-v2plus": {"objective.queue": 512},
    "moco-v3": {"objective.predictor_hidden": 128},
    "nnclr": {"objective.queue": 512, "objective.predictor_hidden": 128},
    "ressl": {"objective.queue": 512},
    "sce": {"objective.queue": 512},
    "simsiam": {
        "objective.predictor_hidden": 32,
        "encoder.projection_output_norm": True,
        "training.batch_size": 64,
    },
    "swav": {
        "objective.queue": 0,
        "objective.prototypes": 64,
        "small_views.crop_area": [0.4, 0.8],
    },
    "wmse": {"encoder.embedding": 16, "objective.whitening_batch": 64},
}
"""Recipe -> what it needs in order to learn digits in half a minute."""
CASES = {f"method {name}": shrink(name) for name in METHODS}
CASES["method cpc, a teacher beside it"] = {
    **shrink("cpc"),
    **{"views.num_views": 1, "weak_views.num_views": 1, "teacher.momentum": 0.9},
    **{"divergence.weight": 0.5, "divergence.source": "bank", "divergence.compare": "match"},
}
"""For several processes; see training/joint_batch.py."""
