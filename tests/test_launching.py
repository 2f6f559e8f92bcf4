"""Starting several processes, and what happens when one of them fails."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment

from deepbregman.cli import main
from deepbregman.commands.pretrain import _count_processes
from deepbregman.errors import ReportedElsewhere, UserError, explain_error, notify
from deepbregman.launching import (
    Process,
    find_process,
    must_start_processes,
    under_srun,
    under_torchrun,
)
from deepbregman.training.checkpoints import load

SMALL = [
    *("--optimiser.name", "sgd", "--optimiser.learning-rate", "0.05"),
    *("--training.epochs", "6", "--training.batch-size", "128", "--training.knn-every", "1"),
    *("--encoder.projection-hidden", "32", "--encoder.embedding", "16"),
    *("--divergence.num-subnetworks", "10", "--divergence.hidden", "8"),
    *("--training.no-tensorboard", "--training.save-seconds", "0"),
]
EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_NODELIST": "gpu[07-08]",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    for name in (*NAMES, *SRUN):
        monkeypatch.delenv(name, raising=False)


def setting(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


class TestPlace:
    def test_alone(self):
        assert find_process() == Process(0, 1, 0, 1)
        assert find_process().nodes == 1

    def test_under_torchrun(self, monkeypatch):
        setting(monkeypatch, TORCHRUN)
        assert under_torchrun()
        assert find_process() == Process(rank=3, processes=4, local_rank=1, local_processes=2)
        assert find_process().nodes == 2

    def test_under_srun(self, monkeypatch):
        setting(monkeypatch, SRUN)
        assert under_srun()
        assert find_process() == Process(rank=5, processes=8, local_rank=1, local_processes=4)
        environment = SLURMEnvironment(auto_requeue=False)  # what the processes are joined by
        environment.validate_settings(num_devices=find_process().local_processes, num_nodes=2)
        assert environment.global_rank() == find_process().rank
        assert environment.world_size() == find_process().processes
        assert environment.main_address == "gpu07"

    def test_a_batch_script_without_srun_is_alone(self, monkeypatch):
        batch = {name: value for name, value in SRUN.items() if "_STEP_" not in name}
        setting(monkeypatch, batch | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
        assert not under_srun()
        assert find_process() == Process()

    def test_uneven_tasks(self, monkeypatch):
        setting(monkeypatch, SRUN | {"SLURM_STEP_NUM_TASKS": "7"})
        with pytest.raises(UserError, match=r"7 tasks on 2 nodes.*--ntasks-per-node"):
            find_process()


class TestAskedFor:
    def test_one_process_starts_none(self):
        assert not must_start_processes(None, None)
        assert not must_start_processes(1, 1)
        assert must_start_processes(2, None)
        assert must_start_processes(None, 2)

    def test_processes_that_were_started_start_none(self, monkeypatch):
        setting(monkeypatch, TORCHRUN)
        assert not must_start_processes(None, None)
        assert not must_start_processes(2, 2)

    def test_contradiction(self, monkeypatch):
        setting(monkeypatch, TORCHRUN)
        with pytest.raises(UserError, match=r"--devices is 4, but torchrun started 4 .* on 2"):
            must_start_processes(4, None)

    @pytest.mark.parametrize("words", [["digits"], ["--resume"]])
    def test_all_gpus_of_the_machine(self, words, short_run, tmp_path, monkeypatch):
        asked: list[int] = []

        def start(devices: int, *rest: object) -> None:
            asked.append(devices)
            raise ReportedElsewhere(0)

        monkeypatch.setattr("deepbregman.commands.pretrain.run_in_processes", start)
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
        monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
        place = [str(short_run.path)] if words == ["--resume"] else ["--run", str(tmp_path / "new")]
        with pytest.raises(SystemExit):
            main(["pretrain", *words, *place, "--devices", "all"])
        assert asked == [3]

    def test_one_that_dies_before_the_run_has_a_folder(self, tmp_path, monkeypatch, capsys):
        """As by the memory limit of a job, while the images are opened."""
        (tmp_path / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 9)")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(SystemExit) as caught:
            main(["pretrain", "digits", "--devices", "2", "--run", str(tmp_path / "run")])
        assert caught.value.code == 128 + signal.SIGKILL
        said = " ".join(capsys.readouterr().err.split())
        assert "was killed by SIGKILL" in said
        assert said.endswith("nothing had been trained: start it again")

    def test_a_process_of_all_starts_none(self, monkeypatch):
        setting(monkeypatch, TORCHRUN)
        assert _count_processes("all", "auto") is None

    @pytest.mark.parametrize("count", [0, -1])
    def test_none_or_less(self, count):
        with pytest.raises(UserError, match=rf"--nodes is {count}"):
            must_start_processes(2, count)


class TestSaidOnce:
    @pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
    def test_by_the_first_of_a_machine(self, rank, said, monkeypatch, refusal):
        setting(monkeypatch, {**TORCHRUN, "RANK": rank, "LOCAL_RANK": rank})
        assert refusal("recipes", "nonsense").count("error: ") == said

    @pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
    def test_a_note(self, rank, said, monkeypatch, capsys):
        def give(arguments: list[str]) -> None:
            notify("images lie beside sub-folders")

        setting(monkeypatch, {**TORCHRUN, "RANK": rank, "LOCAL_RANK": rank})
        monkeypatch.setattr("deepbregman.cli._dispatch", give)
        main([])
        assert capsys.readouterr().err.count("note: images lie beside sub-folders") == said

    @pytest.mark.parametrize(("rank", "said"), [("0", "stopped\n"), ("1", "")])
    def test_ctrl_c_before_there_is_a_run(self, rank, said, monkeypatch, capsys):
        def interrupted(arguments: list[str]) -> None:
            raise KeyboardInterrupt

        setting(monkeypatch, {**TORCHRUN, "RANK": rank, "LOCAL_RANK": rank})
        monkeypatch.setattr("deepbregman.cli._dispatch", interrupted)
        with pytest.raises(SystemExit) as caught:
            main([])
        assert caught.value.code == 130
        assert capsys.readouterr().err == said


def command(*words: str, torchrun: tuple[str, ...] = ()) -> list[str]:
    launcher = ["torch.distributed.run", *torchrun, "-m", "--"] if torchrun else []
    return [sys.executable, "-m", *launcher, "deepbregman", "pretrain", *words]


@contextmanager
def running(words: list[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        words,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # nohup had it ignored
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finished(words: list[str], **environment: str) -> tuple[int, str, str]:
    with running(words, **environment) as process:
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err


def parameters(run: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = load(run / "checkpoints/last.pt")["objective"]
    return model


def difference(one: Path, other: Path) -> float:
    first, second = parameters(one), parameters(other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["total"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def worker(launcher: int, rank: int) -> int | None:
    """Find the process of a rank among the children of a launcher, by its environment."""
    for folder in Path("/proc").iterdir():
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            own = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == str(launcher) and f"RANK={rank}".encode() in own:
            return int(folder.name)
    return None


def wait_for_epoch(process: subprocess.Popen[str], run: Path, epoch: int) -> None:
    deadline = time.monotonic() + 240
    metrics = run / "metrics.jsonl"
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= epoch):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("verb", "code", "words"),
    [
        pytest.param("nonsense", 2, "error: command 'nonsense'", marks=pytest.mark.slow),
        ("fault", 1, "ZeroDivisionError: a fault of ours"),
    ],
)
def test_a_joined_process_leaves_at_once(tmp_path, verb, code, words):
    """Interpreters that take themselves down while such threads run were seen to abort."""
    script = (
        "import atexit, sys, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, "
        "world_size=1)\n"
        "atexit.register(print, 'taken down')\n"
        "import deepbregman.cli as cli\n"
        "def fault(): raise ZeroDivisionError('a fault of ours')\n"
        "if sys.argv[1] == 'fault': cli._dispatch = lambda arguments: fault()\n"
        "print('said before', end='')\n"
        "cli.main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, verb], check=False, capture_output=True, text=True
    )
    assert done.returncode == code
    assert done.stdout == "said before"
    assert done.stderr.count(words) == 1


@pytest.mark.parametrize(
    "words",
    [
        "[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:41234",
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to "
        "complete",
    ],
)
def test_a_process_that_is_lost_is_explained(words):
    explained = explain_error(RuntimeError(words))
    assert explained[0].startswith("lost the connection to another process of the run")
    assert explained[1] == 1


@pytest.mark.parametrize(
    "words",
    [
        "Failed to find C compiler. Please specify via CC environment variable.",
        "No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')",
    ],
)
def test_a_machine_without_a_compiler_is_explained(words):
    explained = explain_error(RuntimeError(f"backend='inductor' raised:\n{words}"))
    assert explained[1] == 2
    assert "--training.compile no" in explained[0]


def test_processes_that_cannot_meet_are_explained(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address, port = taken.getsockname()
        setting(monkeypatch, {"MASTER_ADDR": address, "MASTER_PORT": str(port)})
        with pytest.raises(RuntimeError) as caught:
            torch.distributed.TCPStore(address, port, 2, True, wait_for_workers=False)
    explained = explain_error(caught.value)
    assert explained[0].startswith(f"the processes could not meet at 127.0.0.1, port {port} (")
    assert "MASTER_PORT to a port that is free" in explained[0]
    assert explained[1] == 2


@pytest.mark.parametrize(
    "values",
    [
        {**SRUN, "SLURM_STEP_NUM_TASKS": "7"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "5,3"},
        {**SRUN, "SLURM_PROCID": "first"},
        {**TORCHRUN, "RANK": "x"},
    ],
)
@pytest.mark.parametrize("words", [["pretrain", "digits"], ["recipes", "nonsense"]])
def test_variables_that_make_no_sense_are_words(values, words, monkeypatch, capsys):
    local = {"SLURM_LOCALID": "0"} if "SLURM_PROCID" in values else {"LOCAL_RANK": "0"}
    setting(monkeypatch, {**values, **local})
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert (err.count("error: "), err.count("\n")) == (1, 1)


def test_user_errors_are_said_once_and_end_all(tmp_path):
    taken = tmp_path / "taken"
    (taken / "mine").mkdir(parents=True)
    words = ["digits", *SMALL, "--devices", "2", "--run", str(taken)]
    code, out, err = finished(command(*words))
    assert code == 2, err
    assert err.count("error:") == 1
    assert f"run folder {taken} exists" in err
    assert "pretraining" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "2", "--training.batch-size", "0"], "training.batch_size"),
        (["--devices", "0"], "--devices is 0"),
        (["--nodes", "2"], "--nodes is 2, but there is no MASTER_ADDR and no NODE_RANK"),
    ],
)
def test_arguments_are_checked_before_anything_starts(words, message, tmp_path, refusal):
    said = refusal("pretrain", "digits", *words, "--run", tmp_path / "run")
    assert said.count(message) == 1
    assert not (tmp_path / "run").exists()


def test_node_rank_must_fit(monkeypatch, refusal):
    setting(monkeypatch, {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "2"})
    said = refusal("pretrain", "digits", "--nodes", "2")
    assert "NODE_RANK is '2': with --nodes 2" in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pair(folder) -> tuple[Path, str]:
    """A run of two processes, and what it printed."""
    words = ["digits", *SMALL, "--devices", "2", "--run", str(folder / "pair")]
    code, out, err = finished(command(*words))
    assert code == 0, err
    return folder / "pair", out


@pytest.mark.usefixtures("true_encoder")  # which the processes have
def test_devices_start_processes_that_train_as_one_would(folder, few_digits, capsys):
    words = ["digits", *SMALL, "--data", few_digits, "--training.epochs", "2"]
    words += ["--training.batch-size", "60", "--training.knn-every", "0"]
    words += ["--training.health-every", "0"]
    whole, run = folder / "one", folder / "two"
    main(["pretrain", *words, "--run", str(whole)])
    code, out, err = finished(command(*words, "--devices", "2", "--run", str(run)))
    assert code == 0, err
    # Rounding in float32 sends some values to the other side of a ReLU, here and there from the
    # fourth step on; that nothing else differs is tested in float64 (training/test_processes.py).
    for before, after in zip(losses(whole), losses(run), strict=True):
        assert after == pytest.approx(before, rel=0.01)
    assert losses(run)[0] == pytest.approx(losses(whole)[0], rel=1e-3)
    assert out.count("pretraining") == 1
    assert "batch 60 = 2 processes x 30; negatives from all" in out
    assert out.count("next: deepbregman evaluate") == 1

    main(["pretrain", "--resume", str(run)])  # finished: nothing to do
    assert "had 2 processes before and has 1 now: the steps depend" in capsys.readouterr().out
    record = json.loads((run / "provenance.json").read_text())
    assert record["processes"] == 2
    assert record["resumed"][-1]["processes"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("launcher", ["devices", "torchrun"])
def test_killed_process_ends_the_run_which_resumes_to_the_same_end(launcher, rank, tmp_path, pair):
    torchrun = ("--standalone", "--nproc-per-node", "2") if launcher == "torchrun" else ()
    devices = ["--devices", "2"]
    words = command("digits", *SMALL, *devices, "--run", str(tmp_path / "run"), torchrun=torchrun)
    with running(words) as process:
        wait_for_epoch(process, tmp_path / "run", 2)
        victim = worker(process.pid, rank)
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        _, err = process.communicate(timeout=240)
        print(f"ended {time.monotonic() - killed:.1f} s after process {rank} was killed")
    if launcher == "devices":
        assert process.returncode == 128 + signal.SIGKILL
        assert f"process {rank} of processes 0 to 1 was killed by SIGKILL" in err
        assert f"--resume {tmp_path / 'run'} --devices 2" in err
    else:
        assert process.returncode == 1
        assert "Signal 9 (SIGKILL)" in err
        assert f"local_rank: {rank}" in err
    words = ["--resume", str(tmp_path / "run")]
    code, _, err = finished(command(*words, *devices, torchrun=torchrun))
    assert code == 0, err
    assert difference(tmp_path / "run", pair[0]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_all_after_the_same_step(number, tmp_path, pair):
    words = ["digits", *SMALL, "--devices", "2", "--run", str(tmp_path / "run")]
    with running(command(*words)) as process:
        wait_for_epoch(process, tmp_path / "run", 2)
        process.send_signal(number)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert err.count(f"stopped by {name}") == 1
    assert "error:" not in err  # who asks for an end gets what was asked for
    again = f"continue with: deepbregman pretrain --resume {tmp_path / 'run'} --devices 2"
    assert f"stopped by {name}; everything is saved, {again}\n" in err
    words = ["--resume", str(tmp_path / "run"), "--devices", "2"]
    code, _, err = finished(command(*words))
    assert code == 0, err
    assert difference(tmp_path / "run", pair[0]) == 0.0


SRUN_PROGRAM = """#!{python}
import os, signal, subprocess, sys
from pathlib import Path

