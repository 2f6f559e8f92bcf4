"""``deepbregman`` and ``python -m deepbregman``: the command line, as soon as it is loaded."""

import os
import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still loading is answered as later on."""
    # Before OpenMP is loaded, with torch. Its threads wait for each other in a loop of up to some
    # milliseconds, which takes the CPU from the very thread that they wait for where other programs
    # run; docs/log.md has what was measured.
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        os._exit(130)  # Python itself may end by the signal, where an import was in exec
    run()


if __name__ == "__main__":
    main()
