"""deepbregman study: claims and figures of the paper, one command each."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepbregman.errors import UserError, nearest

from .demonstrations import DEMONSTRATIONS
from .options import PROGRAM, say


def command(arguments: list[str]) -> None:
    """Run a study, or list them: deepbregman study [NAME]."""
    if not arguments or arguments[0] in ("-h", "--help"):
        _list(Console())
        return
    name = arguments[0]
    if name not in DEMONSTRATIONS:
        known = ", ".join(DEMONSTRATIONS)
        raise UserError(f"study {name!r} is not one of {known}{nearest(name, DEMONSTRATIONS)}")
    DEMONSTRATIONS[name].command(arguments[1:])


def _list(console: Console) -> None:
    """Print the studies, a line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, entry in DEMONSTRATIONS.items():
        table.add_row(f"[bold]{name}[/bold]", escape(entry.title))
    console.print(table)
    say(
        console, f"\n{PROGRAM} study NAME runs one; {PROGRAM} study NAME --help says what it takes."
    )
