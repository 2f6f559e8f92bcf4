"""The documentation: every page is in the site, every link leads somewhere, examples run."""

import ast
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from lightning_fabric.loggers import CSVLogger

import deepbregman
from deepbregman.cli import COMMANDS, main
from deepbregman.config import load_recipe, override
from deepbregman.evaluation.features import LabelledFeatures
from deepbregman.method.networks import Encoder
from deepbregman.objectives import Samples, ViewGroups, build_step
from deepbregman.studies.definition import Study, check_arms

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECIPES = ROOT / "src" / "deepbregman" / "recipes"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *DOCS.glob("examples/*.md")]


@cache
def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tables_of_records_are_as_the_script_writes_them():
    tables, page = load_script("tables"), (DOCS / "methods.md").read_text()
    assert "<!-- table of studies/learning-rates+learning-rates-changed+" in page
    assert tables.fill(page) == page, "run python docs/tables.py"
    damaged = page.replace("| simclr | 73.40 |", "| simclr | 99.99 |")
    assert tables.fill(damaged) == page != damaged
    newest = (ROOT / "results/studies/learning-rates-dino/tables.md").read_text()
    (row,) = re.findall(r"^\| dino \|.*\| 0\.36 \|$", newest, flags=re.MULTILINE)
    assert row in page  # of several studies the newest counts
    page = (DOCS / "results.md").read_text()
    assert page.count("<!-- table of studies/tables ") == 3
    assert page.count("<!-- table of studies/tables-cpu ") == 1
    assert page.count("<!-- table of studies/both-cpu ") == 1
    assert tables.fill(page) == page, "run python docs/tables.py"
    page = (DOCS / "speed.md").read_text()
    assert "<!-- table of bench/h200/methods -->" in page
    assert tables.fill(page) == page, "run python docs/tables.py"


def test_the_table_of_speeds_is_of_the_step_though_the_divergence_was_timed_too():
    times = {"encoders": 2.0, "networks": 3.0, "step": 4.0, "with divergence": 5.0}
    arms = [{"name": n, "milliseconds": t, "peak_gigabytes": t} for n, t in times.items()]
    group = {"recipe": "byol", "batch_size": 8, "arms": arms}
    found = load_script("tables")._tabulate_speed({"groups": [group]})
    assert found.columns[3:5] == ("speed over its encoders", "speed over its networks")
    assert [cell.text for cell in found.rows[0].cells] == [
        "8",
        "2,000",
        "4.0",
        "0.50",
        "0.75",
        "4.0",
    ]


def test_the_site_names_every_page_once():
    trees = re.findall(r"^:::\{toctree\}(.*?)^:::", (DOCS / "index.md").read_text(), re.S | re.M)
    named = re.findall(r"^(\w+)$", "".join(trees), flags=re.MULTILINE)
    assert sorted([*named, "index"]) == [page.stem for page in PAGES]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def commands() -> list[tuple[str, str]]:
    blocks = [
        (page.name, language, block)
        for page in PAGES
        for language, block in re.findall(
            r"^```(sh|console)\n(.*?)^```", page.read_text(), flags=re.S | re.M
        )
    ]
    return [
        (name, line.removeprefix("$ ").partition(" | ")[0])
        for name, language, block in blocks
        for line in block.splitlines()
        if language == "sh" or re.match(r"\$ deepbregman [a-z]", line)
    ]


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_option_of_a_command_exists(page, line):
    program, *words = shlex.split(line)
    assert program == "deepbregman"
    check_options(words)


def check_options(words: list[str]) -> None:
    """Compare the options of a command with those that its help lists."""
    options = [word for word in words if word.startswith("--")]
    first = words[:1]
    if words[0] in ("pretrain", "study", "data") and len(words) > 1:
        first = words[:2]
    if first[-1].endswith(".toml"):  # a file that the reader has
        first[-1] = "best"
    if first[-1] == "my_photos":  # a folder that the reader has
        first[-1] = "auto"
    listed = load_script("reference").capture(
        *first, *(["RUN"] if "--resume" in first else []), "--help"
    )
    for option in options:
        if option.startswith(("--rotation.", "--small-views.")):  # no help lists optional tables
            continue
        assert re.search(rf"{option}(?![\w-])", listed), f"{option} of {' '.join(words)}"


def test_the_error_of_the_page_is_what_the_program_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "my_photos").mkdir()
    (block,) = re.findall(r"^```text\n\$ (.*?)^```", (DOCS / "errors.md").read_text(), re.S | re.M)
    command, said = block.splitlines()
    with pytest.raises(SystemExit) as stopped:
        main(shlex.split(command)[1:])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines() == [said]


ONE_EPOCH = '"training.epochs": 1, "optimiser.warmup_epochs": 0.0, "training.tensorboard": False'


def python_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), flags=re.S | re.M)


def run_block(code: str) -> dict[str, object]:
    scope: dict[str, object] = {}
    exec(compile(code, "docs", "exec"), scope)
    return scope


