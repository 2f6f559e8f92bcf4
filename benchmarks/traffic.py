"""Count what processes send each other in a step, and what each holds, beside theory.

    unshare --user --map-root-user --net bash -c \
        'ip link set lo up && torchrun --nproc-per-node 2 benchmarks/traffic.py'

It reads the counter of the loopback device, so nothing else may use that: hence the network
namespace of its own. The processes run gloo on the CPU.
"""

import json
import tempfile
from pathlib import Path

import torch.distributed as dist
import tyro
from torch import nn
from torch.profiler import ProfilerActivity, profile

from deepbregman.benchmarking import make_random_images
from deepbregman.config import Config, load_recipe, override
from deepbregman.training.loop import Pretraining
from deepbregman.training.processes import SynchronisedNorm, broadcast, launch

STEPS, BATCH, SIDE = 3, 16, 32


def configure(encoder: str) -> Config:
    """Return the recipe of the paper's form, small in all but its network."""
    changes = {
        "encoder.name": encoder,
        "data.image_size": SIDE,
        "training.batch_size": BATCH,
        "training.epochs": 1000,
        "training.tensorboard": False,
        "training.health_every": 0,
        "training.compile": "no",
    }
    return override(load_recipe("paper"), changes)


def read_counter() -> int:
    """Return the bytes that the loopback device has sent."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def predict(step: nn.Module, config: Config, world: int) -> dict[str, float]:
    """Return the bytes that all processes together send in a step, by what they send it for.

    An all-reduce of B bytes lets each process send 2 (W - 1) / W B; a gather of B bytes from each,
    (W - 1) B. What is gathered with gradient is also reduced: the gathered gradient, W B.
    """
    reduce, gather = 2 * (world - 1), world * (world - 1)  # of all processes
    gradients = 4 * sum(p.numel() for p in step.parameters() if p.requires_grad)
    share = config.training.batch_size // world
    embeddings = 4 * config.views.num_views * share * config.encoder.embedding
    norms = [part for part in step.modules() if isinstance(part, SynchronisedNorm)]
    statistics = 4 * sum(1 + 2 * norm.num_features for norm in norms)
    return {
        "gradients": reduce * gradients,
        "embeddings": gather * embeddings + reduce * world * embeddings,
        "batch normalisation": gather * statistics + reduce * world * statistics,
    }


def predict_memory(step: nn.Module) -> int:
    """Return the bytes that a process holds between steps: with Adam, four numbers a weight.

    They are the weight, its gradient, which is also what DDP sends, and two moments.
    """
    trained = sum(p.numel() for p in step.parameters() if p.requires_grad)
    return 16 * trained + sum(buffer.nbytes for buffer in step.buffers())


def sum_memory(profiled: profile) -> int:
    """Return the bytes that were allocated and not freed."""
    events = profiled.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def main(encoder: str = "resnet18") -> None:
    """Take a few steps and print the record.

    Args:
        encoder: Name of the encoder, as in a recipe.
    """
    fabric = launch("cpu")
    config = configure(encoder)
    images = make_random_images(4 * BATCH, SIDE)
    folder = broadcast(fabric, Path(tempfile.mkdtemp()) / "run")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        job = Pretraining(config, images, fabric, folder)
        feed = job.feed(0, 0)
        job.step_module.train()
        for _ in range(2):  # DDP arranges its buckets after the first step
            job.advance(feed)
    dist.barrier()
    before = read_counter()
    for _ in range(STEPS):
        job.advance(feed)
    dist.barrier()
    counted = (read_counter() - before) / STEPS
    if fabric.is_global_zero:
        parts = predict(job.step_module, config, fabric.world_size)
        record = {
            "encoder": encoder,
            "processes": fabric.world_size,
            "batch_size": BATCH,
            "counted": counted,
            "predicted": sum(parts.values()),
            "parts": parts,
            "held": sum_memory(profiled),
            "held_predicted": predict_memory(job.step_module),
        }
        print(json.dumps(record, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
