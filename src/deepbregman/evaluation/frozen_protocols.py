"""The protocols that leave the encoder as it is: nearest neighbours and a linear classifier."""

from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from torch import Tensor

from deepbregman.data import stratified_split
from deepbregman.errors import UserError
from deepbregman.method.bregman import similarity
from deepbregman.runs import Record
from deepbregman.training.seeds import derived, epoch_order

from .features import BATCH_SIZE, crop_and_flip, frozen
from .finetuning import progress_bar
from .job import Job
from .knn import Neighbours, cosine_neighbours, vote
from .linear import L2_GRID, LinearClassifier, fit_chosen, standardisation
from .linear_sgd import Rows, Setting, fit_linear_sgd
from .metrics import top_k_accuracy
from .retrieval import Divergence, described, ranking
from .rows import Measured, rows_of
from .subject import Averaged, Subject

NEIGHBOURS = (20, 200)
VOTE_TEMPERATURE = 0.1
CHOICE_SHARE = 0.1
"""Of the training set, held out to choose a linear classifier's settings on."""
LINEAR_EPOCHS = 50
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3)
WEIGHT_DECAYS = (1e-3, 1e-4, 1e-5)


def check_knn(job: Job) -> None:
    """Open the data, so that a source without labels is found before anything is computed."""
    _ = job.subject


def check_linear(job: Job) -> None:
    """Refuse a source of which nothing can be held out to choose a penalty on."""
    labels = job.subject.source.train.labels
    assert labels is not None  # open_labelled has made sure
    _, held_out = stratified_split(labels, len(labels), CHOICE_SHARE, job.options.seed)
    if len(held_out) == 0:
        raise UserError(
            f"a linear classifier's settings are chosen on training images held out, and data "
            f"{job.options.data or job.subject.config.data.source!r} has {len(labels)}, no two of "
            "a class: give 2 or more of some class, or judge by knn"
        )


def knn(job: Job) -> list[Record]:
    """Judge by weighted nearest neighbours: by cosine, and by the learned divergence of scores.

    By cosine and by the smooth divergence no seed plays a part, so there is one value. By the hard
    one the seed decides among equals, of which it has many. Few neighbours vote for few classes,
    so no top 5. Features averaged over crops are compared by cosine only, with new crops for each
    seed.
    """
    subject, seeds = job.subject, job.options.each_seed
    rows = rows_of([by_cosine(subject)])
    if job.options.crops:
        rows += rows_of([by_cosine(subject, job.averaged(seed)) for seed in seeds])
    if subject.model.divergence_network is not None:
        smooth = subject.config.divergence.smoothing > 0
        rows += rows_of([by_divergence(subject, seed) for seed in (seeds[:1] if smooth else seeds)])
    return rows


def linear(job: Job) -> list[Record]:
    """Judge by a linear classifier on frozen features: cached, and of random crops and flips.

    Only the cached ones are also averaged over crops, with new crops for each seed.
    """
    subject, options = job.subject, job.options
    rows = rows_of([[on_cached_features(subject, seed)] for seed in options.each_seed])
    if options.crops:
        rows += rows_of(
            [
                [on_cached_features(subject, seed, averaged=job.averaged(seed))]
                for seed in options.each_seed
            ]
        )
    epochs = LINEAR_EPOCHS if options.epochs is None else options.epochs
    if epochs:
        rows += rows_of(
            [[on_crops(subject, seed, epochs, job.console)] for seed in options.each_seed]
        )
    return rows


def by_cosine(subject: Subject, averaged: Averaged | None = None) -> list[Measured]:
    """Classify by the neighbours of the largest cosine.

    Args:
        subject: whose features.
        averaged: over crops, in place of those of whole images.
    """
    bank, queries = _representations(subject, averaged)
    found = cosine_neighbours(queries, bank, min(max(NEIGHBOURS), len(bank)))
    return _votes(f"cosine{_of_crops(averaged)}", found, subject, _told(averaged))


def by_divergence(
    subject: Subject, seed: int, divergence: Divergence | None = None
) -> list[Measured]:
    """Classify by the neighbours of the smallest learned divergence.

    Args:
        subject: whose scores.
        seed: decides among equals.
        divergence: of scores (N, K) and (M, K); that of the configuration when None.
    """
    bank, queries = (
        described(side.features, "divergence") for side in (subject.train, subject.test)
    )
    settings, k = subject.config.divergence, min(max(NEIGHBOURS), len(bank))
    measure = divergence or "divergence"
    found = ranking(measure, queries, bank, k, smoothing=settings.smoothing, seed=seed)
    # The kernel's own psi would lose the order of far neighbours to rounding, and psi is
    # decreasing, so neighbours are found by -D; votes are weighted by the Gaussian kernel.
    psi = similarity(-found.similarities, "gaussian", settings.sigma)
    return _votes("divergence", found._replace(similarities=psi), subject)


def on_cached_features(
    subject: Subject,
    seed: int,
    name: str = "cached features",
    averaged: Averaged | None = None,
) -> Measured:
    """Fit to the features of whole images, to the optimum; the seed holds out what l2 is chosen on.

    Args:
        subject: whose features.
        seed: of the held-out part.
        name: of the variant.
        averaged: over crops, in place of those of whole images.
    """
    train, test = _representations(subject, averaged)
    held_out = _held_out(subject, seed)
    fit = fit_chosen(train, subject.train.labels, held_out, num_classes=subject.num_classes)
    details = {"l2_grid": list(L2_GRID), **_told(averaged)}
    name, chosen = f"{name}{_of_crops(averaged)}", {"l2": fit.l2}
    return _judge_linear(subject, fit.classifier.predict(test), name, details, chosen)


