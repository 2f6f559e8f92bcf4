"""deepbregman quickstart: the first three minutes."""

from pathlib import Path

from .options import parse, screen


def command(arguments: list[str]) -> None:
    """Pretrain on digits, under 3 minutes on a CPU, and see what it was good for."""

    def options(run: Path | None = None, epochs: int | None = None) -> None:
        """Pretrain on scikit-learn's digits and compare with raw pixels and an untrained encoder.

        Args:
            run: Folder of the run, which must not exist; by default a new one under runs/.
            epochs: In place of the recipe's.
        """
        from deepbregman.studies.quickstart import quickstart

        quickstart(run=run, epochs=epochs, console=screen())

    parse(options, "quickstart", arguments)
