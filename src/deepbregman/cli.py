"""The command line: it finds the function of a command, parses its options, calls it, prints.

A command is a public function in ``commands/COMMAND.py``. Its signature and its docstring are the
only declaration of the command line. This file is the one place for streams, exit codes and
notices.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import itertools
import operator
import os
import re
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, NoneType
from typing import Annotated, Any, NoReturn, get_args

import tyro
from rich.console import Console
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from deepbregman import __version__

from .commands.parameters import PYTHON_ONLY
from .config import Config, list_fields
from .errors import Notice, UserError, explain_error, mask_secrets, require_known, suggest
from .launching import (
    COMMAND_LINE,
    Process,
    find_process,
    handle_signals,
    is_first_of_machine,
    require_one_process,
    take_as_ctrl_c,
)
from .terminal import open_lasting_console, print_choices, print_note, progress_bars, say, silence

PROGRAM = "deepbregman"
COMMANDS = (
    *("quickstart", "pretrain", "evaluate", "embed", "export", "search", "cluster", "label"),
    *("duplicates", "explore", "data", "study", "tune", "report", "recipes", "bench"),
)
LISTS = (
    *("--set", "--space", "--query", "--protocol", "--protocols", "--recipes", "--arms"),
    *("--only", "--values", "--runs", "--rates"),
)
"""Options of several values that may be given in parts, as other programs take them."""
IN_ONE_PROCESS = ("evaluate", "embed", "search", "cluster", "label", "duplicates", "explore")
"""Commands that use several GPUs from one process."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's error is one paragraph on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be printable text
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    token = COMMAND_LINE.set(words)
    try:
        with _print_notices(), _flush_output():
            _dispatch([word for word in words if word != "--debug"])
    except BrokenPipeError:  # the reader has left
        _exit(1)
    except (Exception, KeyboardInterrupt) as error:
        _exit(_print_error(error, debug), owns_process=arguments is None)
    finally:
        COMMAND_LINE.reset(token)


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        _print_overview()
    elif words[0] == "--version":
        print(__version__)
    elif words[0] in COMMANDS:
        _run_command(words[0], words[1:])
    else:
        raise UserError(
            f"command {words[0]!r} is not one of {', '.join(COMMANDS)}; `{PROGRAM} --help` says "
            f"what each does{suggest(words[0], COMMANDS)}"
        )


def _run_command(command: str, words: list[str]) -> None:
    """Call the function of a command with its options, then show what it returns."""
    module = importlib.import_module(f"deepbregman.commands.{command}")
    program = f"{PROGRAM} {command}"
    function: Any = getattr(module, command, None)
    subcommands: dict[str, Callable[..., Any]] = getattr(module, "SUBCOMMANDS", {})
    if function is None:
        if not words or words[0] in ("-h", "--help"):
            _print_subcommands(program, subcommands)
            return
        require_known(command, words[0], subcommands)
    if words and words[0] in subcommands:
        program, function, words = f"{program} {words[0]}", subcommands[words[0]], words[1:]
    elif hasattr(module, "choose"):
        function, program, words = module.choose(words)
    if {"-h", "--help"} & set(words):  # tyro would not wrap it
        console = _open_help()
        console.print(_describe(function), highlight=False, markup=False, end="\n\n")
    parse = functools.partial(
        tyro.cli,
        _for_command_line(function, module),
        prog=program,
        description="",
        console_outputs=is_first_of_machine(),
        registry=TYRO_RULES,
    )
    words = _join_repeated(words)
    start, unknown = parse(args=words, return_unknown_args=True)
    _refuse_fields(function, unknown)
    if any(word.startswith("-") for word in unknown):
        parse(args=words)  # refuses them, and names options that are like them
    if unknown:
        raise UserError(
            f"{unknown[0]!r} belongs to no option: write the name of its option before it, put a "
            f"value with a space in quotes, or leave it out; `{program} --help` lists all options"
        )
    start()


def _join_repeated(words: list[str]) -> list[str]:
    """Join the values of a list that is given in several parts: only the last part would count.

    Of any other option the last one counts, so that a script may add to a command.
    """
    parts: list[list[str]] = [[]]  # each option with what follows it
    for word in words:
        name, equals, value = word.partition("=")
        if name in LISTS and any(part[0] == name for part in parts[1:]):
            first = next(part for part in parts[1:] if part[0] == name)
            parts.append(first)
            first += [value] if equals else []
        elif word.startswith("--"):
            parts.append([name, *([value] if equals else [])] if name in LISTS else [word])
        else:
            parts[-1].append(word)
    known: list[list[str]] = []
    for part in parts:
        if not any(part is each for each in known):
            known.append(part)
    return list(itertools.chain(*known))