def test_the_loops_of_the_page_run(tmp_path, monkeypatch, few_digits):
    monkeypatch.chdir(tmp_path)
    loop, taught, beside, joined, views, own = python_blocks("own_loop.md")
    before = torch.get_rng_state()
    scope = run_block(loop)
    assert all(weight.grad is not None for weight in scope["parameters"])
    scope = run_block(taught.replace("if bank.is_full", "if True"))
    assert int(scope["bank"].pushed) == 64
    assert all(weight.grad is not None for weight in scope["network"].parameters())
    scope = run_block(beside.replace("if bank.is_full", "if True"))
    assert int(scope["bank"].pushed) == 128
    for name in ("term", "control"):
        (slope,) = torch.autograd.grad(scope[name], scope["online"][1].weight, retain_graph=True)
        assert slope.abs().max() > 0.0
    assert run_block(joined)["loss"].item() > 0.0
    scope = run_block(views)
    assert scope["first"].shape == scope["second"].shape == (64, 3, 32, 32)
    short = f'{{{ONE_EPOCH}, "training.batch_size": 64}}, data={few_digits!r}'
    scope = run_block(own.replace('{"training.epochs": 100}', short))
    assert scope["trained"](torch.zeros(2, 3, 8, 8)).shape == (2, 32)
    torch.set_rng_state(before)


def test_the_parts_of_the_page_are_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, taught, logger = python_blocks("own_parts.md")
    before = torch.get_rng_state()
    short = f'{ONE_EPOCH}, "training.health_every": 0'
    scope = run_block(code.replace('"training.epochs": 10', short))
    (row,) = scope["run"].metrics()
    assert {"distance", "variance", "weight_norm", "knn"} <= row.keys()
    config = override(scope["run"].config, {"views.custom": False})
    objective = run_block(taught)["Taught"]
    run = deepbregman.pretrain(config, run="runs/taught", data=scope["images"], objective=objective)
    assert 0.0 < run.metrics()[0]["match"] < 2.0
    page = (DOCS / "own_parts.md").read_text()
    recipe, changes = re.search(
        r'`pretrain\("(.*?)", objective=Taught, changes=(.*?)\)`', page
    ).groups()
    over_bank = override(load_recipe(recipe), ast.literal_eval(changes))
    short = {"divergence.num_subnetworks": 128, "encoder.name": "small", "data.image_size": 16}
    short |= {
        "training.batch_size": 64,
        "optimiser.learning_rate": 0.001,
        **ast.literal_eval(f"{{{ONE_EPOCH}}}"),
    }
    run = deepbregman.pretrain(
        override(over_bank, short), run="runs/bank", data=scope["images"], objective=objective
    )
    assert run.config.divergence.smoothing == load_recipe("best").divergence.smoothing > 0.0
    assert run.metrics()[0]["divergence"] > 0.0
    torch.set_rng_state(before)
    csv = CSVLogger(tmp_path / "logs")
    run_block(logger)["ToLightning"](csv).on_epoch({"step": 3, "total": 0.5, "verdict": "ok"}, None)
    csv.finalize("success")
    (written,) = (tmp_path / "logs").rglob("metrics.csv")
    assert written.read_text().splitlines() == ["step,total", "3,0.5"]


def fake_evaluation() -> SimpleNamespace:
    """Features of two classes along two axes, as a protocol gets them."""

    def split(features: list[list[float]], labels: list[int]) -> SimpleNamespace:
        found = SimpleNamespace(representation=torch.tensor(features))
        return SimpleNamespace(features=found, labels=torch.tensor(labels))

    train = split([[3.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.2, 5.0]], [0, 0, 1, 1])
    test = split([[9.0, 1.0], [0.1, 0.0], [0.0, 0.1], [1.0, 0.5]], [0, 0, 1, 1])
    labelled = LabelledFeatures(None, None, None, torch.device("cpu"))
    vars(labelled).update(train=train, test=test)
    return SimpleNamespace(labelled=labelled)


def test_the_extensions_of_the_page_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    method, study, protocol, dataset = python_blocks("extending.md")
    trunk = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 4))
    objective = run_block(method)["Agreement"](
        Encoder(trunk, 4), torch.nn.Sequential(torch.nn.Identity()), {"distance": 1.0}
    )
    views = torch.rand(2, 5, 3, 2, 2)
    outputs = objective(ViewGroups(views), lambda z: z, Samples())
    h = [objective.encoder(view) for view in views]
    assert torch.allclose(outputs.terms["distance"], ((h[0] - h[1]) ** 2).sum(1).mean())
    made = run_block(study)["STUDY"]
    assert isinstance(made, Study)
    assert made.reference in [arm.name for arm in made.arms]
    (recipe,) = re.findall(r"study temperature --recipe (\w+)", (DOCS / "extending.md").read_text())
    check_arms(made, made.arms, load_recipe(recipe))
    (row,) = run_block(protocol)["means"](fake_evaluation())
    # Of four test images the last is nearest to the wrong mean, by its angle.
    assert (row["variant"], row["metric"], row["value"]) == ("cosine", "top1", 75.0)
    assert (row["num_train"], row["num_test"]) == (4, 4)
    run_block(dataset)
    deepbregman.cli.main(["data", "check", "mine.npz"])


