"""The figure and the table of a search: what each trial came to, and nothing it did not."""

import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from deepbregman.reporting import search
from deepbregman.reporting.page.studies import read_study
from deepbregman.runs import Record, write_json

FIELDS = ("divergence.num_subnetworks", "divergence.normalise_input", "optimiser.learning_rate")


@pytest.fixture
def record() -> Record:
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
    return {**known, "space": space, "importance": None, "trials": trials}


def test_trials_are_counted_by_what_became_of_them(record: Record, tmp_path: Path) -> None:
    text = io.StringIO()
    Console(file=text, width=80).print(search.search_table(record))
    words = text.getvalue()
    assert "best of 6 trials (3 complete, 1 pruned, 2 diverged)" in words
    assert "…" not in words  # the names of fields are whole
    write_json(tmp_path / "trials.json", record)
    assert read_study(tmp_path).facts["trials"] == "3 complete, 1 pruned, 2 diverged"


def test_slices_of_the_page_show_all_of_the_space(record: Record, tmp_path: Path) -> None:
    write_json(tmp_path / "trials.json", record)
    count, flag, rate = (figure.spec["encoding"]["x"] for figure in read_study(tmp_path).figures)
    assert count["scale"]["domain"] == [10, 20]  # 12 is the largest that came to a value
    assert flag["scale"]["domain"] == ["true", "false"]
    assert (rate["scale"]["domain"], rate["scale"]["type"]) == ([1, 100000], "log")
    values = read_study(tmp_path).figures[1].spec["data"]["values"]
    assert {value["x"] for value in values} == {"true", "false"}


def test_trials_without_a_value_stand_at_the_foot(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def kept(**options: object) -> Figure:
        drawn.append(Figure(**options))  # type: ignore[arg-type]  # options of any kind
        return drawn[-1]

    monkeypatch.setattr(search, "Figure", kept)
    search.search_figure([tmp_path / "search.png"], record, {})
    axes = drawn[0].axes[0]
    marks = {part.get_label(): part for part in axes.collections}
    assert set(marks) == {
        *("trial (later is darker)", "best"),
        *("pruned (no value)", "diverged (no value)"),
    }
    for label, places in (("pruned (no value)", [13]), ("diverged (no value)", [14, 15])):
        part = marks[label]
        x, y = part.get_offsets().T
        assert list(x) == places
        foot = part.get_offset_transform().transform(part.get_offsets())[:, 1]
        lowest = axes.transData.transform([(10, 90.0)])[0, 1]
        assert (foot < lowest).all()  # below every value that was measured
        assert len(y) == len(places)
