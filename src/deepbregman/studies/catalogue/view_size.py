"""The size of views in pretraining; the evaluation uses whole images at their own size."""

from deepbregman.studies.definition import Study, make_arms_with_and_without

STUDY = Study(
    name="view-size",
    title="Should views be smaller than the images?",
    arms=make_arms_with_and_without("views.relative_size", beyond=(1.0, 0.875, 0.75, 0.625, 0.5)),
    x_label="side of a view, as a share of the image's",
    figure="line",
    recipe="best",
    field="views.relative_size",
    note=(
        "Not in the paper. A random crop is enlarged to the view, so things look larger in views "
        "than in the whole images of the evaluation; smaller views undo that. Arms see as many "
        "views, not as many pixels: those of three quarters of the side take 0.56 of the "
        "operations."
    ),
)
