"""How good the settings are that ``auto`` chooses: beside ``best``, and beside a small grid.

    python benchmarks/auto.py measure --data cifar10.npz --images 300 --budget 2m --out DIR
    python benchmarks/auto.py show results/auto/*.jsonl

Every arm has the same images, the same time and the same seed. ``auto`` plans its length for the
budget. The arms of the grid are its configuration with one change each, and as many epochs; where
the change makes a step slower or faster, the length is in proportion to the measured times of the
two. ``best`` is the recipe as it is, cut to the same time. All are judged by a linear classifier on
test images, so the grid's best is an optimistic value: it is chosen by them.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from rich.console import Console

from deepbregman.commands.evaluate import evaluate
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import Config, differing_fields, load_recipe, override
from deepbregman.data import open_source
from deepbregman.errors import UserError
from deepbregman.runs import now, provenance
from deepbregman.training.devices import device_name, pick_device
from deepbregman.training.planning import measure_step
from deepbregman.training.randomness import count_steps

QUIET = {"training.tensorboard": False, "training.knn_every": 0, "training.health_every": 0}
Row = dict[str, Any]


def vary(auto: Config, num_images: int) -> Iterator[tuple[str, Row]]:
    """List the changes of the grid to what auto has chosen."""
    rate, batch = auto.optimiser.learning_rate, auto.training.batch_size
    yield "a third of the learning rate", {"optimiser.learning_rate": rate / 3}
    yield "three times the learning rate", {"optimiser.learning_rate": rate * 3}
    twice = {"training.batch_size": 2 * batch, "optimiser.learning_rate": 2 * rate}
    yield "twice the batch", twice
    yield "bank as large as the folder", {"divergence.num_subnetworks": min(4096, num_images)}
    yield "no divergence (SimCLR)", {"divergence.weight": 0.0}


def sample(data: Path, images: int, test: int, out: Path) -> Path:
    """Write so many training and test images of an .npz file, drawn at random, to another."""
    arrays, random, kept = np.load(data), np.random.default_rng(0), {}
    for split, most in (("train", images), ("test", test)):
        labels = arrays[f"{split}_labels"]
        chosen = np.sort(random.permutation(len(labels))[:most])
        kept[f"{split}_images"] = arrays[f"{split}_images"][chosen]
        kept[f"{split}_labels"] = labels[chosen]
    np.savez(out, **kept)
    return out


def measure(
    data: Path,
    images: int,
    out: Path,
    budget: str = "2m",
    test: int = 2000,
    seed: int = 0,
    best: bool = True,
) -> None:
    """Train every arm, and add a line for each to a table.

    Args:
        data: A labelled .npz file in the MedMNIST layout.
        images: Training images to draw from it.
        out: Folder of the tables; arms that are in them are not trained again.
        budget: Time of an arm.
        test: Test images to draw.
        seed: Of every arm; the images do not depend on it.
        best: Train the recipe best as well, for an epoch at least, which takes long on a CPU.
    """
    device = pick_device("auto")
    made = provenance(device_name(device))
    table = out / f"{data.stem}-{images}-seed{seed}.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    lines = table.read_text().splitlines() if table.exists() else []
    done = {row["arm"]: row for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        source = sample(data, images, test, Path(folder) / "sample.npz")

        def train(arm: str, config: Config | str, **options: Any) -> Config:
            changes = {"data.source": str(source), "seed": seed, **QUIET}
            run = pretrain(
                config, changes=changes, run=Path(folder) / arm, console=Console(), **options
            )
            rows = evaluate(run.path, protocols=["knn", "linear"], epochs=0, balanced=True)
            found = {
                f"{row['protocol']}, {row['variant']}, {row['metric']}": row["value"]
                for row in rows
            }
            record = {
                **{"arm": arm, "data": data.stem, "images": images, "budget": budget},
                "linear": found["linear, cached features, top1"],
                "balanced": found["linear, cached features, balanced"],
                "knn": next(value for name, value in found.items() if "k=20, top1" in name),
                "seconds": run.result()["pretrain"]["seconds"],
                "config": _fields(run.config),
                "finished": now(),
                **{name: made[name] for name in ("commit", "device", "versions")},
            }
            _add_line(table, record)
            done[arm] = record
            print(arm, record["linear"], record["knn"], flush=True)
            return run.config

        if "auto" not in done:
            train("auto", "auto", budget=budget)
        auto = override(load_recipe("auto"), done["auto"]["config"])
        frame = open_source(str(source), image_size=auto.data.image_size).train.images.frame

        def spent(config: Config) -> float:
            """Return the seconds of an epoch."""
            return measure_step(config, frame, device) * count_steps(config, images)

        arms = [(name, override(auto, changes)) for name, changes in vary(auto, images)]
        if best:
            sized = {"data.image_size": auto.data.image_size}
            arms.append(("best", override(load_recipe("best"), sized)))
        for name, config in arms:
            if name in done:
                continue
            try:
                if _cost(config) != _cost(auto):
                    ratio = spent(auto) / spent(config)
                    epochs = max(1, round(auto.training.epochs * ratio))
                    lengths = {
                        "training.epochs": epochs,
                        "optimiser.warmup_epochs": round(min(10.0, 0.05 * epochs), 2),
                    }
                    config = override(config, lengths)
                train(name, config)
            except UserError as error:  # a batch larger than the images
                _add_line(table, {"arm": name, "images": images, "refused": str(error)})


def _add_line(table: Path, record: Row) -> None:
    with table.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _cost(config: Config) -> tuple[Any, ...]:
    """Return what the time of an epoch depends on."""
    size = config.data.image_size, config.training.batch_size
    return config.encoder, config.divergence.weight > 0.0, *size


def _fields(config: Config) -> Row:
    """Return what differs from the recipe auto, but for the images' place."""
    found = differing_fields(load_recipe("auto"), config)
    return {name: pair[1] for name, pair in found.items() if name != "data.source"}


def show(tables: tyro.conf.Positional[tuple[Path, ...]]) -> None:
    """Print the tables as Markdown: linear accuracy of auto, best, and the best of the grid.

    Where classes differ in size, read the accuracy that is balanced over them.

    Args:
        tables: As ``measure`` writes them.
    """
    print("| images | budget | accuracy | `auto` | `best`, same time | best of the grid | which |")
    print("|---|---|---|---|---|---|---|")
    for path in tables:
        rows = {row["arm"]: row for row in map(json.loads, path.read_text().splitlines())}
        grid = {n: r for n, r in rows.items() if n not in ("auto", "best") and "linear" in r}
        if not grid:  # stopped before its first arm
            continue
        auto, best = rows["auto"], rows.get("best", {})
        for metric, title in (("linear", "top-1"), ("balanced", "balanced")):
            top = max(grid, key=lambda name: float(grid[name][metric]))
            words = "refused" if "refused" in best else "not measured"
            words = f"{best[metric]:.1f}" if metric in best else words
            print(
                f"| {auto['data']}, {auto['images']:,} | {auto['budget']} | {title} | "
                f"{auto[metric]:.1f} | {words} | {grid[top][metric]:.1f} | {top} |"
            )


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    tyro.extras.subcommand_cli_from_dict({"measure": measure, "show": show})
