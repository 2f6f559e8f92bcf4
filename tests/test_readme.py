"""The README's commands and Python blocks run as they are written, with short settings."""

import csv
import itertools
import json
import re
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, spearmanr, t
from sklearn.datasets import load_digits

import deepbregman
from deepbregman.cli import main
from deepbregman.commands.study import SUBCOMMANDS
from deepbregman.config import load_recipe, override, recipes
from deepbregman.evaluation import linear
from deepbregman.objectives import build_views
from deepbregman.runs import Record
from deepbregman.studies.catalogue import find_study
from deepbregman.studies.tables import collect_results

from .conftest import save_photos

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def read_page(name: str) -> str:
    """Read a page as one line, in which no sentence is broken."""
    return " ".join((ROOT / name).read_text().split())


def load(name: str) -> Any:
    """Load a committed record."""
    return json.loads((ROOT / "results" / name).read_text())


def load_lines(name: str) -> list[Record]:
    """Load a committed file with a record on each line."""
    return [json.loads(line) for line in (ROOT / "results" / name).read_text().splitlines()]


def list_top1(record: Record) -> dict[str, float]:
    """List the accuracies of a run's record by their variant."""
    rows = record["evaluations"]
    return {row["variant"]: row["value"] for row in rows if row["metric"] == "top1"}


def show_spread(found: Record, digits: int = 2) -> str:
    return f"{found['mean']:.{digits}f} ± {found['deviation']:.{digits}f}"


def show_mean(found: Record) -> str:
    """Show the mean over seeds, and its spread where there are several."""
    return f"{found['mean']:.2f}" if found["deviation"] is None else show_spread(found)


def show_change(mean: float, interval: Sequence[float], digits: int = 2) -> str:
    low, high = interval
    return f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def show_changes(changes: Sequence[float], digits: int = 2) -> str:
    """Show the mean of paired differences with its 95 % interval by Student's t."""
    mean, n = statistics.mean(changes), len(changes)
    half = t.ppf(0.975, n - 1) * statistics.stdev(changes) / n**0.5
    return show_change(mean, (mean - half, mean + half), digits)


