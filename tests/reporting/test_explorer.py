"""The explorer's page and table: what they hold, and the page in a real browser."""

import base64
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepbregman.errors import UserError
from deepbregman.reporting.explorer import (
    ACROSS,
    PER_SHEET,
    Column,
    Explorer,
    Neighbours,
    Subnetworks,
    choose_thumbnail_side,
    draw_sheets,
    encode_jpeg,
    write_page,
    write_parquet,
)

from . import chromium

PROGRAM = chromium.found()
in_a_browser = pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome is installed")
STRANGE = "</script><script>document.title=1</script>"


def sample(count: int) -> Explorer:
    """Images on a spiral, red or blue, the next ones along it being the nearest."""
    turn = np.sqrt(np.linspace(0.02, 1.0, count))
    points = 0.5 + 0.5 * np.stack([turn * np.cos(20 * turn), turn * np.sin(20 * turn)], axis=1)
    places = np.arange(count)
    after = (places[:, None] + np.arange(1, 7)) % count
    before = (places[:, None] - np.arange(1, 7)) % count
    values = np.tile(np.linspace(0.9, 0.4, 6, dtype=np.float32), (count, 1))
    names = tuple(f"photo-{place}.jpg" for place in places[:-1])
    return Explorer(
        "Images <b>of</b> mine",
        (f"{count} images", "a fact & another"),
        (*names, f"=odd,{STRANGE}.jpg"),
        points.astype(np.float32),
        (
            Column("class", places % 2, ("red", "blue")),
            Column("predicted label", places % 3, ("no label", "red", STRANGE), has_none=True),
            Column("confidence", np.linspace(0.0, 1.0, count)),
        ),
        (
            Neighbours("nearest by cosine", after.astype(np.int32), values),
            Neighbours("nearest by divergence", before.astype(np.int32), 1 - values),
        ),
        Subnetworks(
            (7, 3),
            (count - 5, 5),
            np.stack([places[:4], places[-4:]]).astype(np.int32),
            np.stack([places * 255 // count, 255 - places * 255 // count], 1).astype(np.uint8),
        ),
        {5: "old"},
    )


def pixels(count: int) -> Iterator[np.ndarray]:
    for place in range(count):
        image = np.zeros((12, 16, 3), dtype=np.uint8)
        image[..., 0 if place % 2 == 0 else 2] = 200
        yield image


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "map.html"
    write_page(path, sample(400), draw_sheets(pixels(400), choose_thumbnail_side(400)))
    return path


def block(text: str, name: str) -> bytes:
    match = re.search(rf'id="{name}">([^<]*)</script>', text)
    return base64.b64decode(match[1])


def test_sheets_hold_each_image_at_its_place():
    sheets = list(draw_sheets(pixels(PER_SHEET + 3), 8))
    assert len(sheets) == 2
    for number, sheet in enumerate(sheets):
        tiles = np.asarray(Image.open(io.BytesIO(sheet)))
        assert tiles.shape[1] == 8 * ACROSS
        for place in range(PER_SHEET if number == 0 else 3):
            top, left = place // ACROSS * 8, place % ACROSS * 8
            red, _, blue = tiles[top + 3, left + 3].astype(int)
            assert (red > blue) == ((number * PER_SHEET + place) % 2 == 0)


def test_the_page_holds_what_it_was_given(page):
    text, shown = page.read_text(), sample(400)
    assert np.array_equal(np.frombuffer(block(text, "points"), "<f4"), shown.points.ravel())
    found = np.frombuffer(block(text, "indices-1"), "<i4").reshape(400, 6)
    assert np.array_equal(found, shown.neighbours[1].indices)
    assert np.array_equal(np.frombuffer(block(text, "column-1"), "<u2"), np.arange(400) % 3)
    data = json.loads(re.search(r'id="data">([^<]*)</script>', text)[1])  # type: ignore[index]  # found
    assert data["names"] == list(shown.names)
    assert "&lt;b&gt;of&lt;/b&gt;" in text
    assert "http" not in re.sub(r"https?-equiv", "", text.replace("http-equiv", ""))
    assert text.count("<script>") == 1


def test_an_existing_file_is_never_replaced(tmp_path):
    (tmp_path / "map.html").write_text("precious")
    with pytest.raises(UserError, match="exists"):
        write_page(tmp_path / "map.html", sample(10), draw_sheets(pixels(10), 8))
    assert (tmp_path / "map.html").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["map.html"]


def test_the_table_is_laid_out_for_embedding_atlas(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    shown = sample(30)
    write_parquet(tmp_path / "map.parquet", shown, pixels(30))
    rows = parquet.read_table(tmp_path / "map.parquet").to_pylist()
    assert len(rows) == 30
    for place, row in enumerate(rows):
        assert row["name"] == shown.names[place]
        assert (row["projection_x"], row["projection_y"]) == tuple(shown.points[place].tolist())
        assert row["neighbors"]["ids"] == shown.neighbours[0].indices[place].tolist()
        distances = 1.0 - shown.neighbours[0].values[place]
        assert row["neighbors"]["distances"] == pytest.approx(distances.tolist())
        assert row["class"] == ("red", "blue")[place % 2]
        assert row["predicted label"] == (None, "red", STRANGE)[place % 3]
        with Image.open(io.BytesIO(row["image"]["bytes"])) as image:
            assert image.size == (96, 96)


@pytest.fixture(scope="module")
def tab() -> Iterator[chromium.Tab]:
    with chromium.tab(PROGRAM) as opened:
        yield opened


DRAWN = "Number(document.getElementById('map')?.dataset.drawn || 0)"


def open_page(tab: chromium.Tab, page: Path, width: int, scheme: str) -> None:
    tab.messages.clear()
    tab.requests.clear()
    tab.open(page, width, 900, scheme)
    tab.wait_for(f"{DRAWN} > 0")


def press(tab: chromium.Tab, x: float, y: float, *more: tuple[float, float]) -> None:
    """Click, or drag from one place over others."""
    mouse = {"button": "left", "clickCount": 1}
    tab.point(x, y)
    tab.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **mouse)
    for x, y in more:
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **mouse)
    tab.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, **mouse)


