"""How good the settings are that ``auto`` chooses: beside ``best``, and beside a small grid.

    python benchmarks/auto.py measure --data cifar10.npz --images 300 --budget 2m --out DIR
    python benchmarks/auto.py measure --data cifar10.npz --images 300 --epochs 20 --out DIR
    python benchmarks/auto.py show results/auto/epochs/*.jsonl

Every arm has the same images, the same work and the same seed. ``auto`` plans its length for the
budget, or takes ``--epochs``: then the result does not depend on what else the machine does. The
arms of the grid are its configuration with one change each, and as many epochs. Where the change
makes an epoch dearer or cheaper, the length is in proportion: to the measured times of the two
with a budget, to the pixels that pass through the encoder with ``--epochs``. ``best`` is the recipe
as it is, cut to the same work where it would take more, but not below one epoch. All are judged by
a linear classifier on test images, so the grid's best is an optimistic value: it is chosen by them.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import tyro
from rich.console import Console

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import Config, differing_fields, load_recipe, override
from deepbregman.data import open_source
from deepbregman.errors import UserError
from deepbregman.evaluation.features import LabelledFeatures
from deepbregman.evaluation.inputs import load_run, open_labelled
from deepbregman.evaluation.knn import classify_by
from deepbregman.evaluation.linear import measure_on_cached
from deepbregman.files import now
from deepbregman.runs import Run, collect_provenance
from deepbregman.training.devices import device_name, pick_device
from deepbregman.training.planning import measure_step
from deepbregman.training.randomness import count_steps

QUIET = {"training.tensorboard": False, "training.knn_every": 0, "training.health_every": 0}
Row = dict[str, Any]


def vary(auto: Config, num_images: int) -> Iterator[tuple[str, Row]]:
    """List the changes of the grid to what auto has chosen."""
    rate, batch = auto.optimiser.learning_rate, auto.training.batch_size
    yield "a third of the learning rate", {"optimiser.learning_rate": rate / 3}
    if auto.divergence.warmup_epochs:
        yield "divergence from the start", {"divergence.warmup_epochs": 0.0}
    yield "no divergence (SimCLR)", {"divergence.weight": 0.0}
    yield "InfoNCE beside the divergence", {"divergence.info_nce": 1.0}
    turned = {"small_views.num_views": 4, "small_views.crop_area": (0.2, 1.0)}
    yield "turned views", {"rotation.weight": 0.4, **turned}
    yield "three times the learning rate", {"optimiser.learning_rate": rate * 3}
    twice = {"training.batch_size": 2 * batch, "optimiser.learning_rate": 2 * rate}
    yield "twice the batch", twice
    yield "bank as large as the folder", {"divergence.num_subnetworks": min(4096, num_images)}


def sample(data: Path, images: int, test: int, draw: int, out: Path) -> Path:
    """Write so many training and test images of an .npz file, drawn at random, to another."""
    arrays, random, kept = np.load(data), np.random.default_rng(draw), {}
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
    epochs: int | None = None,
    encoder: str = "small",
    test: int = 2000,
    seed: int = 0,
    draw: int = 0,
    arms: tuple[str, ...] = (),
    best: bool = True,
    compiled: bool = True,
) -> None:
    """Train every arm, and add a line for each to a table.

    Args:
        data: A labelled .npz file in the MedMNIST layout.
        images: Training images to draw from it.
        out: Folder of the tables; arms that are in them are not trained again.
        budget: Time of an arm.
        epochs: Length of an arm instead of its time.
        encoder: Of all arms but best, where the length is given; else auto chooses it.
        test: Test images to draw.
        seed: Of every arm; the images do not depend on it.
        draw: Seed of the draw of the images.
        arms: Arms of the grid to train; by default all.
        best: Train the recipe best as well, for an epoch at least, which takes long on a CPU.
        compiled: Compile steps on a GPU; without it short arms of a given length are faster.
    """
    device = pick_device("auto")
    made = collect_provenance(device_name(device))
    length = budget if epochs is None else f"{epochs} epochs"
    quiet = QUIET if compiled else {**QUIET, "training.compile": "no"}
    fixed = {} if epochs is None else {"training.epochs": epochs, "encoder.name": encoder}
    drawn = f"-draw{draw}" if draw else ""
    table = out / f"{data.stem}-{images}{drawn}-seed{seed}.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    lines = table.read_text().splitlines() if table.exists() else []
    done = {row["arm"]: row for row in map(json.loads, lines)}
    with tempfile.TemporaryDirectory() as folder:
        source = sample(data, images, test, draw, Path(folder) / "sample.npz")

        def train(arm: str, config: Config | str, more: Row | None = None, **options: Any) -> None:
            changes = {"data.source": str(source), "seed": seed, **quiet, **(more or {})}
            run = pretrain(
                config, changes=changes, run=Path(folder) / arm, console=Console(), **options
            )
            found = judge(run)
            record = {
                **{"arm": arm, "data": data.stem, "images": images, "length": length, "draw": draw},
                **found,
                "seconds": run.result()["pretrain"]["seconds"],
                "config": _fields(run.config),
                "finished": now(),
                **{name: made[name] for name in ("commit", "device", "versions")},
            }
            _add_line(table, record)
            done[arm] = record
            print(arm, found, flush=True)

        if "auto" not in done:
            train("auto", "auto", fixed, budget=budget if epochs is None else None)
        auto = override(load_recipe("auto"), done["auto"]["config"])
        frame = open_source(str(source), image_size=auto.data.image_size).train.images.frame

        def seconds(config: Config) -> float:
            """Return the time of an epoch."""
            return measure_step(config, frame, device) * count_steps(config, images)

        def compare(config: Config) -> float:
            """Return how many epochs of a configuration cost as much as one of auto."""
            if epochs is None or config.encoder != auto.encoder:
                return seconds(auto) / seconds(config)
            return _count_work(auto) / _count_work(config)

        grid = [
            (name, override(auto, changes))
            for name, changes in vary(auto, images)
            if name in arms or not arms
        ]
        if best:
            grid.append(("best", load_recipe("best")))
        for name, config in grid:
            if name in done:
                continue
            try:
                if name == "best" or _cost(config) != _cost(auto):
                    as_long = max(1, round(auto.training.epochs * compare(config)))
                    if name == "best":
                        as_long = min(as_long, config.training.epochs)
                    lengths = {
                        "training.epochs": as_long,
                        "optimiser.warmup_epochs": round(min(10.0, 0.05 * as_long), 2),
                    }
                    config = override(config, lengths)
                train(name, config)
            except UserError as error:  # a batch larger than the images
                _add_line(table, {"arm": name, "images": images, "refused": str(error)})


def judge(run: Run, draws: int = 5) -> Row:
    """Measure a run on the test images, without what an evaluation compares it with.

    The penalty is chosen on a tenth of the training images. Of 300 images that is 30, and the
    choice a lottery, so accuracies are means over several draws of this tenth.
    """
    loaded = load_run(run)
    source = open_labelled(loaded.config)
    labelled = LabelledFeatures(loaded.model, loaded.config, source, loaded.device, balanced=True)
    votes = next(v for v in classify_by(labelled, "cosine") if v.variant.endswith("k=20"))
    found = {"knn": votes.values["top1"]}
    for weighted, names in (
        (False, {"top1": "linear", "balanced": "balanced of plain classes"}),
        (True, {"balanced": "balanced", "top1": "top-1 of weighted classes"}),
    ):
        fits = [measure_on_cached(labelled, draw, weighted=weighted) for draw in range(draws)]
        for metric, name in names.items():
            found[name] = statistics.mean(fit.values[metric] for fit in fits)
    return found


def _add_line(table: Path, record: Row) -> None:
    with table.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _cost(config: Config) -> tuple[Any, ...]:
    """Return what the time of an epoch depends on."""
    size = config.data.image_size, config.training.batch_size
    return config.encoder, tuple(config.view_groups), *size


def _count_work(config: Config) -> int:
    """Count the pixels that pass through the encoder; one backward costs as much as two forward."""
    size, pixels = config.data.image_size, 0
    for table, group in config.view_groups.items():
        passes = 1 if table == "weak_views" else 3
        pixels += passes * group.num_views * group.side(size) ** 2
    return pixels


def _fields(config: Config) -> Row:
    """Return what differs from the recipe auto, but for the images' place."""
    found = differing_fields(load_recipe("auto"), config)
    return {name: pair[1] for name, pair in found.items() if name != "data.source"}


