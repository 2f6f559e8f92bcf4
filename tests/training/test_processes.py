"""Several processes with one joint batch take the steps that one process takes."""

import functools
import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepbregman.config import load_recipe, override
from deepbregman.training import processes as processes_module
from deepbregman.training.devices import is_mixed
from deepbregman.training.processes import compile_step, launch, start_compilers

from ..objectives import methods
from .conftest import RunJoined
from .joint_batch import CASES

SCRIPT = Path(__file__).with_name("joint_batch.py")
SEVERAL = [2, pytest.param(4, marks=pytest.mark.slow)]
Found = list[dict[str, Any]]


def found(folder: Path, processes: int, run_joined: RunJoined, *words: str) -> Found:
    """Run the script in so many processes; return what each found."""
    run_joined(str(SCRIPT), str(folder), *words, processes=processes)
    return [torch.load(folder / f"found{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[int, Path]:
    return {processes: tmp_path_factory.mktemp(f"of{processes}") for processes in (1, 2, 4)}


@pytest.fixture(scope="module")
def alone(folders, run_joined) -> dict[str, Any]:
    return found(folders[1], 1, run_joined)[0]


@pytest.fixture(scope="module", params=SEVERAL)
def several(request, folders, run_joined) -> Found:
    return found(folders[request.param], request.param, run_joined)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_takes_the_same_steps(case, alone, several):
    assert all(value.dtype != torch.float32 for value in alone[case].values())
    for found in several:  # parameters and running statistics, in every process
        assert difference(alone[case], found[case]) < 1e-10


@pytest.fixture(scope="module")
def methods_alone(tmp_path_factory, run_joined) -> dict[str, Any]:
    return found(tmp_path_factory.mktemp("methods"), 1, run_joined, "methods")[0]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_every_method_takes_the_same_steps(processes, methods_alone, tmp_path, run_joined):
    several = found(tmp_path, processes, run_joined, "methods")
    assert methods_alone.keys() == methods.CASES.keys()
    apart = {
        name: max(difference(expected, other[name]) for other in several)
        for name, expected in methods_alone.items()
    }
    assert {name: gap for name, gap in apart.items() if gap > 1e-10} == {}


def test_without_synchronised_norm_the_steps_differ(alone, several):
    assert difference(alone["norm apart"], several[0]["norm apart"]) > 1e-5


def test_synchronised_norm_is_the_norm_of_the_joint_batch(alone, several):
    truth = alone["normalised"]  # torch's own batch norm
    assert len(truth) == 3 * 6 + 2 * 4
    for name, expected in truth.items():
        parts = [found["normalised"][name] for found in several]
        if "grad" in name:
            parts = [torch.stack(parts).sum(dim=0)]
        elif any(part in name for part in ("output", "input", "judged")):
            parts = [torch.cat(parts)]
        for part in parts:
            torch.testing.assert_close(part, expected, rtol=0.0, atol=1e-10, msg=name)


def test_processes_see_slices_of_the_views_of_one(alone, several):
    shares = [found["views"] for found in several]
    assert torch.equal(torch.cat(shares, dim=1), alone["views"])
    assert not torch.equal(shares[0], shares[1])


def test_dropout_differs_by_process_and_step_and_comes_again(several):
    masks = [found["dropped"] for found in several]
    for first, second, again in masks:
        assert torch.equal(first, again)
        assert 0.4 < (first == second).double().mean() < 0.6  # as independent coins agree
    assert 0.4 < (masks[0][0] == masks[1][0]).double().mean() < 0.6


def test_metrics_are_those_of_the_joint_batch(alone, several, folders):
    one, other = (
        [
            json.loads(line)
            for line in (folders[count] / "fitted/metrics.jsonl").read_text().splitlines()
        ]
        for count in (1, len(several))
    )
    assert [record["epoch"] for record in other] == [1, 2]  # one line an epoch: one process wrote
    for before, after in zip(one, other, strict=True):
        assert before.keys() == after.keys()
        for name in before.keys() - {"images_per_second", "views_per_second"}:
            assert after[name] == pytest.approx(before[name], rel=1e-5), name  # diagnosed in 32 bit
        for name in ("total", "contrastive", "divergence", "knn"):
            assert after[name] == pytest.approx(before[name], rel=1e-9), name


def test_only_the_first_process_writes(alone, several, folders):
    one, other = (
        sorted(path.name for path in (folders[count] / "fitted").rglob("*"))
        for count in (1, len(several))
    )
    assert one == other
    record = json.loads((folders[len(several)] / "fitted/provenance.json").read_text())
    assert record["processes"] == len(several)


@pytest.mark.slow
def test_no_thread_of_a_group_is_left_when_the_interpreter_is_taken_down(run_joined, tmp_path):
    """One that then frees a tensor would abort the process: rarely, and after a complete run."""
    script = tmp_path / "script.py"
    script.write_text(
        """if True:
            import atexit
            import pathlib
            from deepbregman.training.processes import gather_values, launch

            def talking():
                threads = pathlib.Path("/proc/self/task").glob("*/comm")
                return [name for path in threads if "gloo" in (name := path.read_text())]

            gather_values(launch("cpu"), 1)
            assert talking()
            atexit._run_exitfuncs()
            assert not talking(), talking()
        """
    )
    run_joined(str(script))


@pytest.mark.slow
def test_one_does_not_wait_at_its_end_for_a_vote_that_never_comes(run_joined, tmp_path):
    """As after an error in one process, while another waits for what that one will never send."""
    script = tmp_path / "script.py"
    script.write_text(
        """if True:
            import os
            import torch
            import torch.distributed as dist
            from deepbregman.training import processes

            processes.LEAVE_SECONDS = 0.5
            fabric = processes.launch("cpu")
            if fabric.global_rank == 0:
                processes.Vote(fabric).cast([])
            else:
                try:
                    dist.all_reduce(torch.zeros(1))
                except RuntimeError as error:
                    os._exit("closed by peer" not in str(error))
        """
    )
    run_joined(str(script))


def test_precision_follows_the_device_unless_chosen():
    config = load_recipe("digits")
    assert not is_mixed(config, torch.device("cpu"))
    assert is_mixed(config, torch.device("cuda"))
    chosen = override(config, {"training.precision": "bf16-mixed"})
    assert is_mixed(chosen, torch.device("cpu"))
    assert not is_mixed(override(config, {"training.precision": "32-true"}), torch.device("cuda"))


def test_tips_on_lower_precision_are_not_the_users_business():
    with warnings.catch_warnings(record=True) as heard:
        fabric = launch("cpu")
        config = override(load_recipe("digits"), {"training.compile": "yes"})
        compile_step(torch.nn.Linear(2, 2), config, fabric)
        warnings.warn("TensorFloat32 tensor cores for float32 products available", stacklevel=1)
    # torch may have other things to say.
    assert not [warning for warning in heard if "float32" in str(warning.message).lower()]
    speaker = logging.getLogger("lightning_fabric.utilities.rank_zero")
    assert speaker.isEnabledFor(logging.WARNING)
    assert not speaker.isEnabledFor(logging.INFO)


@pytest.mark.parametrize(
    ("device", "wanted", "starts"),
    [("cuda", "auto", True), ("cuda", "yes", True), ("cuda", "no", False), ("cpu", "auto", False)],
)
def test_compilers_start_before_they_are_needed(monkeypatch, device, wanted, starts):
    started: list[str] = []
    for name in ("warm_pool", "wakeup"):
        place = f"torch._inductor.async_compile.AsyncCompile.{name}"
        start = functools.partial(started.append, name)
        monkeypatch.setattr(place, start, raising=False)  # torch 2.7 has not both
    fabric: Any = SimpleNamespace(device=torch.device(device))
    start_compilers(override(load_recipe("digits"), {"training.compile": wanted}), fabric)
    assert started == (["warm_pool", "wakeup"] if starts else [])


class Double(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return 2 * images


def test_runs_of_other_batches_are_compiled_for_their_own_sizes(monkeypatch):
    """A study trains many recipes in one process; torch would take sizes that vary as unknown."""
    compiled: list[list[Any]] = []

    def keep_sizes(graph: Any, inputs: Sequence[Any], **_: Any) -> Any:
        compiled.append([size for part in inputs for size in getattr(part, "shape", [part])])
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", keep_sizes)
    config = override(load_recipe("digits"), {"training.compile": "yes"})
    for batch in (4, 6):
        step = Double()  # a bare layer is not compiled by torch 2.7
        compile_step(step, config, launch("cpu"))
        step(torch.zeros(batch, 2))
    assert len(compiled) == 2
    assert all(type(size) is int for sizes in compiled for size in sizes)
    torch.compiler.reset()


def test_a_process_computes_on_its_share_of_the_cpus(monkeypatch):
    """As in a container with one CPU of many, or beside other processes of the run."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(processes_module, "count_cpus", lambda local_processes: 2)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        launch("cpu")
        assert torch.get_num_threads() == 3  # the user has chosen
        monkeypatch.delenv("OMP_NUM_THREADS")
        launch("cpu")
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(processes_module, "count_cpus", lambda local_processes: 64)
        launch("cpu")
        assert torch.get_num_threads() == 2  # never more
    finally:
        torch.set_num_threads(before)
