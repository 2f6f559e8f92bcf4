"""Labelling as a user does it: a few labels in, labels for all out."""

import csv
import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import deepbregman
from deepbregman.commands.label import _find_surprises, draw_first_images, show
from deepbregman.commands.pretrain import pretrain, suggest_next
from deepbregman.config import override
from deepbregman.data.labels import read_labels
from deepbregman.errors import UserError
from deepbregman.evaluation.gallery import open_gallery, open_run
from deepbregman.evaluation.labelling import draw_images, write_labels
from deepbregman.files import write_csv
from deepbregman.reporting import sheets
from deepbregman.runs import Run


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Reddish and bluish photographs, without classes."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    folder.mkdir()
    random = np.random.default_rng(0)
    for channel, name in ((0, "red"), (2, "blue")):
        for index in range(15):
            pixels = random.integers(0, 90, (10, 10, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(folder / f"{name}-{index}.png")
    return folder


@pytest.fixture(scope="module")
def run(short_config, photos, tmp_path_factory) -> Run:
    changes = {"training.epochs": 1, "training.batch_size": 8, "data.image_size": 8}
    config = override(short_config, {**changes, "data.source": str(photos)})
    return pretrain(config, run=tmp_path_factory.mktemp("runs") / "run")


def colour_of(name: str) -> str:
    return name.partition("-")[0]


def read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def write_table(path: Path, *names: str) -> Path:
    lines = [f"{name},{colour_of(name)}" for name in names]
    path.write_text("\n".join(["image,label", *lines]) + "\n")
    return path


FEW = [f"{name}-{index}.png" for name in ("red", "blue") for index in range(4)]
LABELS = {name: colour_of(name) for name in FEW}


def test_photographs_from_a_table(output, run, tmp_path):
    few, out, sheet = write_table(tmp_path / "few.csv", *FEW), tmp_path / "all.csv", "next.png"
    said = output(
        *("label", run.path, "--labels", few, "--out", out, "--sheet", tmp_path / sheet),
        *("--suggest", 3),
    )
    assert "expected accuracy" in said
    assert "with 4 times as many labels, drawn at random, it is about half" in said
    rows = {row["image"]: row for row in read_rows(out)}
    assert len(rows) == 30
    for name, row in rows.items():
        assert row["label"] == colour_of(name)
        shares = [float(row["probability of red"]), float(row["probability of blue"])]
        assert sum(shares) == pytest.approx(1.0, abs=2e-4)
        assert float(row["probability"]) == max(shares)
        assert row["given"] == ("yes" if name in FEW else "no")
        assert (float(row["probability"]) == 1.0) == (name in FEW)
    listed = sorted(
        (int(row["label next"]), name) for name, row in rows.items() if row["label next"]
    )
    assert [rank for rank, _ in listed] == [1, 2, 3]
    for _, name in listed:
        assert name not in FEW
        assert name in said
    with Image.open(tmp_path / sheet) as image:
        assert image.width > 3 * 112
    # What was written can be given again: only the lines that the user gave count.
    again = deepbregman.label(run, out, suggest=0)
    assert again.num_examples == 8
    assert again.labels == [rows[name]["label"] for name in again.names]


def test_predicted_labels_that_the_user_corrects_are_no_random_sample(run, tmp_path):
    table = write_table(tmp_path / "few.csv", *FEW)
    deepbregman.label(run, table, out=tmp_path / "all.csv", suggest=0)
    rows = read_rows(tmp_path / "all.csv")
    corrected = [row for row in rows if row["given"] == "no"][:3]
    for row in corrected:
        row.update(given="yes", label="blue")
    for row in rows:  # a new name for a class is no correction
        row["label"] = {"red": "scarlet"}.get(row["label"], row["label"])
    write_csv(tmp_path / "more.csv", [row for row in rows if row["given"] == "yes"])
    found = deepbregman.label(run, tmp_path / "more.csv", suggest=0)
    assert (found.num_examples, found.num_suggested) == (11, 3)
    marked = [
        name for name, is_marked in zip(found.names, found.suggested, strict=True) if is_marked
    ]
    assert marked == [row["image"] for row in corrected]


def test_what_was_suggested_stays_so_in_the_next_rounds(output, run, tmp_path):
    table = write_table(tmp_path / "few.csv", *FEW)
    marked: set[str] = set()
    for turn in range(3):
        out = tmp_path / f"all-{turn}.csv"
        words = ("label", run.path, "--labels", table, "--out", out, "--suggest", 2)
        said = output(*words)
        assert f"from {len(FEW)} labelled images" in said
        said_so = f"({len(marked)} more are not a random choice: they teach" in said
        assert said_so == bool(marked)
        rows = read_rows(out)
        assert {row["image"] for row in rows if row["suggested"]} == marked
        for row in rows:
            if row["label next"]:  # the user confirms the label
                row["given"] = "yes"
                marked.add(row["image"])
        write_csv(out, rows)
        table = out
    assert len(marked) == 6


def test_a_changed_label_counts_or_is_refused(refusal, run, tmp_path):
    """Whoever corrects a label in a spreadsheet, and forgets the column given, must hear of it."""
    first, table = tmp_path / "first.csv", tmp_path / "table.csv"
    few = {name: label.replace("r", "R") for name, label in LABELS.items()}  # Red and blue
    deepbregman.label(run, few, out=first)
    rows = read_rows(first)
    changed = [row for row in rows if row["given"] == "no"][:2]
    for row, label in zip(changed, ("green", "red"), strict=True):
        row["label"] = label

    def write() -> None:
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=";")
            writer.writeheader()
            writer.writerows(rows)

    write()
    for verb in (["label"], ["explore", "--out", tmp_path / "map.html"]):
        err = refusal(*verb, run.path, "--labels", table)
        names = f"'{changed[0]['image']}', '{changed[1]['image']}'"
        words = f"the label is not the predicted one for 2 images ({names}), but the column given"
        assert words in err
    for row in changed:
        row |= {"label": "Red", "given": "yes"}
    write()
    assert sum(deepbregman.label(run, table).given) == len(FEW) + 2


def test_a_sheet_that_exists_is_named_by_its_option(refusal, run, tmp_path):
    (tmp_path / "a.png").touch()
    for verb in ("label", "duplicates"):
        words = (verb, run.path, "--out", tmp_path / "a.csv", "--sheet", tmp_path / "a.png")
        error = refusal(*words)
        assert f"--sheet {tmp_path / 'a.png'} exists" in error


def test_the_picture_numbers_the_lines_of_the_table(run, tmp_path, monkeypatch):
    """Names are cut to the width of an image, so a number says which line is which."""
    drawn = []
    monkeypatch.setattr(sheets, "write_contact_sheet", lambda path, panels: drawn.extend(panels))
    found = draw_first_images(
        run.path, out=tmp_path / "few.csv", sheet=tmp_path / "few.png", suggest=3
    )
    (strip,) = drawn[0].strips
    assert strip.title == "label these first, in the order of few.csv"
    lines = [(str(place), (name,)) for place, name in enumerate(found.names, start=1)]
    assert [(tile.title, tile.lines) for tile in strip.tiles] == lines
    more = draw_first_images(run.path, out=str(tmp_path / "more.csv"), suggest=5)
    assert more.names[:3] == found.names  # as the guide says


def test_the_first_images_to_label_are_drawn(output, refusal, run, tmp_path):
    few, sheet = tmp_path / "few.csv", tmp_path / "few.png"
    said = output("label", run.path, "--out", few, "--sheet", sheet, "--suggest", 8, "--seed", 3)
    assert f"next: deepbregman label {run.path} --labels {few}" in said
    rows = read_rows(few)
    names = [row["image"] for row in rows]
    assert len(set(names)) == 8
    assert names != sorted(names)  # the first few are a random sample too
    assert {colour_of(name) for name in names} == {"red", "blue"}
    assert {row["label"] for row in rows} == {""}
    with Image.open(sheet) as image:
        assert image.width > 8 * 112
    # Another seed draws others, and a table that is filled in teaches.
    output("label", run.path, "--out", tmp_path / "b.csv", "--suggest", 8)
    assert (tmp_path / "b.csv").read_text() != few.read_text()
    again = ("--seed", 3, "--suggest", 8, "--accelerator", "cpu", "--devices", 2)
    output("label", run.path, "--out", tmp_path / "c.csv", *again)
    assert (tmp_path / "c.csv").read_text() == few.read_text()
    lines = [f"{name},{colour_of(name)}" for name in names[:7]]
    few.write_text("\n".join(["image,label", *lines, f"{names[7]},"]) + "\n")
    assert deepbregman.label(run, few).num_examples == 7
    # What only counts with labels says that they are missing.
    for words in ((), ("--out", "c.csv", "--by", "knn")):
        err = refusal("label", run.path, *words)
        assert "draws images at random" in err


def test_the_commands_that_follow_name_the_same_images(output, run, tmp_path):
    """Also where a folder has a space in its name; they had named those of the run."""
    other = Path(shutil.copytree(run.config.data.source, tmp_path / "other photos"))
    mine = Path(shutil.copytree(run.path, tmp_path / "my run"))
    few = tmp_path / "the few.csv"
    said = output("label", mine, "--data", other, "--out", few)
    _, browser, again = (line.partition("deepbregman ")[2] for line in said.splitlines())
    same = [str(mine), "--data", str(other)]
    labels = ["--labels", str(few), "--out"]
    assert shlex.split(browser) == ["explore", *same, *labels, "the few.html"]
    assert shlex.split(again) == ["label", *same, *labels, "all.csv"]
    write_table(few, *FEW)
    out = tmp_path / "all.csv"
    said = output(*shlex.split(again)[:-1], out)
    page = said.rpartition("next: deepbregman ")[2]
    assert shlex.split(page) == ["explore", *same, "--labels", str(out), "--out", "labelled.html"]


def test_pictures_show_more_than_the_encoder_sees(run, tmp_path):
    """Its images have 8 px, in frames of 12 at most; people would not know what to label."""
    large = tmp_path / "large"
    large.mkdir()
    for index in range(4):
        Image.new("RGB", (400, 300), (60 * index, 90, 20)).save(large / f"{index}.jpg")
    images = open_run(run, str(large), accelerator="cpu")
    drawn = draw_images(images, 4, 0)
    assert [image.pixels.shape for image in drawn] == [(120, 160, 3)] * 4
    seen = open_gallery(images, "all").pictures([0, 1], 0)
    assert max(seen[0].shape) < 20


def test_unequal_classes_are_told_both_ways(output, run, tmp_path):
    few = write_table(tmp_path / "few.csv", *FEW, *(f"red-{i}.png" for i in range(4, 10)))
    out = tmp_path / "all.csv"
    words = ("label", run.path, "--labels", few, "--suggest", 1, "--by", "linear")
    said = output(*words, "--balanced", "--out", out)
    assert "weighted classes (chosen)" in said
    lines = said.splitlines()
    (place,) = (i for i, line in enumerate(lines) if line.startswith("expected accuracy: "))
    assert lines[place + 1].startswith("as the mean over the classes: ")  # of that accuracy
    assert "add --balanced" not in said
    assert f"next: deepbregman explore {run.path} --labels {out}" in said
    assert "label them on the page that the next command writes" in said
    said = output("label", run.path, "--labels", write_table(few, *FEW), "--suggest", 0)
    assert "mean over" not in said  # four of each
    assert "next:" not in said  # nothing was written


def test_a_class_with_one_label_is_pointed_out(output, run, tmp_path):
    few, out = write_table(tmp_path / "few.csv", *FEW), tmp_path / "all.csv"
    few.write_text(few.read_text() + "red-9.png,violet\n")
    said = output("label", run.path, "--labels", few, "--out", out, "--suggest", 3)
    assert "only one image has the label violet, so" in said
    assert "from 9 labelled images" in said
    rows = {row["image"]: row for row in read_rows(out)}
    own = rows.pop("red-9.png")
    assert (own["label"], own["given"], own["probability of violet"]) == ("violet", "yes", "1.0000")
    assert own["label next"] == ""
    others = [row for row in rows.values() if row["given"] == "no"]
    assert any(float(row["probability of violet"]) > 0.01 for row in others)  # it was learned
    assert {row["label"] for name, row in rows.items() if name.startswith("blue")} == {"blue"}


def test_one_label_for_all_is_no_success(output, run, tmp_path):
    """Two labels among fourteen have no reason, so only the frequent class can be learned."""
    table = tmp_path / "few.csv"
    names = [f"{name}-{index}.png" for name in ("red", "blue") for index in range(7)]
    odd = ("red-0.png", "blue-0.png")
    lines = [f"{name},{'odd' if name in odd else 'even'}" for name in names]
    table.write_text("\n".join(["image,label", *lines]) + "\n")
    words = ("label", run.path, "--labels", table, "--suggest", 0, "--by", "knn")
    said = output(*words)
    assert "most frequent label for all, to compare" in said
    assert "85.7" in said
    assert "all other images get the label even" in said
    assert "add --balanced" in said


def test_new_photos_may_all_be_of_one_class(run, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "new", ignore=shutil.ignore_patterns("blue-*"))
    few = write_table(tmp_path / "few.csv", *FEW)
    found = deepbregman.label(run, few, data=str(tmp_path / "new"))
    assert set(found.labels) == {"red"}
    assert not list(_find_surprises(found))


def test_a_classifier_that_guesses_is_no_success(run, tmp_path):
    found = deepbregman.label(run, write_table(tmp_path / "few.csv", *FEW))
    assert not list(_find_surprises(found))
    chosen = found.judged[0]
    guess = found.guess._replace(accuracy=50.0, balanced=50.0)
    guessing = replace(found, judged=[chosen._replace(accuracy=50.0, balanced=90.0)], guess=guess)
    (words,) = _find_surprises(guessing)
    assert "right in 50.0 % of the cases, no more often than the most frequent label" in words
    assert "for all (50.0 %)" in words
    # With --balanced the mean over the classes counts.
    assert not list(_find_surprises(replace(guessing, is_balanced=True)))
    unfair = replace(guessing, is_balanced=True, judged=[chosen._replace(balanced=45.0)])
    (words,) = _find_surprises(unfair)
    assert "45.0 %" in words
    # The best of several looks better than it is: what is expected of it counts.
    less = found.expected._replace(value=48.0)
    for balanced in (False, True):
        expected = {"expected_balanced" if balanced else "expected": less}
        (words,) = _find_surprises(replace(found, guess=guess, is_balanced=balanced, **expected))
        assert "right in 48.0 % of the cases" in words


@pytest.mark.parametrize(
    ("enough", "expected", "is_said"), [(800, 60.0, True), (800, 95.0, False), (2, 60.0, False)]
)
def test_low_accuracy_after_a_short_training_is_told(
    enough, expected, is_said, run, photos, tmp_path, capsys
):
    copy = Run(shutil.copytree(run.path, tmp_path / "run"))
    copy.keep_enough(enough)
    copy.add_result(pretrain={**copy.result()["pretrain"], "epoch": 1, "seconds": 0.9})
    found = deepbregman.label(copy, write_table(tmp_path / "few.csv", *FEW), suggest=0)
    show(replace(found, expected=found.expected._replace(value=expected)), Console(width=1000))
    weights = f"--encoder.weights {copy.path} --budget 14m --run NEW"
    again = f"`deepbregman pretrain {photos} {weights}`"
    words = f"training was short: up to {enough} epochs improve the result: {again}\n"
    assert capsys.readouterr().out.count(words) == int(is_said)
    (copy.path / "result.json").unlink()  # not finished: then it has a schedule to go on with
    show(replace(found, expected=found.expected._replace(value=expected)), Console(width=1000))
    assert "training was short" not in capsys.readouterr().out


def test_labels_that_differ_in_case_are_pointed_out(run, tmp_path):
    table = write_table(tmp_path / "few.csv", *FEW)
    table.write_text(table.read_text().replace("red-0.png,red", "red-0.png,Red"))
    found = deepbregman.label(run, table, by=["knn"], suggest=0)
    assert any("'Red' and 'red' differ in case alone" in words for words in _find_surprises(found))


def test_class_folders_with_copies_and_strangers(run, photos, tmp_path):
    for name, label in LABELS.items():
        folder = tmp_path / "few" / label
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / name, folder / f"renamed-{name}")
    Image.new("RGB", (10, 10), (200, 40, 40)).save(tmp_path / "few" / "red" / "stranger.png")
    found = deepbregman.label(run, tmp_path / "few")
    assert found.num_examples == 9
    given = {name for name, known in zip(found.names, found.given, strict=True) if known}
    assert given == set(FEW)  # found by their bytes
    assert found.labels == [colour_of(name) for name in found.names]
    assert found.measured is None


