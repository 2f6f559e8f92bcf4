"""deepbregman evaluate: how good a run's encoder is."""

from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from .options import Accelerator, parse, say


def command(arguments: list[str]) -> None:
    """Judge a run's frozen encoder by kNN and linear classification."""

    def options(
        run: tyro.conf.Positional[Path],
        protocol: tuple[Literal["knn", "linear"], ...] = ("knn", "linear"),
        data: str | None = None,
        epochs: int = 50,
        seed: int = 0,
        skip_unreadable: bool = False,
        accelerator: Accelerator = "auto",
    ) -> None:
        """Judge a run's frozen encoder; the rows also go into RUN/result.json.

        Args:
            run: Folder of the run.
            protocol: knn: by cosine and by the learned divergence. linear: on cached features, and
                on features of random crops.
            data: A labelled source in place of the run's own.
            epochs: Of the linear classifier on random crops; 0 leaves it out.
            seed: Of splits and crops.
            skip_unreadable: Go on without images that cannot be read.
            accelerator: Where to compute; auto takes a GPU if there is one.
        """
        from deepbregman.evaluation.protocols import evaluate
        from deepbregman.reporting.tables import evaluation_table

        rows = evaluate(
            run,
            protocols=protocol,
            data=data,
            epochs=epochs,
            seed=seed,
            skip_unreadable=skip_unreadable,
            accelerator=accelerator,
        )
        console = Console()
        console.print(evaluation_table(rows, f"{run} on {rows[0]['data']}"))
        if rows[0]["epoch"] < rows[0]["epochs"]:
            words = f"after {rows[0]['epoch']:g} of {rows[0]['epochs']} epochs"
            say(console, f"warning: this run is not finished; it was judged {words}")

    parse(options, "evaluate", arguments)
