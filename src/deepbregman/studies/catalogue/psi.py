"""Kernels that turn a divergence into a similarity: the paper's table of psi."""

from deepbregman.reporting.grid_charts import OURS
from deepbregman.studies.definition import SIMCLR, Arm, Published, Study, make_arms

STUDY = Study(
    name="psi",
    title="Which kernel turns a divergence into a similarity?",
    arms=(
        Arm("none", {"divergence.weight": 0.0}, "none", SIMCLR, beyond=True),
        *make_arms(
            "divergence.kernel",
            ("gaussian", "inverse", "sqrt", "linear", "arccot"),
            beyond=("negative",),
        ),
    ),
    figure="bars",
    field="divergence.kernel",
    reference="none",
    published=(
        Published(
            "the paper",
            {"gaussian": 92.6, "none": 91.8},
            "cifar10",
            "the paper's tables of subnetworks, at 100, and of baselines: CIFAR-10, ResNet-50, 400 "
            "epochs, linear; one run",
            beside=(OURS, SIMCLR),
        ),
    ),
    note="The paper lists five kernels, says that the Gaussian was best, and gives no accuracies.",
)
