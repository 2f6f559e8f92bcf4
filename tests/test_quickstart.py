"""The newcomer's command, shortened: its table, its figure, its claim."""

import functools

import pytest
import torch
from PIL import Image
from rich.console import Console
from sklearn.manifold import TSNE

from deepbregman.commands import quickstart as commands
from deepbregman.commands.quickstart import measure, quickstart, show
from deepbregman.evaluation import linear
from deepbregman.evaluation.linear import fit_linear
from deepbregman.reporting import charts
from deepbregman.runs import Record, Run


@pytest.fixture
def hurried(monkeypatch) -> None:
    """Fewer draws of labels, one penalty, and maps that are not finished."""
    choose = linear.choose_l2
    monkeypatch.setattr(commands, "DRAWS", 3)
    monkeypatch.setattr(linear, "choose_l2", lambda *a, **k: choose(*a, **{**k, "grid": (1e-3,)}))
    monkeypatch.setattr("sklearn.manifold.TSNE", functools.partial(TSNE, max_iter=250))


def check(run: Run, capsys: pytest.CaptureFixture[str], tolerance: float) -> dict[str, Record]:
    """Check what a quickstart shows, and return its rows."""
    show(run, Console(width=120))
    rows = {row["features"]: row for row in run.result()["quickstart"]}
    assert list(rows) == ["raw pixels", "untrained encoder", "pretrained encoder"]
    # Raw pixels need no training, so their line is the same on every machine.
    assert rows["raw pixels"]["linear"] == pytest.approx(96.4, abs=tolerance)
    assert rows["raw pixels"]["few_labels"] == pytest.approx(85.8, abs=tolerance)
    with Image.open(run.path / "quickstart.png") as figure:
        assert min(figure.size) > 400 * charts.PNG_SCALE
        assert len(figure.convert("RGB").getcolors(maxcolors=100_000) or []) > 50
    out = capsys.readouterr().out
    assert f"figure: {run.path / 'quickstart.png'}" in out
    assert f"{rows['pretrained encoder']['few_labels']:.1f}" in out
    return rows


@pytest.mark.usefixtures("hurried")
def test_table_and_figure(tmp_path, capsys):
    check(quickstart(run=tmp_path / "run", epochs=1), capsys, tolerance=3.0)


@pytest.mark.slow
def test_few_labels_gain(tmp_path, capsys):
    rows = check(quickstart(run=tmp_path / "run", epochs=12), capsys, tolerance=0.5)
    assert rows["pretrained encoder"]["few_labels"] - rows["raw pixels"]["few_labels"] > 2.0


def test_measure_judges_separable_features_as_perfect():
    labels = torch.arange(400) % 4
    features = torch.nn.functional.one_hot(labels, 4).float() + 0.01 * torch.randn(
        400, 4, generator=torch.Generator().manual_seed(0)
    )
    row = measure("easy", (features[:300], labels[:300]), (features[300:], labels[300:]), seed=0)
    assert (row["linear"], row["few_labels"], row["knn"]) == (100.0, 100.0, 100.0)
    assert fit_linear(features, labels, num_classes=4).weight.shape == (4, 4)
