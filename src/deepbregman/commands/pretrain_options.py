"""The options of a pretrain command line: which recipe and which fields they mean."""

import dataclasses
import shlex
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from deepbregman.config import OPTIONAL, Config, differing_fields, fields_of, override, recipes
from deepbregman.errors import UserError, notify, suggest
from deepbregman.runs import CHANGEABLE, Run, is_run, list_changeable, was_saturated
from deepbregman.terminal import choose_budget, count_words, parse_budget

AUTO = "auto"
"""The recipe whose settings are chosen by the images and the machine."""
LONG_ENOUGH = 0.5
"""A run with less than this share of the epochs that help says how to train longer."""
ALIASES = {
    "data": "data.source",
    "skip_unreadable": "data.skip_unreadable",
    "stop_when_saturated": "training.stop_when_saturated",
}
"""Fields by the names of their short options."""


def list_fields(words: list[str]) -> dict[str, str]:
    """Return the options of a command line that set fields, each with the field's dotted name."""
    tables = {field.name for field in dataclasses.fields(Config)}
    found = {}
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        name = option[2:].replace("-", "_").removeprefix("no_").replace(".no_", ".")
        name = ALIASES.get(name, name)
        if name.partition(".")[0] in tables:
            found[option] = name
    return found


def list_words_of_new_runs(words: list[str]) -> list[str]:
    """Return the words that only a new run takes: a first name, --run and --budget."""
    named = [word for word in words[:1] if not word.startswith("-")]
    return named + [option for option in ("--run", "--budget") if option in _pair_options(words)]


def find_resumed_run(words: list[str]) -> Run:
    """Open the run after --resume; refuse options of fields that must not change."""
    folder = _pair_options(words)["--resume"]
    if not folder:
        raise UserError("--resume needs the folder of a run: --resume RUN")
    run = Run.open(folder)
    changeable = list_changeable(run.config)
    refused = [option for option, field in list_fields(words).items() if field not in changeable]
    refused += list_words_of_new_runs(words)
    if refused:
        raise UserError(
            f"--resume continues a run with the settings that it has, and {refused[0]} is given: "
            "leave it out, or train on from the weights of the run, with new heads, a new schedule "
            f"and a folder of its own: {suggest_longer(run.path)}"
        )
    return run


def suggest_longer(run: Path, auto: Config | None = None, budget: str = "TIME") -> str:
    """Return the command that trains on from the weights of a run.

    Args:
        auto: a configuration whose data the recipe auto is to train on; None repeats the run's.
    """
    first, length = f"{run}/config.toml", "--training.epochs N"
    if auto is not None:
        first, length = auto.data.source, f"--budget {budget}"
    weights = f"--encoder.weights {shlex.quote(str(run))}"
    return f"`deepbregman pretrain {shlex.quote(first)} {weights} {length} --run NEW`"


def _pair_options(words: list[str]) -> dict[str, str]:
    """Return the value of each option; empty for an option without a value."""
    found = {}
    for place, word in enumerate(words):
        option, has_value, value = word.partition("=")
        after = words[place + 1] if place + 1 < len(words) else ""
        if option.startswith("--"):
            found[option] = value if has_value or after.startswith("--") else after
    return found


def insert_auto(words: list[str]) -> list[str]:
    """Put the recipe ``auto`` before words that name images and no recipe.

    A first word that is neither a recipe nor images is refused.
    """
    options = {word.partition("=")[0] for word in words}
    has_data = bool(options & {"--data", "--data.source"})
    if not words or words[0].startswith("-"):
        return [AUTO, *words] if has_data else words
    spaced = " ".join(takewhile(lambda word: not word.startswith("-"), words))
    if not names_images(words[0], has_data, spaced):
        return words
    _refuse_second_name(words)
    return [AUTO, "--data", *words]


def names_images(word: str, has_data: bool, spaced: str = "") -> bool:
    """Return whether a word names images; otherwise it names a recipe or a .toml file.

    A word that names neither is refused.

    Args:
        has_data: whether images are named elsewhere.
        spaced: the same word with those after it, in case it is a name with spaces.
    """
    if word in recipes() and not has_data:
        tell_of_folder(word, "recipe")
    if word in recipes() or Path(word).suffix == ".toml":
        return False
    from deepbregman.data.datasets import DATASETS, FILE_SUFFIXES, expand_home
    from deepbregman.data.stored import HUB

    path = expand_home(Path(word))
    if is_run(path):
        again = f"deepbregman pretrain --resume {shlex.quote(word)}"
        raise UserError(
            f"{word!r} is a run, not a folder of images: `{again}` continues it; to train "
            f"longer from its weights: {suggest_longer(path)}"
        )
    if word in DATASETS:
        tell_of_folder(word, "dataset")
    is_stored = path.suffix.lower() in FILE_SUFFIXES or word.startswith(HUB)
    if word in DATASETS or (word and path.is_dir()) or is_stored:
        return True
    known = [*recipes(), *DATASETS]
    with suppress(OSError):  # there may be no such folder, or none that can be read
        known += [str(other) for other in path.parent.iterdir() if other.is_dir()]
    hint = suggest(word, known)
    if spaced not in ("", word) and Path(spaced).exists():
        hint = f"; a name with spaces must be in quotes: {shlex.quote(spaced)}"
    raise UserError(
        f"{word!r} is neither a folder of images or a file of many, nor a dataset "
        "(`deepbregman data list`), a recipe (`deepbregman recipes`) or a .toml file"
        f"{hint}"
    )


