"""The loop on a GPU: no waits, no second compilation, the same bits again, memory as promised."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pytest
import torch
from torch._dynamo.utils import counters

from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import Config, load_recipe, override
from deepbregman.data import ArrayImages, channel_statistics
from deepbregman.method.losses import divergence_loss, nt_xent
from deepbregman.objectives import build_step
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.devices import measure_peak_memory, reset_peak_memory
from deepbregman.training.faults import Interrupted
from deepbregman.training.loop import Pretraining
from deepbregman.training.processes import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # those of CUDA and the compiler are not ours to mend
]


@pytest.fixture(autouse=True, scope="module")
def settings_of_torch_are_put_back() -> Iterator[None]:
    """What ``launch`` sets holds for the process, and would make other tests less exact."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()  # and gives back the memory of CUDA graphs


@pytest.fixture(scope="module")
def images() -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    shape = (2048, 3, 32, 32)
    return ArrayImages(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))


def small(changes: Mapping[str, Any]) -> Config:
    common = {"encoder.name": "small", "training.batch_size": 256}
    return override(load_recipe("best"), {**common, **changes})


# Waiting


def test_the_guard_sees_a_wait_and_is_lifted_after(no_host_sync):
    number = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_host_sync():
        number.item()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert number.item() == 1.0


@pytest.mark.parametrize("optimiser", ["sgd", "muon"])
@pytest.mark.parametrize(("compiled", "warm_up"), [("no", 2), ("auto", 4)])
def test_a_step_never_waits_for_the_device(
    images, tmp_path, no_host_sync, compiled, warm_up, optimiser
):
    """Plain, and as CUDA graphs once they are recorded."""
    config = small({"training.compile": compiled, "optimiser.name": optimiser})
    job = Pretraining(config, images, launch("cuda"), tmp_path / "run")
    job.step_module.train()
    feed = job.feed(0, 0)
    for _ in range(warm_up):
        job.advance(feed)
    before = {name: value.clone() for name, value in job.step_module.named_parameters()}
    with no_host_sync():
        for _ in range(3):
            outputs = job.advance(feed)
    assert job.step == warm_up + 3
    assert outputs.total.device.type == "cuda"
    assert outputs.total.isfinite()
    after = dict(job.step_module.named_parameters())
    assert not any(torch.equal(after[name], value) for name, value in before.items())


def test_every_epoch_has_the_peak_of_the_memory(uninterrupted):
    """A replayed CUDA graph allocates nothing, so later epochs keep the peak of the first."""
    peaks = [row["peak_gigabytes"] for row in uninterrupted.metrics()]
    assert peaks[0] > 0.0
    assert peaks == sorted(peaks)
    assert peaks[-1] < torch.cuda.mem_get_info()[1] / 1e9


def test_to_measure_the_memory_waits_for_nothing(no_host_sync):
    device = torch.device("cuda")
    large = torch.empty(10**8, dtype=torch.uint8, device=device)
    with no_host_sync():
        first = measure_peak_memory(device)["peak_gigabytes"]
        del large
        reset_peak_memory(device)
        second = measure_peak_memory(device)["peak_gigabytes"]
    assert first >= second + 0.1


# Going on


@pytest.fixture(scope="module")
def plain_config(short_config) -> Config:
    return override(short_config, {"training.compile": "no"})


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, plain_config) -> Run:
    return pretrain(plain_config, run=tmp_path_factory.mktemp("gpu") / "run", accelerator="cuda")


def without_the_clock(run: Run) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if not k.endswith(("_per_second", "_gigabytes"))}
        for row in run.metrics()
    ]


