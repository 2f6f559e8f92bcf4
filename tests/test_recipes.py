"""Every recipe trains: its own views, losses and optimiser, on a few digits."""

import pytest
from rich.console import Console

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import load_recipe, override, recipes

from .objectives import methods


# Those of the methods are trained by objectives/test_methods.py.
@pytest.mark.parametrize("name", [name for name in recipes() if name not in methods.METHODS])
def test_recipe_trains(name, few_digits, tmp_path):
    small = {
        "data.source": few_digits,
        "data.image_size": 8,
        "encoder.name": "small",
        "encoder.projection_hidden": 32,
        "divergence.hidden": 8,
        "training.batch_size": 40,
        "training.epochs": 3,
        "training.knn_every": 0,
        "training.health_every": 0,
        "training.tensorboard": False,
        "optimiser.milestones": [],
        "optimiser.schedule": "constant",
        "optimiser.warmup_epochs": 0,
        "optimiser.learning_rate": 5e-3,  # theirs are for other networks and batches
    }
    recipe = load_recipe(name)
    if recipe.optimiser.name == "lars":  # a thousandth of each weight's norm, times the rate
        small["optimiser.learning_rate"] = 5.0
    if recipe.divergence.num_subnetworks > 4096:
        small["divergence.num_subnetworks"] = 4096  # too many to be full here
    config = override(recipe, small)
    run = pretrain(config, run=tmp_path / "run", console=Console(quiet=True))
    first, *_, last = run.metrics()
    assert last["total"] < first["total"]
    assert ("active_subnetworks" in last) == (config.divergence.weight > 0)
