"""Which diagnostics go with linear accuracy: rank correlations over recorded and over new runs.

    python benchmarks/health.py train --data digits --out results/health/digits.csv
    python benchmarks/health.py train --data ham10000.npz --image-size 16 --per-class 90 ...
    python benchmarks/health.py collect --out results/health/cifar10.csv
    python benchmarks/health.py correlate results/health/digits.csv results/health/ham10000.csv
    python benchmarks/health.py settle --data digits --out results/health/settling.csv

``train`` trains short, varied runs on a CPU. ``collect`` reads the runs of CIFAR-10 that are
recorded in results/, which have the older diagnostics only. ``settle`` tells when a long run at a
constant rate is called saturated, and how its accuracy goes on.
"""

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import tyro
from scipy.stats import spearmanr

from deepbregman.commands.pretrain import pretrain
from deepbregman.config import Config, load_recipe, override
from deepbregman.data import Source, open_source
from deepbregman.evaluation.features import LabelledFeatures
from deepbregman.evaluation.inputs import load_run
from deepbregman.evaluation.linear import fit_linear, measure_on_cached
from deepbregman.evaluation.results import top_k_accuracy
from deepbregman.method.networks import Model
from deepbregman.runs import Run
from deepbregman.training.callbacks import Callback
from deepbregman.training.health import should_stop

OLD = ("effective_rank", "alignment", "uniformity", "spread")
METHODS = ("barlow_twins", "vicreg", "simsiam", "wmse")
NEW = ("rankme", "alpha_req", "lidar", "neighbour_stability")
STABILITIES = ("neighbour_stability", "long_stability")
QUIET = {
    "training.knn_every": 0,
    "training.tensorboard": False,
    "training.save_seconds": 1e6,
}
Row = dict[str, Any]


def vary(lengths: tuple[int, ...]) -> Iterator[Row]:
    """List configurations: length, temperature, learning rate, and other methods."""
    rates = (2e-4, 2e-3, 2e-2)
    for epochs, temperature, rate in itertools.product(lengths, (0.1, 0.2, 1.0), rates):
        yield {
            "training.epochs": epochs,
            "objective.temperature": temperature,
            "optimiser.learning_rate": rate,
            "optimiser.warmup_epochs": min(5.0, epochs / 5),
        }
    for method in METHODS:
        yield {"objective.name": method, "training.epochs": min(20, max(lengths))}


def train(
    data: str = "digits",
    image_size: int = 8,
    per_class: int | None = None,
    batch: int = 256,
    epochs: tuple[int, ...] = (5, 10, 20, 40),
    seed: int = 0,
    out: Path = Path("health.csv"),
) -> None:
    """Train the runs one after the other, and write a row for each.

    They come in a random order, so that a table that is not complete is a fair sample.

    Args:
        data: A labelled dataset.
        image_size: Side of the images in pixels.
        per_class: Training images to draw of each class, as many as there are at most, so that a
            classifier cannot do well by guessing the largest class; all images by default.
        batch: Images of a batch.
        epochs: Lengths of the runs.
        seed: Of every run; the images do not depend on it.
        out: The table; rows that are there are not trained again.
    """
    source = open_part(data, image_size, per_class)
    fields = {**QUIET, "data.source": data, "data.image_size": image_size}
    fields |= {"training.batch_size": batch, "seed": seed}
    rows = pd.read_csv(out).to_dict("records") if out.exists() else []
    done = {row["run"] for row in rows}
    configurations = list(vary(epochs))
    random.Random(0).shuffle(configurations)
    if batch < 128:  # of which the images are whitened
        configurations = [c for c in configurations if c.get("objective.name") != "wmse"]
    for changes in configurations:
        name = " ".join(str(value) for value in changes.values()) + f" seed {seed}" * (seed > 0)
        if name in done:
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = override(load_recipe("digits"), {**fields, **changes})
            run = pretrain(config, run=Path(folder) / "run", source=source, accelerator="cpu")
            rows.append({"run": name, **judge(run, source), **describe(run)})
        pd.DataFrame(rows).to_csv(out, index=False, float_format="%.5g")
        print(len(rows), rows[-1], flush=True)


def open_part(data: str, image_size: int, per_class: int | None) -> Source:
    """Open a dataset with at most so many training images of each class."""
    source = open_source(data, image_size=image_size)
    if per_class is None:
        return source
    order = torch.randperm(len(source.train), generator=torch.Generator().manual_seed(0))
    labels = source.train.known_labels[order]
    drawn = [order[labels == label][:per_class] for label in labels.unique()]
    return replace(source, train=source.train.select(torch.cat(drawn).sort().values))


def judge(run: Run, source: Source, draws: int = 5) -> Row:
    """Measure the linear accuracy of a run, plain, and balanced with weighted classes.

    The penalty is chosen on a tenth of the training images. Of 600 images that is 60, and the
    choice a lottery, so accuracies are means over several draws of this tenth.
    """
    loaded = load_run(run)
    found = LabelledFeatures(loaded.model, loaded.config, source, loaded.device, balanced=True)
    fits = {
        is_weighted: [measure_on_cached(found, draw, weighted=is_weighted) for draw in range(draws)]
        for is_weighted in (False, True)
    }
    return {
        "linear": statistics.mean(fit.values["top1"] for fit in fits[False]),
        "balanced": statistics.mean(fit.values["balanced"] for fit in fits[True]),
    }


