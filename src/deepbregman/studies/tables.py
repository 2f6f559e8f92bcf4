"""The paper's tables as one study: arms x datasets x protocols, by any number of processes.

::

    STUDY/
      tables.json                what was asked for, versions
      runs/ARM-DATA-seedK/       a trial: an ordinary run folder
      locks/                     of the trials; held by the process that runs one
      results.json               every number, its summary by arm, and paired differences
      tables.md, tables/*.csv, tables/*.tex
      differences.png, .svg, .pdf

A run is trained once and then measured by one protocol after the other. Whatever its
``result.json`` holds already is not measured again.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from deepbregman.config import Config, override
from deepbregman.data import Source
from deepbregman.errors import UserError, notify
from deepbregman.evaluation.inputs import Evaluation, open_labelled
from deepbregman.evaluation.options import Few, Ood, Options, Semi, Start
from deepbregman.evaluation.protocols import run_protocols
from deepbregman.evaluation.results import KeptPredictions, Predictions
from deepbregman.files import now, read_json, write_json
from deepbregman.reporting.charts import name_figures
from deepbregman.reporting.paper_tables import save_difference_figure, save_tables
from deepbregman.runs import Record, Run, collect_provenance, is_complete, is_run
from deepbregman.statistics import summarise, summarise_pairs
from deepbregman.terminal import join_words
from deepbregman.training.devices import device_name, pick_device

from .definition import StudyResult
from .engine import (
    EvaluationPlan,
    Trial,
    TrialQueue,
    Worker,
    become_worker,
    lock,
    name_top1,
    say_each_once,
    work,
)
from .results import estimate_interval
from .tables_plan import (
    FILE,
    Part,
    TableCell,
    TableOptions,
    TablePlan,
    name_dataset,
    pair_arms,
    plan_tables,
)

MEASURES = (
    ("knn", "divergence", "cosine"),
    ("knn", "divergence", "cosine of embeddings"),
    ("retrieval", "divergence", "cosine"),
    ("retrieval", "divergence", "cosine of embeddings"),
    ("retrieval", "divergence over a bank", "cosine"),
    ("cluster", "Bregman, learned divergence", "k-means, cosine features"),
    ("cluster", "Bregman, learned divergence", "k-means, cosine embeddings"),
    ("few", "nearest distribution, divergence", "nearest image, divergence"),
    ("few", "nearest distribution, divergence", "nearest mean, cosine"),
    ("few", "nearest distribution, divergence", "nearest mean, cosine of embeddings"),
    ("few", "nearest distribution, divergence", "linear"),
    ("few", "nearest class, divergence over a bank", "nearest mean, cosine of centred features"),
    ("ood", "divergence, neighbour", "cosine, neighbour"),
    ("ood", "divergence, training distribution", "Mahalanobis, one Gaussian"),
    ("ood", "divergence, nearest class", "Mahalanobis, nearest class"),
    ("corruptions", "kNN by divergence", "kNN by cosine"),
)
"""Protocol, words of a variant that measures by the divergence, and of what it is compared with."""
TRAINING = ("semi", "supervised", "transfer")
"""Protocols that train an encoder, so that they cannot share features with others."""
MOST_CLASSES = 20
"""Datasets of more classes get no table by class."""


@dataclass(frozen=True)
class TableTrial(Trial):
    """A run of the tables; it is done when every part is measured."""

    cell: TableCell

    def open_run(self) -> Run:
        """Open the run; its dataset may have been in another folder, as on another machine."""
        trained_on = Run.open(self.folder).config.data.source
        if name_dataset(trained_on) != name_dataset(self.config.data.source):
            return super().open_run()
        return Trial(self.folder, override(self.config, {"data.source": trained_on})).open_run()

    def outcome(self) -> Record | None:
        """Read the outcome; None while a part is missing."""
        known = super().outcome()
        if known is None or known["state"] == "diverged":
            return known
        return None if self.missing() else known

    def missing(self) -> tuple[Part, ...]:
        """Return the parts that are not measured yet."""
        if not is_run(self.folder):
            return self.cell.parts
        rows = list_final_rows(Run.open(self.folder))
        return tuple(part for part in self.cell.parts if not is_measured(part, rows, self.cell))


def list_final_rows(run: Run) -> list[Record]:
    """Return what was measured after the last epoch; a saturated run may have ended early."""
    last = run.config.training.epochs
    if is_complete(run):
        last = run.result()["pretrain"]["epoch"]
    return [row for row in run.evaluations() if row["epoch"] == last]


def is_measured(part: Part, rows: Iterable[Record], cell: TableCell) -> bool:
    """Whether the rows of a run hold a part: of its dataset, against all the images it needs."""
    data = part.others[0] if part.protocol == "transfer" else cell.data
    found = [
        row
        for row in rows
        if row["protocol"] == part.protocol and name_dataset(row["data"]) == name_dataset(data)
    ]
    if part.protocol == "ood":
        seen = {name_dataset(row["details"]["against"]) for row in found if row.get("details")}
        return seen >= {name_dataset(other) for other in part.others}
    return bool(found)


@dataclass(frozen=True)
class TableEvaluation(EvaluationPlan):
    """Measures the missing parts of a run, one protocol after the other."""

    tuning_epochs: int | None = None

    def evaluate(self, trial: Trial, run: Run, source: Source) -> dict[str, float]:
        """Measure the missing parts; each is in the run's result when it ends."""
        assert isinstance(trial, TableTrial)
        missing = trial.missing()
        # Protocols on frozen features share them.
        together = [part for part in missing if part.protocol not in TRAINING]
        alone = [[part] for part in missing if part.protocol in TRAINING]
        for parts in filter(None, [together, *alone]):
            options = self.options_for(parts, run.config, source)
            transfers = parts[0].protocol == "transfer"
            run_protocols(
                Evaluation(
                    run,
                    options,
                    self.accelerator,
                    source=None if transfers else source,
                    with_references=parts[0].from_scratch or not transfers,
                )
            )
        return name_top1(row for row in run.evaluations() if row["data"] == run.config.data.source)

    def options_for(self, parts: Sequence[Part], config: Config, source: Source) -> Options:
        """Return the options that parts on one dataset are measured with."""
        smallest = int(torch.unique(source.train.known_labels, return_counts=True)[1].min())
        counts = [count for count in Few.labels_per_class if count <= smallest] or [1]
        first = parts[0]
        starts: tuple[Start, ...] = ("encoder", "scratch") if first.from_scratch else ("encoder",)
        others = next((part.others for part in parts if part.protocol == "ood"), None)
        return Options(
            protocols=tuple(part.protocol for part in parts),
            data=first.others[0] if first.protocol == "transfer" else config.data.source,
            epochs=self.tuning_epochs if first.protocol in TRAINING else 0,
            seed=config.seed,  # the evaluation draws differently for each run, too
            semi=Semi(starts=starts),
            few=Few(labels_per_class=tuple(counts)),
            ood=Ood() if others is None else Ood(against=others),
        )


