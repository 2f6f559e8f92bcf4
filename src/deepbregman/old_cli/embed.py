"""deepbregman embed: images to features."""

from pathlib import Path

import tyro

from .options import Accelerator, parse


def command(arguments: list[str]) -> None:
    """Write the features of images to an .npz file."""

    def options(
        run: tyro.conf.Positional[Path],
        out: Path,
        data: str | None = None,
        skip_unreadable: bool = False,
        accelerator: Accelerator = "auto",
    ) -> None:
        """Write the features of every image of a source to an .npz file.

        Args:
            run: Folder of the run.
            out: File to write; must not exist.
            data: A source in place of the run's own; labels are not needed.
            skip_unreadable: Go on without images that cannot be read.
            accelerator: Where to compute; auto takes a GPU if there is one.
        """
        from deepbregman.evaluation.embedding import embed

        shapes = embed(
            run, out, data=data, skip_unreadable=skip_unreadable, accelerator=accelerator
        )
        for name, shape in shapes.items():
            print(f"{name:<20} {' x '.join(map(str, shape))}")

    parse(options, "embed", arguments)
