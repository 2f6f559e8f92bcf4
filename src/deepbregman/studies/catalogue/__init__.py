"""The studies: a file each, which holds one as ``STUDY``. Adding a study is adding a file."""

import importlib
import pkgutil

from deepbregman.errors import UserError, nearest
from deepbregman.studies.definition import Entry


def catalogue() -> dict[str, Entry]:
    """Return every study by its name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    entries = [importlib.import_module(f"{__name__}.{name}").STUDY for name in modules]
    return {entry.name: entry for entry in entries}


def find_study(name: str) -> Entry:
    """Return a study by its name."""
    known = catalogue()
    if name not in known:
        raise UserError(f"study {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    return known[name]
