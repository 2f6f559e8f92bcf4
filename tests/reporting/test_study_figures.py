"""The figure and the table of a study with many series of long names."""

import io
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from deepbregman.reporting import studies
from deepbregman.reporting.studies import study_figure, study_table
from deepbregman.runs import Record
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