def test_folders_that_are_no_classes_are_refused(refusal, run, photos, tmp_path):
    for split in ("train", "Test"):
        for name, label in LABELS.items():
            (tmp_path / "splits" / split / label).mkdir(parents=True, exist_ok=True)
            shutil.copy(photos / name, tmp_path / "splits" / split / label)
    err = refusal("label", run.path, "--labels", tmp_path / "splits")
    assert "its sub-folders Test and train are splits, not classes" in err
    folder = tmp_path / "splits" / "train"
    shutil.copy(photos / FEW[0], folder / "beside.png")
    err = refusal("label", run.path, "--labels", folder)
    assert "1 image ('" in err
    assert "beside.png') lie beside the folders of the classes" in err


def test_a_sheet_of_no_suggestions_is_not_written_and_says_so(command, run, tmp_path):
    table = write_table(tmp_path / "few.csv", *FEW)
    words = ("--labels", table, "--suggest", 0, "--sheet", tmp_path / "next.png")
    code, _, err = command("label", run.path, *words)
    assert (code, (tmp_path / "next.png").exists()) == (0, False)
    assert "next.png is not written: there are no images to label next" in err


def test_new_photos_are_labelled_by_those_of_the_run(output, run, photos, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    for index in range(5):  # the colours change places, so a name must not be taken for another
        shutil.copy(photos / f"blue-{index + 8}.png", new / f"a-{index}.png")
        shutil.copy(photos / f"red-{index + 8}.png", new / f"b-{index}.png")
    shutil.copy(photos / "red-3.png", new / "known.png")
    few, out = write_table(tmp_path / "few.csv", *FEW), tmp_path / "new.csv"
    words = ("label", run.path, "--labels", few, "--data", new, "--suggest", 2, "--out", out)
    said = output(*words)
    found = {row["image"]: (row["label"], row["given"]) for row in read_rows(out)}
    right = {"a": ("blue", "no"), "b": ("red", "no"), "known.png": ("red", "yes")}
    assert found == {path.name: right[colour_of(path.name)] for path in new.iterdir()}
    said = " ".join(said.split())
    assert "from 8 labelled images; it holds for images like the labelled ones" in said
    assert "add them and their labels to what --labels names" in said
    # A name that the run's own folder has, too, is printed with its folder.
    for index in range(5):
        (new / f"a-{index}.png").rename(new / f"red-{index + 4}.png")
        (new / f"b-{index}.png").rename(new / f"blue-{index + 4}.png")
    again = (*words[:-1], tmp_path / "again.csv")
    listed = re.findall(r"^  (\S+)  \(", output(*again), re.MULTILINE)
    assert len(listed) == 2
    assert {Path(name).parent for name in listed} == {new}


def test_new_photos_may_have_names_of_others(command, run, photos, tmp_path):
    """Cameras count from 1, so two folders have an IMG_0001.jpg; only one of them is labelled."""
    new, few = tmp_path / "new", write_table(tmp_path / "few.csv", *FEW)
    new.mkdir()
    for index, colour in enumerate(("red", "blue")):
        shutil.copy(photos / f"{colour}-9.png", new / f"x{index}.png")
    shutil.copy(photos / "blue-9.png", new / "red-0.png")

    def label(table: Path) -> tuple[str, dict[str, tuple[str, str]]]:
        (tmp_path / "new.csv").unlink(missing_ok=True)
        words = ("label", run.path, "--labels", table, "--data", new, "--out", tmp_path / "new.csv")
        code, _, err = command(*words)
        if code:
            return err, {}
        rows = read_rows(tmp_path / "new.csv")
        return err, {row["image"]: (row["label"], row["given"]) for row in rows}

    both = f"{photos} and {new} both have 1 labelled name ('red-0.png') for different photos"
    err, found = label(few)
    assert f"{both}: the labels are taken for {photos}, which has all labelled names" in err
    assert found["red-0.png"] == ("blue", "no")
    # A table of the new photos.
    for index in range(3):
        shutil.copy(photos / f"red-{index + 10}.png", new / f"r{index}.png")
        shutil.copy(photos / f"blue-{index + 10}.png", new / f"b{index}.png")
    lines = "red-0.png,blue\nr0.png,red\nr1.png,red\nb0.png,blue\n"
    own = tmp_path / "own.csv"
    own.write_text(f"image,label\n{lines}")
    err, found = label(own)
    assert f"{both}: the labels are taken for {new}" in err
    assert found["red-0.png"] == ("blue", "yes")
    # One of both: nobody can tell.
    own.write_text(f"{few.read_text()}{lines.partition(chr(10))[2]}")
    err, found = label(own)
    assert not found
    assert f"{both}: write the folder before such names, as in '{photos / 'red-0.png'}'" in err
    own.write_text(own.read_text().replace("red-0.png", str(photos / "red-0.png")))
    err, found = label(own)
    assert (err, found["red-0.png"]) == ("", ("blue", "no"))


@pytest.mark.usefixtures("without_umap")
def test_a_page_takes_labels_for_the_photos_that_label_takes_them_for(
    command, run, photos, tmp_path
):
    new, few = tmp_path / "new", write_table(tmp_path / "few.csv", *FEW)
    new.mkdir()
    shutil.copy(photos / "blue-9.png", new / "red-0.png")  # another photo of that name
    for name in ("red-1.png", "blue-10.png", "blue-11.png"):
        shutil.copy(photos / name, new / name)

    def explore() -> tuple[str, dict[str, str]]:
        (tmp_path / "new.html").unlink(missing_ok=True)
        words = ("--data", new, "--labels", few, "--out", tmp_path / "new.html")
        code, _, err = command("explore", run.path, *words)
        assert code == 0, err
        text = (tmp_path / "new.html").read_text()
        data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
        return err, {data["names"][place]: label for place, label in data["labels"]}

    both = f"{photos} and {new} both have 1 labelled name ('red-0.png') for different photos"
    err, found = explore()
    assert f"{both}: the labels are taken for {photos}, which has all labelled names" in err
    assert found == {"red-1.png": "red"}
    # Both folders have all names of this table, and the new one has no others: it is of that one.
    few.write_text("image,label\nred-0.png,blue\nblue-10.png,blue\n")
    err, found = explore()
    assert f"{both}: the labels are taken for {new}, which has all labelled names and fewer" in err
    assert found == {"red-0.png": "blue", "blue-10.png": "blue"}
    # Where nobody can tell, a page shows it: `label --data` may have written the table.
    shutil.copy(photos / "red-5.png", new / "more.png")
    err, found = explore()
    assert f"{both}: the labels are taken for {new}, which is shown" in err
    assert found == {"red-0.png": "blue", "blue-10.png": "blue"}


def test_drawn_photos_with_names_of_others_can_be_labelled(command, run, photos, tmp_path):
    """A camera begins anew: all new photos have names of old ones."""
    new, few = tmp_path / "new", tmp_path / "few.csv"
    new.mkdir()
    for index in range(6):  # swapped, so that a label of the wrong folder is seen
        shutil.copy(photos / f"red-{index}.png", new / f"blue-{index}.png")
        shutil.copy(photos / f"blue-{index}.png", new / f"red-{index}.png")
    (new / "._red-0.png").write_bytes(b"")  # as macOS adds them
    code, *_ = command("label", run.path, "--data", new, "--out", few, "--suggest", 8)
    assert code == 0
    names = [row["image"] for row in read_rows(few)]
    right = {name: "blue" if name.startswith("red") else "red" for name in names}
    few.write_text("image,label\n" + "".join(f"{name},{right[name]}\n" for name in names))
    words = ("--data", new, "--labels", few, "--out", tmp_path / "all.csv")
    code, _, err = command("label", run.path, *words)
    assert code == 0, err
    assert f"the labels are taken for {new}, which has all labelled names and fewer others" in err
    rows = read_rows(tmp_path / "all.csv")
    assert {r["image"]: r["label"] for r in rows if r["given"] == "yes"} == right


def test_the_order_of_the_labels_does_not_matter_for_new_photos(run, photos, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    shutil.copy(photos / "red-9.png", new / "x.png")
    names = sorted(f"{colour}-{index}.png" for colour in ("red", "blue") for index in range(8))
    labels = {name: "abba"[place % 4] for place, name in enumerate(names)}  # hard, so folds matter
    backwards = dict(reversed(labels.items()))
    found, again = (
        deepbregman.label(run, given, data=str(new), suggest=0) for given in (labels, backwards)
    )
    assert found.judged == again.judged
    assert found.expected == again.expected


def test_the_folder_of_the_labels_is_not_where_the_run_names_it(
    refusal, short_config, photos, tmp_path, monkeypatch
):
    shutil.copytree(photos, tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    changes = {"training.epochs": 0, "data.image_size": 8, "data.source": "photos"}
    pretrain(override(short_config, changes), run=tmp_path / "runs" / "run")
    (tmp_path / "new").mkdir()
    shutil.copy(photos / "red-9.png", tmp_path / "new" / "x.png")
    few = write_table(tmp_path / "few.csv", *FEW)
    monkeypatch.chdir(tmp_path / "new")
    err = refusal("label", "../runs/run", "--labels", few, "--data", ".")
    assert "8 of 8 names are not images of the data" in err
    assert "such as 'x.png', or to the run's own, photos" in err


def test_a_label_of_the_run_may_name_a_whole_path(run, photos, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    for index in (8, 9):
        shutil.copy(photos / f"red-{index}.png", new / f"{index}.png")
    labels = {str(photos / name): label for name, label in LABELS.items()}
    labels[str(new / "8.png")] = "red"
    found = deepbregman.label(run, labels, data=str(new), suggest=0)
    assert found.num_examples == len(FEW) + 1
    assert dict(zip(found.names, found.given.tolist(), strict=True)) == {
        "8.png": True,
        "9.png": False,
    }


def test_a_label_may_name_a_file_as_seen_from_here(run, photos, tmp_path, monkeypatch):
    """From the folder of the command, or from the user's own: in the data or elsewhere."""
    monkeypatch.chdir(photos.parent)
    monkeypatch.setenv("HOME", str(tmp_path))
    new = tmp_path / "new"
    new.mkdir()
    for index in (8, 9):
        shutil.copy(photos / f"red-{index}.png", new / f"{index}.png")
    Image.new("RGB", (10, 10), (200, 40, 40)).save(tmp_path / "stranger.png")
    labels = {f"photos/{name}": label for name, label in LABELS.items()}
    labels[os.path.relpath(tmp_path / "stranger.png")] = "red"
    Image.new("RGB", (10, 10), (190, 40, 40)).save(tmp_path / "guest.png")
    labels["~/guest.png"] = "red"
    found = deepbregman.label(run, labels, suggest=0)
    assert (found.num_examples, int(found.given.sum())) == (len(FEW) + 2, len(FEW))
    labels[os.path.relpath(new / "8.png")] = "red"
    found = deepbregman.label(run, labels, data=str(new), suggest=0)
    assert found.num_examples == len(FEW) + 3
    assert dict(zip(found.names, found.given.tolist(), strict=True)) == {
        "8.png": True,
        "9.png": False,
    }


def test_a_folder_is_listed_once(run, photos, tmp_path, monkeypatch):
    """The first of its sub-folders is looked at before, to tell a folder of images from shards."""
    for name in ("one", "two"):
        shutil.copytree(photos, tmp_path / "all" / name)
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda at: [listed.append(Path(at)), scandir(at)][1])
    labels = {f"two/{name}": label for name, label in LABELS.items()}
    deepbregman.label(run, labels, data=str(tmp_path / "all"), suggest=0)
    assert listed.count(tmp_path / "all" / "two") == 1


def test_new_photos_need_not_be_a_folder(run, tmp_path):
    random = np.random.default_rng(1)
    pixels = random.integers(0, 90, (6, 10, 10, 3), dtype=np.uint8)
    pixels[:3, ..., 0] += 150
    pixels[3:, ..., 2] += 150
    np.savez(tmp_path / "new.npz", train_images=pixels)
    few = write_table(tmp_path / "few.csv", *FEW)
    found = deepbregman.label(run, few, data=str(tmp_path / "new.npz"), suggest=0)
    assert found.labels == [*["red"] * 3, *["blue"] * 3]
    assert not found.given.any()


def test_images_may_be_named_by_their_places(run):
    """As `search` takes them, and as tables of data without names have them."""
    names = open_gallery(open_run(run.path, None), "all").names
    by_place = {f"train:{place}": names[place].partition("-")[0] for place in (0, 1, 20, 21)}
    found = deepbregman.label(run, by_place, suggest=0)
    assert found.given.nonzero().flatten().tolist() == [0, 1, 20, 21]
    with pytest.raises(UserError, match=r"2 of 6 names .* \('test:0', 'train:30'\)"):
        deepbregman.label(run, {**by_place, "train:30": "red", "test:0": "red"})


def test_a_label_that_was_predicted_for_sure_is_not_taken_for_a_given_one(run, tmp_path):
    found = deepbregman.label(run, LABELS, suggest=0)
    sure = replace(found, probabilities=found.probabilities.round())
    write_labels(tmp_path / "all.csv", sure, [])
    given = read_labels(tmp_path / "all.csv")
    assert len(given) == len(FEW)
    rows = [{**row, "given": "yes"} for row in read_rows(tmp_path / "all.csv")]  # all confirmed
    write_csv(tmp_path / "confirmed.csv", rows)
    given = read_labels(tmp_path / "confirmed.csv")
    assert {item.image for item in given if not item.is_suggested} == set(FEW)


def test_suggested_photos_of_the_run_do_not_count_elsewhere(run, photos, tmp_path):
    table = write_table(tmp_path / "few.csv", *FEW)
    lines = table.read_text().splitlines()
    marked = [f"{line},{'yes' if i in (4, 8) else ''}" for i, line in enumerate(lines[1:], 1)]
    table.write_text("\n".join([f"{lines[0]},suggested", *marked]) + "\n")
    new = tmp_path / "new"
    new.mkdir()
    shutil.copy(photos / "red-9.png", new / "x.png")
    found = deepbregman.label(run, table, data=str(new), suggest=0)
    assert (found.num_examples, found.num_suggested) == (8, 2)


def test_digits_have_the_accuracy_that_is_expected(short_run):
    random = np.random.default_rng(0)
    from deepbregman.data.opening import open_data

    source = open_data(short_run.config)
    places = random.permutation(len(source.train))[:80].tolist()
    labels = {f"train:{i}": str(int(source.train.labels[i])) for i in places}
    found = deepbregman.label(short_run, labels)
    assert found.measured is not None
    accuracy, count = found.measured
    assert count == 1797 - 80
    assert accuracy > 60.0
    assert found.expected.low <= accuracy <= found.expected.high
    # The probabilities say how often they are right.
    confidence = 100.0 * found.probabilities[~found.given].max(dim=1).values.mean().item()
    assert confidence == pytest.approx(accuracy, abs=8.0)


@pytest.mark.parametrize(
    ("lines", "words", "expected"),
    [
        (
            [*FEW, "red-99.png", "blue-x.png"],
            [],
            "2 of 10 names are not images of the data ('red-99",
        ),
        (["red-1.png", "red-2.png"], [], "2 labels, all 'red'"),
        (["red-1.png", "red-2.png", "blue-1.png"], [], "only one image of 'blue'"),
        ([], [], "no image has a label"),
        (FEW, ["--out", "old.csv"], "old.csv exists"),
        (FEW, ["--sheet", "sheet.csv"], "with that ending"),
        (FEW, ["--suggest", -1], "suggest is -1"),
        (FEW, ["--seed", -1], "seed is -1: it must be a whole number, 0 or more"),
        (FEW, ["--seed", 2**32], "seed is 4294967296: it must be a whole number from 0 to 2^32"),
        (FEW, ["--data", "nowhere"], "no such folder"),
        (FEW, ["--data", "."], "no image in it"),
    ],
)
def test_errors(refusal, run, tmp_path, monkeypatch, lines, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.csv").write_text("precious")
    write_table(tmp_path / "few.csv", *lines)
    before = {path.name for path in tmp_path.iterdir()}
    err = refusal("label", run.path, "--labels", "few.csv", *words)
    assert expected in err
    assert {path.name for path in tmp_path.iterdir()} == before
    assert (tmp_path / "old.csv").read_text() == "precious"


def test_a_table_of_a_dataset_names_images_without_their_extension(
    command, refusal, run, photos, tmp_path
):
    """As HAM10000 does. A name that two images share, but for the extension, is refused."""
    folder = shutil.copytree(photos, tmp_path / "photos" / "part one")
    lines = [f"{index},{name[:-4]},{colour_of(name)}" for index, name in enumerate(FEW)]
    table = tmp_path / "metadata.csv"
    table.write_text("\n".join(["lesion_id,image_id,label", *lines]) + "\n")
    words = ("label", run.path, "--labels", table, "--data", folder.parent, "--out")
    code, _, err = command(*words, tmp_path / "all.csv")
    assert code == 0, err
    rows = read_rows(tmp_path / "all.csv")
    given = {row["image"]: row["label"] for row in rows if row["given"] == "yes"}
    assert given == {f"part one/{name}": label for name, label in LABELS.items()}
    shutil.copy(folder / "red-0.png", folder / "red-0.jpg")
    err = refusal(*words, tmp_path / "again.csv")
    assert "1 of 8 names are not images of the data ('red-0')" in err


def test_names_that_a_table_protects_are_found(run, photos, tmp_path):
    """A spreadsheet would take them for formulas, so tables put an apostrophe before them."""
    shutil.copytree(photos, tmp_path / "photos")
    for path in (tmp_path / "photos").iterdir():
        path.rename(path.with_name(f"-{path.name}"))
    few = {f"-{name}": label for name, label in LABELS.items()}
    given = {"data": str(tmp_path / "photos"), "out": tmp_path / "all.csv"}
    first = deepbregman.label(run, few, **given)
    assert "'-red-0.png" in given["out"].read_text()
    again = deepbregman.label(run, given["out"], data=given["data"])
    assert again.given.tolist() == first.given.tolist()


def test_an_accent_may_be_a_letter_of_its_own(command, run, photos, tmp_path):
    """As in names that macOS has packed; a keyboard writes it together with its letter."""
    folder = shutil.copytree(photos, tmp_path / "photos")
    for path in folder.iterdir():
        path.rename(path.with_name(f"Ka\u0308fer-{path.name}"))
    typed = write_table(tmp_path / "few.csv", *FEW)
    for name in FEW:
        typed.write_text(typed.read_text().replace(name, f"K\u00e4fer-{name}"))
    words = ("--data", folder, "--out", tmp_path / "all.csv")
    code, _, err = command("label", run.path, "--labels", typed, *words)
    assert code == 0, err
    lines = (tmp_path / "all.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in lines if ",yes," in line} == {
        f"Ka\u0308fer-{name}" for name in FEW
    }


def test_a_table_that_a_spreadsheet_saved_in_another_code(refusal, run, photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "Südhang")
    table = write_table(tmp_path / "few.csv", *FEW)
    table.write_bytes(table.read_text().replace("red-1.png", "größer.png").encode("cp1252"))
    (folder / "red-1.png").rename(folder / "größer.png")
    err = refusal("label", run.path, "--labels", table, "--data", folder)
    words = "1 of 8 names are not images of the data ('gr��er.png'); the table is not in UTF-8"
    assert f'{words}: in a spreadsheet, save it as "CSV UTF-8"' in err
    table.write_bytes(table.read_bytes().replace(b",red", b",r\xf6tlich"))
    err = refusal("label", run.path, "--labels", table, "--data", folder)
    words = "the label 'r�tlich' is not in UTF-8: in a spreadsheet, save the table as"
    assert f'{words} "CSV UTF-8"' in err


def test_a_table_that_a_spreadsheet_took_for_another_code(command, run, photos, tmp_path):
    """It opens UTF-8 as Windows-1252, and saves each special letter as two signs of UTF-8."""
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "red-1.png").rename(folder / "\u00c1 gr\u00f6\u00dfer.png")  # a byte that 1252 lacks
    garbled = "\u00c3\u0081 gr\u00c3\u00b6\u00c3\u0178er.png"
    table = write_table(tmp_path / "few.csv", *FEW)
    table.write_text(table.read_text().replace("red-1.png", garbled))
    words = ("--labels", table, "--data", folder, "--out", tmp_path / "all.csv")
    code, _, err = command("label", run.path, *words)
    assert code == 0, err
    given = {row["image"] for row in read_rows(tmp_path / "all.csv") if row["given"] == "yes"}
    assert given == {*FEW, "\u00c1 gr\u00f6\u00dfer.png"} - {"red-1.png"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["image,label;", "red-1.png,;red"], "the table has both , and ; between columns"),
        (["image,label;", '"red-1.png,red";'], "the table has both , and ; between columns"),
        (
            ["PK\x03\x04 an Excel file"],
            'it is no CSV file; in a spreadsheet, save it as "CSV UTF-8"',
        ),
    ],
)
def test_what_another_spreadsheet_saves(refusal, run, tmp_path, lines, words):
    table = tmp_path / "few.csv"
    table.write_text("\n".join(lines))
    assert words in refusal("label", run.path, "--labels", table)


def test_labels_of_images_that_are_gone_or_damaged(refusal, run, photos, tmp_path):
    """As after the duplicates were deleted."""
    folder = shutil.copytree(photos, tmp_path / "photos")
    table = write_table(tmp_path / "few.csv", *FEW, "red-99.png")
    words = ("label", run.path, "--labels", table, "--data", folder, "--skip-unreadable")
    for _ in ("gone", "damaged"):
        err = refusal(*words)
        assert "1 of 9 names are not images of the data ('red-99.png')" in err
        assert "delete the lines of images that are gone or cannot be read" in err
        (folder / "red-99.png").touch()
    write_table(table, *(f"no-{name}" for name in FEW))
    table.write_text(table.read_text().replace("1.png,no", "1.png,yes"))
    err = refusal(*words)
    assert "8 of 8 names" in err
    assert "delete" not in err


def test_pictures_are_not_written_among_the_images(
    output, refusal, short_config, photos, monkeypatch
):
    """They would be images of the next command, and sub-folders beside them no classes."""
    monkeypatch.chdir(photos.parent)
    shutil.copytree(photos, "some")
    monkeypatch.chdir("some")
    config = override(
        short_config, {"training.epochs": 0, "data.image_size": 8, "data.source": "."}
    )
    run = pretrain(config, run="runs/mine").path
    assert suggest_next(Run.open(run))[-1].endswith(" --out few.csv --sheet ../few.png")
    before = sorted(Path().rglob("*.png"))
    write_table(Path("few.csv"), *FEW)
    for words in (
        ["label", run, "--out", "first.csv", "--sheet", "a.png"],
        ["label", run, "--labels", "few.csv", "--sheet", "runs/a.png"],
        ["duplicates", run, "--sheet", "a.png"],
        ["search", run, "--query", "red-1.png", "--out", "a.png"],
        ["cluster", run, "--out", "clusters.csv"],
        ["report", run, "--out", "report"],
    ):
        err = refusal(*words)
        assert "pictures in . count as images of the data; name a place outside" in err
    assert sorted(Path().rglob("*.png")) == before
    for words in (
        ["label", run, "--out", "first.csv", "--sheet", "../a.png"],
        ["duplicates", run, "--out", "copies.csv"],
    ):
        output(*words)


def test_a_run_without_a_checkpoint_yet(refusal, run, tmp_path):
    """It may have finished many short epochs in its first minute."""
    folder = shutil.copytree(run.path, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    err = refusal("label", folder, "--out", tmp_path / "few.csv")
    words = "a run writes its first checkpoint at the end of an epoch, once a minute has passed"
    assert words in err
    assert not (tmp_path / "few.csv").exists()


def test_more_errors(run, photos):
    with pytest.raises(UserError, match=r"'red-1.png' is 'blue' and 'red'"):
        deepbregman.label(run, {**LABELS, str(photos / "red-1.png"): "blue"})
    everything = {path.name: colour_of(path.name) for path in photos.iterdir()}
    with pytest.raises(UserError, match=r"all 30 images .* have labels.*other photos .*--data"):
        deepbregman.label(run, everything)
    with pytest.raises(UserError, match="'devergence' is not one of"):
        deepbregman.label(run, LABELS, by=["devergence"])
