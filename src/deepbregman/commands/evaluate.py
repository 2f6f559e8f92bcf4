"""deepbregman evaluate: how good a run's encoder is."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from deepbregman.evaluation.options import Detect, Options, ProtocolName, Semi, Tuning
from deepbregman.reporting.screen import evaluation_table
from deepbregman.runs import Record, Run
from deepbregman.terminal import ReportProgress, ignore_progress, say

from .parameters import Accelerator, PythonOnly, RunFolder, check_data

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.data import Source


def evaluate(
    run: Annotated[RunFolder, tyro.conf.Positional],
    *,
    protocols: Annotated[Sequence[ProtocolName], tyro.conf.arg(name="protocol")] = (
        "knn",
        "linear",
    ),
    data: str | None = None,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    epochs: int | None = None,
    seed: int = 0,
    seeds: int = 1,
    crops: int = 0,
    image_size: int = 0,
    balanced: bool = False,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    semi: tyro.conf.OmitArgPrefixes[Semi] = Semi(),  # noqa: B008  # frozen
    tuning: tyro.conf.OmitArgPrefixes[Tuning] = Tuning(),  # noqa: B008  # frozen
    detect: Detect = Detect(),  # noqa: B008  # frozen
    console: PythonOnly[Console | None] = None,
    progress: PythonOnly[ReportProgress | None] = None,
) -> list[Record]:
    """Judge a run: kNN, linear, few labels, another data set, detection, from scratch.

    The rows of a protocol go into RUN/result.json when it ends. A stopped evaluation is continued
    by the same command. The run's networks are never changed: what is trained is a copy.

    Args:
        run: Folder of the run.
        protocols: knn: neighbours by cosine and by the learned divergence. linear: a classifier
            on frozen features, cached and of random crops. semi: all weights fine-tuned on a
            part of the labels. transfer: linear and fine-tuned on another data set. detect:
            Faster R-CNN around the encoder on Pascal VOC. supervised: the same architecture
            trained from random weights on all labels, for reference.
        data: A labelled data set in place of the run's own; transfer needs one. Its images are
            resized to the size of the run's. For detect the folder VOCdevkit, or
            voc, as `deepbregman data prepare voc` leaves it.
        source: The same, already open, in which case data only names it.
        encoder: A module of the same structure, for a run whose encoder was your own.
        epochs: Of whatever is trained; by default 50, and in semi 60 below a twentieth of the
            labels and 30 above. 0 leaves the linear classifier on random crops out.
        seed: Of splits, subsets, order, crops and first weights.
        seeds: Run so many seeds, from --seed on, and report their mean and deviation.
        crops: Of knn by cosine and linear on cached features only: also judge features averaged
            over so many random crops and flips of each image, training and test images alike,
            drawn as in pretraining but without colour, anew for each seed; 0 for none.
        image_size: Of knn and linear only: side in pixels at which images are judged, as
            rows of their own; 0 for the run's data.image_size. Crops enlarge things, so an
            encoder trained on views as large as the images may do better on larger ones.
        balanced: Also report the mean over classes; imbalanced data sets always do.
        skip_unreadable: Go on without images that cannot be read.
        accelerator: Where to compute; auto takes a GPU if there is one.
        semi: Which labels semi may see.
        tuning: How semi, transfer and supervised train.
        detect: How detect trains.
        console: For messages; quiet when None.
        progress: Called while the work goes on.

    Returns:
        The rows, in the schema of deepbregman.evaluation.results.
    """
    options = Options(
        protocols=tuple(protocols),
        data=None if data is None else str(data),
        epochs=epochs,
        seed=seed,
        seeds=seeds,
        crops=crops,
        image_size=image_size,
        balanced=balanced,
        skip_unreadable=skip_unreadable,
        semi=semi,
        tuning=tuning,
        detect=detect,
    )
    opened = run if isinstance(run, Run) else Run.open(Path(run))
    if source is None and set(protocols) != {"detect"}:  # which has a layout of its own
        check_data(opened.config, None if "detect" in protocols else data)
    from deepbregman.evaluation.inputs import Evaluation
    from deepbregman.evaluation.protocols import run_protocols

    evaluation = Evaluation(
        opened,
        options,
        accelerator,
        source,
        encoder,
        console or Console(quiet=True),
        progress or ignore_progress,
    )
    return run_protocols(evaluation)


def show(rows: list[Record], console: Console) -> None:
    """Print the rows as a table, and what a reader should know about them."""
    console.print(evaluation_table(rows, f"on {rows[0]['data']}"))
    replaced = max(row["num_replaced"] for row in rows)
    if replaced:
        say(
            console,
            f"warning: {replaced} unreadable images were replaced by others in training or "
            "judging; remove them for exact numbers",
        )
    if rows[0]["epoch"] < rows[0]["epochs"]:
        words = f"after {rows[0]['epoch']:g} of {rows[0]['epochs']} epochs"
        say(console, f"warning: this run is not finished; it was judged {words}")
