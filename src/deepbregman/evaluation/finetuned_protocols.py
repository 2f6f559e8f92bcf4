"""The protocols that train all weights: few labels, another data set, and none pretrained."""

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepbregman.data import Split, stratified_split
from deepbregman.data.datasets import expand_home
from deepbregman.errors import UserError
from deepbregman.method.model import Model
from deepbregman.runs import Record
from deepbregman.training.assembly import untrained_encoder
from deepbregman.training.processes import is_mixed

from .features import crop_and_flip
from .finetuning import Budget, Classifier, Diverged, finetune, predict
from .finished_arms import settings_of
from .frozen_protocols import check_linear, on_cached_features
from .job import Job
from .labels import labelled_list, labelled_share
from .metrics import top_k_accuracy
from .rows import Measured, rows_of
from .subject import Side, Subject, class_name

EPOCHS = 50
"""Of transfer and of supervised, on all labels."""
FEW_LABELS = 0.05
"""Below this share of the labels there are so few images that they are gone through more often."""
FEW_LABELS_EPOCHS, MANY_LABELS_EPOCHS = 60, 30
CHOICE_SHARE = 0.2
"""Of the labelled images, held out to choose a learning rate on."""


class Extractor(NamedTuple):
    """What is put under a classifier, a copy of its own."""

    module: nn.Module
    num_features: int


Start = Callable[[Subject, int], Extractor]
"""Where an arm starts from, given a seed."""


def from_encoder(subject: Subject, seed: int) -> Extractor:
    """Start from the run's encoder."""
    del seed  # nothing is drawn
    encoder = copy.deepcopy(subject.model.encoder)
    return Extractor(encoder, encoder.num_features)


def from_projection(subject: Subject, seed: int) -> Extractor:
    """Start from the encoder and the projection's first layer, as SimCLR-v2 does.

    That is all up to the projection's first activation: Linear, batch norm, ReLU.
    """
    encoder, _ = from_encoder(subject, seed)
    layer, width = first_layer(subject.model)
    return Extractor(nn.Sequential(encoder, copy.deepcopy(layer)), width)


def from_scratch(subject: Subject, seed: int) -> Extractor:
    """Start from random weights of the same architecture: what pretraining is compared with."""
    encoder = untrained_encoder(subject.model.encoder, subject.config, *subject.pixels, seed)
    return Extractor(encoder, encoder.num_features)


def first_layer(model: Model) -> tuple[nn.Sequential, int]:
    """Return the projection up to its first activation, shared with the model, and its width."""
    layers = list(model.projection.children())
    last = next((i for i, layer in enumerate(layers) if isinstance(layer, nn.ReLU)), None)
    if last is None or not isinstance(layers[0], nn.Linear):
        raise ValueError(f"a projection begins with Linear and has a ReLU, not {model.projection}")
    return nn.Sequential(*layers[: last + 1]), layers[0].out_features


def check_training(job: Job) -> None:
    """Refuse to train for nothing, and an encoder whose untrained twin cannot be made."""
    if job.options.epochs == 0:
        raise UserError("epochs is 0: semi, transfer and supervised train for 1 epoch or more")
    model, config, _ = job.trained
    untrained_encoder(model.encoder, config, (0.0,) * 3, (1.0,) * 3, job.options.seed)


def check_supervised(job: Job) -> None:
    """Check what is asked for before anything is trained."""
    check_training(job)
    _check_choice(job, job.subject.source.train)


def supervised(job: Job) -> list[Record]:
    """Train the same architecture on all labels from random weights, for reference."""
    epochs = job.options.epochs or EPOCHS
    return rows_of(
        [
            [_train(job, job.subject.train, from_scratch, "from scratch", seed, epochs)]
            for seed in job.options.each_seed
        ]
    )


def check_semi(job: Job) -> None:
    """Draw every subset, so that a share that is too small is found before anything is trained."""
    check_training(job)
    for seed in job.options.each_seed:
        for split, _, _ in _subsets(job, seed):
            _check_choice(job, split)


def semi(job: Job) -> list[Record]:
    """Fine-tune all weights on a part of the labels, beside the same without pretraining.

    A share of the labels is drawn anew with each seed; a list is the same for all, and only the
    order, the crops and the classifier's first weights differ.
    """
    arms = {
        "from encoder": from_encoder,
        "from projection layer 1": from_projection,
        "supervised": from_scratch,
    }
    seeds: list[list[Measured]] = []
    for seed in job.options.each_seed:
        seeds.append([])
        for split, words, epochs in _subsets(job, seed):
            side = Side(job.subject.model, job.subject.config, split, job.device)
            for name, start in arms.items():
                seeds[-1].append(_train(job, side, start, f"{words}, {name}", seed, epochs))
    return rows_of(seeds)


def check_transfer(job: Job) -> None:
    """Refuse to call it transfer when nothing is carried over."""
    check_training(job)
    data, own = job.options.data, job.trained.config.data.source
    if data is None:
        raise UserError(
            "transfer needs another data set than the run was pretrained on: name it with --data"
        )
    if data == own or expand_home(Path(data)).resolve() == expand_home(Path(own)).resolve():
        raise UserError(
            f"transfer: --data {data} is what the run was pretrained on; name another data set, or "
            "use linear, semi or supervised"
        )
    check_linear(job)
    _check_choice(job, job.subject.source.train)


