"""Figures and tables of studies and searches: what was measured stands where it belongs."""

import html
import io
import json
import re
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from rich.console import Console, RenderableType

from deepbregman.files import write_json
from deepbregman.reporting import grid_charts, grid_tables, screen, searches
from deepbregman.reporting.sections import read_study
from deepbregman.reporting.tables import Cell, Row, Table
from deepbregman.runs import Record
from deepbregman.statistics import format_seeds

ROOT = Path(__file__).parents[2]
FIELDS = ("divergence.num_subnetworks", "divergence.normalise_input", "optimiser.learning_rate")


def printed(table: RenderableType, width: int = 400) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def layers_of(figure: Any) -> list[list[Record]]:
    shared = figure.spec.get("data")
    return [layer.get("data", shared)["values"] for layer in figure.spec["layer"]]


@pytest.fixture
def results(make_study) -> Record:
    record: Record = json.loads((make_study("kappa") / "results.json").read_text())
    return record


def test_only_the_quantity_of_the_axis_is_drawn_of_what_was_published(results, tmp_path):
    series = results["study"]["published"]
    series.append({**series[0], "series": "another", "metric": "kNN"})
    figure = grid_charts.draw_study(results, "kappa")[0]
    names = {point["method"] for part in layers_of(figure) for point in part if "method" in point}
    assert names == {"published: the paper"}
    grid_charts.save_study_figure([tmp_path / "kappa.svg"], results)
    words = (tmp_path / "kappa.svg").read_text()
    assert "Published, the paper" in words
    assert "Published, another" not in words
    assert "published: another, kNN" in printed(screen.draw_study_tables(results))


def test_every_number_of_subnetworks_is_written_at_the_axis():
    path = ROOT / "results" / "studies" / "kappa-cifar10" / "results.json"
    figure = grid_charts.draw_study(json.loads(path.read_text()), "kappa")[0]
    svg = vl_convert.vegalite_to_svg(figure.spec)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"5", "20", "50", "100", "200", "500", "1000"} <= set(words)
    scales = [layer["encoding"].get("x", {}).get("scale", {}) for layer in figure.spec["layer"]]
    assert {scale["type"] for scale in scales if scale} == {"log"}


@pytest.mark.parametrize("kind", ["line", "bars", "drops"])
def test_arms_stand_at_their_means_and_published_values_apart(kind, results):
    results["study"]["figure"] = kind
    if kind == "drops":
        results["arms"][2]["difference"][results["metric"]] |= {"mean": 0.0, "deviation": 0.0}
    figure = grid_charts.draw_study(results, "kappa")[0]
    means = {
        p["name"]: (p["low"], p["value"], p["high"])
        for part in layers_of(figure)
        for p in part
        if "name" in p
    }
    if kind == "drops":  # a drop of nothing is not an arm that is missing
        assert means == {"5": (1.0, 1.25, 1.5), "200": (0.0, 0.0, 0.0)}
        assert figure.title == "Change of linear accuracy, points"
        assert figure.caption.endswith("; dashed: '0' of the same series")
    else:
        assert means["5"] == (90.75, 91.25, 91.75)
        values = {p["value"] for part in layers_of(figure) for p in part if "method" in p}
        assert values == {85.2, 92.8}
    if kind == "line":  # a level line and its band are those of the reference
        assert [p["name"] for part in layers_of(figure)[:2] for p in part] == ["none", "none"]


def test_the_figure_says_under_which_conditions_and_what_diverged(results, tmp_path):
    results["arms"][1] |= {"num_diverged": 1}
    results["arms"][2] |= {"num_diverged": 3, "metrics": {}}
    results["unequal_budget"] = ["epochs of 5"]
    grid_charts.save_study_figure([tmp_path / "kappa.svg"], results)
    words = " ".join("".join(part.itertext()) for part in ET.parse(tmp_path / "kappa.svg").iter())
    for sentence in (
        "How many subnetworks?",
        "paper on cifar10, 4 epochs, test images, top-1 %",
        "Diverged: 5 (1 of 3 seeds), 200 (3 of 3 seeds), which have no accuracy.",
        "Unequal budget: epochs of 5",
    ):
        assert sentence in words
    assert format_seeds([3, 1, 3]) == "n = 1-3"
    held_out = grid_charts.describe_conditions({**results, "evaluate_on": "holdout"})
    assert held_out == "paper on cifar10, 4 epochs, held-out training images, top-1 %"