def show_time(seconds: float) -> str:
    return "{} min {} s".format(*divmod(round(seconds), 60))


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A folder with the photographs that the README's user has."""
    save_photos(tmp_path / "my_photos", 10, (20, 25), ".jpg")
    digits = load_digits()
    pixels = (digits.images * 15.9).astype(np.uint8)
    np.savez(
        tmp_path / "few.npz",
        train_images=pixels[:300],
        train_labels=digits.target[:300],
        test_images=pixels[300:400],
        test_labels=digits.target[300:400],
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fill_in(table: Path) -> None:
    """Write the label beside half of the images that were drawn, as the user does."""
    header, *lines = table.read_text().splitlines()
    labels = [f"{line}{line.partition('/')[0]}" for line in lines[::2]]
    table.write_text("\n".join([header, *labels]) + "\n")


def shortened(words: list[str]) -> list[str]:
    """Add options that make a command of the README small; of two equal options the last counts."""
    short = {
        "pretrain": "--training.epochs 1 --training.batch-size 8 --training.no-tensorboard "
        "--data.image-size 16 --encoder.name small",
        "evaluate": "--epochs 1 --seeds 1",
        "study": "--data few.npz --epochs 1 --seeds 1 --only none 10",
        "tune": "--data few.npz --epochs 1 --trials 1",
    }
    if "--resume" in words or words == ["study"]:
        return words
    return [*words, *shlex.split(short.get(words[0], ""))]


@pytest.mark.usefixtures("without_umap")
def test_commands_and_python_blocks(workplace, monkeypatch):
    # Empty: no browser opens the page here.
    monkeypatch.setattr("deepbregman.reporting.page.load_vega", str)
    choose = linear.choose_l2  # among one penalty: on such data the choice takes longest
    monkeypatch.setattr(linear, "choose_l2", lambda *a, **k: choose(*a, **{**k, "grid": (0.1,)}))
    for line in "".join(blocks("sh")).splitlines():
        program, *words = shlex.split(line)
        assert program == "deepbregman"
        main(shortened(words))
        if words[0] == "label" and "--labels" not in words:
            fill_in(workplace / "few.csv")
    width = deepbregman.load_encoder(workplace / "runs" / "mine").num_features
    with np.load(workplace / "features.npz") as arrays:
        assert arrays["train_features"].shape == (16, width)
    brief = '{"training.epochs": 1, "optimiser.warmup_epochs": 0.0}, data="few.npz"'
    for code in blocks("python"):
        code = code.replace('{"training.epochs": 100}', brief)
        scope: dict[str, object] = {}
        exec(compile(code.replace("if bank.is_full", "if True"), "README.md", "exec"), scope)
        if "rows" in scope:
            assert len(scope["rows"]) == 10  # kNN 6; linear 2, with top 1 and top 5 each
        if "features" in scope:
            assert scope["features"].shape == (4, width)


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in "".join(blocks("console")).splitlines():
        _, program, target = command.split()
        assert program == "make"
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_tree_names_files_that_exist():
    page = (ROOT / "docs" / "code.md").read_text()
    (tree,) = [block for block in blocks("text", page) if "src/deepbregman/" in block]
    source = Path(deepbregman.__file__).parent
    named = set(re.findall(r"\b([a-z0-9_]+\.py)\b", tree))
    assert named <= {path.name for path in source.rglob("*.py")}


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_quickstart_table_is_the_committed_record():
    for row in load("quickstart/result.json")["quickstart"]:
        cells = [f"{row['linear']:.1f}", f"{row['few_labels']:.1f}", f"{row['knn']:.1f}"]
        (line,) = [line for line in README.splitlines() if row["features"] in line and "│" in line]
        assert all(cell in line for cell in cells)


@pytest.mark.parametrize(("side", "larger"), [(32, "1.43"), (28, "1.25"), (24, "1.08")])
def test_how_much_larger_things_are_in_views(side, larger):
    """By the boxes that are drawn, which the page says how to turn into a number."""
    views = build_views(override(load_recipe("best"), {"views.relative_size": side / 32}).views, 32)
    drawn = views.draw(40_000, device="cpu", generator=torch.Generator().manual_seed(0))
    boxes = views.parametrise(drawn, torch.full((40_000, 2), 32))
    scale = (32 * 32 / (boxes.height * boxes.width)).sqrt().mean() * side / 32
    assert f"{scale:.2f}" == larger
    assert f"| {side} px | " in (log := (ROOT / "docs" / "log.md").read_text())
    assert f"| {larger} |" in log


def test_the_row_of_four_views_is_the_committed_record():
    record = load("studies/four-views-cpu/results.json")
    page = read_page("docs/log.md").split("results/studies/four-views-cpu")[1]
    found = [arm["metrics"]["linear, cached features"] for arm in record["arms"]]
    values = re.findall(r"\d+\.\d+ ± \d+\.\d+", page)[:4]
    assert values == [show_spread(f) for f in found]


METRICS = ("linear, cached features", "knn, cosine, k=20", "knn, cosine, k=200")


def test_the_search_of_equal_size_is_the_committed_record():
    folder = ROOT / "results/studies/equal-search-cpu"
    page = read_page("docs/log.md").split("were not of equal size in both arms")[1]
    for arm, words in (("simclr", "had {:.1f} linear"), ("best", "and {:.1f} with it")):
        with (folder / f"{arm}-trials.csv").open() as file:
            trials = [float(row["value"]) for row in csv.DictReader(file)][:26]
        assert len(trials) == 26
        assert words.format(max(trials)) in page
    record = json.loads((folder / "results.json").read_text())
    means = [show_spread(arm["metrics"][METRICS[0]]) for arm in record["arms"]]
    assert re.findall(r"\d+\.\d+ ± \d+\.\d+", page)[:2] == means
    found = [record["arms"][1]["difference"][metric] for metric in METRICS]
    written = [show_change(change["mean"], change["interval"]) for change in found]
    assert re.findall(r"[+-]\d\.\d+ \[[+-]\d\.\d+, [+-]\d\.\d+\]", page)[:3] == written


@pytest.mark.parametrize("study", ["comparison-cifar10", "comparison-cifar10-32px"])
def test_the_cifar_table_is_the_committed_record(study):
    record = load(f"studies/{study}/results.json")
    text = (ROOT / "docs/log.md").read_text()
    for metric in METRICS:
        for arm in record["arms"]:
            assert show_spread(arm["metrics"][metric]) in text
        found = record["arms"][1]["difference"][metric]
        assert show_change(found["mean"], found["interval"]) in text


def test_the_table_of_published_settings_is_the_committed_record():
    record = load("studies/published-settings/results.json")
    arms = {each["arm"]: each["metrics"] for each in record["arms"]}
    page = (ROOT / "docs/methods.md").read_text()
    for name in ("NNCLR", "SimSiam", "SwAV", "DINO"):
        found = arms[f"{name.lower()}-like"]
        knn, linear = (found[key]["mean"] for key in (METRICS[2], METRICS[0]))
        assert re.search(rf"\| {name} \| {knn:.2f} \| [\d.| ]+ \| {linear:.2f} \|\n", page)


ARMS_OF_THE_TEACHER = {
    "simclr": "`simclr`",
    "best": "`best`",
    "best-control": "control",
    "best-both": "both",
    "best-148": "`best`, 148 epochs",
}


@pytest.mark.parametrize(
    ("page", "pairs"),
    [
        ("README.md", ["best - simclr", "best - best-control", "best-both - best-control"]),
        (
            "docs/results.md",
            [
                *("best - simclr", "best-control - simclr", "best - best-control"),
                *("best-both - simclr", "best-both - best-control", "best-both - best"),
                "best-148 - simclr",
            ],
        ),
    ],
)
def test_the_table_of_the_teacher_is_the_committed_record(page, pairs):
    record = load("studies/comparison-teacher/results.json")
    lines = [line.replace("*", "") for line in (ROOT / page).read_text().splitlines()]
    found = {(cell["arm"], cell["seed"]): cell["metrics"] for cell in record["cells"]}
    arms = {arm["arm"]: arm["metrics"] for arm in record["arms"]}
    assert arms.keys() == ARMS_OF_THE_TEACHER.keys()
    for arm, metrics in arms.items():
        cells = " | ".join(show_spread(metrics[metric]) for metric in METRICS)
        start = f"| {ARMS_OF_THE_TEACHER[arm]}"
        assert any(line.startswith(start) and f"| {cells} |" in line for line in lines), arm
    for pair in pairs:
        ours, other = pair.split(" - ")
        cells = [
            show_changes([found[ours, s][metric] - found[other, s][metric] for s in range(3)])
            for metric in METRICS
        ]
        names = " - ".join(ARMS_OF_THE_TEACHER[name] for name in (ours, other))
        assert f"| {names} | {' | '.join(cells)} |" in lines, pair


def test_what_could_raise_the_summit_is_the_committed_record():
    arms = {arm["arm"]: arm for arm in load("studies/summit-arms/results.json")["arms"]}
    page = (ROOT / "docs/results.md").read_text()
    for name, row in (("base", "`cifar10-fast`"), ("sharper", "sharper"), ("rotation", "[turned")):
        means, changes = [], []
        for metric in METRICS[:2]:
            means.append(f"{arms[name]['metrics'][metric]['mean']:.2f}")
            change = arms[name]["difference"].get(metric)
            if change:
                changes.append(show_change(change["mean"], change["over_images"]))
        cells = " | ".join([*means, *changes]) + (" |" if changes else " | | |")
        assert re.search(rf"\| {re.escape(row)}[^|]*\| {re.escape(cells)}", page), name
    took = [arms[name]["cost"]["seconds"]["mean"] for name in ("rotation", "base")]
    assert f"for {took[0] / took[1]:.2f} times the time" in page
    gains = (f"{arms['rotation']['difference'][metric]['mean']:.1f}" for metric in METRICS[:2])
    expected = "gained {} points linear and {} points kNN after 50 epochs".format(*gains)
    methods = (ROOT / "docs/methods.md").read_text()
    assert expected in methods
    assert f"took {took[0] / took[1]:.2f} times as long" in methods


def test_the_arms_that_do_not_help_a_short_run_are_the_committed_record():
    log = (ROOT / "docs/log.md").read_text()
    for data, title in (("cifar10", "CIFAR-10"), ("ham10000", "HAM10000")):
        found: dict[str, dict[int, Record]] = {}
        for file in (ROOT / "results/auto/terms").glob(f"{data}-*.jsonl"):
            for row in map(json.loads, file.read_text().splitlines()):
                found.setdefault(row["arm"], {})[row["draw"]] = row
        auto = found.pop("auto")
        for arm, rows in found.items():
            cells = [title, arm, str(len(rows))]
            for metric in ("linear", "knn"):
                changes = [row[metric] - auto[draw][metric] for draw, row in rows.items()]
                cells.append(show_changes(changes))
            assert f"| {' | '.join(cells)} |\n" in log
            lengths = {row["config"]["training.epochs"] for row in rows.values()}
            assert lengths == ({7} if arm == "turned views" else {12})


def test_the_table_by_the_divergence_is_the_committed_record():
    with (ROOT / "results/studies/tables-digits/quantities.csv").open() as file:
        found = {(r["variant"], r["metric"], r["arm"]): r for r in csv.DictReader(file)}
    lines = (ROOT / "docs/log.md").read_text().splitlines()
    few, clusters = "5 labels per class, nearest", ", test split"
    for words, variant, metric in (
        ("cosine of features", "cosine, k=20", "top1"),
        ("cosine of embeddings", "cosine of embeddings, k=20", "top1"),
        ("divergence", "divergence, k=20", "top1"),
        ("cosine of features", "cosine", "mAP"),
        ("cosine of embeddings", "cosine of embeddings", "mAP"),
        ("divergence", "divergence", "mAP"),
        ("k-means of features", f"k-means, cosine features{clusters}", "NMI"),
        ("k-means of embeddings", f"k-means, cosine embeddings{clusters}", "NMI"),
        ("Bregman clustering of scores", f"Bregman, learned divergence{clusters}", "NMI"),
        ("nearest mean of features", f"{few} mean, cosine", "top1"),
        ("nearest mean of embeddings", f"{few} mean, cosine of embeddings", "top1"),
        ("nearest distribution by the divergence", f"{few} distribution, divergence", "top1"),
    ):
        rows = [found[variant, metric, arm] for arm in ("paper", "best-control", "best")]
        cells = [f"{float(r['mean']):.2f} ± {float(r['deviation']):.2f}" for r in rows]
        assert any(line.endswith(f"| {words} | {' | '.join(cells)} |") for line in lines), words


def test_what_labels_are_worth_is_the_committed_record():
    with (ROOT / "results/labelling/coverage.csv").open() as file:
        (row,) = (
            row
            for row in csv.DictReader(file)
            if (row["data"], row["labels"], row["suggested"]) == ("digits", "50", "0")
        )
    said = (
        f"it expected {row['expected %']} % of its labels to be right, and {row['right %']} % were"
    )
    assert (
        f"With 50 labels of the quickstart's digits, {said} (means of {row['draws']} draws"
        in README
    )


def test_the_study_of_tables_is_its_record():
    """The numbers in sentences; docs/tables.py writes those in tables."""
    quantities = collect_results(ROOT / "results/studies/tables")["quantities"]
    cifar10 = {(q["variant"], q["metric"]): q for q in quantities if q["data"] == "cifar10"}
    ham10000 = {(q["variant"], q["metric"]): q for q in quantities if q["data"] == "ham10000"}

    def compare(variant: str, metric: str, *names: str) -> Record:
        pairs = cifar10[variant, metric]["differences"]
        return next(pair for pair in pairs if (pair["arm"], pair["against"]) == names)

    def list_intervals(*names: str) -> list[list[float]]:
        pairs = [pair for quantity in ham10000.values() for pair in quantity["differences"]]
        chosen = [pair for pair in pairs if (pair["arm"], pair["against"]) == names]
        intervals = [pair["over_images"] or pair["interval"] for pair in chosen]
        return [interval for interval in intervals if interval is not None]

    page = read_page("docs/results.md")
    paper = compare("cached features", "top1", "paper", "paper-without")
    for text in (page, read_page("README.md")):
        assert f"{show_change(paper['mean'], paper['over_images'])} linear" in text
    seeds = []
    five = "five labels of each class"
    for variant, metric, name, unit in (
        ("k-means, cosine features, test split", "NMI", "clusters", "NMI in clusters"),
        ("cosine", "mAP", "retrieval", "mAP in retrieval"),
        ("5 labels per class, nearest mean, cosine", "top1", five, f"points with {five}"),
    ):
        gain = compare(variant, metric, "best", "simclr")
        above = compare(variant, metric, "best", "best-control")
        interval = show_change(above["mean"], above["interval"], digits=1)
        assert f"{interval} {unit}" in README
        assert f"{name} {interval}" in page
        seeds += [above["n"], gain["n"]]
    assert set(seeds) == {3}
    features = [
        pair["interval"]
        for (variant, _), quantity in cifar10.items()
        if quantity["protocol"] == "few"
        and ("divergence" not in variant or "bank" in variant)
        and "embeddings" not in variant
        for pair in quantity["differences"]
        if (pair["arm"], pair["against"]) == ("best", "best-control")
    ]
    assert f"all {len(features)} intervals are above zero" in page
    assert all(low > 0 for low, _ in features)
    gained = list_intervals("best", "simclr")
    higher, lower = sum(low > 0 for low, _ in gained), sum(high < 0 for _, high in gained)
    assert f"{len(gained)} intervals of `best` - `simclr`: {higher} are above" in page
    assert f"{higher} are above zero and {lower} below it" in page
    apart = list_intervals("best", "best-control")
    higher, lower = sum(low > 0 for low, _ in apart), sum(high < 0 for _, high in apart)
    words = f"{higher} are above zero and {lower} below it"
    assert f"Of {len(apart)} intervals of `best` - control, {words}" in page

    def describe_gap(variant: str) -> str:
        pair = compare(variant, "top1", "best", "best-control")
        return show_change(pair["mean"], pair["interval"], digits=1)

    blur, contrast = (
        [describe_gap(f"{by}, {name} 3") for by in ("linear", "kNN by cosine, k=20")]
        for name in ("blur", "contrast")
    )
    assert "(linear {}, kNN {})".format(*blur) in page
    assert f"worse in kNN ({contrast[1]}); linear" in page
    assert f"difference there ({contrast[0]})" in page
    noisy = ham10000["linear, noise 1", "top1"]["arms"]
    changes = [noisy["best"]["values"][s] - noisy["simclr"]["values"][s] for s in (0, 1)]
    assert "and linear {:+.1f} and {:+.1f} in the two seeds".format(*changes) in page
    unlike = list_intervals("paper", "paper-without")
    apart = sum(low > 0 or high < 0 for low, high in unlike)
    assert f"{apart} of {len(unlike)} intervals of the difference exclude zero" in page
    for arm, count in (("paper", 1), ("paper-without", 1), ("simclr", 3), ("best", 3)):
        assert cifar10["cached features", "top1"]["arms"][arm]["n"] == count


def test_both_comparisons_together_are_their_records():
    page, readme = read_page("docs/results.md"), read_page("README.md")
    for metric in METRICS:
        differences = []
        for study in ("comparison-cifar10", "comparison-cifar10-32px"):
            cells = load(f"studies/{study}/results.json")["cells"]
            found = {(cell["arm"], cell["seed"]): cell["metrics"][metric] for cell in cells}
            differences += [found["best", seed] - found["simclr", seed] for seed in range(3)]
        words = show_changes(differences)
        assert words in page
        assert metric != METRICS[0] or f"smooth form of this loss it is {words}" in readme


@pytest.mark.parametrize("folder", ["cifar10-race", "cifar10-race-105"])
def test_the_race_is_the_committed_record(folder):
    record = load(f"{folder}/result.json")
    rows, took = list_top1(record), show_time(record["pretrain"]["seconds"])
    lines = [line.replace("*", "") for line in (ROOT / "docs/log.md").read_text().splitlines()]
    epochs = record["pretrain"]["epoch"]
    for what, of, cost in (
        ("whole images", "", took),
        ("averaged over 8 crops, of 32 px", " of 8 crops", ""),
    ):
        linear, few, many = (
            f"{rows[variant]:.1f}"
            for variant in (f"cached features{of}", f"cosine{of}, k=20", f"cosine{of}, k=200")
        )
        cost = f" {cost} " if cost else " "
        assert f"| {what} | {epochs} |{cost}| {linear} | {few} | {many} |" in lines


def test_the_race_of_three_seeds_is_the_committed_record():
    folder = ROOT / "results/cifar10-race-50"
    walls = [line.split(",")[1] for line in (folder / "wall.csv").read_text().splitlines()[1:]]
    lines = plain_results()
    linears, tens, twenties = [], [], []
    for seed, wall in enumerate(walls):
        record = load(f"cifar10-race-50/seed{seed}/result.json")
        rows = list_top1(record)
        assert record["pretrain"]["seconds"] < float(wall)
        linears.append(rows["cached features"])
        tens.append(rows["cosine, k=10"])
        twenties.append(rows["cosine, k=20"])
        variants = ("cached features", "cosine, k=10", "cosine, k=20", "cosine, k=200")
        cells = " | ".join(f"{rows[variant]:.2f}" for variant in variants)
        took = show_time(float(wall))
        assert any(
            f"seed {seed} | 50 |" in line and f"| {took} | {cells} |" in line for line in lines
        )
    slowest = show_time(max(map(float, walls)))
    assert f"{statistics.mean(linears):.1f} % linear after {slowest} of pretraining" in README
    said = f"three seeds: {min(linears):.1f} to {max(linears):.1f}; kNN {statistics.mean(tens):.1f}"
    assert f"{said} with k = 10" in read_page("README.md")
    for values in (linears, twenties):
        spread = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
        assert f"| {spread} |" in "\n".join(lines)


def test_the_longest_runs_are_the_committed_records():
    records = [load(f"{name}/result.json") for name in ("cifar10-fast-400", "cifar10-summit")]
    shorter, longest = (list_top1(record) for record in records)
    took = [f"{show_time(record['pretrain']['seconds'])} of pretraining" for record in records]
    variants = ("cached features", "cosine, k=10", "cosine, k=20", "cosine, k=200")
    for record, rows, time in zip(records, (shorter, longest), took, strict=True):
        cells = [f" {rows[variant]:.2f} |" if variant in rows else " |" for variant in variants]
        row = f"| {record['pretrain']['epoch']} | | {time} |{''.join(cells)}"
        assert any(line.endswith(row) for line in plain_results()), row
    linear = longest["cached features"]
    assert f"`cifar10-summit` reaches {linear:.1f} % after {took[1]} (one seed; " in README
    text = " ".join(" ".join(plain_results()).split())
    assert f"{linear:.1f} % linear after 480 epochs, {took[1]}." in text
    assert f"(`evaluate --epochs 50`) has {longest['crop and flip']:.2f} %" in text
    low, high = binomtest(round(100 * linear), 10_000).proportion_ci(method="wilson")
    assert f"{100 * low:.1f} to {100 * high:.1f} % (95 % interval)" in text


BANK = "nearest class, divergence over a bank"


def test_what_turned_views_cost_is_the_committed_record():
    lines = plain_results()
    text, noisy = " ".join(" ".join(lines).split()), []
    for head, run, encoder in (
        ("`cifar10-fast`, 400 epochs", "cifar10-fast-400", "cifar10-fast-400"),
        ("`cifar10-summit`", "cifar10-summit", "cifar10-summit-encoder"),
    ):
        rows = load(f"{encoder}/result.json")["evaluations"]
        found = {(row["variant"], row["metric"]): row["value"] for row in rows}
        with_all = list_top1(load(f"{run}/result.json"))
        cells = [f"{with_all[variant]:.2f}" for variant in ("cached features", "cosine, k=20")]
        cells += [
            f"{found[variant, metric]:.1f}"
            for variant, metric in (
                ("1 label per class, nearest mean, cosine", "top1"),
                ("5 labels per class, nearest mean, cosine", "top1"),
                ("cosine", "mAP"),
                ("k-means, cosine features, test split", "NMI"),
            )
        ]
        assert any(line.startswith(f"| {head} | {' | '.join(cells)} |") for line in lines), cells
        noisy.append(
            [f"{found[f'linear, noise {strength}', 'top1']:.1f}" for strength in (1, 2, 3)]
        )
    without, turned = (f"{', '.join(values[:2])} and {values[2]} %" for values in noisy)
    assert f"falls to {without} at three strengths of noise without turned views" in text
    assert f"and to {turned} with them" in text


def test_what_the_bank_gains_after_the_longest_run_is_the_committed_record():
    rows = load("measures/cifar10-summit.json")["rows"]
    found = {
        (row["variant"], row["labels_per_class"]): row["mean"]
        for row in rows
        if "labels_per_class" in row
    }
    counts = (1, 2, 3, 5, 10, 20)
    centred = "nearest mean, cosine of centred features"
    gains = [found[BANK, count] - found[centred, count] for count in counts]
    words = "{:.1f}, {:.1f} and {:.1f} points above the centred nearest mean".format(*gains[:3])
    assert words in read_page("docs/results.md")
    assert max(gains[3:]) < 0


def test_the_header_of_the_paper_s_recipe_is_the_committed_record():
    found = []
    for arm in ("paper", "paper-without"):
        values = list_top1(load(f"studies/tables/runs/{arm}-cifar10-seed0/result.json"))
        found += [values["cached features"], values["cosine, k=20"]]
    header = " ".join(recipes()["paper"].replace("#", " ").split())
    assert "{:.2f} linear and {:.2f} kNN (k = 20)".format(*found[:2]) in header
    assert "without the divergence {:.2f} and {:.2f}".format(*found[2:]) in header


def plain_results() -> list[str]:
    return [line.replace("*", "") for line in (ROOT / "docs/results.md").read_text().splitlines()]


def test_the_table_of_the_parts_is_the_committed_record():
    record = load("studies/teacher/results.json")
    text = "\n".join(plain_results())
    for arm in record["arms"]:
        cells = " | ".join(show_mean(arm["metrics"][metric]) for metric in METRICS[:2])
        if arm["arm"] == "none":
            assert f"| SimCLR, no teacher | {cells} | | |" in text
            continue
        for metric in METRICS[:2]:
            difference = arm["difference"][metric]
            cells += f" | {show_change(difference['mean'], difference['over_images'])}"
        assert f" | {cells} |" in text
    assert {arm["metrics"][METRICS[0]]["n"] for arm in record["arms"]} == {2}
    words = f"has the {len(record['arms'])} arms, with two seeds each"
    assert words in read_page("docs/studies.md")
    cells = {(cell["arm"], cell["seed"]): cell["metrics"][METRICS[0]] for cell in record["cells"]}
    between = abs(cells["recipe", 0] - cells["recipe", 1])
    assert f"linear differs by {between:.1f} between the two seeds of `best`" in text
    arms = {arm["arm"]: arm["difference"] for arm in record["arms"] if arm["arm"] != "none"}
    kept, contrasted = (
        show_change(found["mean"], found["over_images"])
        for found in (arms[name][METRICS[1]] for name in ("momentum-none", "compared-by-contrast"))
    )
    words = f"Without momentum, the gain in kNN is {kept}. With contrast instead of matching it is "
    assert words + contrasted in text
    loss = -arms["subnetworks-learned"][METRICS[0]]["mean"]
    assert f"linear ends {loss:.1f} points below SimCLR" in text


def test_what_two_changes_did_in_each_seed_is_the_committed_record():
    record = load("studies/teacher/results.json")
    found = {(cell["arm"], cell["seed"]): cell["metrics"] for cell in record["cells"]}

    def compare(arm: str, other: str, metric: str) -> tuple[float, float]:
        first, second = (found[arm, s][metric] - found[other, s][metric] for s in (0, 1))
        return first, second

    linear, knn = (compare("term-both", "term-infonce-instead", m) for m in METRICS[:2])
    words = "{:+.2f} and {:+.2f} linear, {:+.2f} and {:+.2f} kNN".format(*linear, *knn)
    text = "\n".join(plain_results())
    assert f"two seeds show none ({words})" in text
    in_linear, in_knn = (compare("recipe", "form-hard", metric) for metric in METRICS[:2])
    words = "by {:.2f} and {:.2f} points in kNN, and by {:.2f} and {:.2f} linear"
    words = words.format(*in_knn, *in_linear)
    assert f"The hard form is below it in both seeds: {words}" in text
    losses = compare("recipe", "teacher-view-strong", METRICS[1])
    words = "{:.2f} and {:.2f} in two seeds".format(*losses)
    assert f"With a strong view for the teacher, kNN loses {words}" in text


def test_the_speed_of_four_workers_is_the_committed_record():
    """Four runs shared a GPU; the last epoch of one was alone."""

    def read(arm: str) -> list[float]:
        folder = ROOT / f"results/studies/teacher/runs/{arm}-seed1"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["views_per_second"] for line in lines]

    arms = ("momentum-none", "momentum-0.996", "momentum-0.99-to-1", "subnetworks-learned")
    together = sum(statistics.median(read(arm)) for arm in arms)
    alone = read(arms[-1])[-1]
    page = " ".join(read_page("docs/research.md").split())
    said = "Four workers on an H200 trained at {:,} views a second together, and one of them, "
    said += "alone in its last epoch, at {:,}"
    assert said.format(*(round(speed / 1e4) * 10_000 for speed in (together, alone))) in page


