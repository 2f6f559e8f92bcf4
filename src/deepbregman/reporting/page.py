"""One HTML page from the folders of runs and studies, with its figures and tables."""

import base64
import hashlib
import io
import json
import os
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from deepbregman import __version__
from deepbregman.errors import UserError
from deepbregman.files import check_shape
from deepbregman.runs import Record, now, read_json
from deepbregman.statistics import format_spread, summarise
from deepbregman.terminal import ReportProgress, count_words, format_duration

from .charts import (
    FIGURE_KINDS,
    Figure,
    as_sentence,
    colour,
    dash,
    draw_evaluations,
    fit_to_page,
    name_figures,
    save_chart,
    slug,
)
from .curves import draw_curves
from .evidence import EVIDENCE, draw_differences, is_evidence, tabulate_evidence
from .published import CAVEAT, list_published_series
from .records import (
    RunGroup,
    RunRecord,
    average_references,
    find_differences,
    find_unequal_budget,
    group_runs,
    is_finite,
    list_measures,
    refuse_links,
)
from .searches import SEARCH, count_trials, draw_search, tabulate_trials
from .studies import (
    GRID,
    describe_budget,
    describe_diverged,
    draw_study,
    format_epochs,
    is_grid,
    tabulate_study,
)
from .tables import (
    Cell,
    Row,
    Table,
    format_value,
    summarise_measure,
    tabulate_evaluations,
    tabulate_fields,
    tabulate_provenance,
    tabulate_quickstarts,
    to_csv,
    to_latex,
)

STUDY_FILES = ("study.json", "results.json", "trials.json")
MAX_PICTURE = 400_000
"""Bytes of a picture within the page; larger ones only lie beside it."""
MAX_PIXELS = 50_000_000
NO_FACTS = ("title", "note", "notes")
"""Fields of a record with long texts."""


@dataclass(frozen=True)
class Card:
    """An arm at a glance."""

    group: RunGroup
    facts: list[tuple[str, str]]
    headline: Cell | None
    headline_title: str
    test_set: str
    warnings: list[str]
    """Reasons to doubt the numbers; empty if there are none."""
    has_labels: bool = True
    """Whether the data may have labels: without any, the kNN monitor never ran."""


@dataclass(frozen=True)
class Comparison:
    """Arms to compare, with their charts and tables."""

    groups: list[RunGroup]
    cards: list[Card]
    evaluations: list[Figure]
    curves: list[Figure]
    diagnostics: list[Figure]
    tables: list[Table]
    fields: Table | None
    unequal: list[str]
    incomparable: str
    """How the headlines of the cards differ, so that they cannot be compared; empty if they can."""
    provenance: Table

    @property
    def figures(self) -> list[Figure]:
        """All charts."""
        return [*self.evaluations, *self.curves, *self.diagnostics]


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


def write_page(
    folder: Path,
    runs: list[RunRecord],
    studies: list[StudySection],
    title: str | None,
    progress: ReportProgress,
) -> tuple[int, int]:
    """Write the page of runs and studies, with its figures and tables, into an empty folder."""
    for study in studies:
        if study.groups:
            study.comparison = compare(study.groups, study.key, evaluated=False)
    main = compare(group_runs(runs), "") if runs else None
    parts = [main, *(study.comparison for study in studies)]
    comparisons = [part for part in parts if part is not None]
    figures = [figure for study in studies for figure in study.figures]
    figures += [figure for part in comparisons for figure in part.figures]
    tables = [table for study in studies for table in study.tables]
    for part in comparisons:
        tables += [*part.tables, part.provenance, *([part.fields] if part.fields else [])]
    (folder / "index.html").write_bytes(render_page(main, studies, title))
    (folder / "figures").mkdir()
    for done, figure in enumerate(figures):
        progress("figures", done, len(figures))
        save_chart(name_figures(folder / "figures", slug(figure.key)), figure.spec)
    for study in studies:
        for picture in study.pictures:
            name = folder / "figures" / f"{study.key}-{slug(picture.title)}.png"
            name.write_bytes(picture.png)
    (folder / "tables").mkdir()
    for table in tables:
        name = folder / "tables" / slug(table.key)
        name.with_suffix(".csv").write_text(to_csv(table), encoding="utf-8")
        name.with_suffix(".tex").write_text(to_latex(table), encoding="utf-8")
    return len(figures), len(tables)


