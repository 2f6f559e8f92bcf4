"""Whole protocols: what they measure on features whose answer is known, and what they leave."""

import copy
import itertools
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import balanced_accuracy_score

from deepbregman.commands.cluster import cluster
from deepbregman.commands.evaluate import evaluate
from deepbregman.commands.pretrain import pretrain
from deepbregman.config import override
from deepbregman.data import ArrayImages, FileImages, Source, Split, fingerprint
from deepbregman.data.opening import open_data, select_images, split_for_monitor
from deepbregman.errors import Diverged, Notice, UserError
from deepbregman.evaluation.features import LabelledFeatures
from deepbregman.evaluation.inputs import Evaluation, load_run, open_labelled
from deepbregman.evaluation.knn import classify_by, knn
from deepbregman.evaluation.linear import (
    LinearClassifier,
    SgdRows,
    SgdSetting,
    fit_linear,
    hold_out,
    measure_on_cached,
    measure_on_crops,
)
from deepbregman.evaluation.options import Few, Options, Semi
from deepbregman.method.bregman import divergence, soft_divergence
from deepbregman.method.views import Views
from deepbregman.objectives import build_step
from deepbregman.runs import Run
from deepbregman.training import checkpoints
from deepbregman.training.randomness import epoch_order

from .conftest import with_gaps


def of(
    labelled: LabelledFeatures, train: Split | None = None, test: Split | None = None
) -> LabelledFeatures:
    """The same networks, judged by other images or labels."""
    source = labelled.source
    return replace(
        labelled, source=replace(source, train=train or source.train, test=test or source.test)
    )


def test_an_untrained_encoder_scores_less(labelled):
    """Loading is real: the run's weights do better than fresh ones of the same shape."""
    fresh = build_step(labelled.config).model.eval()
    trained = classify_by(labelled, "divergence")[0]
    untrained = classify_by(replace(labelled, model=fresh), "divergence")[0]
    assert trained.values["top1"] > untrained.values["top1"]


def test_a_run_of_no_epochs_is_judged_by_its_features_alone(short_config, few_digits, tmp_path):
    """Its projection and its subnetworks are random."""
    begin = override(short_config, {"training.epochs": 0, "data.source": few_digits})
    assert begin.divergence.is_on
    run = pretrain(begin, run=tmp_path / "run")
    rows = evaluate(
        run,
        protocols=["knn", "retrieval", "cluster", "few", "ood", "corruptions", "semi"],
        epochs=1,
        few=Few(labels_per_class=(2,), draws=1),
        semi=Semi(labels=(0.1,)),
    )
    variants = {row["variant"].replace("divergence over a bank", "") for row in rows}
    assert not [name for name in variants if re.search("embeddings|divergence|projection", name)]
    assert len({row["protocol"] for row in rows}) == 7
    with pytest.raises(UserError, match=r"no divergence network \(nothing was trained\)"):
        cluster(run, by=["divergence"])


@pytest.mark.parametrize(("smoothing", "sigma"), [(0.0, None), (1.0, 0.2)])
def test_knn_by_divergence_equals_a_loop(labelled, smoothing, sigma):
    """The nearest neighbours of each query by D(query || bank), votes weighted by psi.

    The width of psi is the one that the run has learned, if it has.
    """
    config = override(labelled.config, {"divergence.smoothing": smoothing})
    model = copy.deepcopy(labelled.model)
    model.sigma = sigma
    width = config.divergence.sigma if sigma is None else sigma
    bank = labelled.source.train.select(torch.arange(1297)[::21][:60])
    few = replace(of(labelled, train=bank), config=config, model=model)
    (found,) = classify_by(few, "divergence")
    form = (lambda p, q: soft_divergence(p, q, smoothing)) if smoothing else divergence
    distance = form(few.test.features.scores.double(), few.train.features.scores.double())
    shuffled = epoch_order(60, 0, 0)  # decides among equals, of which the hard form has many
    correct = 0
    for row, label in zip(distance, few.test.labels, strict=True):
        nearest = shuffled[row[shuffled].argsort(stable=True)[:20]]
        votes = torch.zeros(few.num_classes, dtype=torch.float64)
        for index in nearest:
            psi = torch.exp(-row[index].double() / (2 * width**2))
            votes[few.train.labels[index]] += torch.exp(psi / 0.1)
        correct += int(votes.argmax() == label)
    expected = 100 * correct / len(few.test.labels)
    assert found.variant == "divergence, k=20"
    assert found.values["top1"] == pytest.approx(expected)
    assert [arm.variant for arm in classify_by(few, "cosine")] == [
        "cosine, k=20"
    ]  # the bank has 60


