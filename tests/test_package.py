"""What a wheel holds, besides Python modules."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "deepbregman"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_the_package_goes_into_the_wheel():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["deepbregman"]
    files = [
        path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    data = [str(path.relative_to(SOURCE)) for path in files if path.suffix != ".py"]
    assert len(data) > 30
    assert [name for name in data if not any(fnmatch.fnmatch(name, p) for p in patterns)] == []


def test_every_folder_of_modules_is_a_package():
    """setuptools finds packages by their ``__init__.py`` and leaves other folders out."""
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_pythons_of_the_package_are_those_of_the_page():
    page = (ROOT / "docs" / "install.md").read_text()
    (named,) = re.findall(r"^- \*\*Python\*\* (.*?)\. ", page, re.MULTILINE)
    languages = [line.split(" :: ") for line in PROJECT["project"]["classifiers"]]
    assert re.findall(r"3\.\d+", named) == [words[-1] for words in languages]


def test_the_image_has_all_that_the_build_reads():
    """What the build reads is copied, and what is copied is sent to Docker."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    read = ["pyproject.toml", "src", PROJECT["project"]["readme"]]
    assert sorted(copied) == sorted([*read, *PROJECT["project"]["license-files"]])
    sent = (ROOT / ".dockerignore").read_text().split("\n*\n")[1].splitlines()
    assert sorted(line[1:] for line in sent if line.startswith("!")) == sorted(copied)


def test_the_extras_of_the_image_exist():
    (extras,) = re.findall(r"/source\[([\w,]+)\]", (ROOT / "Dockerfile").read_text())
    assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


@pytest.mark.slow
def test_a_wheel_made_from_the_source_archive_runs_without_the_checkout(tmp_path):
    pytest.importorskip("setuptools", "77")  # as the build needs it; this one takes no other
    copy, dist, site = tmp_path / "copy", tmp_path / "dist", tmp_path / "site"
    shutil.copytree(SOURCE, copy / "src" / "deepbregman")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = dist.glob("*.whl")
    assert list(dist.glob("*.tar.gz"))
    shutil.unpack_archive(wheel, site, format="zip")
    assert (site / "deepbregman" / "cli.py").is_file()
    words = "pretrain digits --training.epochs 1 --run run"
    done = subprocess.run(
        [sys.executable, "-m", "deepbregman", *words.split()],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "next: deepbregman evaluate run" in done.stdout
