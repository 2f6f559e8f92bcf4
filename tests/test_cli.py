"""The command line as a user meets it: what each verb does, and every error in one table."""

import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from deepbregman import cli, load_encoder, pretrain, terminal
from deepbregman.cli import COMMANDS, main
from deepbregman.config import override, recipes, to_toml
from deepbregman.runs import Run
from deepbregman.terminal import print_note, progress_bars, say_loading
from deepbregman.training import checkpoints

from .conftest import Command, Forks, save_photos


@pytest.fixture
def recipe(tmp_path, short_config, few_digits) -> Path:
    path = tmp_path / "short.toml"
    changes = {"training.epochs": 1, "data.source": few_digits, "training.batch_size": 60}
    path.write_text(to_toml(override(short_config, changes)))
    return path


@pytest.fixture
def photos(tmp_path) -> Path:
    return save_photos(tmp_path / "photos", 20, (12, 10))


SHORT_WORK = ["--version", "recipes", "recipes --help"]


def run_unheard(forks: Forks | None, out: str, *words: object, **options: Any) -> tuple[int, str]:
    """Run the command line where what it prints goes nowhere; return exit code and errors.

    Args:
        forks: to run what needs torch; None for the rest.
        out: a full disk, or a closed pipe.
        words: of the command line.
        options: of the process.
    """
    if out == "a full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    with tempfile.TemporaryFile() as errors:
        if forks is None:
            command = [sys.executable, "-m", "deepbregman", *map(str, words)]
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
            code = subprocess.call(command, stdout=writer, stderr=errors, env=environment)
            os.close(writer)
        else:
            process = forks.start(writer, errors.fileno(), *words, **options)
            os.close(writer)
            code = forks.wait(process)
        errors.seek(0)
        return code, errors.read().decode()


