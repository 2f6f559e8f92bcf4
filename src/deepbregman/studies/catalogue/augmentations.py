"""Accuracy lost as augmentations are removed: the paper's figure."""

from deepbregman.reporting.grid_charts import OURS
from deepbregman.studies.definition import SIMCLR, Arm, Study

COLOUR = ("greyscale", "jitter", "solarise")
STEPS: tuple[tuple[str, str, tuple[str, ...], str | None], ...] = (
    ("all", "all", (), None),
    ("no-greyscale", "no greyscale", ("greyscale",), "views.greyscale"),
    ("no-colour", "no colour", COLOUR, "views.jitter_probability"),
    ("crop-blur", "crop and blur", (*COLOUR, "flip", "rotation"), "views.blur"),
    ("crop", "crop only", (*COLOUR, "flip", "rotation", "blur"), None),
    ("no-crop", "all but crop", ("crop",), None),
)
"""Name, title, operators to leave out, and a field; where that is 0, the step changes nothing."""

STUDY = Study(
    name="augmentations",
    title="What is lost as augmentations are taken away?",
    arms=tuple(
        Arm(
            f"{prefix}-{name}",
            {**method, "views.without": list(without)},
            words,
            series,
            only_if=needed,
        )
        for prefix, series, method in (
            ("simclr", SIMCLR, {"divergence.weight": 0.0}),
            ("divergence", OURS, {}),
        )
        for name, words, without, needed in STEPS
    ),
    figure="drops",
    note=(
        "The paper shows it on ImageNet, as a figure whose values its text does not give; SimCLR's "
        "are from Grill et al. 2020 (BYOL). The order of the steps here is ours. The text adds "
        "that SimCLR does not work well without the crop."
    ),
)
