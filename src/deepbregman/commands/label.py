"""deepbregman label: labels for all images from labels for a few."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import tyro
from rich.console import Console

from deepbregman.errors import UserError, notify, require_seed, require_whole
from deepbregman.reporting.screen import draw_rows
from deepbregman.runs import Run, check_new_file, choose_free_name, is_complete
from deepbregman.terminal import MaybePath, MaybeText, count_words, ignore_progress, join_words, say

from .parameters import (
    Accelerator,
    Devices,
    PythonOnly,
    Reporter,
    RunFolder,
    check_picture,
    find_names_in_run,
    find_unknown_names,
    list_images,
    open_images,
)
from .pretrain_options import suggest_more_epochs

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.data import Source
    from deepbregman.evaluation.labelling import Labelling
    from deepbregman.evaluation.predicting import ExpectedAccuracy
    from deepbregman.evaluation.search_index import Image

    Labels: TypeAlias = Mapping[str, str] | Path | str
else:
    Labels = Path


FIRST_IMAGES = 50
"""Images that are drawn to be labelled first."""
UNEVEN_RATIO = 2
"""Where the largest class has over this many times the labels of the smallest, the mean accuracy
over the classes is printed as well."""
WIDE_INTERVAL = 25.0
"""Percentage points; of a wider interval the user is told how to narrow it."""
LOW_ACCURACY = 90.0
"""Per cent; where less is expected, and training was short, the user is told so."""


def label(
    run: Annotated[RunFolder, tyro.conf.Positional],
    labels: Annotated[Labels | None, tyro.conf.arg(metavar="PATH")] = None,
    *,
    data: MaybeText = None,
    by: Sequence[Literal["knn", "linear", "divergence", "bank"]] = (),
    balanced: bool = False,
    suggest: int = 20,
    out: MaybePath = None,
    sheet: MaybePath = None,
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    progress: Reporter = None,
) -> "Labelling":
    """Label all images, given labels for a few, and estimate the accuracy.

    Several classifiers are compared by cross-validation on the labelled images. The best one labels
    the other images, with probabilities. The estimated accuracy holds for images like the labelled
    ones, so choose the first images to label at random: without --labels, the command line picks
    them and writes a table to fill in (in Python: draw_first_images).

    Args:
        run: Folder of a run, as `deepbregman pretrain` writes it.
        labels: CSV file with the columns image and label, or a folder with a sub-folder for each
            class; at least two classes need 2 images or more. In Python also a mapping from image
            to label. Without labels, the command line picks images to label.
        data: Other images to label, such as a folder of new photos, instead of the run's own. The
            labels may be of these images, of the run's, or of both.
        by: knn: nearest labelled images by cosine. linear: a classifier of features. divergence:
            the nearest class by D(image || class), where the run has a divergence. bank: the
            nearest class by the divergence over a bank of the images. By default all.
        balanced: Let every class count the same, so that rare classes are found: in the linear
            classifier, and in the accuracy by which a classifier is chosen.
        suggest: Number of images to list that are most useful to label next. Without labels, the
            number of random images that the command line picks, by default 50.
        out: CSV file for the label and the probabilities of each image; it must not exist.
        sheet: PNG file with the images to label next; it must not exist.
        seed: Seed of the cross-validation.
        skip_unreadable: Leave out images that cannot be read, instead of stopping.
        accelerator: Device to compute on; auto takes a GPU if there is one.
        devices: Number of GPUs that compute features together, or all.
        source: Images of your program, by :func:`own_data`, instead of a dataset.
        encoder: If the run trained an encoder of your own: a module of the same structure.
        progress: Called during the work.
    """
    if labels is None:
        raise UserError(
            "label needs labels for a few images, as --labels few.csv; to begin, `deepbregman "
            "label RUN --out few.csv --sheet few.png`, in Python draw_first_images, draws images "
            "at random to label"
        )
    check_new_file(out, ".csv")
    check_new_file(sheet, ".png", "sheet")
    suggest, seed = require_whole("suggest", suggest, 0), require_seed(seed)
    check_picture(run, data, source, sheet, "sheet")
    from deepbregman.data.labels import read_labels, refuse_names

    given = read_labels(labels)
    opened = Run.open(run)
    if data is not None and source is None:
        in_run = find_names_in_run(
            opened.config, data, {each.image for each in given if not each.is_file}
        )
        given = [
            each._replace(image=str(in_run[each.image]), is_file=True)
            if not each.is_file and each.image in in_run
            else each
            for each in given
        ]
    listing = None if source is not None else list_images(opened.config, data)
    if listing is not None:
        named = (each.image for each in given if not each.is_file)
        unknown = find_unknown_names(named, listing)
        if unknown:
            example = listing.train.paths[0].relative_to(listing.folder).as_posix()
            own = opened.config.data.source if data else None
            raise refuse_names(unknown, len(given), example, own)
    images = open_images(
        opened, data, source, accelerator, devices, encoder, skip_unreadable, listing
    )
    from deepbregman.evaluation.labelling import label_images

    found = label_images(
        images,
        given,
        kinds=by,
        balanced=balanced,
        suggest=suggest,
        out=None if out is None else Path(out),
        seed=seed,
        progress=progress or ignore_progress,
    )
    if sheet is None:
        return found
    if not found.suggestions:
        notify(f"{sheet} is not written: there are no images to label next")
        return found
    write_sheet(Path(sheet), found)
    return replace(found, sheet=Path(sheet))


class FirstImages(NamedTuple):
    """Images to label first, drawn at random, and the table to fill in."""

    names: tuple[str, ...]
    table: Path
    sheet: Path | None
    run: Path
    data: str | None
    """The dataset, if it is not the run's own."""


