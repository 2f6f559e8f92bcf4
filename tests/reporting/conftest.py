"""A page of committed records, drawn once, and folders written by hand."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deepbregman.commands.report import Report, report
from deepbregman.config import load_recipe, override
from deepbregman.runs import Record, Run, collect_provenance

RECORDS = Path(__file__).parents[2] / "results" / "digits-report"


@pytest.fixture(scope="session")
def sample_runs() -> list[Path]:
    """Return the committed records of two arms with two seeds each, 30 epochs on digits."""
    return sorted(RECORDS.iterdir())


@pytest.fixture(scope="session")
def sample_page(tmp_path_factory, sample_runs) -> Report:
    return report(sample_runs, tmp_path_factory.mktemp("page") / "report")


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path) -> MakeRun:
    """Write run folders by hand: configuration, metrics and results as they are given."""

    def make(
        name: str,
        changes: Mapping[str, Any] | None = None,
        metrics: list[Record] | None = None,
        result: Record | None = None,
    ) -> Path:
        config = override(load_recipe("digits"), changes or {})
        run = Run.create(tmp_path / "made" / name, config, collect_provenance("a device"))
        lines = [json.dumps(row) + "\n" for row in metrics or []]
        (run.path / "metrics.jsonl").write_text("".join(lines))
        if result is not None:
            run.add_result(**result)
        return run.path

    return make


@pytest.fixture
def make_study(tmp_path) -> Callable[..., Path]:
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
            **{"recipe": "paper", "data": data, "epochs": 4, "evaluate_on": "test"},
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
            "cells": [
                {"arm": n, "seed": s, "run": f"{n}-seed{s}"} for n, _, _ in arms for s in (0, 1, 2)
            ],
        }
        (folder / "study.json").write_text("{}")
        (folder / "results.json").write_text(json.dumps(results))
        return folder

    return make
