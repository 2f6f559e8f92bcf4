"""What several test modules share: a short run on digits, a few digits, forked command lines.

What takes seconds to import is imported where it is used: the process that hands the tests out to
others reads this file, too.
"""

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from deepbregman.cli import main
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import Config, load_recipe, override
from deepbregman.runs import Run

if TYPE_CHECKING:
    from torch import Tensor

# One thread, here and in the processes that tests start: what they run is small, threads would
# wait for each other on a busy machine, and results are compared to the bit.
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile("fast", max_examples=40, deadline=None)
settings.register_profile(
    "shared", parent=settings.get_profile("fast"), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

SHORT: Mapping[str, Any] = {
    "training.epochs": 2,
    "training.batch_size": 128,
    "training.knn_every": 1,
    "training.health_every": 0,
    "training.tensorboard": False,
    "optimiser.warmup_epochs": 0.5,
    "encoder.projection_hidden": 32,
    "encoder.embedding": 16,
    "divergence.num_subnetworks": 10,
    "divergence.hidden": 8,
}

Stages = tuple[tuple[int, int], ...]
Command = Callable[..., tuple[int, str, str]]
StopAfter = Callable[[int], contextlib.AbstractContextManager[None]]


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPU, unless ``-m`` asks for its tests: results are compared to the bit.

    It is hidden from all tests or from none: with ``-m "gpu or slow"`` the slow ones see it, too.
    """
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare the collector what stays: to look through all modules and tests takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_exception_interact(call: pytest.CallInfo[Any]) -> None:
    """End the tests by a signal that a run has caught, as it ends them between runs.

    Otherwise ``timeout 600 pytest`` fails the test of that moment, and goes on with the others.
    """
    error = call.excinfo.value if call.excinfo else None
    if number := getattr(error, "signal_number", None):
        pytest.exit(f"a signal from outside: {error}", returncode=128 + number)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extension modules tell of what they find at the end


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # torch may have been there before the environment said so


@pytest.fixture(scope="session", autouse=True)
def narrow_encoder(pytestconfig) -> Stages:
    """Make the small encoder narrow, so that its convolutions cost next to nothing.

    Slow tests, which ask what is learned, have the true one. Returns the true stages.
    """
    from deepbregman.method import networks

    true = networks.SMALL_STAGES
    if pytestconfig.option.markexpr.startswith("not slow"):
        networks.SMALL_STAGES = ((8, 1), (16, 2), (32, 1), (32, 2))
    return true


@pytest.fixture(scope="session", autouse=True)
def coarse_pictures() -> None:
    """Draw figures with a quarter of their pixels: to compress them takes longest."""
    from deepbregman.reporting import charts

    charts.PNG_SCALE /= 2


@pytest.fixture
def true_encoder(narrow_encoder, monkeypatch) -> None:
    monkeypatch.setattr("deepbregman.method.networks.SMALL_STAGES", narrow_encoder)


@pytest.fixture
def command(capsys, monkeypatch) -> Command:
    """Run the command line in this process; return its exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            main([str(word) for word in words])
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 1
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.fixture
def output(command) -> Callable[..., str]:
    """Run a command line that must succeed without a note or warning; return what it prints."""

    def run(*words: object) -> str:
        code, out, err = command(*words)
        assert code == 0, err
        ours = [line for line in err.splitlines() if line.startswith(("note: ", "warning: "))]
        assert not ours  # what other libraries say there depends on their versions
        return out

    return run


@pytest.fixture
def refusal(command) -> Callable[..., str]:
    """Run a command line that must be refused, with exit code 2; return its errors as one line."""

    def run(*words: object) -> str:
        code, out, err = command(*words)
        assert code == 2, out + err
        return " ".join(err.split())

    return run


class Forks:
    """Processes forked from one that has imported torch already; see fork_server.py."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel

    def start(self, stdout: int, stderr: int, *words: object, **order: Any) -> int:
        """Start one and return its process id.

        Args:
            stdout: its standard output, a file descriptor.
            stderr: its standard error, likewise.
            words: of the command line; or a script and its words, where ``script`` is ordered.
            order: ``closed``: it has no standard output at all; ``controlled``: by the terminal of
                its standard output; ``largest_file``: that it may write, in bytes; ``environment``;
                ``exit_at``: a function, ``before`` or ``after``, and the number of the call;
                ``stuck_disk``: at a checkpoint; ``no_links``: on its file system.
        """
        order["words"] = [str(word) for word in words]
        socket.send_fds(self.channel, [json.dumps(order).encode()], [stdout, stderr])
        return int(self.channel.recv(64))

    def wait(self, process: int) -> int:
        """Return its exit code; until then its number is nobody else's."""
        self.channel.send(json.dumps({"wait": process}).encode())
        return int(self.channel.recv(64))


@pytest.fixture(scope="session")
def forks(narrow_encoder) -> Iterator[Forks]:
    from deepbregman.method import networks

    ours, theirs = socket.socketpair()
    ours.settimeout(600)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    words = [str(theirs.fileno()), json.dumps(networks.SMALL_STAGES)]
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("fork_server.py"), *words],
        pass_fds=[theirs.fileno()],
        env=environment,
    )
    theirs.close()
    yield Forks(ours)
    # Not only closed: a process that a test forked may still hold a copy of the socket.
    ours.shutdown(socket.SHUT_RDWR)
    ours.close()
    server.wait(timeout=240)