def show(tables: tyro.conf.Positional[tuple[Path, ...]]) -> None:
    """Print the tables as Markdown: linear accuracy of every arm, a mean over seeds and draws.

    Where classes differ in size, read the accuracy that is balanced over them: of a classifier in
    which every class counts the same.

    Args:
        tables: As ``measure`` writes them.
    """
    lines = [line for path in tables for line in path.read_text().splitlines()]
    rows = [row for row in map(json.loads, lines) if "linear" in row]
    frame = pd.DataFrame(rows)
    frame["run"] = [(row.get("draw") or 0, row["config"].get("seed", 0)) for row in rows]
    arms = list(dict.fromkeys(frame["arm"]))
    print(f"| images | length | runs | accuracy | {' | '.join(arms)} | `auto` below the best |")
    print("|---" * (len(arms) + 5) + "|")
    sets = ["data", "images", "length"]
    for (data, images, length), part in frame.groupby(sets, sort=False):
        for metric, title in (("linear", "top-1"), ("balanced", "balanced")):
            found = part.pivot_table(metric, "run", "arm").reindex(columns=arms)
            runs = found["auto"].count()
            counts = found.count()
            words = [
                f"{found[arm].mean():.1f}" + f" (of {counts[arm]})" * int(counts[arm] != runs)
                if counts[arm]
                else "-"
                for arm in arms
            ]
            # Of the draws and seeds that an arm shares with auto.
            behind = found.sub(found["auto"], axis=0).mean().max()
            start = f"| {data}, {images:,} | {length} | {runs} | {title} |"
            print(start, " | ".join(words), f"| {behind:.1f} |")


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    tyro.extras.subcommand_cli_from_dict({"measure": measure, "show": show})