def test_linear_is_above_chance_and_reports_what_it_chose(few):
    cached = measure_on_cached(few, seed=0)
    assert cached.values["top1"] > 80.0
    assert cached.values["top5"] >= cached.values["top1"]
    assert cached.chosen["l2"] in cached.details["l2_grid"]
    crops = measure_on_crops(few, seed=0, epochs=2)
    assert crops.values["top1"] > 30.0
    assert crops.details["epochs"] == 2
    assert crops.chosen["learning_rate"] in crops.details["learning_rates"]
    assert crops.chosen["weight_decay"] in crops.details["weight_decays"]


def test_crops_choose_by_what_was_held_out_and_test_what_saw_all(few, monkeypatch):
    """Of 12 settings trained without the held-out part the sixth is good; 12 more see all."""
    features, labels = few.train.features.representation, few.train.labels
    good = fit_linear(features, labels, num_classes=10)
    bad = good._replace(weight=torch.zeros_like(good.weight))
    diverged = good._replace(weight=torch.full_like(good.weight, float("nan")))
    always_three = bad._replace(bias=torch.eye(10, dtype=torch.float64)[3])
    fits = [bad] * 12 + [good] * 12
    fits[5], fits[7], fits[12 + 5] = good, diverged, always_three

    def fit(_: object, settings: Sequence[SgdSetting], **__: object) -> list[LinearClassifier]:
        assert [setting.kept_only for setting in settings] == [True] * 12 + [False] * 12
        return fits

    monkeypatch.setattr("deepbregman.evaluation.linear.fit_linear_sgd", fit)
    found = measure_on_crops(few, seed=0, epochs=1)
    assert (found.chosen["weight_decay"], found.chosen["learning_rate"]) == (1e-4, 0.03)
    assert found.chosen["held_out"] > 90.0
    assert found.values["top1"] == 10.0  # a tenth of the test images are threes


def test_crops_hold_out_a_tenth_of_each_class(few, monkeypatch):
    """Rows of whole images are known by their features, whatever their order."""
    name = "deepbregman.evaluation.linear"
    whole = Views(8, num_views=1, without=("crop", "flip", "jitter", "greyscale"))
    monkeypatch.setattr(f"{name}.build_crop_and_flip", lambda _: whole)
    features, labels = few.train.features.representation, few.train.labels
    fits = [fit_linear(features, labels, num_classes=10)] * 24
    seen: list[SgdRows] = []

    def fit(batches: Callable[[int], Iterable[SgdRows]], *_: object, **__: object) -> object:
        seen.extend(batches(2))
        return fits

    monkeypatch.setattr(f"{name}.fit_linear_sgd", fit)
    measure_on_crops(few, seed=4, epochs=1)
    rows, targets, kept = (torch.cat(parts) for parts in zip(*seen, strict=True))
    places = torch.cdist(rows.double(), features.double()).argmin(dim=1)
    assert sorted(places.tolist()) == list(range(200)) != places.tolist()
    assert torch.equal(targets, labels[places])
    held_out = places[~kept].sort().values
    assert torch.equal(held_out, hold_out(labels, 4).sort().values)
    assert torch.bincount(labels[held_out]).tolist() == [2] * 10
    assert not torch.equal(held_out, hold_out(labels, 5).sort().values)


def test_numbers_of_classes_may_have_gaps(few):
    """As where a class has no image at all: the last number counts, not how many there are."""
    for judge in (
        lambda each: classify_by(each, "cosine"),
        lambda each: [measure_on_cached(each, seed=0)],
    ):
        expected, found = judge(few), judge(with_gaps(few))
        assert [one.values for one in found] == [one.values for one in expected]


def test_evaluation_leaves_the_networks_alone(few):
    before = {name: value.clone() for name, value in few.model.state_dict().items()}
    classify_by(few, "cosine")
    classify_by(few, "divergence")
    measure_on_cached(few, seed=0)
    measure_on_crops(few, seed=0, epochs=1)
    assert all(torch.equal(value, before[name]) for name, value in few.model.state_dict().items())
    assert not any(part.training for part in few.model.modules())


