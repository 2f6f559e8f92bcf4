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
from typing import NamedTuple

import torch
import tyro
from rich.console import Console
from torch import Tensor, nn

from deepbregman.benchmarking import (
    QUIET,
    Build,
    Effort,
    Step,
    build_training_step,
    make_random_images,
    measure,
    start_run,
)
from deepbregman.config import Config, load_recipe, override
from deepbregman.data import Images
from deepbregman.errors import UserError
from deepbregman.files import Record, write_json
from deepbregman.method.networks import Encoder
from deepbregman.objectives import Group
from deepbregman.runs import collect_provenance
from deepbregman.studies.catalogue.methods import STUDY
from deepbregman.studies.definition import read_changes
from deepbregman.training.devices import device_name, is_mixed
from deepbregman.training.fabric import Fabric
from deepbregman.training.optimisers import build_optimiser
from deepbregman.training.processes import compile_step, launch


class Pass(NamedTuple):
    """One batch that goes through an encoder in a training step."""

    encoder: Encoder
    shape: torch.Size
    learns: bool
    """Whether it is followed by a backward pass: that of a teacher is not."""


def record_passes(config: Config, images: Images, fabric: Fabric, folder: Path) -> list[Pass]:
    """Take one step of a method, and list what went through its encoders."""
    config = override(config, {"training.compile": "no"})
    job = start_run(config, images, fabric, folder)
    passes = []

    def listen_to(encoder: Encoder) -> None:
        normalise = encoder.normalise

        def record(pixels: Tensor) -> Tensor:
            passes.append(Pass(encoder, pixels.shape, torch.is_grad_enabled()))
            return normalise(pixels)

        encoder.__dict__["normalise"] = record  # hides the method

    for module in job.step_module.modules():
        if isinstance(module, Encoder):
            listen_to(module)
    job.advance(job.feed(0, 0))
    for one in passes:
        one.encoder.__dict__.pop("normalise", None)  # uncovers it
    return passes


class _Passes(nn.Module):
    """Passes through encoders, and nothing else of a step."""

    def __init__(self, passes: list[Pass]) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(one.encoder.trunk for one in passes)
        self.learns = [one.learns for one in passes]

    def forward(self, batches: list[Tensor]) -> Tensor:
        """Return a number whose gradient asks for every backward pass."""
        total = torch.zeros((), device=batches[0].device)
        for trunk, learns, batch in zip(self.trunks, self.learns, batches, strict=True):
            with torch.set_grad_enabled(learns):
                found = trunk(batch).float().square().mean()
            total = total + found
        return total


def passes_step(passes: list[Pass], config: Config, fabric: Fabric) -> Step:
    """Build the reference of a method: its encoders' passes and the optimiser, on fixed batches."""
    device, network = fabric.device, _Passes(passes).train()
    compile_step(network, config, fabric)
    batches = [
        torch.rand(one.shape, device=device).contiguous(memory_format=torch.channels_last)
        for one in passes
    ]
    learning = nn.ModuleList(one.encoder.trunk for one in passes if one.learns)
    trained = [(n, p) for n, p in learning.named_parameters() if p.requires_grad]
    optimiser = build_optimiser(config.optimiser, [Group(trained)], device)
    mixed = is_mixed(config, device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
            total = network(batches)
        total.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


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
    record: Record = {**collect_provenance(device_name(fabric.device)), "groups": []}
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
    pictures = make_random_images(max(images, 2 * config.training.batch_size), 32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        passes = record_passes(config, pictures, fabric, folder)
        arms: dict[str, Build] = {"passes": lambda: passes_step(passes, config, fabric)}
        for arm, changed in configs.items():
            arms[arm] = partial(build_training_step, changed, pictures, fabric, folder)
        group = measure(config, arms, effort, fabric.device, console)
    group["passes"] = [{"shape": list(one.shape), "learns": one.learns} for one in passes]
    return group


if __name__ == "__main__":
    tyro.cli(methods)
