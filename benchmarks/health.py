"""Which diagnostics go with linear accuracy: rank correlations over recorded and over new runs.

    python benchmarks/health.py train --data digits --out results/health/digits.csv
    python benchmarks/health.py collect --out results/health/cifar10.csv
    python benchmarks/health.py correlate results/health/*.csv

``train`` trains 40 short, varied runs on a CPU. ``collect`` reads the runs of CIFAR-10 that are
recorded in results/, which have the older diagnostics only.
"""

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import tyro
from scipy.stats import spearmanr

from deepbregman.commands.evaluate import evaluate
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import load_recipe, override
from deepbregman.data import open_source
from deepbregman.runs import Run

OLD = ("effective_rank", "alignment", "uniformity", "spread")
NEW = ("rankme", "alpha_req", "lidar", "neighbour_stability")
Row = dict[str, Any]


def vary() -> Iterator[Row]:
    """List 40 configurations: length, temperature, learning rate, and other methods."""
    rates = (2e-4, 2e-3, 2e-2)
    for epochs, temperature, rate in itertools.product((5, 10, 20, 40), (0.1, 0.2, 1.0), rates):
        yield {
            "training.epochs": epochs,
            "objective.temperature": temperature,
            "optimiser.learning_rate": rate,
            "optimiser.warmup_epochs": min(5.0, epochs / 5),
        }
    for method in ("barlow_twins", "vicreg", "simsiam", "wmse"):
        yield {"objective.name": method, "training.epochs": 20}


def train(data: str = "digits", image_size: int = 8, out: Path = Path("health.csv")) -> None:
    """Train the runs one after the other, and write a row for each.

    Args:
        data: A labelled dataset.
        image_size: Side of the images in pixels.
        out: The table; rows that are there are not trained again.
    """
    source = open_source(data, image_size=image_size)
    quiet = {
        "data.source": data,
        "data.image_size": image_size,
        "training.knn_every": 0,
        "training.tensorboard": False,
        "training.save_seconds": 1e6,
    }
    rows = pd.read_csv(out).to_dict("records") if out.exists() else []
    done = {row["run"] for row in rows}
    for changes in vary():
        name = " ".join(str(value) for value in changes.values())
        if name in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = override(load_recipe("digits"), {**quiet, **changes})
            run = pretrain(config, run=Path(folder) / "run", source=source, accelerator="cpu")
            found = evaluate(
                run.path, protocols=["linear"], epochs=0, source=source, accelerator="cpu"
            )
            linear = next(row["value"] for row in found if row["metric"] == "top1")
            rows.append({"run": name, "linear": linear, **describe(run)})
        pd.DataFrame(rows).to_csv(out, index=False, float_format="%.5g")
        print(len(rows), rows[-1], flush=True)


def describe(run: Run) -> Row:
    """Return the diagnostics of a run's last epoch."""
    last = run.metrics()[-1]
    kept = ("epoch", *OLD, *NEW)
    return {name: last[name] for name in kept if name in last}


def collect(results: Path = Path("results"), out: Path = Path("health.csv")) -> None:
    """Collect the recorded runs on CIFAR-10: trials of searches, and run folders.

    Args:
        results: The records.
        out: The table.
    """
    rows = [*_read_trials(results), *_read_runs(results)]
    pd.DataFrame(rows).to_csv(out, index=False, float_format="%.5g")


def _read_trials(results: Path) -> Iterator[Row]:
    for path in sorted((results / "cifar10-search").glob("*.jsonl")):
        for trial in map(json.loads, path.read_text().splitlines()):
            last = trial.get("last") or {}
            if "linear" in trial and "effective_rank" in last:
                name = f"{path.stem}/{trial['name']}"
                yield _old_row(name, trial["linear"], last)


def _read_runs(results: Path) -> Iterator[Row]:
    for path in sorted(results.glob("**/metrics.jsonl")):
        run = Run.open(path.parent)
        linear = [
            row["value"]
            for row in run.evaluations()
            if (row["protocol"], row["variant"], row["metric"])
            == ("linear", "cached features", "top1")
        ]
        if linear and "cifar10" in str(path.relative_to(results)):
            yield _old_row(str(path.parent.relative_to(results)), linear[0], run.metrics()[-1])


def _old_row(name: str, linear: float, last: Row) -> Row:
    kept = {key: last[key] for key in OLD}
    return {"run": name, "linear": linear, "epoch": last["epoch"], **kept}


def correlate(tables: tyro.conf.Positional[tuple[Path, ...]]) -> None:
    """Print Spearman's rank correlation of each diagnostic with linear accuracy, as Markdown.

    Over all runs, and over those of one length where there are at least 20 of them.

    Args:
        tables: As ``train`` and ``collect`` write them.
    """
    print("| runs | diagnostic | rank correlation | p | n |")
    print("|---|---|---|---|---|")
    for path in tables:
        frame = pd.read_csv(path)
        _print_rows(path.stem, frame, ("epoch", *OLD, *NEW))
        for epochs, part in frame.groupby("epoch"):
            if 20 <= len(part) < len(frame):
                _print_rows(f"{path.stem}, {epochs} epochs", part, (*OLD, *NEW))


def _print_rows(title: str, frame: pd.DataFrame, names: Iterable[str]) -> None:
    for name in names:
        if name in frame and frame[name].notna().sum() > 2:
            both = frame[[name, "linear"]].dropna()
            found = spearmanr(both[name], both["linear"])
            words = f"{found.statistic:+.2f} | {found.pvalue:.1g} | {len(both)}"
            print(f"| {title} | {name} | {words} |")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"train": train, "collect": collect, "correlate": correlate}
    )
