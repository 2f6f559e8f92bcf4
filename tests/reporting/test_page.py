"""The report as a user asks for it: what is on the page, what is beside it, and what is refused."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deepbregman.cli import main
from deepbregman.commands.report import Report, report
from deepbregman.reporting import charts
from deepbregman.reporting import page as page_module

ROOT = Path(__file__).parents[2]
MakeRun = Callable[..., Path]
DATA = ("cifar10", "digits")
METRICS = [{"epoch": 1, "total": 1.0}, {"epoch": 2, "total": 0.5}]


class Page(HTMLParser):
    """What a browser would see: text, tags, scripts and attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[tuple[str, str]] = []
        self._script: str | None = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self._script = dict(attrs).get("type") or "code"

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, data))
        else:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def specs(self) -> list[Any]:
        return [json.loads(text) for kind, text in self.scripts if kind == "application/json"]


def folder_of(written: Report) -> Path:
    return written.page.parent


def test_the_page_holds_what_was_measured(sample_page, sample_runs):
    page = Page(sample_page.page)
    assert sample_page.num_bytes == sample_page.page.stat().st_size < 2_000_000
    assert "4 runs in 2 arms" in page.words
    for path in sample_runs:
        rows = json.loads((path / "result.json").read_text())["evaluations"]
        assert any(f"{path.name}: {rows[0]['value']:.2f}" in value for _, value in page.attributes)
    assert len(page.specs()) == sample_page.num_figures == 14
    assert "divergence.weight" in page.words
    assert "objective.temperature" not in page.words  # the same in all arms
    assert "temperature =" in page.words  # in the whole configuration, which is folded away


def test_figures_and_tables_lie_beside_the_page(sample_page):
    folder = folder_of(sample_page)
    page = Page(sample_page.page)
    links = {value for name, value in page.attributes if name == "href" and value[0] != "#"}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert links == files - {"index.html"}
    assert len([link for link in links if link.endswith(".png")]) == sample_page.num_figures
    for path in (folder / "figures").glob("*.png"):
        with Image.open(path) as image:
            assert image.width > 400 * charts.PNG_SCALE
            assert len(image.getcolors(maxcolors=1_000_000) or []) > 20
    assert {path.stem for path in (folder / "tables").glob("*.tex")} == {
        *("evaluations-digits", "fields", "provenance")
    }


def test_the_page_needs_nothing_from_outside(sample_page):
    page = Page(sample_page.page)
    for name, value in page.attributes:
        if name in ("src", "href"):
            assert not re.match(r"[a-z]+:|//", value), value
    code = [text for kind, text in page.scripts if kind == "code"]
    assert len(code) == 2
    (policy,) = [value for name, value in page.attributes if value.startswith("default-src")]
    for text in code:  # each is allowed by what it is, and nothing else is
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'sha256" in policy


def test_names_are_words_and_never_markup(make_run, tmp_path):
    evil = "<script>alert(1)<img src=x onerror=alert(2)>&amp;'\"{{ 7 * 7 }}"
    row = {"protocol": "<b>p", "variant": "</script>", "data": "<i>d", "metric": "top1", "epoch": 1}
    path = make_run(evil, metrics=METRICS, result={"evaluations": [{**row, "value": 12.5}]})
    page = Page(report([path], tmp_path / "out", title="</title><h6>").page)
    assert "onerror" not in [name for name, _ in page.attributes]
    assert page.tags.count("img") == len(page.specs())  # for browsers without scripts
    assert "h6" not in page.tags
    assert page.tags.count("script") == 2 + len(page.specs())
    assert evil in page.words
    assert "</title><h6>" in page.words
    curves = [spec for spec in page.specs() if "values" in spec.get("data", {})]
    assert {point["arm"] for spec in curves for point in spec["data"]["values"]} == {evil}