def place_of(tab: chromium.Tab, index: int) -> tuple[float, float]:
    """Where an image lies in the window."""
    found = tab.ask(
        f"(() => {{ const {{view, points}} = explorer; const box = "
        "document.getElementById('map').getBoundingClientRect(); return "
        f"[box.x + view.scale * points[{2 * index}] + view.x, "
        f"box.y + view.scale * points[{2 * index + 1}] + view.y]; }})()"
    )
    return found[0], found[1]


@in_a_browser
class TestBrowser:
    @pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
    def test_it_loads_cleanly(self, tab, page, width, scheme):
        open_page(tab, page, width, scheme)
        assert tab.messages == []
        assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data"}
        assert len([url for url in tab.requests if url.startswith("file:")]) == 1
        assert tab.ask("document.documentElement.scrollWidth") <= width
        assert tab.ask("document.title") == "Images <b>of</b> mine"
        image = np.asarray(Image.open(io.BytesIO(tab.screenshot())).convert("L"))
        assert (image.mean() < 80) == (scheme == "dark")
        assert len(np.unique(image)) > 30

    def test_the_whole_map_stays_in_sight_in_another_window(self, tab, page):
        open_page(tab, page, 1400, "light")
        size = {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.wait_for("explorer.view.width <= 500")
        ends = tab.ask(
            "(() => { const {view, points} = explorer; const x = [...points].filter((_, i) => "
            "i % 2 === 0).map((p) => view.scale * p + view.x); "
            "return [Math.min(...x), Math.max(...x), view.width]; })()"
        )
        assert 0 < ends[0] < ends[1] < ends[2]

    def test_the_map_is_never_empty_while_the_window_changes(self, tab, page):
        open_page(tab, page, 1400, "light")
        # An observer that is added later is told later: it sees what the page's own has left.
        tab.ask(
            "(() => { const map = document.getElementById('map'); window.seen = []; "
            "new ResizeObserver(() => seen.push(map.getContext('2d').getImageData("
            "0, 0, map.width, map.height).data.some((value) => value > 0)))"
            ".observe(map.parentElement); })()"
        )
        tab.wait_for("seen.length === 1")
        size = {"width": 900, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.wait_for("seen.length > 1")
        assert all(tab.ask("seen"))

    @pytest.mark.parametrize("width", [1400, 400])
    def test_the_pictures_of_a_small_folder_are_whole(self, tab, tmp_path, width):
        write_page(tmp_path / "map.html", sample(12), draw_sheets(pixels(12), 96))
        open_page(tab, tmp_path / "map.html", width, "light")
        painted = tab.ask(
            "(() => { const map = document.getElementById('map'); const {width, height} = map; "
            "const sum = (...box) => map.getContext('2d').getImageData(...box).data.reduce("
            "(all, value) => all + value, 0); return [sum(0, 0, width, height), "
            "sum(0, 0, width, 1), sum(0, height - 1, width, 1), sum(0, 0, 1, height), "
            "sum(width - 1, 0, 1, height)]; })()"
        )
        assert painted[0] > 0
        assert painted[1:] == [0, 0, 0, 0]  # nothing crosses an edge

    def test_a_click_shows_neighbours_by_both_measures(self, tab, page):
        open_page(tab, page, 1400, "light")
        press(tab, *place_of(tab, 250))
        name = "document.querySelector('#about .name')?.textContent"
        tab.wait_for(f"{name} === 'photo-250.jpg'")
        near = (
            "[...document.querySelectorAll('#near .thumbs')].map((grid) => "
            "[...grid.children].map((button) => Number(button.dataset.index)))"
        )
        assert tab.ask(near) == [[*range(251, 257)], [*range(249, 243, -1)]]
        assert tab.ask("document.querySelectorAll('#near h2').length") == 2
        # Thumbnails are painted: photo-251 is blue.
        colour = (
            "[...document.querySelector('#near canvas').getContext('2d')"
            ".getImageData(30, 30, 1, 1).data]"
        )
        tab.wait_for(f"{colour}[2] > 150")
        tab.ask("document.querySelectorAll('#near button')[2].click()")
        assert tab.ask(name) == "photo-253.jpg"
        assert tab.messages == []

    def test_pointing_shows_a_picture_and_its_class(self, tab, page):
        open_page(tab, page, 1400, "light")
        tab.point(*place_of(tab, 300))
        tab.wait_for("!document.getElementById('hint').hidden")
        words = tab.ask("document.getElementById('hint').textContent")
        assert "photo-300.jpg" in words
        assert "class: red" in words
        assert "predicted label" not in words  # it has none

    def test_the_filter_and_the_legend_choose_images(self, tab, page):
        open_page(tab, page, 1400, "light")
        left = "explorer.shown.reduce((a, b) => a + b)"
        tab.ask(
            "(() => { const f = document.getElementById('filter'); f.value = 'Photo-39'; "
            "f.dispatchEvent(new Event('input')); })()"
        )
        tab.wait_for(f"{left} === 10")  # photo-39 and photo-390 to photo-398
        tab.ask("[...document.querySelectorAll('#legend button')].at(-1).click()")
        assert tab.ask(left) == 5
        tab.ask(
            "(() => { const f = document.getElementById('filter'); f.value = ''; "
            "f.dispatchEvent(new Event('input')); })()"
        )
        tab.wait_for(f"{left} === 200")

    def test_every_column_and_subnetwork_colours(self, tab, page):
        open_page(tab, page, 1400, "dark")
        options = tab.ask("[...document.getElementById('colour').options].map((o) => o.value)")
        assert options == ["0", "1", "2", "subnetwork-0", "subnetwork-1"]
        for option in options:
            tab.ask(
                "(() => { const menu = document.getElementById('colour'); "
                f"menu.value = '{option}'; menu.dispatchEvent(new Event('change')); }})()"
            )
            assert tab.ask("document.getElementById('legend').children.length") > 1
            title = "document.getElementById('colour').selectedOptions[0].textContent"
            head = "document.getElementById('legend').firstChild.textContent"
            assert tab.ask(f"{head}.endsWith({title})")  # a legend says what it is of
        tab.ask(
            "(() => { const menu = document.getElementById('subnetwork'); "
            "menu.value = '1'; menu.dispatchEvent(new Event('change')); })()"
        )
        highest = "[...document.querySelectorAll('#highest button')].map((b) => b.dataset.index)"
        assert tab.ask(highest) == ["396", "397", "398", "399"]
        assert tab.messages == []

    def test_a_lasso_selects_and_saves_a_table(self, tab, page):
        open_page(tab, page, 1400, "light")
        tab.ask("document.getElementById('lasso').click()")
        x, y = place_of(tab, 399)
        around = [(x - 6, y - 6), (x + 6, y - 6), (x + 6, y + 6), (x - 6, y + 6), (x - 6, y - 6)]
        press(tab, *around[0], *around[1:])
        tab.wait_for("!document.getElementById('selection').hidden")
        rows = list(csv.reader(io.StringIO(tab.ask("explorer.table()"))))
        assert rows[0] == ["image", "class", "predicted label", "confidence"]
        assert [f"'=odd,{STRANGE}.jpg", "blue", "no label", "1"] in rows[1:]
        count = tab.ask("explorer.chosen.reduce((a, b) => a + b)")
        assert len(rows) - 1 == count == int(tab.ask("document.getElementById('chosen').innerText"))
        assert count < 20
        tab.ask("document.getElementById('clear').click()")
        assert tab.ask("document.getElementById('selection').hidden")
        assert tab.messages == []

    def test_labels_are_given_and_saved(self, tab, page):
        open_page(tab, page, 1400, "light")
        saved = "[...explorer.labelTable().trim().split('\\n')]"
        assert tab.ask(saved) == ["image,label", "photo-5.jpg,old"]  # given before
        give = (
            "((label) => {{ document.getElementById('label').value = label; "
            "document.getElementById('give').requestSubmit(); }})('{}')"
        )
        press(tab, *place_of(tab, 250))
        tab.wait_for("!document.getElementById('give').hidden")
        assert "this image" in tab.ask("document.getElementById('give').innerText")
        tab.ask(give.format("red, dark"))
        assert "your label" in tab.ask("document.getElementById('about').innerText")
        tab.ask("(explorer.chosen[7] = explorer.chosen[9] = 1, explorer.showSelection())")
        assert "2 selected" in tab.ask("document.getElementById('give').innerText")
        tab.ask(give.format("blue"))
        lines = ["photo-7.jpg,blue", "photo-9.jpg,blue", 'photo-250.jpg,"red, dark"']
        assert tab.ask(saved) == ["image,label", "photo-5.jpg,old", *lines]
        assert "4 labelled by you" in tab.ask("document.getElementById('saving').innerText")
        tab.ask("explorer.open(7)")  # nothing is selected any more: an empty label takes it back
        tab.ask(give.format(""))
        assert tab.ask(f"{saved}.length") == 4
        tab.ask("document.getElementById('save-labels').click()")  # else leaving the page asks
        assert tab.messages == []

    def test_images_to_label_follow_each_other(self, tab, tmp_path):
        given = sample(400)._replace(suggested=(5, 250), queue=(250, 5, 3, 300))  # 5 has a label
        page = tmp_path / "few.html"
        write_page(page, given, draw_sheets(pixels(400), choose_thumbnail_side(400)))
        open_page(tab, page, 1400, "light")
        name = "document.querySelector('#about .name')?.textContent"
        left = "document.getElementById('queue').innerText"
        assert "3 left" in tab.ask(left)
        form = "getComputedStyle(document.getElementById('give')).display"
        assert tab.ask(form) == "none"  # until an image is open
        tab.ask("document.getElementById('next').click()")
        assert tab.ask(form) == "flex"
        assert tab.ask(name) == "photo-250.jpg"
        tab.ask("document.getElementById('next').click()")  # passes over it
        assert tab.ask(name) == "photo-3.jpg"
        assert tab.ask("document.activeElement.id") == "label"
        tab.ask("document.getElementById('label').value = 'new'")
        tab.ask("document.getElementById('give').requestSubmit()")
        assert tab.ask(name) == "photo-300.jpg"
        names = "[...document.querySelectorAll('#names button')]"
        assert tab.ask(f"{names}.map((button) => button.textContent)") == ["new", "old"]
        tab.ask(f"{names}[1].click()")
        assert tab.ask(name) == "photo-250.jpg"  # comes again
        tab.ask(f"{names}[0].click()")
        assert "all are labelled" in tab.ask(left)
        lines = ["image,label,suggested", "photo-3.jpg,new,", "photo-5.jpg,old,yes"]
        lines += ["photo-250.jpg,new,yes", "photo-300.jpg,old,"]
        assert tab.ask("explorer.labelTable().trim().split('\\n')") == lines
        tab.ask("document.getElementById('save-labels').click()")
        assert tab.messages == []

    def test_an_image_to_label_is_shown_large_and_whole(self, tab, tmp_path):
        given = sample(400)._replace(large={3: encode_jpeg(Image.new("RGB", (320, 200), "red"))})
        page = tmp_path / "few.html"
        write_page(page, given, draw_sheets(pixels(400), choose_thumbnail_side(400)))
        for width in (1400, 400):
            open_page(tab, page, width, "dark")
            tab.ask("explorer.open(3)")
            tab.wait_for("document.querySelector('#about img')?.naturalWidth === 320", 10)
            box = "document.querySelector('#about img').getBoundingClientRect()"
            assert (tab.ask(f"{box}.width"), tab.ask(f"{box}.height")) == (320, 200)
            assert tab.ask("document.documentElement.scrollWidth <= window.innerWidth")
            tab.ask("explorer.open(4)")
            assert tab.ask("document.querySelector('#about img')") is None
        assert tab.messages == []

    def test_the_wheel_zooms_until_pictures_appear(self, tab, page):
        open_page(tab, page, 1400, "light")
        x, y = place_of(tab, 200)
        tab.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-1600)
        tab.wait_for(f"Math.abs(explorer.view.scale) > 2000 && {DRAWN} > 1")
        after = place_of(tab, 200)
        # What one points at stays there; the place is told in whole pixels, then enlarged.
        assert after == pytest.approx((x, y), abs=15.0)
        x, y = after
        colour = (
            "(() => { const c = document.getElementById('map'), b = c.getBoundingClientRect(); "
            f"return [...c.getContext('2d').getImageData({x} - b.x, {y} - b.y, 1, 1).data]; }})()"
        )
        tab.wait_for(f"{colour}[0] > 150 && {colour}[2] < 90")  # photo-200 is red


@in_a_browser
def test_ten_thousand_images(tab, tmp_path):
    (sheet,) = draw_sheets(pixels(PER_SHEET), choose_thumbnail_side(10_000))
    write_page(tmp_path / "map.html", sample(10_000), [sheet] * 10)
    open_page(tab, tmp_path / "map.html", 1400, "light")
    press(tab, *place_of(tab, 9_000))
    tab.wait_for("document.querySelectorAll('#near .thumbs button').length === 12")
    assert tab.messages == []
