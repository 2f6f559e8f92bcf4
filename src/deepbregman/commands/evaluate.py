"""deepbregman evaluate: measure how good the encoder of a run is."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from deepbregman.data.datasets import check_labels
from deepbregman.errors import UserError, require_list
from deepbregman.evaluation.options import Detect, Few, Ood, Options, ProtocolName, Semi, Tuning
from deepbregman.reporting.screen import describe_references, draw_evaluation_tables
from deepbregman.runs import Record, Run
from deepbregman.terminal import (
    MaybeNumber,
    MaybeText,
    count_words,
    ignore_progress,
    join_words,
    say,
)

from .parameters import (
    Accelerator,
    Devices,
    PythonOnly,
    Reporter,
    RunFolder,
    check_data_and_source,
    check_dataset,
)

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
    data: MaybeText = None,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    epochs: MaybeNumber = None,
    seed: int = 0,
    seeds: int = 1,
    balanced: bool = False,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    semi: tyro.conf.OmitArgPrefixes[Semi] = Semi(),  # noqa: B008  # frozen
    tuning: tyro.conf.OmitArgPrefixes[Tuning] = Tuning(),  # noqa: B008  # frozen
    detect: Detect = Detect(),  # noqa: B008  # frozen
    few: Few = Few(),  # noqa: B008  # frozen
    ood: Ood = Ood(),  # noqa: B008  # frozen
    console: PythonOnly[Console | None] = None,
    progress: Reporter = None,
) -> list[Record]:
    """Evaluate a run: kNN, linear, few labels, another dataset, detection, retrieval, robustness.

    Results go into RUN/result.json when a protocol ends. The same command continues a stopped
    evaluation. The run's networks are never changed; protocols that train use a copy.

    Args:
        run: Folder of a run, as `deepbregman pretrain` writes it.
        protocols: knn: nearest neighbours by cosine and by the learned divergence. linear: a linear
            classifier on frozen features, of whole images and of random crops. semi: fine-tune all
            weights on a part of the labels. transfer: linear and fine-tuning on another dataset.
            detect: Faster R-CNN around the encoder on Pascal VOC. supervised: train the same
            network from random weights on all labels, for comparison. retrieval: search the
            training images for each test image. cluster: group the test images. few: classify by
            a few labels per class, without training. ood: detect out-of-distribution images.
            corruptions: classify noisy, compressed, blurred and low-contrast test images. The
            last five use the cosine of features and, where the run has one, the learned divergence.
        data: A labelled dataset instead of the run's own; transfer needs one. Images are resized to
            the run's image size. For detect: the folder VOCdevkit, or voc after `deepbregman data
            prepare voc`.
        source: The dataset, already open; then data only names it.
        encoder: If the run trained an encoder of your own: a module of the same structure.
        epochs: Epochs of training. Default: 50; in semi 60 with less than 5 % of the labels, else
            30. With 0, linear leaves out the classifier on random crops.
        seed: First seed, of splits, subsets, order, crops and initial weights.
        seeds: Number of seeds, from --seed on; reports mean and standard deviation.
        balanced: Also report the mean accuracy over classes, and fit a linear classifier in which
            every class counts the same. Always on where the largest class has over ten times the
            images of the smallest.
        skip_unreadable: Leave out images that cannot be read, instead of stopping.
        accelerator: Device to compute on; auto takes a GPU if there is one.
        devices: Number of GPUs that compute features together, or all. The results are the same.
            Training of weights and detect use one GPU.
        semi: Labels that semi uses.
        tuning: How semi, transfer and supervised train.
        detect: How detect trains.
        few: Labels that few uses.
        ood: Images that ood uses.
        console: Where to print; nothing is printed when None.

    Returns:
        The rows, in the schema of deepbregman.evaluation.results.
    """
    require_list("protocols", protocols)
    check_data_and_source(data, source)
    options = Options(
        protocols=tuple(protocols),
        data=None if data is None else str(data),
        epochs=epochs,
        seed=seed,
        seeds=seeds,
        balanced=balanced,
        skip_unreadable=skip_unreadable,
        semi=semi,
        tuning=tuning,
        detect=detect,
        few=few,
        ood=ood,
    )
    _refuse_unused(options)
    opened = Run.open(run)
    listing = None
    if source is None and "detect" not in protocols:  # VOC has its own layout
        check_dataset(opened.config, data, opened.path)
        listing = check_labels(opened.config.data.source if data is None else str(data))
    from deepbregman.evaluation.inputs import Evaluation
    from deepbregman.evaluation.protocols import run_protocols

    evaluation = Evaluation(
        opened,
        options,
        accelerator,
        source,
        encoder,
        listing,
        console=console or Console(quiet=True),
        progress=progress or ignore_progress,
        devices=devices,
    )
    return run_protocols(evaluation)


USED_BY = {
    "semi": ("semi",),
    "tuning": ("semi", "transfer", "supervised"),
    "detect": ("detect",),
    "few": ("few",),
    "ood": ("ood",),
}
"""The protocols that use each group of options."""


def _refuse_unused(options: Options) -> None:
    """Refuse options that no protocol of this evaluation uses: it would not do what was meant."""
    for name, protocols in USED_BY.items():
        if set(protocols) & set(options.protocols):
            continue
        group = getattr(options, name)
        default = type(group)()
        for field in dataclasses.fields(group):
            if getattr(group, field.name) != getattr(default, field.name):
                prefix = "" if name in ("semi", "tuning") else f"{name}."
                raise UserError(
                    f"--{prefix}{field.name.replace('_', '-')} is used by "
                    f"{join_words(protocols)} only, and the protocols here are "
                    f"{join_words(options.protocols)}: add one to --protocol, or leave the "
                    "option out"
                )


def show(rows: list[Record], console: Console) -> None:
    """Print the rows as tables, with warnings."""
    console.print(draw_evaluation_tables(rows, f"on {rows[0]['data']}"))
    if words := describe_references(rows):
        say(console, words)
    if rows[0]["epoch"] < rows[0]["epochs"]:
        words = f"after {rows[0]['epoch']:.4g} of {count_words(rows[0]['epochs'], 'epoch')}"
        say(console, f"warning: this run is not finished; it was evaluated {words}")
