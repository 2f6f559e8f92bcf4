"""What verbs say about the next step, and about runs that are not finished."""

import shlex
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepbregman.commands.pretrain import pretrain, suggest_next
from deepbregman.config import override
from deepbregman.runs import Run, collect_provenance
from deepbregman.training import checkpoints
from deepbregman.training.faults import format_resume_command


def test_an_unfinished_run_is_exported_with_a_warning(output, copied_run, tmp_path):
    words = ("export", copied_run.path, "--format", "safetensors", "--out")
    out = output(*words, tmp_path / "whole.safetensors")
    assert "not finished" not in out
    path = copied_run.last_checkpoint
    checkpoints.save(path, {**checkpoints.load(path), "epoch": 1 / 3})
    out = output(*words, tmp_path / "half.safetensors")
    assert "warning: this run is not finished; its encoder was exported after 0.3333 of 2" in out


def test_a_verb_that_looks_at_images_says_that_the_run_is_not_finished(
    command, copied_run, few_digits, tmp_path
):
    run = copied_run.path
    words = ("embed", run, "--data", few_digits, "--accelerator", "cpu", "--out")
    assert "not finished" not in command(*words, tmp_path / "whole.npz")[2]
    path = copied_run.last_checkpoint
    checkpoints.save(path, {**checkpoints.load(path), "epoch": 1 / 3})
    (run / "result.json").unlink()
    code, _, err = command(*words, tmp_path / "half.npz")
    assert code == 0
    words = f"run {run} is not finished: its encoder has seen 0.3333 of 2 epochs"
    assert f"{words}; to continue it: deepbregman pretrain --resume {run}" in err


@pytest.mark.parametrize(
    ("kind", "next_verb"),
    [
        ("digits", "evaluate"),
        ("flat", "explore"),
        ("classes", "evaluate"),
        ("half labelled", "explore"),
        ("labelled.npz", "evaluate"),
        ("with val.npz", "evaluate"),
        ("half labelled.npz", "explore"),
        ("plain.npz", "explore"),
        ("gone", "evaluate"),
    ],
)
def test_only_data_with_labels_are_to_be_evaluated(short_config, tmp_path, kind, next_verb):
    images = np.zeros((4, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "plain.npz", train_images=images)
    labels = np.array([0, 0, 1, 1])
    train = {"train_images": images, "train_labels": labels}
    test, val = ({f"{n}_images": images, f"{n}_labels": labels} for n in ("test", "val"))
    np.savez(tmp_path / "labelled.npz", **train, **test)
    np.savez(tmp_path / "with val.npz", **train, **val)
    np.savez(tmp_path / "half labelled.npz", **train, **val, test_images=images)
    folders = ("flat", "classes/a", "classes/b")
    for folder in (
        *folders,
        "half labelled/train/a",
        "half labelled/train/b",
        "half labelled/test",
    ):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "1.png")
    source = kind if kind == "digits" else str(tmp_path / kind)
    config = override(short_config, {"data.source": source})
    run = Run.create(tmp_path / "my run", config, collect_provenance("cpu"))
    explore = ["explore", str(run.path), "--out", "map.html"]
    label = ["label", str(run.path), "--out", "few.csv", "--sheet", "few.png"]
    evaluate = ["evaluate", str(run.path)]
    expected = {"evaluate": [evaluate, explore], "explore": [explore, label]}
    assert [shlex.split(command) for command in suggest_next(run)] == expected[next_verb]
    again = shlex.split(format_resume_command(config, run.path))
    assert again == ["deepbregman", "pretrain", "--resume", str(run.path)]


@pytest.fixture
def run_on_photos(short_config, tmp_path, monkeypatch) -> Run:
    """A run whose data is named as seen from the folder that it was started in."""
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Image.new("RGB", (8, 8)).save("photos/1.png")
    config = override(short_config, {"data.source": "photos"})
    return Run.create(Path("runs/mine"), config, collect_provenance("cpu"))


