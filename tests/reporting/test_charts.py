"""Charts show what the records hold, no more and no less."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import vl_convert
from PIL import Image

from deepbregman.reporting.charts import (
    PALETTE,
    Figure,
    begin_chart,
    colour,
    dash,
    draw_evaluations,
    encode_arm,
    encode_shape,
    fit_to_file,
    fit_to_page,
    save_chart,
    slug,
    stack,
)
from deepbregman.reporting.curves import MAX_POINTS, draw_curves
from deepbregman.reporting.records import RunGroup, RunRecord, group_runs, list_measures
from deepbregman.runs import Record
from deepbregman.terminal import format_duration

MakeRun = Callable[..., Path]


def groups_of(paths: list[Path]) -> list[RunGroup]:
    return group_runs(RunRecord.read(path) for path in paths)


def points_of(spec: Record) -> list[Record]:
    return list(spec["data"]["values"])


def curves_of(paths: list[Path]) -> dict[str, Figure]:
    curves, diagnostics = draw_curves(groups_of(paths))
    return {figure.key: figure for figure in [*curves, *diagnostics]}


def test_an_arm_keeps_its_colour_where_another_is_left_out():
    """As the reference is in a chart of the differences to it."""
    scale = encode_arm({"best": 1, "control": 2}).to_dict()["scale"]
    assert scale == {"domain": ["best", "control"], "range": [colour(1), colour(2)]}


def test_curves_are_the_metrics(sample_runs):
    groups, figures = groups_of(sample_runs), curves_of(sample_runs)
    assert set(figures) == {
        *("total", "contrastive", "divergence", "knn", "learning-rate", "active-subnetworks"),
        *("usage-entropy", "divergences", "effective-rank", "alignment", "uniformity", "spread"),
        "views-per-second",
    }
    for key, metric in (("total", "total"), ("effective-rank", "effective_rank")):
        points = points_of(figures[key].spec)
        for group in groups:
            kept = []
            for run in group.runs:
                mine = [p for p in points if (p["arm"], p["run"]) == (group.name, run.name)]
                assert [p["epoch"] for p in mine] == list(range(1, 31))
                values = [p["value"] for p in mine]
                assert values == pytest.approx([row[metric] for row in run.metrics], rel=1e-5)
                kept.append([row[metric] for row in run.metrics])
            mean = [p["value"] for p in points if (p["arm"], p["run"]) == (group.name, MEAN)]
            assert mean == pytest.approx(np.mean(kept, axis=0), rel=1e-5)
    # A loss whose weight is 0 is recorded as 0; that is no curve.
    assert {p["arm"] for p in points_of(figures["divergence"].spec)} == {"bregman"}
    assert {p["kind"] for p in points_of(figures["divergences"].spec)} == {"positives", "negatives"}


MEAN = "mean of runs"


def test_every_loss_term_is_drawn_whatever_its_name(make_run):
    metrics = [
        {"epoch": epoch, "total": 3.0, "it's \\ odd": 1.0 / epoch, "usage": 0.0, "alignment": 0.0}
        for epoch in (1, 2)
    ]
    curves, diagnostics = draw_curves(groups_of([make_run("a", metrics=metrics)]))
    assert [figure.title for figure in curves] == ["Total loss", "It's \\ odd"]
    assert [figure.title for figure in diagnostics] == ["Alignment"]  # 0 is a value of it
    for figure in curves:
        assert figure.spec["layer"][0]["encoding"]["x"]["axis"]["values"] == [1, 2]  # no epoch 1.5
        assert "<path" in vl_convert.vegalite_to_svg(figure.spec)


def test_a_single_value_is_not_rounded(make_run):
    metrics = [{"epoch": 1, "total": 2.0}, {"epoch": 2, "total": 1.0, "neighbour_stability": 0.784}]
    figures = curves_of([make_run("a", metrics=metrics)])
    assert ">0.784</text>" in vl_convert.vegalite_to_svg(figures["neighbour-stability"].spec)
    assert "values" not in figures["total"].spec["layer"][0]["encoding"]["y"].get("axis", {})


def test_long_curves_are_thinned_and_keep_their_end(make_run):
    metrics = [{"epoch": epoch, "total": 1.0 / epoch} for epoch in range(1, 4001)]
    paths = [make_run(f"long-{seed}", {"seed": seed}, metrics=metrics[seed:]) for seed in (0, 1)]
    points = points_of(curves_of(paths)["total"].spec)
    assert 0.8 * MAX_POINTS < len(points) <= MAX_POINTS + 3
    assert {p["run"] for p in points if p["epoch"] == 4000} == {"long-0", "long-1", MEAN}


def test_what_is_no_number_is_left_out(make_run):
    values = [1.0, float("nan"), None, float("inf"), 2.0]
    metrics = [{"epoch": epoch, "total": value} for epoch, value in enumerate(values, 1)]
    points = points_of(curves_of([make_run("odd", metrics=metrics)])["total"].spec)
    assert [(p["epoch"], p["value"]) for p in points] == [(1, 1.0), (5, 2.0)]


def test_the_mean_is_of_epochs_that_all_runs_have(make_run):
    long = [{"epoch": epoch, "total": 4.0} for epoch in (1, 2, 3)]
    short = [{"epoch": 1, "total": 2.0}]
    paths = [make_run("a-0", metrics=long), make_run("a-1", {"seed": 1}, metrics=short)]
    mean = [p for p in points_of(curves_of(paths)["total"].spec) if p["run"] == MEAN]
    assert [(p["epoch"], p["value"]) for p in mean] == [(1, 3.0)]


def test_long_names_of_arms_are_written_out_one_in_a_line():
    names = [f"a-recipe-of-a-rather-long-name-and-of-its-number-{number}" for number in range(9)]
    places = {name: place for place, name in enumerate(names)}
    chart = begin_chart([]).mark_point()
    found = chart.encode(color=encode_arm(places), shape=encode_shape(places)).to_dict()["encoding"]
    legend = found["color"]["legend"]
    assert legend == found["shape"]["legend"]  # so they share one
    assert (legend["columns"], legend["labelLimit"]) == (1, 720)
    short = chart.encode(color=encode_arm({"best": 0, "simclr": 1})).to_dict()
    assert short["encoding"]["color"]["legend"]["columns"] == 3


def test_many_arms_have_other_strokes(make_run):
    metrics = [{"epoch": 1, "total": 1.0}, {"epoch": 2, "total": 2.0}]
    paths = [
        make_run(f"k{k}", {"divergence.num_subnetworks": k}, metrics=metrics) for k in range(1, 10)
    ]
    looks = {(colour(place), tuple(dash(place))) for place in range(len(paths))}
    assert len(looks) == 9
    assert len({look[0] for look in looks}) == len(PALETTE)
    svg = vl_convert.vegalite_to_svg(fit_to_file(curves_of(paths)["total"].spec))
    assert "stroke-dasharray" in svg


def test_files_hold_no_invisible_marks(sample_runs, tmp_path):
    figure = curves_of(sample_runs)["total"]
    whole = vl_convert.vegalite_to_svg(figure.spec)
    paths = [tmp_path / f"total.{kind}" for kind in ("svg", "png", "pdf")]
    save_chart(paths, figure.spec)
    drawn = paths[0].read_text()
    assert whole.count("<path") > drawn.count("<path") >= 6
    assert ">bregman<" in drawn
    assert ">simclr<" in drawn
    shown = vl_convert.vegalite_to_svg({**fit_to_page(figure.spec, legend=False), "width": 300})
    assert ">bregman<" not in shown
    with Image.open(paths[1]) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
    assert paths[2].read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("best/evaluations - CIFAR 10", "best-evaluations-cifar-10"),
        ("images_per_second", "images-per-second"),
        ("../новые 鳥", "новые-鳥"),
        ("..", "unnamed"),
    ],
)
def test_a_file_has_the_words_of_any_language_in_its_name(words, name):
    """Two studies with names in Chinese were both called unnamed, and refused side by side."""
    assert slug(words) == name


def test_charts_are_put_together_with_their_words(sample_runs):
    figures = [curves_of(sample_runs)[name] for name in ("total", "knn", "spread")]
    svg = vl_convert.vegalite_to_svg(stack(figures, "The title", ["A note."], columns=2))
    for words in ("The title", "A note.", "Total loss", "kNN monitor", "Spread"):
        assert f">{words}<" in svg


def test_evaluations_show_means_and_deviations(sample_runs):
    groups = groups_of(sample_runs)
    figure = draw_evaluations(groups, "digits", "key", "Title")
    datasets = [layer["data"]["values"] for layer in figure.spec["layer"]]
    means = next(d for d in datasets if "low" in d[0])
    assert len(means) == sum(
        any(row["variant"] == m.variant for run in group.runs for row in run.evaluations)
        for m in list_measures(groups)
        for group in groups
    )
    point = next(p for p in means if p["arm"] == "simclr" and p["measure"].startswith("linear"))
    values = [
        row["value"]
        for run in groups[1].runs
        for row in run.evaluations
        if row["protocol"] == "linear" and row["metric"] == "top1"
    ]
    assert point["value"] == pytest.approx(np.mean(values), rel=1e-5)
    assert point["high"] - point["low"] == pytest.approx(2 * np.std(values, ddof=1), abs=1e-3)


@pytest.mark.parametrize(
    ("seconds", "words"), [(33.2, "33 s"), (240.0, "4 min"), (7500.0, "2 h 5 min")]
)
def test_duration(seconds, words):
    assert format_duration(seconds) == words
