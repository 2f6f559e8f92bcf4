"""deepbregman tune: a Bayesian search over fields of a recipe."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from deepbregman.studies.fields import assignments

from .options import Accelerator, parse, say, screen


def command(arguments: list[str]) -> None:
    """Search a recipe's hyperparameters on held-out images: deepbregman tune RECIPE --space ..."""

    def options(
        recipe: Annotated[str | None, tyro.conf.Positional] = None,
        space: tuple[str, ...] = (),
        trials: int | None = None,
        data: str | None = None,
        epochs: int | None = None,
        changes: Annotated[tuple[str, ...], tyro.conf.arg(name="set")] = (),
        objective: Literal["linear", "knn"] | None = None,
        sampler: Literal["gp", "tpe", "random"] | None = None,
        prune: bool | None = None,
        out: Path | None = None,
        storage: str | None = None,
        accelerator: Accelerator = "auto",
    ) -> None:
        """Search fields of a recipe by their accuracy on held-out training images.

        The test images are never looked at. A search can be stopped and started again; start the
        command several times with the same --out or --storage to let several processes share it.
        Options that are left out are those that the search began with.

        Args:
            recipe: A recipe's name or a .toml file.
            space: Fields and their values: field=LOW:HIGH, field=LOW:HIGH:log, field=A,B,C, or a
                .toml file of them.
            trials: How many in all, of all workers together; 40 by default.
            data: A labelled source in place of the recipe's.
            epochs: Of pretraining, in place of the recipe's.
            changes: Fields to change in every trial, such as training.batch_size=256.
            objective: linear (the default) or knn.
            sampler: gp (a Gaussian process, the default; it learns from completed trials only),
                tpe (which learns from pruned ones too) or random.
            prune: Stop a trial whose kNN monitor is below the median of earlier ones; True by
                default.
            out: Folder of the search; by default studies/tune-RECIPE.
            storage: An Optuna storage URL, such as postgresql+psycopg://user@host/database; by
                default search.db in the folder. There, a search goes by the name of its folder,
                which remembers where it is, but no password.
            accelerator: Where to train; auto takes a GPU if there is one.
        """
        from deepbregman.studies.tuning.plan import Request
        from deepbregman.studies.tuning.search import tune

        console = screen()
        request = Request(
            recipe=recipe,
            space=space,
            trials=trials,
            data=data,
            epochs=epochs,
            changes=assignments(changes),
            objective=objective,
            sampler=sampler,
            prune=prune,
            out=out,
            storage=storage,
            accelerator=accelerator,
        )
        say(console, f"search: {tune(request, console)}")

    parse(options, "tune", arguments)
