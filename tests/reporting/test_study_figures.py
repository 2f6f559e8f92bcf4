"""The figure and the table of a study with many series of long names."""

import io
import json
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from deepbregman.reporting import pairs, studies
from deepbregman.reporting.page.study_charts import study_figure as page_figure
from deepbregman.reporting.printed import printed_series
from deepbregman.reporting.studies import study_figure, study_table
from deepbregman.reporting.summaries import costs_known
from deepbregman.runs import Record
from deepbregman.studies.catalogue.comparison import STUDY as COMPARISON
from deepbregman.studies.catalogue.kappa import STUDY


@pytest.fixture
def results() -> Record:
    """All arms of kappa, Deep Divergence and published values included."""
    metric = "linear, cached features"
    arms = [
        {
            **{"arm": arm.name, "series": arm.series, "x": arm.x, "num_diverged": 0},
            "metrics": {metric: {"mean": 90.0 + index / 10, "deviation": 0.5, "n": 2}},
        }
        for index, arm in enumerate(STUDY.arms)
    ]
    known = {"recipe": "paper", "data": "cifar10", "epochs": 1, "judge": "test"}
    cells = [{"arm": arm.name, "seed": seed} for arm in STUDY.arms for seed in (0, 1)]
    return {"study": STUDY.record(), **known, "metric": metric, "arms": arms, "cells": cells}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Keep the figures that are drawn."""
    figures: list[Figure] = []

    def kept(**options: object) -> Figure:
        figures.append(Figure(**options))  # type: ignore[arg-type]  # options of any kind
        return figures[-1]

    monkeypatch.setattr(studies, "Figure", kept)
    monkeypatch.setattr(pairs, "Figure", kept)
    return figures


def test_only_the_quantity_of_the_axis_is_drawn_of_what_was_published(
    results: Record, tmp_path: Path, drawn: list[Figure]
) -> None:
    study_figure([tmp_path / "kappa.png"], results)
    text = io.StringIO()
    Console(file=text, width=400).print(study_table(results))
    on_page = page_figure(results, printed_series(results), "kappa")
    assert on_page is not None
    assert "published: Deep Divergence (supervised), kNN" in text.getvalue()
    for names in (
        [words.get_text() for words in drawn[0].legends[0].get_texts()],
        json.dumps(on_page.spec),
    ):
        assert "published: the paper" in names
        assert "published: Deep Divergence (supervised)" not in names  # kNN, where we have linear


@pytest.mark.parametrize("figure", ["line", "bars"])
def test_what_diverged_is_missing_and_the_figure_says_so(
    figure: str, results: Record, tmp_path: Path, drawn: list[Figure]
) -> None:
    results["study"]["figure"] = figure
    results["arms"][2] |= {"num_diverged": 1}
    results["arms"][3] |= {"num_diverged": 2, "metrics": {}}
    study_figure([tmp_path / "kappa.png"], results)
    title = " ".join(drawn[0].axes[0].get_title().split())
    assert title.endswith("diverged: 20 (1 of 2 seeds), 50 (2 of 2 seeds)")


def test_a_drop_of_nothing_is_not_an_arm_that_is_missing(
    results: Record, tmp_path: Path, drawn: list[Figure]
) -> None:
    results["study"]["figure"] = "drops"
    lost = {"mean": 0.0, "deviation": 0.0, "n": 2, "interval": [0.0, 0.0]}
    for arm in results["arms"]:
        arm["difference"] = {results["metric"]: lost}
    study_figure([tmp_path / "drops.png"], results)
    bars = [c for c in drawn[0].axes[0].containers if getattr(c, "has_yerr", False)]
    segments = [segment for bar in bars for segment in bar.lines[2][0].get_segments()]
    drawn_at = [segment[:, 1].tolist() for segment in segments]  # not empty, not nan
    assert drawn_at == [[0.0, 0.0]] * len(results["arms"])


def test_the_legend_stays_within_the_figure(
    results: Record, tmp_path: Path, drawn: list[Figure]
) -> None:
    study_figure([tmp_path / "kappa.png"], results)
    with mpl.rc_context(studies.STYLE):
        (legend,) = drawn[0].legends
        box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= drawn[0].bbox.x1
    assert {text.get_text() for text in legend.get_texts()} >= {
        arm.series for arm in STUDY.arms if arm.supervised
    }


def test_the_names_of_arms_are_whole(results: Record) -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(study_table(results))
    first = "".join(line[1:].split("│")[0].strip() for line in text.getvalue().splitlines())
    for arm in STUDY.arms:
        assert arm.name in first


def test_seeds_means_and_differences_stand_where_they_were_measured(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    metrics = ("linear, cached features", "knn, cosine, k=200")
    values = {"simclr": (86.0, 87.0), "best": (86.5, 88.5)}
    arms = [
        {
            **{"arm": name, "series": series, "x": name, "num_diverged": 0},
            "metrics": {
                m: {"mean": sum(values[name]) / 2, "deviation": d, "n": 2} for m in metrics
            },
            "against": "simclr",
            "difference": {
                m: {"mean": 1.0, "deviation": 0.7, "n": 2, "interval": [-5.4, 7.4]} for m in metrics
            }
            if name == "best"
            else {},
            "cost": {"encoder": "resnet18", "epochs": 1},
        }
        for name, series, d in (("simclr", "SimCLR", 0.7), ("best", "with divergence", 1.4))
    ]
    arms.append(
        {
            **{"arm": "Hot", "series": "SimCLR", "x": "Hot", "num_diverged": 2, "metrics": {}},
            **{"against": "simclr", "difference": {}, "cost": {"encoder": "resnet18", "epochs": 1}},
        }
    )
    cells = [
        {"arm": name, "seed": seed, "metrics": dict.fromkeys(metrics, values[name][seed])}
        for name in values
        for seed in (0, 1)
    ]
    cells += [{"arm": "Hot", "seed": seed, "metrics": {}} for seed in (0, 1)]
    results: Record = {
        "study": {**COMPARISON.record(), "reference": "simclr"},
        **{"recipe": "simclr, best", "data": "cifar10", "epochs": 1, "judge": "test"},
        **{"unequal_budget": ["epochs of Hot"], "metric": metrics[0], "arms": arms, "cells": cells},
    }
    study_figure([tmp_path / "comparison.png"], results)
    panels = drawn[0].axes
    notes = " ".join(drawn[0].get_supxlabel().split())
    assert drawn[0].get_suptitle().endswith("\nUnequal budget: epochs of Hot")
    assert "Diverged: Hot (2 of 2 seeds), which have no accuracy." in notes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "linear classifier",
        "",
        "kNN, k = 200",
        "",
    ]
    for left, printed, name in (
        (panels[0], 85.6, "simclr-cifar10"),
        (panels[2], 84.8, "lightly's"),
    ):
        dots = {float(line.get_xdata()[0]) for line in left.lines if line.get_marker() in "oD"}
        assert dots == {86.0, 87.0, 86.5, 88.5, 87.5, printed}  # seeds, means (one is a seed)
        (words,) = [text.get_text() for text in left.texts]
        assert words.startswith(f"published: {name}")
    for right in (panels[1], panels[3]):
        lines = [line.get_xdata() for line in right.lines]
        assert [0.0, 0.0] in [list(x) for x in lines]
        (bar,) = [c for c in right.containers if c.has_xerr]
        (segment,) = bar.lines[2][0].get_segments()
        assert sorted(float(x) for x in segment[:, 0]) == pytest.approx([-5.4, 7.4])
        assert right.texts[0].get_text() == "+1.00 ± 0.70 [-5.40, +7.40] (n=2)"
        panel = right.get_window_extent()
        box = right.texts[0].get_window_extent()
        assert panel.x0 <= box.x0 <= box.x1 <= panel.x1 + 1.0
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names == ["simclr", "best", "Hot (n=0)"]


def test_costs_that_earlier_versions_did_not_write_have_no_column() -> None:
    old: Record = {"arms": [{"cost": {"epochs": 3, "steps": None}}, {"cost": {}}, {}]}
    assert list(costs_known(old)) == ["epochs"]
    new: Record = {"arms": [{"cost": {"epochs": 3, "view_size": 24}}, {"cost": {"epochs": 3}}]}
    assert list(costs_known(new)) == ["epochs", "view_size"]
