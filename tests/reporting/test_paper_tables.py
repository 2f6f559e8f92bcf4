"""Tables of the study of tables: what stands in which cell, in Markdown and LaTeX."""

import csv

import pytest

from deepbregman.reporting.paper_tables import draw_differences, save_tables, tabulate_quantities
from deepbregman.reporting.tables import Table, to_latex, to_markdown
from deepbregman.runs import Record

SEEDS = {"mean": 90.0, "deviation": 0.5, "n": 3}


def quantity(protocol: str, variant: str, metric: str, **changes: object) -> Record:
    pair: Record = {"arm": "best", "against": "simclr", "mean": 1.0, "deviation": 0.25, "n": 3}
    pair |= {"interval": [0.38, 1.62], "over_images": [0.1, 1.9]}
    return {
        **{"data": "cifar10", "trained_on": "cifar10", "protocol": protocol, "variant": variant},
        **{"metric": metric, "num_train": 50_000, "num_test": 10_000},
        "arms": {"simclr": SEEDS, "best": {**SEEDS, "mean": 91.0}},
        "differences": [pair],
        **changes,
    }


@pytest.fixture
def tables() -> dict[str, Table]:
    found = [
        quantity("linear", "cached features", "top1"),
        quantity("linear", "cached features", "top5"),
        quantity("knn", "cosine, k=200", "top1"),
        quantity("few", "5 labels per class, linear", "top1", differences=[]),
        quantity("transfer", "fine-tuned", "top1", trained_on="tiny"),
    ]
    results: Record = {"arms": ["simclr", "best"], "pairs": [["best", "simclr"]], "runs": []}
    return {t.key: t for t in tabulate_quantities({**results, "quantities": found})}


def test_published_values_stand_apart(tables):
    table = tables["cifar10-accuracy"]
    assert table.columns[:2] == ("simclr", "best")
    assert [row.name for row in table.rows] == ["linear: cached features, top-1"]
    printed = dict(zip(table.columns[2:], table.rows[0].cells[2:], strict=True))
    assert printed["published: SimCLR"].text == "91.8"
    assert all(cell.is_published and cell.summary is None for cell in printed.values())
    assert "ResNet-50, 400 epochs" in table.caption
    markdown = to_markdown(table)
    assert "| 90.00 ± 0.50 | 91.00 ± 0.50 | *91.8* |" in markdown
    assert r"\emph{91.8}" in to_latex(table)


def test_a_published_method_has_one_column():
    """Of two columns of one name a table on the terminal would show one, twice."""
    found = [
        quantity("linear", "cached features", "top1", data="imagenet"),
        quantity("semi", "1 % labels, from encoder", "top1", data="imagenet"),
        quantity("semi", "1 % labels, supervised", "top1", data="imagenet"),
    ]
    results: Record = {"arms": ["simclr", "best"], "pairs": [], "runs": [], "quantities": found}
    table = next(t for t in tabulate_quantities(results) if t.key == "imagenet-accuracy")
    assert len(set(table.columns)) == len(table.columns)
    rows = [dict(zip(table.columns, row.cells, strict=True)) for row in table.rows]
    shown = [
        [row[f"published: {method}"].text for row in rows]
        for method in ("SimCLR", "PIRL", "the paper's method", "Supervised")
    ]
    assert shown == [
        *(["69.3", "48.3", ""], ["63.6", "", ""], ["72.6", "53.5", ""], ["", "", "25.4"])
    ]


def test_unequal_numbers_of_seeds_are_said():
    """One seed has no deviation; of several, only those with fewer than most say their number."""
    deviations = {1: None, 2: 0.5, 3: 0.5}
    arms = {f"arm{n}": {"mean": 90.0, "deviation": d, "n": n} for n, d in deviations.items()}
    pairs = [
        {"arm": f"arm{n}", "against": "arm3", "mean": 1.0, "deviation": d, "n": n}
        | {"interval": None, "over_images": [0.5, 1.5]}
        for n, d in deviations.items()
    ]
    results: Record = {"arms": [*arms], "pairs": [[f"arm{n}", "arm3"] for n in (1, 2, 3)]}
    found = [quantity("knn", "cosine, k=20", "top1", arms=arms, differences=pairs)]
    values, differences, *_ = tabulate_quantities({**results, "runs": [], "quantities": found})
    assert ", n = 1-3, for these 10,000 test images" in values.caption
    assert "| 90.00 | 90.00 ± 0.50 (n=2) | 90.00 ± 0.50 |" in to_markdown(values)
    assert r"$90.00$ & $90.00 \pm 0.50$ (n=2) & $90.00 \pm 0.50$ \\" in to_latex(values)
    assert ", n = 1-3, and the 95 % interval" in differences.caption
    assert "of one seed, which has no ±, over test images alone" in differences.caption
    assert "| +1.00 ± 0.50 [+0.50, +1.50] (n=2) |" in to_markdown(differences)
    figure = draw_differences({**results, "quantities": found})
    assert "bar: 95 % interval of it, n = 1-3 (of one seed over test images only" in figure.caption


