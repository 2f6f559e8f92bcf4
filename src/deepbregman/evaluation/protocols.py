"""The protocols by which a run is judged, and the one schema their results are written in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from deepbregman.config import override
from deepbregman.errors import UserError, nearest
from deepbregman.runs import Record, Run, now
from deepbregman.training.checkpoints import Trained, load_trained
from deepbregman.training.processes import device_name, pick_device

from . import frozen_protocols
from .subject import Subject, open_labelled


@dataclass(frozen=True)
class Job:
    """What a protocol is handed: the run, the options, and what several protocols share."""

    run: Run
    device: torch.device
    data: str | None
    epochs: int
    seed: int
    skip_unreadable: bool

    @cached_property
    def trained(self) -> Trained:
        """The run's networks."""
        trained = load_trained(self.run, self.device)
        if self.skip_unreadable:
            config = override(trained.config, {"data.skip_unreadable": True})
            trained = trained._replace(config=config)
        return trained

    @cached_property
    def subject(self) -> Subject:
        """The networks with the labelled source to judge them by."""
        model, config, _ = self.trained
        return Subject(model, config, open_labelled(config, self.data), self.device)


PROTOCOLS: dict[str, Callable[[Job], list[Record]]] = {
    "knn": lambda job: frozen_protocols.knn(job.subject, job.seed),
    "linear": lambda job: frozen_protocols.linear(job.subject, job.seed, job.epochs),
}


def evaluate(
    run: Run | Path | str,
    *,
    protocols: Sequence[str] = tuple(PROTOCOLS),
    data: str | None = None,
    epochs: int = 50,
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: str = "auto",
) -> list[Record]:
    """Judge a run's encoder, frozen, and write the rows into the run's result.

    Args:
        run: a run, or its folder.
        protocols: ``knn``, ``linear``.
        data: a labelled source; the run's own when None.
        epochs: of the linear classifier with augmentation; 0 leaves it out.
        seed: of splits and of the augmentation.
        skip_unreadable: go on without images that cannot be read.
        accelerator: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        Rows with ``protocol``, ``variant``, ``data``, ``metric``, ``value`` and details, among them
        the ``epoch`` the encoder was saved at, of how many ``epochs``.
    """
    if not protocols:
        raise UserError(f"no protocol was named: choose from {', '.join(PROTOCOLS)}")
    for name in protocols:
        if name not in PROTOCOLS:
            known = ", ".join(PROTOCOLS)
            raise UserError(f"protocol {name!r} is not one of {known}{nearest(name, PROTOCOLS)}")
    if epochs < 0:
        raise UserError(f"epochs is {epochs}: it must be 0 or more")
    run = run if isinstance(run, Run) else Run.open(Path(run))
    job = Job(run, pick_device(accelerator), data, epochs, seed, skip_unreadable)
    rows = []
    for name in protocols:
        for row in PROTOCOLS[name](job):
            rows.append({"protocol": name, "data": data or job.trained.config.data.source, **row})
    for row in rows:
        row |= {
            "epoch": job.trained.epoch,
            "epochs": job.trained.config.training.epochs,
            "num_train": len(job.subject.train.labels),
            "num_test": len(job.subject.test.labels),
            "num_replaced": job.subject.train.num_replaced + job.subject.test.num_replaced,
            "seed": seed,
            "device": device_name(job.device),
            "finished": now(),
        }
    _keep(run, rows)
    return rows


def _keep(run: Run, rows: list[Record]) -> None:
    """Write rows beside those that are there, in place of older ones of the same kind or epoch."""

    def kind(row: Record) -> tuple[str, ...]:
        return row["protocol"], row["variant"], row["data"]

    fresh = {kind(row) for row in rows}
    older = [
        row
        for row in run.result().get("evaluations", [])
        if kind(row) not in fresh and row["epoch"] == rows[0]["epoch"]
    ]
    run.add_result(evaluations=[*older, *rows])
