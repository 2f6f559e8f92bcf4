"""deepbregman pretrain: train an encoder on images, by a recipe."""

import functools
import inspect
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from deepbregman.config import Config, differing_fields, load_recipe, override, recipes
from deepbregman.errors import UserError, abbreviate, notify
from deepbregman.launching import (
    find_process,
    must_start_processes,
    run_in_processes,
    under_srun,
    under_torchrun,
)
from deepbregman.runs import Run, is_complete, is_run, name_run_folder
from deepbregman.terminal import MaybeNumber, MaybePath, MaybeText, say, say_loading

from .parameters import (
    Accelerator,
    MaybeDevices,
    PythonOnly,
    RunFolder,
    check_dataset,
    find_folder_around,
    require_source,
)
from .pretrain_options import (
    AUTO,
    add_tables,
    check_method,
    describe_complete,
    find_given,
    find_resumed_run,
    insert_auto,
    list_fields,
    list_words_of_new_runs,
    names_images,
    read_request,
    read_settings,
)

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.data import Source
    from deepbregman.objectives.own import Augment, MakeObjective
    from deepbregman.training.callbacks import Callback


def pretrain(
    recipe: str | Path | Config,
    *,
    data: PythonOnly[Any] = None,
    run: MaybePath = None,
    budget: MaybeText = None,
    changes: PythonOnly[Mapping[str, Any] | None] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    augment: PythonOnly["Augment | Mapping[str, Augment] | None"] = None,
    objective: PythonOnly["MakeObjective | None"] = None,
    callbacks: PythonOnly["Sequence[Callback]"] = (),
    accelerator: Accelerator = "auto",
    devices: MaybeDevices = None,
    nodes: MaybeNumber = None,
    console: PythonOnly[Console | None] = None,
    source: PythonOnly["Source | None"] = None,
) -> Run:
    """Pretrain an encoder: deepbregman pretrain DATA, pretrain RECIPE [options], or --resume RUN.

    DATA is a folder of images, an .npz file or a dataset. The recipe auto then chooses settings
    that fit the images and the machine, and prints them. Most people need --run and --budget only.

    RECIPE is one of `deepbregman recipes`, or a .toml file. Every field of it is an option, whose
    default below is the recipe's; auto replaces some of these by its choice. Options such as
    --teacher.momentum and --weak-views.num-views add these parts to a recipe without them.

    To continue an interrupted run, repeat the command with the same --run, or: deepbregman pretrain
    --resume RUN

    Args:
        recipe: Name of a recipe, a .toml file, or a configuration. Or images, as the command takes
            them: a folder, an .npz file or a dataset; the recipe is then auto.
        data: A dataset instead of the recipe's: digits, cifar10, a folder, an .npz file; or images
            of your program, as :func:`own_data` takes them: a uint8 array or tensor, with labels in
            a pair (images, labels), or a map-style dataset.
        run: Folder of the run. If it is new, a run starts; an interrupted run of the same settings
            continues; a complete one stays as it is. By default a new folder in runs/.
        budget: Time that pretraining may take, such as 30m or 2h. The recipe auto measures the
            speed and chooses the epochs that fit. By default 30m on a CPU and 2h on a GPU.
        changes: Fields by their dotted names, such as {"training.epochs": 10}.
        encoder: A module of your own instead of the recipe's encoder. It maps images (N, 3, H, W),
            normalised floats, to vectors (N, d). A copy is trained, starting from its weights; your
            module does not change. To load the run, give a module of the same structure again.
        augment: Your own views instead of the recipe's: called with a uint8 batch (n, 3, H, W) on
            the device, once for each view, it returns uint8, or floats in [0, 1]. Transforms of
            torchvision.transforms.v2 are called image by image. A mapping such as {"weak_views": f}
            names the tables whose views it makes.
        objective: Your own method: a subclass of :class:`Objective` whose constructor takes an
            encoder and the settings of the heads, or a function that makes one.
        callbacks: Told of steps and epochs, see :class:`Callback`.
        accelerator: Device to train on; auto takes a GPU if there is one.
        devices: Number of processes on this machine, one for each GPU, or all. By default one, or
            as many as torchrun or srun started.
        nodes: Number of machines, each with the same number of processes. Without torchrun or srun,
            run the command on each machine and set MASTER_ADDR, MASTER_PORT and NODE_RANK.
        console: Where to print. When None, only what you should look at is told, as warnings of
            the class :class:`Notice`.
        source: The dataset, already open, for a caller that trains many runs on it.

    Returns:
        The finished run; give its ``path`` to :func:`load_encoder`.
    """
    _check_changes(changes)
    require_source(source)
    recipe, data = _read_first(recipe, data, changes or {})
    config = load_recipe(recipe) if isinstance(recipe, str) else recipe
    _check_callbacks(callbacks)
    given, images = {**_mark_own(encoder, augment, objective), **(changes or {})}, None
    if isinstance(data, str | Path):
        given["data.source"] = str(data)
    elif data is not None:
        given["data.source"], images = "custom", data
    config = override(config, given)
    request = read_request(recipe, given, budget)
    name = Path(recipe).stem if isinstance(recipe, str) else "run"
    folder = name_run_folder(name) if run is None else Path(run)
    if not is_run(folder):
        Run.check_free(folder)
    if source is None and images is None:
        check_dataset(config)
    number = _count_processes(devices, accelerator)
    if must_start_processes(number, nodes):
        named = [] if run is not None else ["--run", str(folder)]
        _start_processes(number or 1, nodes or 1, folder, named)
    if is_run(folder) and find_process().processes == 1:  # answered before torch is loaded
        there = read_settings(folder, config, request)
        if is_complete(Run(folder)):
            if console is not None:
                say(console, describe_complete(Run(folder), there, is_auto=request is not None))
            return Run(folder)
    with say_loading(console):
        from deepbregman.objectives import OwnParts

        from .job import Inputs, train_run

    own = OwnParts(encoder, augment, objective)
    inputs = Inputs(own, source, images, tuple(callbacks))
    return train_run(config, folder, False, accelerator, console, inputs, request)


