"""Draw the figures of the documentation from the records in results/.

Run from the root of the project: ``python docs/images/draw.py``. ``quickstart.png`` is what
``deepbregman quickstart`` draws, and ``report.png`` shows the page in docs/examples/digits-report.
"""

import json
from pathlib import Path

import altair
import pandas
import torch

from deepbregman.method.bregman import paired_divergence
from deepbregman.reporting.charts import PALETTE
from deepbregman.reporting.figures import save_speed_figure
from deepbregman.reporting.grid_charts import save_study_figure
from deepbregman.reporting.paper_tables import tabulate_quantities
from deepbregman.reporting.searches import save_search_figure
from deepbregman.studies.tables import collect_results

IMAGES = Path(__file__).parent
RESULTS = IMAGES.parents[1] / "results"

for image in sorted(IMAGES.glob("study-*.png")):
    name = image.stem.removeprefix("study-")
    save_study_figure(
        [image], json.loads((RESULTS / "studies" / name / "results.json").read_text())
    )
for image in sorted(IMAGES.glob("search-*.png")):
    name = image.stem.removeprefix("search-")
    save_search_figure(
        [image], json.loads((RESULTS / "studies" / name / "trials.json").read_text())
    )
save_speed_figure(IMAGES / "speed.png", json.loads((RESULTS / "bench/h200/main.json").read_text()))


def draw_bank() -> None:
    """Draw accuracy over the size of the bank, once the study of the teacher has those arms."""
    results = json.loads((RESULTS / "studies" / "teacher" / "results.json").read_text())
    size = "divergence.num_subnetworks"
    places = {
        arm["name"]: {"x": arm["changes"][size], "series": "bank"}
        for arm in results["study"]["arms"]
        if arm["series"] == "bank"
    }
    if not places.keys() & {arm["arm"] for arm in results["arms"]}:
        return
    places |= {"recipe": {"x": 4096, "series": "bank"}, "none": {}}
    arms = [{**arm, **places[arm["arm"]]} for arm in results["arms"] if arm["arm"] in places]
    title = "How many subnetworks, if a bank of past targets gives them?"
    study = {"title": title, "figure": "line", "reference": "none", "x_label": "size of the bank"}
    cells = [row for row in results["cells"] if row["arm"] in places]
    changed = {"arms": arms, "cells": cells, "study": results["study"] | study}
    save_study_figure([IMAGES / "bank.png"], results | changed)


draw_bank()

PAIRS = {
    "best - simclr": "best - simclr",
    "best - best-control": "best - its control",
    "paper - paper-without": "paper - the same without the divergence",
}
DATASETS = {"cifar10": "CIFAR-10", "ham10000": "HAM10000"}


def draw_where_it_helps() -> None:
    """Draw the differences between arms by protocol, the datasets side by side."""
    results = collect_results(RESULTS / "studies" / "tables")
    tables = {table.key: table for table in tabulate_quantities(results)}
    panels: dict[str, list[dict[str, object]]] = {}
    seeds: dict[str, list[int]] = {}
    for data, title in DATASETS.items():
        table = tables[f"{data}-in-short-differences"]
        points = panels[title] = []
        for row in table.rows:
            for pair, cell in zip(table.columns, row.cells, strict=True):
                if pair in PAIRS and cell.summary is not None:
                    mean = cell.summary["mean"]
                    low, high = cell.summary["interval"] or (mean, mean)
                    seeds.setdefault(title, []).append(cell.summary["n"])
                    name = row.name.rpartition(", ")[0]  # without the metric
                    points.append({"protocol": name, "pair": PAIRS[pair], "mean": mean})
                    points[-1] |= {"low": low, "high": high}
    means = [point["mean"] for points in panels.values() for point in points]
    # Two seeds make intervals so wide that the means would lie on one line: bars may be cut.
    scale = altair.Scale(domain=[min(means) - 4.0, max(means) + 2.0], nice=False)
    colour = altair.Scale(domain=list(PAIRS.values()), range=PALETTE[: len(PAIRS)])

    def draw(title: str, points: list[dict[str, object]], *, labels: bool) -> altair.LayerChart:
        base = altair.Chart(pandas.DataFrame(points)).encode(
            y=altair.Y("protocol:N", sort=None, title=None, axis=altair.Axis(labels=labels)),
            yOffset=altair.YOffset("pair:N", sort=list(PAIRS.values())),
            color=altair.Color("pair:N", title=None, scale=colour),
        )
        bars = base.mark_rule(clip=True, strokeWidth=2, opacity=0.6).encode(
            x=altair.X("low:Q", scale=scale), x2="high:Q"
        )
        dots = base.mark_circle(size=60, opacity=1.0).encode(
            x=altair.X("mean:Q", scale=scale, title="difference, points")
        )
        zero = altair.Chart().mark_rule(strokeDash=[4, 3], color="#888888")
        zero = zero.encode(x=altair.datum(0.0, type="quantitative", scale=scale))
        name = f"{title}, {min(seeds[title])} to {max(seeds[title])} seeds"
        return (zero + bars + dots).properties(title=name, width=300, height=altair.Step(13))

    (first, *rest) = panels.items()
    chart = altair.hconcat(
        draw(*first, labels=True), *(draw(*panel, labels=False) for panel in rest), spacing=20
    ).configure_axis(labelFontSize=12, titleFontSize=12, titleFontWeight=400, labelLimit=260)
    chart = chart.configure_legend(
        orient="bottom", labelFontSize=12, labelLimit=400, symbolOpacity=1
    )
    chart.save(IMAGES / "where-it-helps.png", scale_factor=2)


