"""The protocols by which a run is judged, and the one schema their results are written in."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepbregman.config import Config, override
from deepbregman.data import Batches, Source, Split, stratified_split
from deepbregman.errors import UserError, nearest
from deepbregman.method.bregman import learned_divergence, similarity
from deepbregman.method.model import Model
from deepbregman.method.transformation import Views
from deepbregman.runs import Record, Run, now
from deepbregman.training.assembly import batches_of, open_data
from deepbregman.training.checkpoints import load_trained
from deepbregman.training.processes import device_name, pick_device
from deepbregman.training.seeds import derived, epoch_order

from .features import BATCH_SIZE, Features, compute_features, frozen
from .knn import Neighbours, cosine_neighbours, nearest_by, vote
from .linear import linear_accuracy, standardisation
from .linear_sgd import fit_linear_sgd

NEIGHBOURS = (20, 200)
VOTE_TEMPERATURE = 0.1
CHOICE_SHARE = 0.1


@dataclass(frozen=True)
class Side:
    """One labelled split on the device: its images, labels and frozen features."""

    batches: Batches
    labels: Tensor
    features: Features


@dataclass(frozen=True)
class Subject:
    """What is judged, and on what."""

    model: Model
    config: Config
    train: Side
    test: Side
    num_classes: int
    epochs: int
    seed: int


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


def knn(subject: Subject) -> list[Record]:
    """Judge by weighted nearest neighbours: by cosine, and by the learned divergence of scores."""
    train, test = subject.train, subject.test
    k = min(max(NEIGHBOURS), len(train.labels))
    found = cosine_neighbours(test.features.representation, train.features.representation, k)
    rows = _votes("cosine", found, subject)
    if test.features.scores is None or train.features.scores is None:
        return rows
    # Equal winners are at divergence 0, many of them; the first of equals is taken, so the bank
    # must not be in the order of its classes.
    order = epoch_order(len(train.labels), subject.seed, 0).to(train.labels.device)
    bank, settings = train.features.scores[order], subject.config.divergence

    def learned(queries: Tensor) -> Tensor:
        distance = learned_divergence(queries, bank, settings.smoothing)
        # The kernel's own psi would lose the order of far neighbours to rounding, and psi is
        # decreasing, so neighbours are found by -D; votes are weighted by the Gaussian kernel.
        return -distance

    found = nearest_by(learned, test.features.scores, k)
    psi = similarity(-found.similarities, "gaussian", settings.sigma)
    return rows + _votes("divergence", Neighbours(psi, order[found.indices]), subject)


def linear(subject: Subject) -> list[Record]:
    """Judge by a linear classifier on frozen features: cached, and with crops and flips."""
    train, test = subject.train, subject.test
    _, held_out = stratified_split(
        train.labels.cpu(), len(train.labels), CHOICE_SHARE, subject.seed
    )
    cached = linear_accuracy(
        train.features.representation,
        train.labels,
        test.features.representation,
        test.labels,
        num_classes=subject.num_classes,
        held_out=held_out.to(train.labels.device),
    )
    rows = [_row("cached features", cached.accuracy, l2=cached.l2, top5=cached.top5)]
    if subject.epochs:
        rows.append(_row("crop and flip", _augmented(subject), epochs=subject.epochs))
    return rows


def _augmented(subject: Subject) -> float:
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
        order = epoch_order(len(train.labels), subject.seed, epoch)
        generator = torch.Generator(device).manual_seed(derived(subject.seed, "linear", epoch))
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
            epochs=subject.epochs,
            learning_rate=0.1,
            weight_decay=1e-5,
            seed=subject.seed,
            device=device,
            mean=mean,
            deviation=deviation,
        )
    predicted = classifier.predict(subject.test.features.representation).argmax(dim=1)
    return _accuracy(predicted, subject.test.labels)


PROTOCOLS: dict[str, Callable[[Subject], list[Record]]] = {"knn": knn, "linear": linear}


def evaluate(
    run: Run | Path | str,
    *,
    protocols: Sequence[str] = tuple(PROTOCOLS),
    data: str | None = None,
    epochs: int = 50,
    seed: int = 0,
    skip_unreadable: bool = False,
    accelerator: str = "auto",
    encoder: nn.Module | None = None,
) -> list[Record]:
    """Judge a run's encoder, frozen, and write the rows into the run's result.

    Args:
        run: a run, or its folder.
        protocols: ``knn``, ``linear``.
        data: a labelled source; the run's own when None.
        epochs: of the linear classifier with augmentation; 0 leaves it out.
        seed: of splits and of the augmentation.
        skip_unreadable: go on without images that cannot be read.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        encoder: a module of the same structure, for a run whose encoder was your own.

    Returns:
        Rows with ``protocol``, ``variant``, ``data``, ``metric``, ``value`` and details, among them
        the ``epoch`` the encoder was saved at, of how many ``epochs``.
    """
    if not protocols:
        raise UserError(f"no protocol was named: choose from {', '.join(PROTOCOLS)}")
    for name in protocols:
        if name not in PROTOCOLS:
            known = ", ".join(PROTOCOLS)
            raise UserError(f"protocol {name!r} is not one of {known}{nearest(name, PROTOCOLS)}")
    if epochs < 0:
        raise UserError(f"epochs is {epochs}: it must be 0 or more")
    run = run if isinstance(run, Run) else Run.open(Path(run))
    device = pick_device(accelerator)
    model, config, epoch = load_trained(run, device, encoder)
    if skip_unreadable:
        config = override(config, {"data.skip_unreadable": True})
    subject = judge(model, config, open_labelled(config, data), device, epochs=epochs, seed=seed)
    rows = []
    for name in protocols:
        for row in PROTOCOLS[name](subject):
            rows.append({"protocol": name, "data": data or config.data.source, **row})
    for row in rows:
        row |= {
            "epoch": epoch,
            "epochs": config.training.epochs,
            "num_train": len(subject.train.labels),
            "num_test": len(subject.test.labels),
            "num_replaced": subject.train.batches.num_skipped + subject.test.batches.num_skipped,
            "seed": seed,
            "device": device_name(device),
            "finished": now(),
        }
    _keep(run, rows)
    return rows


def open_labelled(config: Config, data: str | None = None) -> Source:
    """Open the source of an evaluation; it must have labels and a test split."""
    spec = data or config.data.source
    source = open_data(config, data)
    if source.train.labels is None or source.test is None or source.test.labels is None:
        raise UserError(
            f"data {spec!r} has no labels to judge by: give a labelled source with --data, such as "
            "a folder with one subfolder for each class"
        )
    return source


def judge(
    model: Model,
    config: Config,
    source: Source,
    device: torch.device,
    *,
    epochs: int = 50,
    seed: int = 0,
) -> Subject:
    """Compute the features of both splits and put together what the protocols need."""

    def side(split: Split | None) -> Side:
        assert split is not None  # open_labelled has made sure of both
        assert split.labels is not None
        batches = batches_of(split.images, config, device)
        features = compute_features(model, batches, config.data.image_size)
        return Side(batches, split.labels.to(device), features)

    train, test = side(source.train), side(source.test)
    num_classes = 1 + int(max(train.labels.max(), test.labels.max()))
    return Subject(model, config, train, test, num_classes, epochs, seed)


def _keep(run: Run, rows: list[Record]) -> None:
    """Write rows beside those that are there, in place of older ones of the same kind or epoch."""

    def kind(row: Record) -> tuple[Any, ...]:
        return row.get("protocol"), row.get("variant"), row.get("data")

    fresh = {kind(row) for row in rows}
    older = [
        row
        for row in run.evaluations()
        if kind(row) not in fresh and row["epoch"] == rows[0]["epoch"]
    ]
    run.add_result(evaluations=[*older, *rows])