def test_what_may_be_better_than_best_is_the_records():
    record = load("studies/teacher-holdout/results.json")
    assert (record["evaluate_on"], record["epochs"]) == ("holdout", 60)
    found = {(cell["arm"], cell["seed"]): cell["metrics"] for cell in record["cells"]}
    lines = plain_results()
    for words, arm in (
        ("T_s 0.1, T_t 0.07", "t_s-t_t-0.1-0.07"),
        ("two weak views, each a target", "teacher-view-two-as-points"),
    ):
        gains = [
            [f"{found[arm, seed][m] - found['recipe', seed][m]:+.2f}" for seed in (0, 1)]
            for m in METRICS[:2]
        ]
        assert f"  | {words} | {' | '.join(', '.join(pair) for pair in gains)} |" in lines
    trials = {trial["name"]: trial for trial in load_lines("cifar10-search/teacher-trials.jsonl")}
    pairs = (("nt+rel tt.07", "ts.2 tt.1"), ("tt.07 seed1", "nt+rel s1"))
    knn, linear = (
        ", ".join(f"{trials[new][key] - trials[old][key]:+.2f}" for new, old in pairs)
        for key in ("knn", "lin")
    )
    page = " ".join(" ".join(lines).split())
    assert f"sharper targets in kNN ({knn}), but not in linear ({linear})" in page