def test_rows_replace_older_rows_of_their_kind(short_run):
    first = evaluate(short_run, protocols=["knn"], balanced=True)
    again = evaluate(short_run, protocols=["knn"])
    rows = short_run.result()["evaluations"]  # other tests have judged it on other data
    kept = [row for row in rows if (row["protocol"], row["data"]) == ("knn", "digits")]
    assert kept == again
    assert [row["value"] for row in first if row["metric"] == "top1"] == [
        row["value"] for row in again
    ]
    assert short_run.result()["pretrain"]["epoch"] == 2  # and nothing else is lost


def test_test_labels_do_not_influence_the_classifier(few):
    """Shuffled test labels change the score, not what was chosen on the training split."""
    test = few.source.test
    shuffled = of(few, test=replace(test, labels=test.labels.roll(7)))
    for judge in (measure_on_cached, partial(measure_on_crops, epochs=1)):
        honest, other = judge(few, seed=0), judge(shuffled, seed=0)
        assert honest.chosen == other.chosen
        assert other.values["top1"] < 40.0


def test_a_source_that_is_already_open_needs_labels_too(short_run):
    bare = Source("bare", Split(ArrayImages(torch.zeros(3, 3, 8, 8, dtype=torch.uint8))))
    with pytest.raises(UserError, match="data 'bare' lacks labels"):
        evaluate(short_run, source=bare)


def test_numbers_of_an_open_source_are_not_those_of_the_runs_own_dataset(short_run, few_digits):
    own = evaluate(short_run, protocols=["knn"])
    other = open_data(short_run.config, few_digits)
    rows = evaluate(short_run, protocols=["knn"], source=other)
    assert {row["data"] for row in rows} == {other.name}
    kept = [row for row in short_run.evaluations() if row["protocol"] == "knn"]
    assert [row["value"] for row in own] == [
        row["value"] for row in kept if row["data"] == short_run.config.data.source
    ]
    named = evaluate(short_run, protocols=["knn"], source=other, data="mine")
    assert {row["data"] for row in named} == {"mine"}


def test_rows_say_how_far_the_run_was_and_older_epochs_leave(short_run):
    rows = evaluate(short_run, protocols=["knn"])
    assert {(row["epoch"], row["epochs"]) for row in rows} == {(2.0, 2)}
    stale = {**rows[0], "protocol": "linear", "epoch": 1.0}
    short_run.add_result(evaluations=[stale])
    evaluate(short_run, protocols=["knn"])
    assert all(row["epoch"] == 2.0 for row in short_run.result()["evaluations"])


@pytest.mark.parametrize("noise", [False, True])
def test_data_that_changed_since_pretraining_are_said(short_config, few_digits, tmp_path, noise):
    """The checkpoint keeps a fingerprint; other data than the run's own are no change."""
    data = Path(shutil.copy(few_digits, tmp_path / "own.npz"))
    config = override(short_config, {"data.source": str(data), "divergence.learn_sigma": True})
    source = open_data(config)
    kept, _ = split_for_monitor(source.train, config)
    step = build_step(config)
    step.divergence.log_sigma.data.fill_(math.log(0.3))
    state = {**checkpoints.collect_networks(step), "epoch": 1.0}
    state["data"] = fingerprint(select_images(source, kept))
    run = Run.create(tmp_path / "run", config, {})
    checkpoints.save(run.last_checkpoint, state)
    if noise:
        arrays = dict(np.load(data))
        arrays["train_images"] = arrays["train_images"][::-1]
        np.savez(data, **arrays)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", Notice)
        rows = evaluate(run, protocols=["knn"])
        rows += evaluate(run, protocols=["retrieval"])
        others = evaluate(run, protocols=["knn"], data=few_digits)
    assert [row["data_changed"] for row in rows] == [noise] * len(rows)
    assert {row["data_changed"] for row in others} == {None}
    words = [str(one.message) for one in said if one.category is Notice]
    assert len(words) == (2 if noise else 0)
    assert all("own.npz' has changed since" in one for one in words)
    assert all(one.endswith(f"new run with --encoder.weights {run.path}") for one in words)
    assert load_run(run, "cpu").model.sigma == pytest.approx(0.3)  # what was learned


