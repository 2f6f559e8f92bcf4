"""The page in a real browser: nothing fails, charts are drawn, both themes can be read."""

import io
import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from deepbregman.commands.report import report

from . import chromium

PROGRAM = chromium.found()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome is installed")
DRAWN = "document.querySelectorAll('figure.chart .plot svg').length"


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Tab]:
    with chromium.tab(PROGRAM) as opened:
        yield opened


def luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, by WCAG 2.2."""
    parts = np.array([float(part) for part in re.findall(r"[\d.]+", colour)[:3]]) / 255.0
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ np.array([0.2126, 0.7152, 0.0722]))


def contrast(a: str, b: str) -> float:
    bright, dim = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def colour_of(tab: chromium.Tab, selector: str, name: str) -> str:
    return str(tab.ask(f"getComputedStyle(document.querySelector('{selector}')).{name}"))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_loads_cleanly(tab, sample_page, width, scheme):
    tab.messages.clear()
    tab.requests.clear()
    tab.open(sample_page.page, width, 900, scheme)
    tab.wait_for(f"{DRAWN} === {sample_page.num_figures}")
    assert tab.messages == []
    assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data"}
    assert len([url for url in tab.requests if url.startswith("file:")]) == 1
    # Nothing is wider than the window: tables scroll inside their own box.
    assert tab.ask("document.documentElement.scrollWidth") <= width
    # The names of rows are whole: beside them in a wide window, above them in a narrow one.
    labels = tab.ask(
        "[...document.querySelectorAll('#evaluations .role-axis-label text')]"
        ".map((text) => [text.textContent, text.getBoundingClientRect().left])"
    )
    assert not [words for words, _ in labels if "\u2026" in words]
    assert {"knn: divergence, k=200", "linear: cached features"} <= {words for words, _ in labels}
    assert all(0 <= left < width for _, left in labels)
    lines = "document.querySelectorAll('#curves .mark-line path').length"
    assert tab.ask(lines) >= 5 * 3  # two runs and their mean at the least, in every chart
    paper = colour_of(tab, "html", "backgroundColor")
    assert (luminance(paper) < 0.05) == (scheme == "dark")
    for selector, name in (
        *(("h1", "color"), (".facts", "color"), (".card .state", "color"), ("td", "color")),
        *((".files a", "color"), ("#curves .plot svg text", "fill"), ("thead th", "color")),
    ):
        if tab.ask(f"document.querySelector('{selector}') !== null"):
            assert contrast(colour_of(tab, selector, name), paper) >= 4.5, (selector, scheme)
    pixels = np.asarray(Image.open(io.BytesIO(tab.screenshot())).convert("L"))
    assert pixels.shape == (900, width)
    assert (pixels.mean() < 80) == (scheme == "dark")
    assert len(np.unique(pixels)) > 30


@pytest.fixture(scope="module")
def wide_page(tab, sample_page) -> chromium.Tab:
    """The page in a wide window, with every chart drawn; for tests that leave it as it was."""
    tab.open(sample_page.page, 1280, 900, "light")
    tab.wait_for(f"{DRAWN} === {sample_page.num_figures}")
    return tab


def test_the_toggle_turns_the_theme_and_charts_stay(wide_page):
    seen = [colour_of(wide_page, "#curves .plot svg text", "fill")]
    for theme in ("dark", "light"):
        wide_page.ask("document.getElementById('theme').click()")
        assert wide_page.ask("document.documentElement.dataset.theme") == theme
        seen.append(colour_of(wide_page, "#curves .plot svg text", "fill"))
    assert seen[0] == seen[2] != seen[1]
    wide_page.ask("localStorage.clear()")


def test_the_legend_highlights_an_arm_in_every_chart(wide_page):
    faint = "document.querySelectorAll('.mark-line path[opacity=\"0.05\"]').length"
    assert wide_page.ask(faint) == 0
    wide_page.ask("document.querySelector('#curves .legend button[data-arm=simclr]').click()")
    wide_page.wait_for(f"{faint} > 15")
    pressed = "document.querySelectorAll('.legend button[aria-pressed=true]').length"
    assert wide_page.ask(pressed) == 3  # of evaluations, curves and diagnostics alike
    wide_page.ask("document.querySelector('#curves .legend button[data-arm=simclr]').click()")
    wide_page.wait_for(f"{faint} === 0")


def test_pointing_at_a_curve_shows_its_value(wide_page):
    wide_page.ask("document.querySelector('#curves .plot').scrollIntoView({block: 'center'})")
    box = wide_page.ask("document.querySelector('#curves .plot').getBoundingClientRect().toJSON()")
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    wide_page.point(*middle)
    wide_page.point(middle[0] + 3, middle[1])
    shown = "document.querySelector('#vg-tooltip-element.visible')?.textContent ?? ''"
    wide_page.wait_for(f"({shown}).includes('epoch')")
    words = str(wide_page.ask(shown))
    assert re.search(r"arm(bregman|simclr)", words)
    assert re.search(r"value\d", words)
    assert "undefined" not in words


def test_a_page_with_a_name_of_markup(tab, make_run, tmp_path):
    name = "<script>document.title=1<img src=x onerror=document.title=2>"
    run = make_run(name, metrics=[{"epoch": 1, "total": 1.0}, {"epoch": 2, "total": 0.5}])
    written = report([run], tmp_path / "out", title="<b>mine</b>")
    tab.messages.clear()
    tab.open(written.page, 800, 600, "light")
    tab.wait_for(f"{DRAWN} === {written.num_figures}")
    assert tab.ask("document.title") == "<b>mine</b>"
    assert tab.messages == []
    assert tab.ask("document.querySelector('.card h3').textContent") == name


def test_a_study_with_long_names_and_curves_that_are_drawn_once_unfolded(
    tab, make_run, make_study, tmp_path
):
    study = make_study("kappa")
    (study / "runs").mkdir()
    run = make_run("5-seed0", metrics=[{"epoch": 1, "total": 1.0}, {"epoch": 2, "total": 0.5}])
    run.rename(study / "runs" / run.name)
    results = json.loads((study / "results.json").read_text())
    names = [f"Deep Divergence, moment, contrastive (supervised) {n}" for n in range(4)]
    results["arms"] += [{**results["arms"][2], "arm": name, "series": name} for name in names]
    printed = results["study"]["published"][0]
    results["study"]["published"] += [{**printed, "series": f"{name} too"} for name in names[:2]]
    (study / "results.json").write_text(json.dumps(results))
    tab.messages.clear()
    tab.open(report([study], tmp_path / "out").page, 1280, 900, "dark")
    tab.wait_for(f"{DRAWN} === 2")
    beyond = """
        [...document.querySelectorAll("figure.chart")].flatMap((figure) => {
          const edge = figure.getBoundingClientRect().right;
          return [...figure.querySelectorAll(".plot svg text")]
            .filter((text) => text.getBoundingClientRect().right > edge)
            .map((text) => text.textContent);
        })
    """
    assert tab.ask(beyond) == []
    tab.ask("document.querySelector('details.more').open = true")
    tab.wait_for(f"{DRAWN} === 3")
    assert tab.ask("document.querySelector('.more .plot svg').clientWidth") > 300
    assert tab.messages == []


def test_in_a_narrow_window_the_names_of_rows_lie_between_the_lines(tab, make_study, tmp_path):
    """Also where rows are headings, which no dot stands in."""
    tab.open(report([make_study("kappa", figure="parts")], tmp_path / "out").page, 390, 900, "dark")
    tab.wait_for(f"{DRAWN} === 1")
    names, lines = (
        tab.ask(
            f"[...document.querySelectorAll('{part}')].map((e) => e.getBoundingClientRect())"
            f".filter((box) => {kept}).map((box) => [box.top, box.bottom])"
        )
        for part, kept in (
            (".role-axis-label text", "box.height > 0"),
            (".role-axis-grid line", "box.width > 99"),
        )
    )
    rows = sorted(names)[:3]  # the others are the numbers below
    assert len(lines) >= 3
    for (top, bottom), (line, _) in zip(rows, sorted(lines), strict=False):
        assert line - 1 <= top < bottom <= line + 20