def test_what_no_arm_pretrained_is_said(tables):
    """Training from random weights is measured once, in the column of the first arm."""
    assert "random weights" not in tables["cifar10-accuracy"].caption
    found = [quantity("semi", "1 % labels, supervised", "top1", differences=[])]
    table, *_ = tabulate_quantities(
        {"arms": ["simclr"], "pairs": [], "runs": [], "quantities": found}
    )
    assert "simclr: rows with 'supervised' start from random weights" in table.caption


def test_a_difference_has_the_interval_that_counts_images(tables):
    markdown = to_markdown(tables["cifar10-accuracy-differences"])
    assert "| best - simclr |" in markdown
    assert "| +1.00 ± 0.25 [+0.10, +1.90] |" in markdown
    assert "cifar10-few-labels" in tables
    assert "cifar10-few-labels-differences" not in tables


def test_the_first_table_has_the_main_quantities_only(tables):
    assert list(tables)[:2] == ["cifar10-in-short", "cifar10-in-short-differences"]
    assert [row.name for row in tables["cifar10-in-short"].rows] == [
        "linear, top-1",
        "transfer, fine-tuned from tiny, top-1",
    ]


def test_the_main_quantities_are_in_one_order():
    """Not in that of the evaluations, which puts a dataset's transfers after another dataset."""
    found = [
        quantity("linear", "cached features", "top1"),
        quantity("transfer", "fine-tuned", "top1", data="other"),
        quantity("knn", "cosine, k=20", "top1"),
        quantity("linear", "cached features", "top1", data="other", trained_on="other"),
        quantity("transfer", "fine-tuned", "top1", trained_on="other"),
    ]
    figure = draw_differences({"arms": ["simclr", "best"], "quantities": found})
    points = figure.spec["layer"][1].get("data", figure.spec.get("data"))["values"]
    assert [point["measure"] for point in points] == [
        *("cifar10: kNN, top-1", "cifar10: linear, top-1"),
        "cifar10: transfer, fine-tuned from other, top-1",
        *("other: linear, top-1", "other: transfer, fine-tuned from cifar10, top-1"),
    ]


def test_the_balanced_accuracy_is_the_main_one_where_it_is_known():
    """Of unequal classes; each quantity for itself."""
    found = [
        quantity("linear", "cached features", "top1"),
        quantity("linear", "cached features", "balanced"),
        quantity("knn", "cosine, k=20", "top1"),
        quantity("retrieval", "cosine", "mAP"),
        quantity("retrieval", "cosine", "precision@10"),
    ]
    results: Record = {"arms": ["simclr", "best"], "pairs": [], "runs": []}
    short, *_ = tabulate_quantities({**results, "quantities": found})
    assert [row.name for row in short.rows] == [
        *("kNN, top-1", "linear, balanced", "retrieval, mAP")
    ]


def test_the_clearly_best_arm_is_marked_and_repetition_left_out():
    clear = {
        arm: {"mean": mean, "deviation": 0.25, "n": 3}
        for arm, mean in (("best", 91.0), ("simclr", 90.0))
    }
    variants = ("kNN by cosine, k=20, noise", "linear, JPEG")
    found = [
        quantity("corruptions", f"{variant} {strength}", "top1", arms=clear, differences=[])
        for variant in variants
        for strength in (1, 2, 3)
    ]
    results: Record = {"arms": ["simclr", "best"], "pairs": [], "runs": []}
    (table,) = tabulate_quantities({**results, "quantities": found})
    assert [row.name for row in table.rows] == [
        f"{variant} {strength}, top-1" for variant in variants for strength in (1, 3)
    ]
    assert "| linear, JPEG 3, top-1 | 90.00 ± 0.25 | **91.00 ± 0.25** |" in to_markdown(table)
    clear["simclr"]["n"] = 2  # too few seeds to call the other arm best
    (table,) = tabulate_quantities({**results, "quantities": found})
    assert "**" not in to_markdown(table)


def test_measures_by_the_divergence_and_classes():
    """A column for each arm, in the order of the arms; most strengths and numbers are left out."""

    def pair(mean: float) -> Record:
        return {"mean": mean, "deviation": None, "n": 1, "interval": None, "over_images": [-3, 3]}

    def measure(protocol: str, variant: str, words: str, other: str) -> Record:
        names = {"data": "d", "trained_on": "d", "metric": "top1", "protocol": protocol}
        arms = {"best": pair(2.0), "simclr": pair(-1.0)}
        return {
            **names,
            "variant": variant.format(words),
            "against": variant.format(other),
            "arms": arms,
        }

    few = ("nearest distribution, divergence", "linear")
    by_divergence = [
        *(measure("few", f"{n} labels per class, {{}}", *few) for n in (2, 5, 10, 20)),
        *(
            measure("corruptions", f"{{}}, k=20, {name}", "kNN by divergence", "kNN by cosine")
            for name in ("clean", "noise 1", "mean of all")
        ),
        *(measure("knn", f"{{}}, k={k}", "divergence", "cosine") for k in (20, 200)),
    ]
    shares = {
        arm: {"mean": mean, "deviation": 0.5, "n": 2}
        for arm, mean in (("best", 70.0), ("simclr", 60.0))
    }
    classes = [{"data": "d", "class": "eel", "num_test": 1234, "arms": shares}]
    results: Record = {"arms": ["simclr", "best"], "pairs": [], "runs": [], "classes": classes}
    found = [quantity("knn", "cosine, k=20", "top1", data="d", trained_on="d", differences=[])]
    tables = tabulate_quantities({**results, "quantities": found, "by_divergence": by_divergence})
    measures, kinds = tables[-2:]
    assert measures.columns == ("simclr", "best")
    assert [row.name for row in measures.rows] == [
        *(
            f"few, top-1: {n} labels per class, {few[0]} - {n} labels per class, linear"
            for n in (5, 20)
        ),
        *(
            f"corruptions, top-1: kNN by divergence, k=20, {name} - kNN by cosine, k=20, {name}"
            for name in ("clean", "mean of all")
        ),
        "knn, top-1: divergence, k=20 - cosine, k=20",
    ]
    assert "| -1.00 [-3.00, +3.00] | +2.00 [-3.00, +3.00] |" in to_markdown(measures)
    assert kinds.columns == ("simclr", "best")
    assert "| eel (1,234) | 60.00 ± 0.50 | 70.00 ± 0.50 |" in to_markdown(kinds)


