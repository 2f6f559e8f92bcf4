"""The protocols that leave the encoder as it is: nearest neighbours and a linear classifier."""

from collections.abc import Iterable

import torch
from torch import Tensor

from deepbregman.data import stratified_split
from deepbregman.method.bregman import learned_divergence, similarity
from deepbregman.method.transformation import Views
from deepbregman.runs import Record
from deepbregman.training.seeds import derived, epoch_order

from .features import BATCH_SIZE, frozen
from .knn import Neighbours, cosine_neighbours, nearest_by, vote
from .linear import linear_accuracy, standardisation
from .linear_sgd import fit_linear_sgd
from .subject import Subject

NEIGHBOURS = (20, 200)
VOTE_TEMPERATURE = 0.1
CHOICE_SHARE = 0.1


def _row(variant: str, value: float, **details: float | int | None) -> Record:
    return {"variant": variant, "metric": "top1", "value": value, **details}


def _accuracy(predicted: Tensor, labels: Tensor) -> float:
    return 100.0 * (predicted == labels).double().mean().item()


def _votes(name: str, neighbours: Neighbours, subject: Subject) -> list[Record]:
    rows = []
    bank = len(subject.train.labels)
    for k in [k for k in NEIGHBOURS if k <= bank] or [bank]:
        predicted = vote(
            neighbours,
            subject.train.labels,
            subject.num_classes,
            temperature=VOTE_TEMPERATURE,
            k=k,
        )
        rows.append(_row(f"{name}, k={k}", _accuracy(predicted, subject.test.labels), k=k))
    return rows


def knn(subject: Subject, seed: int) -> list[Record]:
    """Judge by weighted nearest neighbours: by cosine, and by the learned divergence of scores."""
    train, test = subject.train, subject.test
    k = min(max(NEIGHBOURS), len(train.labels))
    found = cosine_neighbours(test.features.representation, train.features.representation, k)
    rows = _votes("cosine", found, subject)
    if test.features.scores is None or train.features.scores is None:
        return rows
    # Equal winners are at divergence 0, many of them; the first of equals is taken, so the bank
    # must not be in the order of its classes.
    order = epoch_order(len(train.labels), seed, 0).to(train.labels.device)
    bank, settings = train.features.scores[order], subject.config.divergence

    def learned(queries: Tensor) -> Tensor:
        distance = learned_divergence(queries, bank, settings.smoothing)
        # The kernel's own psi would lose the order of far neighbours to rounding, and psi is
        # decreasing, so neighbours are found by -D; votes are weighted by the Gaussian kernel.
        return -distance

    found = nearest_by(learned, test.features.scores, k)
    psi = similarity(-found.similarities, "gaussian", settings.sigma)
    return rows + _votes("divergence", Neighbours(psi, order[found.indices]), subject)


def linear(subject: Subject, seed: int, epochs: int) -> list[Record]:
    """Judge by a linear classifier on frozen features: cached, and with crops and flips."""
    train, test = subject.train, subject.test
    _, held_out = stratified_split(train.labels.cpu(), len(train.labels), CHOICE_SHARE, seed)
    cached = linear_accuracy(
        train.features.representation,
        train.labels,
        test.features.representation,
        test.labels,
        num_classes=subject.num_classes,
        held_out=held_out.to(train.labels.device),
    )
    rows = [_row("cached features", cached.accuracy, l2=cached.l2, top5=cached.top5)]
    if epochs:
        rows.append(_row("crop and flip", _augmented(subject, seed, epochs), epochs=epochs))
    return rows


def _augmented(subject: Subject, seed: int, epochs: int) -> float:
    """Train a classifier on features of random crops and flips of the training images."""
    train = subject.train
    features, device = train.features.representation, train.labels.device
    views = Views(
        subject.config.data.image_size,
        num_views=1,
        crop_area=subject.config.views.crop_area,
        flip=subject.config.views.flip,
        without=("rotation", "jitter", "greyscale", "blur"),
    )
    encoder = subject.model.encoder
    mean, deviation = standardisation(features)

    def epoch_features(epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
        order = epoch_order(len(train.labels), seed, epoch)
        generator = torch.Generator(device).manual_seed(derived(seed, "linear", epoch))
        labels = train.labels[order.to(device)]
        start = 0
        for batch in train.batches.iterate(order, BATCH_SIZE):
            count = len(batch.images)
            uniforms = views.draw(count, device=device, generator=generator)
            with torch.no_grad():
                h = encoder(views(batch.images, batch.sizes, uniforms)[0])
            yield h, labels[start : start + count]
            start += count

    with frozen(subject.model), torch.enable_grad():
        classifier = fit_linear_sgd(
            epoch_features,
            in_features=features.shape[1],
            num_classes=subject.num_classes,
            epochs=epochs,
            learning_rate=0.1,
            weight_decay=1e-5,
            seed=seed,
            device=device,
            mean=mean,
            deviation=deviation,
        )
    predicted = classifier.predict(subject.test.features.representation).argmax(dim=1)
    return _accuracy(predicted, subject.test.labels)
