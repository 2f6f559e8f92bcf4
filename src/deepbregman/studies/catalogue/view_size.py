"""How large a view is while pretraining, where whole images are judged at their own size."""

from deepbregman.studies.definition import OURS, SIMCLR, Study, over

SIZE, SMALLER = 32, (28, 24, 20, 16)

STUDY = Study(
    name="view-size",
    title="Should views be smaller than the images that are judged?",
    arms=(
        *over(
            "views.image_size",
            (SIZE,),
            series=SIMCLR,
            also={"divergence.weight": 0.0},
            prefix="simclr-",
            beyond=SMALLER,
        ),
        *over("views.image_size", (SIZE,), series=OURS, prefix="divergence-", beyond=SMALLER),
    ),
    x_label="side of a view, pixels",
    figure="line",
    recipe="best",
    field="views.image_size",
    note=(
        "A random crop is enlarged to the view, so things look larger in views than in the whole "
        "images that are judged; smaller views undo that. Arms see as many views, not as many "
        "pixels: one of 24 px takes 0.56 of the operations of one of 32."
    ),
)