def test_the_files_of_a_study(tmp_path):
    found = [
        quantity("linear", "cached features", "top1"),
        quantity("ood", "noise: cosine, neighbour 50", "AUROC", arms={"best": SEEDS}),
    ]
    results: Record = {"arms": ["simclr", "best"], "pairs": [["best", "simclr"]], "runs": []}
    save_tables(tmp_path, {**results, "quantities": found})
    with (tmp_path / "quantities.csv").open(newline="") as file:
        rows = [(r["protocol"], r["arm"], r["mean"], r["n"]) for r in csv.DictReader(file)]
    assert rows == [
        ("linear", "simclr", "90.0", "3"),
        ("linear", "best", "91.0", "3"),
        ("ood", "best", "90.0", "3"),
    ]
    names = {path.stem for path in (tmp_path / "tables").iterdir()}
    assert names == {
        f"cifar10-{group}{what}"
        for group in ("in-short", "accuracy", "other-images")
        for what in ("", "-differences")
    }
    with (tmp_path / "tables" / "cifar10-accuracy-differences.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["value"], row["95 % from"], row["95 % to"]) == ("1.0", "0.1", "1.9")


def test_transfer_names_where_it_comes_from(tables):
    assert [row.name for row in tables["cifar10-transfer"].rows] == ["from tiny: fine-tuned, top-1"]


def test_a_wide_interval_does_not_hide_the_means():
    """Two seeds have intervals of 100 points; the other dots would lie on one line."""
    pair = {"arm": "best", "against": "simclr", "mean": 4.0, "deviation": 9.0, "n": 2}
    wide = {**pair, "interval": [-76.9, 84.9], "over_images": None}
    found = [quantity("linear", "cached features", "top1", differences=[wide])]
    figure = draw_differences({"arms": ["simclr", "best"], "quantities": found})
    (point,) = figure.spec["layer"][1].get("data", figure.spec.get("data"))["values"]
    assert figure.spec["layer"][2]["encoding"]["x"]["scale"]["domain"] == [-6.0, 6.0]
    assert "[-76.90, +84.90]" in point["shown"]  # under the pointer
    assert "beyond 6 points" in figure.caption


def test_runs_of_one_arm_with_other_settings_are_seen():
    """Runs that were copied together may be of other lengths; their mean means little."""
    shared = {"arm": "best", "data": "d", "encoder": "resnet18", "views_per_image": 2}
    shared |= {"view_size": 24, "batch_size": 512, "seconds": 10.0, "state": "done"}
    runs = [{**shared, "epochs": epochs} for epochs in (100, 20, 100)]
    runs[1] |= {"seconds": 30.0}
    runs.append({**runs[0], "seconds": None, "state": "diverged"})
    (costs,) = tabulate_quantities({"arms": [], "pairs": [], "runs": runs, "quantities": []})
    (row,) = costs.rows
    assert [cell.text for cell in row.cells] == [
        *("resnet18", "100, 20", "2", "24", "512"),
        *("17", "4", "1"),  # 50 seconds of the three that have a time
    ]


def test_many_differences_are_told_apart():
    """The issue's arms have nine differences, and there are seven colours."""
    pairs = [
        {"arm": f"arm{place}", "against": "simclr", "mean": 1.0, "deviation": None, "n": 1}
        | {"interval": None, "over_images": [0.5, 1.5]}
        for place in range(9)
    ]
    found = [quantity("linear", "cached features", "top1", differences=pairs)]
    figure = draw_differences({"arms": ["simclr"], "quantities": found})
    dots = figure.spec["layer"][-1]["encoding"]
    looks = zip(dots["color"]["scale"]["range"], dots["shape"]["scale"]["range"], strict=True)
    assert len(set(looks)) == 9


def test_bars_in_names_do_not_break_a_table():
    table = Table("key", "A title", "a|b", ("c|d",), ())
    assert r"| a\|b | c\|d |" in to_markdown(table)