class TestCommands:
    def test_overview_names_every_verb(self, output):
        out = output()
        assert all(verb in out for verb in COMMANDS)

    @pytest.mark.parametrize("verb", COMMANDS)
    def test_every_verb_has_help(self, output, verb):
        out = output(verb, "--help")
        assert f"usage: deepbregman {verb}" in out
        assert not re.search(r"default:\s*\)|None", out)  # which tells nothing

    def test_help_is_wrapped(self, output, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        out = output("pretrain", "--help")
        assert max(map(len, out.splitlines())) <= 80
        text = " ".join(line.strip(" │") for line in out.splitlines())
        assert "Random crops enlarge objects; with 0.75 these are about as large as" in text
        assert "The divergence and its loss, which can be added to any method." in text

    @pytest.mark.parametrize("words", [["--help"], ["data", "--help"], ["pretrain", "--help"]])
    def test_one_process_of_a_machine_prints_help(self, command, monkeypatch, words):
        for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        for local_rank, prints in (("0", True), ("1", False)):
            monkeypatch.setenv("LOCAL_RANK", local_rank)
            code, out, _ = command(*words)
            assert (code, "usage: deepbregman" in out) == (0, prints)
            assert prints or not out

    def test_labels_are_not_called_required(self, output):
        out = output("label", "--help")
        text = " ".join(line.strip(" │") for line in out.splitlines())
        assert re.search(r"--labels PATH .* picks images to label\. --data", text)

    def test_help_lists_every_field_with_the_recipes_default(self, output):
        out = output("pretrain", "authors", "--help")
        assert "--divergence.sigma" in out
        assert "0.9" in out
        assert "--optimiser.learning-rate" in out

    @pytest.mark.parametrize(
        ("study", "words"),
        [
            ("psi", "similarity? Arms: none, gaussian, inverse, sqrt, linear, arccot, negative."),
            ("kappa", "500, 1000; with labels, only if named: deep-max-contrastive-*, deep-max-t"),
            ("comparison", "Arms: simclr, best."),
            ("methods", "dim, cpc; each also as NAME+divergence, NAME-control."),
            ("learning-rates", "dim, cpc; each also as NAME-rate-x0.3, NAME-rate-x3."),
            ("sigma-lambda", "divergence.sigma=0.1:10:log, objective.weight=0.1:20:log."),
        ],
    )
    def test_the_help_of_a_study_names_its_arms(self, output, study, words):
        out = output("study", study, "--help")
        assert words in " ".join(out.split())
        assert f"usage: deepbregman study {study} [-h] [OPTIONS]" in out

    def test_a_word_without_the_option_that_is_required(self, command):
        code, out, err = command("embed", "my run", "x.npz")
        assert (code, out) == (2, "")
        assert "--out PATH" in err
        assert "x.npz" in err

    @pytest.mark.parametrize(
        "line",
        [
            "evaluate run photos",
            "bench photos",
            "recipes paper photos",
            "data check folder photos",
            "pretrain --data my photos",
            "pretrain digits --training.epochs 3 photos",
            "explore run --out map photos",
            "data check folder --root my photos",
            "tune digits --trials 3 photos",
        ],
    )
    def test_a_word_that_belongs_to_no_option(self, command, line, tmp_path, monkeypatch):
        """Often a name with a space that is not in quotes; nothing is done."""
        monkeypatch.chdir(tmp_path)
        code, out, err = command(*line.split())
        assert (code, out) == (2, "")
        said = " ".join(err.split())
        assert said.startswith("error: 'photos' belongs to no option: write the name of its option")
        assert "a value with a space in quotes" in said
        assert list(tmp_path.iterdir()) == []

    def test_a_study_says_which_option_a_word_needs(self, command):
        for line in ("kappa tiny", "comparison tiny best"):
            code, out, err = command("study", *line.split())
            assert (code, out) == (2, "")
            assert "error: 'tiny' follows" in err
            assert "a dataset --data" in " ".join(err.split())

    @pytest.mark.parametrize(
        ("line", "advice"),
        [
            ("study kappa --encoder.name small", "write --set encoder.name=small"),
            ("study kappa --data digits --data.image-size=16", "write --set data.image_size=16"),
            ("study tables --views.crop-area 0.2 1", "write --set 'views.crop_area=[0.2, 1]'"),
            ("tune simclr --objective.temperature", "write --set objective.temperature=VALUE"),
        ],
    )
    def test_a_field_as_pretrain_takes_it_is_told_as_a_study_takes_it(self, command, line, advice):
        code, out, err = command(*line.split())
        assert (code, out) == (2, "")
        said = " ".join(err.split())
        assert said.startswith("error: --")
        assert f"is a field of the configuration: {advice}" in said

    def test_recipes_are_listed_and_printed(self, output):
        listed = output("recipes")
        assert all(name in listed for name in recipes())
        assert "deepbregman recipes NAME" in listed
        assert "(Grill et al. 2020): each view predicts" in listed
        assert "Command:" not in listed
        named = re.split(r"(?m)^(?=\S)", listed)
        assert max(len(" ".join(line.split())) for line in named) < 230  # not all settings
        assert not re.search(r"\S  +\S", re.sub(r"(?m)^\S+ +", "", listed))  # no gaps in sentences
        printed = output("recipes", "paper")
        assert printed == recipes()["paper"]

    def test_a_printed_recipe_is_a_recipe(self, output, tmp_path):
        printed = output("recipes", "digits")
        copy = tmp_path / "mine.toml"
        copy.write_text(printed)
        out = output("pretrain", copy, "--help")
        assert "training.epochs" in out

    def test_pretrain_evaluate_embed(self, output, recipe, few_digits, tmp_path):
        folder, out_file = tmp_path / "run", tmp_path / "features.npz"
        out = output("pretrain", recipe, "--run", folder)
        assert f"run: {folder}" in out
        out = output("evaluate", folder, "--epochs", 2)
        rows = json.loads((folder / "result.json").read_text())["evaluations"]
        kinds = [(row["protocol"], row["variant"]) for row in rows]
        assert kinds == [
            ("knn", "cosine, k=20"),
            ("knn", "cosine, k=200"),
            ("knn", "cosine of embeddings, k=20"),
            ("knn", "cosine of embeddings, k=200"),
            ("knn", "divergence, k=20"),
            ("knn", "divergence, k=200"),
            *[("linear", "cached features")] * 2,  # top 1 and top 5
            *[("linear", "crop and flip")] * 2,
        ]
        for row in rows:
            assert f"{row['value']:.2f}" in out
            assert (row["num_train"], row["num_test"], row["data"]) == (200, 100, few_digits)
        output("embed", folder, "--out", out_file)
        with np.load(out_file, allow_pickle=False) as arrays:
            width = load_encoder(folder).num_features
            assert arrays["train_features"].shape == (200, width)
            assert arrays["test_scores"].shape == (100, 10)
            assert arrays["test_labels"].shape == (100,)

    def test_fields_are_changed_by_their_dotted_names(self, output, recipe, tmp_path):
        words = ("--seed", 7, "--divergence.num-subnetworks", 3, "--views.without", "crop", "flip")
        output("pretrain", recipe, "--run", tmp_path / "run", *words)
        config = Run.open(tmp_path / "run").config
        assert config.seed == 7
        assert config.divergence.num_subnetworks == 3
        assert config.views.without == ("crop", "flip")

    def test_your_own_folder(self, output, photos, recipe):
        run = photos.parent / "run"
        words = ("--data.image-size", 8, "--training.batch-size", 8, "--run", run)
        out = output("pretrain", recipe, "--data", photos, *words)
        assert "29 images" in out  # of 40: 8 are the test split, 3 are held out
        out = output("evaluate", run, "--protocol", "knn")
        assert "cosine, k=20" in out
        assert "k=200" not in out  # there are not so many images

    def test_an_unlabelled_folder_pretrains_and_embeds_but_cannot_be_judged(
        self, output, refusal, photos, recipe, tmp_path
    ):
        flat = tmp_path / "flat"
        flat.mkdir()
        for index, path in enumerate(sorted(photos.rglob("*.png"))):
            shutil.copy(path, flat / f"{index}.png")
        words = ("--data.image-size", 8, "--training.batch-size", 8, "--run", tmp_path / "run")
        output("pretrain", recipe, "--data", flat, *words)
        out = output("embed", tmp_path / "run", "--out", tmp_path / "f.npz")
        assert "f.npz" in out
        assert "train_names" in out
        err = refusal("evaluate", tmp_path / "run")
        assert "lacks labels" in err

    def test_resume_takes_the_runs_own_configuration(self, output, refusal, recipe, tmp_path):
        output("pretrain", recipe, "--run", tmp_path / "run")
        out = output("pretrain", "--resume", tmp_path / "run")
        assert "checking" in out
        refusal("pretrain", "--resume", tmp_path / "run", "--training.epochs", 9)

    def test_help_and_refusals_need_no_torch(self, short_run, tmp_path):
        """A user who mistypes should not wait for torch to load; no clock is needed to see that."""
        (tmp_path / "full").mkdir()
        for name in ("full/x", "there.npz", "there.pth", "there.png", "there.csv"):
            (tmp_path / name).touch()
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos/a.png").touch()
        (tmp_path / "few.csv").write_text("image,label\nx.png,1\ny.png,1\nz.png,2\na.png,2\n")
        (tmp_path / "empty.csv").touch()
        unlabelled = override(short_run.config, {"data.source": str(tmp_path / "photos")})
        Run.create(tmp_path / "mine", unlabelled, {})
        run = str(short_run.path)
        again = ["pretrain", f"{run}/config.toml", "--run", run]  # it is complete
        fine = [[], *([verb, "--help"] for verb in COMMANDS), ["recipes"], again]
        refused = [
            [*again, "--seed", "7"],
            ["evaluate", "mine"],
            ["explore", "mine", "--labels", "empty.csv", "--out", "map.html"],
            ["pretrain", "digits", "--data", "digit"],
            ["pretrain", "digits", "--data", "none.npz"],
            ["pretrain", "digits", "--run", "full"],
            ["pretrain", "digits", "--run", "there.npz/run"],
            ["pretrain", "digits", "--training.epochs", "-1"],
            ["pretrain", "digits", "--devices", "0"],
            ["pretrain", "--resume", "nowhere"],
            ["quickstart", "--run", "full"],
            ["quickstart", "--epochs", "0"],
            ["evaluate", "nowhere"],
            ["evaluate", run, "--data", "digit"],
            ["embed", run, "--out", "there.npz"],
            ["embed", run, "--out", "no/folder.npz"],
            ["embed", run, "--out", "new.npz", "--data", "digit"],
            ["export", run, "--format", "torchvision", "--out", "there.pth"],
            ["export", run, "--format", "timm", "--out", "new.pth"],  # its encoder is small
            ["export", run, "--format", "detectron2", "--out", "new.pth"],
            ["search", run, "--query", "nothing.png", "--data", "photos"],
            ["label", run, "--labels", "few.csv", "--data", "photos"],
            ["search", run, "--query", "test:0", "--out", "there.png"],
            ["search", run, "--query", "test:0", "--data", "digit"],
            ["cluster", run, "--out", "there.csv"],
            ["cluster", run, "--data", "digit"],
            ["bench", "--out", "there.npz"],
            ["data", "check", "digit"],
            ["report", "nowhere", "--out", "full"],
            ["study", "kappa", "--out", "full"],
            ["study", "kappa", "--data", "imagenet"],
            ["study", "kappa", "--set", "data.source=digit"],
            ["study", "comparison", "--recipes", "simclr", "digts"],
            ["study", "distributions", "--out", "full"],
            ["study", "divergence-2d", "--out", "full"],
            ["study", "sigma-lambda", "--out", "full"],
            ["study", "sigma-lambda", "--data", "isic2018"],
            ["study", "tsne", "--runs", run, "--data", "imagenet"],
            ["tune", "digits", "--space", "divergence.sigma=1:2", "--out", "full"],
            ["tune", "digits", "--space", "divergence.sigma=1:2", "--data", "imagenet"],
            ["tune", "digits", "--space", "divergence.sgima=1:2"],
        ]
        script = (
            "import json, sys\nfrom deepbregman.cli import main\n"
            "for expected, lines in zip((0, 2), json.loads(sys.argv[1])):\n"
            "    for words in lines:\n"
            "        try: main(words)\n"
            "        except SystemExit as stop: code = stop.code or 0\n"
            "        else: code = 0\n"
            "        assert code == expected, (words, code)\n"
            "        assert 'torch' not in sys.modules, words\n"
        )
        command = [sys.executable, "-c", script, json.dumps([fine, refused])]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "is complete: 2 epochs trained" in done.stdout
        assert "exists with other settings" in done.stderr
        assert f"data '{tmp_path / 'photos'}' lacks labels to evaluate with" in done.stderr
        assert "labels 'empty.csv': the first line is ''" in done.stderr
        assert [path.name for path in (tmp_path / "full").iterdir()] == ["x"]
        assert not (tmp_path / "studies").exists()

    def test_debug_shows_where_an_error_arose(self, capsys, monkeypatch):
        def fail() -> None:
            raise ZeroDivisionError("a fault of ours")

        monkeypatch.setattr("deepbregman.config.recipes", fail)
        for words in (["recipes"], ["recipes", "--debug"], ["--debug", "recipes"]):
            with pytest.raises(SystemExit) as caught:
                main(words)
            assert caught.value.code == 1
            err = capsys.readouterr().err
            assert err.count("error: ZeroDivisionError: a fault of ours; this is a fault of") == 1
            assert ("Traceback" in err) == ("--debug" in words)

    def test_control_c_is_no_error(self, command, monkeypatch):
        def stop() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("deepbregman.config.recipes", stop)
        assert command("recipes") == (130, "", "stopped\n")

    @pytest.mark.parametrize("processes", [1, 2])
    def test_sigterm_is_no_error_either(self, command, processes, monkeypatch):
        """In one of several processes it stays as it was: a process that waits would not see it."""
        seen = []

        def stop() -> None:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("it goes on")

        monkeypatch.setattr("deepbregman.config.recipes", stop)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        for name, value in zip(names, (0, processes, 0, processes), strict=True):
            monkeypatch.setenv(name, str(value))
        before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
        try:
            code, _, err = command("recipes")
        finally:
            signal.signal(signal.SIGTERM, before)
        expected = (143, "stopped by SIGTERM\n", []) if processes == 1 else (1, err, [15])
        assert (code, err, seen) == expected

    @pytest.mark.parametrize(
        ("given", "expected"),
        [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    )
    def test_threads_do_not_wait_long_in_vain(self, tmp_path, given, expected):
        """OpenMP reads this when torch is loaded; what the user says stays."""
        show = "import os\nprint(os.environ.get('GOMP_SPINCOUNT'))\nos._exit(0)\n"
        (tmp_path / "tyro.py").write_text(show)
        own = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        kept = {name: value for name, value in os.environ.items() if name not in own}
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            [sys.executable, "-u", "-m", "deepbregman"],
            env={**kept, **given, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{expected}\n"

    def test_control_c_during_the_first_imports_is_no_error(self, tmp_path):
        (tmp_path / "tyro.py").write_text("raise KeyboardInterrupt\n")  # it is imported first
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            [sys.executable, "-m", "deepbregman", "recipes"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def truncated(path: Path) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50.0).save(buffer, format="JPEG")
    path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])


@pytest.fixture
def damaged(photos) -> Path:
    """Photos of which one cannot be read."""
    truncated(photos / "cats" / "broken.jpg")
    return photos


@pytest.fixture
def untrained(monkeypatch) -> None:
    """Memory runs out in every run of a study: its images are opened, and nothing is trained."""

    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("deepbregman.studies.engine.run_trial", fail)


class TestErrors:
    """Each a paragraph on stderr that names the value, the rule and the fix; exit 2; no traces."""

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["pretian"], ["'pretian'", "did you mean 'pretrain'"]),
            (["predict"], ["'predict' is not one of", "`deepbregman --help` says what each does"]),
            (["pretrain"], ["needs a recipe", "paper"]),
            (["pretrain", "papr"], ["'papr'", "did you mean 'paper'"]),
            (
                ["tune", ".", "--space", "seed=0:9"],
                [
                    "'.' is a folder",
                    "such as best; if it holds images, add --data ., in Python data='.'",
                ],
            ),
            (["pretrain", "missing.toml"], ["'missing.toml'", "file that exists"]),
            (["pretrain", "digits", "--training.epoch", "3"], ["--training.epoch", "Perhaps"]),
            (["pretrain", "digits", "--training.epochs", "many"], ["--training.epochs", "many"]),
            (
                ["pretrain", "digits", "--training.epochs", "-1"],
                ["training.epochs is -1", "0 or more"],
            ),
            (
                ["pretrain", "digits", "--divergence.num-subnetworks", "0"],
                ["divergence.num_subnetworks is 0", "1 or more"],
            ),
            (["pretrain", "digits", "--divergence.sigma", "-1"], ["sigma is -1.0", "above 0"]),
            (["pretrain", "digits", "--optimiser.learning-rate", "nan"], ["nan", "finite"]),
            (["pretrain", "digits", "--divergence.kernel", "cubic"], ["cubic", "gaussian"]),
            (
                ["pretrain", "digits", "--training.batch-size", "5000"],
                ["batch_size 5000", "there are 1167", "lower it to 1167 or less"],
            ),
            (["pretrain", "digits", "--data", "digit"], ["'digit'", "did you mean 'digits'"]),
            (["pretrain", "digits", "--data", "none.npz"], ["none.npz"]),
            (["pretrain", "--resume", "nowhere"], ["nowhere", "not a run folder"]),
            (["evaluate", "nowhere"], ["nowhere", "not a run folder"]),
            (["evaluate", "nowhere", "--protocol", "magic"], ["magic", "knn"]),
            (["embed", "nowhere", "--out", "features.csv"], ["features.csv", ".npz"]),
            (["recipes", "digit"], ["'digit'", "did you mean 'digits'"]),
            (["pretrain", "digits", "--seed", "5000000000"], ["seed is 5000000000", "2^32"]),
            (["search", "run", "--seed=-1", "--query", "x"], ["seed is -1"]),
            (["pretrain", "digits", "--run", "r\udcff"], ["its name is not valid Unicode"]),
            (  # no picture takes the place of :100:
                ["tune", "digits", "--space", "divergence.sigma=10:100:int"],
                ["--space divergence.sigma=10:100:int: write LOW:HIGH"],
            ),
        ],
    )
    def test_table(self, refusal, words, expected, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        err = refusal(*words)
        for part in expected:
            assert part in err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("option", "rule"),
        [
            ("--sampler", "one of ('gp', 'tpe', 'random')."),
            ("--prune", "one of ('True', 'False')."),
            ("--trials", "invalid literal for int()"),
        ],
    )
    def test_an_option_without_a_default_does_not_offer_none(self, refusal, option, rule):
        """None is what the option is when it is left out."""
        err = refusal("tune", "digits", option, "magic")
        assert option in err
        assert rule in " ".join(err.replace("│", " ").split())
        assert "None" not in err

    def refused(self, command: Command, folder: Path, *words: object) -> str:
        """Expect a refusal that leaves no run folder behind; return its words."""
        code, _, err = command("pretrain", *words, "--run", folder)
        assert code == 2
        assert err.count("\n") == 1  # one paragraph
        assert not folder.exists()
        assert not list(folder.parent.glob(f".{folder.name}*"))
        return err

    def test_data_that_cannot_be_used(self, command, recipe, tmp_path):
        (tmp_path / "empty").mkdir()
        images = np.zeros((4, 8, 8), np.uint8)
        np.savez(tmp_path / "odd.npz", pixels=images)
        np.savez(tmp_path / "far.npz", train_images=images, train_labels=[0, 1, 2, 10**9])
        named = {"empty": "empty", "odd.npz": "(found: 'pixels')", "far.npz": "1000000000"}
        for name, words in named.items():
            assert words in self.refused(
                command, tmp_path / "run", recipe, "--data", tmp_path / name
            )

    def test_one_unreadable_image(self, command, output, recipe, damaged):
        run = damaged.parent / "run"
        words = (recipe, "--data", damaged, "--data.image-size", 8, "--training.batch-size", 8)
        err = self.refused(command, run, *words)
        assert "broken.jpg" in err
        assert "--skip-unreadable" in err
        out = output("pretrain", *words, "--skip-unreadable", "--run", run)
        assert "left out 1 unreadable image (cats/broken.jpg)\n" in out

    def test_unreadable_images_found_only_while_training_are_replaced_and_counted(
        self, command, output, recipe, damaged, monkeypatch
    ):
        """As in a folder too large to decode on opening."""
        monkeypatch.setattr("deepbregman.data.listings.FULL_DECODE_LIMIT", 0)
        run = damaged.parent / "run"
        words = ("--data", damaged, "--data.image-size", 8, "--training.batch-size", 8)
        options = (*words, "--skip-unreadable", "--run", run)
        output("pretrain", recipe, *options)
        code, _, err = command("embed", run, "--out", damaged.parent / "f.npz")
        assert (code, err) == (
            0,
            f"note: left out 1 unreadable image (cats/broken.jpg) of {damaged}\n",
        )
        out = output("evaluate", run, "--protocol", "knn")
        assert f"left out 1 unreadable image (cats/broken.jpg) of {damaged}\n" in out
        rows = json.loads((run / "result.json").read_text())["evaluations"]
        assert (rows[0]["num_train"], rows[0]["num_test"]) == (33, 7)
        words = ("--runs", run, "--seeds", 1, "--out", damaged.parent / "maps")
        out = output("study", "tsne", *words)
        assert "left out 1 unreadable image (cats/broken.jpg)\n" in out

    def test_unreadable_images_of_each_folder_are_told_once(self, output, copied_run, damaged):
        """Of the images to evaluate on, and of those that they are told from."""
        other = shutil.copytree(damaged, damaged.parent / "other")
        words = ("--protocol", "knn", "ood", "--data", damaged, "--ood.against", other)
        out = output("evaluate", copied_run.path, *words, "--skip-unreadable")
        told = [line for line in out.splitlines() if "left out" in line]
        assert told == [
            f"left out 1 unreadable image (cats/broken.jpg) of {folder}"
            for folder in (damaged, other)
        ]

    @pytest.mark.parametrize("sizes", [(8,), (8, 12)])
    def test_the_tables_tell_of_unreadable_images_once(
        self, refusal, recipe, damaged, sizes, untrained
    ):
        arms = []
        for size in sizes:
            arms.append(damaged.parent / f"arm{size}.toml")
            text = recipe.read_text()
            assert "image_size = 8" in text
            arms[-1].write_text(text.replace("image_size = 8", f"image_size = {size}"))
        words = ["--data", damaged, "--arms", *arms, "--seeds", 1, "--epochs", 1]
        words += ["--protocols", "knn", "--out", damaged.parent / "out"]
        changes = ["--set", "data.skip_unreadable=true", "training.batch_size=8"]
        err = refusal("study", "tables", *words, *changes)
        assert err.count("left out 1 unreadable image (cats/broken.jpg)") == 1

    @pytest.mark.parametrize("verb", ["study", "tune"])
    def test_studies_and_searches_say_how_many_unreadable_images_they_left_out(
        self, command, recipe, damaged, verb, untrained
    ):
        words = ["psi", "--recipe", recipe, "--only", "gaussian", "--seeds", 1]
        if verb == "tune":
            words = [recipe, "--space", "divergence.sigma=1:2", "--trials", 1]
        words += ["--data", damaged, "--epochs", 1, "--out", damaged.parent / "out"]
        words += ["--set", "data.skip_unreadable=true", "data.image_size=8"]
        code, out, _ = command(verb, *words, "training.batch_size=8")
        assert code == 2
        assert "left out 1 unreadable image (cats/broken.jpg)\n" in out

    @pytest.mark.parametrize("verb", ["study", "tune"])
    @pytest.mark.parametrize("fault", ["unreadable", "unlabelled", "few", "single"])
    def test_studies_and_searches_refuse_images_before_they_make_a_folder(
        self, refusal, recipe, photos, verb, fault
    ):
        """A folder that has begun would refuse the command that is mended."""
        words = ["psi", "--recipe", recipe, "--only", "gaussian", "--seeds", 1]
        batch = 60  # of the recipe
        if verb == "tune":
            words, batch = [recipe, "--space", "training.batch_size=8,90", "--trials", 1], 90
        if fault == "unreadable":
            truncated(photos / "cats" / "broken.jpg")
        if fault == "single":  # of 2 images of each class, one is for testing
            kept = 2 if verb == "tune" else 1
            for path in [p for folder in photos.iterdir() for p in sorted(folder.iterdir())[kept:]]:
                path.unlink()
        out = photos.parent / "out"
        data = photos / "dogs" if fault == "unlabelled" else photos
        err = refusal(verb, *words, "--data", data, "--epochs", 1, "--out", out)
        expected = {
            "unreadable": "--set data.skip_unreadable=true",
            "unlabelled": "lacks labels",
            "few": f"training.batch_size {batch} needs {batch} ",
            "single": "no two training images of a" if verb == "tune" else "has no test image",
        }
        assert expected[fault] in err
        assert not out.exists()

    def test_a_run_folder_that_exists(self, refusal, recipe, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "precious.txt").write_text("x")
        err = refusal("pretrain", recipe, "--run", tmp_path / "run")
        words = "exists, holds other files and is no run: name another with --run"
        assert f"run folder {tmp_path / 'run'} {words}" in err
        assert "remove" not in err  # they may be photographs
        assert [p.name for p in (tmp_path / "run").iterdir()] == ["precious.txt"]

    def test_a_checkpoint_of_another_shape(self, refusal, copied_run):
        run = copied_run.path
        other = override(copied_run.config, {"divergence.num_subnetworks": 11})
        (run / "config.toml").write_text(to_toml(other))
        before = (run / "result.json").read_text()
        err = refusal("evaluate", run)
        assert "does not fit" in err
        assert "(10," in err or ", 10" in err
        assert "11" in err
        err = refusal("pretrain", "--resume", run)
        assert "config.toml" in err
        assert "made with other settings" in err
        assert (run / "result.json").read_text() == before

    def test_a_folder_whose_name_looks_like_markup(self, output, recipe, tmp_path):
        folder = tmp_path / "[/x]"
        out = output("pretrain", recipe, "--run", folder)
        assert "[/x]" in out
        out = output("evaluate", folder, "--protocol", "knn")
        assert "[/x]" in out

    def test_damaged_records_are_named(self, refusal, copied_run):
        run = copied_run.path
        (run / "result.json").write_text("{half")
        err = refusal("evaluate", run, "--protocol", "knn")
        assert "result.json" in err
        (run / "config.toml").write_bytes(b"seed = 1 # caf\xe9")
        err = refusal("evaluate", run)
        assert "config.toml" in err
        assert "UTF-8" in err

    def test_no_space_to_write(self, forks, recipe, tmp_path):
        """A real limit on file sizes: the checkpoint does not fit, and leaves no half of it."""
        run = tmp_path / "run"
        words = ["pretrain", recipe, "--run", run]
        code, err = run_unheard(forks, "a closed pipe", *words, largest_file=50_000)
        assert code == 2, err
        assert "Traceback" not in err
        assert "File too large" in err
        assert list((run / "checkpoints").iterdir()) == []

    @pytest.mark.parametrize("words", SHORT_WORK)
    def test_a_reader_that_leaves_is_no_error_to_print(self, words):
        """As in ``deepbregman recipes | head -1``."""
        assert run_unheard(None, "a closed pipe", *words.split()) == (1, "")

    @pytest.mark.parametrize("words", SHORT_WORK)
    def test_words_that_cannot_be_printed_are_an_error(self, words):
        code, err = run_unheard(None, "a full disk", *words.split())
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith("error: No space left on device; free space there")

    @pytest.mark.parametrize("out", ["a closed pipe", "a full disk"])
    def test_training_goes_on_when_nobody_can_read_its_progress(self, forks, recipe, tmp_path, out):
        code, err = run_unheard(forks, out, "pretrain", recipe, "--run", tmp_path / "run")
        assert (code, err.count("\n")) == (0, 1)
        assert err.startswith("note: standard output: ")
        assert err.endswith("; nothing more is printed there, the work continues\n")
        assert len(Run.open(tmp_path / "run").metrics()) == 1

    @pytest.mark.parametrize("controlled", [False, True])
    def test_a_terminal_that_is_gone_does_not_take_the_training_with_it(
        self, forks, recipe, tmp_path, controlled
    ):
        """A controlling terminal sends SIGHUP, and the run saves; without one it goes on."""
        epochs = 100_000 if controlled else 4
        words = ["pretrain", recipe, "--run", tmp_path / "run", "--training.epochs", epochs]
        words += ["--training.knn-every", 0]
        reader, writer = pty.openpty()
        process = forks.start(writer, writer, *words, controlled=controlled)
        os.close(writer)
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            assert os.read(reader, 1 << 16)  # its progress, drawn anew ten times a second
        os.close(reader)
        assert forks.wait(process) == (129 if controlled else 0)
        run = Run.open(tmp_path / "run")
        saved = checkpoints.load(run.last_checkpoint)
        assert int(saved["epoch"]) == len(run.metrics())
        assert controlled or len(run.metrics()) == epochs

    @pytest.mark.parametrize(
        ("words", "closed", "code"),
        [("--version", "out", 0), ("recipes", "out", 0), ("nonsense", "err", 2)],
    )
    def test_closed_streams_change_nothing(self, words, closed, code):
        """As daemons are started; ``out`` and ``err`` name what is closed."""
        number = {"out": 1, "err": 2}[closed]
        script = f"{shlex.quote(sys.executable)} -m deepbregman {words} {number}>&-"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)

    def test_a_note_without_standard_error_is_not_printed_elsewhere(self, capsys):
        print_note("left out", None)
        assert capsys.readouterr().out == ""

    def test_a_run_without_standard_output(self, forks, recipe, tmp_path):
        words = ["pretrain", recipe, "--run", tmp_path / "run"]
        assert run_unheard(forks, "a closed pipe", *words, closed=True) == (0, "")

    def test_a_folder_that_cannot_be_made(self, refusal, recipe, tmp_path):
        (tmp_path / "file").write_text("x")
        err = refusal("pretrain", recipe, "--run", tmp_path / "file" / "run")
        assert "file" in err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
    def test_cuda_without_a_gpu(self, refusal, recipe, tmp_path):
        err = refusal("pretrain", recipe, "--run", tmp_path / "run", "--accelerator", "cuda")
        assert "no CUDA device" in err