def test_why_best_has_one_term_is_the_records():
    record = load("studies/best-on-holdout/results.json")
    assert (record["evaluate_on"], record["epochs"]) == ("holdout", 200)
    found = {(cell["arm"], cell["seed"]): cell["metrics"] for cell in record["cells"]}
    linear, knn = (
        [found["best-both", seed][m] - found["best", seed][m] for seed in (0, 1)]
        for m in METRICS[:2]
    )
    words = "by {:.2f} and {:.2f} points linear, and by {:.2f} and {:.2f} in kNN (k = 20; "
    assert words.format(*linear, *knn) in " ".join(" ".join(plain_results()).split())
    rows: dict[tuple[str, int], dict[tuple[str, ...], float]] = {}
    for arm, seed in itertools.product(("best", "best-both", "best-control"), (0, 1)):
        folder = f"studies/both-cpu/runs/{arm}-cifar8k-seed{seed}"
        rows[arm, seed] = {
            (row["protocol"], row["variant"]): row["value"]
            for row in load(f"{folder}/result.json")["evaluations"]
            if row["metric"] in ("top1", "mAP", "NMI")
        }
    for seed in (0, 1):
        best, both, control = (rows[f"best{end}", seed] for end in ("", "-both", "-control"))
        assert len(best) > 50
        assert [key for key, value in best.items() if both[key] >= value] == []
        few = {key: value for key, value in best.items() if key[0] == "few"}
        assert [key for key, value in few.items() if control[key] >= value] == []


