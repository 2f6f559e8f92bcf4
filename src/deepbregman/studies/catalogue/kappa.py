"""Number of subnetworks: the paper's table and figure on kappa."""

from dataclasses import replace
from itertools import product

from deepbregman.reporting.grid_charts import OURS
from deepbregman.studies.definition import SIMCLR, Arm, Published, Study, make_arms

FIELD, VALUES = "divergence.num_subnetworks", (5, 20, 50, 100, 200, 500, 1000)
DEEP_DIVERGENCE = tuple(
    replace(arm, supervised=True)
    for form, loss in product(("max", "moment"), ("contrastive", "triplet"))
    for arm in make_arms(
        "objective.num_subnetworks",
        (),
        beyond=VALUES,
        series=f"Deep Divergence, {form}, {loss} (supervised)",
        prefix=f"deep-{form}-{loss}-",
        also={
            "objective.name": "deep_divergence",
            "objective.form": form,
            "objective.loss": loss,
            "divergence.weight": 0.0,
        },
    )
)
"""Cilingir et al. 2020, trained here with labels: not a like-for-like baseline."""

TABLE = "the paper's table of subnetworks: CIFAR-10, linear evaluation; one run, no deviation"
FIRST_ROW = (
    "the first row of the paper's table of subnetworks, which Cilingir et al. 2020 printed as kNN "
    "of a small supervised network"
)

STUDY = Study(
    name="kappa",
    title="How many subnetworks?",
    arms=(
        Arm("none", {"divergence.weight": 0.0}, 0, SIMCLR, beyond=True),
        *make_arms(FIELD, VALUES),
        *DEEP_DIVERGENCE,
    ),
    x_label="number of subnetworks",
    figure="line",
    field=FIELD,
    reference="none",
    published=(
        Published(
            "the paper",
            dict(zip(map(str, VALUES), (85.2, 88.9, 91.0, 92.6, 92.8, 89.2, 85.5), strict=True)),
            "cifar10",
            TABLE,
        ),
        Published(
            "Deep Divergence (supervised)",
            dict(zip(map(str, VALUES), (71.9, 77.8, 79.4, 80.0, 77.4, 74.1, 70.8), strict=True)),
            "cifar10",
            FIRST_ROW,
            beside=(OURS, *dict.fromkeys(arm.series for arm in DEEP_DIVERGENCE)),
            metric="kNN",
        ),
        Published(
            "the paper's text",
            {"10": 90.0, "150": 93.2},
            "cifar10",
            'the paper\'s section on kappa: "around 90%" at 10 and 93.2 at 150, read off a figure',
        ),
    ),
    note=(
        "The paper finds a rise up to some 150 subnetworks and a fall beyond. Its row of Deep "
        "Divergence is from a supervised table; --only '*' trains that method too, with labels."
    ),
)