def draw_first_images(
    run: Annotated[RunFolder, tyro.conf.Positional],
    *,
    out: Path,
    sheet: MaybePath = None,
    suggest: int = FIRST_IMAGES,
    data: MaybeText = None,
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
) -> FirstImages:
    """Draw images at random to label first, and write a table to fill in.

    Args:
        run: Folder of the run.
        out: CSV file for the names of the images; it must not exist.
        sheet: PNG file with the images; it must not exist.
        suggest: Number of images to draw.
        data: A dataset instead of the run's own.
        seed: Seed of the draw.
        skip_unreadable: Leave out images that cannot be read, instead of stopping.
        accelerator: Device to compute on; auto takes a GPU if there is one.
        devices: Number of devices, as for the next step; drawing needs none.
        source: Images of your program, by :func:`own_data`, instead of a dataset.
        encoder: If the run trained an encoder of your own: a module of the same structure.
    """
    check_new_file(out, ".csv")
    check_new_file(sheet, ".png", "sheet")
    suggest, seed = require_whole("suggest", suggest, 1), require_seed(seed)
    check_picture(run, data, source, sheet, "sheet")
    images = open_images(run, data, source, accelerator, devices, encoder, skip_unreadable)
    from deepbregman.evaluation.labelling import draw_images
    from deepbregman.files import create_csv

    out, sheet = Path(out), None if sheet is None else Path(sheet)
    drawn = draw_images(images, suggest, seed)
    create_csv(out, [{"image": image.name, "label": ""} for image in drawn])
    if sheet is not None:
        words = [("", image.name) for image in drawn]
        _write_images(sheet, f"label these first, in the order of {out.name}", drawn, words)
    names = tuple(image.name for image in drawn)
    return FirstImages(names, out, sheet, images.loaded.run.path, images.other_data)


def show_draw_first_images(found: FirstImages, console: Console) -> None:
    """Say what to do with the table."""
    images = count_words(len(found.names), "image")
    say(console, f"wrote {found.table}: {images} to label first, drawn at random")
    if found.sheet is not None:
        say(console, f"sheet: {found.sheet}")
    page = choose_free_name(found.table.with_suffix(".html").name)
    browser = _write_command("explore", found, "--labels", found.table, "--out", page)
    say(console, f"write a label beside each name; to label in a browser instead: {browser}")
    every = choose_free_name("all.csv")
    again = _write_command("label", found, "--labels", found.table, "--out", every)
    say(console, f"next: {again}")


