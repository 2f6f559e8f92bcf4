"""deepbregman label: labels for all images from labels for a few."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import tyro
from rich.console import Console

from deepbregman.errors import UserError
from deepbregman.reporting.screen import label_tables
from deepbregman.runs import Run, check_new_file
from deepbregman.terminal import ReportProgress, say

from .parameters import Accelerator, PythonOnly, RunFolder, check_data

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.evaluation.labelling import Labelling

    Labels: TypeAlias = Mapping[str, str] | Path | str
else:
    Labels = Path


def label(
    run: Annotated[RunFolder, tyro.conf.Positional],
    labels: Labels,
    *,
    data: str | None = None,
    by: Sequence[Literal["knn", "linear", "divergence"]] = (),
    suggest: int = 20,
    out: Path | None = None,
    sheet: Path | None = None,
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    encoder: PythonOnly["nn.Module | None"] = None,
    progress: PythonOnly[ReportProgress | None] = None,
) -> "Labelling":
    """Label all images from labels for a few, and say how often that is right.

    Classifiers compete by cross-validation on the labelled images. The best one labels the others,
    with probabilities. The expected accuracy is true of images like the labelled ones: label
    images at random first.

    Args:
        run: Folder of the run.
        labels: CSV file with the columns image and label, or a folder with a sub-folder for each
            class; at least 2 images of each class. In Python also the label by image.
        data: A data set in place of the run's own.
        by: knn: nearest labelled images by cosine. linear: a classifier of features. divergence:
            the nearest class by D(image || class). All that the run has when not given.
        suggest: How many images to list that are most useful to label next.
        out: CSV file for the label and the probabilities of each image; must not exist.
        sheet: PNG file with the images to label next; must not exist.
        seed: Of the cross-validation.
        skip_unreadable: Go on without images that cannot be read.
        accelerator: Where to compute; auto takes a GPU if there is one.
        encoder: A module of the same structure, for a run whose encoder was your own.
        progress: Called while the work goes on.
    """
    for path, suffix in ((out, ".csv"), (sheet, ".png")):
        if path is not None:
            check_new_file(Path(path), suffix)
    if suggest < 0:
        raise UserError(f"suggest is {suggest}: it must be 0 or more")
    opened = run if isinstance(run, Run) else Run.open(Path(run))
    check_data(opened.config, data)
    from deepbregman.data.labels import read_labels

    given = read_labels(labels)
    from deepbregman.evaluation.gallery import open_run
    from deepbregman.evaluation.inputs import load_run
    from deepbregman.evaluation.labelling import label_images

    loaded = load_run(opened, accelerator, encoder, skip_unreadable=skip_unreadable)
    found = label_images(
        open_run(loaded, data, records=False),
        given,
        kinds=by,
        suggest=suggest,
        with_pixels=sheet is not None,
        out=None if out is None else Path(out),
        seed=seed,
        progress=progress,
    )
    if sheet is None or not found.suggestions:
        return found
    write_sheet(Path(sheet), found)
    return replace(found, sheet=Path(sheet))


def show(found: "Labelling", console: Console) -> None:
    """Print the classifiers, the expected accuracy, the labels and what to label next."""
    judged = [(one.classifier.title, one.accuracy, one.log_loss) for one in found.judged]
    pairs = zip(found.labels, found.given.tolist(), strict=True)
    counts = Counter(pairs)
    classes = [(name, counts[name, True], counts[name, False]) for name in found.classes]
    for table in label_tables(judged, classes):
        console.print(table)
    expected = found.expected
    say(
        console,
        f"expected accuracy: {expected.value:.1f} % (95 % interval {expected.low:.1f} to "
        f"{expected.high:.1f}), from {found.num_examples} labelled images; it is true of the other "
        "images if those were chosen at random",
    )
    if found.measured is not None:
        value, count = found.measured
        say(console, f"by the data's own labels: {value:.1f} % of the other {count:,} images")
    if found.suggestions:
        say(console, "most useful to label next:")
        for one in found.suggestions:
            say(console, f"  {one.name}  ({one.guess}? {100 * one.probability:.0f} %)")
    if found.table is not None:
        say(console, f"labels: {found.table}")
    if found.sheet is not None:
        say(console, f"sheet: {found.sheet}")


def write_sheet(path: Path, found: "Labelling") -> None:
    """Draw the images that are most useful to label next."""
    from deepbregman.reporting.sheets import Panel, Strip, Tile, contact_sheet

    tiles = []
    for rank, one in enumerate(found.suggestions, start=1):
        assert one.pixels is not None
        probability = f"{100 * one.probability:.0f} %"
        tiles.append(Tile(one.pixels, str(rank), probability, (f"{one.guess}?", one.name)))
    contact_sheet(path, [Panel(None, (Strip("label next, the most useful first", tuple(tiles)),))])
