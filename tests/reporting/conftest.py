"""Four tiny runs on digits in two arms, a page of them, and folders written by hand."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deepbregman.commands.evaluate import evaluate
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import Config, load_recipe, override
from deepbregman.evaluation import linear
from deepbregman.reporting.page.writing import Written, report
from deepbregman.runs import Record, Run, provenance

ARMS: Mapping[str, Mapping[str, Any]] = {"ours": {}, "simclr": {"divergence.weight": 0.0}}


@pytest.fixture(scope="session")
def sample_runs(tmp_path_factory: pytest.TempPathFactory, short_config: Config) -> list[Path]:
    """Pretrain and judge two arms with two seeds each."""
    choose = linear.choose_l2

    def chosen(*arguments: Any, **options: Any) -> Any:  # choosing takes most of the time
        return choose(*arguments, **{**options, "grid": (0.1,)})

    folder = tmp_path_factory.mktemp("samples")
    paths = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "choose_l2", chosen)
        for arm, changes in ARMS.items():
            for seed in (0, 1):
                config = override(short_config, {**changes, "seed": seed})
                run = pretrain(config, run=folder / f"{arm}-seed{seed}", accelerator="cpu")
                evaluate(run, epochs=0, accelerator="cpu")
                paths.append(run.path)
    return paths


@pytest.fixture(scope="session")
def sample_page(tmp_path_factory: pytest.TempPathFactory, sample_runs: list[Path]) -> Written:
    return report(sample_runs, tmp_path_factory.mktemp("page") / "report")


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write run folders by hand: configuration, metrics and results as they are given."""

    def make(
        name: str,
        changes: Mapping[str, Any] | None = None,
        metrics: list[Record] | None = None,
        result: Record | None = None,
    ) -> Path:
        config = override(load_recipe("digits"), changes or {})
        run = Run.create(tmp_path / "made" / name, config, provenance("a device"))
        for row in metrics or []:
            run.append_metrics(row)
        if result is not None:
            run.add_result(**result)
        return run.path

    return make


@pytest.fixture
def make_study(tmp_path: Path) -> Callable[..., Path]:
    """Write the folder of a grid as the study engine leaves it."""

    def make(name: str, figure: str = "line", data: str = "cifar10") -> Path:
        folder = tmp_path / "studies" / name
        folder.mkdir(parents=True)
        arms = [("none", "SimCLR", 0), ("5", "with divergence", 5), ("200", "with divergence", 200)]
        means = {"none": 90.0, "5": 91.25, "200": 92.5}
        results: Record = {
            "study": {
                "name": "kappa",
                "title": "How many subnetworks?",
                "arms": [{"name": n, "beyond": n == "none"} for n, _, _ in arms],
                "x_label": "number of subnetworks",
                "figure": figure,
                "reference": None if figure == "drops" else "none",
                "published": [
                    {
                        "series": "the paper",
                        "values": {"5": 85.2, "200": 92.8},
                        "data": "cifar10",
                        "source": "a table",
                    }
                ],
                "note": "A note.",
            },
            **{"recipe": "paper", "data": data, "epochs": 4, "judge": "test"},
            "metric": "linear, cached features",
            "arms": [
                {
                    **{"arm": n, "series": series, "x": x, "num_diverged": 0},
                    "metrics": {
                        "linear, cached features": {"mean": means[n], "deviation": 0.5, "n": 3}
                    },
                    "against": None if n == "none" else "none",
                    "difference": {}
                    if n == "none"
                    else {
                        "linear, cached features": {
                            **{"mean": means[n] - 90.0, "deviation": 0.25, "n": 3},
                            "interval": [means[n] - 90.62, means[n] - 89.38],
                        }
                    },
                }
                for n, series, x in arms
            ],
            "cells": [{"arm": n, "run": f"{n}-seed{s}"} for n, _, _ in arms for s in (0, 1, 2)],
        }
        (folder / "study.json").write_text("{}")
        (folder / "results.json").write_text(json.dumps(results))
        return folder

    return make