class Accuracy(Callback):
    """Adds the linear accuracy on test images to every epoch in which health is measured.

    The penalty is fixed: chosen anew each time, on a tenth of few images, it would be a lottery.
    """

    def __init__(self, config: Config, source: Source) -> None:
        self.config, self.source = config, source

    def on_epoch(self, record: Mapping[str, Any], model: Model) -> dict[str, float] | None:
        """Fit a classifier to the features of the training images."""
        if "verdict" not in record:
            return None
        found = LabelledFeatures(model, self.config, self.source, torch.device("cpu"))
        train, test = (part.features.representation for part in (found.train, found.test))
        labels, count = found.train.labels, found.num_classes
        fitted = fit_linear(train, labels, num_classes=count, l2=1e-2)
        return {"linear": top_k_accuracy(fitted.predict(test), found.test.labels)}


def settle(
    data: str = "digits",
    image_size: int = 8,
    per_class: int | None = None,
    batch: int = 256,
    rate: float = 2e-3,
    epochs: int = 100,
    seed: int = 0,
    out: Path = Path("settling.csv"),
) -> None:
    """Train at a constant rate, and add a row for each measurement, with the linear accuracy.

    ``stops`` says where ``--stop-when-saturated`` would have ended the run.

    Args:
        data: A labelled dataset; at most 2,000 test images are drawn.
        image_size: Side of the images in pixels.
        per_class: Training images to draw of each class; all by default.
        batch: Images of a batch.
        rate: The learning rate.
        epochs: Length of the run.
        seed: Of the run.
        out: The table.
    """
    source = open_part(data, image_size, per_class)
    assert source.test is not None
    order = torch.randperm(len(source.test), generator=torch.Generator().manual_seed(0))
    source = replace(source, test=source.test.select(order[:2000].sort().values))
    fields = {
        "seed": seed,
        "data.source": data,
        "data.image_size": image_size,
        "training.batch_size": batch,
        "training.epochs": epochs,
        "optimiser.schedule": "constant",
        "optimiser.learning_rate": rate,
    }
    config = override(load_recipe("digits"), {**QUIET, **fields})
    with tempfile.TemporaryDirectory() as folder:
        measure = Accuracy(config, source)
        path = Path(folder) / "run"
        run = pretrain(config, run=path, source=source, accelerator="cpu", callbacks=[measure])
        records = [record for record in run.metrics() if "verdict" in record]
    known = {"data": Path(data).stem, "images": len(source.train), "batch": batch, "rate": rate}
    kept = ("epoch", *STABILITIES, "effective_rank", "rankme", "uniformity", "verdict", "linear")
    rows = pd.read_csv(out).to_dict("records") if out.exists() else []
    for number, record in enumerate(records, start=1):
        row = {**known, "seed": seed, **{name: record.get(name) for name in kept}}
        rows.append({**row, "stops": should_stop(records[:number])})
    pd.DataFrame(rows).to_csv(out, index=False, float_format="%.5g")


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
            known = [row for row in run.metrics() if set(OLD) <= row.keys()]
            if known:  # a run of no epochs has no diagnostics
                yield _old_row(str(path.parent.relative_to(results)), linear[0], known[-1])


def _old_row(name: str, linear: float, last: Row) -> Row:
    kept = {key: last[key] for key in OLD}
    return {"run": name, "linear": linear, "epoch": last["epoch"], **kept}


def correlate(tables: tyro.conf.Positional[tuple[Path, ...]]) -> None:
    """Print Spearman's rank correlation of each diagnostic with linear accuracy, as Markdown.

    With balanced accuracy too, where the table has it. Over all runs, and over those of one length
    where there are at least 20 of them.

    Args:
        tables: As ``train`` and ``collect`` write them.
    """
    print("| runs | diagnostic | accuracy | rank correlation | p | n |")
    print("|---|---|---|---|---|---|")
    for path in tables:
        frame = pd.read_csv(path)
        _print_rows(path.stem, frame, ("epoch", *OLD, *NEW))
        for epochs, part in frame.groupby("epoch"):
            if 20 <= len(part) < len(frame):
                _print_rows(f"{path.stem}, {epochs} epochs", part, (*OLD, *NEW))


def _print_rows(title: str, frame: pd.DataFrame, names: Iterable[str]) -> None:
    for name, truth in itertools.product(names, ("linear", "balanced")):
        if {name, truth} <= set(frame) and frame[[name, truth]].dropna().shape[0] > 2:
            both = frame[[name, truth]].dropna()
            found = spearmanr(both[name], both[truth])
            words = f"{found.statistic:+.2f} | {found.pvalue:.1g} | {len(both)}"
            print(f"| {title} | {name} | {truth} | {words} |")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"train": train, "settle": settle, "collect": collect, "correlate": correlate}
    )