def test_trials_of_the_teacher_are_their_records():
    """With each optimiser beside SimCLR with the same one."""
    trials = {}
    for name in ("teacher", "fifth"):
        lines = load_lines(f"cifar10-search/{name}-trials.jsonl")
        trials |= {trial["name"]: trial["lin"] for trial in lines}
    page = " ".join(" ".join(plain_results()).split())
    alone, with_muon = trials["nt"], trials["simclr muon .03"]
    same, lower = (trials[name] - with_muon for name in ("muon .03", "muon .015"))
    seeds = (trials["ts.2 tt.1"] - alone, trials["nt+rel s1"] - trials["nt seed1"])
    assert f"Muon alone adds {with_muon - alone:.1f} points linear to SimCLR" in page
    assert f"then adds {same:.1f} ({lower:.1f} at half the rate" in page
    assert "with SGD it adds {:.1f} and {:.1f} in two seeds".format(*seeds) in page
    pairs = (
        ("nt+key+rel", "nt+key"),
        ("nt+key+rel s1", "nt+key s1"),
        ("150 nt+key+rel", "150 nt+key"),
    )
    gaps = (trials[both] - trials[control] for both, control in pairs)
    said = (
        "after 60 epochs ({:+.2f} and {:+.2f} linear in two seeds) and above it after 150 ({:+.2f},"
    )
    assert said.format(*gaps) in page
    for pair in (("ts.2 tt.1", "nt+rel ema0"), ("nt+key", "nt+key ema0")):
        assert "from {:.1f} to {:.1f} with".format(*(trials[name] for name in pair)) in page


GAINING = {
    "simsiam": "SimSiam",
    "nnclr": "NNCLR",
    "cpc": "CPC",
    "swav": "SwAV",
    "simclr-v2": "SimCLR v2",
    "cmc": "CMC",
    "wmse": "W-MSE",
    "simclr": "SimCLR",
    "instdisc": "InstDisc",
    "pirl": "PIRL",
    "amdim": "AMDIM",
    "vicreg": "VICReg",
}
"""Methods without a teacher that gain by the divergence, as pages name them."""
TAUGHT = {
    "moco-v2": "MoCo v2",
    "moco-v2plus": "MoCo v2+",
    "moco-v3": "MoCo v3",
    "byol": "BYOL",
    "dino": "DINO",
    "ssl-hsic": "SSL-HSIC",
    "ressl": "ReSSL",
    "sce": "SCE",
}


def test_the_gains_of_methods_in_sentences_are_the_record():
    """The table itself is written by docs/tables.py."""
    found = {
        arm["arm"].removesuffix("+divergence"): arm["difference"][METRICS[0]]
        for arm in load("studies/methods/results.json")["arms"]
        if arm["series"] == "with divergence"
    }
    assert found.keys() == {*GAINING, *TAUGHT, "barlow-twins", "dim"}
    gains = {method: pair["mean"] + 1e-9 for method, pair in found.items()}  # 1.45 is 1.5
    intervals = {m: pair["over_images"] or pair["interval"] for m, pair in found.items()}
    methods, results, readme = map(read_page, ("docs/methods.md", "docs/results.md", "README.md"))
    assert all(intervals[method][0] > 0.0 for method in GAINING)
    for method, name in GAINING.items():
        assert f"{name} {gains[method]:.1f}" in methods
    least, most = (choose(GAINING, key=gains.__getitem__) for choose in (min, max))
    said = f"twelve gain {gains[least]:.1f} ({GAINING[least]}) to {gains[most]:.1f} points linear"
    taught = f"Methods with a teacher gain {max(gains[m] for m in TAUGHT):.1f} at most"
    for page in (results, readme):
        assert f"{said} ({GAINING[most]})" in page
        assert taught in page
    assert f"Deep InfoMax loses {-gains['dim']:.1f}" in results
    sure = sorted((m for m in TAUGHT if intervals[m][0] > 0.0), key=gains.__getitem__)
    first, *others = (f"{TAUGHT[method]} {gains[method]:.1f}" for method in reversed(sure))
    gaining = first.replace(f"{TAUGHT[sure[-1]]} ", f"{TAUGHT[sure[-1]]} gains ")
    assert f"{', '.join([gaining, *others[:-1]])} and {others[-1]};" in results
    low, high = intervals["barlow-twins"]
    assert low < 0.0 < high


def test_the_control_of_simclr_in_a_sentence_is_the_record():
    found = load("studies/methods/results.json")["arms"]
    (control,) = [arm for arm in found if arm["series"] == "control"]  # the sentence is of SimCLR
    linear, knn = (control["metrics"][metric]["mean"] for metric in (METRICS[0], METRICS[2]))
    page = read_page("docs/methods.md")
    assert f"It has {linear:.1f} linear and {knn:.1f} kNN (k = 200, one seed)" in page


def test_what_seeds_and_settings_change_about_the_gains_of_methods_is_the_record():
    found = [
        arm["difference"][METRICS[0]]
        for arm in load("studies/methods/results.json")["arms"]
        if arm["series"] == "with divergence"
    ]
    spread = [pair["deviation"] for pair in found if pair["n"] > 1]
    assert (len(found), len(spread)) == (22, 22 - 14)
    with (ROOT / "results/cifar10-search/methods-before.csv").open() as file:
        before = {row["arm"]: float(row[METRICS[0]]) for row in csv.DictReader(file)}
    gain = before["nnclr+divergence"] - before["nnclr"]
    for name in ("docs/results.md", "docs/methods.md"):
        page = read_page(name)
        assert f"varies by {min(spread):.1f} to {max(spread):.1f} between seeds" in page
    assert f"gained {gain:.1f} points instead of" in page
    assert f"({before['nnclr']:.1f} to {before['nnclr+divergence']:.1f}," in page


def test_what_published_settings_change_is_the_record():
    def read(name):
        with (ROOT / "results/cifar10-search" / name).open() as file:
            return {row["arm"]: row for row in csv.DictReader(file)}

    study = load("studies/methods/results.json")
    recipes = {arm["arm"]: arm["metrics"] for arm in study["arms"]}
    page = read_page("docs/methods.md")
    old = read("methods-before.csv")["dino"]
    linear, knn = (recipes["dino"][m]["mean"] - float(old[m]) for m in (METRICS[0], METRICS[2]))
    assert f"it has {linear:.1f} points more than before, and {knn:.1f} in kNN" in page
    rows = read("published-settings-100-epochs.csv")
    found = {arm: float(row[METRICS[0]]) for arm, row in rows.items()}
    names = {"nnclr": "NNCLR | 0.36", "simsiam": "SimSiam | 0.18", "swav": "SwAV | 0.0012"}
    less = [recipes[name][METRICS[0]]["mean"] - found[name] for name in names]
    assert (
        f"are {min(less):.1f} to {max(less):.1f} points worse alone than with the recipes" in page
    )
    for name, words in names.items():
        assert f"| {words} | {found[name]:.1f} | {found[f'{name}+divergence']:.1f} |" in page