def test_the_facts_of_a_study_tell_its_images_and_count_a_run_of_two_arms_once(make_study):
    folder = make_study("kappa")
    results = json.loads((folder / "results.json").read_text())
    results["cells"][3]["run"] = results["cells"][0]["run"]
    write_json(folder / "results.json", {**results, "evaluate_on": "holdout"})
    facts = read_study(folder).facts
    assert (facts["evaluated on"], facts["runs"]) == ("held-out training images", "8")


def test_pairs_show_every_seed_and_the_differences():
    path = ROOT / "results" / "studies" / "comparison-cpu" / "results.json"
    results = json.loads(path.read_text())
    arms, differences = grid_charts.draw_study(results, "comparison")
    means, _, seeds = layers_of(arms)[:3]
    linear = [point for point in seeds if point["measure"] == "linear classifier"]
    assert [(point["arm"], point["value"]) for point in linear] == [
        (row["arm"], pytest.approx(row["metrics"]["linear, cached features"]))
        for row in results["cells"]
    ]
    assert len(means) == 6  # three measures of two arms
    zero, bars, _ = layers_of(differences)
    assert zero == [{"value": 0}]
    point = next(point for point in bars if point["measure"] == "linear classifier")
    assert (point["arm"], round(point["value"], 2)) == ("best", -0.47)
    assert (round(point["low"], 2), round(point["high"], 2)) == (-1.83, 0.90)
    words = printed(screen.draw_study_tables(results))
    assert "-0.47 ± 0.55 [-1.83, +0.90] (n=3)" in words
    assert "Cost of training" in words


PARTS = (  # arm, part, label, difference and its interval
    ("recipe", "recipe", "as it is", 1.5, (1.0, 2.0)),
    ("bank-256", "bank", "256", -0.8, (-1.4, -0.2)),
    ("bank-65536", "bank", "65,536", 0.1, (-40.0, 40.2)),
    ("view-strong", "teacher's view", "strong", 0.6, (0.1, 1.1)),
)


@pytest.fixture
def parts(results) -> Record:
    """A study that changes one part of a recipe at a time."""
    results["study"] |= {"figure": "parts", "reference": "none", "published": []}
    results["study"]["arms"] = [{"name": name} for name in ("none", *(row[0] for row in PARTS))]
    mean = {"mean": 90.0, "deviation": 0.5, "n": 2}
    metrics = ("linear, cached features", "knn, cosine, k=20")
    arms = [{"arm": "none", "series": "SimCLR", "x": "no teacher", "against": None}]
    for name, part, label, difference, interval in PARTS:
        change = {"mean": difference, "deviation": 0.1, "n": 2, "interval": [-9.0, 9.0]}
        change |= {"over_images": interval}
        arms.append({"arm": name, "series": part, "x": label, "against": "none"})
        arms[-1]["difference"] = dict.fromkeys(metrics, change)
    results["arms"] = [{"metrics": dict.fromkeys(metrics, mean), **arm} for arm in arms]
    return results


def test_parts_stand_below_their_heading_with_their_intervals(parts):
    linear, neighbours = grid_charts.draw_study(parts, "teacher")
    assert linear.title == "Difference to SimCLR: linear classifier"
    assert neighbours.title == "Difference to SimCLR: kNN, k = 20"
    levels, points = layers_of(linear)[:2]
    assert [(line["value"], line["word"]) for line in levels] == [(0.0, "SimCLR"), (1.5, "paper")]
    ends = {point["name"]: (point["low"], point["value"], point["high"]) for point in points}
    assert ends["bank-256"] == (-1.4, -0.8, -0.2)
    low, high = linear.spec["layer"][2]["encoding"]["x"]["scale"]["domain"]
    assert -4.0 < low < -0.8  # the bar of +-40 is cut, so that the dots do not lie on one line
    assert 1.5 < high < 4.0
    verdicts = {point["name"]: point["verdict"] for point in points}
    assert verdicts == {
        **{"recipe": "above", "bank-256": "below"},
        **{"bank-65536": "not told apart", "view-strong": "above"},
    }
    for arm in parts["arms"]:
        arm["against"] = "recipe"
    assert grid_charts.draw_study(parts, "teacher")[0].title.startswith("Difference to paper: ")


