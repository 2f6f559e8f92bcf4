"""What the step of each method costs beside the passes through its networks.

    python benchmarks/methods.py [--recipes byol swav ...] [--divergence] [--out FILE.json]

For each recipe the arms take turns. "encoders" has the forward and backward passes of the method's
own encoders (teachers and small views included) and the optimiser, on fixed batches; "networks" has
those of its heads too. "step" is the whole training step, and "with divergence" the same with that
term. Views, losses, queues and the teacher's update are what a step has beyond its networks.
"""

import gc
import tempfile
from collections.abc import Callable
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
from deepbregman.training.devices import device_name
from deepbregman.training.fabric import Fabric
from deepbregman.training.optimisers import build_optimiser
from deepbregman.training.processes import compile_step, launch


class Pass(NamedTuple):
    """One batch that goes through a network in a training step."""

    network: nn.Module
    """The trunk of an encoder, or a head."""
    shape: torch.Size
    dtype: torch.dtype
    learns: bool
    """Whether it is followed by a backward pass: that of a teacher is not."""
    is_encoder: bool
    in_autocast: bool
    gives_gradient: bool
    """Whether the backward pass goes on to the batch, as in a head."""


def record_passes(config: Config, images: Images, fabric: Fabric, folder: Path) -> list[Pass]:
    """Take one step of a method, and list what went through its encoders and heads."""
    config = override(config, {"training.compile": "no"})
    job = start_run(config, images, fabric, folder)
    passes: list[Pass] = []

    def record(network: nn.Module, batch: Tensor) -> None:
        passes.append(
            Pass(
                network,
                batch.shape,
                batch.dtype,
                learns=torch.is_grad_enabled(),
                is_encoder=isinstance(network, Encoder),
                in_autocast=torch.is_autocast_enabled(fabric.device.type),
                gives_gradient=batch.requires_grad,
            )
        )

    def listen_to(module: nn.Module) -> list[Callable[[], None]]:
        """Record what a module's networks take in; return what ends it."""
        if isinstance(module, Encoder):
            normalise = module.normalise

            def normalise_and_record(pixels: Tensor) -> Tensor:
                record(module, pixels)
                return normalise(pixels)

            module.__dict__["normalise"] = normalise_and_record  # hides the method
            return [lambda: module.__dict__.pop("normalise")]
        if any(isinstance(part, Encoder) for part in module.modules()):
            return [end for part in module.children() for end in listen_to(part)]
        if any(True for _ in module.parameters()):
            hook = module.register_forward_pre_hook(lambda head, batch: record(head, batch[0]))
            return [hook.remove]
        return []

    ends = listen_to(job.step_module)
    job.advance(job.feed(0, 0))
    for end in ends:
        end()
    return passes


class _Passes(nn.Module):
    """Passes through networks, and nothing else of a step."""

    def __init__(self, passes: list[Pass]) -> None:
        super().__init__()
        self.passes = passes
        networks = (one.network for one in passes)
        self.networks = nn.ModuleList(
            each.trunk if isinstance(each, Encoder) else each for each in networks
        )

    def forward(self, batches: list[Tensor]) -> Tensor:
        """Return a number whose gradient asks for every backward pass."""
        kind = batches[0].device.type
        total = torch.zeros((), device=batches[0].device)
        for network, one, batch in zip(self.networks, self.passes, batches, strict=True):
            with (
                torch.set_grad_enabled(one.learns),
                torch.autocast(kind, dtype=torch.bfloat16, enabled=one.in_autocast),
            ):
                found = network(batch)
            total = total + found.float().square().mean()
        return total


def passes_step(passes: list[Pass], config: Config, fabric: Fabric) -> Step:
    """Build a reference of a method: passes through its networks and the optimiser."""
    device, networks = fabric.device, _Passes(passes).train()
    compile_step(networks, config, fabric)
    batches = []
    for one in passes:
        batch = torch.rand(one.shape, device=device).to(one.dtype)
        if batch.ndim == 4:
            batch = batch.contiguous(memory_format=torch.channels_last)
        batches.append(batch.requires_grad_(one.gives_gradient))
    learning = nn.ModuleList(
        network for network, one in zip(networks.networks, passes, strict=True) if one.learns
    )
    trained = [(n, p) for n, p in learning.named_parameters() if p.requires_grad]
    optimiser = build_optimiser(config.optimiser, [Group(trained)], device)

    def step() -> None:
        networks(batches).backward()
        optimiser.step()
        optimiser.zero_grad()
        for batch in batches:
            batch.grad = None

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
        encoders, networks, *_ = (arm["milliseconds"] for arm in group["arms"])
        for arm in group["arms"]:
            arm["over_encoders"] = encoders / arm["milliseconds"]
            arm["over_networks"] = networks / arm["milliseconds"]
            console.print(
                f"{recipe}: {arm['name']}: {arm['milliseconds']:.2f} ms, "
                f"{arm['over_encoders']:.3f} of the encoders' speed, "
                f"{arm['over_networks']:.3f} of the networks', {arm['peak_gigabytes']:.2f} GB"
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
        gc.collect()  # what is freed later would be taken off the memory of an arm
        only_encoders = [one for one in passes if one.is_encoder]
        arms: dict[str, Build] = {
            "encoders": lambda: passes_step(only_encoders, config, fabric),
            "networks": lambda: passes_step(passes, config, fabric),
        }
        for arm, changed in configs.items():
            arms[arm] = partial(build_training_step, changed, pictures, fabric, folder)
        group = measure(config, arms, effort, fabric.device, console)
    group["passes"] = [
        {"shape": list(one.shape), "learns": one.learns, "is_encoder": one.is_encoder}
        for one in passes
    ]
    return group


if __name__ == "__main__":
    tyro.cli(methods)