def _read_first(recipe: Any, data: Any, changes: Mapping[str, Any]) -> tuple[str | Config, Any]:
    """Read the first argument as the command reads its first word; return recipe and data."""
    if isinstance(recipe, Config):
        return recipe, data
    if isinstance(recipe, Path):  # which is never the name of a recipe or of a dataset
        recipe = os.path.join(os.curdir, recipe)
    if not isinstance(recipe, str):
        raise UserError(
            f"recipe is {abbreviate(recipe)}: give the name of a recipe, a .toml file, a folder or "
            'file of images, or a Config; images of your program follow a recipe: "auto", data=...'
        )
    has_data = data is not None or "data.source" in changes
    if not names_images(recipe, has_data):
        return recipe, data
    if has_data:
        raise UserError(
            f"data was given, and {recipe!r} names images too: a run takes images from one place; "
            "name a recipe first, such as auto"
        )
    return AUTO, recipe


def _check_changes(changes: object) -> None:
    if changes is not None and not isinstance(changes, Mapping):
        raise UserError(
            f"changes is of the type {type(changes).__name__}: give a dict of fields by their "
            'dotted names, such as {"training.epochs": 10}'
        )


def _check_callbacks(callbacks: "Sequence[Callback]") -> None:
    """Refuse callbacks that are none, without loading torch when there are no callbacks."""
    if not callbacks:
        return
    from deepbregman.training.callbacks import Callback

    is_list = isinstance(callbacks, list | tuple)
    if not is_list or not all(isinstance(each, Callback) for each in callbacks):
        raise UserError(
            f"callbacks is {abbreviate(callbacks)}: give a list of deepbregman.Callback objects, "
            "each of a subclass with the events that you need"
        )
    events = [name for name in dir(Callback) if name.startswith("on_")]
    for kind in map(type, callbacks):
        for name in dir(kind):
            if name.startswith("on_") and name not in events and callable(getattr(kind, name)):
                raise UserError(
                    f"{kind.__name__} has {name}, which nothing calls: the events are "
                    f"{', '.join(events)}"
                )


