"""The studies: a file each, which holds one as ``STUDY``. Adding a study is adding a file."""

import importlib
import pkgutil
from collections.abc import Iterable

from deepbregman.errors import require_known
from deepbregman.studies.definition import Search, Study


def load_catalogue() -> dict[str, Study | Search]:
    """Return every study by its name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    entries: list[Study | Search] = [
        importlib.import_module(f"{__name__}.{name}").STUDY for name in modules
    ]
    return {entry.name: entry for entry in entries}


def find_study(name: str, also: Iterable[str] = ()) -> Study | Search:
    """Return a study by its name; the error also lists names outside of the catalogue."""
    known = load_catalogue()
    if name not in known:
        require_known("study", name, [*known, *also])
    return known[name]
