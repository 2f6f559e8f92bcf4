"""Folders of studies as they were left: grids, searches, and what else drew pictures."""

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from deepbregman.errors import UserError
from deepbregman.reporting.printed import printed_series, printed_title, printed_value
from deepbregman.reporting.summaries import (
    as_sentence,
    costs_known,
    diverged_words,
    reference_words,
    trained_for,
    unequal_words,
)
from deepbregman.reporting.trials import completed, fates, searched
from deepbregman.runs import Record, read_json

from .arms import Arm, Spread, Subject, grouped, is_number
from .charts import Figure, slug
from .pair_charts import difference_figure, pairs_figure
from .published import CAVEAT
from .study_charts import search_figures, study_figure
from .tables import Cell, Row, Table

MAX_PICTURE = 400_000
"""Bytes of a picture within the page; larger ones are only copied beside it."""
BEST_TRIALS = 10
TEXTS = ("title", "note", "notes")
"""Fields of a record that are no facts of a few words."""


class Picture(NamedTuple):
    """A picture that the study drew itself, with its files."""

    title: str
    files: tuple[Path, ...]
    data: str | None
    """A ``data:`` address; None of a picture too large for the page."""


@dataclass(frozen=True)
class StudyRecord:
    """All that one study's folder says."""

    key: str
    title: str
    facts: dict[str, str]
    """What it was done with, a few words each."""
    figures: list[Figure]
    tables: list[Table]
    arms: list[Arm]
    pictures: list[Picture]
    notes: list[str]


def is_study(path: Path) -> bool:
    """Tell a study's folder by its records."""
    return any((path / name).is_file() for name in ("study.json", "results.json", "trials.json"))


def read_study(path: Path) -> StudyRecord:
    """Read a study's folder; nothing in it is computed anew."""
    name = path.name or path.resolve().name
    try:
        if (path / "results.json").is_file():
            results = read_json(path / "results.json")
            if "arms" in results and "study" in results:
                return _grid(path, name, results)
        if (path / "trials.json").is_file():
            return _search(path, name, read_json(path / "trials.json"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} holds a record that is not a study's ({type(error).__name__}: {error}): run "
            "the study again in its folder to write it anew"
        ) from None
    if (path / "results.json").is_file():
        return _other(path, name, read_json(path / "results.json"))
    arms = grouped(Subject.read(run) for run in _cells(path))
    words = "The study has no results yet: none of its cells has been judged."
    return StudyRecord(slug(name), name, {}, [], [], arms, [], [words])


def _cells(path: Path) -> list[Path]:
    return sorted(config.parent for config in (path / "runs").glob("*/config.toml"))


def _grid(path: Path, name: str, results: Record) -> StudyRecord:
    key = slug(name)
    folders = {run.name: run for run in _cells(path)}
    names = [arm["arm"] for arm in results["arms"]]
    arms = []
    for place, arm in enumerate(names):
        mine = dict.fromkeys(cell.get("run") for cell in results["cells"] if cell["arm"] == arm)
        runs = tuple(Subject.read(folders[run]) for run in mine if run in folders)
        if runs:
            arms.append(Arm(arm, runs, place))
    # A record may have outlived its runs; cells that name none are a run each.
    judged = {cell.get("run") or (cell["arm"], cell["seed"]) for cell in results["cells"]}
    notes = [as_sentence(unequal_words(results)), as_sentence(diverged_words(results))]
    notes.append(results["study"].get("note") or "")
    left = sorted(set(folders) - judged)
    if left:
        notes.append(f"Begun and not judged: {', '.join(left)}.")
    printed = printed_series(results)
    if printed:
        notes.append(CAVEAT)
        notes += [f"Published, {part['series']}: {part['source']}." for part in printed]
    facts = {
        "recipe": str(results["recipe"]),
        "data": Path(str(results["data"])).name,
        "epochs": trained_for(results),
        "judged on": "test images" if results["judge"] == "test" else "held-out training images",
        "runs judged": str(len(judged)),
    }
    draw = pairs_figure if results["study"]["figure"] == "pairs" else study_figure
    figures = [draw(results, printed, key), difference_figure(results, key)]
    tables = [_grid_table(results, printed, key)]
    if reference_words(results) is not None:
        tables.append(_difference_table(results, key))
    if results["study"]["figure"] == "pairs":
        tables.append(_cost_table(results, key))
    title, shown = results["study"]["title"], [figure for figure in figures if figure]
    return StudyRecord(key, title, facts, shown, tables, arms, [], [n for n in notes if n])


def _grid_table(results: Record, printed: Sequence[Record], key: str) -> Table:
    columns = list(dict.fromkeys(name for arm in results["arms"] for name in arm["metrics"]))
    beyond = {arm["name"] for arm in results["study"]["arms"] if arm.get("beyond")}
    supervised = {arm["name"] for arm in results["study"]["arms"] if arm.get("supervised")}
    rows = []
    for arm in results["arms"]:
        cells = [_summary(arm["metrics"].get(name)) for name in columns]
        for part in printed:
            text = printed_value(part, arm)
            cells.append(Cell(text=text, note=part["source"], is_published=True))
        counts = {cell.spread.n for cell in cells if cell.spread is not None}
        words = [f"n = {'-'.join(str(n) for n in sorted(counts))}"] if counts else []
        words += [f"{arm['num_diverged']} diverged"] if arm.get("num_diverged") else []
        words += ["supervised"] if arm["arm"] in supervised else []
        words += ["not in the paper"] if arm["arm"] in beyond else []
        rows.append(Row(arm["arm"], tuple(cells), note=", ".join(words)))
    columns += [printed_title(part, results["metric"]) for part in printed]
    caption = "Top-1, per cent; mean ± sample deviation over seeds"
    title = results["study"]["title"]
    return Table(f"{key}-arms", title, "arm", tuple(columns), tuple(rows), caption)


