"""Losses of the joint batch in a loop of the user's own: ``gather=deepbregman.gather``."""

import runpy
from pathlib import Path

import torch

import deepbregman

SCRIPT = str(Path(__file__).with_name("gathered_losses.py"))


def test_two_processes_have_the_losses_and_gradients_of_one(run_joined, tmp_path):
    before = torch.get_rng_state()
    runpy.run_path(SCRIPT)["main"](str(tmp_path / "one"))
    torch.set_rng_state(before)
    run_joined(SCRIPT, str(tmp_path / "two"), processes=2)
    alone = torch.load(tmp_path / "one.0")
    assert alone["losses"].min() > 0.1
    assert all(gradient.abs().max() > 1e-4 for gradient in alone["gradients"])
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"two.{rank}"), alone)


def test_in_one_process_nothing_is_joined():
    rows = torch.rand(3, 2)
    assert deepbregman.gather(rows) is rows
