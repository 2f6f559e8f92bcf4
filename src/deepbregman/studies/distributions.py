"""The study ``distributions``: what a divergence between distributions is good for."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.progress import Progress

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import load_recipe, override
from deepbregman.errors import UserError
from deepbregman.evaluation.inputs import Evaluation
from deepbregman.evaluation.options import Options
from deepbregman.evaluation.protocols import run_protocols
from deepbregman.reporting.figures import save_ring_figure
from deepbregman.reporting.screen import outcome_table
from deepbregman.runs import Record, provenance
from deepbregman.training.processes import device_name, pick_device
from deepbregman.training.randomness import derive_seed

from . import rings
from .outcome import check_seeds, claim_folder, rows_of, write_outcome

Part = Literal["rings", "images", "all"]
SHOWN_ARMS = (rings.EUCLIDEAN, "moment, contrastive")
IMAGE_ARMS = {"views as points": "none", "views as distributions": "halves"}
IMAGE_NOTES = (
    "An image's M views as two empirical distributions of M / 2 views each (divergence.sets), "
    "against the same M views as points, every pair compared; the same views, batches, epochs and "
    "seeds, so the same cost. Linear and kNN accuracy of the frozen encoder on test images, %."
)


def run_distributions(
    out: Path,
    *,
    part: Part = "all",
    seeds: int = 10,
    image_seeds: int = 3,
    recipe: str = "digits",
    data: str | None = None,
    epochs: int | None = None,
    num_views: int = 4,
    settings: rings.Rings | None = None,
    accelerator: str = "auto",
    console: Console | None = None,
) -> Record:
    """Cluster distributions on rings, and pretrain with views as distributions and as points.

    Args:
        out: folder, new or empty.
        part: ``rings``, ``images`` or ``all``.
        seeds: of the rings: data, weights and order, 0, 1, ...
        image_seeds: of pretraining.
        recipe: of pretraining; it must have the divergence on.
        data: a labelled source in place of the recipe's.
        epochs: of pretraining, in place of the recipe's.
        num_views: M, even, 4 or more.
        settings: of the rings.
        accelerator: for pretraining; the rings are a CPU's work.
        console: to draw on; quiet when None.

    Returns:
        What ``results.json`` holds.
    """
    console = console or Console(quiet=True)
    for count in (seeds, image_seeds):
        check_seeds(count)
    if num_views < 4 or num_views % 2:
        raise UserError(
            f"--num-views {num_views}: each half of the views is a distribution, so there must be "
            "an even number, 4 or more"
        )
    if part not in ("rings", "images", "all"):
        raise UserError(f"--part {part}: it is one of rings, images, all")
    changes: Record = {"views.num_views": num_views}
    changes |= {} if data is None else {"data.source": data}
    changes |= {} if epochs is None else {"training.epochs": epochs}
    config = override(load_recipe(recipe), changes)
    if part != "rings" and config.divergence.weight == 0.0:
        raise UserError(f"--recipe {recipe} has divergence.weight 0: there is nothing to compare")
    device = pick_device("cpu" if part == "rings" else accelerator)
    claim_folder(out)
    record = provenance(device_name(device))
    settings = settings or rings.Rings()
    rows: list[Record] = []
    described: Record = {"part": part}
    notes = []
    if part in ("rings", "all"):
        rows += _rings(out, settings, seeds, console)
        described["rings"] = asdict(settings)
        notes.append(rings.NOTES)
    if part in ("images", "all"):
        values: dict[tuple[str, str], list[float]] = {}
        for seed in range(image_seeds):
            for arm, sets in IMAGE_ARMS.items():
                run = pretrain(
                    override(config, {"divergence.sets": sets, "seed": seed}),
                    run=out / "runs" / f"{arm.replace(' ', '-')}-seed{seed}",
                    accelerator=accelerator,
                    console=console,
                )
                for row in run_protocols(Evaluation(run, Options(epochs=0), accelerator)):
                    metric = f"{row['protocol']}, {row['variant']}"
                    if row["metric"] == "top1":
                        values.setdefault((arm, metric), []).append(row["value"])
        rows += rows_of(values, part="images")
        described["images"] = {
            "recipe": recipe,
            "data": config.data.source,
            "epochs": config.training.epochs,
            "num_views": num_views,
        }
        notes.append(IMAGE_NOTES)
    results = write_outcome(out, "distributions", described, record, rows, " ".join(notes))
    console.print(outcome_table(results))
    return results


def _rings(out: Path, settings: rings.Rings, seeds: int, console: Console) -> list[Record]:
    """Run every arm with every seed, draw the outcome, and return its rows."""
    values: dict[tuple[str, str], list[float]] = {}
    shown: dict[str, np.ndarray] = {}
    first: rings.Sets | None = None
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("rings", total=seeds * len(rings.ARMS))
        for seed in range(seeds):
            train = rings.draw_rings(settings, settings.num_train, derive_seed(seed, "rings", 0))
            test = rings.draw_rings(settings, settings.num_test, derive_seed(seed, "rings", 1))
            first = first or test
            for arm in rings.ARMS:
                progress.update(bar, description=f"rings, seed {seed}: {arm}")
                found = rings.cluster_arm(arm, settings, train, test, seed)
                for metric, value in found.metrics.items():
                    values.setdefault((arm, metric), []).append(value)
                if seed == 0 and arm in SHOWN_ARMS:
                    shown[arm] = found.assignment.numpy()
                progress.advance(bar)
    assert first is not None
    rows = rows_of(values, part="rings")
    save_ring_figure(
        [out / f"rings.{kind}" for kind in ("png", "svg")],
        points=first.points.numpy(),
        labels=first.labels.numpy(),
        clusters=shown,
        rows=bars(rows),
    )
    return rows


def bars(rows: list[Record]) -> list[Record]:
    """Pick the rows that the figure of the rings shows, and name them for it."""
    return [
        {
            **row,
            "arm": row["arm"] + row["metric"].removeprefix("ARI").replace(" of ", ": "),
            "is_baseline": row["arm"] in rings.BASELINES,
        }
        for row in rows
        if row["metric"].startswith("ARI")
    ]