def _refuse_fields(function: Callable[..., Any], unknown: list[str]) -> None:
    """Say how studies and searches take a field that ``pretrain`` takes as an option."""
    options = [parameter.default for parameter in inspect.signature(function).parameters.values()]
    if not any(hasattr(group, "changes") for group in options):
        return
    for place, word in enumerate(unknown):
        option, _, value = word.partition("=")
        field = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and field in list_fields():
            after = itertools.takewhile(
                lambda each: not each.startswith("--"), unknown[place + 1 :]
            )
            values = [value] if value else list(after)
            text = f"[{', '.join(values)}]" if len(values) > 1 else "".join(values) or "VALUE"
            raise UserError(
                f"{option} is a field of the configuration: write --set "
                f"{shlex.quote(f'{field}={text}')}"
            )


def _for_command_line(
    function: Callable[..., Any], module: ModuleType
) -> Callable[..., Callable[[], None]]:
    """Return a function for tyro: with the parameters that the command line offers.

    It returns what remains to be called once all words are known to be right. This calls
    ``function`` and shows the result by ``show_FUNCTION`` or ``show`` of its module. A parameter
    ``console`` gets a console that outlives its terminal, for long work; ``progress`` gets progress
    bars. Neither is an option, nor is a parameter marked as PythonOnly. A parameter whose default
    is a configuration becomes an option for each field.
    """
    command = module.__name__.rpartition(".")[2]
    signature = inspect.signature(function)
    offered = [
        _annotate(parameter)
        for parameter in signature.parameters.values()
        if parameter.name not in ("console", "progress")
        and PYTHON_ONLY not in get_args(parameter.annotation)
    ]
    show = getattr(module, f"show_{function.__name__}", getattr(module, "show", None))

    def call(*arguments: Any, **options: Any) -> None:
        console = Console(emoji=False)
        with contextlib.ExitStack() as stack:
            if command in IN_ONE_PROCESS:
                require_one_process(command)
            # One of several processes mostly waits for the others, where the handler cannot run.
            if find_process().processes == 1:
                stack.enter_context(handle_signals([signal.SIGTERM], take_as_ctrl_c))
            if "console" in signature.parameters:
                console = open_lasting_console(quiet=find_process().rank > 0)
                options["console"] = console
            if "progress" in signature.parameters:
                is_silent = "console" not in signature.parameters
                stream = open_lasting_console(stderr=True, quiet=find_process().rank > 0)
                bars = progress_bars(stream, says_loading=is_silent)
                options["progress"] = stack.enter_context(bars)
            result = function(*arguments, **options)
        if show is not None:
            show(result, console)

    @functools.wraps(function)
    def prepare(*arguments: Any, **options: Any) -> Callable[[], None]:
        return functools.partial(call, *arguments, **options)

    # A sentence that goes on in a deeper line is one sentence: the terminal wraps it anew.
    prepare.__doc__ = re.sub(r"\n {8,}(?=\S)", " ", inspect.cleandoc(function.__doc__ or ""))
    prepare.__annotations__ = {parameter.name: parameter.annotation for parameter in offered}
    prepare.__signature__ = signature.replace(parameters=offered)  # type: ignore[attr-defined]  # inspect reads it
    del prepare.__wrapped__  # tyro would read its signature
    return prepare


def _annotate(parameter: inspect.Parameter) -> inspect.Parameter:
    """Tell tyro how to show a parameter."""
    shown = _hide_empty_default(parameter.annotation, parameter.default)
    if isinstance(parameter.default, Config):
        shown = Annotated[Config, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]
    return parameter.replace(annotation=shown)


def _hide_empty_default(annotation: Any, default: object) -> Any:
    """Leave out "(default: )" in the help of an option whose default is empty."""
    if default is None or default == ():
        return Annotated[annotation, tyro.conf.arg(help_behavior_hint="")]
    return annotation