def test_what_methods_lack_to_published_figures_is_the_record():
    study = load("studies/methods/results.json")
    here = {arm["arm"]: arm["metrics"] for arm in study["arms"]}
    published = {each.series: each.values for each in find_study("methods").published}
    page = (ROOT / "docs/methods.md").read_text().split("### Which methods are below")[1]
    rows = re.findall(
        r"^\| ([\w +-]+?)(?: \(.*)? \| ([-+.\d]*) ?\| (-\d\.\d) \|$", page, re.MULTILINE
    )
    recipes = {
        TAUGHT.get(r, GAINING.get(r, "Barlow Twins")): r
        for r in (*TAUGHT, *GAINING, "barlow-twins")
    }
    assert len(rows) == len(published["linear, 1000 epochs"])
    for name, knn, top1 in rows:
        recipe = recipes[name]
        found = here[recipe]
        change = found[METRICS[0]]["mean"] - published["linear, 1000 epochs"][recipe]
        assert float(top1) == pytest.approx(change, abs=0.0501)
        if knn and recipe != "simclr":  # whose 200 epochs were run
            change = found[METRICS[2]]["mean"] + 2.52 - published["kNN, 200 epochs"][recipe]
            assert float(knn) == pytest.approx(change, abs=0.0501)


def test_the_tables_of_measures_are_the_committed_records():
    lines = plain_results()
    record = load("cifar10-fast-400/result.json")
    found = {(row["variant"], row["metric"]): row["value"] for row in record["evaluations"]}
    few, clusters = "10 labels per class, nearest", ", test split"
    for metric, *variants in (
        ("top1", "cosine, k=20", "cosine of embeddings, k=20", "divergence, k=20"),
        ("mAP", "cosine", "cosine of embeddings", "divergence"),
        (
            "NMI",
            f"k-means, cosine features{clusters}",
            f"k-means, cosine embeddings{clusters}",
            f"Bregman, learned divergence{clusters}",
        ),
        (
            "top1",
            f"{few} mean, cosine",
            f"{few} mean, cosine of embeddings",
            f"{few} distribution, divergence",
        ),
    ):
        cells = " | ".join(f"{found[variant, metric]:.1f}" for variant in variants)
        assert any(line.endswith(f" | {cells} |") for line in lines), cells
    rows = load("measures/cifar10-fast-400.json")["rows"]
    for words, variant in (
        ("nearest mean by cosine, centred", "nearest mean, cosine of centred features"),
        ("nearest class by the divergence over a bank", BANK),
        ("`label` without the bank", "without the bank"),
        ("`label`", "with the bank"),
    ):
        chosen = [row for row in rows if row["variant"] == variant and "labels_per_class" in row]
        cells = " | ".join(show_spread(row, digits=1) for row in chosen)
        empty = "| " * (6 - len(chosen))
        assert f"| {words} {empty}| {cells} |" in lines
    bank, cosine = (
        {row["metric"]: row for row in rows if (row["protocol"], row["variant"]) == ("cluster", by)}
        for by in ("divergence over a bank", "cosine")
    )
    page = " ".join(lines)
    assert f"same NMI ({bank['NMI']['mean']:.1f})" in page
    assert f"({bank['ARI']['mean']:.1f} instead of {cosine['ARI']['mean']:.1f}; ten runs" in page
    assert bank["ARI"]["n"] == cosine["ARI"]["n"] == 10


CHANGED = {
    "lr2": "learning rate 2",
    "lr0.5": "learning rate 0.5",
    "tau0.1": "tau 0.1",
    "tau0.3": "tau 0.3",
    "tau0.1-lr2": "tau 0.1 and learning rate 2",
    "wd1e-3": "weight decay 1e-3",
    "wd2e-4": "weight decay 2e-4",
    "adam": "Adam, 1e-3",
    "K10": "K = 10",
    "views": 'first view against second only (`pairs = "views"`)',
    "usage": "usage bonus 0.1",
    "sigma": "Gaussian, sigma 1.5, tau_div 0.1",
    "normz": "normalised z",
    "standard": "scores normalised without a learned gain",
}


def test_the_table_of_the_search_is_the_committed_record():
    lines = (ROOT / "docs/log.md").read_text().splitlines()
    trials = {line["name"]: line for line in load_lines("cifar10-search/fourth-trials.jsonl")}

    def cells(arm: str, *names: str) -> str:
        found = [trials[f"{arm}-24px-{n}"] for n in names if f"{arm}-24px-{n}" in trials]
        if not found:
            return "| |"
        knn, linear = (", ".join(f"{f[key]:.1f}" for f in found) for key in ("knn10", "linear"))
        return f" {knn} | {linear} |"

    twice = ("base", "seed1")
    assert f"| nothing, seeds 0 and 1 |{cells('s', *twice)}{cells('d', *twice)}" in lines
    for name, words in CHANGED.items():
        row = f"| {words} |{cells('s', name)}{cells('d', name)}".replace("|| |", "| | |")
        assert row in lines, row
    assert {name.split("px-")[1] for name in trials} == {*CHANGED, *twice}


def test_the_table_of_subnetworks_is_the_committed_record():
    page = (ROOT / "docs" / "studies.md").read_text()
    results = load("studies/kappa-cifar10/results.json")
    linear = "linear, cached features"
    checked = 0
    for arm in results["arms"]:
        name = "none (SimCLR)" if arm["arm"] == "none" else arm["arm"]
        found = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        if found:
            cells = [cell.strip() for cell in found[0].split("|")]
            assert cells[2] == show_spread(arm["metrics"][linear], digits=1)
            if arm["arm"] != "none":
                change = arm["difference"][linear]
                assert cells[3] == f"{change['mean']:+.1f} ± {change['deviation']:.1f}"
            checked += 1
    assert checked == 8


def test_kernels_rings_and_the_plane_are_their_records():
    """Numbers in sentences of docs/studies.md."""
    page = read_page("docs/studies.md")
    arms = {arm["arm"]: arm for arm in load("studies/psi-cifar10/results.json")["arms"]}
    names = {"gaussian": "Gaussian", "inverse": "1/(1+D)", "sqrt": "sqrt(1-D)", "arccot": "arccot"}
    assert arms.keys() == {"none", "linear", *names}
    names |= {"linear": "1-D/max D", "none": "without the divergence"}
    apart = []
    for arm, name in names.items():
        found, change = arms[arm]["metrics"][METRICS[0]], arms[arm].get("difference")
        assert f"| {name} | {show_spread(found, digits=1)} |" in page
        low, high = change[METRICS[0]]["interval"] if change else (0.0, 0.0)
        if low > 0.0 or high < 0.0:
            apart.append(f"{name} {show_change(change[METRICS[0]]['mean'], (low, high))}")
    assert f"two exclude zero, both below it: {' and '.join(apart)}." in page

    def read(name: str) -> dict[tuple[str, str], dict[str, float]]:
        rows = load(f"studies/{name}/results.json")["rows"]
        return {(row["arm"], row["metric"]): row for row in rows}

    rings, plane, seen = read("distributions"), read("divergence-2d"), read("tsne")
    for arm, words, digits in (
        ("moment, contrastive", "divergence, moment form, contrastive loss", 2),
        ("max, contrastive", "divergence, max form, contrastive loss", 3),
        ("smooth, contrastive", "divergence, smooth form, contrastive loss", 3),
        ("Euclidean, means", "Euclidean distances of means", 2),
        ("points, contrastive", "single points, contrastive loss", 2),
        ("points, triplet", "single points, triplet loss", 2),
    ):
        row = rings[arm, "ARI"]
        assert f"{words} | {row['mean']:.{digits}f} ± {row['deviation']:.2f} |" in page
    for arm, form in (("max", "max form"), ("smooth", "smooth form")):
        assert f"{plane[f'learned, {arm} form', 'AUC']['mean']:.3f} with the {form}" in page
    assert f"{plane['squared Euclidean', 'AUC']['mean']:.3f} with squared Euclidean" in page
    zero = 100 * plane["learned, max form", "same class at zero"]["mean"]
    assert f"{zero:.1f} % of the pairs of one class have divergence exactly zero" in page
    clusters = seen["cifar10-summit", "k-means NMI"]
    assert f"NMI of {clusters['mean']:.3f} ± {clusters['deviation']:.3f}" in page
    assert f"silhouette is {seen['cifar10-summit', 'silhouette']['mean']:.3f}" in page
    assert f"right for {seen['cifar10-summit', 'kNN, k=20, %']['mean']:.2f} %" in page


