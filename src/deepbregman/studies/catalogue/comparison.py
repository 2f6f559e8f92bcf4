"""Whole recipes side by side at an equal budget, seed by seed: does the divergence help?"""

from deepbregman.studies.definition import SIMCLR, Published, Study

STUDY = Study(
    name="comparison",
    title="Which recipe is better?",
    arms=(),
    figure="pairs",
    recipes=("simclr", "best"),
    published=(
        Published(
            "lightly's SimCLR",
            {"simclr": 84.8},
            "cifar10",
            "lightly's benchmarks page of 2023: CIFAR-10, ResNet-18, 200 epochs, batch 512, "
            "kNN k=200 on the test images, the highest of all epochs; one run",
            beside=(SIMCLR,),
            metric="knn, cosine, k=200",
            encoder="resnet18",
        ),
        Published(
            "simclr-cifar10",
            {"simclr": 85.6},
            "cifar10",
            "the README of dkobak/simclr-cifar10: CIFAR-10, ResNet-18, 100 epochs, batch 512, "
            "base learning rate 0.06, linear on precomputed features; mean, ± 0.2 over 3 runs",
            beside=(SIMCLR,),
            encoder="resnet18",
        ),
    ),
    note="Arms are trained with the same seeds and evaluated at the last epoch.",
)
