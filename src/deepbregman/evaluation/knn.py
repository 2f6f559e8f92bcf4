"""Nearest neighbours: the search, the vote, the protocol ``knn`` and the monitor of pretraining.

The search (`nearest_by`) and the vote (`vote`) are separate: the search takes any similarity, so
that the learned divergence shares it with the cosine, and one search serves every smaller k.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.config import Config
from deepbregman.data import Split, stratified_split
from deepbregman.data.opening import batch_images, split_for_monitor
from deepbregman.errors import Diverged
from deepbregman.method.bregman import prepare_targets, similarity
from deepbregman.method.networks import Model
from deepbregman.runs import Record
from deepbregman.training.randomness import epoch_order

from .features import Features, LabelledFeatures, compute_features
from .inputs import Evaluation
from .results import Measurement, make_rows, pack

if TYPE_CHECKING:
    from deepbregman.training.loop import Monitor

NEIGHBOURS = (20, 200)
VOTE_TEMPERATURE = 0.1
MEASURES = ("cosine", "divergence")
"""Measures of a search; an evaluation also compares embeddings."""
VARIANTS = {
    "cosine": "cosine",
    "embedding": "cosine of embeddings",
    "divergence": "divergence",
    "bank": "divergence over a bank",
}
"""Measure -> its name in rows."""
LARGEST_BANK = 20_000
LARGEST_QUERY = 2_000
MONITOR_BYTES = 4 * 2**30
"""Memory for the monitor's bank; the bank has fewer images if they are large."""
MONITOR_NEIGHBOURS = 20
SEEN_SHARE = 0.1

# A vote counts in units of 2^-40 of the nearest neighbour's weight: sums of integers are exact, so
# ties are ties on every device, in whatever order a GPU adds. Room for k = 2^22.
_VOTE_UNIT = 2.0**40


class Neighbours(NamedTuple):
    """The k most similar bank entries of every query, the most similar first."""

    similarities: Tensor  # (Q, k), float32, descending
    indices: Tensor  # (Q, k), int64, into the bank; the lower index first among equals


def nearest_by(
    compare: Callable[[Tensor], Tensor], queries: Tensor, k: int, chunk: int = 256
) -> Neighbours:
    """Find the k most similar bank entries of every query, under any similarity.

    Equal similarities are ordered by bank index: neither the device nor the chunk matters.

    Args:
        compare: Maps a chunk of queries (c, ...) to its similarities with the bank (c, B).
        chunk: Queries at a time; memory is proportional to ``chunk * B``.
    """
    parts = [_take_largest(compare(part), k) for part in torch.split(queries, chunk)]
    similarities, indices = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return Neighbours(similarities, indices)


def cosine_neighbours(queries: Tensor, bank: Tensor, k: int) -> Neighbours:
    """Find the k bank entries (B, d) of the largest cosine with each query (Q, d), in float32.

    A zero vector has cosine 0 with everything.
    """
    # Half precision would turn near neighbours into ties.
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        return nearest_by(cosine_to(bank), queries, k)