def test_runs_that_are_not_done_are_shown_as_such(make_run, tmp_path):
    begun = make_run("begun", metrics=METRICS)
    with (begun / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "tot')  # a crash
    done = {"pretrain": {"seconds": 61.0}}
    paths = [
        begun,
        make_run("new", {"seed": 3, "training.epochs": 9}),
        make_run("done", {"training.epochs": 2}, metrics=METRICS, result=done),
    ]
    page = Page(report(paths, tmp_path / "out").page)
    assert "begun: unfinished: epoch 2 of 100" in page.words
    assert "new: unfinished: epoch 0 of 9" in page.words
    assert page.words.count("no accuracy yet") == 2
    assert f"With labels: deepbregman evaluate {paths[0]}" in page.words
    assert f"Without: deepbregman explore {paths[0]} --out map.html" in page.words
    # The monitor of the third never ran, so there are no labels to evaluate with.
    assert page.words.count("no labels") == 1
    assert f"deepbregman label {paths[2]} --out few.csv" in page.words
    assert f"evaluate {paths[2]}" not in page.words
    assert "done: not evaluated" not in page.words
    assert "one seed: no deviation over seeds" not in page.words  # there is nothing to deviate
    assert "differ in more than their method: training.epochs" in page.words


def judged(data: str, **more: Any) -> dict[str, Any]:
    """The result of a run with one evaluation."""
    row = {"protocol": "linear", "variant": "cached features", "metric": "top1", "epoch": 1}
    row |= {"data": data, "value": 90.0, "num_train": 100, "num_test": 50, **more}
    return {"pretrain": {"seconds": 1.0}, "evaluations": [row]}


def test_headlines_of_different_test_sets_are_never_side_by_side_without_words(make_run, tmp_path):
    paths = [
        make_run("a", {"data.source": "here/a.npz"}, result=judged("here/a.npz")),
        make_run("b", {"data.source": "b.npz"}, result=judged("b.npz")),
        make_run("c", {"training.epochs": 7, "data.source": "b.npz"}, result=judged("b.npz")),
    ]
    words = Page(report(paths, tmp_path / "out").page).words
    assert "linear: cached features, n = 1 on 50 test images of a.npz" in words
    callout = (
        "The large numbers cannot be compared: they are of different test images: "
        "a: 50 test images of a.npz; b: 50 test images of b.npz; c: 50 test images of b.npz."
    )
    assert callout in words
    assert words.index(callout) < words.index("n = 1 on 50")
    assert "cannot be compared" not in Page(report(paths[1:], tmp_path / "same").page).words


def test_folders_of_one_name_are_told_apart(make_run, tmp_path):
    """Photos of two clinics may both be in a folder "images"."""
    paths = [
        make_run(name, {"data.source": data}, result=judged(data))
        for name, data in (("a", "/photos/first/images"), ("b", "/photos/second/images"))
    ]
    words = Page(report(paths, tmp_path / "out").page).words
    assert (
        "different test images: a: 50 test images of first/images; b: 50 test images of "
        "second/images." in words
    )
    assert "Evaluations on first/images" in words
    assert "Evaluations on second/images" in words
    assert "data second/images" in words  # in the card


def test_what_accuracies_are_read_against_is_drawn_and_written(make_run, tmp_path):
    run = make_run("a", result=judged("digits", chance=10.5, raw_pixels=84.25))
    written = report([run], tmp_path / "out")
    page = Page(written.page)
    assert "most frequent class 10.50" in page.words
    assert "raw pixels 84.25" in page.words
    assert page.words.index("raw pixels 84.25 %") < page.words.index("Evaluations on")  # the card
    assert "leads every other arm" not in page.words  # there is none
    (spec,) = page.specs()
    (layer,) = [layer for layer in spec["layer"] if "strokeDash" in layer["encoding"]]
    drawn = {point["reference"]: point["value"] for point in layer["data"]["values"]}
    assert drawn == {"most frequent class": 10.5, "raw pixels": 84.25}
    svg = (folder_of(written) / "figures" / "evaluations-digits.svg").read_text()
    assert 'stroke-dasharray="1,3"' in svg
    assert 'stroke-dasharray="6,3"' in svg
    older = make_run("older", result=judged("digits"))
    assert "raw pixels" not in Page(report([older], tmp_path / "older").page).words


@pytest.mark.parametrize(
    ("holdouts", "words"),
    [
        ((0.1,), "accuracy on held-out training images, %"),
        ((0.0,), "accuracy on a tenth of the training images, which were trained on without"),
        ((0.1, 0.0), "accuracy on held-out training images, %; of run-1: accuracy on a tenth"),
    ],
)
def test_the_monitor_says_which_images_it_judges(make_run, tmp_path, holdouts, words):
    metrics = [{"epoch": 1, "knn": 50.0}]
    paths = [
        make_run(f"run-{place}", {"data.holdout": share}, metrics=metrics)
        for place, share in enumerate(holdouts)
    ]
    assert f"kNN monitor {words}" in Page(report(paths, tmp_path / "out").page).words


def test_a_study(make_run, make_study, tmp_path):
    study = make_study("kappa-cifar10")
    for arm, seed in product((5, 200), (0, 1)):
        changes = {"seed": seed, "divergence.num_subnetworks": arm}
        run = make_run(f"{arm}-seed{seed}", changes, metrics=METRICS)
        (study / "runs").mkdir(exist_ok=True)
        run.rename(study / "runs" / run.name)
    written = report([study], tmp_path / "out")
    tables = sorted(path.stem for path in (folder_of(written) / "tables").glob("*.csv"))
    names = ("arms", "differences", "fields", "provenance")  # no table takes another's file
    assert tables == [f"kappa-cifar10-{name}" for name in names]
    assert written.num_tables == len(tables)
    text = (folder_of(written) / "tables" / "kappa-cifar10-fields.csv").read_text()
    assert "divergence.num_subnetworks,5,200" in text
    page = Page(written.page)
    assert "How many subnetworks?" in page.words
    assert "91.25 ± 0.50" in page.words
    assert "published: the paper" in page.words
    assert "85.2" in page.words
    assert "not an arm" in page.words
    assert "n = 3, SimCLR, not in the paper" in page.words
    assert "curves, diagnostics, configuration and provenance of its runs" in page.words
    assert "Difference to SimCLR" in page.words  # "to none" would say that there is none
    assert "+1.25 ± 0.25 [+0.63, +1.87]" in page.words
    assert "bar: 95 % interval of it, n = 3" in page.words
    assert sorted(path.name for path in (folder_of(written) / "figures").iterdir()) == [
        f"kappa-cifar10-{name}.{kind}"
        for name in ("arms", "differences", "total")
        for kind in ("pdf", "png", "svg")
    ]
    table = (folder_of(written) / "tables" / "kappa-cifar10-arms.tex").read_text()
    assert r"200 & $92.50 \pm 0.50$ & \emph{92.8} \\" in table
    lines = (folder_of(written) / "tables" / "kappa-cifar10-arms.csv").read_text().splitlines()
    assert "5,published: the paper,85.2,,,,yes,no,a table" in lines
    table = (folder_of(written) / "tables" / "kappa-cifar10-differences.tex").read_text()
    assert r"5 & $+1.25 \pm 0.25\ [+0.63, +1.87]$ \\" in table
    text = (folder_of(written) / "tables" / "kappa-cifar10-differences.csv").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("5,")]
    assert [round(float(end), 2) for end in line.split(",")[-2:]] == [0.63, 1.87]