def _write_command(name: str, found: "FirstImages | Labelling", *words: str | Path) -> str:
    """Return a command that looks at the same images."""
    data = [] if found.data is None else ["--data", found.data]
    return shlex.join(map(str, ["deepbregman", name, found.run, *data, *words]))


def choose(words: list[str]) -> tuple[Callable[..., Any], str, list[str]]:
    """Choose the function for a command line: without labels, draw the first images to label."""
    options = {word.partition("=")[0] for word in words}
    program = "deepbregman label"
    of_label = {"--labels", "--by", "--balanced", "-h", "--help"}
    if "--out" not in options or options & of_label:
        return label, program, words
    return draw_first_images, program, words


def show(found: "Labelling", console: Console) -> None:
    """Print the classifiers, the labels, the expected accuracy and what to do next."""
    sizes = [size for size in found.class_sizes if size > 1]
    is_uneven = max(sizes) > UNEVEN_RATIO * min(sizes)
    _show_tables(found, is_uneven, console)
    for words in _find_surprises(found):
        say(console, f"warning: {words}", "yellow")
    _show_accuracy(found, is_uneven, console)
    _show_next_steps(found, console)


def _show_tables(found: "Labelling", is_uneven: bool, console: Console) -> None:
    """Print a table of the classifiers, and one of the classes."""

    def write(title: str, accuracy: float, balanced: float, loss: str) -> tuple[str, ...]:
        return (title, f"{accuracy:.1f}", *[f"{balanced:.1f}"] * is_uneven, loss)

    rows = [
        write(j.classifier.title, j.accuracy, j.balanced, f"{j.log_loss:.3f}")
        for j in (*found.judged, found.guess)
    ]
    for row, words in ((0, "(chosen)"), (-1, "for all, to compare")):
        rows[row] = (f"{rows[row][0]} {words}", *rows[row][1:])
    columns = ("classifier", "accuracy %", *["mean over classes %"] * is_uneven, "log loss")
    console.print(draw_rows("cross-validation", columns, rows))
    counts = Counter(zip(found.labels, found.given.tolist(), strict=True))
    known = zip(found.classes, found.class_sizes, found.class_accuracies, strict=True)
    rows = [
        (name, f"{size:,}", "-" if right is None else f"{right:.0f}", f"{counts[name, False]:,}")
        for name, size, right in known
    ]
    columns = ("class", "given", "of them found %", "predicted")
    console.print(draw_rows("labels", columns, rows))


def _show_accuracy(found: "Labelling", is_uneven: bool, console: Console) -> None:
    """Print the expected accuracy, for what it holds, and how to raise it."""
    suggested = found.num_suggested
    drawn = found.num_examples - suggested
    images = count_words(drawn or suggested, "labelled image")
    if drawn and suggested:
        images += f" ({suggested} more are not a random choice: they teach, but do not count here)"
    holds = "the other images if the labelled ones were chosen at random"
    if found.has_outside:
        holds = "images like the labelled ones"
    accuracy = _describe(found.expected)
    say(console, f"expected accuracy: {accuracy}, from {images}; it holds for {holds}")
    if is_uneven:
        which = " that can be judged" * (1 in found.class_sizes or bool(drawn and suggested))
        say(console, f"as the mean over the classes{which}: {_describe(found.expected_balanced)}")
    if found.measured is not None:
        value, count = found.measured
        say(console, f"by the data's own labels: {value:.1f} % of the other {count:,} are right")
    if found.expected.high - found.expected.low > WIDE_INTERVAL:
        words = "with 4 times as many labels, drawn at random, it is about half as wide"
        say(console, f"the interval is wide; {words}")
    trained = Run.open(found.run)
    short = suggest_more_epochs(trained, trained.config) if is_complete(trained) else ""
    if found.expected.value < LOW_ACCURACY and short:
        say(console, f"training was short: {short}")
    is_lower = found.expected_balanced.value < found.expected.value
    if is_uneven and is_lower and not found.is_balanced:
        words = "if rare classes matter as much as common ones, add --balanced"
        say(console, f"{words}; in all, more labels are then usually wrong")