def _mark_own(
    encoder: "nn.Module | None",
    augment: "Augment | Mapping[str, Augment] | None",
    objective: "MakeObjective | None",
) -> dict[str, Any]:
    """Return the fields that mark parts of the user's own; without any, torch is not loaded yet."""
    if encoder is None and augment is None and objective is None:
        return {}
    from deepbregman.objectives import OwnParts

    return OwnParts(encoder, augment, objective).as_changes()


def resume(
    run: Annotated[RunFolder, tyro.conf.arg(name="resume", metavar="PATH")],
    *,
    data: PythonOnly[Any] = None,
    changes: PythonOnly[Mapping[str, Any] | None] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    augment: PythonOnly["Augment | Mapping[str, Augment] | None"] = None,
    objective: PythonOnly["MakeObjective | None"] = None,
    callbacks: PythonOnly["Sequence[Callback]"] = (),
    accelerator: Accelerator = "auto",
    devices: MaybeDevices = None,
    nodes: MaybeNumber = None,
    console: PythonOnly[Console | None] = None,
    source: PythonOnly["Source | None"] = None,
) -> Run:
    """Continue an interrupted run exactly from its last checkpoint.

    Fields that do not change what is learned, such as --data.workers, may be given anew; so may
    --training.epochs, unless a schedule such as a cosine depends on it. All others stay. A run with
    parts of your own is continued from Python, where you give them again.

    Args:
        run: Folder of the run.
        changes: Fields to change that do not affect what is trained, such as {"data.workers": 4}.
        data: If the run trained on images of your program: the same images.
        encoder: If the run trained an encoder of your own: a module of the same structure.
        augment: If the run had views of your own: the same code.
        objective: If the run had a method of your own: the same code.
        callbacks: Told of steps and epochs, see :class:`Callback`.
        accelerator: Device to train on; auto takes a GPU if there is one.
        devices: Number of processes on this machine, or all; it may differ from before.
        nodes: Number of machines, each with the same number of processes.
        console: Where to print. When None, only what you should look at is told, as warnings of
            the class :class:`Notice`.
        source: The run's dataset, already open.
    """
    _check_callbacks(callbacks)
    opened = Run.open(run)
    opened.check_links()
    _check_changes(changes)
    require_source(source)
    config, folder = override(opened.config, changes or {}), opened.path
    if isinstance(data, str | Path) or (data is not None and config.data.source != "custom"):
        raise UserError(
            f"data was given, but {folder} was trained on {config.data.source!r} and goes on with "
            "that: leave the argument out; for other images, start a new run"
        )
    if source is None and data is None:
        check_dataset(config, run=folder, resuming=True)
    number = _count_processes(devices, accelerator)
    if must_start_processes(number, nodes):
        _start_processes(number or 1, nodes or 1, folder, [])
    with say_loading(console):
        from deepbregman.objectives import OwnParts

        from .job import Inputs, train_run

    own = OwnParts(encoder, augment, objective)
    inputs = Inputs(own, source, data, tuple(callbacks))
    return train_run(config, folder, True, accelerator, console, inputs)


def show(run: Run, console: Console) -> None:
    """Name the run, and what to do next."""
    say(console, f"run: {run.path}")
    first, *others = suggest_next(run)
    say(console, f"next: deepbregman {first}")
    for command in others:
        say(console, f"or:   deepbregman {command}")


def suggest_next(run: Run) -> list[str]:
    """Return commands that fit the run's data: only data with labels can be judged by them."""
    from deepbregman.data.datasets import has_labels

    try:
        labelled = has_labels(run.config.data.source)
    except UserError:  # a source that is gone, or that only the program knows
        labelled = True
    place = shlex.quote(str(run.path))
    found = [f"explore {place} --out map.html"]
    if labelled:
        return [f"evaluate {place}", *found]
    sheet = "few.png"
    if folder := find_folder_around(Path(sheet), run.config.data.source):
        sheet = os.path.relpath(folder.resolve().parent / sheet)
    return [*found, f"label {place} --out few.csv --sheet {shlex.quote(sheet)}"]


