"""The newcomer's command, shortened: its table, its figure, its claim."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from deepbregman.commands.quickstart import measure, quickstart, show
from deepbregman.evaluation.linear import fit_linear


@pytest.mark.parametrize("epochs", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str], epochs: int) -> None:
    run = quickstart(run=tmp_path / "run", epochs=epochs)
    show(run, Console(width=120))
    rows = {row["features"]: row for row in run.result()["quickstart"]}
    assert list(rows) == ["raw pixels", "untrained encoder", "pretrained encoder"]
    # Raw pixels need no training, so their line is the same on every machine.
    assert rows["raw pixels"]["linear"] == pytest.approx(96.4, abs=0.5)
    assert rows["raw pixels"]["few_labels"] == pytest.approx(84.7, abs=0.5)
    gain = rows["pretrained encoder"]["few_labels"] - rows["raw pixels"]["few_labels"]
    assert gain > 2.0 or epochs == 1
    with Image.open(run.path / "quickstart.png") as figure:
        assert min(figure.size) > 800
        assert len(figure.convert("RGB").getcolors(maxcolors=100_000) or []) > 50
    out = capsys.readouterr().out
    assert f"figure: {run.path / 'quickstart.png'}" in out
    assert f"{rows['pretrained encoder']['few_labels']:.1f}" in out


def test_measure_judges_separable_features_as_perfect() -> None:
    labels = torch.arange(400) % 4
    features = torch.nn.functional.one_hot(labels, 4).float() + 0.01 * torch.randn(
        400, 4, generator=torch.Generator().manual_seed(0)
    )
    row = measure("easy", (features[:300], labels[:300]), (features[300:], labels[300:]), seed=0)
    assert (row["linear"], row["few_labels"], row["knn"]) == (100.0, 100.0, 100.0)
    assert fit_linear(features, labels, num_classes=4).weight.shape == (4, 4)
