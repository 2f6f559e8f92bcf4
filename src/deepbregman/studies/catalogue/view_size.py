"""How large a view is while pretraining, where whole images are judged at their own size."""

from collections.abc import Sequence
from typing import Any

from deepbregman.config import Config
from deepbregman.errors import UserError
from deepbregman.studies.definition import OURS, SIMCLR, Study, over

SHARES = (1.0, 0.875, 0.75, 0.625, 0.5)
"""Of the side of the images."""


def _sides(image_size: int) -> tuple[int, ...]:
    return tuple(round(share * image_size) for share in SHARES)


class _ViewSize(Study):
    def fitted(self, base: Config) -> Study:
        """Return the study with sides that are shares of the images' own."""
        return self.with_values(_sides(base.data.image_size))

    def with_values(self, values: Sequence[Any]) -> Study:
        """Replace the sides, which must be told in pixels: 0 would be one of them again."""
        if 0 in values:
            raise UserError("--values 0: give the side of a view in pixels, such as 24")
        return super().with_values(values)


STUDY = _ViewSize(
    name="view-size",
    title="Should views be smaller than the images that are judged?",
    arms=(
        *over(
            "views.image_size",
            (),
            series=SIMCLR,
            also={"divergence.weight": 0.0},
            prefix="simclr-",
            beyond=_sides(32),
        ),
        *over(
            "views.image_size",
            (),
            series=OURS,
            prefix="divergence-",
            beyond=_sides(32),
            only_if="divergence.weight",
        ),
    ),
    x_label="side of a view, pixels",
    figure="line",
    recipe="best",
    field="views.image_size",
    note=(
        "Not in the paper. A random crop is enlarged to the view, so things look larger in views "
        "than in the whole images that are judged; smaller views undo that. Arms see as many "
        "views, not as many pixels: those of three quarters of the side take 0.56 of the "
        "operations."
    ),
)
