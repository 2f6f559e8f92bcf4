"""Pretraining without a recipe: settings are chosen, printed and written."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from deepbregman.commands import job
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import load_recipe
from deepbregman.errors import Notice, UserError
from deepbregman.runs import Run
from deepbregman.terminal import parse_budget
from deepbregman.training.faults import Fault

QUICK = ("--training.no-tensorboard", "--encoder.projection-hidden", 16, "--accelerator", "cpu")
SMALL = ("--encoder.name", "small")


@pytest.fixture(autouse=True)
def known_speed(monkeypatch) -> None:
    """A machine on which a step takes a second, and any ResNet is out of reach."""

    def measure(config: object, *rest: object) -> float:
        return 1.0 if config.encoder.name == "small" else 1e6  # type: ignore[attr-defined]  # a Config

    monkeypatch.setattr("deepbregman.commands.job.measure_step", measure)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for index in range(40):
        pixels = random.integers(0, 256, (20, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def test_photos_beside_sub_folders_are_told_of_once(command, photos, tmp_path):
    """Though the folder is listed to choose the settings, and again to train."""
    grown = tmp_path / "grown"
    shutil.copytree(photos, grown)
    (grown / "2019").mkdir()
    (grown / "0.png").rename(grown / "2019" / "0.png")
    words = ("--run", tmp_path / "run", "--training.epochs", 1)
    code, out, err = command("pretrain", grown, *words, *QUICK)
    assert code == 0
    assert err.count("39 of 40 images lie beside sub-folders") == 1
    assert "40 images" in out


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "no run and no file is there; give random, auto, torchvision:NAME"),
        (b"not weights", "cannot be read"),
        ({"conv1.weight": torch.zeros(64, 3, 7, 7)}, "does not fit the encoder"),
    ],
)
def test_wrong_weights_are_refused_before_the_speed_is_measured(
    command, photos, tmp_path, monkeypatch, content, part
):
    monkeypatch.setattr(job, "measure_step", lambda *_: pytest.fail("the speed was measured"))
    weights, run = tmp_path / "weights.pt", tmp_path / "run"
    if isinstance(content, bytes):
        weights.write_bytes(content)
    elif content is not None:
        torch.save(content, weights)
    words = ("--encoder.weights", weights, "--run", run)
    code, _, err = command("pretrain", photos, *words, *QUICK)
    assert (code, run.exists()) == (2, False)
    assert "encoder.weights" in err
    assert part in err


def enough(run: Path) -> str:
    """Return the budget for 800 epochs, by the time that the run took; auto spares a tenth."""
    trained = Run(run).result()["pretrain"]
    minutes = math.ceil(800 * trained["seconds"] / trained["epoch"] / 0.9 / 60)
    return f"{minutes}m" if minutes < 120 else f"{math.ceil(minutes / 60)}h"


def test_a_folder_without_a_recipe(output, photos, tmp_path):
    run = tmp_path / "run"
    out = output("pretrain", photos, "--run", run, "--budget", "9s", *QUICK)
    config = Run.open(run).config
    assert (config.data.source, config.data.image_size) == (str(photos), 12)
    assert (config.encoder.name, config.training.batch_size) == ("small", 16)
    assert config.training.epochs == 4  # of two steps: what 0.9 of 9 seconds are enough for
    assert config.divergence.num_subnetworks == 16  # a batch
    assert "estimated time: 8 s" in out
    for field in ("data.image_size", "training.epochs", "optimiser.warmup_epochs", "data.workers"):
        assert field in out
    assert "what fits in 9 s; up to 800 improve the result" in out
    again = (
        f"`deepbregman pretrain {photos} --encoder.weights {run} --budget {enough(run)} --run NEW`"
    )
    assert f"up to 800 epochs improve the result: {again}" in out
    # The written configuration is a plain recipe.
    assert load_recipe(str(run / "config.toml")) == config


def test_options_are_kept_even_if_they_are_the_recipe_s(output, photos, tmp_path):
    words = ("--training.batch_size=20", "--optimiser.learning-rate", 1.0, "--training.epochs", 1)
    words += (*SMALL, *QUICK)
    run = tmp_path / "run"
    output("pretrain", "auto", "--data", photos, "--run", run, *words)
    config = Run.open(run).config
    assert config.training.batch_size == 20
    assert config.optimiser.learning_rate == 1.0  # also that of the recipe
    assert config.training.epochs == 1


def test_in_python(few_digits, tmp_path):
    changes = {
        "training.epochs": 1,
        "training.tensorboard": False,
        "training.knn_every": 0,
        "encoder.name": "small",
        "encoder.projection_hidden": 16,
    }
    run = pretrain("auto", data=few_digits, run=tmp_path / "run", changes=changes)
    assert run.config.data.image_size == 8
    assert run.config.training.batch_size == 32  # of 200 digits


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["auto"], "needs images"),
        (["my_photoz"], "'my_photoz' is neither a folder of images or a file of many, nor"),
        (["digit"], "did you mean 'digits'?"),
        (["digits", "--budget", "5m"], "only the recipe auto"),
        (["auto", "--data", "digits", "--budget", "soon"], "--budget soon: it must be a time"),
        (["auto", "--data", "digits", "--budget", "0m"], "--budget 0m"),
        ([], "pretrain needs a recipe or images first"),
    ],
)
def test_bad_input(refusal, words, said):
    error = refusal("pretrain", *words)
    assert said in error


def test_a_name_with_spaces_must_be_in_quotes(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "My old photos").mkdir()
    error = refusal("pretrain", "My", "old", "photos", "--budget", "5m")
    assert "; a name with spaces must be in quotes: 'My old photos'" in error
    error = refusal("pretrain", "My", "photos", "--budget", "5m")
    assert "quotes" not in error


def test_python_names_the_rule_too():
    with pytest.raises(UserError, match="needs images"):
        pretrain("auto")


def test_a_damaged_photo_is_left_out_and_the_run_can_be_repeated(output, refusal, photos, tmp_path):
    folder, run = tmp_path / "photos", tmp_path / "run"
    shutil.copytree(photos, folder)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff half of a photo")
    words = ("--training.epochs", 1, *SMALL, *QUICK)
    out = output("pretrain", folder, "--run", run, *words)
    assert "left out 1 unreadable image (broken.jpg)" in out
    assert "on 40 images" in out
    # Complete: the same command, and --resume, say how to train longer.
    again = f"--encoder.weights {run} --budget {enough(run)} --run NEW`"
    out = output("pretrain", folder, "--run", run, *words)
    assert f"`deepbregman pretrain {folder} {again}" in out
    out = output("pretrain", "--resume", run, "--accelerator", "cpu")
    assert f"run {run} is complete: 1 epoch trained" in out
    # A run is no folder of images.
    err = refusal("pretrain", run)
    assert f"`deepbregman pretrain --resume {run}` continues it" in err


def test_a_run_that_continues_keeps_its_length_whatever_the_budget(output, photos, tmp_path):
    run = tmp_path / "run"
    words = ("pretrain", photos, "--run", run, *QUICK, "--budget")
    out = output(*words, "9s")
    assert "whatever --budget says" not in out
    (run / "result.json").unlink()  # as if it had been stopped
    out = output(*words, "1h")
    kept = "the run keeps the 4 epochs planned when it began, whatever --budget says"
    assert kept in out
    # It ends with the words of a run that was not interrupted.
    again = (
        f"`deepbregman pretrain {photos} --encoder.weights {run} --budget {enough(run)} --run NEW`"
    )
    more = f"up to 800 epochs improve the result: {again}"
    assert out.count(more) == 1
    (run / "result.json").unlink()
    with pytest.warns(Notice) as told:
        pretrain("auto", data=photos, run=run, budget="1h", accelerator="cpu")
    assert [str(each.message) for each in told] == [kept]
    assert Run.open(run).config.training.epochs == 4


def test_a_complete_run_says_that_more_epochs_improve_the_result(output, photos, tmp_path):
    run = tmp_path / "run"
    words = ("pretrain", photos, "--run", run, *QUICK, "--budget", "9s")
    output(*words)
    again = (
        f"`deepbregman pretrain {photos} --encoder.weights {run} --budget {enough(run)} --run NEW`"
    )
    for repeated in (words, ("pretrain", "--resume", run, "--accelerator", "cpu")):
        out = output(*repeated)
        assert f"run {run} is complete: 4 epochs trained" in out
        assert out.count(f"up to 800 epochs improve the result: {again}") == 1


def test_a_record_that_cannot_be_written_ends_all_processes(photos, tmp_path, monkeypatch):
    """What only process 0 writes is written together: the others must not wait for it forever."""
    together: list[str] = []

    def run_in_first(fabric: object, work: Callable[[], object]) -> object:
        together.append("begin")
        try:
            return work()
        finally:
            together.append("end")

    def fail(run: Run, epochs: int) -> None:
        assert together[-1] == "begin"
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(job, "run_in_first", run_in_first)
    monkeypatch.setattr(Run, "keep_enough", fail)
    with pytest.raises(Fault, match="no space left"), pytest.warns(Notice, match="too few"):
        pretrain("auto", data=photos, run=tmp_path / "run", budget="9s", accelerator="cpu")


def test_a_recipe_and_a_folder_are_told_where_the_folder_belongs(refusal, photos):
    for names in (("best", photos), (photos, "best")):
        err = refusal("pretrain", *names, "--training.epochs", 1)
        assert f"{str(names[1])!r} follows {names[0]}" in err
        assert f"write `deepbregman pretrain best --data {photos}`" in err


def test_only_one_folder_of_images_is_taken(refusal, photos, tmp_path):
    for second in (("digits2",), ("--data", "digits"), ("--data=digits",)):
        words = ("--run", tmp_path / "run", *QUICK)
        err = refusal("pretrain", photos, *second, *words)
        assert "digits" in err
        assert "put all images into one folder" in err
        assert not (tmp_path / "run").exists()


def test_photos_that_cannot_be_read_are_named_if_there_are_no_others(refusal, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.effect_noise((64, 64), 50).save(folder / "whole.jpg")
    content = (folder / "whole.jpg").read_bytes()
    (folder / "whole.jpg").rename(tmp_path / "whole.jpg")
    (folder / "half.jpg").write_bytes(content[: len(content) // 2])
    err = refusal("pretrain", folder, "--run", tmp_path / "run", *SMALL, *QUICK)
    assert "none of the training images can be read ('half.jpg')" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "kind"), [("digits", "recipe"), ("voc", "dataset"), ("cifar10", "dataset")]
)
def test_a_folder_with_the_name_of_a_recipe_or_a_dataset(
    command, photos, tmp_path, monkeypatch, name, kind
):
    shutil.copytree(photos, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    # The wrong option ends the command before it trains.
    said = f"note: {name} means the {kind} of that name; for the folder, write ./{name}"
    assert said in command("pretrain", name, "--wrong")[2]
    assert "of that name" not in command("pretrain", f"./{name}", "--wrong")[2]
    if kind == "recipe":
        assert said not in command("pretrain", name, "--data", "iris", "--wrong")[2]


def test_a_folder_that_is_written_wrong_is_found(refusal, photos, monkeypatch):
    monkeypatch.chdir(photos.parent)
    err = refusal("pretrain", f"{photos.name}s")
    assert f"did you mean '{photos.name}'?" in err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("5 min", 300), ("5MIN", 300), ("1h30m", 5400), ("1.5h", 5400)],
)
def test_times_as_people_write_them(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("kind", [str, Path])
def test_a_program_names_images_as_the_command_does(photos, tmp_path, kind):
    changes = {"training.epochs": 1, "training.tensorboard": False, "training.knn_every": 0}
    changes |= {"encoder.name": "small", "encoder.projection_hidden": 16}
    with pytest.warns(Notice, match="40 images teach an encoder little; give hundreds"):
        run = pretrain(kind(photos), run=tmp_path / "run", changes=changes)
    assert run.config.data.source == str(photos)
    assert run.config == pretrain("auto", data=photos, run=run.path, changes=changes).config


def test_a_path_is_never_the_name_of_a_recipe_or_a_dataset(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "cifar10"):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=f"'{name}': no image in it"):
            pretrain(Path(name), run=tmp_path / "run")
    with pytest.warns(Notice, match=r"digits means the recipe of that name; .* write \./digits"):
        pretrain("digits", run=tmp_path / "digits-run", changes={"training.epochs": 0})


def test_a_program_may_write_a_home_folder_short(photos, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(photos.parent))
    with pytest.raises(UserError, match="--budget soon"):  # the images are found before
        pretrain(f"~/{photos.name}", run=tmp_path / "run", budget="soon")


@pytest.mark.parametrize("recipe", ["", "my_photoz"])
def test_a_program_is_told_of_a_name_that_is_nothing(recipe, tmp_path):
    with pytest.raises(UserError, match=f"'{recipe}' is neither a folder of images"):
        pretrain(recipe, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_program_is_told_how_to_name_images_and_times(photos, tmp_path):
    for given in ({"data": "digits"}, {"changes": {"data.source": "digits"}}):
        with pytest.raises(UserError, match="a run takes images from one place"):
            pretrain(str(photos), run=tmp_path / "run", **given)
    with pytest.raises(UserError, match=r"recipe is 3: .* \"auto\", data=..."):
        pretrain(3, run=tmp_path / "run")
    with pytest.raises(UserError, match="--budget 30: it must be a time above 0 with its unit"):
        pretrain("auto", data=photos, budget=30, run=tmp_path / "run")