def _difference_table(results: Record, key: str) -> Table:
    """Show what every arm changes against its reference, seed by seed."""
    arms = [arm for arm in results["arms"] if arm.get("difference")]
    columns = list(dict.fromkeys(name for arm in arms for name in arm["difference"]))
    rows = []
    for arm in arms:
        cells = [_summary(arm["difference"].get(name)) for name in columns]
        counts = sorted({cell.spread.n for cell in cells if cell.spread is not None})
        words = f"to {arm['against']}, n = {'-'.join(map(str, counts))}"
        rows.append(Row(arm["arm"], tuple(cells), note=words))
    caption = (
        "Points of top-1; mean ± sample deviation of the differences seed by seed, with "
        "the 95 % interval of the mean by Student's t with n - 1 degrees of freedom"
    )
    title = f"Difference to {reference_words(results)}"
    return Table(f"{key}-differences", title, "arm", tuple(columns), tuple(rows), caption)


def _cost_table(results: Record, key: str) -> Table:
    known = costs_known(results)
    rows = [
        Row(
            arm["arm"],
            (
                *(Cell(text=_written(arm["cost"].get(name))) for name in known),
                _summary(arm["cost"]["seconds"]),
            ),
        )
        for arm in results["arms"]
        if arm.get("cost")
    ]
    caption = "Samples are views; seconds are the wall time of training"
    columns = (*known.values(), "seconds")
    return Table(f"{key}-costs", "What training took", "arm", columns, tuple(rows), caption)


def _summary(record: Record | None) -> Cell:
    if not record or not is_number(record.get("mean")):
        return Cell(text="—", note="not measured")
    whole = Spread(record["mean"], record["deviation"], record["n"])
    if "interval" not in record:
        return Cell(whole)
    low_high = record["interval"]
    return Cell(whole, is_difference=True, interval=tuple(low_high) if low_high else None)


def _search(path: Path, name: str, record: Record) -> StudyRecord:
    key = slug(name)
    fields, best = searched(record), completed(record)
    objective = f"{record['objective']}, held out, %"
    rows = [
        Row(
            f"trial {row['trial']}",
            (
                Cell(text=f"{row['value']:.2f}"),
                *(Cell(text=_written(row["values"].get(field))) for field in fields),
            ),
        )
        for row in best[:BEST_TRIALS]
    ]
    if record.get("importance"):
        shares = [Cell(text=_written(record["importance"].get(field))) for field in fields]
        rows.append(Row("share of the variance (fANOVA)", (Cell(), *shares)))
    facts = {
        "recipe": str(record["recipe"]),
        "data": Path(str(record["data"])).name,
        "epochs": str(record["epochs"]),
        "sampler": str(record["sampler"]),
        "trials": fates(record),
    }
    table = Table(f"{key}-trials", "Best trials", "trial", (objective, *fields), tuple(rows))
    note = "The best of many trials is an optimistic value: one seed each, chosen by this number."
    figures = search_figures(record, best, fields, key)
    return StudyRecord(key, f"Search {name}", facts, figures, [table], [], [], [note])


def _other(path: Path, name: str, record: Record) -> StudyRecord:
    """Show a study that is no grid by its own pictures, its facts and its flat rows."""
    key = slug(name)
    origin = record.get("provenance") or {}
    known = {**record, **(record.get("settings") or {})}
    known |= {field: origin.get(field) for field in ("device", "commit")}
    known["command"] = shlex.join(map(str, origin.get("command") or []))
    facts = {
        field.replace("_", " "): _written(value)
        for field, value in known.items()
        if isinstance(value, str | int | float) and value != "" and field not in TEXTS
    }
    tables = []
    for field, value in record.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = [
                column
                for column in dict.fromkeys(column for row in value for column in row)
                if all(not isinstance(row.get(column), list | dict) for row in value)
            ]
            corner = "arm" if "arm" in columns else ""
            columns = [column for column in columns if column != corner]
            if columns:
                rows = tuple(
                    Row(
                        str(row.get(corner, index + 1)),
                        tuple(Cell(text=_written(row.get(c))) for c in columns),
                    )
                    for index, row in enumerate(value)
                )
                words = field.replace("_", " ")
                tables.append(Table(f"{key}-{slug(field)}", words, corner, tuple(columns), rows))
    notes = [str(record[field]) for field in ("note", "notes") if record.get(field)]
    title = record.get("title")
    shown = title if isinstance(title, str) else name
    return StudyRecord(key, shown, facts, [], tables, [], _pictures(path), notes)


def _pictures(path: Path) -> list[Picture]:
    """Take the pictures of a folder; a PNG and an SVG of one name are one picture."""
    stems: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        if file.suffix in (".png", ".svg") and file.is_file():
            stems.setdefault(file.stem, []).append(file)
    pictures = []
    for stem, files in stems.items():
        smallest = min(files, key=lambda file: file.stat().st_size)
        data = None
        if smallest.stat().st_size <= MAX_PICTURE:
            kind = "image/png" if smallest.suffix == ".png" else "image/svg+xml"
            data = f"data:{kind};base64,{base64.b64encode(smallest.read_bytes()).decode()}"
        pictures.append(Picture(stem, tuple(files), data))
    return pictures


def _written(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