def on_crops(subject: Subject, seed: int, epochs: int, console: Console) -> Measured:
    """Train a classifier by SGD on features of random crops and flips of the training images.

    Every pair of learning rate and weight decay is tried at once, in one pass over the views. Each
    is trained twice, without the held-out tenth and with it: the first of the two chooses the pair,
    the second is tested.

    Args:
        subject: whose images.
        seed: of the held-out part, the order, the crops and the initial weights.
        epochs: passes over the training images.
        console: for progress.
    """
    train, device = subject.train, subject.device
    views, encoder = crop_and_flip(subject.config), subject.model.encoder
    mean, deviation = standardisation(train.features.representation)
    held_out = _held_out(subject, seed)
    kept = torch.ones(len(train.labels), dtype=torch.bool, device=device)
    kept[held_out] = False

    def epoch_features(epoch: int) -> Iterable[Rows]:
        order = epoch_order(len(train.labels), seed, epoch)
        generator = torch.Generator(device).manual_seed(derived(seed, "linear", epoch))
        there = order.to(device)
        labels, is_kept = train.labels[there], kept[there]
        start = 0
        for batch in train.batches.iterate(order, BATCH_SIZE):
            count = len(batch.images)
            uniforms = views.draw(count, device=device, generator=generator)
            with torch.no_grad():
                h = encoder(views(batch.images, batch.sizes, uniforms)[0])
            yield h, labels[start : start + count], is_kept[start : start + count]
            start += count
        advance()

    pairs = [(rate, decay) for decay in WEIGHT_DECAYS for rate in LEARNING_RATES]
    settings = [Setting(*pair, kept_only) for kept_only in (True, False) for pair in pairs]
    title = f"linear: crop and flip, seed {seed}"
    with (
        progress_bar(console, title, epochs) as advance,
        frozen(subject.model),
        torch.enable_grad(),
    ):
        classifiers = fit_linear_sgd(
            epoch_features,
            settings,
            in_features=len(mean),
            num_classes=subject.num_classes,
            epochs=epochs,
            seed=seed,
            device=device,
            mean=mean,
            deviation=deviation,
        )
    best, accuracy = _best(subject, classifiers[: len(pairs)], held_out)
    details = {
        "epochs": epochs,
        "batch_size": BATCH_SIZE,
        "learning_rates": list(LEARNING_RATES),
        "weight_decays": list(WEIGHT_DECAYS),
    }
    rate, decay = pairs[best]
    chosen = {"learning_rate": rate, "weight_decay": decay, "held_out": accuracy}
    logits = classifiers[len(pairs) + best].predict(subject.test.features.representation)
    return _judge_linear(subject, logits, "crop and flip", details, chosen)


def _representations(subject: Subject, averaged: Averaged | None) -> tuple[Tensor, Tensor]:
    """Return those of the training and of the test split: (N, d) and (T, d)."""
    if averaged is not None:
        return averaged.train, averaged.test
    return subject.train.features.representation, subject.test.features.representation


def _of_crops(averaged: Averaged | None) -> str:
    return "" if averaged is None else f" of {averaged.crops} crops"


def _told(averaged: Averaged | None) -> Record:
    return {} if averaged is None else {"crops": averaged.crops, "seed": averaged.seed}


def _held_out(subject: Subject, seed: int) -> Tensor:
    labels = subject.train.labels
    _, held_out = stratified_split(labels.cpu(), len(labels), CHOICE_SHARE, seed)
    return held_out.to(labels.device)


def _best(
    subject: Subject, classifiers: Sequence[LinearClassifier], held_out: Tensor
) -> tuple[int, float]:
    """Return which classifier does best on the held-out part, the first of equals, and how well."""
    features = subject.train.features.representation[held_out]
    labels = subject.train.labels[held_out]
    # One that has diverged predicts no class.
    scores = [
        top_k_accuracy(logits, labels) if logits.isfinite().all() else 0.0
        for logits in (classifier.predict(features) for classifier in classifiers)
    ]
    best = max(range(len(scores)), key=lambda index: scores[index])
    return best, scores[best]


def _judge_linear(
    subject: Subject, logits: Tensor, name: str, details: Record, chosen: Record
) -> Measured:
    values = subject.judge(predicted=logits.argmax(dim=1), logits=logits)
    return Measured(name, values, *_counts(subject), details, chosen)


def _votes(
    name: str, neighbours: Neighbours, subject: Subject, told: Record | None = None
) -> list[Measured]:
    measured = []
    bank = len(subject.train.labels)
    for k in [k for k in NEIGHBOURS if k <= bank] or [bank]:
        predicted = vote(
            neighbours,
            subject.train.labels,
            subject.num_classes,
            temperature=VOTE_TEMPERATURE,
            k=k,
        )
        details = {"k": k, "temperature": VOTE_TEMPERATURE, **(told or {})}
        values = subject.judge(predicted=predicted)
        measured.append(Measured(f"{name}, k={k}", values, *_counts(subject), details))
    return measured


def _counts(subject: Subject) -> tuple[int, int, int]:
    replaced = subject.train.num_replaced + subject.test.num_replaced
    return len(subject.train.labels), len(subject.test.labels), replaced
