"""A configuration as TOML, as nested tables and as fields with dotted names; the recipes."""

import dataclasses
import importlib.resources
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from deepbregman.errors import UserError, abbreviate, suggest

from .methods import METHODS, ObjectiveSettings, SimCLRSettings
from .rules import Section
from .sections import OPTIONAL, SECTIONS, Config


def _find_section(name: str, values: dict[str, Any]) -> type[Section]:
    """Return the class for a table; the objective's depends on its name."""
    if name != ObjectiveSettings.table:
        return SECTIONS[name]
    method = values.get("name", SimCLRSettings.name)
    if not isinstance(method, str) or method not in METHODS:
        guess = suggest(method, METHODS) if isinstance(method, str) else ""
        raise UserError(
            f"objective.name is {abbreviate(method)}: it must be one of {', '.join(METHODS)}{guess}"
        )
    return METHODS[method]


def list_fields() -> list[str]:
    """List the dotted names of all fields of tables, those of every method included."""
    tables = [*SECTIONS.items(), *((ObjectiveSettings.table, kind) for kind in METHODS.values())]
    names = (f"{table}.{each.name}" for table, kind in tables for each in dataclasses.fields(kind))  # type: ignore[arg-type]  # mypy does not see that sections are dataclasses
    return list(dict.fromkeys(names))


def _suggest_field(name: str) -> str:
    """Say which field an unknown one may be; its table is easily forgotten."""
    names = list_fields()
    namesakes = [f"{full!r}" for full in names if full.endswith(f".{name}")]
    if namesakes:
        return f"; did you mean {' or '.join(namesakes)}?"
    top = [each.name for each in dataclasses.fields(Config)]
    rule = f": it must be seed or a field of {', '.join(SECTIONS)}, such as training.epochs"
    return suggest(name, [*top, *names]) or rule


def from_dict(values: dict[str, Any]) -> Config:
    """Build a configuration from nested tables, as TOML gives them; the rest takes its default."""
    known = [field.name for field in dataclasses.fields(Config)]
    parts: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown field {abbreviate(name)}{_suggest_field(name)}")
        if name not in SECTIONS or (value is None and name in OPTIONAL):
            parts[name] = value
            continue
        if not isinstance(value, dict):
            raise _refuse_table(name, value)
        kind: type[Any] = _find_section(name, value)
        fields = [field.name for field in dataclasses.fields(kind)]
        for key in value:
            if key not in fields:
                names = [f"{name}.{field}" for field in fields]
                guess = suggest(f"{name}.{key}", names) or f"; {name} has {', '.join(fields)}"
                raise UserError(f"unknown field {abbreviate(f'{name}.{key}')}{guess}")
        parts[name] = kind(**value)
    return Config(**parts)


def _refuse_table(name: str, value: object) -> UserError:
    return UserError(f"{name} is {abbreviate(value)}: it is a table of fields, written [{name}]")


def override(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with fields changed by their dotted names.

    Another ``objective.name`` brings the defaults of that method.

    Args:
        changes: such as ``{"training.epochs": 10, "seed": 1, "weak_views": None}``.
    """
    values = to_dict(config)
    if changes.get("objective.name", config.objective.name) != config.objective.name:
        values["objective"] = {}
    for name, value in changes.items():
        section, _, field = name.partition(".")
        if field and section in SECTIONS:
            table = values.setdefault(section, {})
            if not isinstance(table, dict):  # another change of these has replaced it
                raise _refuse_table(section, table)
            table[field] = value
        else:
            values[name] = value
    return from_dict(values)


def to_dict(config: Config) -> dict[str, Any]:
    """Turn a configuration into nested tables of plain values; a table that is off is left out."""
    values: dict[str, Any] = {}
    for key, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            values[key] = {
                name: list(field) if isinstance(field, tuple) else field
                for name, field in value.items()
            }
        elif value is not None:
            values[key] = value
    return values


def fields_of(config: Config) -> dict[str, Any]:
    """Return the value of every field by its dotted name."""
    flat: dict[str, Any] = {}
    for key, value in to_dict(config).items():
        if isinstance(value, dict):
            flat |= {f"{key}.{name}": field for name, field in value.items()}
        else:
            flat[key] = value
    return flat


def differing_fields(*configs: Config) -> dict[str, tuple[Any, ...]]:
    """Return the fields in which configurations are not all equal, with the value of each.

    A field that a configuration does not have, such as another method's, is None there.
    """
    flat = [fields_of(config) for config in configs]
    names = dict.fromkeys(name for each in flat for name in each)
    columns = {name: tuple(each.get(name) for each in flat) for name in names}
    return {
        name: values
        for name, values in columns.items()
        if any(value != values[0] for value in values)
    }


def to_toml(config: Config) -> str:
    """Write a configuration as a complete TOML document."""
    return tomli_w.dumps(to_dict(config))


def from_toml(text: str, origin: str) -> Config:
    """Read a configuration; ``origin`` names the document in errors."""
    try:
        return from_dict(tomllib.loads(text))
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    except (ValueError, RecursionError) as error:  # wrong syntax, or a limit of the reader
        raise UserError(f"{origin} is not valid TOML: {error}") from None


def recipes() -> dict[str, str]:
    """Return the text of every named recipe."""
    folder = importlib.resources.files("deepbregman") / "recipes"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        f.name.removesuffix(".toml"): f.read_text(encoding="utf-8")
        for f in files
        if f.name.endswith(".toml")
    }


def load_recipe(name: str) -> Config:
    """Load a recipe by its name or from a ``.toml`` file."""
    known = recipes()
    if name in known:
        return from_toml(known[name], f"recipe {name}")
    path = Path(name)
    if name and path.is_dir():
        used = path / "config.toml"
        fix = "name a recipe, such as best; if it holds images, add "
        fix += f"--data {shlex.quote(name)}, in Python data={name!r}"
        if used.is_file():
            fix = f"for the settings of this run, name {str(used)!r}"
        raise UserError(f"recipe {name!r} is a folder: {fix}")
    if not path.is_file():
        file = f"{name}.toml"
        raise UserError(
            f"recipe {name!r} is neither one of {', '.join(known)} nor a .toml file that exists"
            f"{suggest(name, [file] if Path(file).is_file() else known)}"
        )
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {name!r} is not a text file in UTF-8: {error.reason}") from None
