"""The protocols of evaluation: the registry, and the function that runs them."""

import time
from collections.abc import Callable
from typing import NamedTuple

from deepbregman.launching import find_signal, name_signal
from deepbregman.runs import Record

from .clustering import cluster
from .corruptions import corruptions
from .detection.protocol import check_detect, detect
from .few import check_few, few
from .inputs import Evaluation
from .knn import knn
from .linear import check_linear, linear
from .ood import check_ood, ood
from .references import WITH_REFERENCES, add_references
from .retraining import check_semi, check_supervised, check_transfer, semi, supervised, transfer
from .retrieval import retrieval


def check_labels(evaluation: Evaluation) -> None:
    """Open the data, so that data without labels are refused before any computation."""
    _ = evaluation.labelled


class Protocol(NamedTuple):
    """A way to evaluate a run."""

    run: Callable[[Evaluation], list[Record]]
    """Returns rows as ``results.make_rows`` makes them."""
    check: Callable[[Evaluation], None] = check_labels
    """Raises a UserError for options and data that the protocol cannot work with."""


PROTOCOLS = {
    "knn": Protocol(knn),
    "linear": Protocol(linear, check_linear),
    "semi": Protocol(semi, check_semi),
    "transfer": Protocol(transfer, check_transfer),
    "detect": Protocol(detect, check_detect),
    "supervised": Protocol(supervised, check_supervised),
    "retrieval": Protocol(retrieval),
    "cluster": Protocol(cluster),
    "few": Protocol(few, check_few),
    "ood": Protocol(ood, check_ood),
    "corruptions": Protocol(corruptions, check_linear),
}


def run_protocols(evaluation: Evaluation) -> list[Record]:
    """Evaluate a run by the protocols of its options, and write rows into the run's result.

    All checks come before the first protocol begins. The rows of a protocol are written when it
    ends, so a stopped evaluation keeps the finished protocols. A protocol that is stopped leaves no
    rows, but the same command does not repeat trainings that ``semi``, ``transfer``, ``supervised``
    and ``detect`` have finished. The run's networks are never changed: protocols train a copy.
    """
    try:
        return _run_protocols(evaluation)
    except KeyboardInterrupt as error:
        kept = "what is finished is kept, the same command continues it"
        if not evaluation.can_record:
            kept = f"nothing is kept, since {evaluation.run.path} cannot be written to"
        error.args = (f"stopped by {name_signal(find_signal(error))}; {kept}",)
        raise


def _run_protocols(evaluation: Evaluation) -> list[Record]:
    chosen = {name: PROTOCOLS[name] for name in evaluation.options.protocols}
    _ = evaluation.can_record  # prints its note now, not after hours
    for protocol in chosen.values():
        protocol.check(evaluation)
    _ = evaluation.loaded, evaluation.run.result()  # find damaged files now
    rows: list[Record] = []
    for name, protocol in chosen.items():
        started = time.monotonic()
        evaluation.progress(name, 0, 2)  # a fit may take minutes without another word
        found = protocol.run(evaluation)
        if name in WITH_REFERENCES and evaluation.with_references:
            evaluation.progress(name, 1, 2)
            found = add_references(found, name, evaluation)
        evaluation.progress(name, 2, 2)
        seconds = round(time.monotonic() - started, 1)
        rows += evaluation.record([{**row, "seconds": seconds} for row in found], name)
    return rows