VERBS = [
    ["explore", "--out", "m.html"],
    ["label", "--out", "m.csv"],
    ["search", "--query", "1.png"],
    ["evaluate"],
]


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_run_is_looked_at_from_another_folder(refusal, run_on_photos, monkeypatch, words):
    started = Path.cwd()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    verb, *options = words
    err = refusal(verb, "../runs/mine", *options)
    assert (
        f"../runs/mine names it as seen from {started}: start the command there, or look at the "
        "images with --data ../photos"
    ) in err


def test_a_run_whose_images_have_moved_is_told_where_to_name_them(refusal, run_on_photos):
    Path("photos").rename("archive")
    err = refusal("explore", "runs/mine", "--out", "m.html")
    assert "if it has moved since runs/mine was trained, give its new place with --data" in err
    err = refusal("explore", "runs/mine", "--data", "nothing", "--out", "m.html")
    assert "moved" not in err


def test_a_run_of_the_name_of_its_images_is_not_taken_for_them(refusal, run_on_photos):
    Path("photos").rename("archive")
    Path("runs/mine").rename("runs/photos")
    err = refusal("explore", "runs/photos", "--out", "m.html")
    assert "if it has moved since runs/photos was trained, give its new place with --data" in err


def test_who_continues_a_run_is_not_sent_to_an_option_that_is_refused(
    refusal, run_on_photos, monkeypatch
):
    """A resumed run keeps its images, so --data is refused."""
    started = Path.cwd()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    err = refusal("pretrain", "--resume", "../runs/mine")
    assert f"../runs/mine names it as seen from {started}: start the command there" in err
    assert "--data" not in err
    monkeypatch.chdir(started)
    Path("photos").rename("archive")
    err = refusal("pretrain", "--resume", "runs/mine")
    assert "if it has moved since runs/mine was trained, move it back" in err
    assert "--data" not in err


@pytest.mark.parametrize("source", ["custom", "imagenet"])
def test_data_that_no_path_names_has_not_moved(refusal, short_config, tmp_path, source):
    config = override(short_config, {"data.source": source, "data.root": str(tmp_path)})
    run = Run.create(tmp_path / "run", config, collect_provenance("cpu"))
    err = refusal("evaluate", run.path)
    assert f"data.source {'is ' * (source == 'custom')}'{source}'" in err
    assert "moved" not in err


@pytest.mark.parametrize("kind", ["shards", "emptied"])
def test_a_run_whose_images_are_no_folder_of_files_now_is_evaluated(command, run_on_photos, kind):
    """Whether test images were trained on is then not known, and no reason to stop."""
    for index in range(10):
        place = Path("sorted", ("cats", "dogs")[index % 2], f"{index}.png")
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (index, 0, 0)).save(place)
    short = {"training.epochs": 0, "data.image_size": 8}
    run = pretrain(override(run_on_photos.config, short), run=Path("runs/trained"))
    image = Path("photos/1.png")
    if kind == "shards":
        with tarfile.open("photos/0.tar", "w") as shard:
            shard.add(image)
    image.unlink()
    words = ("--protocol", "knn", "--accelerator", "cpu", "--data", "sorted")
    code, _, err = command("evaluate", run.path, *words)
    assert code == 0, err


def test_test_images_that_were_trained_on_are_told_of(command, run_on_photos):
    random = np.random.default_rng(0)
    for index in range(20):
        kind = ("cats", "dogs")[index % 2]
        for place in (Path("sorted", kind, f"{index}.png"), Path("new", kind, f"{index}.png")):
            place.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place)
        shutil.copy(Path("sorted", kind, f"{index}.png"), f"photos/{index}.png")
    short = {"training.epochs": 0, "data.image_size": 8}
    run = pretrain(override(run_on_photos.config, short), run=Path("runs/trained"))
    words = ("evaluate", run.path, "--protocol", "knn", "--accelerator", "cpu", "--data")
    told = "of the 4 test images of 'sorted' are among those that runs/trained was trained on"
    code, _, err = command(*words, "sorted")
    assert code == 0
    assert f"note: 4 {told}" in err
    code, _, err = command(*words, "new")
    assert code == 0
    assert "trained on" not in err


def test_the_folder_of_runs_names_them(refusal, run_on_photos):
    err = refusal("explore", "runs", "--out", "m.html")
    assert "runs is not a run folder: it has no config.toml; it holds the run runs/mine" in err