draw_where_it_helps()


def draw_forms() -> None:
    """Draw D(p, q) and its gradient over p1 - p2, for a q that prefers the first of two scores."""
    gap = torch.linspace(-3.0, 3.0, 241)
    q = torch.tensor([[1.0, 0.0]]).expand(len(gap), 2)
    rows = []
    for form, temperature in (("hard", 0.0), ("T = 0.2", 0.2), ("T = 0.5", 0.5), ("T = 1", 1.0)):
        p = torch.stack([gap, torch.zeros_like(gap)], dim=1).requires_grad_()
        value = paired_divergence(p, q, temperature)
        (slope,) = torch.autograd.grad(value.sum(), p)
        for name, numbers in (("D(p, q)", value), ("dD / dp₁", slope[:, 0])):
            rows += [
                {"p₁ - p₂": x, "y": y, "form": form, "panel": name}
                for x, y in zip(gap.tolist(), numbers.tolist(), strict=True)
            ]
    line = (
        altair.Chart()
        .mark_line()
        .encode(
            x=altair.X("p₁ - p₂:Q"),
            y=altair.Y("y:Q", title=None),
            color=altair.Color("form:N", sort=None, title="q = (1, 0)"),
        )
        .properties(width=320, height=220)
    )
    frame = pandas.DataFrame(rows)
    chart = altair.hconcat(
        *(
            line.properties(data=frame[frame["panel"] == panel], title=panel)
            for panel in ("D(p, q)", "dD / dp₁")
        )
    )
    chart.save(IMAGES / "divergence-forms.png", scale_factor=2)


draw_forms()


RULES = {
    ("few", "linear"): "linear classifier",
    ("few", "nearest mean, cosine"): "nearest mean, cosine",
    ("few", "nearest mean, cosine of centred features"): "nearest mean, cosine, centred",
    ("few", "nearest class, divergence over a bank"): "nearest class, divergence over a bank",
    ("label", "without the bank"): "label without the bank, older rules",
    ("label", "with the bank"): "label, older rules",
}


def draw_few_labels() -> None:
    """Draw accuracy over the number of labels of each class; a band is the deviation over draws."""
    record = json.loads((RESULTS / "measures" / "cifar10-fast-400.json").read_text())
    rows = [
        {
            **{"labels": row["labels_per_class"], "value": row["mean"]},
            "rule": RULES[row["protocol"], row["variant"]],
            "low": row["mean"] - row["deviation"],
            "high": row["mean"] + row["deviation"],
        }
        for row in record["rows"]
        if (row["protocol"], row["variant"]) in RULES
    ]
    base = altair.Chart(pandas.DataFrame(rows)).encode(
        x=altair.X(
            "labels:Q",
            title="labels of each class",
            scale=altair.Scale(type="log", domain=[1, 20]),
            axis=altair.Axis(values=[1, 2, 3, 5, 10, 20]),
        ),
        color=altair.Color(
            "rule:N",
            title=None,
            scale=altair.Scale(domain=list(RULES.values()), range=PALETTE[: len(RULES)]),
            legend=altair.Legend(labelLimit=260, symbolOpacity=1.0, symbolSize=80),
        ),
    )
    scale = altair.Scale(zero=False)
    lines = base.mark_line(point=True).encode(
        y=altair.Y("value:Q", title="mean accuracy over the classes, %", scale=scale)
    )
    bands = base.mark_area(opacity=0.1).encode(y=altair.Y("low:Q", scale=scale), y2="high:Q")
    chart = (bands + lines).properties(width=460, height=300)
    chart.save(IMAGES / "few-labels.png", scale_factor=2)


draw_few_labels()