def _refuse_second_name(words: list[str]) -> None:
    """Refuse a recipe, or other images, after a first word that names the images."""
    values = _pair_options(words)
    after = [word for word in words[1:2] if not word.startswith("-")]
    after += [values[option] for option in ("--data", "--data.source") if option in values]
    if after:
        fix = "a run takes images from one place; put all images into one folder"
        if words[1] in recipes():
            fix = f"write `deepbregman pretrain {words[1]} --data {shlex.quote(words[0])}`"
        raise UserError(f"{after[0]!r} follows {words[0]}, which names the images: {fix}")


def tell_of_folder(name: str, kind: str) -> None:
    """Tell the user how to name a folder that has the name of a recipe or of a dataset."""
    if Path(name).is_dir():
        words = f"{name} means the {kind} of that name; for the folder, write ./{name}"
        notify(words)


def find_given(config: Config, words: list[str]) -> dict[str, Any]:
    """Return the fields that the words set: also to the value that the recipe has."""
    named = set(list_fields(words).values())
    return {field: value for field, value in fields_of(config).items() if field in named}


def add_tables(config: Config, words: list[str]) -> Config:
    """Return a recipe with those optional tables that the words have options of."""
    asked = {field.partition(".")[0] for field in list_fields(words).values()}
    return override(config, {t: {} for t in OPTIONAL if t in asked and getattr(config, t) is None})


def check_method(name: str, config: Config, words: list[str]) -> None:
    """Refuse another method than the recipe's: its fields are those of its own method."""
    method, asked = config.objective.name, _pair_options(words).get("--objective.name")
    if asked and asked != method:
        raise UserError(
            f"--objective.name is {asked!r}, and the method of the recipe {name} is {method}, "
            "which an option does not change: name a recipe of the other method first, with your "
            "images after --data (`deepbregman recipes` lists them)"
        )


class AutoRequest(NamedTuple):
    """The user's settings and budget for the recipe ``auto``."""

    given: Mapping[str, Any]
    budget: float | None  # seconds


def read_request(
    recipe: str | Config, given: Mapping[str, Any], budget: str | None
) -> AutoRequest | None:
    """Return the user's constraints if the recipe is ``auto``, else None."""
    if recipe != AUTO:
        if budget is not None:
            raise UserError(
                f"--budget {budget}: only the recipe auto fits its length to a time; leave the "
                "option out and set training.epochs, or pretrain with auto"
            )
        return None
    if "data.source" not in given:
        raise UserError(
            "the recipe auto needs images: name a folder, an .npz file or a dataset, such as "
            "`deepbregman pretrain my_photos`"
        )
    return AutoRequest(given, None if budget is None else parse_budget(budget))


def read_settings(folder: Path, config: Config, request: AutoRequest | None) -> Config:
    """Return the settings with which an existing run continues; refuse what it must not change.

    Of ``auto``, only what the user has given counts: the rest was chosen when the run began.
    """
    opened = Run.open(folder)
    opened.check_links()
    there = opened.config
    differing = differing_fields(there, config)
    if request is not None:
        differing = {field: pair for field, pair in differing.items() if field in request.given}
    changed = {field: pair[1] for field, pair in differing.items() if field in CHANGEABLE}
    words = [
        f"{field} is {a!r} there and {b!r} here"
        for field, (a, b) in differing.items()
        if field not in changed
    ]
    if words:
        place = shlex.quote(str(folder))
        raise UserError(
            f"run folder {folder} exists with other settings: {'; '.join(words[:3])}; continue it "
            f"as it is with --resume {place}, or name another folder with --run, with "
            f"--encoder.weights {place} to start from its weights"
        )
    return override(there, changed)


def suggest_more_epochs(run: Run, config: Config) -> str:
    """Return a sentence that more epochs help; empty if they bring little, or it is not known."""
    enough = run.provenance().get("enough_epochs") or 0
    is_short = 0 < config.training.epochs < LONG_ENOUGH * enough
    if not is_short or config.data.source == "custom":  # no command can name that
        return ""
    trained = run.result().get("pretrain", {})
    seconds = trained.get("seconds", 0.0) / (trained.get("epoch") or 1)
    budget = choose_budget(enough * seconds) if seconds else "TIME"
    return f"up to {enough} epochs improve the result: {suggest_longer(run.path, config, budget)}"


def describe_complete(run: Run, config: Config, *, is_auto: bool = False) -> str:
    """Return a sentence that a run is complete, and how to train longer."""
    trained = run.result().get("pretrain", {})
    done = count_words(trained.get("epoch", 0), "epoch")
    if config.depends_on_length or (trained.get("stopped") and not was_saturated(trained)):
        command = suggest_longer(run.path, config if is_auto else None)
        longer = suggest_more_epochs(run, config) or f"to train longer from its weights: {command}"
    else:
        option = "--no-stop-when-saturated" if was_saturated(trained) else "--training.epochs N"
        again = f"deepbregman pretrain --resume {shlex.quote(str(run.path))} {option}"
        longer = f"to train longer: `{again}`"
    return f"run {run.path} is complete: {done} trained; {longer}"
