"""The plan of the study ``tables``: arms, datasets and protocols, and what each run is to measure.

This file needs no torch, so a wrong request is refused at once.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, NamedTuple, get_args

import tyro

from deepbregman.config import Config, override, recipes
from deepbregman.data.datasets import check_source, typical_side
from deepbregman.errors import UserError, require_known
from deepbregman.evaluation.options import NOISE, ClassProtocol
from deepbregman.files import check_can_be_folder, list_names
from deepbregman.terminal import MaybeNumber

from .definition import (
    BOTH,
    CONTROL,
    WITHOUT,
    join_changes,
    load_arm,
    name_arms,
    split_ending,
)

ARMS = (
    *("simclr", "paper-without", "paper", "best-control", "best"),
    *("moco-v2plus", "byol", "barlow-twins"),
)
PROTOCOLS: tuple[ClassProtocol, ...] = get_args(ClassProtocol)
"""Detection has images of its own."""
ENCODER = "resnet18"
LARGEST_SIDE = 128
FILE = "tables.json"
"""File in the folder of the study with its first provenance and its last options."""


@dataclass(frozen=True)
class TableOptions:
    """Options of the study ``tables``."""

    data: tuple[str, ...] = ()
    """One or more labelled datasets; not needed with --no-train."""
    arms: tuple[str, ...] = ARMS
    """Recipes or .toml files, the reference first. RECIPE-without has no divergence;
    RECIPE-control has InfoNCE with the same teacher and bank instead; RECIPE-both has both.
    Recipes by name are trained with ResNet-18."""
    protocols: tuple[ClassProtocol, ...] = PROTOCOLS
    """What to measure. transfer goes from each dataset to every other, and ood tells the test
    images from noise and from the other datasets. Training from random weights (supervised, and
    parts of semi and transfer) is the same for all arms, so only the first arm has it."""
    seeds: int = 3
    """Number of seeds."""
    first_seed: int = 0
    """The first seed."""
    epochs: tuple[int, ...] = ()
    """Epochs of pretraining, one number or one for each dataset, instead of the recipe's."""
    image_size: tuple[int, ...] = ()
    """Side of the images in pixels, one number or one for each dataset. By default that of the
    images, at most 128."""
    tuning_epochs: MaybeNumber = None
    """Epochs of semi, supervised and transfer, instead of their defaults."""
    changes: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = ()
    """Fields to change in every arm, such as training.batch_size=256."""
    only: tuple[str, ...] = ()
    """Parts to run, as patterns of ARM/DATASET/PROTOCOL such as best/cifar10/*; transfer is named
    by its dataset, such as transfer-cifar10. By default all."""
    keep_checkpoints: bool = False
    """Keep the checkpoints of complete runs. A run whose checkpoint is gone is trained again if
    another protocol is asked for later."""
    train: bool = True
    """With --no-train, only write the tables of the runs that are in --out."""
    out: Path = Path("studies/tables")
    """Folder of the study."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes a GPU if there is one."""


class Part(NamedTuple):
    """A measurement of a run: a protocol, and datasets besides its own."""

    name: str
    """Name, such as ``linear`` or ``transfer-ham10000``."""
    protocol: ClassProtocol
    others: tuple[str, ...] = ()
    from_scratch: bool = False
    """Whether to train from random weights as well, which is the same for every arm."""


