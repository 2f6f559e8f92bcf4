"""How large a view is while pretraining, where whole images are judged at their own size."""

from deepbregman.studies.definition import OURS, SIMCLR, Study, arms_over

SHARES = (1.0, 0.875, 0.75, 0.625, 0.5)

STUDY = Study(
    name="view-size",
    title="Should views be smaller than the images that are judged?",
    arms=(
        *arms_over(
            "views.relative_size",
            (),
            series=SIMCLR,
            also={"divergence.weight": 0.0},
            prefix="simclr-",
            beyond=SHARES,
        ),
        *arms_over(
            "views.relative_size",
            (),
            series=OURS,
            prefix="divergence-",
            beyond=SHARES,
            only_if="divergence.weight",
        ),
    ),
    x_label="side of a view, as a share of the image's",
    figure="line",
    recipe="best",
    field="views.relative_size",
    note=(
        "Not in the paper. A random crop is enlarged to the view, so things look larger in views "
        "than in the whole images that are judged; smaller views undo that. Arms see as many "
        "views, not as many pixels: those of three quarters of the side take 0.56 of the "
        "operations."
    ),
)
