"""What the tests of the verbs share."""

from collections.abc import Callable

import pytest

from deepbregman.evaluation import linear
from deepbregman.runs import Run

Refused = Callable[[str, Run, list[object], str, str], None]


@pytest.fixture(autouse=True)
def strong_penalties(monkeypatch) -> None:
    """Let the protocols try strong penalties only: fits with weak ones take most of the time."""
    monkeypatch.setattr(linear, "L2_GRID", (1e-2, 1e-1))


@pytest.fixture
def refused(command, tmp_path, monkeypatch) -> Refused:
    """Check that a verb refuses its words, and writes nothing beside a file that is there."""

    def check(verb: str, run: Run, words: list[object], expected: str, there: str) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / there).write_text("precious")
        before = (run.path / "result.json").read_bytes()
        code, _, err = command(verb, run.path, *words)
        assert code == 2
        assert expected in err
        assert [path.name for path in tmp_path.iterdir()] == [there]
        assert (tmp_path / there).read_text() == "precious"
        assert (run.path / "result.json").read_bytes() == before

    return check