# Reading.


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
    study = StudySection(slug(path.name or path.resolve().name), path.name or path.resolve().name)
    records = {n: read_json(path / n) for n in STUDY_FILES if (path / n).is_file()}
    results, trials = records.get("results.json"), records.get("trials.json")
    try:
        if results is not None and is_evidence(results):
            check_shape(results, EVIDENCE)
            _add_evidence(study, results)
        elif results is not None and is_grid(results):
            check_shape(results, GRID)
            _add_grid(study, path, results)
        elif trials is not None:
            check_shape(trials, SEARCH)
            _add_search(study, trials)
        elif results is not None:
            _add_outcome(study, path, results)
        else:
            study.groups = group_runs(map(RunRecord.read, _list_runs(path)))
            study.notes = ["The study has no results yet: none of its runs has been evaluated."]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} holds a record that is not of a study ({type(error).__name__}: {error}): run "
            "the study again in its folder to write it again"
        ) from None
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
    judged = {cell.get("run") or (cell["arm"], cell["seed"]) for cell in results["cells"]}
    left = sorted(set(folders) - judged)
    printed = list_published_series(results)
    notes = [as_sentence(describe_budget(results)), as_sentence(describe_diverged(results))]
    notes.append(results["study"].get("note") or "")
    notes += [f"Begun and not evaluated: {', '.join(left)}."] if left else []
    notes += [CAVEAT] if printed else []
    notes += [f"Published, {part['series']}: {part['source']}." for part in printed]
    study.notes = [note for note in notes if note]
    study.title = str(results["study"]["title"])
    study.facts = {
        "recipe": results["recipe"],
        "data": Path(results["data"]).name,
        "epochs": format_epochs(results),
        "evaluated on": "test images" if results["judge"] == "test" else "held-out training images",
        "runs": str(len(judged)),
    }
    study.figures = draw_study(results, study.key)
    study.tables = tabulate_study(results, study.key)


def _add_evidence(study: StudySection, results: Record) -> None:
    figure = draw_differences(results, f"{study.key}-")
    study.figures = [] if figure is None else [figure]
    study.tables = tabulate_evidence(results, f"{study.key}-")
    study.facts = {"arms": ", ".join(results["arms"]), "runs": str(len(results["runs"]))}


