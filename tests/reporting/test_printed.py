"""Which published values stand in which rows of a study's table."""

from deepbregman.reporting.printed import are_images_of, printed_series, printed_value
from deepbregman.runs import Record
from deepbregman.studies.catalogue import catalogue
from deepbregman.studies.definition import Search, Study


def rows(name: str, data: str = "cifar10") -> dict[str, list[str]]:
    """Return what stands beside every arm of a study."""
    study = catalogue()[name]
    assert isinstance(study, Study)
    results: Record = {"study": study.record(), "data": data}
    return {
        arm.name: [
            printed_value(part, {"series": arm.series, "x": arm.x})
            for part in printed_series(results)
        ]
        for arm in study.arms
    }


def test_a_value_stands_beside_its_own_method() -> None:
    kappa = rows("kappa")  # the paper, Deep Divergence, the paper's text
    assert kappa["200"] == ["92.8", "77.4", ""]
    assert kappa["deep-max-triplet-200"] == ["", "77.4", ""]  # 92.8 is another method's
    assert kappa["none"] == ["", "", ""]
    depth = rows("encoder-depth")  # the paper, its SimCLR
    assert depth["simclr-resnet50"] == ["", "91.8"]
    assert depth["divergence-resnet50"] == ["93.2", ""]
    assert depth["divergence-resnet18"] == ["", ""]
    psi = rows("psi")
    assert (psi["none"], psi["gaussian"], psi["linear"]) == (["91.8"], ["93.2"], [""])


def test_images_are_known_by_the_name_of_their_file_too() -> None:
    assert rows("psi", "images/CIFAR10.npz") == rows("psi")
    assert rows("psi", "images/cifar10-mine.npz")["gaussian"] == []


def test_a_value_of_one_encoder_stands_beside_that_alone() -> None:
    study = catalogue()["comparison"]
    assert isinstance(study, Study)

    def beside(encoder: str, **others: str) -> dict[str, str]:
        arm = {"series": "SimCLR", "x": "simclr", "cost": {"encoder": encoder}}
        results: Record = {"study": study.record(), "data": "cifar10", "arms": [arm], **others}
        return {part["metric"]: printed_value(part, arm) for part in printed_series(results)}

    assert beside("resnet18") == {"knn, cosine, k=200": "84.8", "linear, cached features": "85.6"}
    assert beside("resnet50") == {}
    assert beside("resnet18", judge="holdout") == {}  # those are of the test images
    assert beside("resnet18", data="cifar100") == {}
    ours = {"series": "with divergence", "x": "simclr", "cost": {"encoder": "resnet18"}}
    assert [printed_value(part, ours) for part in study.record()["published"]] == ["", ""]
    other = {"series": "SimCLR", "x": "simclr", "cost": {"encoder": "resnet50"}}
    assert [printed_value(part, other) for part in study.record()["published"]] == ["", ""]


def test_a_search_s_published_best_is_of_one_set_of_images() -> None:
    study = catalogue()["sigma-lambda"]
    assert isinstance(study, Search)
    assert study.published == {"divergence.sigma": 1.5, "contrastive.weight": 5.0}
    assert are_images_of("images/CIFAR10.npz", study.published_data)
    assert not are_images_of("digits", study.published_data)