def transfer(job: Job) -> list[Record]:
    """Judge on another data set: frozen, fine-tuned on all labels, and without pretraining.

    Its images are resized to the size of the run's.
    """
    epochs = job.options.epochs or EPOCHS
    arms = {"fine-tuned": from_encoder, "supervised": from_scratch}
    return rows_of(
        [
            [
                _fit(job, "linear, cached features", seed),
                *(
                    _train(job, job.subject.train, start, name, seed, epochs)
                    for name, start in arms.items()
                ),
            ]
            for seed in job.options.each_seed
        ]
    )


def _fit(job: Job, variant: str, seed: int) -> Measured:
    """Fit a classifier to frozen features, unless that was done before."""
    settings = settings_of(job.subject, job.subject.source.train, variant, seed, {})
    return job.arms.measure(settings, lambda: on_cached_features(job.subject, seed, variant))


def _subsets(job: Job, seed: int) -> list[tuple[Split, str, int]]:
    """Return the labelled parts of the training split, with their names and epochs."""
    source, options = job.subject.source, job.options.semi
    if options.labelled_list is not None:
        file = options.labelled_list
        drawn = [(labelled_list(source, file), f"labels of {file.name}")]
    else:
        drawn = [
            (labelled_share(source, share, seed), f"{100 * share:g} % labels")
            for share in dict.fromkeys(options.labels)
        ]
    subsets = []
    for indices, words in drawn:
        few = len(indices) < FEW_LABELS * len(source.train)
        epochs = job.options.epochs or (FEW_LABELS_EPOCHS if few else MANY_LABELS_EPOCHS)
        subsets.append((source.train.select(indices), words, epochs))
    return subsets


def _check_choice(job: Job, split: Split) -> None:
    """Refuse to choose a learning rate where a class has no second image to choose it on."""
    if len(job.options.tuning.learning_rate) == 1:
        return
    assert split.labels is not None
    present, counts = torch.unique(split.labels, return_counts=True)
    if int(counts.min()) < 2:
        name = class_name(job.subject.source, int(present[int(counts.argmin())]))
        raise UserError(
            f"a choice among {len(job.options.tuning.learning_rate)} learning rates needs 2 "
            f"labelled images of each class, and {name} has 1 of the {len(split)}: give one "
            "--learning-rate, or more labels"
        )


def _train(job: Job, side: Side, start: Start, variant: str, seed: int, epochs: int) -> Measured:
    """Train one arm on one set of labelled images and test it, unless that was done before."""
    told = {"start": start.__name__, "epochs": epochs, **asdict(job.options.tuning)}
    settings = settings_of(job.subject, side.split, variant, seed, told)
    return job.arms.measure(settings, lambda: _trained(job, side, start, variant, seed, epochs))


def _trained(job: Job, side: Side, start: Start, variant: str, seed: int, epochs: int) -> Measured:
    subject, tuning = job.subject, job.options.tuning
    budget = Budget(epochs, tuning.batch_size, tuning.learning_rate[0], tuning.weight_decay)

    def trained(budget: Budget, indices: Tensor | None) -> Classifier:
        extractor = start(subject, seed)
        network = Classifier(*extractor, subject.num_classes, seed).requires_grad_(True)
        network.to(memory_format=torch.channels_last)
        network.to(subject.device)
        finetune(
            network,
            side.batches,
            side.labels,
            crop_and_flip(subject.config),
            budget,
            seed=seed,
            indices=indices,
            mixed=is_mixed(subject.config, subject.device),
            console=job.console,
            title=f"{variant}, seed {seed}",
        )
        return network

    chosen: Record = {"learning_rate": budget.learning_rate}
    if len(tuning.learning_rate) > 1:
        kept, held_out = stratified_split(side.split.labels, len(side.split), CHOICE_SHARE, seed)
        scores: dict[float, float] = {}
        for rate in sorted(tuning.learning_rate):
            try:
                network = trained(replace(budget, learning_rate=rate), kept)
                logits = predict(network, side.batches, subject.config.data.image_size, held_out)
            except Diverged:
                continue
            scores[rate] = top_k_accuracy(logits, side.labels[held_out.to(side.labels.device)])
        if not scores:
            raise Diverged(f"{variant}: every --learning-rate of {tuning.learning_rate} diverges")
        best = max(scores, key=lambda rate: scores[rate])
        budget = replace(budget, learning_rate=best)
        chosen = {"learning_rate": best, "held_out": scores[best]}
    network = trained(budget, None)
    logits = predict(network, subject.test.batches, subject.config.data.image_size)
    details = {
        "epochs": epochs,
        "steps": epochs * budget.steps_per_epoch(len(side.split)),
        "batch_size": budget.batch(len(side.split)),
        "learning_rates": list(tuning.learning_rate),
        "weight_decay": budget.weight_decay,
    }
    return Measured(
        variant,
        subject.judge(predicted=logits.argmax(dim=1), logits=logits),
        len(side.split),
        len(subject.test.labels),
        side.num_replaced + subject.test.num_replaced,
        details,
        chosen,
    )