def test_errors_show_no_password(refusal):
    errors = refusal("postgresql://me:geheim@host/database")
    assert "***@host" in errors
    assert "geheim" not in errors


def test_the_values_of_an_option_that_stands_twice_count_all(refusal, output, copied_run):
    words = ("tune", "digits", "--space", "divergence.sigma=1:2", "--trials", 1, "--space=a.b=1:2")
    assert "--space a.b: there is no such field" in refusal(*words)
    assert "--space c.d: there is no such" in refusal(*words[:2], "--space", "c.d=1:2", *words[2:])
    twice = ("--protocol", "cluster", "--protocol=knn", "--seeds", 1, "--seeds", 2)
    output("evaluate", copied_run.path, *twice)
    found = {(row["protocol"], row["n"]) for row in copied_run.evaluations()}
    assert found == {("cluster", 2), ("knn", 1)}  # of an option with one value the last one counts


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--set a=1 b=2 --epochs 3 --set=c=3 d", "--set a=1 b=2 c=3 d --epochs 3"),
        ("x --space a --space b --space c", "x --space a b c"),
        ("--out x --out y a b", "--out x --out y a b"),  # the last one counts
        ("--views.blur 0.1 --views.blur 0.2", "--views.blur 0.1 --views.blur 0.2"),
        ("--epochs 3 --epochs 5", "--epochs 3 --epochs 5"),
        ("digits --set a=1 --train", "digits --set a=1 --train"),
        ("", ""),
    ],
)
def test_parts_of_a_list_are_joined(words, expected):
    assert cli._join_repeated(words.split()) == expected.split()