class TableQueue(TrialQueue):
    """The runs of the tables that are not complete."""

    def __init__(self, plan: TablePlan) -> None:
        runs = plan.options.out / "runs"
        trials = [TableTrial(runs / cell.name, cell.config, cell) for cell in plan.cells]
        super().__init__(plan.options.out, trials)
        self.plan = plan

    def check_other_seeds(self) -> None:
        """Refuse to add seeds to runs of other settings: a mean over both would mean little."""
        for arm, seed, run in _list_runs(self.folder):
            name = (arm, name_dataset(run.config.data.source))
            for trial in self.waiting:
                assert isinstance(trial, TableTrial)
                if (trial.cell.arm, name_dataset(trial.cell.data)) == name:
                    config = override(trial.config, {"seed": seed})
                    replace(trial, folder=run.path, config=config).open_run()

    def check_other_tuning(self) -> None:
        """Refuse to tune for other epochs than before: a mean over both would mean little."""
        if not (self.folder / FILE).is_file():
            return
        before = read_json(self.folder / FILE).get("asked", {}).get("tuning_epochs")
        asked = self.plan.options.tuning_epochs
        if not set(TRAINING) & set(self.plan.options.protocols):
            return
        runs = [run for *_, run in _list_runs(self.folder)]
        found = {row["protocol"] for run in runs for row in run.evaluations()} & set(TRAINING)
        if before != asked and found:
            words = "without it" if before is None else f"with --tuning-epochs {before}"
            raise UserError(
                f"--tuning-epochs {'is left out' if asked is None else asked}: in {self.folder}, "
                f"{join_words(sorted(found))} were measured {words}; give the same, or another "
                "folder with --out"
            )

    def save(self) -> Record:
        """Write the results of all runs in the folder, also those of earlier commands."""
        with lock(self.folder, "results"):
            results = collect_results(self.folder)
            write_json(self.folder / "results.json", results)
            save_tables(self.folder, results)
            return results


