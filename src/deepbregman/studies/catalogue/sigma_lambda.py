"""The width of the kernel and the balance of the losses: the paper's Bayesian search."""

from deepbregman.studies.definition import Search

STUDY = Search(
    name="sigma-lambda",
    title="Which sigma and which lambda? A Bayesian search on held-out images.",
    # The paper has no ranges. These hold its best values with room on either side.
    space=("divergence.sigma=0.1:10:log", "objective.weight=0.1:20:log"),
    trials=40,
    published={"divergence.sigma": 1.5, "objective.weight": 5.0},
    published_data="cifar10",
)