def test_until_work_is_reported_a_bar_says_that_the_program_loads():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    with progress_bars(console, says_loading=True) as report:
        assert "loading" in shown.getvalue()
        report("thumbnails", 1, 2)
        before = len(shown.getvalue())
    last = shown.getvalue()[before:]
    assert "thumbnails" in last
    assert "loading" not in last


def test_long_work_says_that_it_loads_before_it_says_anything_else(tmp_path):
    """Importing torch takes seconds, and more on a busy machine."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=80)
    run, nothing = tmp_path / "run", {"training.epochs": 0}
    pretrain("digits", changes=nothing, run=run, console=console)
    assert shown.getvalue().find("loading PyTorch") in range(40)  # after some control characters


def test_in_a_file_nothing_tells_that_the_program_loads():
    shown = io.StringIO()
    with say_loading(Console(file=shown)), say_loading(None):
        pass
    assert not shown.getvalue()


def test_without_a_terminal_a_line_a_minute_tells_how_far_the_work_is(monkeypatch):
    """As in the file of a cluster's job: embedding a million images takes many minutes."""
    times = iter([0.0, 59.0, 61.0, 61.0, 90.0, 122.0, 122.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(times))
    shown = io.StringIO()
    with progress_bars(Console(file=shown)) as report:
        for done in (1000, 2000, 3000, 4000, 5000):
            report("features", done, 5000)
    assert shown.getvalue() == "features: 2,000 of 5,000\nfeatures: 4,000 of 5,000\n"


def test_a_bar_goes_when_its_work_is_finished():
    """What is printed next on the other stream would be written into its line."""
    shown = io.StringIO()
    with progress_bars(Console(file=shown, force_terminal=True, width=80)) as report:
        report("thumbnails", 1, 2)
        report("thumbnails", 2, 2)
        assert shown.getvalue().endswith("\x1b[2K")  # the line is empty


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("best --divergence.sigma 3", "divergence.compare is 'match'"),
        ("best --divergence.hidden 32", "divergence.source is 'bank'"),  # as the recipe has it
        ("simclr --divergence.sigma 3", "divergence.weight is 0"),
        ("simclr --teacher.momentum 0.9", "divergence.weight is 0"),
        ("simclr --weak-views.flip 0.1", "divergence.weight is 0"),
        ("paper --divergence.alpha 2", "divergence.kernel is 'gaussian'"),
        ("paper --divergence.target-smoothing 0.1", "divergence.smoothing is 0"),
        ("paper --divergence.centring mean", "the method simclr has no teacher"),
        ("paper --optimiser.momentum 0.8", "optimiser.name is 'adam'"),
        ("simclr --optimiser.convolution-rate 0.1", "optimiser.name is 'sgd'"),
        ("simclr --optimiser.step-factor 0.5", "optimiser.schedule is 'cosine'"),
        ("simclr --views.blur-sigma 0.1 1.0", "views.blur is 0"),
        ("best --weak-views.jitter 0.8 0.8 0.8 0.2", "weak_views.jitter_probability is 0"),
        ("best --optimiser.momentum 0.8", ""),
        ("paper --divergence.sigma 3", ""),
        ("simclr --small-views.num-views 4 --rotation.weight 1", ""),  # tables it does not have
        ("best", ""),
    ],
)
def test_an_option_that_training_does_not_use_is_told(words, why, few_digits, tmp_path, capsys):
    quick = ["--training.epochs", "0", "--training.batch-size", "32", "--encoder.name", "small"]
    main(["pretrain", *words.split(), "--data", few_digits, *quick, "--run", str(tmp_path / "run")])
    notes = re.findall(
        r"(?m)^note: (.*) is not used in this training, since (.*)$", capsys.readouterr().err
    )
    field = words.partition("--")[2].partition(" ")[0].replace("-", "_")
    assert notes == ([(field, why)] if why else [])


def test_another_method_than_the_recipe_s_names_the_way_to_it(few_digits, refusal):
    """It seemed that SimCLR were the only method."""
    said = refusal("pretrain", few_digits, "--objective.name", "byol")
    assert "--objective.name is 'byol', and the method of the recipe auto is simclr" in said
    assert "`deepbregman recipes`" in said