def choose(words: list[str]) -> tuple[Callable[..., Run], str, list[str]]:
    """Choose the function for a command line: resume, or pretrain with the fields of a recipe.

    Returns:
        The function, the words that the user has written for it, and the words of its options.
    """
    if any(word.partition("=")[0] == "--resume" for word in words):
        changes = list_fields(words) or list_words_of_new_runs(words)
        function = _resume_with_fields(words) if changes else resume
        return function, "deepbregman pretrain", words
    words = insert_auto(words)
    named = bool(words) and not words[0].startswith("-")
    if not named and not {"-h", "--help"} & set(words):
        raise UserError(
            "pretrain needs a recipe or images first: a folder, an .npz file, a dataset, one of "
            f"{', '.join(recipes())}, or a .toml file; for example `deepbregman pretrain my_photos`"
        )
    if named and len(words) > 1 and not words[1].startswith("-"):
        raise UserError(
            f"{words[1]!r} follows {words[0]}: after a recipe, images need --data; write "
            f"`deepbregman pretrain {words[0]} --data {shlex.quote(words[1])}`"
        )
    name = words[0] if named else AUTO
    config = add_tables(load_recipe(name), words[named:])
    check_method(name, config, words)

    @functools.wraps(pretrain)
    def with_fields(recipe: Config, run: Path | None, **rest: Any) -> Run:
        folder = run or name_run_folder(Path(name).stem)
        given, unused = find_given(recipe, words), recipe.unused_fields
        for field in sorted(given.keys() & unused.keys()):
            notify(f"{field} is not used in this training, since {unused[field]}")
        if name == AUTO:
            return pretrain(AUTO, run=folder, changes=given, **rest)
        return pretrain(recipe, run=folder, **rest)

    signature = inspect.signature(pretrain)
    first, *others = signature.parameters.values()
    first = first.replace(default=config, kind=inspect.Parameter.KEYWORD_ONLY)
    changed = signature.replace(parameters=[first, *others])
    with_fields.__signature__ = changed  # type: ignore[attr-defined]  # inspect reads it
    return with_fields, f"deepbregman pretrain {name if named else 'DATA|RECIPE'}", words[named:]


def _resume_with_fields(words: list[str]) -> Callable[..., Run]:
    """Make the function that resumes a run with changed fields, as far as they may change."""
    config = find_resumed_run(words).config

    @functools.wraps(resume)
    def with_fields(run: Path, recipe: Config, **rest: Any) -> Run:
        changed = differing_fields(Run.open(run).config, recipe)
        return resume(run, changes={name: new for name, (_, new) in changed.items()}, **rest)

    signature = inspect.signature(resume)
    fields = inspect.Parameter("recipe", inspect.Parameter.KEYWORD_ONLY, default=config)
    changed = signature.replace(parameters=[*signature.parameters.values(), fields])
    with_fields.__signature__ = changed  # type: ignore[attr-defined]  # inspect reads it
    return with_fields


def _count_processes(devices: int | str | None, accelerator: str) -> int | None:
    """Return the number of processes on this machine; None leaves it to torchrun or srun."""
    if devices is None or isinstance(devices, int):
        return devices
    if under_torchrun() or under_srun():  # one that --devices all started, among others
        return None
    from deepbregman.training.devices import pick_devices

    return len(pick_devices(accelerator, devices))


def _start_processes(devices: int, nodes: int, folder: Path, extra: list[str]) -> None:
    # Several machines take the folder of process 0, which this one need not know.
    place = shlex.quote(str(folder)) if nodes == 1 else "RUN"
    again = f"deepbregman pretrain --resume {place} --devices {devices}"
    again += f" --nodes {nodes}" * (nodes > 1)

    def advise() -> str:
        if nodes == 1 and not is_run(folder):
            return "nothing had been trained: start it again"
        return f"continue with: {again}"

    run_in_processes(devices, nodes, extra, advise)
