"""What the library says to arguments that mean nothing: the value, and the rule."""

import pytest
import torch

import deepbregman as db
from deepbregman.method.losses import match_scores

FOUR, THREE = torch.rand(5, 4), torch.rand(5, 3)
FEWER = torch.rand(2, 4)
ENCODER = db.build_encoder("small", 8)
TEACHER = db.Teacher(torch.nn.Linear(2, 2))


def test_rows_are_compared_with_as_many_rows():
    """Else one target would be that of all images."""
    for other in (FOUR[:1], FOUR[:, :1], THREE):
        for temperature in (0.0, 0.2):
            with pytest.raises(ValueError, match="must have the same shape"):
                match_scores(FOUR, other, temperature=temperature)


def test_numbers_of_views_may_be_in_an_array():
    given = torch.tensor([0.2, 0.5])
    assert db.Views(8, crop_area=given).crop_area == pytest.approx((0.2, 0.5))  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: db.similarity(FOUR, sigma=0), "sigma is 0: it must be a finite number above 0"),
        (lambda: db.divergence_loss(FOUR, FOUR, sigma=0.0), "sigma is 0.0"),
        (lambda: db.divergence_loss(FOUR, FOUR, smoothing=-1.0), "smoothing is -1.0"),
        (lambda: db.divergence_loss(FOUR, FEWER), r"\(5, 4\) and \(2, 4\): row i of both must be"),
        (lambda: db.nt_xent(FOUR, FEWER), r"shapes \[\(5, 4\), \(2, 4\)\]: .* one shape \(N, d\)"),
        (lambda: db.nt_xent(FOUR[None], FOUR[None]), r"one shape \(N, d\)"),
        (lambda: db.nt_xent(FOUR, FOUR, temperature=0), "temperature is 0"),
        (lambda: db.nt_logistic(FOUR[:1], FOUR[:1]), "N is 1: .* 2 images or more"),
        (lambda: db.match_divergence(FOUR, FEWER, FOUR), r"expected \(N, d\), \(N, d\)"),
        (lambda: db.match_divergence(FOUR, THREE, FOUR), r"expected \(N, d\), \(N, d\)"),
        (lambda: db.match_divergence(FOUR, FOUR, THREE), r"weight of shape \(5, 3\)"),
        (lambda: db.match_divergence(FOUR[:0], FOUR[:0], FOUR), r"\(0, 4\).* one row or more"),
        (lambda: db.match_divergence(FOUR, FOUR, FOUR[:0]), r"\(0, 4\): .* one row or more"),
        (lambda: db.match_divergence(FOUR, FOUR, FOUR, target_temperature=0), "target_.* is 0"),
        (lambda: db.info_nce(FEWER, FOUR), r"z of shape \(2, 4\), target of shape \(5, 4\)"),
        (lambda: db.info_nce(FOUR, FOUR, THREE), r"negatives of shape \(5, 3\): .* \(K, d\)"),
        (lambda: db.divergence(FOUR, THREE), r"\(5, 4\) and \(5, 3\): the last dimension"),
        (lambda: db.soft_divergence(FOUR, THREE), "must be the same in both"),
        (lambda: db.moment_divergence(FOUR, THREE), "must be the same in both"),
        (lambda: db.divergence(FOUR[:, :0], FOUR[:, :0]), "1 or more"),
        (lambda: db.soft_divergence(FOUR, FOUR, 0.0), "temperature is 0.0"),
        (lambda: db.log_sum_exp(FOUR, 0.0), "temperature is 0.0"),
        (lambda: db.bregman(db.kl, FOUR, THREE), "last dimensions must be the same"),
        (lambda: db.BregmanNetwork(in_features=3)(FOUR), r"\(5, 4\): expected \(N, 3\)"),
        (lambda: ENCODER(torch.ones(1, 3, 8, 8).long()), r"torch.int64: give uint8 in 0..255"),
        (lambda: ENCODER(torch.rand(1, 8, 8, 3)), r"\(1, 8, 8, 3\): .* if channels are last"),
        (lambda: db.Views(8, jitter=0.4), "jitter is 0.4, but must be four strengths"),  # type: ignore[arg-type]  # what is tested
        (lambda: db.Views(8, crop_area=0.2), "crop_area is 0.2, but must be two numbers"),  # type: ignore[arg-type]  # likewise
        (lambda: db.Bank(0, 2), "size is 0"),
        (lambda: db.Bank(8, 3).push(FOUR), r"\(5, 4\): expected \(N, 3\)"),
        (lambda: db.Teacher(torch.nn.Linear(2, 2), momentum=1.5), "momentum is 1.5"),
        (lambda: TEACHER.update(torch.nn.Linear(2, 2), momentum=1.5), "momentum is 1.5"),
        (lambda: TEACHER.update(torch.nn.Sequential()), "the network that the teacher"),
        (lambda: TEACHER.update(torch.nn.Linear(2, 3)), r"\(3, 2\) where .* has \(2, 2\)"),
        (lambda: TEACHER.update(torch.nn.Linear(2, 2, bias=False)), "1 weights and its teacher 2"),
    ],
)
def test_the_value_and_the_rule_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_bank_in_place_of_its_weight_is_named():
    for loss in (db.match_divergence, db.info_nce):
        with pytest.raises(TypeError, match=r"is of type Bank: .* give bank\.weight"):
            loss(FOUR, FOUR, db.Bank(8, 4))


def test_a_temperature_without_its_name_is_no_view():
    for loss in (db.nt_xent, db.nt_logistic):
        with pytest.raises(TypeError, match=r"view of type float: .* such as temperature=0\.1"):
            loss(FOUR, FOUR, 0.1)  # type: ignore[arg-type]  # what is tested


def test_one_subnetwork_and_one_image_are_allowed():
    """The edge of what is refused: one score has no gap, and one image no negative."""
    assert db.divergence(FOUR[:, :1], FOUR[:, :1]).abs().max() == 0.0
    assert db.nt_xent(FOUR[:1], FOUR[:1]).item() == pytest.approx(0.0, abs=1e-6)


def test_the_version_is_there():
    assert db.__version__.count(".") == 2
