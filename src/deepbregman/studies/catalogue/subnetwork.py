"""Ablation of the subnetworks: one factor of the recipe at a time."""

from deepbregman.studies.definition import Arm, Study

FACTORS: dict[str, tuple[str, dict[str, object]]] = {
    "normalisation": ("divergence.norm", {n: n for n in ("output", "standard", "hidden", "none")}),
    "activation": ("divergence.activation", {"linear": "none", "ReLU": "relu"}),
    "hidden width": ("divergence.hidden", {str(n): n for n in (8, 16, 32, 64, 128)}),
    "divergence": ("divergence.smoothing", {"hard": 0.0, "smooth": 1.0}),
    "pairs": ("divergence.pairs", {"views": "views", "all": "all"}),
    "temperature": ("divergence.temperature", {str(t): t for t in (0.05, 0.1, 0.2, 0.5, 1.0)}),
}
"""Factor -> its field, and the value behind each label."""

STUDY = Study(
    name="subnetwork",
    title="What should a subnetwork be made of?",
    arms=(
        Arm("recipe", {}, "as it is", "recipe"),
        *(
            Arm(
                f"{field.partition('.')[2]}-{label.lower()}",
                {field: value},
                label,
                factor,
                beyond=label == "standard"
                or (factor in ("divergence", "temperature") and label not in ("hard", "1.0")),
            )
            for factor, (field, values) in FACTORS.items()
            for label, value in values.items()
        ),
    ),
    figure="parts",
    reference="recipe",
    note=(
        "The paper takes two linear layers of 32 and 1 with batch normalisation and says that the "
        "width was searched; it prints no values. A value that the recipe already has is trained "
        "once, as the recipe."
    ),
)
