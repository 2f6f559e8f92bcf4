"""deepbregman data: which data sets there are, whether one is whole, and a cache of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from deepbregman.errors import UserError, nearest

from .options import PROGRAM, parse, say, screen

VERBS = {
    "list": "List the data sets that have a name.",
    "check": "Say what is there of a data set, what is missing, and how to get it.",
    "prepare": "Download a data set, verify it, measure its pixels; perhaps cache it.",
}
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]


def command(arguments: list[str]) -> None:
    """List data sets, check one, or prepare one: deepbregman data list|check|prepare."""
    functions: dict[str, Callable[..., None]] = {
        "list": _list,
        "check": _check,
        "prepare": _prepare,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        _overview()
    elif arguments[0] in functions:
        parse(functions[arguments[0]], f"data {arguments[0]}", arguments[1:])
    else:
        raise UserError(
            f"data {arguments[0]!r} is not one of {', '.join(VERBS)}{nearest(arguments[0], VERBS)}"
        )


def _overview() -> None:
    console = Console()
    console.print(f"usage: {PROGRAM} data {{{','.join(VERBS)}}} ...\n", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for verb, purpose in VERBS.items():
        table.add_row(f"[bold]{verb}[/bold]", escape(purpose))
    console.print(table)
    console.print(f"\n{PROGRAM} data VERB --help says what each takes.", highlight=False)


def _list() -> None:
    """List the data sets that have a name.

    A folder of images or an .npz file in MedMNIST's convention needs none: give its path.
    """
    from deepbregman.studies.datasets import catalogue

    table = Table(box=None, pad_edge=False)
    table.add_column("name")
    for title in ("train", "test", "unlabelled", "classes", "size"):
        table.add_column(title, justify="right")
    table.add_column("downloadable")
    for dataset in catalogue():
        counts = [
            sum(count[0] for part, count in dataset.counts.items() if kind in part)
            for kind in ("train", "test", "unlabelled")
        ]
        table.add_row(
            f"[bold]{dataset.name}[/bold]",
            *(f"{count:,}" if count else "" for count in counts),
            f"{dataset.num_classes:,}",
            dataset.size,
            "yes" if dataset.downloadable else "no",
        )
    console = Console()
    console.print(table, highlight=False)
    say(console, f"\n{PROGRAM} data check NAME says where each belongs and how to get it.")


def _check(name: Name, root: Path = Path("data")) -> None:
    """Say what is there of a data set, what is missing, and how to get it.

    Exits with 0 when it is complete and with 2 when it is not. Counts and labels are compared with
    what was published, and so are the checksums of the files of CIFAR and STL-10 and of archives
    that lie in the root. Of a folder every image is decoded; of an .npz file every checksum is
    verified.

    Args:
        name: A data set by name, a folder of images, or an .npz file.
        root: Folder in which the data sets with names lie.
    """
    from deepbregman.data.checking import require_complete
    from deepbregman.studies.datasets import check

    console = screen()
    with _progress(console) as stage:
        report = check(name, root=root, stage=stage)
    _print_rows(console, report.rows)
    require_complete(name, root, report)
    say(console, f"{name}: complete")


def _prepare(
    name: Name,
    root: Path = Path("data"),
    image_size: int | None = None,
    cache: Path | None = None,
    download: bool = True,
    skip_unreadable: bool = False,
) -> None:
    """Download a data set where that is possible, verify it, and measure its pixels.

    Counts and the mean and deviation of each channel are printed and written to ROOT/NAME.json.
    With --cache the images are also written, decoded, to one .npz file that pretrain, evaluate and
    embed take as --data and open at once. In it every image lies in a square frame of at most 2.25
    times the image size: a longer one is shrunk until it fits, a smaller one is not enlarged, none
    is cropped; one that does not fill its frame lies top left, and its true size is kept beside it.
    Views made from the cache are those made from the files. It takes 3 bytes a pixel of its frame
    and is for one image size and below. Interrupted, it leaves nothing half-written: run it again.

    Args:
        name: A data set by name, a folder of images, or an .npz file.
        root: Folder in which the data sets with names lie or are put.
        image_size: Side of the training images; by default as usual for the data set, else 32.
        cache: File to write the decoded images to; must not exist.
        download: Download what is absent.
        skip_unreadable: Go on without images that cannot be read.
    """
    from deepbregman.studies.datasets import prepare

    console = screen()
    with _progress(console) as stage:
        record, file = prepare(
            name,
            root=root,
            image_size=image_size,
            cache=cache,
            download=download,
            skip_unreadable=skip_unreadable,
            stage=stage,
        )
    rows = [(part, f"{count:,}") for part, count in record["images"].items()]
    if record["num_classes"] is not None:
        rows.append(("classes", f"{record['num_classes']:,}"))
    if "mean" in record:
        rows.append(("frame", " x ".join(map(str, record["frame"]))))
        rows += [(key, _triple(record[key])) for key in ("mean", "deviation")]
        rows.append(("left out", f"{record['num_skipped']:,} unreadable"))
    _print_rows(console, rows)
    say(console, f"wrote {file}")
    if cache is not None:
        if record["num_replaced"]:
            say(console, f"{record['num_replaced']} could not be decoded; others stand in for them")
        say(console, f"wrote {cache}")
        say(console, f"next: {PROGRAM} pretrain RECIPE --data {cache}")


def _triple(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _print_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    width = max((len(what) for what, _ in rows), default=0)
    for what, words in rows:
        say(console, f"{what:<{width}}  {words}")


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show a bar for each stage of long work, gone when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    quiet = not console.is_terminal  # where a bar that comes and goes would leave blank lines
    with Progress(*columns, console=console, transient=True, disable=quiet) as bars:

        def stage(words: str) -> Callable[[int, int], None]:
            task = bars.add_task(words, total=None, visible=False)

            def advance(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total, visible=done < total)

            return advance

        yield stage
