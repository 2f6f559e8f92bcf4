"""The figure and the table of a study with many series of long names."""

import io
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from deepbregman.reporting import pairs, studies
from deepbregman.reporting.studies import study_figure, study_table
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
    return {"study": STUDY.record(), **known, "metric": metric, "arms": arms}


def test_the_legend_stays_within_the_figure(
    results: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def kept(**options: object) -> Figure:
        drawn.append(Figure(**options))  # type: ignore[arg-type]
        return drawn[-1]

    monkeypatch.setattr(studies, "Figure", kept)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def kept(**options: object) -> Figure:
        drawn.append(Figure(**options))  # type: ignore[arg-type]
        return drawn[-1]

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
    cells = [
        {"arm": name, "seed": seed, "metrics": dict.fromkeys(metrics, values[name][seed])}
        for name in values
        for seed in (0, 1)
    ]
    results: Record = {
        "study": {**COMPARISON.record(), "reference": "simclr"},
        **{"recipe": "simclr, best", "data": "cifar10", "epochs": 1, "judge": "test"},
        **{"unequal_budget": [], "metric": metrics[0], "arms": arms, "cells": cells},
    }
    monkeypatch.setattr(pairs, "Figure", kept)
    study_figure([tmp_path / "comparison.png"], results)
    panels = drawn[0].axes
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
        assert right.texts[0].get_text() == "+1.00 ± 0.70 [-5.40, +7.40]"