def run_tables(options: TableOptions, console: Console) -> StudyResult:
    """Measure what is missing, or only write the tables of the runs, and draw the figure."""
    become_worker()
    queue = TableQueue(plan_tables(options))
    results = measure_missing(queue, console) if options.train else queue.save()
    save_difference_figure(name_figures(options.out, "differences"), results)
    return StudyResult(options.out, results)


def measure_missing(queue: TableQueue, console: Console) -> Record:
    """Train and measure what is missing, together with other processes on the same folder."""
    plan, options = queue.plan, queue.plan.options
    device = pick_device(options.accelerator)
    evaluation = TableEvaluation(
        "test",
        keep_checkpoints=options.keep_checkpoints,
        accelerator=options.accelerator,
        tuning_epochs=options.tuning_epochs,
    )

    @cache
    def open_images(data: str, image_size: int) -> Source:
        config = next(cell.config for cell in plan.cells if cell.data == data)
        source = open_labelled(override(config, {"data.image_size": image_size}))
        if source.skipped_notice:  # printed once, though arms may have images of other sizes
            notify(f"{source.skipped_notice} of {data}")
        return source

    queue.count()
    queue.check_other_seeds()
    queue.check_other_tuning()
    found: list[str] = []
    with console.status("opening the images ..."):
        for trial in queue.waiting:  # they are refused before a folder is made and hours are spent
            config = trial.config
            source = open_images(config.data.source, config.data.image_size)
            found += evaluation.check_images(source, config)
    say_each_once(found, console)
    _begin(plan, device_name(device))
    worker = Worker(
        lambda t: open_images(t.config.data.source, t.config.data.image_size), evaluation, console
    )
    worker.say(f"tables in {options.out}: {queue.describe()}; evaluated on the test images")
    return work(queue, worker, "the same command")


def _begin(plan: TablePlan, device: str) -> None:
    """Write down what is asked for; arms and datasets of earlier commands stay."""
    folder = plan.options.out
    with lock(folder, "study"):
        path = folder / FILE
        before = read_json(path) if path.is_file() else {}
        asked = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(plan.options).items()
            if name not in ("out", "accelerator")
        }
        if not set(TRAINING) & set(plan.options.protocols) and "asked" in before:
            asked["tuning_epochs"] = before["asked"].get("tuning_epochs")
        record = {
            "arms": list(dict.fromkeys([*before.get("arms", []), *plan.arms])),
            "data": list(dict.fromkeys([*before.get("data", []), *plan.options.data])),
            "asked": asked,
            "provenance": before.get("provenance") or collect_provenance(device),
        }
        write_json(path, record)


# Results


class Quantity(NamedTuple):
    """What identifies a quantity."""

    data: str
    trained_on: str
    protocol: str
    variant: str
    metric: str


ArmRows = dict[str, dict[int, Record]]
"""The rows of one quantity: arm -> seed -> row."""


def collect_results(folder: Path) -> Record:
    """Summarise the runs of a folder: every quantity by arm, and its paired differences.

    Runs that were copied there may be of arms that no command on this machine has named.
    """
    known = _list_runs(folder)
    named = read_json(folder / FILE)["arms"]
    arms = list(dict.fromkeys([*named, *(arm for arm, _, _ in known)]))
    quantities: dict[Quantity, ArmRows] = {}
    for arm, seed, run in known:
        config, kept = run.config, KeptPredictions(run)
        trained_on = name_dataset(config.data.source)
        for row in list_final_rows(run):
            names = row["protocol"], row["variant"], row["metric"]
            quantity = Quantity(name_dataset(row["data"]), trained_on, *names)
            found = quantities.setdefault(quantity, {}).setdefault(arm, {})
            found[seed] = {**row, "kept": kept}
    return {
        "study": "tables",
        "arms": arms,
        "pairs": [list(pair) for pair in pair_arms(arms)],
        "runs": [_describe_run(*run) for run in known],
        "quantities": [_summarise_quantity(*each, arms) for each in quantities.items()],
        "by_divergence": _compare_measures(quantities),
        "classes": _summarise_classes(known),
        "written": now(),
    }


def _list_runs(folder: Path) -> list[tuple[str, int, Run]]:
    """Return arm, seed and run of every run in the folder of the study."""
    runs = []
    for path in sorted((folder / "runs").glob("*-seed*")):
        name = re.fullmatch(r"(.+)-seed(\d+)", path.name)
        if name is not None and is_run(path):
            run = Run.open(path)
            arm = name[1].removesuffix(f"-{name_dataset(run.config.data.source)}")
            runs.append((arm, int(name[2]), run))
    return runs


