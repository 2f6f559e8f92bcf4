"""Whole recipes as the arms of a study, which should spend alike. No torch here."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepbregman.config import Config, fields_of
from deepbregman.errors import UserError

from .definition import OURS, SIMCLR, Arm, Study

IMAGES = ("data.source", "data.root", "data.skip_unreadable")
"""What says which images there are: one set of them judges all arms."""
BUDGET = ("encoder.name", "encoder.stem", "data.image_size", "data.holdout")
"""What arms of an equal budget have in common, beside the number of views that they see."""


def arm_names(recipes: Sequence[str]) -> list[str]:
    """Name an arm for each recipe: by itself, or by its file."""
    names = [Path(recipe).stem for recipe in recipes]
    if len(names) < 2:
        raise UserError(
            f"--recipes {' '.join(recipes)}: there must be at least 2 to compare, the reference "
            "first, such as --recipes simclr best"
        )
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"--recipes names {name} twice: arms are called after their recipe; rename the file"
            )
    return names


def compared(study: Study, configs: Mapping[str, Config]) -> Study:
    """Give a study its arms: the first recipe, and all in which each other differs from it.

    Args:
        study: of recipes.
        configs: by name of the arm, the reference first.
    """
    (reference, base), *others = configs.items()
    start = fields_of(base)
    arms = [_arm(reference, base, {})]
    for name, config in others:
        changes = {
            field: value
            for field, value in fields_of(config).items()
            if field != "seed" and value != start[field]
        }
        twin = next((arm.name for arm in arms if arm.changes == changes), None)
        if twin is not None:
            raise UserError(
                f"recipes {twin} and {name} come to the same configuration: there is nothing to "
                "compare; leave one of them out"
            )
        arms.append(_arm(name, config, changes))
    return dataclasses.replace(study, arms=tuple(arms), recipes=tuple(configs), reference=reference)


def _arm(name: str, config: Config, changes: Mapping[str, object]) -> Arm:
    return Arm(name, changes, name, SIMCLR if config.divergence.weight == 0.0 else OURS)


def unequal_budget(configs: Mapping[str, Config]) -> list[str]:
    """Say in which ways recipes do not spend alike; nothing where they do.

    Samples in a step may differ: a step on more of them is dearer and there are fewer of it.

    Args:
        configs: by name of the arm.

    Raises:
        UserError: When they are not of the same images, which makes no comparison at all.
    """
    other_images = _unlike(configs, IMAGES)
    if other_images:
        raise UserError(
            f"the recipes are of different images ({'; '.join(other_images)}): give all of them "
            "the same with --data NAME, or with --set FIELD=VALUE"
        )
    found = _unlike(configs, BUDGET)
    sides = {name: config.view_size for name, config in configs.items()}
    if len(set(sides.values())) > 1 and not any(words.startswith("data.image") for words in found):
        words = [f"{side} px in {name}" for name, side in sides.items()]
        found.append(f"views are of {', '.join(words)}")
    seen = {
        name: (config.training.epochs, config.views.num_views) for name, config in configs.items()
    }
    if len({epochs * views for epochs, views in seen.values()}) > 1:
        words = [f"{e} x {v} = {e * v} in {name}" for name, (e, v) in seen.items()]
        found.append(f"training.epochs x views.num_views is {', '.join(words)}")
    return found


def check_budget(configs: Mapping[str, Config], *, unequal: bool) -> list[str]:
    """Refuse recipes that do not spend alike, unless that is allowed; say in which ways they do."""
    found = unequal_budget(configs)
    if found and not unequal:
        raise UserError(
            f"the recipes do not spend alike ({'; '.join(found)}): make them equal, in the recipes "
            "or with --set FIELD=VALUE for all, or compare them as they are with --unequal, which "
            "the results then say"
        )
    return found


def _unlike(configs: Mapping[str, Config], names: Sequence[str]) -> list[str]:
    flat = {arm: fields_of(config) for arm, config in configs.items()}
    found = []
    for name in names:
        values = {arm: repr(fields[name]) for arm, fields in flat.items()}
        if len(set(values.values())) > 1:
            found.append(f"{name} is " + ", ".join(f"{v} in {arm}" for arm, v in values.items()))
    return found