def cosine_to(bank: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function from queries (c, d) to their cosines with a bank (B, d), in float32."""
    targets = normalise_rows(bank).T  # (d, B)
    return lambda part: normalise_rows(part) @ targets  # (c, B)


def normalise_rows(features: Tensor) -> Tensor:
    """Return features (N, d) with length 1, in float32; their products are cosines."""
    return functional.normalize(features.float(), dim=1)


def vote(
    neighbours: Neighbours,
    bank_labels: Tensor,
    num_classes: int,
    *,
    temperature: float = VOTE_TEMPERATURE,
    k: int | None = None,
) -> Tensor:
    """Let the neighbours vote with weight ``exp(similarity / temperature)`` (Wu et al., 2018).

    Args:
        k: Only the first k neighbours vote; all of them by default.

    Returns:
        The winning class of every query, (Q,) int64; the lowest class where several win.
    """
    similarities = neighbours.similarities[:, :k].double()  # (Q, k)
    # A factor common to a row leaves its winner alone, and exp of a non-positive cannot overflow.
    weights = ((similarities - similarities.amax(1, keepdim=True)) / temperature).exp()
    ballots = (weights * _VOTE_UNIT).round().long()  # (Q, k)
    labels = bank_labels.to(ballots.device).long()[neighbours.indices[:, :k]]  # (Q, k)
    totals = ballots.new_zeros(len(ballots), num_classes).scatter_add_(1, labels, ballots)
    return totals.argmax(dim=1)


def knn_accuracy(
    queries: Tensor,
    query_labels: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    *,
    k: int,
) -> float:
    """Return the accuracy, in per cent, of the weighted cosine kNN classifier for one k."""
    num_classes = 1 + int(max(query_labels.max(), bank_labels.max()))
    predictions = vote(cosine_neighbours(queries, bank, k), bank_labels, num_classes)
    return 100.0 * (predictions == query_labels.to(predictions.device)).double().mean().item()


def _take_largest(similarities: Tensor, k: int) -> Neighbours:
    """Take the k largest of every row (c, B), the lower index first among equals."""
    size = similarities.shape[1]
    # topk leaves the order of equals open. So select on an integer that has no equals: the float's
    # bits, made monotone, above the reversed index. Adding 0.0 merges -0.0 with 0.0.
    bits = (similarities.float() + 0.0).contiguous().view(torch.int32)
    monotone = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # (c, B)
    positions = torch.arange(size, device=similarities.device)
    keys = monotone * 2**32 + (size - 1 - positions)
    indices = positions[keys.topk(k, dim=1).indices]  # (c, k)
    return Neighbours(similarities.float().gather(1, indices), indices)


def select_features(features: Features, measure: str) -> Tensor:
    """Return what a measure compares: ``cosine`` features, ``embedding`` z, ``divergence`` scores.

    Embeddings are compared by cosine, too. They are what scores are made of, so they show how much
    of a difference between the other two is due to the projection and not to the divergence.
    """
    if measure == "cosine":
        return features.representation
    part = features.embedding if measure == "embedding" else features.scores
    assert part is not None  # choose_measures has made sure
    return part


def rank_bank(
    measure: str, queries: Tensor, bank: Tensor, k: int, *, smoothing: float = 0.0, seed: int = 0
) -> Neighbours:
    """Find the k nearest of a bank for each query; similarities are cosines, or minus divergences.

    The query is the first argument of the learned divergence, ``D(query || item)``: the gap that
    the item's winning subnetwork leaves in the query's scores. In the hard form a query is at
    divergence 0 from a whole cell of the bank. Ties are ordered by a seeded shuffle of the bank, so
    that the order of the bank, often that of its classes, does not matter.
    """
    order = epoch_order(len(bank), seed, 0).to(bank.device)
    compare = similarity_to(measure, bank, smoothing)
    # The bank itself may be too large for a second, shuffled copy.
    found = nearest_by(lambda part: compare(part)[:, order], queries, k)
    return Neighbours(found.similarities, order[found.indices])


def similarity_to(measure: str, bank: Tensor, smoothing: float) -> Callable[[Tensor], Tensor]:
    """Return the function from queries (c, ...) to their similarities with the bank (c, B)."""
    if measure != "divergence":
        return cosine_to(bank)
    diverge = prepare_targets(bank, smoothing)  # in float64: float32 would rank at random
    return lambda queries: -diverge(queries).float()


def knn(evaluation: Evaluation) -> list[Record]:
    """Classify by weighted nearest neighbours: by cosine, and by the learned divergence of scores.

    Beside the divergence stands the cosine of the embeddings that the scores are computed from. The
    seed matters only for ties, of which the hard divergence has many; the other variants have one
    value. Few neighbours vote for few classes, so there is no top 5.
    """
    labelled, seeds = evaluation.labelled, evaluation.options.each_seed
    rows = make_rows([classify_by(labelled, "cosine")])
    if labelled.model.divergence_network is not None:
        rows += make_rows([classify_by(labelled, "embedding")])
        drawn = seeds[:1] if labelled.config.divergence.smoothing > 0 else seeds
        rows += make_rows([classify_by(labelled, "divergence", seed) for seed in drawn])
    return rows


def classify_by(labelled: LabelledFeatures, measure: str, seed: int = 0) -> list[Measurement]:
    """Classify by the nearest neighbours of a measure; the seed orders ties."""
    found = find_neighbours(labelled, labelled.test.features, measure, max(NEIGHBOURS), seed)
    measured = []
    labels = labelled.train.labels
    for k in [k for k in NEIGHBOURS if k <= len(labels)] or [len(labels)]:
        predicted = vote(found, labels, labelled.num_classes, k=k)
        settings = {"k": k, "temperature": VOTE_TEMPERATURE}
        values, kept = labelled.measure(predicted), pack(predicted)
        variant = f"{VARIANTS[measure]}, k={k}"
        measured.append(Measurement(variant, values, *labelled.counts, settings, predicted=kept))
    return measured


def find_neighbours(
    labelled: LabelledFeatures, queries: Features, measure: str, k: int, seed: int = 0
) -> Neighbours:
    """Find the nearest training images, with similarities as votes are weighted by.

    These are cosines, or the Gaussian kernel of divergences, whose width the run may have learned.
    """
    settings, k = labelled.config.divergence, min(k, len(labelled.train.labels))
    asked, bank = (select_features(part, measure) for part in (queries, labelled.train.features))
    found = rank_bank(measure, asked, bank, k, smoothing=settings.smoothing, seed=seed)
    if measure != "divergence":
        return found
    # Rounding would lose the order of far neighbours in psi, so they are found by -D.
    sigma = labelled.model.sigma
    psi = similarity(-found.similarities, "gaussian", settings.sigma if sigma is None else sigma)
    return found._replace(similarities=psi)


def build_knn_monitor(train: Split, config: Config, device: torch.device) -> "Monitor | None":
    """Build the monitor; None if there are no labels, no two images of a class, or it is off.

    The queries are the held-out training images; the bank is the rest. With ``data.holdout`` 0 a
    tenth of the training images, which pretraining has seen without their labels, are the queries.
    Both sides are limited, stratified by class, for speed.
    """
    if train.labels is None or config.training.knn_every == 0:
        return None
    bank, queries = split_for_monitor(train, config)
    if len(queries) == 0:
        bank, queries = stratified_split(train.labels, len(train), SEEN_SHARE, config.seed)
    if len(queries) == 0:
        return None
    sides = []
    frame_bytes = 3 * (2 * config.data.image_size) ** 2  # an image is kept at twice its side
    affordable = max(1, MONITOR_BYTES // frame_bytes)
    for indices, largest in ((bank, min(LARGEST_BANK, affordable)), (queries, LARGEST_QUERY)):
        split = train.select(indices)
        if len(split) > largest:
            _, kept = stratified_split(split.labels, len(split), largest / len(split), config.seed)
            split = split.select(kept)
        batches = batch_images(split.images, config, device, may_replace=True)
        sides.append((batches, split.known_labels.to(device)))
    (bank_batches, bank_labels), (query_batches, query_labels) = sides
    neighbours = min(MONITOR_NEIGHBOURS, len(bank_labels))

    def monitor(model: Model) -> dict[str, float]:
        size = config.data.image_size
        queries, bank = (
            compute_features(model, batches, size).representation
            for batches in (query_batches, bank_batches)
        )
        if not (queries.isfinite().all() and bank.isfinite().all()):
            raise Diverged(
                "features are not finite: training has diverged; lower optimiser.learning_rate "
                f"({config.optimiser.learning_rate}) or lengthen optimiser.warmup_epochs"
            )
        return {"knn": knn_accuracy(queries, query_labels, bank, bank_labels, k=neighbours)}

    return monitor