def save_photos(folder: Path, count: int, size: tuple[int, int], ending: str = ".png") -> Path:
    """Save photographs of noise in two classes, the same every time; their heights differ."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            shape = (size[0] + index % 5, size[1], 3)
            pixels = random.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}{ending}")
    return folder


def normal(*shape: int, seed: int = 0) -> "Tensor":
    """Return normal numbers in float64, the same every time for a seed."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="session")
def short_config() -> Config:
    return override(load_recipe("digits"), SHORT)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory, short_config) -> Run:
    return pretrain(short_config, run=tmp_path_factory.mktemp("runs") / "short")


@pytest.fixture
def copied_run(short_run, tmp_path) -> Run:
    """A copy of the short run to write into, without what other tests measured of it."""
    shutil.copytree(short_run.path, tmp_path / "run", ignore=shutil.ignore_patterns("features"))
    path = tmp_path / "run" / "result.json"
    path.write_text(json.dumps({"pretrain": json.loads(path.read_text())["pretrain"]}))
    return Run.open(path.parent)


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory) -> str:
    """200 digits to train on and 100 to test, 20 and 10 of each class, as an .npz file."""
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = np.concatenate([np.flatnonzero(digits.target == c)[:30] for c in range(10)])
    rows = rows.reshape(10, 30)
    train, test = rows[:, :20].ravel(), rows[:, 20:].ravel()
    pixels = (digits.images * 15.9).astype(np.uint8)
    path = Path(tmp_path_factory.mktemp("data")) / "few.npz"
    np.savez(
        path,
        train_images=pixels[train],
        train_labels=digits.target[train],
        test_images=pixels[test],
        test_labels=digits.target[test],
    )
    return str(path)


@pytest.fixture(scope="session")
def drawn_once() -> "Tensor":
    import torch

    return torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def cheap_weights(request, drawn_once, monkeypatch) -> None:
    """Take the weights of large networks from numbers that are drawn once, as the seed says.

    To draw tens of millions for each ResNet and each detector takes longer than all else there.
    Slow tests, which ask what is learned, have the true weights.
    """
    if request.node.get_closest_marker("slow"):
        return
    import torch

    def fill(tensor: "Tensor", *arguments: Any, **options: Any) -> "Tensor":
        drawn = drawn_once[int(torch.randint(100_000, ())) :]
        drawn = drawn.repeat(-(-tensor.numel() // len(drawn)))[: tensor.numel()]
        with torch.no_grad():
            return tensor.copy_(drawn.view_as(tensor)).mul_((2.0 / tensor[0].numel()) ** 0.5)

    for name in ("kaiming_normal_", "kaiming_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, fill)


@pytest.fixture
def stop_after(monkeypatch) -> StopAfter:
    """Send SIGTERM after a step of the runs that train inside the block."""
    from deepbregman.training.display import Display

    @contextlib.contextmanager
    def stop(last: int) -> Iterator[None]:
        show = Display.show_step

        def show_and_stop(display: Display, step: int) -> None:
            show(display, step)
            if step == last:
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            patch.setattr(Display, "show_step", show_and_stop)
            yield

    return stop


@pytest.fixture
def without_umap(monkeypatch) -> None:
    """Let maps be made by t-SNE: UMAP is compiled first, which takes long."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "umap" else find_spec(name)
    )


@contextlib.contextmanager
def _no_host_sync() -> Iterator[None]:
    import torch

    def set_mode(mode: str) -> None:
        with warnings.catch_warnings():  # torch warns that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(mode)

    try:
        set_mode("error")
        yield
    finally:
        set_mode("default")


@pytest.fixture
def no_host_sync() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Make blocks in which it is an error to let the host wait for the GPU."""
    return _no_host_sync


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Let a test take 300 MB of address space beyond what there is: for files that ask for more."""
    if not Path("/proc/self/statm").is_file():
        pytest.skip("only Linux says how much there is, and keeps to the limit")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 300_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
