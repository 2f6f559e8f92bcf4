"""Charts show what the records hold, no more and no less."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import vl_convert

from deepbregman.reporting.page.arms import Arm, Subject, grouped
from deepbregman.reporting.page.charts import (
    CURVES,
    DIAGNOSTICS,
    MAX_POINTS,
    PALETTE,
    curve_figures,
    on_page,
    on_paper,
)
from deepbregman.reporting.page.dots import evaluation_figure
from deepbregman.reporting.page.measures import measures
from deepbregman.reporting.page.scopes import duration, scope_of
from deepbregman.runs import Record

MakeRun = Callable[..., Path]


def arms_of(paths: list[Path]) -> list[Arm]:
    return grouped(Subject.read(path) for path in paths)


def points_of(spec: Record) -> list[Record]:
    return list(spec["data"]["values"])


def test_curves_are_the_metrics(sample_runs: list[Path]) -> None:
    arms = arms_of(sample_runs)
    figures = {figure.key: figure for figure in curve_figures(arms, CURVES | DIAGNOSTICS)}
    assert set(figures) == {
        *("total", "contrastive", "divergence", "knn", "learning-rate", "active-subnetworks"),
        *("usage-entropy", "divergences", "effective-rank", "alignment", "uniformity", "spread"),
        "images-per-second",
    }
    for layer in figures["total"].spec["layer"]:
        assert layer["encoding"]["x"]["axis"]["values"] == [1, 2]  # there is no epoch 1.5
    for key, metric in (("total", "total"), ("effective-rank", "effective_rank")):
        points = points_of(figures[key].spec)
        for arm in arms:
            kept = []
            for run in arm.runs:
                mine = [p for p in points if (p["arm"], p["run"]) == (arm.name, run.name)]
                assert [p["epoch"] for p in mine] == [1, 2]
                values = [p["value"] for p in mine]
                assert values == pytest.approx([row[metric] for row in run.metrics], rel=1e-5)
                kept.append([row[metric] for row in run.metrics])
            mean = [
                p["value"] for p in points if (p["arm"], p["run"]) == (arm.name, "mean of runs")
            ]
            assert mean == pytest.approx(np.mean(kept, axis=0), rel=1e-5)
    # A loss whose weight is 0 is recorded as 0; that is no curve.
    assert {p["arm"] for p in points_of(figures["divergence"].spec)} == {"ours"}
    assert {p["kind"] for p in points_of(figures["divergences"].spec)} == {"positives", "negatives"}


def test_long_curves_are_thinned_and_keep_their_end(make_run: MakeRun) -> None:
    metrics = [{"epoch": epoch, "total": 1.0 / epoch} for epoch in range(1, 4001)]
    paths = [make_run(f"long-{seed}", {"seed": seed}, metrics=metrics) for seed in (0, 1)]
    (figure,) = curve_figures(arms_of(paths), CURVES)
    points = points_of(figure.spec)
    assert 0.8 * MAX_POINTS < len(points) <= MAX_POINTS + 3
    assert {p["run"] for p in points if p["epoch"] == 4000} == {"long-0", "long-1", "mean of runs"}


def test_what_is_no_number_is_left_out(make_run: MakeRun) -> None:
    values = [1.0, float("nan"), None, "x", float("inf"), 2.0]
    metrics = [{"epoch": epoch, "total": value} for epoch, value in enumerate(values, 1)]
    (figure,) = curve_figures(arms_of([make_run("odd", metrics=metrics)]), CURVES)
    assert [(p["epoch"], p["value"]) for p in points_of(figure.spec)] == [(1, 1.0), (6, 2.0)]


def test_the_mean_is_of_epochs_that_all_runs_have(make_run: MakeRun) -> None:
    long = [{"epoch": epoch, "total": 4.0} for epoch in (1, 2, 3)]
    short = [{"epoch": 1, "total": 2.0}]
    paths = [make_run("a-0", metrics=long), make_run("a-1", {"seed": 1}, metrics=short)]
    (figure,) = curve_figures(arms_of(paths), CURVES)
    mean = [p for p in points_of(figure.spec) if p["run"] == "mean of runs"]
    assert [(p["epoch"], p["value"]) for p in mean] == [(1, 3.0)]


def test_many_arms_have_other_strokes(make_run: MakeRun) -> None:
    metrics = [{"epoch": 1, "total": 1.0}, {"epoch": 2, "total": 2.0}]
    paths = [
        make_run(f"k{k}", {"divergence.num_subnetworks": k}, metrics=metrics) for k in range(1, 10)
    ]
    scope = scope_of(arms_of(paths), "")
    looks = {(arm.colour, arm.dash) for arm in scope.legend}
    assert len(looks) == 9
    assert len({colour for colour, _ in looks}) == len(PALETTE)
    svg = vl_convert.vegalite_to_svg(on_paper(scope.curves[0].spec))
    assert "stroke-dasharray" in svg


def test_files_hold_no_invisible_marks(sample_runs: list[Path]) -> None:
    figure = curve_figures(arms_of(sample_runs), CURVES)[0]
    whole = vl_convert.vegalite_to_svg(figure.spec)
    drawn = vl_convert.vegalite_to_svg(on_paper(figure.spec))
    assert whole.count("<path") > drawn.count("<path") >= 6
    assert ">ours<" in drawn
    assert ">simclr<" in drawn
    shown = vl_convert.vegalite_to_svg({**on_page(figure.spec, legend=False), "width": 300})
    assert ">ours<" not in shown


def test_evaluations_show_means_and_deviations(sample_runs: list[Path]) -> None:
    arms = arms_of(sample_runs)
    figure = evaluation_figure(arms, "digits", "key", "Title")
    datasets = [layer["data"]["values"] for layer in figure.spec["layer"]]
    means = next(d for d in datasets if "low" in d[0])
    assert len(means) == sum(
        any(row["variant"] == m.variant for run in arm.runs for row in run.evaluations)
        for m in measures(arms)
        for arm in arms
    )
    point = next(p for p in means if p["arm"] == "simclr" and p["measure"].startswith("linear"))
    values = [
        row["value"]
        for run in arms[1].runs
        for row in run.evaluations
        if row["protocol"] == "linear" and row["metric"] == "top1"
    ]
    assert point["value"] == pytest.approx(np.mean(values), rel=1e-5)
    assert point["high"] - point["low"] == pytest.approx(2 * np.std(values, ddof=1), abs=1e-3)


@pytest.mark.parametrize(
    ("seconds", "words"), [(33.2, "33 s"), (240.0, "4 min"), (7500.0, "2 h 5 min")]
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words
