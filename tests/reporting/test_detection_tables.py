"""What pretraining adds to detectors: differences against scipy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from deepbregman.reporting import comparison
from deepbregman.reporting.detection_tables import compare_trunks
from deepbregman.reporting.records import RunRecord, group_runs
from deepbregman.reporting.tables import to_markdown
from deepbregman.runs import Record

MakeRun = Callable[..., Path]
PRETRAINED, RANDOM = [50.0, 52.5, 54.0], [40.0, 43.0, 41.0]


def row(variant: str, values: list[float], **changes: Any) -> Record:
    return {
        **{"protocol": "detect", "variant": variant, "data": "/images/VOCdevkit", "metric": "AP50"},
        **{"value": sum(values) / len(values), "values": values, "seed": 0, "n": len(values)},
        **{"num_train": 60, "num_test": 30, "epoch": 3, "epochs": 3},
        "details": {"iterations": 600, "num_loaded": 120 * variant.endswith("pretrained")},
        **changes,
    }


def compare(*rows: Record) -> list[tuple[str, Record]]:
    return [(measure.variant, pair) for measure, pair in compare_trunks([rows]).items()]


def test_detectors_are_paired_by_their_seed():
    rows = row("C4, pretrained", PRETRAINED), row("C4, random", RANDOM)
    ((variant, pair),) = compare(*rows)
    assert variant == "C4, pretrained - random"
    assert pair["mean"] == pytest.approx((10.0 + 9.5 + 13.0) / 3)
    expected = stats.ttest_rel(PRETRAINED, RANDOM).confidence_interval(0.95)
    assert pair["interval"] == pytest.approx(list(expected))
    # The random ones have seeds 1 and 2 only: 52.5 - 43 and 54 - 41.
    ((_, pair),) = compare(rows[0], row("C4, random", [43.0, 41.0], seed=1))
    assert (pair["mean"], pair["n"]) == (11.25, 2)
    ((_, pair),) = compare(row("C4, pretrained", [50.0]), row("C4, random", [40.0]))
    assert (pair["mean"], pair["deviation"], pair["interval"]) == (10.0, None, None)


@pytest.mark.parametrize(
    "other",
    [
        row("FPN, random", RANDOM),
        row("C4, random", RANDOM, metric="AP75"),
        row("C4, random", RANDOM, num_test=29),
        row("C4, random", RANDOM, data="/elsewhere/VOCdevkit"),
        row("C4, random", RANDOM, details={"iterations": 60, "num_loaded": 0}),
        row("C4, random", RANDOM, seed=3),
        row("C4, random", RANDOM) | {"values": None},
        row("C4, random", RANDOM) | {"values": [float("nan")]},
    ],
)
def test_what_differs_in_more_than_the_weights_is_not_compared(other):
    assert compare(row("C4, pretrained", PRETRAINED), other) == []


def test_the_report_has_a_table_of_the_differences(make_run):
    """An arm of two runs counts each run once: 10 and 20 points, however many detectors it has."""
    first = [row("C4, pretrained", PRETRAINED), row("C4, random", RANDOM)]
    second = [row("C4, pretrained", [30.0, 50.0]), row("C4, random", [20.0, 40.0])]
    third = [row("C4, pretrained", [70.0]), row("C4, random", [50.0])]
    alone = [row("C4, pretrained", PRETRAINED)]
    paths = [
        make_run("one", {"divergence.num_subnetworks": 7}, result={"evaluations": first}),
        make_run("two-seed0", {"seed": 0}, result={"evaluations": second}),
        make_run("two-seed1", {"seed": 1}, result={"evaluations": third}),
        make_run("three", {"divergence.num_subnetworks": 8}, result={"evaluations": alone}),
    ]
    *_, table = comparison.compare(group_runs(map(RunRecord.read, paths)), "").tables
    assert table.title == "Detection on VOCdevkit: pretrained - random"
    assert table.columns == ("detect: C4, pretrained - random (AP50)",)
    found = {row.name: row.cells[0].summary for row in table.rows}
    assert [*found] == ["one", "two"]
    assert (found["one"]["mean"], found["one"]["n"]) == (pytest.approx(32.5 / 3), 3)
    assert (found["two"]["mean"], found["two"]["n"]) == (15.0, 2)
    expected = stats.ttest_1samp([10.0, 20.0], 0.0).confidence_interval(0.95)
    assert found["two"]["interval"] == pytest.approx(list(expected))
    assert "| two | +15.00 ± 7.07 [-48.53, +78.53] (n=2) |" in to_markdown(table)