def test_names_of_two_lines_that_almost_meet_stand_on_both_sides_of_them(parts):
    parts["arms"][1]["difference"]["linear, cached features"] |= {"mean": -0.02}
    svg = vl_convert.vegalite_to_svg(grid_charts.draw_study(parts, "teacher")[0].spec)
    assert re.search(r'text-anchor="end"[^>]*>paper<', svg)
    assert re.search(r'text-anchor="start"[^>]*>SimCLR<', svg)


def test_the_figure_of_parts_has_one_caption_and_every_heading(parts, tmp_path):
    grid_charts.save_study_figure([tmp_path / "parts.svg"], parts)
    text = (tmp_path / "parts.svg").read_text()
    words = [html.unescape(word) for word in re.findall(r">([^<>]+)<", text)]
    rows = ["recipe", "as it is", "bank", "256", "65,536", "teacher's view", "strong"]
    places = [words.index(row) for row in rows]
    assert places == sorted(places)
    assert len([word for word in words if "95 % interval" in word]) == 1
    for arm in parts["arms"]:
        arm.pop("difference", None)
    grid_charts.save_study_figure([tmp_path / "none.svg"], parts)  # nothing to compare yet
    assert not (tmp_path / "none.svg").exists()


def test_the_table_of_parts_has_both_measures_and_their_differences(parts):
    table = grid_tables.tabulate_study(parts, "")[0]
    assert table.columns == (
        *("linear classifier", "linear classifier, difference"),
        *("kNN, k = 20", "kNN, k = 20, difference"),
    )
    rows = {row.name: row.cells for row in table.rows}
    assert list(rows)[:3] == ["SimCLR: no teacher", "recipe: as it is", "bank: 256"]
    assert rows["SimCLR: no teacher"][1] == Cell()  # it is not compared with itself
    mean, difference = (cell.summary for cell in rows["bank: 256"][:2])
    assert (mean["mean"], difference["mean"]) == (90.0, -0.8)
    assert difference["interval"] == (-1.4, -0.2)
    assert "Differences to SimCLR" in table.caption
    words = printed(screen.draw_study_tables(parts))
    assert "bank: 65,536" in words
    assert "view-strong" not in words  # this table tells all


def test_what_no_arm_has_in_the_paper_is_not_said_of_each(results):
    assert printed(screen.draw_study_tables(results)).count("not in the paper") == 1
    for arm in results["study"]["arms"]:
        arm["beyond"] = True
    assert "not in the paper" not in printed(screen.draw_study_tables(results))


def test_an_unfinished_table_of_methods_says_how_many_are_in_it(results):
    results["study"]["recipes"] = [f"method-{number}" for number in range(6)]
    arms = [{**results["arms"][0], "x": name} for name in results["study"]["recipes"]]
    arms[5] = {**arms[5], "metrics": {}}  # without a finished run
    assert grid_charts.describe_conditions({**results, "arms": arms}).startswith(
        "5 of 6 recipes on "
    )
    arms[5] = {**arms[0], "x": "method-5"}
    assert grid_charts.describe_conditions({**results, "arms": arms}).startswith("6 recipes on ")


def test_the_table_of_learning_rates_names_the_best_of_each_method(results):
    """A rate whose runs all diverged has no mean, and a method without any has no best one."""
    results["study"]["figure"] = "groups"
    known = (("byol", "x 1", 0.1, 90.0), ("byol", "x 3", 0.3, 91.0), ("dino", "x 1", 0.2, None))
    results["arms"] = [
        {**results["arms"][0], "x": method, "series": series, "cost": {"learning_rate": rate}}
        | {"metrics": {results["metric"]: {"mean": mean, "deviation": 0.5, "n": 3}} if mean else {}}
        for method, series, rate, mean in known
    ]
    results["arms"][1]["num_diverged"] = 1  # its mean is over the other seeds
    table = grid_tables.tabulate_study(results, "")[0]
    assert table.columns == ("x 1", "x 3", "best learning rate")
    found = {row.name: row.cells for row in table.rows}
    assert [cell.summary["mean"] for cell in found["byol"][:2]] == [90.0, 91.0]
    assert found["byol"][2].text == "0.1"
    assert table.rows[0].marks == ("x 3: 1 diverged",)
    assert [cell.text for cell in found["dino"]] == ["—", "—", ""]


