"""One HTML page from the folders of runs and studies, with its figures and tables."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from deepbregman import __version__
from deepbregman.files import now
from deepbregman.runs import Record
from deepbregman.terminal import ReportProgress, count_words, join_words

from .charts import FIGURE_KINDS, colour, dash, fit_to_page, name_figures, save_chart, slug
from .comparison import Comparison, compare
from .records import RunRecord, group_runs
from .sections import StudySection
from .tables import to_csv, to_latex


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
        name.with_suffix(".csv").write_bytes(to_csv(table).encode("utf-8", "replace"))
        name.with_suffix(".tex").write_bytes(to_latex(table).encode("utf-8", "replace"))
    return len(figures), len(tables)


def render_page(main: Comparison | None, studies: list[StudySection], title: str | None) -> bytes:
    """Build the page: one file that needs no other and runs only its own two scripts."""
    import jinja2

    template, style, script = load_parts("page")
    vega = load_vega()
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
    return page.encode("utf-8", "replace")  # names of files need not be printable text


def load_parts(page: str) -> tuple[str, str, str]:
    """Return the template, the style and the script of a page; all pages have one theme."""
    here, names = files(__package__), (f"{page}.html", "theme.css", f"{page}.css", f"{page}.js")
    template, theme, style, script = ((here / name).read_text(encoding="utf-8") for name in names)
    return template, theme + style, make_inline(script)


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
    words = [join_words(arms) if len(arms) <= 3 else f"{len(arms)} arms"] if arms else []
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
