"""Tables as CSV, LaTeX and Markdown, read back by what reads them."""

import csv
import io
import re
import shutil
import string
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepbregman.reporting.tables import (
    Cell,
    Row,
    Table,
    escape_latex,
    make_cell,
    to_csv,
    to_latex,
    to_markdown,
)
from deepbregman.statistics import Summary


def summary(mean: float, deviation: float | None, n: int) -> Summary:
    return {"mean": mean, "deviation": deviation, "n": n}


SIGNS = "±×−–—²≤≥κλστφψΣ"  # noqa: RUF001  # as is meant
TABLE = Table(
    "key",
    "Runs & more",
    "arm",
    ("linear: k=1", "50% of it"),
    (
        Row("a_b", (Cell(summary(91.234, 0.5, 3), is_best=True), Cell(summary(1.0, None, 1)))),
        Row("<script>", (Cell(text="—"), Cell(summary(2.0, 0.125, 5), over="draws"))),
        Row("Ours", (Cell(text="93.2"), Cell()), is_published=True, note="a table"),
    ),
    "Mean ± deviation",
)


def test_latex():
    lines = to_latex(TABLE).splitlines()
    assert r"\caption{Runs \& more. Mean $\pm$ deviation.}" in lines
    assert r"\begin{tabular}{lrr}" in lines
    assert r"arm & linear: k=1 & 50\% of it \\" in lines
    assert r"a\_b & $\mathbf{91.23} \pm 0.50$ & $1.00$ \\" in lines
    assert r"\textless{}script\textgreater{} & \textemdash{} & $2.00 \pm 0.12$ \\" in lines
    published = lines.index(r"\emph{Ours (published)} & 93.2 &  \\")
    assert lines[published - 1] == r"\midrule"
    asked = to_latex(TABLE._replace(title="How many?"))  # as studies are called
    assert r"\caption{How many? Mean $\pm$ deviation.}" in asked
    rules = [line for line in lines if line.endswith("rule")]
    assert rules == [r"\toprule", r"\midrule", r"\midrule", r"\bottomrule"]


def test_the_best_and_a_difference_in_all_three_forms():
    change = {**summary(-0.5, 0.25, 3), "interval": [-1.25, 0.251]}
    cells = (Cell(summary(91.234, 0.5, 3), is_best=True), Cell(change))
    table = TABLE._replace(rows=(Row("a", cells), Row("b", (Cell(), Cell(summary(1.0, 0.1, 3))))))
    assert "| a | **91.23 ± 0.50** | -0.50 ± 0.25 [-1.25, +0.25] |" in to_markdown(table)
    latex = r"a & $\mathbf{91.23} \pm 0.50$ & $-0.50 \pm 0.25\ [-1.25, +0.25]$ \\"
    assert latex in to_latex(table).splitlines()
    first, second, third = csv.DictReader(io.StringIO(to_csv(table)))
    assert (second["value"], second["95 % from"], second["95 % to"]) == ("-0.5", "-1.25", "0.251")
    assert {row["95 % from"] + row["95 % to"] for row in (first, third)} == {""}


def test_an_interval_over_seeds_and_images_goes_before_one_over_seeds():
    change = {**summary(0.5, 0.25, 3), "interval": [0.25, 0.75], "over_images": [-1.0, 2.0]}
    assert make_cell(change).bounds == "[-1.00, +2.00]"
    assert make_cell(change | {"over_images": None}).bounds == "[+0.25, +0.75]"


def test_a_mean_over_fewer_seeds_than_others_says_so():
    cells = (Cell(summary(90.0, 0.5, 2)), Cell(summary(80.0, 0.5, 5), over="draws"))
    table = TABLE._replace(rows=(TABLE.rows[0], Row("b", cells)))
    assert "| b | 90.00 ± 0.50 (n=2) | 80.00 ± 0.50 |" in to_markdown(table)
    assert r"b & $90.00 \pm 0.50$ (n=2) & $80.00 \pm 0.50$ \\" in to_latex(table)


def test_remarks_stand_after_the_name():
    """A mean over runs of which some diverged must not look like the others."""
    rows = (Row("5", (Cell(text="90"), Cell()), marks=("2 diverged", "supervised")),)
    table = TABLE._replace(rows=rows)
    assert r"5 (2 diverged) (supervised) & 90 &  \\" in to_latex(table)
    assert "| 5 (2 diverged) (supervised) | 90 |  |" in to_markdown(table)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=30))
def test_escaped_words_hold_no_character_that_latex_acts_on(words):
    known = r"\\text\w+\{\}|\\[&%$#_{}]|\{[\[*]\}|-\{\}|\$(\\\w+|-|\^2)\$"
    rest = re.sub(known, "", escape_latex(words))
    assert not set(rest) & set("&%$#_{}~^\\<>|[*")
    assert rest.isprintable()  # pdflatex stops at a control character
    assert "--" not in escape_latex(words)  # it would print one dash


def test_signs_of_the_paper_are_written_for_every_latex():
    assert escape_latex(SIGNS).isascii()
    assert escape_latex("κ ≥ 20 ± σ²") == r"$\kappa$ $\geq$ 20 $\pm$ $\sigma$$^2$"
    assert escape_latex("run --data 'x*' [y]") == r"run -{}-data 'x{*}' {[}y]"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex")
def test_latex_compiles(tmp_path):
    r"""A row that begins with [ or * would be an argument of the \\ before it."""
    names = [SIGNS, string.printable, "[1pt]", "*", "a\x00\x1b\u200b\ufeffb", "", "é ü ß"]
    rows = tuple(Row(name, (Cell(text=name), TABLE.rows[0].cells[0])) for name in names)
    table = to_latex(TABLE._replace(rows=(*TABLE.rows, *rows), caption=SIGNS))
    file = tmp_path / "table.tex"
    file.write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n"
        f"{table}\\end{{document}}\n",
        encoding="utf-8",
    )
    words = ("pdflatex", "-draftmode", "-halt-on-error", "-interaction=nonstopmode", file.name)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]


def test_csv_is_read_back_to_the_bit():
    rows = list(csv.DictReader(io.StringIO(to_csv(TABLE))))
    assert [(row["arm"], row["measure"]) for row in rows] == [
        ("a_b", "linear: k=1"),
        ("a_b", "50% of it"),
        ("<script>", "linear: k=1"),
        ("<script>", "50% of it"),
        ("Ours", "linear: k=1"),
    ]
    assert [row["value"] for row in rows] == ["91.234", "1.0", "—", "2.0", "93.2"]
    assert [row["deviation"] for row in rows] == ["0.5", "", "", "0.125", ""]
    assert [row["n"] for row in rows] == ["3", "1", "", "5", ""]
    assert [row["deviation over"] for row in rows] == ["seeds", "", "", "draws", ""]
    assert [row["published"] for row in rows] == ["no", "no", "no", "no", "yes"]
    assert [row["clearly best"] for row in rows] == ["yes", "no", "no", "no", "no"]


@pytest.mark.parametrize(
    ("name", "read"), [('say "x", y', 'say "x", y'), ("two\nlines", "two\nlines"), ("=1", "'=1")]
)
def test_csv_keeps_any_name_and_runs_none(name, read):
    table = TABLE._replace(rows=(Row(name, (Cell(text="1"), Cell(text="2"))),))
    assert list(csv.reader(io.StringIO(to_csv(table)))) == [
        ["arm", "linear: k=1", "50% of it"],
        [read, "1", "2"],
    ]