def _show_next_steps(found: "Labelling", console: Console) -> None:
    """Print which images to label next, what was written, and the next commands."""
    if found.suggestions:
        say(console, "most useful to label next:")
        for one in found.suggestions:
            name = _name_with_folder(one.name, found)
            say(console, f"  {name}  ({one.guess}? {100 * one.probability:.0f} %)")
    if found.table is not None:
        say(console, f"labels: {found.table}")
    if found.sheet is not None:
        say(console, f"sheet: {found.sheet}")
    if found.table is not None and found.suggestions and found.has_outside:
        words = "add them and their labels to what --labels names"
        say(console, f"to improve the labels: {words}; then repeat this command with another --out")
    elif found.table is not None and found.suggestions:
        words = "label them on the page that the next command writes, and save labels.csv there"
        words += "; then repeat this command with that file and another --out"
        say(console, f"to improve the labels: {words}")
    if found.table is not None:
        out = choose_free_name("labelled.html")
        page = _write_command("explore", found, "--labels", found.table, "--out", out)
        say(console, f"next: {page}")


def _name_with_folder(name: str, found: "Labelling") -> str:
    """Write the folder before the name of an image if the run's own folder has such a name, too."""
    if found.data is None or not (Path(found.data) / name).is_file():
        return name
    own = Path(Run.open(found.run).config.data.source).expanduser()
    return str(Path(found.data) / name) if (own / name).is_file() else name


def _find_surprises(found: "Labelling") -> Iterator[str]:
    """Yield warnings about labels that are of little use."""
    pairs = zip(found.classes, found.class_sizes, strict=True)
    if single := [name for name, size in pairs if size == 1]:
        yield (
            f"only one image has the label {' or '.join(single)}, so the accuracy of such a class "
            "cannot be estimated, and it counts as wrong; label a second image: "
            f"`{_write_command('search', found, '--query', 'IMAGE')}` finds those like the first"
        )
    predicted = {
        label for label, given in zip(found.labels, found.given.tolist(), strict=True) if not given
    }
    others = "" if found.is_balanced else "add --balanced, or "
    chosen, guess = found.judged[0], found.guess
    reached, expected, guessed = (
        (chosen.balanced, found.expected_balanced, guess.balanced)
        if found.is_balanced
        else (chosen.accuracy, found.expected, guess.accuracy)
    )
    reached = min(reached, expected.value)  # the best of several looks better than it is
    if len(predicted) == 1 and found.data is None:  # new photos may all be of one class
        yield (
            f"all other images get the label {predicted.pop()}: the classifier finds no other "
            f"class; {others}label more images of the others"
        )
    elif reached <= guessed + 1e-6:
        mean = ", as the mean over the classes" * found.is_balanced
        yield (
            f"the classifier is right in {reached:.1f} % of the cases{mean}, no more often than "
            f"the most frequent label for all ({guessed:.1f} %), so do not trust the labels yet; "
            "label more images, or train longer"
        )
    folded = Counter(name.casefold() for name in found.classes)
    for word in sorted(word for word, count in folded.items() if count > 1):
        same = [repr(name) for name in found.classes if name.casefold() == word]
        yield (
            f"the labels {join_words(same)} differ in case alone, and count as different "
            "classes; if they mean the same, write them alike"
        )


def _describe(expected: "ExpectedAccuracy") -> str:
    return f"{expected.value:.1f} % (95 % interval {expected.low:.1f} to {expected.high:.1f})"


def write_sheet(path: Path, found: "Labelling") -> None:
    """Draw the images that are most useful to label next."""
    words = [
        (f"{100 * one.probability:.0f} %", f"{one.guess}?", one.name) for one in found.suggestions
    ]
    _write_images(path, "label next, the most useful first", found.suggestions, words)


def _write_images(
    path: Path, title: str, images: "Sequence[Image]", words: Sequence[tuple[str, ...]]
) -> None:
    """Draw images, numbered; the first word stands beside the number, the others below."""
    from deepbregman.reporting.sheets import Panel, Strip, Tile, write_contact_sheet

    tiles = [
        Tile(image.pixels, str(place), value, tuple(lines))
        for place, (image, (value, *lines)) in enumerate(zip(images, words, strict=True), start=1)
    ]
    write_contact_sheet(path, [Panel(None, (Strip(title, tuple(tiles)),))])
