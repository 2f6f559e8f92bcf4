"""What the tests of the verbs share."""

import pytest

from deepbregman.evaluation import linear


@pytest.fixture(autouse=True)
def strong_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the protocols try strong penalties only: fits with weak ones take most of the time."""
    monkeypatch.setattr(linear, "L2_GRID", (1e-2, 1e-1))
