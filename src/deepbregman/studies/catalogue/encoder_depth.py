"""Depth of the encoder, with the divergence and without."""

from deepbregman.studies.definition import SIMCLR, Published, Study, make_arms_with_and_without

STUDY = Study(
    name="encoder-depth",
    title="Does a deeper encoder help, and does the divergence help it?",
    arms=make_arms_with_and_without(
        "encoder.name", ("resnet18", "resnet34", "resnet50", "resnet101")
    ),
    x_label="encoder",
    figure="line",
    field="encoder.name",
    published=(
        Published(
            "the paper",
            {"resnet50": 93.2},
            "cifar10",
            "the paper's table of baselines: CIFAR-10, ResNet-50, 400 epochs, linear; one run",
        ),
        Published(
            "the paper's SimCLR", {"resnet50": 91.8}, "cifar10", "the same table", beside=(SIMCLR,)
        ),
    ),
    note="The paper describes encoders of 18 and 50 layers and prints results of the latter.",
)
