"""Folders of runs and studies, read for the page: a section for each study."""

import base64
import io
import os
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from deepbregman.errors import UserError
from deepbregman.files import read_json
from deepbregman.runs import Record

from .charts import Figure, as_sentence, slug
from .comparison import Comparison
from .grid_charts import describe_budget, describe_diverged, draw_study, format_epochs
from .grid_tables import tabulate_study
from .paper_tables import draw_differences, tabulate_quantities
from .published import CAVEAT, is_on_test_images, list_published_series
from .records import RunGroup, RunRecord, group_runs, refuse_links
from .searches import count_trials, draw_search, tabulate_trials
from .tables import Cell, Row, Table, format_value

STUDY_FILES = ("study.json", "results.json", "trials.json")
MAX_PICTURE = 400_000
"""Bytes of a picture within the page; larger ones only lie beside it."""
MAX_PIXELS = 50_000_000
LONG_TEXTS = ("title", "note", "notes")
"""Fields of a record with long texts."""


class Picture(NamedTuple):
    """A picture of a study, decoded and encoded again."""

    title: str
    png: bytes

    @property
    def address(self) -> str | None:
        """A ``data:`` address; None of a picture too large for the page."""
        if len(self.png) > MAX_PICTURE:
            return None
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass
class StudySection:
    """The part of the page that shows a study's folder."""

    key: str
    title: str
    facts: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    groups: list[RunGroup] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    comparison: Comparison | None = None
    """Curves and configurations of its runs."""


def read_sources(sources: Sequence[Path | str]) -> tuple[list[RunRecord], list[StudySection]]:
    """Read folders of runs and studies, each once."""
    if not sources:
        raise UserError("no folder was named: give folders of runs or studies, such as runs/*")
    runs: list[RunRecord] = []
    studies: list[StudySection] = []
    for path in {Path(source).resolve(): Path(source) for source in sources}.values():
        if (path / "config.toml").is_file():
            runs.append(RunRecord.read(path))
        elif any((path / name).is_file() for name in STUDY_FILES):
            study = read_study(path)
            if study.key in {other.key for other in studies}:
                raise UserError(
                    f"{path}: another study of the name {path.name} is given, and their figures "
                    "would have the same names; rename one of the folders"
                )
            if study.title in {other.title for other in studies}:
                study.title += f" ({path.name})"
            studies.append(study)
        else:
            inside = path.is_dir() and any(path.glob("*/config.toml"))
            raise UserError(
                f"{path} is neither a run nor a study: it has no config.toml, study.json, "
                "results.json or trials.json; name "
                + (f"the runs in it, {path}/*" if inside else "folders that deepbregman printed")
            )
    return runs, studies


def read_study(path: Path) -> StudySection:
    """Read the folder of a study; nothing is computed again."""
    refuse_links(path, STUDY_FILES)
    name = path.name or path.resolve().name
    study = StudySection(slug(name), name)
    records = {n: read_json(path / n) for n in STUDY_FILES if (path / n).is_file()}
    results, trials = records.get("results.json"), records.get("trials.json")
    try:
        if results is not None and "quantities" in results:
            _add_paper_tables(study, results)
        elif results is not None and {"arms", "study"} <= results.keys():
            _add_grid(study, path, results)
        elif trials is not None:
            _add_search(study, trials)
        elif results is not None:
            _add_outcome(study, path, results)
        else:
            study.groups = group_runs(map(RunRecord.read, _list_runs(path)))
            study.notes = ["The study has no results yet: none of its runs has been evaluated."]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{path} holds a record that is not of a study ({type(error).__name__}: {error}): run "
            "the study again in its folder to write it again"
        ) from error  # --debug shows where
    return study


def _list_runs(path: Path) -> list[Path]:
    """Return the runs of a study; links are not followed."""
    folder = path / "runs"
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = [run for run in sorted(folder.iterdir()) if not run.is_symlink()]
    return [run for run in found if (run / "config.toml").is_file()]


