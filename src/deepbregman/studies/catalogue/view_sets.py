"""An image's views as distributions, against the same views as points."""

from deepbregman.reporting.grid_charts import OURS
from deepbregman.studies.definition import Arm, Study

STUDY = Study(
    name="view-sets",
    title="Are an image's views better taken as a distribution than as points?",
    arms=tuple(
        Arm(name, {"divergence.sets": sets, "views.num_views": 4}, words, OURS, beyond=True)
        for name, words, sets in (
            ("points", "views as points", "none"),
            ("distributions", "views as distributions", "halves"),
        )
    ),
    figure="bars",
    recipe="digits",
    reference="points",
    note=(
        "Four views of an image as two empirical distributions of two views each "
        "(divergence.sets), against the same four views as points, every pair compared; the same "
        "views, batches, epochs and seeds, so the same cost."
    ),
)