class TestSeeds:
    def test_a_row_is_the_mean_of_its_seeds(self, short_run, few_digits):
        options = {"data": few_digits, "epochs": 1}
        together = evaluate(short_run, seed=3, seeds=2, **options)
        alone = [evaluate(short_run, seed=seed, **options) for seed in (3, 4)]
        for row, *singles in zip(together, *alone, strict=True):
            values = [single["value"] for single in singles]
            if row["protocol"] == "knn":  # of the smooth form: nothing is drawn, nothing repeated
                assert (row["n"], row["deviation"], len(set(values))) == (1, None, 1)
                continue
            assert row["values"] == values
            assert row["n"] == 2
            assert row["value"] == pytest.approx(np.mean(values))
            assert row["deviation"] == pytest.approx(np.std(values, ddof=1))
            assert row["chosen"] == [single["chosen"][0] for single in singles]
        assert {row["seed"] for row in together} == {3}
        varied = [row for row in together if row["variant"] == "crop and flip"]
        assert any(row["deviation"] > 0 for row in varied)

    def test_the_hard_form_has_equals_for_the_seed_to_decide_among(self, labelled, short_run):
        for smoothing, n in ((0.0, 2), (1.0, 1)):
            config = override(labelled.config, {"divergence.smoothing": smoothing})
            evaluation = Evaluation(short_run, Options(seeds=2), "cpu")
            evaluation.__dict__["labelled"] = replace(labelled, config=config)
            rows = knn(evaluation)
            assert [row["n"] for row in rows] == [1, 1, 1, 1, n, n]
            assert len(set(rows[-2]["predicted"])) == n  # of 20 neighbours

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"protocols": ["liner"]}, "did you mean 'linear'"),
            ({"protocols": []}, "no protocol"),
            ({"seed": 2**32 - 1, "seeds": 2}, "seeds run from 0"),
            ({"epochs": "3"}, "epochs is '3'"),
        ],
    )
    def test_refusals(self, short_run, options, words):
        with pytest.raises(UserError, match=words):
            evaluate(short_run, **options)


def test_crops_are_as_large_as_the_images_whatever_the_views_are(few):
    small = replace(few, config=override(few.config, {"views.relative_size": 0.75}))
    sides: list[int] = []

    def record(_module: torch.nn.Module, shown: tuple[torch.Tensor, ...]) -> None:
        sides.append(shown[0].shape[-1])

    with few.model.encoder.register_forward_pre_hook(record):
        measure_on_crops(small, seed=0, epochs=1)
    assert set(sides) == {8}


def test_metrics_are_rows_of_their_own(short_run, few_digits):
    rows = evaluate(short_run, data=few_digits, epochs=0, balanced=True)
    found = {(row["variant"], row["metric"]) for row in rows}
    assert found == {
        *(
            (f"{name}, k={k}", m)
            for name in ("cosine", "cosine of embeddings", "divergence")
            for k in (20, 200)
            for m in ("top1", "balanced")
        ),
        *(
            (variant, metric)
            for variant in ("cached features", "cached features, weighted classes")
            for metric in ("top1", "top5", "balanced")
        ),
    }


def test_rows_say_what_their_protocol_took(short_run, few_digits, monkeypatch):
    clock = itertools.count(100.0, 2.5)
    time = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("deepbregman.evaluation.protocols.time", time)
    rows = evaluate(short_run, protocols=["knn", "ood"], data=few_digits)
    assert {row["protocol"] for row in rows} == {"knn", "ood"}
    assert {row["seconds"] for row in rows} == {2.5}
    kept = short_run.evaluations()
    assert all(row in kept for row in rows)


def test_a_source_of_unequal_classes_is_also_judged_by_its_classes(
    short_run, labelled, monkeypatch
):
    source, labels = labelled.source, labelled.source.train.known_labels.clone()
    labels[(labels == 1).nonzero()[1:, 0]] = 0  # one image is left of class 1
    uneven = replace(source, train=replace(source.train, labels=labels))
    monkeypatch.setattr("deepbregman.evaluation.inputs.open_data", lambda *_, **__: uneven)
    with pytest.warns(Notice, match="has changed"):  # a monitor would hold other images out
        rows = evaluate(short_run, protocols=["knn"])
    assert {row["metric"] for row in rows} == {"top1", "balanced"}


def test_classes_that_differ_more_than_tenfold_are_unequal(labelled):
    source, labels = labelled.source, labelled.source.train.known_labels
    assert not source.has_unequal_classes
    many, few = (labels == 0).nonzero().flatten()[:50], (labels == 1).nonzero().flatten()
    for count, expected in ((5, False), (4, True)):
        part = replace(source, train=source.train.select(torch.cat([many, few[:count]])))
        assert part.has_unequal_classes is expected
    assert not replace(source, train=replace(source.train, labels=None)).has_unequal_classes


