"""Ablation of the divergence to a teacher: one change of the recipe at a time."""

from deepbregman.studies.definition import BOTH, CONTROL, ENDINGS, SIMCLR, Arm, Changes, Study

PARTS: dict[str, dict[str, Changes]] = {
    "term": {"InfoNCE instead": ENDINGS[CONTROL], "both": ENDINGS[BOTH]},
    "teacher's view": {
        "strong": {"weak_views.jitter_probability": 0.8, "weak_views.greyscale": 0.1},
        "two as points": {"weak_views.num_views": 2},
        "two as a set": {"weak_views.num_views": 2, "divergence.sets": "rest"},
    },
    "momentum": {
        "none": {"teacher.momentum": 0.0},
        "0.996": {"teacher.momentum": 0.996},
        "0.99 to 1": {"teacher.schedule": "cosine"},
    },
    "subnetworks": {
        "learned": {"divergence.source": "learned", "divergence.num_subnetworks": 100},
        "prototypes, sinkhorn": {
            "divergence.source": "prototypes",
            "divergence.num_subnetworks": 512,
            "divergence.centring": "sinkhorn",
        },
        "prototypes, mean": {
            "divergence.source": "prototypes",
            "divergence.num_subnetworks": 512,
            "divergence.centring": "mean",
        },
    },
    "compared by": {"contrast": {"divergence.compare": "contrast", "divergence.pairs": "views"}},
    "form": {"hard": {"divergence.smoothing": 0.0}},
    "T_s, T_t": {
        f"{student}, {target}": {
            "divergence.smoothing": student,
            "divergence.target_smoothing": target,
        }
        for student, target in ((0.1, 0.04), (0.1, 0.07), (0.1, 0.1), (0.2, 0.05), (0.2, 0.2))
    },
    "bank": {
        f"{size:,}": {"divergence.num_subnetworks": size} for size in (256, 1024, 16384, 65536)
    },
}
"""Part -> label -> what it changes."""


def _name(part: str, label: str) -> str:
    words = f"{part}-{label}".replace(",", "").replace("'s", "")
    return words.replace(" ", "-").lower()


STUDY = Study(
    name="teacher",
    title="Which part of the divergence to a teacher makes the difference?",
    arms=(
        Arm("recipe", {}, "as it is", "recipe", beyond=True),
        Arm("none", {"divergence.weight": 0.0}, "none", SIMCLR, beyond=True),
        *(
            Arm(_name(part, label), changes, label, part, beyond=True)
            for part, labels in PARTS.items()
            for label, changes in labels.items()
        ),
    ),
    figure="parts",
    recipe="best",
    reference="none",
    note=(
        "Each arm changes one part of the recipe best. The paper has neither a teacher nor a bank. "
        "The number of student views is no arm: SimCLR needs two (the recipe ressl has one), and "
        "four cost twice as much: compare those by study comparison, with half the epochs."
    ),
)