@dataclass(frozen=True)
class TableCell:
    """A run of the tables: an arm, a dataset and a seed."""

    arm: str
    data: str
    seed: int
    config: Config
    parts: tuple[Part, ...]
    """Measurements of this command."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.arm}-{name_dataset(self.data)}-seed{self.seed}"


@dataclass(frozen=True)
class TablePlan:
    """A checked request."""

    options: TableOptions
    arms: tuple[str, ...]
    cells: tuple[TableCell, ...]


def name_dataset(data: str) -> str:
    """Name a dataset in files and tables: cifar10 for data/cifar10.npz."""
    return PurePath(data).stem


def plan_tables(options: TableOptions) -> TablePlan:
    """Check a request, and list its runs seed by seed: a stopped study still compares arms."""
    if not options.train:
        if not (options.out / FILE).is_file():
            raise UserError(
                f"--no-train: {options.out} holds no tables; name their folder by --out"
            )
        return TablePlan(options, (), ())
    _check_options(options)
    check_can_be_folder(options.out)
    if list_names(options.out) - {"locks"} and not (options.out / FILE).is_file():
        raise UserError(
            f"{options.out} exists and holds no tables: choose another folder with --out"
        )
    arms = tuple(name_arms(options.arms, "arms"))
    configs: dict[tuple[str, str], Config] = {}
    for place, data in enumerate(options.data):
        given = join_changes(
            options.changes,
            data=data,
            image_size=_select(options.image_size, place),
            epochs=_select(options.epochs, place),
        )
        if "seed" in given:
            raise UserError(
                f"--set seed={given['seed']}: the runs have seeds of their own; give the first one "
                "by --first-seed"
            )
        given.setdefault("data.image_size", min(LARGEST_SIDE, typical_side(data)))
        for name, arm in zip(arms, options.arms, strict=True):
            configs[name, data] = build_arm(arm, given)
    cells = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for data in options.data:
            for name in arms:
                parts = plan_parts(options, name, data, is_reference=name == arms[0])
                if parts:
                    config = override(configs[name, data], {"seed": seed})
                    cells.append(TableCell(name, data, seed, config, parts))
    if not cells:
        raise UserError(_explain_no_part(options, arms))
    return TablePlan(options, arms, tuple(cells))


def build_arm(arm: str, given: Mapping[str, Any]) -> Config:
    """Return the configuration of an arm: a recipe or a file, or a recipe's name with an ending.

    The recipes of the package are trained with one encoder, so that arms can be compared.
    """
    own = {"encoder.name": ENCODER} if split_ending(arm)[0] in recipes() else {}
    return override(load_arm(arm), {**own, **given})


def plan_parts(
    options: TableOptions, arm: str, data: str, *, is_reference: bool
) -> tuple[Part, ...]:
    """List what a run is to measure."""
    others = tuple(other for other in options.data if other != data)
    parts = []
    for protocol in options.protocols:
        if protocol == "transfer":
            parts += [
                Part(f"transfer-{name_dataset(other)}", protocol, (other,), is_reference)
                for other in others
            ]
        elif protocol == "ood":
            parts.append(Part(protocol, protocol, (NOISE, *others)))
        elif protocol != "supervised" or is_reference:
            parts.append(Part(protocol, protocol, from_scratch=is_reference))
    names = {part: f"{arm}/{name_dataset(data)}/{part.name}" for part in parts}
    patterns = options.only or ("*",)
    return tuple(
        part
        for part, name in names.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    )


def _explain_no_part(options: TableOptions, arms: Sequence[str]) -> str:
    """Say that --only names nothing of what the other options ask for, and what that is."""
    asked = replace(options, only=())
    every = [plan_parts(asked, arms[0], data, is_reference=True) for data in options.data]
    names = dict.fromkeys(
        f"supervised with {arms[0]} alone" if part.name == "supervised" else part.name
        for parts in every
        for part in parts
    )
    words = (
        f"--only {' '.join(options.only)}: there is no such part; a part is ARM/DATASET/PROTOCOL, "
        f"of the arms ({', '.join(arms)}), datasets ({', '.join(map(name_dataset, options.data))}) "
        f"and protocols ({', '.join(names)})"
    )
    if "transfer" in " ".join(options.only) and len(options.data) == 1:
        words += "; transfer needs a second dataset in --data"
    return words


def pair_arms(arms: Sequence[str]) -> list[tuple[str, str]]:
    """List which arms are compared: all with the first, and each with those of its endings."""
    pairs = [(arm, arms[0]) for arm in arms[1:] if not arm.endswith(WITHOUT)]
    own = [(arm, f"{arm}{ending}") for arm in arms for ending in (WITHOUT, CONTROL)]
    own += [(f"{arm}{BOTH}", arm) for arm in arms]
    known = [pair for pair in own if set(pair) <= set(arms)]
    return pairs + [pair for pair in known if pair not in pairs]


def _check_options(options: TableOptions) -> None:
    if not options.data:
        raise UserError("no dataset was named: give one or more, such as --data cifar10")
    names = [name_dataset(data) for data in options.data]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"--data names {twice[0]} twice, and runs are called after it; rename one of them"
        )
    if not options.arms:
        raise UserError(f"no arm was named: give recipes, such as --arms {' '.join(ARMS[:3])}")
    if not options.protocols:
        raise UserError("no protocol was named: give some, such as --protocols knn linear")
    for name in options.protocols:
        require_known("protocol", name, PROTOCOLS)
    if set(options.protocols) == {"transfer"} and len(options.data) == 1:
        raise UserError(
            "--protocols transfer goes from each dataset to every other, and --data names "
            f"{names[0]} alone: add a second dataset"
        )
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: there must be at least 1")
    for what, numbers in (("epochs", options.epochs), ("image-size", options.image_size)):
        if len(numbers) not in (0, 1, len(options.data)):
            raise UserError(
                f"--{what} has {len(numbers)} numbers for {len(options.data)} datasets: give one, "
                "or one for each"
            )
    if options.tuning_epochs is not None and options.tuning_epochs < 1:
        raise UserError(f"--tuning-epochs {options.tuning_epochs}: it must be 1 or more")
    for data in options.data:
        check_source(data)


def _select(numbers: Sequence[int], place: int) -> int | None:
    """Return the number for a dataset: one for all or one for each; None if none is given."""
    if not numbers:
        return None
    return numbers[0] if len(numbers) == 1 else numbers[place]