def _make_rules() -> ConstructorRegistry:
    """Return rules for tyro: it shows dataclasses of options as functions, and None to nobody."""
    rules = ConstructorRegistry()
    under_way: list[Any] = []

    @rules.struct_rule
    def read(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not dataclasses.is_dataclass(info.type) or info.type in under_way:
            return None
        under_way.append(info.type)
        found = rules.get_struct_spec(info)  # found by tyro's own rules
        under_way.pop()
        if not isinstance(found, StructConstructorSpec):
            return None
        return dataclasses.replace(found, fields=tuple(map(tidy, found.fields)))

    def tidy(field: StructFieldSpec) -> StructFieldSpec:
        def join_lines() -> str | None:
            text = field.helptext() if callable(field.helptext) else field.helptext
            if not text and dataclasses.is_dataclass(field.default):
                text = field.default.__doc__  # tyro looks there since 1.0.16 only
            return " ".join(text.split()) if text else None

        shown = _hide_empty_default(field.type, field.default)
        return dataclasses.replace(field, type=shown, helptext=join_lines)

    @rules.primitive_rule
    def read_optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        """Take None as what an option is when it is left out, not as a word that can be typed."""
        kinds = get_args(info.type)
        if NoneType not in kinds:
            return None
        others = functools.reduce(operator.or_, (kind for kind in kinds if kind is not NoneType))
        found = rules.get_primitive_spec(PrimitiveTypeInfo.make(others, info.markers))
        if not isinstance(found, PrimitiveConstructorSpec):
            return None
        return dataclasses.replace(
            found,
            is_instance=lambda value: value is None or found.is_instance(value),
            str_from_instance=lambda value: [] if value is None else found.str_from_instance(value),
        )

    return rules


TYRO_RULES = _make_rules()


# Overviews


def _open_help() -> Console:
    """Return a console that is quiet in all processes of a machine but the first."""
    return Console(quiet=not is_first_of_machine(), emoji=False)


def _print_overview() -> None:
    console = _open_help()
    console.print(f"usage: {PROGRAM} COMMAND ... [--debug]\n", highlight=False)
    console.print("Self-supervised visual representations with deep Bregman divergences.\n")
    modules = {name: importlib.import_module(f"deepbregman.commands.{name}") for name in COMMANDS}
    documented = {name: getattr(module, name, module) for name, module in modules.items()}
    print_choices(console, {name: _first_line(found) for name, found in documented.items()})
    console.print(
        f"\nStart with {PROGRAM} quickstart, or {PROGRAM} pretrain FOLDER for your own images.\n"
        f"{PROGRAM} COMMAND --help lists options; --debug shows the traceback of an error.",
        highlight=False,
    )


def _print_subcommands(program: str, subcommands: dict[str, Callable[..., Any]]) -> None:
    console = _open_help()
    console.print(f"usage: {program} {{{','.join(subcommands)}}} ...\n", highlight=False)
    print_choices(console, {name: _first_line(each) for name, each in subcommands.items()})
    console.print(f"\n{program} NAME --help lists the options.", highlight=False)


def _describe(function: Callable[..., Any]) -> str:
    """Return the paragraphs of a docstring that are not about arguments, each in one line."""
    text = re.split(r"\n(?:Args|Returns|Raises):\n", inspect.getdoc(function) or "")[0].strip()
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def _first_line(documented: object) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]


# Streams and exit codes


def _print_error(error: BaseException, debug: bool) -> int:
    """Print an error as one paragraph, once among the processes that meet it; return its code."""
    explained = explain_error(error)
    if debug:
        print(mask_secrets(traceback.format_exc()), file=sys.stderr, end="")
    message, code = explained or (
        f"{type(error).__name__}: {error}; this is a fault of {PROGRAM}: repeat the command "
        "with --debug to see the traceback, and report it",
        1,
    )
    # Before processes are joined, all of a machine meet the same error; Ctrl-C reaches them all.
    shared = explained is not None and not _is_joined()
    if (shared or isinstance(error, KeyboardInterrupt)) and not is_first_of_machine():
        return code
    if message:
        here = Process() if shared else find_process()  # reading the process may be what failed
        who = f"process {here.rank} of processes 0 to {here.processes - 1}: " * (here.rank > 0)
        # Ctrl-C, or a run that was told to stop and saved itself.
        asked = isinstance(error, KeyboardInterrupt) or hasattr(error, "signal_number")
        label = "" if asked else "error: "
        say(open_lasting_console(stderr=True), f"{label}{who}{mask_secrets(message)}")
    return code


@contextmanager
def _flush_output() -> Iterator[None]:
    """Flush standard output while an error can still be reported."""
    try:
        yield
    except SystemExit:  # --help ends like this
        print(end="", flush=True)
        raise
    print(end="", flush=True)


@contextmanager
def _print_notices() -> Iterator[None]:
    """Print notices as words on stderr, each once a machine, and other warnings as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", Notice)
        show_others = warnings.showwarning
        printed: set[str] = set()

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if not issubclass(category, Notice):
                show_others(message, category, *rest, **more)
            elif str(message) not in printed and is_first_of_machine():
                printed.add(str(message))
                print_note(str(message), sys.stderr)  # above a bar, where one runs

        warnings.showwarning = show
        yield


def _exit(code: int, owns_process: bool = False) -> NoReturn:
    """End the process with a code.

    A process that is joined to others ends at once: an error has cut short the threads that talk to
    the other processes, and on a slow way out they would abort the process with another code. One
    that a signal has stopped ends at once if torch compiles: it would wait for all that is queued.

    Args:
        owns_process: whether the process runs nothing but this command.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            silence(stream)
    is_compiling = code > 128 and "torch._inductor.async_compile" in sys.modules
    if _is_joined() or (is_compiling and owns_process):
        os._exit(code)
    sys.exit(code)


def _is_joined() -> bool:
    """Whether this process is connected to the other processes of a run."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
