"""The protocols by which a run is judged: the registry, and the function that runs them."""

from collections.abc import Callable
from typing import NamedTuple

from deepbregman.runs import Record

from .detection.protocol import check_detect, detect
from .finetuning import (
    check_semi,
    check_supervised,
    check_transfer,
    semi,
    supervised,
    transfer,
)
from .inputs import Evaluation
from .knn import check_knn, knn
from .linear import check_linear, linear


class Protocol(NamedTuple):
    """A way to judge a run."""

    judge: Callable[[Evaluation], list[Record]]
    """Returns rows as ``results.make_rows`` makes them."""
    check: Callable[[Evaluation], None]
    """Raises a UserError for options and data that the protocol cannot work with."""


PROTOCOLS = {
    "knn": Protocol(knn, check_knn),
    "linear": Protocol(linear, check_linear),
    "semi": Protocol(semi, check_semi),
    "transfer": Protocol(transfer, check_transfer),
    "detect": Protocol(detect, check_detect),
    "supervised": Protocol(supervised, check_supervised),
}


def run_protocols(evaluation: Evaluation) -> list[Record]:
    """Judge a run by the protocols of its options, and write their rows into the run's result.

    Whatever can be checked is checked before the first protocol begins. The rows of a protocol are
    written when it ends, so that what a long evaluation has finished stays if it is stopped; one
    that fails or is stopped leaves no rows, but what ``semi``, ``transfer``, ``supervised`` and
    ``detect`` have trained to the end is not trained again when the same is asked. The run's
    networks are never changed: what is trained is a copy.

    Returns:
        The rows, in the schema of :mod:`deepbregman.evaluation.results`.
    """
    chosen = {name: PROTOCOLS[name] for name in evaluation.options.protocols}
    _ = evaluation.can_record  # says so now, not after hours
    for protocol in chosen.values():
        protocol.check(evaluation)
    _ = evaluation.loaded, evaluation.run.result()  # damaged files are better found now
    rows: list[Record] = []
    for name, protocol in chosen.items():
        rows += evaluation.record(protocol.judge(evaluation), name)
    return rows