def test_published_values_stand_only_beside_the_same_data(make_study, tmp_path):
    kinds = ("line", "bars", "drops")
    paths = [make_study(f"{kind}-{data}", kind, data) for kind in kinds for data in DATA]
    written = report(paths, tmp_path / "out")
    page = Page(written.page)
    assert page.words.count("published: the paper") == len(kinds)
    assert "n = 3, supervised" not in page.words
    for kind, data in product(kinds, DATA):
        svg = (folder_of(written) / "figures" / f"{kind}-{data}-arms.svg").read_text()
        assert (">SimCLR<" in svg) == (kind != "drops")  # what others are seen against
        assert ">with divergence<" in svg
    for path in (folder_of(written) / "figures").glob("*.svg"):
        assert 'stroke="black"' not in path.read_text()  # which a dark page would hide


def test_a_study_whose_runs_are_lost(make_study, tmp_path):
    study = make_study("kappa")
    results = json.loads((study / "results.json").read_text())
    names = [arm["arm"] for arm in results["arms"]]
    results["cells"] = [{"arm": name, "seed": seed} for name in names for seed in (0, 1)]
    (study / "results.json").write_text(json.dumps(results))
    page = Page(report([study], tmp_path / "out").page)
    assert "runs 6" in page.words
    assert "91.25 ± 0.50" in page.words


def test_methods_whose_seeds_diverged_say_so(tmp_path):
    study = ROOT / "results" / "studies" / "methods"
    results = json.loads((study / "results.json").read_text())
    results["arms"] = results["arms"][:2]  # simclr, alone and with the divergence
    for arm, number in zip(results["arms"], (1, 2), strict=True):
        arm["num_diverged"] = number
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "study.json").write_text("{}")
    (folder / "results.json").write_text(json.dumps(results))
    page = Page(report([folder], tmp_path / "out").page)
    assert "simclr 1 diverged, 2 diverged with the divergence" in page.words


def test_supervised_arms_say_so(make_study, tmp_path):
    first, second = make_study("a"), make_study("b", data="digits")
    results = json.loads((first / "results.json").read_text())
    results["study"]["arms"][2]["supervised"] = True
    results["arms"][1]["metrics"]["linear, cached features"]["n"] = 2
    names = [f"Deep Divergence, moment, contrastive (supervised) {n}" for n in range(5)]
    points = [{**results["arms"][2], "arm": f"d{n}", "series": n} for n in names]
    (first / "results.json").write_text(
        json.dumps({**results, "arms": [*results["arms"], *points]})
    )
    written = report([first, second], tmp_path / "out")
    page = Page(written.page)
    assert "n = 3, supervised" in page.words
    assert "91.25 ± 0.50 n = 2 85.2" in page.words  # fewer seeds than others
    assert "How many subnetworks? (b)" in page.words  # two of one question are told apart
    svg = (folder_of(written) / "figures" / "a-arms.svg").read_text()
    for name in names:
        assert f">{name}<" in svg  # not cut short


