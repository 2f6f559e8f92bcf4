"""What a study that computes and draws leaves: a folder with its results and figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepbregman.errors import UserError
from deepbregman.runs import Record, now, write_json

from .results import summarise


def claim_folder(out: Path) -> None:
    """Make the folder of a study; refuse one that holds anything."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"--out {out} exists and is not an empty folder: a study never overwrites another; "
            "name another folder, or remove it"
        )
    out.mkdir(parents=True, exist_ok=True)


def check_seeds(seeds: int) -> None:
    """Refuse a study without a run."""
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: there must be at least 1; 3 or more give a deviation")


def rows_of(values: Mapping[tuple[str, str], Sequence[float]], **shown: Any) -> list[Record]:
    """Make a row of every arm and metric.

    Args:
        values: (arm, metric) -> a value of each seed.
        shown: what every row says besides.
    """
    return [
        {**shown, "arm": arm, "metric": metric, **summarise(found), "values": list(found)}
        for (arm, metric), found in values.items()
    ]


def write_outcome(
    out: Path, study: str, settings: Record, provenance: Record, rows: list[Record], notes: str
) -> Record:
    """Write ``results.json`` and return what is in it."""
    results = {
        "study": study,
        "notes": notes,
        "settings": settings,
        "provenance": provenance,
        "rows": rows,
        "finished": now(),
    }
    write_json(out / "results.json", results)
    return results
