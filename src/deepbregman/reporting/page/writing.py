"""Put the page together, and write it with its figures and tables: whole or not at all."""

import base64
import hashlib
import io
import json
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from deepbregman.errors import UserError
from deepbregman.runs import Record, now

from .arms import Subject, grouped
from .charts import Figure, colour, on_page, on_paper, slug
from .scopes import Scope, difference_table, scope_of
from .studies import StudyRecord, is_study, read_study
from .tables import Table, to_csv, to_latex

Progress = Callable[[str, int, int], None]
PNG_SCALE = 2.0


class Written(NamedTuple):
    """What a report came to."""

    page: Path
    num_bytes: int
    num_figures: int
    num_tables: int


class Part(NamedTuple):
    """A study with the curves of its runs."""

    study: StudyRecord
    scope: Scope | None


def report(
    sources: Sequence[Path | str],
    out: Path | str,
    *,
    title: str | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write a page of runs and studies, with its figures and tables beside it.

    Args:
        sources: folders of runs or of studies.
        out: a folder that does not exist or is empty; gets ``index.html``, ``figures`` and
            ``tables``.
        title: of the page; made of what is compared when None.
        progress: is told what is being done, how much of it is, and of how much.

    Returns:
        The page's file, its size, and how many figures and tables there are.
    """
    place = Path(out).resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"--out {out} exists and is not empty: name another folder, or remove it")
    runs, studies = _read(sources)
    parts = [Part(s, scope_of(s.arms, s.key, judged=False) if s.arms else None) for s in studies]
    scope = scope_of(grouped(runs), "") if runs else None
    figures = [figure for s in ([scope] if scope else []) for figure in s.figures]
    tables = [*scope.tables, scope.provenance] if scope else []
    for study, inner in parts:
        figures += [*study.figures, *(inner.figures if inner else [])]
        tables += [*study.tables, *([inner.provenance] if inner else [])]
    for some, prefix in [(scope, ""), *((inner, f"{study.key}-") for study, inner in parts)]:
        if some is not None and some.differences:
            tables.append(difference_table(some, prefix))
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.mkdir()
        page = _page(scope, parts, title, progress)
        (temporary / "index.html").write_bytes(page)
        _write_figures(temporary / "figures", figures, studies, progress)
        _write_tables(temporary / "tables", tables)
        temporary.replace(place)  # takes the place of an empty folder
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Written(Path(out) / "index.html", len(page), len(figures), len(tables))


def _read(sources: Sequence[Path | str]) -> tuple[list[Subject], list[StudyRecord]]:
    if not sources:
        raise UserError("no folder was named: give folders of runs or studies, such as runs/*")
    runs: list[Subject] = []
    studies: list[StudyRecord] = []
    for path in {Path(source).resolve(): Path(source) for source in sources}.values():
        if (path / "config.toml").is_file():
            runs.append(Subject.read(path))
        elif path.is_dir() and is_study(path):
            study = read_study(path)
            if study.key in {other.key for other in studies}:
                raise UserError(
                    f"{path}: another study of the name {path.name} is given, and their figures "
                    "would have the same names; rename one of the folders"
                )
            if study.title in {other.title for other in studies}:
                study = replace(study, title=f"{study.title} ({path.name})")
            studies.append(study)
        else:
            inside = path.is_dir() and any(path.glob("*/config.toml"))
            raise UserError(
                f"{path} is neither a run nor a study: it has no config.toml, study.json, "
                "results.json or trials.json; name "
                + (f"the runs in it, {path}/*" if inside else "folders that deepbregman printed")
            )
    return runs, studies


def _write_figures(
    folder: Path, figures: list[Figure], studies: list[StudyRecord], progress: Progress | None
) -> None:
    import vl_convert
    from PIL import Image

    folder.mkdir()
    for done, figure in enumerate(figures):
        if progress is not None:
            progress("figures", done, len(figures))
        svg = vl_convert.vegalite_to_svg(on_paper(figure.spec))
        (folder / f"{slug(figure.key)}.svg").write_text(svg, encoding="utf-8")
        pixels = Image.open(io.BytesIO(vl_convert.svg_to_png(svg, scale=PNG_SCALE)))
        pixels.convert("RGB").save(folder / f"{slug(figure.key)}.png", optimize=True)
    for study in studies:
        for picture in study.pictures:
            for file in picture.files:
                shutil.copyfile(file, folder / f"{study.key}-{file.name}")


def _write_tables(folder: Path, tables: list[Table]) -> None:
    folder.mkdir()
    for table in tables:
        (folder / f"{slug(table.key)}.csv").write_text(to_csv(table), encoding="utf-8")
        (folder / f"{slug(table.key)}.tex").write_text(to_latex(table), encoding="utf-8")


@cache
def bundle() -> str:
    """Return Vega-Embed, Vega-Lite and Vega as one script that may stand inside a page."""
    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return _inline(script)


def _inline(script: str) -> str:
    """Keep a script from ending, or from seeming a comment, where the page's parser reads it."""
    script = script.replace("\r", "")
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def _hashed(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _json(value: Record) -> str:
    """Write JSON that no parser of HTML can mistake for markup."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _page(
    scope: Scope | None, parts: list[Part], title: str | None, progress: Progress | None
) -> bytes:
    import jinja2

    here = files(__package__)
    text = {name: (here / name).read_text(encoding="utf-8") for name in _FILES}
    if progress is not None:
        progress("page", 0, 1)
    script, charts = _inline(text["page.js"]), bundle()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(slug=slug, colour=colour)
    environment.globals["spec"] = lambda figure, legend: _json(on_page(figure.spec, legend=legend))
    page = environment.from_string(text["page.html"]).render(
        title=title or _title(scope, parts),
        facts=_facts(scope, parts),
        scope=scope,
        parts=parts,
        style=text["page.css"],
        script=script,
        bundle=charts,
        policy=" ".join((_hashed(script), _hashed(charts))),
    )
    if progress is not None:
        progress("page", 1, 1)
    return page.encode()


_FILES = ("page.html", "page.css", "page.js")


def _title(scope: Scope | None, parts: Sequence[Part]) -> str:
    """Name what is compared, as long as that is short."""
    arms = [arm.name for arm in scope.arms] if scope else []
    words = [" and ".join(arms) if len(arms) <= 3 else f"{len(arms)} arms"] if arms else []
    studies = [part.study.title for part in parts]
    words += studies if len(studies) <= 1 else [f"{len(studies)} studies"]
    return ", ".join(words)


def _facts(scope: Scope | None, parts: Sequence[Part]) -> list[str]:
    """Say in a line what the page is of, when it was written and by what."""
    words: list[str] = []
    if scope is not None:
        runs = sum(len(arm.runs) for arm in scope.arms)
        words.append(f"{_counted(runs, 'run')} in {_counted(len(scope.arms), 'arm')}")
        words.append(", ".join(dict.fromkeys(dict(card.facts)["data"] for card in scope.cards)))
    if parts:
        words.append(f"{len(parts)} {'study' if len(parts) == 1 else 'studies'}")
    when = now()[:16].replace("T", " ")
    return [*words, f"written {when} UTC by deepbregman {version('deepbregman')}"]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