words = [word for word in sys.argv[1:] if not word.startswith(("--kill", "--cpus"))]
program, place = words[0], words.index("pretrain")
if words[place + 1] == "best-imagenet":
    words[place:] = ["pretrain", "digits", *{small!r}, *words[words.index("--run"):]]
else:
    words += ["--accelerator", "cpu"]
if program == "torchrun":
    words[0], words[words.index("--nproc-per-node") + 1] = "torch.distributed.run", "2"
else:
    words[0] = "deepbregman"
tasks = []

def kill(*_):  # as the real one does
    for task in tasks:
        task.kill()

signal.signal(signal.SIGTERM, kill)
count = 1 if program == "torchrun" else 2
shared = dict(SLURM_STEP_NUM_TASKS=str(count), SLURM_STEP_NUM_NODES="1", SLURM_NNODES="1")
shared |= dict(SLURM_STEP_TASKS_PER_NODE=str(count), SLURM_NTASKS=str(count), SLURM_NODEID="0")
for rank in map(str, range(count)):
    own = shared | dict(SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NTASKS_PER_NODE=str(count))
    command = [sys.executable, "-m", *words]
    tasks.append(subprocess.Popen(command, env=os.environ | own, start_new_session=True))
Path("tasks").write_text(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""
SCANCEL = """#!{python}
import os, signal, sys
from pathlib import Path

assert sys.argv[1:] == ["--signal=TERM", os.environ["SLURM_JOB_ID"]]
for task in Path("tasks").read_text().split():
    os.killpg(int(task), signal.SIGTERM)  # all processes of a task, also those that it has started
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "scontrol $*" >> log; fi
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain.sbatch", "torchrun.sbatch"])
def test_a_job_of_two_tasks_saves_returns_to_the_queue_and_ends_as_if_nothing_had_been(
    name, tmp_path, pair
):
    """The batch file as it is, with stand-ins that treat signals as SLURM does, but no cluster."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, text in (("srun", SRUN_PROGRAM), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (programs / program).write_text(
            text.replace("{python}", sys.executable).replace("{small!r}", repr(SMALL))
        )
        (programs / program).chmod(0o755)
    number = str(os.getpid())
    job = {"SLURM_JOB_ID": number, "SLURM_JOB_NAME": "job", "SLURM_JOB_NUM_NODES": "1"}
    job |= {"SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost"}
    job |= {"SLURM_CPUS_PER_TASK": "1"}
    environment = {**os.environ, **job, "PATH": f"{programs}:{os.environ['PATH']}"}
    batch = ["bash", str(EXAMPLES / name)]
    run = tmp_path / "runs" / f"job-{number}"
    first = subprocess.Popen(
        batch, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for_epoch(first, run, 2)
    first.send_signal(signal.SIGUSR1)
    _, err = first.communicate(timeout=240)
    assert first.returncode == 0, err
    assert err.count("stopped by SIGTERM; everything is saved") == 1
    assert (tmp_path / "log").read_text() == f"scontrol requeue {number}\n"
    assert len(losses(run)) < len(losses(pair[0]))
    subprocess.run(batch, cwd=tmp_path, env=environment, check=True, timeout=240)
    assert losses(run) == losses(pair[0])
    assert difference(run, pair[0]) == 0.0


@pytest.mark.slow
def test_processes_end_when_their_launcher_is_killed(tmp_path):
    words = [*SMALL, "--training.epochs", "100000", "--training.knn-every", "0"]
    with running(command("digits", *words, "--devices", "2", "--run", str(tmp_path / "run"))) as it:
        wait_for_epoch(it, tmp_path / "run", 1)
        workers = [worker(it.pid, rank) for rank in (0, 1)]
        it.kill()
        deadline = time.monotonic() + 240
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["devices", "torchrun"])
def test_two_machines_train_as_two_processes_of_one(launcher, tmp_path, pair):
    """Two launchers that meet at an address, on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = tmp_path / "run"
    sides = []
    for node in ("0", "1"):
        meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", node)
        meeting += ("--master-addr", "127.0.0.1", "--master-port", port)
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": node}
        if launcher == "torchrun":
            sides.append((command("digits", *SMALL, "--run", str(run), torchrun=meeting), {}))
        else:
            words = ["digits", *SMALL, "--nodes", "2", "--run", str(run)]
            sides.append((command(*words), environment))
    (first, ours), (second, theirs) = sides
    with running(second, **theirs) as other:
        code, out, err = finished(first, **ours)
        assert code == 0, err
        silent, _ = other.communicate(timeout=240)
        assert other.returncode == 0
    assert "2 processes x 64" in out
    assert "pretraining" not in silent
    assert difference(run, pair[0]) == 0.0


@pytest.mark.parametrize("name", ["sklearn.nope", "_lzma", "deepbregman.nope"])
def test_a_module_that_no_package_brings_is_no_missing_package(name):
    assert explain_error(ModuleNotFoundError(f"No module named {name!r}", name=name)) is None