def _describe_run(arm: str, seed: int, run: Run) -> Record:
    config, result = run.config, run.result()
    trained = result.get("pretrain") or {}
    origin = run.provenance()
    return {
        "arm": arm,
        "seed": seed,
        "data": name_dataset(config.data.source),
        "run": run.path.name,
        "encoder": config.encoder.name,
        "epochs": config.training.epochs,
        "views_per_image": config.views.num_views,
        "view_size": config.view_size,
        "batch_size": config.training.batch_size,
        "seconds": trained.get("seconds"),
        "state": (result.get("study") or {}).get("state"),
        **{key: origin.get(key) for key in ("commit", "source", "device")},
    }


def _summarise_quantity(quantity: Quantity, found: ArmRows, arms: Sequence[str]) -> Record:
    values = {
        arm: {seed: row["value"] for seed, row in rows.items()} for arm, rows in found.items()
    }
    differences = []
    for arm, other in pair_arms(arms):
        pair = _compare(found.get(arm, {}), found.get(other, {}), quantity.metric)
        if pair is not None:
            differences.append({"arm": arm, "against": other, **pair})
    first = next(iter(next(iter(found.values())).values()))
    return {
        **quantity._asdict(),
        "num_train": first["num_train"],
        "num_test": first["num_test"],
        "arms": {arm: {**summarise(list(v.values())), "values": v} for arm, v in values.items()},
        "differences": differences,
        "references": {
            name: first[name] for name in ("chance", "raw_pixels") if first.get(name) is not None
        },
    }


def _compare(mine: dict[int, Record], other: dict[int, Record], metric: str) -> Record | None:
    """Compare seed by seed, also over test images where predictions are kept; None for no pair."""

    def find(row: Record) -> Predictions | None:
        kept: KeptPredictions = row["kept"]
        return kept.find(row["data"], f"{row['protocol']}, {row['variant']}")

    first, second = ({seed: r["value"] for seed, r in rows.items()} for rows in (mine, other))
    pair, interval = summarise_pairs(first, second), None
    if pair is not None and metric in ("top1", "balanced"):
        seeds = sorted(mine.keys() & other.keys())
        predicted = [(find(mine[seed]), find(other[seed])) for seed in seeds]
        interval = estimate_interval(predicted, balanced=metric == "balanced")
    return None if pair is None else {**pair, "over_images": interval}


def _compare_measures(quantities: Mapping[Quantity, ArmRows]) -> list[Record]:
    """Compare measures by the divergence with others of the same runs, seed by seed."""
    found = []
    for quantity, mine in quantities.items():
        for protocol, words, other in MEASURES:
            if protocol != quantity.protocol or words not in quantity.variant:
                continue
            against = quantity.variant.replace(words, other)
            theirs = quantities.get(quantity._replace(variant=against), {})
            pairs = {
                arm: _compare(rows, theirs.get(arm, {}), quantity.metric)
                for arm, rows in mine.items()
            }
            arms = {arm: pair for arm, pair in pairs.items() if pair is not None}
            if arms:
                found.append({**quantity._asdict(), "against": against, "arms": arms})
    return found


def _summarise_classes(runs: Sequence[tuple[str, int, Run]]) -> list[Record]:
    """Return the share of each class that is predicted right, linear, where classes are unequal."""
    found: dict[tuple[str, int], Record] = {}
    for arm, _, run in runs:
        source = run.config.data.source
        if not any(
            row["metric"] == "balanced" and row["protocol"] == "linear" for row in run.evaluations()
        ):
            continue
        kept = KeptPredictions(run).find(source, "linear, cached features")
        if kept is None or kept.labels.max() >= MOST_CLASSES:
            continue
        for label in np.unique(kept.labels).tolist():
            data, images = name_dataset(source), kept.labels == label
            name = kept.classes[label] if kept.classes else str(label)
            about: Record = {"data": data, "class": name, "num_test": int(images.sum()), "arms": {}}
            share = float(np.mean([classes[images] == label for classes in kept.predicted]))
            arms = found.setdefault((data, label), about)["arms"]
            arms.setdefault(arm, []).append(100.0 * share)
    for row in found.values():
        row["arms"] = {arm: summarise(values) for arm, values in row["arms"].items()}
    return [row for _, row in sorted(found.items())]
