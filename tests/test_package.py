"""What a wheel holds, besides Python modules."""

import fnmatch
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "deepbregman"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_the_package_goes_into_the_wheel() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["deepbregman"]
    files = [
        path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    data = [str(path.relative_to(SOURCE)) for path in files if path.suffix != ".py"]
    assert len(data) > 30
    assert [name for name in data if not any(fnmatch.fnmatch(name, p) for p in patterns)] == []


def test_every_folder_of_modules_is_a_package() -> None:
    """setuptools finds packages by their ``__init__.py`` and leaves other folders out."""
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_image_has_all_that_the_build_reads() -> None:
    copied = (ROOT / "Dockerfile").read_text()
    for name in (
        "pyproject.toml",
        "src",
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
    ):
        assert name in copied
    for extra in ("timm", "onnx", "explore"):
        assert extra in copied
        assert extra in PROJECT["project"]["optional-dependencies"]