def test_the_map_of_the_paper_names_studies_and_records_that_exist():
    page = (ROOT / "docs" / "paper.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert target.startswith("https") or (ROOT / "docs" / target).resolve().exists(), target
    named = re.findall(r"^\$ deepbregman study ([\w-]+)", page, flags=re.MULTILINE)
    assert len(named) >= 8
    for name in named:
        assert name in SUBCOMMANDS or find_study(name).name == name


def test_the_citation_has_the_version_of_the_package():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {deepbregman.__version__}\n" in text


def test_the_paper_is_cited_by_one_address():
    address = "https://arxiv.org/abs/2109.07455"
    for name in ("README.md", "CITATION.cff", "docs/paper.md"):
        found = re.findall(r"https://arxiv\.org/abs/[\w.]+", (ROOT / name).read_text())
        assert set(found) == {address}, name
    assert "@article{" in (ROOT / "docs" / "paper.md").read_text()


def test_what_the_bank_adds_after_100_epochs_is_the_committed_record():
    """To the nearest mean of centred features, seed by seed, for 1 to 20 labels of each class."""

    def compare(arm: str, number: str) -> str:
        differences = []
        for seed in range(3):
            found = list_top1(load(f"studies/tables/runs/{arm}-cifar10-seed{seed}/result.json"))
            bank = found[f"{number} per class, nearest class, divergence over a bank"]
            mean = found[f"{number} per class, nearest mean, cosine of centred features"]
            differences.append(bank - mean)
        return show_changes(differences, digits=1)

    page = read_page("docs/results.md")
    numbers = ("1 label", *(f"{number} labels" for number in (2, 5, 10, 20)))
    assert f"| `best` | {' | '.join(compare('best', number) for number in numbers)} |" in page
    assert f"`simclr` gains with one label only ({compare('simclr', '1 label')})." in page


def test_how_an_encoder_of_other_images_does_is_the_committed_record():
    """It is compared by a linear classifier, without and with weighted classes."""
    rows = (("cached features", "top1"), ("cached features", "balanced"))
    rows += (("cached features, weighted classes", "balanced"),)

    def read(folder: str) -> list[Record]:
        found = load(f"{folder}/result.json")["evaluations"]
        linear = [row for row in found if row["protocol"] == "linear"]
        mine = {(r["variant"], r["metric"]): r for r in linear if r["data"] == "ham10000.npz"}
        return [mine[row] for row in rows]

    other = read("cifar10-summit-encoder")
    trained = [read(f"studies/tables/runs/best-ham10000-seed{seed}") for seed in (0, 1)]
    there = []
    for pair in zip(*trained, strict=True):
        values = [row["value"] for row in pair]
        mean, deviation = statistics.mean(values), statistics.stdev(values)
        there.append(f"{mean:.1f} ± {deviation:.1f}")
    text = " ".join(" ".join(plain_results()).split())
    values = [f"{row['value']:.1f}" for row in other]
    pixels = [f"{row['raw_pixels']:.1f}" for row in other]
    again = [f"{row['raw_pixels']:.1f}" for row in trained[1]]
    assert again[:2] == pixels[:2]
    said = "On HAM10000 it has {} linear (balanced {}, and {} with weighted classes)"
    assert said.format(*values) in text
    assert "has {} ({} and {})".format(*there) in text
    said = "Raw pixels have {} ({}, and with weighted classes {} and {} in two seeds)"
    assert said.format(*pixels, again[2]) in text


DIAGNOSTICS = {
    "uniformity": "uniformity",
    "effective rank": "effective_rank",
    "spread": "spread",
    "number of epochs": "epoch",
    "alignment": "alignment",
    "neighbour stability": "neighbour_stability",
    "RankMe": "rankme",
    "alpha-ReQ": "alpha_req",
    "LiDAR": "lidar",
}


def test_the_tables_of_health_are_the_committed_records():
    page = (ROOT / "docs/health.md").read_text()
    tables = re.findall(r"^\| diagnostic \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, flags=re.MULTILINE)

    def read(name: str) -> list[dict[str, str]]:
        with (ROOT / f"results/health/{name}.csv").open() as file:
            return list(csv.DictReader(file))

    def correlate(rows: list[dict[str, str]], column: str, measure: str) -> tuple[float, ...]:
        pairs = [(float(row[column]), float(row[measure])) for row in rows if row[column]]
        return (*spearmanr(*zip(*pairs, strict=True)), len(pairs))

    every = read("cifar10")
    short = [row for row in every if row["epoch"] == "20"]
    ham, again = read("ham10000"), read("ham10000-seed1")
    places = [
        [(every, "linear"), (short, "linear")],
        [(read("digits"), "linear")],
        [(ham, "balanced"), (ham, "linear")],
        [(read("cifar10-small"), "linear")],
        [(read("cifar10-small-seed1"), "linear"), (again, "balanced"), (again, "linear")],
    ]
    for table, measures in zip(tables, places, strict=True):
        for line in table.replace("*", "").splitlines():
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            numbers = [
                float(number) for number in re.findall(r"[-+]?\d[\d.]*(?:e-\d+)?", " ".join(cells))
            ]
            for rows, measure in measures:
                if (rows, name) == (short, "number of epochs"):
                    continue
                found, p, n = correlate(rows, DIAGNOSTICS[name], measure)
                assert numbers.pop(0) == pytest.approx(found, abs=0.00501), (name, measure)
                assert numbers.pop(0) == pytest.approx(p, rel=0.34), (name, measure)
            assert numbers in ([], [n]), name
    runs = sorted((ROOT / "results/studies/teacher/runs").iterdir())
    ends = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in runs]
    results = [json.loads((run / "result.json").read_text())["evaluations"] for run in runs]
    linear = [
        next(row["value"] for row in rows if (row["protocol"], row["metric"]) == ("linear", "top1"))
        for rows in results
    ]
    rank, uniform = (
        spearmanr([end[name] for end in ends], linear) for name in ("effective_rank", "uniformity")
    )
    said = f"effective rank has {rank[0]:+.2f} (p = {rank[1]:.0e})"
    assert f"{said}, and uniformity says nothing ({uniform[0]:+.2f})" in page
    assert f"The {len(runs)} runs of [`studies/teacher`]" in page


def test_the_search_for_sigma_and_lambda_is_the_committed_record():
    folder = ROOT / "results/studies/sigma-lambda-cpu"
    with (folder / "trials.csv").open() as file:
        trials = [
            [float(row[name]) for name in ("value", "divergence.sigma", "objective.weight")]
            for row in csv.DictReader(file)
        ]
    page = " ".join(read_page("docs/studies.md").replace("*", "").split())
    corner = sorted(value for value, sigma, weight in trials if sigma < 0.5 and weight < 1)
    others = [value for value, sigma, weight in trials if not (sigma < 0.5 and weight < 1)]
    mean, deviation = statistics.mean(others), statistics.stdev(others)
    said = f"{len(others)} of the {len(trials)} trials have {min(others):.1f} to {max(others):.1f}"
    assert f"{said} % ({mean:.1f} ± {deviation:.1f})" in page
    *first, last = (f"{value:.1f}" for value in corner)
    assert f"sigma below 0.5 and lambda below 1 have {', '.join(first)} and {last} %" in page
    ends = [
        sum(weight < 0.1001 for *_, weight in trials),
        sum(weight > 19 for *_, weight in trials),
    ]
    assert "with {} trials at 0.1 and {} at 20".format(*ends) in page
    best, *next_two = sorted(trials, reverse=True)[:3]
    assert f"The best trial has sigma {best[1]:.1f} and lambda {best[2]:.1f}" in page
    assert all(best[0] - value <= 0.1 for value, _, _ in next_two)
    cells = load("studies/sigma-lambda-reference/results.json")["cells"]
    found = {cell["arm"]: cell["metrics"][METRICS[0]] for cell in cells}
    said = "Without the divergence it is {:.1f}, and with the paper's values (sigma 1.5, lambda 5) "
    assert (said + "{:.1f}").format(found["paper-without"], found["paper"]) in page


def test_what_is_said_of_100_classes_is_the_committed_record():
    page, found = " ".join(" ".join(plain_results()).split()), {}
    for arm, seed in (("simclr", 0), ("simclr", 1), ("best-control", 0), ("best", 0)):
        rows = load(f"studies/tables-cpu/runs/{arm}-tiny10k-seed{seed}/result.json")["evaluations"]
        found[arm, seed] = {row["variant"]: row for row in rows if row["metric"] == "top1"}
    values = {arm: rows["linear, noise 1"]["value"] for arm, rows in found.items()}
    said = "linear accuracy is {:.1f} for the control, {:.1f} for `best`, and {:.1f} and {:.1f} for"
    order = (("best-control", 0), ("best", 0), ("simclr", 0), ("simclr", 1))
    assert said.format(*(values[arm] for arm in order)) in page
    kinds = [f"{kind} {strength}" for kind in ("noise", "JPEG") for strength in (1, 2, 3)]
    for kind in (*kinds, "blur 2", "blur 3"):
        known = [found[arm][f"linear, {kind}"]["value"] for arm in order]
        assert known[0] > known[1] > max(known[2:]), kind
    for kind in ("contrast 1", "contrast 2", "contrast 3"):
        known = [found[arm][f"linear, {kind}"]["value"] for arm in order]
        assert known[2] > max(known[:2]), kind
    pixels = found["best", 0]["cached features"]["raw_pixels"]
    assert f"Raw pixels have {pixels:.1f} linear" in page


def test_what_is_lost_without_augmentations_is_the_committed_record():
    record = load("studies/augmentations-cpu/results.json")
    arms = {arm["arm"]: show_spread(arm["metrics"][METRICS[0]]) for arm in record["arms"]}
    found = {(c["arm"], c["seed"]): c["metrics"][METRICS[0]] for c in record["cells"]}
    page = read_page("docs/studies.md")
    rows = {
        "all": "all augmentations",
        "no-greyscale": "no greyscale",
        "no-colour": "no colour (no greyscale, no jitter)",
        "crop": "crops only (also no flip)",
        "no-crop": "all but crops",
    }
    for name, words in rows.items():
        assert f"| {words} | {arms[f'simclr-{name}']} | {arms[f'divergence-{name}']} |" in page
        if name != "all":
            losses = {
                (series, seed): found[f"{series}-all", seed] - found[f"{series}-{name}", seed]
                for series in ("simclr", "divergence")
                for seed in (0, 1)
            }
            changes = [losses["divergence", seed] - losses["simclr", seed] for seed in (0, 1)]
            assert changes[0] > 0 > changes[1], name
    assert len(arms) == 2 * len(rows)
    said = "linear loses more with the divergence in seed 0, and less in seed 1"
    assert said in " ".join(page.split())


def test_smaller_views_on_a_cpu_are_the_committed_record():
    record = load("studies/view-size-cpu/results.json")
    found = {(c["arm"], c["seed"]): c["metrics"][METRICS[0]] for c in record["cells"]}
    changes = [found["simclr-0.5", seed] - found["simclr-1.0", seed] for seed in range(3)]
    page = (ROOT / "docs/studies.md").read_text()
    assert f"is {show_changes(changes, digits=1)}, paired by seed" in page
    for arm in record["arms"]:
        assert f" {show_spread(arm['metrics'][METRICS[0]])} |" in page


def test_the_table_of_auto_is_the_committed_records():
    page = (ROOT / "docs/guide.md").read_text()

    def read(*names: str, measure: str = "linear") -> dict[str, float]:
        """Return the mean of each arm over samples of images."""
        values: dict[str, list[float]] = {}
        for name in names:
            for row in load_lines(f"auto/{name}.jsonl"):
                values.setdefault(row["arm"], []).append(row[measure])
        return {
            arm: statistics.mean(found) for arm, found in values.items() if len(found) == len(names)
        }

    third, thrice, batch = (
        "a third of the learning rate",
        "three times the learning rate",
        "twice the batch",
    )
    gpu, ham, without = (
        "gpu-100/cifar10-20000-seed0",
        "gpu-ham/ham10000-7980-seed0",
        "no divergence (SimCLR)",
    )
    short = [
        f"ham/ham10000-2000-{name}"
        for name in ("seed0", "draw1-seed1", "draw2-seed2", "draw3-seed3")
    ]
    few = [f"few-25/cifar10-300-draw{draw}-seed{draw}" for draw in (1, 2)]
    for found, arms in (
        (read(gpu), ("auto", without, third, thrice, batch)),
        (read(ham), ("auto", third, "best", without, batch, thrice)),
        (read(ham, measure="balanced"), ("auto", third, "best", without, batch, thrice)),
        (read(*short), ("auto", third, batch)),
        (read(*short, measure="balanced"), ("auto", third, batch)),
        (read(*few), ("auto",)),
    ):
        numbers = [f"{found[arm]:.1f}" for arm in arms]
        rows = ["".join(line.split("|")[3:]) for line in page.splitlines() if line[:2] == "| "]
        assert any(numbers == re.findall(r"\d+\.\d", row)[: len(numbers)] for row in rows), numbers
    brief = read("gpu/cifar10-20000-seed0")
    assert f"no divergence was {brief[without] - brief['auto']:.1f} points ahead" in page
    tried: dict[float, list[float]] = {}
    for row in load_lines("auto/rates.jsonl"):
        if (row["images"], row["epochs"]) == (300, 25) and row["draw"] < 3:
            tried.setdefault(row["learning_rate"], []).append(row["linear"])
    best = max(statistics.mean(values) for values in tried.values() if len(values) == 2)
    assert f"the best of three other learning rates {best:.1f} |" in page
    assert f"other settings were up to {best - read(*few)['auto']:.1f} points ahead" in page


def test_what_an_epoch_of_best_costs_is_the_committed_record():
    """By the fastest epochs, in which no other run had a part of the GPU."""
    speeds = {}
    for arm in ("none", "recipe", "term-infonce-instead"):
        epochs = load_lines(f"studies/teacher/runs/{arm}-seed1/metrics.jsonl")
        speeds[arm] = max(epoch["images_per_second"] for epoch in epochs)
    longer = speeds["none"] / speeds["recipe"]
    page = read_page("docs/results.md")
    said = f"`best` took {longer:.2f} times as long as one of `simclr`, and one of the control"
    assert f"{said} {speeds['none'] / speeds['term-infonce-instead']:.2f} times" in page
    assert f"An epoch of `best` takes {longer:.2f} times as long as one of `simclr`" in README
    studies = (ROOT / "docs/studies.md").read_text()
    assert f"[took {longer:.2f} times as long]" in studies
    assert f"so {200 / longer:.0f} epochs take as long as 200" in studies
    assert f"epochs = {200 / longer:.0f}/'" in studies

    def describe(folder: str, metric: str) -> str:
        runs = [load(f"studies/{folder}-seed{seed}/result.json") for seed in range(3)]
        values = [list_top1(run)[metric] for run in runs]
        return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"

    half, whole = "tables/runs/best-cifar10", "comparison-teacher/runs/simclr"
    for metric, name in (("cached features", "linear"), ("cosine, k=20", "kNN with k = 20")):
        assert f"{describe(half, metric)} and {describe(whole, metric)} {name}" in page