@pytest.mark.parametrize("stop_at", [3, 12, 14])
def test_a_stopped_run_goes_on_to_the_bit(
    plain_config, uninterrupted, tmp_path, stop_after, stop_at
):
    """Stopped inside the first epoch, at its very end, and inside the second."""
    with stop_after(stop_at), pytest.raises(Interrupted, match=r"SIGTERM.*--resume"):
        pretrain(plain_config, run=tmp_path / "run", accelerator="cuda")
    assert checkpoints.load(tmp_path / "run" / "checkpoints" / "last.pt")["step"] == stop_at
    resumed = resume(tmp_path / "run", accelerator="cuda")
    assert resumed.provenance()["device"] == torch.cuda.get_device_name()
    found, expected = (checkpoints.load(run.last_checkpoint) for run in (resumed, uninterrupted))
    for part in checkpoints.NETWORKS:
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)
    moments = found["optimiser"]["state"], expected["optimiser"]["state"]
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    assert without_the_clock(resumed) == without_the_clock(uninterrupted)


# Compiling

NUMBERS = {
    "divergence.sigma": 0.9,
    "divergence.temperature": 0.3,
    "divergence.smoothing": 0.5,
    "divergence.target_smoothing": 0.3,
    "teacher.momentum": 0.9,
    "divergence.weight": 0.4,
    "objective.temperature": 0.2,
    "objective.weight": 3.0,
    "optimiser.learning_rate": 0.01,
    "optimiser.momentum": 0.8,
    "optimiser.weight_decay": 1e-3,
}


def test_other_numbers_do_not_compile_again(images, tmp_path):
    """A number that is written into the graph is guarded there, and costs another graph.

    The same numbers must also have their effect: the loss is that of a step never compiled.
    """
    fabric = launch("cuda")

    def start(name: str, changes: Mapping[str, Any]) -> Pretraining:
        config = small({"training.precision": "32-true", **changes})
        job = Pretraining(config, images, fabric, tmp_path / name)
        job.step_module.train()
        return job

    def graphs() -> int:
        return int(counters["stats"]["unique_graphs"])

    counters.clear()
    job = start("first", {})
    feed = job.feed(0, 0)
    totals = [job.advance(feed).total.item() for _ in range(3)]
    compiled = graphs()
    assert compiled > 0  # else nothing here is tested
    for name, value in NUMBERS.items():
        job = start(name, {name: value})
        feed = job.feed(0, 0)
        for _ in range(2):
            job.advance(feed)
        assert graphs() == compiled, name
    job = start("all", NUMBERS)
    batch, uniforms = next(job.feed(0, 0)), job.share.draw_uniforms(job.step_module.views, 0)
    reference = build_step(job.config, *channel_statistics(images)).to(fabric.device).train()
    reference.load_state_dict(job.step_module.state_dict())
    outputs = reference(batch.images, batch.sizes, uniforms), job.advance(job.feed(0, 0))
    expected, found = (each.losses for each in outputs)
    assert graphs() == compiled
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)  # TF32 in both
    assert abs(found[0].item() - totals[0]) > 0.1 * totals[0]


# Memory


def peak_of_the_losses(
    num_images: int, num_subnetworks: int, pairs: Literal["views", "all"], smoothing: float | None
) -> int:
    """Bytes that the losses of two views and their gradients take at most."""
    widths = (128, 128, num_subnetworks, num_subnetworks)
    inputs = [torch.randn(num_images, d, device="cuda", requires_grad=True) for d in widths]

    def descend() -> None:
        z1, z2, o1, o2 = inputs
        (nt_xent(z1, z2) + divergence_loss(o1, o2, pairs=pairs, smoothing=smoothing)).backward()
        for tensor in inputs:
            tensor.grad = None

    descend()  # the workspace of cuBLAS is taken once, and kept
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    descend()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("pairs", ["views", "all"])
@pytest.mark.parametrize("smoothing", [None, 1.0])
def test_memory_of_the_losses_grows_with_pairs_and_with_scores_but_not_with_both(pairs, smoothing):
    """O(N^2 + N K): more subnetworks must not make every pair dearer."""

    def share(num_images: int, num_subnetworks: int) -> float:
        peak = peak_of_the_losses(num_images, num_subnetworks, pairs, smoothing)
        return peak / (num_images**2 + num_images * num_subnetworks)

    limit = 1.3 * share(512, 100)
    shares = {size: share(*size) for size in ((1024, 100), (2048, 100), (512, 1000), (2048, 1000))}
    assert all(value <= limit for value in shares.values()), (limit, shares)