def test_the_classifier_of_balanced_accuracy_weighs_classes(labelled):
    labels = labelled.source.train.known_labels
    rare = torch.cat([(labels != 1).nonzero()[:300, 0], (labels == 1).nonzero()[:4, 0]])
    uneven = replace(of(labelled, labelled.source.train.select(rare)), balanced=True)
    plain, weighted = (
        measure_on_cached(uneven, 0, weighted=weighted) for weighted in (False, True)
    )
    assert plain.details.get("chosen_by") is None
    assert weighted.details["chosen_by"] == "balanced"
    assert weighted.variant == "cached features, weighted classes"
    assert plain.predicted != weighted.predicted
    features, targets = uneven.train.features.representation, uneven.train.labels
    fit = fit_linear(features, targets, num_classes=10, l2=weighted.chosen["l2"], weighted=True)
    predicted = fit.predict(uneven.test.features.representation).argmax(1)
    expected = 100 * balanced_accuracy_score(uneven.test.labels, predicted)
    assert weighted.values["balanced"] == pytest.approx(expected)


def test_what_is_finished_stays_when_a_later_protocol_is_stopped(short_run, monkeypatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    short_run.add_result(evaluations=[])
    monkeypatch.setattr("deepbregman.evaluation.linear.measure_on_cached", stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate(short_run, protocols=["knn", "linear"])
    assert {row["protocol"] for row in short_run.result()["evaluations"]} == {"knn"}


def test_a_class_of_the_test_split_only_is_refused(labelled, monkeypatch):
    source = labelled.source
    assert source.train.labels is not None
    without = source.train.select(torch.nonzero(source.train.labels != 7).flatten())
    partial_source = replace(source, train=without, classes=None)
    monkeypatch.setattr("deepbregman.evaluation.inputs.open_data", lambda *_, **__: partial_source)
    with pytest.raises(UserError, match="no training image has the class '7'"):
        open_labelled(labelled.config)


def test_features_that_are_no_numbers_are_refused(labelled):
    model = copy.deepcopy(labelled.model)
    model.encoder.mean.fill_(float("nan"))
    with pytest.raises(Diverged, match="not finite"):
        classify_by(replace(labelled, model=model), "cosine")
    model = copy.deepcopy(labelled.model)
    next(model.divergence_network.parameters()).data.fill_(float("nan"))
    with pytest.raises(Diverged, match="not finite"):
        classify_by(replace(labelled, model=model), "divergence")


def test_images_that_cannot_be_decoded_are_neither_learned_from_nor_judged(
    short_run, few_digits, tmp_path, monkeypatch
):
    """As in a set too large to decode on opening; the rows are those of a set without them."""
    monkeypatch.setattr("deepbregman.data.listings.FULL_DECODE_LIMIT", 0)
    arrays = np.load(few_digits)
    splits: dict[str, list[Split]] = {"whole": [], "damaged": []}
    for part in ("train", "test"):
        paths = [tmp_path / f"{part}{i:03d}.png" for i in range(len(arrays[f"{part}_images"]))]
        labels = torch.from_numpy(arrays[f"{part}_labels"]).long()
        for i, (path, pixels) in enumerate(zip(paths, arrays[f"{part}_images"], strict=True)):
            Image.fromarray(pixels).save(path)
            if i % 5 == 0:
                path.write_bytes(path.read_bytes()[:60])  # a header, and half of the pixels
        split = Split(FileImages(tuple(paths), 8, fills_frame=True), labels)
        splits["damaged"].append(split)
        kept = torch.tensor([i for i in range(len(paths)) if i % 5])
        splits["whole"].append(split.select(kept))
    options: dict[str, Any] = {"epochs": 1, "seed": 1}
    whole, damaged = (
        evaluate(
            short_run,
            protocols=["knn", "linear", "supervised"],
            source=Source("files", *splits[name]),
            skip_unreadable=name == "damaged",
            **options,
        )
        for name in ("whole", "damaged")
    )
    for expected, found in zip(whole, damaged, strict=True):
        assert (found["num_train"], found["num_test"]) == (160, 80)
        clock = {"finished": "", "seconds": 0.0}
        assert {**found, **clock} == {**expected, **clock}
