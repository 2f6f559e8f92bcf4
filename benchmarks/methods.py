"""What the step of each method costs beside the passes through its encoders.

    python benchmarks/methods.py [--recipes byol swav ...] [--divergence] [--out FILE.json]

For each recipe the arms take turns. "passes" has the forward and backward passes of the method's
own encoders (teachers and small views included) and the optimiser, on fixed batches. "step" is the
whole training step, and "with divergence" the same with that term. Views, heads, losses and queues
are what a step has beyond the passes.
"""

import tempfile
from functools import partial
from pathlib import Path

import tyro
from lightning_fabric import Fabric
from rich.console import Console

from deepbregman.benchmarking import (
    QUIET,
    Build,
    Effort,
    measure,
    passes_step,
    random_images,
    record_passes,
    training_step,
)
from deepbregman.config import Config, load_recipe, override
from deepbregman.errors import UserError
from deepbregman.files import Record, write_json
from deepbregman.runs import provenance
from deepbregman.studies.catalogue.methods import STUDY
from deepbregman.studies.definition import read_changes
from deepbregman.training.devices import device_name
from deepbregman.training.processes import launch


def methods(
    recipes: tuple[str, ...] = STUDY.recipes,
    divergence: bool = False,
    changes: tuple[str, ...] = (),
    images: int = 50_000,
    effort: tuple[int, int, int] = (12, 5, 40),
    out: Path | None = None,
) -> None:
    """Time the step of each recipe.

    Args:
        recipes: Names of recipes.
        divergence: Also time each with the divergence.
        changes: Fields to change in every recipe, such as training.batch_size=512.
        images: Number of images, which are noise.
        effort: Untimed steps, turns, and steps in a turn.
        out: A JSON file for the record.
    """
    console, fabric = Console(), launch("auto")
    record: Record = {**provenance(device_name(fabric.device)), "groups": []}
    for recipe in recipes:
        config = override(load_recipe(recipe), {**QUIET, **read_changes(changes)})
        configs = {"step": config}
        if divergence:
            try:
                configs["with divergence"] = override(config, {"divergence.weight": 1.0})
            except UserError as problem:
                console.print(f"{recipe} cannot carry the divergence: {problem}")
        group = time_steps(configs, images, Effort(*effort), fabric, console)
        group["recipe"] = recipe
        for arm in group["arms"]:
            arm["over_passes"] = group["arms"][0]["milliseconds"] / arm["milliseconds"]
            console.print(
                f"{recipe}: {arm['name']}: {arm['milliseconds']:.2f} ms, "
                f"{arm['over_passes']:.3f} of the passes' speed, {arm['peak_gigabytes']:.2f} GB"
            )
        record["groups"].append(group)
        if out is not None:
            write_json(out, record)


def time_steps(
    configs: dict[str, Config], images: int, effort: Effort, fabric: Fabric, console: Console
) -> Record:
    """Time the passes of the first configuration, and the steps of all, in turns."""
    config = configs["step"]
    pictures = random_images(max(images, 2 * config.training.batch_size), 32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        passes = record_passes(config, pictures, fabric, folder)
        arms: dict[str, Build] = {"passes": lambda: passes_step(passes, config, fabric)}
        for arm, changed in configs.items():
            arms[arm] = partial(training_step, changed, pictures, fabric, folder)
        group = measure(config, arms, effort, fabric.device, console)
    group["passes"] = [{"shape": list(one.shape), "learns": one.learns} for one in passes]
    return group


if __name__ == "__main__":
    tyro.cli(methods)
