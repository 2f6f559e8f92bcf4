"""The protocols by which a run is judged: the registry, and the one function that runs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import nn

from deepbregman.data import Source
from deepbregman.errors import UserError, nearest
from deepbregman.runs import Record, Run
from deepbregman.training.processes import pick_device

from . import finetuned_protocols, frozen_protocols
from .detection import protocol as detection_protocol
from .detection.options import Detect
from .job import Job
from .options import Options, Semi, Tuning
from .rows import keep, stamped


@dataclass(frozen=True)
class Protocol:
    """A way to judge a run."""

    judge: Callable[[Job], list[Record]]
    """Returns rows as ``rows.rows_of`` makes them."""
    check: Callable[[Job], None]
    """Raises a UserError for options and data that the protocol cannot work with."""


PROTOCOLS = {
    "knn": Protocol(frozen_protocols.knn, frozen_protocols.check_knn),
    "linear": Protocol(frozen_protocols.linear, frozen_protocols.check_linear),
    "semi": Protocol(finetuned_protocols.semi, finetuned_protocols.check_semi),
    "transfer": Protocol(finetuned_protocols.transfer, finetuned_protocols.check_transfer),
    "detect": Protocol(detection_protocol.detect, detection_protocol.check_detect),
    "supervised": Protocol(finetuned_protocols.supervised, finetuned_protocols.check_supervised),
}
DEFAULT = ("knn", "linear")
FROZEN = frozenset(("knn", "linear"))
"""Those that can judge features averaged over crops, or of images of another size."""


def evaluate(
    run: Run | Path | str,
    *,
    protocols: Sequence[str] = DEFAULT,
    data: str | None = None,
    source: Source | None = None,
    encoder: nn.Module | None = None,
    epochs: int | None = None,
    seed: int = 0,
    seeds: int = 1,
    crops: int = 0,
    image_size: int = 0,
    balanced: bool = False,
    semi: Semi | None = None,
    tuning: Tuning | None = None,
    detect: Detect | None = None,
    skip_unreadable: bool = False,
    accelerator: str = "auto",
    console: Console | None = None,
) -> list[Record]:
    """Judge a run by protocols, and write their rows into the run's result.

    Whatever can be checked is checked before the first protocol begins. The rows of a protocol are
    written when it ends, so that what a long evaluation has finished stays if it is stopped; one
    that fails or is stopped leaves no rows, but what ``semi``, ``transfer``, ``supervised`` and
    ``detect`` have trained to the end is not trained again when the same is asked. The run's
    networks are never changed: what is trained is a copy.

    Args:
        run: a run, or its folder.
        protocols: out of ``knn``, ``linear``, ``semi``, ``transfer``, ``detect``, ``supervised``.
        data: a labelled source; the run's own when None.
        source: the same, already open, in which case ``data`` only names it.
        encoder: a module of the same structure, for a run whose encoder was your own.
        epochs: of whatever is trained; each protocol's own when None. 0 leaves the linear
            classifier on crops out.
        seed: of splits, subsets, order, crops and first weights.
        seeds: how many, from ``seed`` on; a row is the mean over them.
        crops: 2 or more also give ``knn`` by cosine and ``linear`` on cached features the mean of
            the features of so many random crops and flips of each image, training and test images
            alike; rows of their own. 0 leaves them out.
        image_size: side, in pixels, at which ``knn`` and ``linear`` see images; the run's
            ``data.image_size`` when 0. Rows of another size are rows of their own.
        balanced: also measure the mean over classes; imbalanced sources always do.
        semi: which labels ``semi`` may see.
        tuning: how ``semi``, ``transfer`` and ``supervised`` train.
        detect: how ``detect`` trains; its data is a VOCdevkit.
        skip_unreadable: go on without images that cannot be read.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        console: for progress; quiet when None.

    Returns:
        The rows, in the schema of ``deepbregman.evaluation.rows``.
    """
    if not protocols:
        raise UserError(f"no protocol was named: choose from {', '.join(PROTOCOLS)}")
    for name in protocols:
        if name not in PROTOCOLS:
            known = ", ".join(PROTOCOLS)
            raise UserError(f"protocol {name!r} is not one of {known}{nearest(name, PROTOCOLS)}")
    options = Options(
        data=None if data is None else str(data),
        epochs=epochs,
        seed=seed,
        seeds=seeds,
        crops=crops,
        image_size=image_size,
        balanced=balanced,
        skip_unreadable=skip_unreadable,
        semi=semi or Semi(),
        tuning=tuning or Tuning(),
        detect=detect or Detect(),
    )
    run = run if isinstance(run, Run) else Run.open(Path(run))
    quiet = console or Console(quiet=True)
    job = Job(run, options, pick_device(accelerator), quiet, source, encoder)
    names = list(dict.fromkeys(protocols))
    if "detect" in names and len(names) > 1:
        others = ", ".join(name for name in names if name != "detect")
        raise UserError(
            f"protocols detect and {others}: detect takes boxes of Pascal VOC as --data and the "
            "others images of classes; give two commands"
        )
    if image_size and not FROZEN.issuperset(names):
        raise UserError(
            f"image_size is {image_size}, but only knn and linear judge at another size and the "
            f"protocols are {', '.join(names)}: name those two at most, or leave --image-size out"
        )
    if crops and not FROZEN.intersection(names):
        raise UserError(
            f"crops is {crops}, but only knn and linear average over crops and the protocols are "
            f"{', '.join(names)}: name one of the two, or leave --crops out"
        )
    for name in names:
        PROTOCOLS[name].check(job)
    _ = job.trained, run.result()  # damaged files are better found now than after hours
    finished: list[Record] = []
    for name in names:
        rows = _stamped(PROTOCOLS[name].judge(job), name, job)
        keep(run, rows)
        job.arms.forget()
        finished += rows
        words = f"{name}: done, kept in {run.path / 'result.json'}"
        job.console.print(words, soft_wrap=True, highlight=False, markup=False)
    return finished


def _stamped(rows: Sequence[Record], protocol: str, job: Job) -> list[Record]:
    _, config, epoch = job.trained
    if config.data.image_size != job.run.config.data.image_size:
        size = config.data.image_size
        rows = [
            {
                **row,
                "variant": f"{row['variant']}, {size} px",
                "details": {**row["details"], "image_size": size},
            }
            for row in rows
        ]
    return stamped(
        rows,
        protocol=protocol,
        data=job.options.data or config.data.source,
        seed=job.options.seed,
        epoch=epoch,
        config=config,
        device=job.device,
    )
