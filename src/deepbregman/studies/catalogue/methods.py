"""Every method that trains without labels: alone, with the divergence, and with its control."""

from deepbregman.studies.definition import ALONE, Published, Study

STUDY = Study(
    name="methods",
    title="Which method, and does the divergence help it?",
    arms=(),
    figure="groups",
    recipes=(
        *("simclr", "simclr-v2", "moco-v2", "moco-v2plus", "moco-v3", "nnclr", "byol", "simsiam"),
        *("swav", "dino", "barlow-twins", "vicreg", "wmse", "ssl-hsic", "ressl", "sce"),
        *("pirl", "instdisc", "cmc", "amdim", "dim", "cpc"),
    ),
    with_divergence={"divergence.weight": 1.0},
    unequal=True,
    published=(
        Published(
            "linear, 100 epochs",
            {"simclr": 85.6},
            "cifar10",
            "the README of dkobak/simclr-cifar10: ResNet-18, batch 512, mean of 3 seeds, views of "
            "32 px",
            beside=(ALONE,),
            encoder="resnet18",
        ),
        Published(
            "linear, 1000 epochs",
            {
                **{"simclr": 90.74, "moco-v2plus": 92.94, "moco-v3": 93.10, "nnclr": 91.88},
                **{"byol": 92.58, "simsiam": 90.51, "swav": 89.17, "dino": 89.52},
                **{"barlow-twins": 92.10, "vicreg": 92.07, "wmse": 88.67, "ressl": 90.63},
            },
            "cifar10",
            "the README of solo-learn: ResNet-18, batch 256, one run, a classifier that learns "
            "beside the encoder, views of 32 px",
            beside=(ALONE,),
            encoder="resnet18",
        ),
        Published(
            "kNN, 200 epochs",
            {
                **{"simclr": 84.8, "moco-v2plus": 84.7, "nnclr": 83.4, "byol": 86.9},
                **{"simsiam": 81.9, "swav": 84.2, "dino": 84.0, "barlow-twins": 84.2},
            },
            "cifar10",
            "the documentation of lightly: ResNet-18, the better of batches 128 and 512, one run, "
            "the best epoch by test accuracy, views of 32 px",
            beside=(ALONE,),
            metric="knn, cosine, k=200",
            encoder="resnet18",
        ),
    ),
    note=(
        "Every method has the settings of its recipe. The arm with the divergence matches a "
        "teacher over a bank: the method's own teacher, or one beside it that sees a weak view. "
        "Its control has InfoNCE to the same teacher and bank instead. Choose learning rates "
        "before, on held-out images: study learning-rates, then --rates with its folder."
    ),
)
