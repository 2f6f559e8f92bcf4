"""The scripts and batch files of ``examples/``."""

import importlib.util
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman import export, pretrain
from deepbregman.data import ResidentBatches, open_source

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
BATCH_FILES = sorted(EXAMPLES.glob("*.sbatch"))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_script_compiles_and_is_listed(path):
    compile(path.read_text(), path.name, "exec")
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize(
    "name",
    ["features", "onnx_features", "explorer", "own_parts", "write_shards", "finetune_timm"],
)
def test_a_script_without_its_arguments_says_how_to_call_it(name, monkeypatch):
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit, match=f"python examples/{name}.py "):
        runpy.run_path(str(path), run_name="__main__")


def read_cells(path: Path) -> list[str]:
    """The code of a notebook, a text for each cell."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_compiles_is_listed_and_holds_no_output(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    for code in read_cells(path):
        compile(code, path.name, "exec")
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.fixture
def cluster(tmp_path) -> dict[str, str]:
    """The environment of a job, with stand-ins for SLURM's programs that write what they are told.

    The stand-in for srun says when it is ready, and runs until scancel stops it. As the real one,
    it kills its tasks when it gets SIGTERM itself.
    """
    srun = 'trap "echo killed >> log; exit 137" TERM\necho "srun $*" >> log\n'
    srun += "[ -e quick ] && exit 0\nuntil grep -q scancel log; do sleep 0.05; done\n"
    srun += "echo saved >> log\nexit 143\n"
    scancel = 'echo "scancel $*" >> log\n'
    scontrol = 'if [ "$1" = show ]; then echo first; else echo "scontrol $*" >> log; fi\n'
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", srun), ("scancel", scancel), ("scontrol", scontrol)):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{text}")
        program.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "first,second"}
    job["SLURM_CPUS_PER_TASK"] = "14"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {**job, "SLURM_JOB_NUM_NODES": "2", "PATH": path}


@pytest.mark.parametrize("path", BATCH_FILES, ids=lambda path: path.name)
def test_a_job_near_its_limit_stops_the_run_and_returns_to_the_queue(path, cluster, tmp_path):
    log = tmp_path / "log"
    job = subprocess.Popen(["bash", path], cwd=tmp_path, env=cluster)
    while not log.exists() or "srun" not in log.read_text():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=240) == 0
    first, *rest = log.read_text().splitlines()
    assert first.startswith("srun --kill-on-bad-exit=1 --cpus-per-task=14 ")
    assert "deepbregman pretrain best-imagenet" in first
    assert rest == ["scancel --signal=TERM 7", "saved", "scontrol requeue 7"]


@pytest.mark.parametrize("path", BATCH_FILES, ids=lambda path: path.name)
def test_a_job_continues_the_run_that_it_finds(path, cluster, tmp_path):
    (tmp_path / "runs/job-7").mkdir(parents=True)
    (tmp_path / "runs/job-7/config.toml").touch()
    (tmp_path / "quick").touch()
    subprocess.run(["bash", path], cwd=tmp_path, env=cluster, check=True)
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.endswith("deepbregman pretrain --resume runs/job-7")


@pytest.mark.parametrize("path", BATCH_FILES, ids=lambda path: path.name)
def test_the_options_of_a_batch_file_exist(path, output):
    (words,) = re.findall(r"words=\((pretrain [a-z].*)\)", path.read_text())
    verb, recipe, *rest = shlex.split(words)
    listed = output(verb, recipe, "--help")
    for option in (word for word in rest if word.startswith("--")):
        assert re.search(rf"{option}(?![\w-])", listed), option


def run_script(name: str, *words: object) -> str:
    script = [str(EXAMPLES / name), *map(str, words)]
    done = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def photos(tmp_path) -> list[Path]:
    random = np.random.default_rng(0)
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for path in paths:
        Image.fromarray(random.integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(path)
    return paths


def test_shards_of_a_folder_hold_its_images_in_another_order(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        place = tmp_path / "folder" / f"class-{index // 6}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{index:02d}.PNG")
    spec = importlib.util.spec_from_file_location("write_shards", EXAMPLES / "write_shards.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path / "folder", tmp_path / "shards" / "mine", images_per_shard=5)
    assert len(list((tmp_path / "shards").iterdir())) == 3
    source = open_source(str(tmp_path / "shards"), image_size=8)
    found = {}
    for split in (source.train, source.test):
        decoded = ResidentBatches(split.images, torch.device("cpu")).iterate(
            torch.arange(len(split)), 12
        )
        rows = torch.cat([batch.images for batch in decoded]).permute(0, 2, 3, 1)
        found |= {row.numpy().tobytes(): int(c) for row, c in zip(rows, split.labels, strict=True)}
    assert found == {image.tobytes(): index // 6 for index, image in enumerate(pixels)}
    assert source.classes == ("class-0", "class-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("features", r"has the same digit in (9\d|100)\.\d % of cases"),
        ("divergence", r"D\(p, q\) = 3 - 1 = 2\.0"),
        ("photos", r"map\.html 120 images, placed by"),
    ],
)
def test_a_notebook_runs_from_top_to_bottom(name, words, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text("\n\n".join(read_cells(EXAMPLES / f"{name}.ipynb")))
    assert re.search(words, run_script(str(script)))


@pytest.mark.slow
def test_features_in_ten_lines(short_run, photos):
    assert "3 images, 128 features each" in run_script("features.py", short_run.path, *photos)


@pytest.mark.slow
def test_features_by_onnxruntime(short_run, photos, tmp_path):
    pytest.importorskip("onnxscript")
    export(short_run, tmp_path / "encoder.onnx", format="onnx")
    printed = run_script("onnx_features.py", tmp_path / "encoder.onnx", *photos)
    assert "3 images, 128 features each" in printed


@pytest.mark.slow
def test_two_processes_of_the_loop_take_the_steps_of_one():
    alone = run_script("own_loop_ddp.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    together = subprocess.run(
        [*launcher, "--nproc-per-node", "2", EXAMPLES / "own_loop_ddp.py"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert together.returncode == 0, together.stderr
    losses = [re.findall(r"loss (\S+)", printed) for printed in (alone, together.stdout)]
    assert len(losses[0]) == 5
    assert np.asarray(losses[0], float) == pytest.approx(np.asarray(losses[1], float), abs=2e-3)
    assert float(losses[0][-1]) != pytest.approx(float(losses[0][0]), abs=2e-3)


@pytest.mark.slow
def test_parts_of_ones_own_are_trained_and_continued(tmp_path):
    printed = run_script("own_parts.py", tmp_path / "run")
    assert "from step 0 of" in printed
    assert "epoch 2: loss" in printed
    assert float(re.findall(r"kNN: (\S+) %", printed)[0]) > 60.0
    again = run_script("own_parts.py", tmp_path / "run")
    assert re.findall(r"from step (\d+) of \1\n", again)
    assert "epoch" not in again


@pytest.mark.slow
def test_an_encoder_is_finetuned_with_timm(tmp_path, few_digits):
    pytest.importorskip("timm")
    changes = {
        "encoder.name": "timm:test_vit",
        "data.image_size": 16,
        "training.epochs": 1,
        "optimiser.warmup_epochs": 0.0,
        "training.batch_size": 64,
        "training.tensorboard": False,
    }
    run = pretrain("digits", run=tmp_path / "run", data=few_digits, changes=changes)
    export(run, tmp_path / "encoder.pth", format="timm")
    printed = run_script("finetune_timm.py", tmp_path / "encoder.pth")
    assert "drawn anew: head.weight head.bias" in printed
    assert float(re.findall(r"accuracy: (\S+) %", printed)[0]) > 60.0


@pytest.mark.slow
def test_the_explorer_writes_a_map(short_run, tmp_path):
    printed = run_script("explorer.py", short_run.path, tmp_path / "out")
    assert len(re.findall(r"group \d: \d+ images", printed)) == 3
    assert "groups of copies" in printed
    assert (tmp_path / "out" / "map.html").stat().st_size > 100_000
    assert (tmp_path / "out" / "copies.csv").exists()


@pytest.mark.slow
def test_the_lightning_module_trains():
    if not any(importlib.util.find_spec(name) for name in ("lightning", "pytorch_lightning")):
        pytest.skip("Lightning is not installed")
    assert "'divergence'" in run_script("lightning_module.py")