def _add_grid(study: StudySection, path: Path, results: Record) -> None:
    folders = {run.name: run for run in _list_runs(path)}
    for place, arm in enumerate(results["arms"]):
        cells = [cell for cell in results["cells"] if cell["arm"] == arm["arm"]]
        names = dict.fromkeys(cell.get("run") for cell in cells)
        runs = tuple(RunRecord.read(folders[name]) for name in names if name in folders)
        if runs:
            study.groups.append(RunGroup(arm["arm"], runs, place))
    # The runs may be gone; a cell that names no run counts as one.
    evaluated = {cell.get("run") or (cell["arm"], cell["seed"]) for cell in results["cells"]}
    unfinished = sorted(set(folders) - evaluated)
    published = list_published_series(results)
    notes = [as_sentence(describe_budget(results)), as_sentence(describe_diverged(results))]
    notes.append(results["study"].get("note") or "")
    notes += [f"Begun and not evaluated: {', '.join(unfinished)}."] if unfinished else []
    notes += [CAVEAT] if published else []
    notes += [f"Published, {part['series']}: {part['source']}." for part in published]
    study.notes = [note for note in notes if note]
    study.title = str(results["study"]["title"])
    study.facts = {
        "recipe": results["recipe"],
        "data": Path(results["data"]).name,
        "epochs": format_epochs(results),
        "evaluated on": "test images" if is_on_test_images(results) else "held-out training images",
        "runs": str(len(evaluated)),
    }
    study.figures = draw_study(results, study.key)
    study.tables = tabulate_study(results, study.key)


def _add_paper_tables(study: StudySection, results: Record) -> None:
    figure = draw_differences(results, f"{study.key}-")
    study.figures = [] if figure is None else [figure]
    study.tables = tabulate_quantities(results, f"{study.key}-")
    study.facts = {"arms": ", ".join(results["arms"]), "runs": str(len(results["runs"]))}


def _add_search(study: StudySection, record: Record) -> None:
    study.facts = {
        "recipe": str(record["recipe"]),
        "data": Path(str(record["data"])).name,
        "epochs": str(record["epochs"]),
        "sampler": str(record["sampler"]),
        "searched": count_trials(record),
    }
    study.figures = draw_search(record, study.key)
    study.tables = [tabulate_trials(record, study.key)]
    study.title = f"Search {study.title}"
    study.notes = [
        "The best of many trials is an optimistic value: one seed each, chosen by this number."
    ]


def _add_outcome(study: StudySection, path: Path, record: Record) -> None:
    """Show a study that is not a grid by its pictures, facts and rows."""
    origin = record.get("provenance") or {}
    known = {**record, **(record.get("settings") or {})}
    known |= {name: origin.get(name) for name in ("device", "commit")}
    known["command"] = shlex.join(map(str, origin.get("command") or []))
    study.facts = {
        name.replace("_", " "): format_value(value)
        for name, value in known.items()
        if isinstance(value, str | int | float) and value != "" and name not in LONG_TEXTS
    }
    for name, rows in record.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            table = _tabulate_rows(f"{study.key}-{slug(name)}", name.replace("_", " "), rows)
            study.tables += [table] if table.columns else []
    study.notes = [str(record[name]) for name in ("note", "notes") if record.get(name)]
    if isinstance(record.get("title"), str):
        study.title = record["title"]
    study.pictures = read_pictures(path)


def _tabulate_rows(key: str, title: str, rows: list[Record]) -> Table:
    """Make a table of the fields with a single value in every row."""
    columns = [
        column
        for column in dict.fromkeys(column for row in rows for column in row)
        if all(not isinstance(row.get(column), list | dict) for row in rows)
    ]
    corner = "arm" if "arm" in columns else ""
    shown = [column for column in columns if column != corner]
    lines = tuple(
        Row(
            str(row.get(corner, index + 1)),
            tuple(Cell(text=format_value(row.get(column))) for column in shown),
        )
        for index, row in enumerate(rows)
    )
    return Table(key, title, corner, tuple(shown), lines)


def read_pictures(folder: Path) -> list[Picture]:
    """Read the PNG and JPEG pictures of a folder; links are not followed.

    The page is sent to others, and the folder may come from anybody, so each picture is decoded and
    encoded again: only its pixels get into the page. SVG can hold scripts and is left out.
    """
    from PIL import Image

    pictures = []
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg"):
            continue
        if path.is_symlink() or not path.is_file():  # a pipe would be waited for
            continue
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(handle, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # large pictures are left out below
                image = Image.open(file, formats=("PNG", "JPEG"))
                if image.width * image.height > MAX_PIXELS:
                    continue
                pixels = image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            continue
        text = io.BytesIO()
        pixels.save(text, "PNG", optimize=True)
        pictures.append(Picture(path.stem, text.getvalue()))
    return pictures
