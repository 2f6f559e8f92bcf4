"""Arms seed by seed, and their differences to a reference, to charts."""

from collections.abc import Sequence
from typing import Any

from deepbregman.reporting.printed import of_metric, printed_value
from deepbregman.reporting.summaries import COMPARED, change, reference_words, seeds_of
from deepbregman.runs import Record

from .arms import Arm
from .charts import PALETTE, Figure, arm_colour, chart_of, finished, rounded
from .dots import GREY, dot_chart


def pairs_figure(results: Record, printed: Sequence[Record], key: str) -> Figure | None:
    """Draw every seed, mean and deviation of the arms; None when none has been judged.

    Args:
        results: what ``results.json`` holds.
        printed: published series on the same data.
        key: of the study.
    """
    means: list[Record] = []
    runs, marks = [], []
    for metric, name in COMPARED.items():
        for arm in results["arms"]:
            summary = arm["metrics"].get(metric)
            if summary is None:
                continue
            mean, deviation = summary["mean"], summary["deviation"] or 0.0
            spread = "" if summary["deviation"] is None else f" ± {deviation:.2f}"
            means.append(
                {
                    **{"measure": name, "arm": arm["arm"], "value": rounded(mean)},
                    **{"low": rounded(mean - deviation), "high": rounded(mean + deviation)},
                    **{"shown": f"{mean:.2f}{spread} (n={summary['n']})", "n": summary["n"]},
                }
            )
            marks += [
                {
                    **{"measure": name, "value": part["values"][str(arm["x"])]},
                    **{"method": part["series"], "where": part["source"]},
                }
                for part in of_metric(printed, metric)
                if printed_value(part, arm)
            ]
        runs += [
            {
                **{"measure": name, "arm": row["arm"], "run": row["run"]},
                "value": rounded(row["metrics"][metric]),
            }
            for row in results["cells"]
            if metric in row["metrics"]
        ]
    if not means:
        return None
    order = list(dict.fromkeys(point["measure"] for point in means))
    counts = seeds_of(point["n"] for point in means)
    caption = f"top-1, %; mean, deviation over seeds (bar) and every seed (small), {counts}" + (
        "; diamonds: published, other settings" * bool(marks)
    )
    title = results["study"]["title"]
    spec = dot_chart(means, runs, marks, order, _stand_ins(results), title, caption)
    return Figure(f"{key}-arms", "Arms", caption, spec)


def difference_figure(results: Record, key: str) -> Figure | None:
    """Draw the differences to the reference with their intervals; None when there are none.

    Args:
        results: what ``results.json`` holds.
        key: of the study.
    """
    reference, main = reference_words(results), results["metric"]
    if reference is None or results["study"]["figure"] == "drops":  # those are drawn as drops
        return None
    shown = COMPARED if results["study"]["figure"] == "pairs" else {main: COMPARED.get(main, main)}
    points: list[Record] = []
    for metric, name in shown.items():
        for arm in results["arms"]:
            summary = arm.get("difference", {}).get(metric)
            if summary is not None:
                low, high = summary["interval"] or (summary["mean"], summary["mean"])
                points.append(
                    {
                        **{"measure": name, "arm": arm["arm"], "value": rounded(summary["mean"])},
                        **{"low": rounded(low), "high": rounded(high), "shown": change(summary)},
                        "n": summary["n"],
                    }
                )
    if not points:
        return None
    title = f"Difference to {reference}"
    caption = "points of top-1; mean of the differences seed by seed, bar: 95 % interval of it, "
    caption += seeds_of(point["n"] for point in points)
    spec = _difference_chart(points, results, title, caption)
    return Figure(f"{key}-differences", title, caption, spec)


def _difference_chart(points: list[Record], results: Record, title: str, caption: str) -> Record:
    import altair as alt

    several = len({point["measure"] for point in points}) > 1
    order = list(dict.fromkeys(point["measure" if several else "arm"] for point in points))
    place: dict[str, Any] = {
        "y": alt.Y(
            "measure:N" if several else "arm:N", sort=order, title=None, axis=alt.Axis(grid=True)
        )
    }
    names = list(dict.fromkeys(point["arm"] for point in points))
    if several:
        place["yOffset"] = alt.YOffset("arm:N", sort=names, scale=alt.Scale(domain=names))
        place["color"] = arm_colour([arm for arm in _stand_ins(results) if arm.name in names])
    else:  # black, which a mark has without a colour, is not seen on a dark page
        place["color"] = alt.value(PALETTE[0])
    words = {"arm:N": "arm", "measure:N": "measure", "shown:N": "difference"}
    base = chart_of(points).encode(**place)
    layers: list[Any] = [
        chart_of([{"value": 0}]).mark_rule(strokeWidth=1.2, color=GREY).encode(x=alt.X("value:Q")),
        base.mark_rule(strokeWidth=2, opacity=0.55).encode(x=alt.X("low:Q"), x2="high:Q"),
        base.mark_point(filled=True, size=75, opacity=1, shape="diamond").encode(
            x=alt.X("value:Q", title="points", axis=alt.Axis(grid=True)),
            tooltip=[alt.Tooltip(name, title=text) for name, text in words.items()],
        ),
    ]
    height = len(order) * (max(34, 15 * len(names)) if several else 24)
    return finished(alt.layer(*layers).properties(width=460, height=height), title, caption)


def _stand_ins(results: Record) -> list[Arm]:
    """Return the arms by name and colour; their folders may be elsewhere."""
    return [Arm(arm["arm"], (), place) for place, arm in enumerate(results["arms"])]