def _add_search(study: StudySection, record: Record) -> None:
    study.facts = {
        "recipe": str(record["recipe"]),
        "data": Path(str(record["data"])).name,
        "epochs": str(record["epochs"]),
        "sampler": str(record["sampler"]),
        "trials": count_trials(record),
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
        if isinstance(value, str | int | float) and value != "" and name not in NO_FACTS
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
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg") or path.is_symlink():
            continue
        if not path.is_file():  # a pipe would be waited for
            continue
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(handle, "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of large pictures, which are refused below
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


# Arms at a glance.


def compare(groups: list[RunGroup], key: str, *, evaluated: bool = True) -> Comparison:
    """Draw all charts and tables of some arms.

    Args:
        key: begins the names of files; may be empty.
        evaluated: add tables and charts of evaluations; a study has its own.
    """
    prefix = f"{key}-" if key else ""
    tables = _name_files_apart(tabulate_evaluations(groups, prefix)) if evaluated else []
    sources = dict.fromkeys(measure.data for measure in list_measures(groups)) if evaluated else {}
    evaluations = [
        draw_evaluations(groups, data, table.key, table.title)
        for data, table in zip(sources, tables, strict=True)
    ]
    curves, diagnostics = draw_curves(groups, prefix)
    cards = [make_card(group) for group in groups] if evaluated else []
    if evaluated:
        tables += _name_files_apart(tabulate_quickstarts(groups))
    return Comparison(
        groups=groups,
        cards=cards,
        evaluations=evaluations,
        curves=curves,
        diagnostics=diagnostics,
        tables=tables,
        fields=tabulate_fields(groups, prefix),
        # A study's arms differ on purpose.
        unequal=find_unequal_budget(find_differences(groups)) if evaluated else [],
        incomparable=_describe_test_sets(cards),
        provenance=tabulate_provenance(groups, prefix),
    )


def _name_files_apart(tables: Sequence[Table]) -> list[Table]:
    """Give the files of every table a unique name."""
    keys = [slug(table.key) for table in tables]
    return [
        table._replace(key=key if keys.count(key) == 1 else f"{key}-{index + 1}")
        for index, (table, key) in enumerate(zip(tables, keys, strict=True))
    ]


def make_card(group: RunGroup) -> Card:
    """Summarise an arm."""
    config = group.config
    seeds = ", ".join(str(seed) for seed in group.seeds)
    facts = [
        ("data", config.data.source.rstrip("/").rpartition("/")[2] or config.data.source),
        ("encoder", config.encoder.name),
        ("epochs", str(config.training.epochs)),
        ("runs", f"{len(group.runs)} (seed {seeds})"),
    ]
    monitored = [[row["knn"] for row in r.metrics if is_finite(row.get("knn"))] for r in group.runs]
    last = [values[-1] for values in monitored if values]
    if last:
        found = summarise(last)
        spread = format_spread(found["mean"], found["deviation"])
        facts.append(("kNN monitor, last", f"{spread} %"))
    health = [f"{run.health}" for run in group.runs if run.health is not None]
    facts += [("health", words) for words in dict.fromkeys(health)]
    stopped = [run.stopped for run in group.runs if run.stopped is not None]
    facts += [("stopped", words) for words in dict.fromkeys(stopped)]
    seconds = [run.seconds for run in group.runs if run.seconds is not None]
    if seconds:
        each = " each" if len(seconds) > 1 else ""
        facts.append(("training took", format_duration(summarise(seconds)["mean"]) + each))
    states = [f"{run.name}: {run.state}" for run in group.runs if run.state != "finished"]
    if len(group.seeds) < len(group.runs):
        states.append(f"{group.size}: so the deviation is not over independent seeds")
    elif len(group.runs) == 1:
        states.append("one seed: no deviation over seeds")
    known = list_measures([group])
    own = [m for m in known if m.data == config.data.source] or known
    linear = [m for m in own if m.protocol == "linear" and m.metric == "top1"]
    main = next(iter([*linear, *own]), None)
    if main is None:  # the card says so, and there is nothing to deviate
        unusual = [f"{r.name}: {r.state}" for r in group.runs if not r.is_complete]
        ran = all(run.is_complete and run.config.training.knn_every for run in group.runs)
        return Card(group, facts, None, "", "", unusual, has_labels=bool(last) or not ran)
    compared = average_references([group], main).items()
    facts[:0] = [(name, f"{value:.2f} %") for name, value in compared]
    return Card(group, facts, summarise_measure(group, main), main.title, main.test_set, states)


def _describe_test_sets(cards: Sequence[Card]) -> str:
    """Say that headlines are not of the same images or the same measure; empty if they are."""
    known = [card for card in cards if card.headline is not None]
    for part, what in (("test_set", "test images"), ("headline_title", "measures")):
        if len({getattr(card, part) for card in known}) > 1:
            words = "; ".join(f"{card.group.name}: {getattr(card, part)}" for card in known)
            return f"different {what}: {words}"
    return ""


# The page.


def render_page(main: Comparison | None, studies: list[StudySection], title: str | None) -> bytes:
    """Build the page: one file that needs no other and runs only its own two scripts."""
    import jinja2

    here = files(__package__)
    names = ("page.html", "page.css", "page.js")
    template, style, script = ((here / name).read_text(encoding="utf-8") for name in names)
    script, vega = make_inline(script), load_vega()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(slug=slug, colour=colour, dash=dash)
    environment.globals["spec"] = lambda figure, legend: to_json(
        fit_to_page(figure.spec, legend=legend)
    )
    page = environment.from_string(template).render(
        title=title or _make_title(main, studies),
        facts=_list_facts(main, studies),
        main=main,
        studies=studies,
        style=style,
        script=script,
        bundle=vega,
        policy=f"{hash_source(script)} {hash_source(vega)}",
        figure_kinds=FIGURE_KINDS,
    )
    return page.encode()


@cache
def load_vega() -> str:
    """Return Vega-Embed, Vega-Lite and Vega as one script to put inside a page."""
    import vl_convert

    return make_inline(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def make_inline(script: str) -> str:
    """Escape what would end the script, or begin a comment, for the parser of the page."""
    script = script.replace("\r", "")
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def hash_source(script: str) -> str:
    """Return the hash of a script for the security policy of the page."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def to_json(value: Record) -> str:
    """Write JSON that an HTML parser cannot read as markup."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _make_title(main: Comparison | None, studies: Sequence[StudySection]) -> str:
    """Name the arms and studies, if that is short."""
    arms = [group.name for group in main.groups] if main else []
    words = [" and ".join(arms) if len(arms) <= 3 else f"{len(arms)} arms"] if arms else []
    titles = [study.title for study in studies]
    words += titles if len(titles) <= 1 else [f"{len(titles)} studies"]
    return ", ".join(words)


def _list_facts(main: Comparison | None, studies: Sequence[StudySection]) -> list[str]:
    """Return the contents of the page, its time and the version, in a line."""
    words: list[str] = []
    if main is not None:
        runs = sum(len(group.runs) for group in main.groups)
        arms = f" in {count_words(len(main.groups), 'arm')}" if runs > 1 else ""
        words.append(count_words(runs, "run") + arms)
        words.append(", ".join(dict.fromkeys(dict(card.facts)["data"] for card in main.cards)))
    if studies:
        words.append(f"{len(studies)} {'study' if len(studies) == 1 else 'studies'}")
    when = now()[:16].replace("T", " ")
    return [*words, f"written {when} UTC by deepbregman {__version__}"]