def test_the_reference_has_every_command_and_every_option():
    text = load_script("reference").describe_command_line()
    for verb in COMMANDS:
        assert re.search(rf"^## {verb}$", text, flags=re.MULTILINE)
    for words in ("data check", "study tsne"):
        assert re.search(rf"^### {words}$", text, flags=re.MULTILINE)
    assert "--divergence.num-subnetworks" in text
    assert "\x1b" not in text


def test_the_reference_has_every_public_name_and_each_has_a_docstring():
    reference = load_script("reference")
    public = {name for name in deepbregman.__all__ if not name.startswith("_")}
    assert set(reference.list_public_names()) == public
    text = reference.describe_python()
    for name in public:
        assert f":: deepbregman.{name}\n" in text
        assert inspect.getdoc(getattr(deepbregman, name)), name
    assert "## More" not in text  # every part of the package has a heading


@pytest.mark.parametrize("name", ["pretrain", "evaluate", "label", "nt_xent"])
def test_signatures_are_those_of_python(name):
    pytest.importorskip("sphinx")
    function = getattr(deepbregman, name)
    text = load_script("reference").describe_signature(function)
    assert not re.search("tyro|Annotated|ForwardRef|command line", text)
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"\b{parameter}\b", text)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("furo")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    built = subprocess.run(
        [*words, "-d", tmp_path / "trees", DOCS, tmp_path / "site"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "python.html").read_text()
    assert 'id="deepbregman.nt_xent"' in page
    assert "tyro" not in page
    records = (tmp_path / "site" / "results.html").read_text()
    assert 'href="../../results/studies/comparison-teacher"' in records


def test_the_traffic_of_a_step_is_the_committed_record():
    text = " ".join((DOCS / "scaling.md").read_text().split())
    record = json.loads((ROOT / "results/bench/cpu/traffic.json").read_text())
    for run in record["runs"]:
        assert run["predicted"] == sum(run["parts"].values())
        assert run["counted"] == pytest.approx(run["predicted"], rel=0.005)
        for number in (run["counted"], run["predicted"]):
            assert f"{number / 1e6:.1f}" in text
        assert run["held"] == pytest.approx(run["held_predicted"], rel=0.005)
        for number in (run["held"], run["held_predicted"]):
            assert re.search(rf"\b{number / 1e6:.1f}( MB|\b)", text)
    step = build_step(load_recipe("simclr-imagenet"))
    trained = sum(p.numel() for p in step.parameters() if p.requires_grad)
    norms = [
        part
        for part in step.modules()
        if isinstance(part, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d)
    ]
    channels = sum(1 + 2 * norm.num_features for norm in norms)
    for size in (8, 64):
        sent = (2 * trained / size, 3 * 2 * 4096 // size * 128, 3 * channels)
        for number in sent:
            assert f"{4 * (size - 1) * number / 1e6:.1f} MB" in text
    streamed = json.loads((ROOT / "results/bench/h200/streaming-slots.json").read_text())
    assert streamed["groups"][0]["batch_size"] == 256
    peak = streamed["groups"][0]["arms"][2]["peak_gigabytes"]
    assert f"256 images had a peak of {peak:.1f} GB" in text
    for held in (12 * trained / 1e9, 4 * (2 * 4096) ** 2 / 1e9):
        assert f"| {held:.2f} GB" in text
    assert f"n images | {4096 / 8 / 256 * peak:.0f} GB" in text


def test_the_cost_of_imagenet_follows_from_the_measured_speed():
    text = " ".join((DOCS / "scaling.md").read_text().split())
    record = json.loads((ROOT / "results/bench/h200/streaming-slots.json").read_text())
    arm = record["groups"][0]["arms"][2]
    assert arm["name"] == "K=100, files"
    speed = arm["views_per_second"]
    assert f"{speed:,.0f} views a second" in text
    for name, passes in (("simclr-imagenet", 1.0), ("best-imagenet", 7 / 6)):
        hours = passes * 100 * 2 * 1_281_167 / speed / 3600
        assert re.search(rf"`{name}` .* \| {hours:.1f} hours \| {hours / 8:.1f} hours \|", text)
        assert f"{hours:.1f} hours" in (RECIPES / f"{name}.toml").read_text()


def test_the_cpus_of_a_task_are_enough_for_the_recipe_s_workers():
    texts = [DOCS / "scaling.md", ROOT / "examples" / "pretrain.sbatch"]
    cpus = [re.findall(r"--cpus-per-task=(\d+)", text.read_text()) for text in texts]
    assert list(map(len, cpus)) == [3, 1]
    workers = load_recipe("best-imagenet").data.workers
    assert all(int(number) > workers for found in cpus for number in found)  # and one to train