def test_a_search_and_other_studies(tmp_path):
    search, other = tmp_path / "search", tmp_path / "plane"
    for folder in (search, other):
        folder.mkdir()
    trials = [
        {"trial": n, "state": "complete", "value": value, "diverged": False, "values": values}
        for n, (value, values) in enumerate(
            [(90.0, {"a.b": 0.5, "c.d": "x"}), (95.5, {"a.b": 2.0, "c.d": "y"})]
        )
    ]
    trials.append({"trial": 2, "state": "pruned", "value": None, "diverged": False, "values": {}})
    known = {"recipe": "paper", "data": "digits", "epochs": 3, "objective": "knn", "sampler": "gp"}
    record = {**known, "space": ["a.b=0.1:10:log", "c.d=x,y"], "importance": None, "trials": trials}
    (search / "trials.json").write_text(json.dumps(record))
    rows = [{"method": "<u>", "value": 1.5, "points": [1, 2]}]
    outcome = {
        **{"title": "A plane", "rows": rows, "notes": "Long words."},
        "settings": {"num_points": 60, "centres": [[0.0, 1.0]]},
        "provenance": {"command": ["deepbregman", "study", "plane"], "device": "a device"},
    }
    (other / "results.json").write_text(json.dumps(outcome))
    Image.new("RGB", (20, 20), "red").save(other / "map.png")
    written = report([search, other], tmp_path / "out")
    page = Page(written.page)
    assert "2 complete, 1 pruned" in page.words
    assert page.words.index("trial 1 95.50 2 y") < page.words.index("trial 0 90.00 0.5 x")
    assert "A plane" in page.words
    assert "<u> 1.5" in page.words
    for fact in ("num points 60", "device a device", "command deepbregman study plane"):
        assert fact in page.words
    assert "Long words." in page.words
    assert "notes Long words." not in page.words
    pictures = [value for name, value in page.attributes if value.startswith("data:image/png")]
    assert len(pictures) == 1
    assert (folder_of(written) / "figures" / "plane-map.png").is_file()


def test_the_command(make_run, tmp_path, capsys):
    out = tmp_path / "deep" / "report"
    main(["report", str(make_run("a", metrics=METRICS)), "--out", str(out), "--title", "Mine"])
    assert (
        f"report: {out / 'index.html'} (0.9 MB; 1 figure and 1 table"
        in capsys.readouterr().out.replace("\n", "")
    )
    assert "<title>Mine</title>" in (out / "index.html").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["figures", "index.html", "tables"]


def refused(arguments: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    assert stopped.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_refusals(sample_runs, tmp_path, capsys, make_study):
    run, out = str(sample_runs[0]), tmp_path / "out"
    empty = tmp_path / "empty"
    empty.mkdir()
    words = refused([run, str(empty), "--out", str(out)], capsys)
    assert f"{empty} is neither a run nor a study" in words
    assert words.endswith("name folders that deepbregman printed")
    folder = str(sample_runs[0].parent)
    assert f"name the runs in it, {folder}/*" in refused([folder, "--out", str(out)], capsys)
    assert "no folder was named" in refused(["--out", str(out)], capsys)
    broken = make_study("broken")
    (broken / "results.json").write_text('{"study": {}, "arms": [{}]}')
    assert "not of a study" in refused([str(broken), "--out", str(out)], capsys)
    (broken / "results.json").write_text("{")
    assert "cannot be used" in refused([str(broken), "--out", str(out)], capsys)
    twice = [str(make_study("a/same")), str(make_study("b/same"))]
    assert "another study of the name same" in refused([*twice, "--out", str(out)], capsys)
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    assert "exists and is not an empty folder" in refused([run, "--out", str(out)], capsys)
    file = tmp_path / "page.html"
    words = refused([run, "--out", str(file)], capsys)
    assert f"such as {tmp_path / 'page'}" in " ".join(words.split())
    assert not file.exists()
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("error", "words"),
    [(KeyboardInterrupt(), "^$"), (OSError(28, "No space left on device"), "No space.*out'")],
)
def test_whole_or_nothing(error, words, make_run, tmp_path, monkeypatch):
    def fail(folder: Path, *arguments: Any) -> None:
        (folder / "index.html").touch()
        raise error

    monkeypatch.setattr(page_module, "write_page", fail)
    with pytest.raises(type(error), match=words):
        report([make_run("a", metrics=METRICS)], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_an_empty_folder_is_filled_and_a_run_given_twice_counts_once(make_run, tmp_path):
    run = make_run("one")
    out = tmp_path / "out"
    out.mkdir()
    page = Page(report([run, f"{run}/", run], out).page)
    assert "1 run" in page.words
    assert "2 runs" not in page.words


@pytest.mark.parametrize("script", ["a='</script>'", "b='<!-- x'", "c='</SCRIPT >'"])
def test_a_script_cannot_end_the_page_s_own(script):
    assert not re.search(r"</script|<!--", page_module.make_inline(script), flags=re.IGNORECASE)
