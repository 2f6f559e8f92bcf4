"""Every method that trains without labels, alone and with the divergence, at one budget."""

from deepbregman.studies.definition import Study

STUDY = Study(
    name="methods",
    title="Which method, and does the divergence help it?",
    arms=(),
    x_label="method",
    figure="bars",
    recipes=(
        *("simclr", "simclr-v2", "moco-v2", "moco-v2plus", "moco-v3", "nnclr", "byol", "simsiam"),
        *("swav", "dino", "barlow-twins", "vicreg", "wmse", "ssl-hsic", "ressl", "sce"),
        *("pirl", "instdisc", "cmc", "amdim", "dim", "cpc"),
    ),
    with_divergence={"divergence.weight": 1.0},
    unequal=True,
    note=(
        "Every method has the settings of its recipe. The arm with the divergence matches a "
        "teacher over a bank where the recipe has both, and contrasts learned subnetworks "
        "elsewhere. Methods that take one view of an image cannot carry it. Choose learning rates "
        "before, on held-out images: study learning-rates, then --rates with its folder."
    ),
)