def test_methods_stand_in_their_columns_and_in_the_order_of_their_accuracy_alone():
    folder = ROOT / "results" / "studies" / "methods"
    results = json.loads((folder / "results.json").read_text())

    def mean(arm: str) -> float:
        found = []
        for path in folder.glob(f"runs/{arm}-seed?/result.json"):
            rows = json.loads(path.read_text())["evaluations"]
            found += [
                r["value"] for r in rows if (r["protocol"], r["metric"]) == ("linear", "top1")
            ]
        return statistics.fmean(found)

    table = grid_tables.tabulate_study(results, "")[0]
    rows = {row.name: dict(zip(table.columns, row.cells, strict=True)) for row in table.rows}
    for name in ("byol", "dim"):
        alone, both = mean(name), mean(f"{name}_divergence")
        expected = {"": alone, ", with the divergence": both, ", difference": both - alone}
        for ending, value in expected.items():
            assert rows[name][f"linear{ending}"].summary["mean"] == pytest.approx(value)
    figure = grid_charts.draw_study(results, "methods")[0]
    points = next(part for part in layers_of(figure) if "arm" in part[0])
    drawn = list(dict.fromkeys(point["x"] for point in points))
    assert len(drawn) == 22
    assert drawn == sorted(drawn, key=mean, reverse=True)


def test_a_recipe_with_a_divergence_of_its_own_stands_among_those_with_it():
    results = json.loads((ROOT / "results/studies/methods/results.json").read_text())
    arm = next(arm for arm in results["arms"] if arm["arm"] == "simclr+divergence")
    own = {**arm, "arm": "best", "x": "best", "against": None, "difference": {}}
    table = grid_tables.tabulate_study({**results, "arms": [*results["arms"], own]}, "")[0]
    (row,) = (row for row in table.rows if row.name == "best")
    cells = dict(zip(table.columns, row.cells, strict=True))
    mean = arm["metrics"]["linear, cached features"]["mean"]
    assert cells["linear, with the divergence"].summary["mean"] == mean
    assert cells["linear"].summary is cells["linear, difference"].summary is None


def test_where_all_seeds_diverged_the_caption_counts_none(results):
    results["arms"] = [{**arm, "metrics": {}, "difference": {}} for arm in results["arms"]]
    table = grid_tables.tabulate_study(results, "")[-1]
    assert table.caption == "Top-1, per cent; mean ± sample deviation over seeds"


def test_the_table_of_methods_has_speed_and_memory_where_a_run_recorded_them():
    path = ROOT / "results" / "studies" / "methods" / "results.json"
    results = json.loads(path.read_text())
    for arm in results["arms"]:
        arm["cost"] |= {"images_per_second": None, "peak_gigabytes": None}
    table = grid_tables.tabulate_study(results, "")[0]
    assert not {"images/s", "peak memory, GB"} & set(table.columns)
    swav = next(arm for arm in results["arms"] if arm["arm"] == "swav")
    swav["cost"] |= {"images_per_second": 31234.5, "peak_gigabytes": 4.26}
    table = grid_tables.tabulate_study(results, "")[0]
    rows = {
        row.name: dict(zip(table.columns, (cell.text for cell in row.cells), strict=True))
        for row in table.rows
    }
    assert (rows["swav"]["images/s"], rows["swav"]["peak memory, GB"]) == ("31,234", "4.3")
    assert rows["swav"]["images/s, with the divergence"] == ""
    assert rows["simclr"]["images/s"] == ""
    assert "shared the GPU" in table.caption


def test_the_names_of_arms_are_whole_on_a_narrow_screen(results):
    names = [f"deep-moment-contrastive-and-a-very-long-name-{index}" for index in range(3)]
    for arm, name in zip(results["arms"], names, strict=True):
        arm["arm"] = name
    lines = printed(screen.draw_study_tables(results), width=80).splitlines()
    first = "".join(line[1:].split("│")[0].strip() for line in lines)
    for name in names:
        assert name in first


