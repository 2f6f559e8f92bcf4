"""``deepbregman`` and ``python -m deepbregman``: the command line, as soon as it is loaded."""

import os
import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still loading is answered as later on."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        os._exit(130)  # Python itself may end by the signal, where an import was in exec
    run()


if __name__ == "__main__":
    main()