@pytest.fixture
def search() -> Record:
    """Three trials completed, one pruned, two diverged, which were worth a guess at chance."""
    outcomes = [(95.0, False), (90.0, False), (97.0, False), (None, False), (10.0, True)]
    trials = [
        {
            **{"trial": number, "state": "pruned" if value is None else "complete"},
            **{"value": value, "diverged": diverged},
            "values": dict(zip(FIELDS, (10 + number, number % 2 == 0, 10.0**number), strict=True)),
        }
        for number, (value, diverged) in enumerate([*outcomes, (10.0, True)])
    ]
    known = {"recipe": "paper", "data": "digits", "epochs": 3, "objective": "knn", "sampler": "gp"}
    space = [f"{FIELDS[0]}=10:20", f"{FIELDS[1]}=true,false", f"{FIELDS[2]}=1:100000:log"]
    return {**known, "space": space, "importance": {FIELDS[0]: 0.75}, "trials": trials}


def test_trials_are_counted_by_what_became_of_them(search, tmp_path):
    words = printed(screen.draw_trials(search), width=80)
    assert "best of 6 trials (3 complete, 1 pruned, 2 diverged)" in words
    assert "…" not in words  # the names of fields are whole
    table = searches.tabulate_trials(search, "")
    shares = [cell.text for cell in table.rows[-1].cells]
    assert dict(zip(table.columns[1:], shares[1:], strict=True)) == dict.fromkeys(FIELDS, "") | {
        FIELDS[0]: "0.75"
    }
    stopped = {"trial": 6, "state": "fail", "value": None, "diverged": False, "values": {}}
    again = {**stopped, "trial": 7, "continues": 6}
    found = {**search, "trials": [*search["trials"], stopped, again]}
    assert "7 trials (3 complete, 1 pruned, 2 diverged, 1 fail)" in searches.count_trials(found)
    again |= {"trial": 8, "state": "complete", "value": 91.0}
    found["trials"].append(again)  # stopped twice, then trained to its end
    write_json(tmp_path / "trials.json", found)
    known = read_study(tmp_path).facts["searched"]
    assert known == "7 trials (4 complete, 1 pruned, 2 diverged)"


def test_slices_show_all_of_the_space_and_trials_without_a_value(search, tmp_path):
    search["published"] = {FIELDS[0]: 15.0}
    slices = searches.draw_search(search, "search")
    axes = [figure.spec["layer"][0]["encoding"]["x"]["scale"] for figure in slices]
    assert axes[0]["domain"] == [10, 20]  # 12 is the largest that came to a value
    assert axes[1]["domain"] == ["true", "false"]
    assert (axes[2]["domain"], axes[2]["type"]) == ([1, 100000], "log")
    trials, best, pruned, diverged, published = layers_of(slices[0])
    assert [(point["x"], point["value"]) for point in trials] == [
        (12, 97.0),
        (10, 95.0),
        (11, 90.0),
    ]
    assert [point["x"] for point in best] == [12]
    assert [point["x"] for point in pruned] == [13]
    assert [point["x"] for point in diverged] == [14, 15]
    assert [point["x"] for point in published] == [15.0]
    searches.save_search_figure([tmp_path / "search.svg"], search)
    assert "dotted: published" in (tmp_path / "search.svg").read_text()
    labels = re.findall(r">([\d.e+-]+)</text>", (tmp_path / "search.svg").read_text())
    assert {"1", "10", "1000", "100000"} <= set(labels)
    assert not any("e" in label for label in labels)  # such as 1e+5
    for row in search["trials"]:
        row["diverged"] = True
    search["importance"] = None
    searches.save_search_figure([tmp_path / "none.svg"], search)  # nothing can be drawn
    assert not (tmp_path / "none.svg").exists()
    assert (
        "6 trials (3 complete, 1 pruned, 2 diverged) by gp" in (tmp_path / "search.svg").read_text()
    )


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_words(width):
    names = [f"measure, {letter * 9}" for letter in "abcdef"]
    cells = tuple(Cell(text="+0.19 [-0.38, +0.76]") for _ in names)
    table = Table("key", "title", "method", tuple(names), (Row("moco-v2plus", cells),))
    lines = printed(screen.FittingTable(table), width=width).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert "moco-v2plus" in text
    shown = [name for name in names if name.split()[1] in text]
    assert shown == names[: len(shown)]
    assert text.count("-0.38,") == text.count("+0.76]") == len(shown) > 0
    left_out = len(names) - len(shown)
    assert (f"{left_out} column" in text) == (left_out > 0)
    assert (len(shown) == len(names)) == (width >= 120)
