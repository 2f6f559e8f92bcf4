"""The kNN monitor: how good the representations are while they are being trained."""

import torch

from deepbregman.config import Config
from deepbregman.data import Split, stratified_split
from deepbregman.errors import Diverged
from deepbregman.method.model import Model
from deepbregman.training.assembly import batches_of
from deepbregman.training.loop import Monitor

from .features import compute_features
from .knn import knn_accuracy

LARGEST_BANK = 20_000
LARGEST_QUERY = 2_000
NEIGHBOURS = 20
SEEN_SHARE = 0.1


def split_for_monitor(train: Split, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices to pretrain on and those held out from it, by ``data.holdout``."""
    return stratified_split(train.labels, len(train), config.data.holdout, config.seed)


def knn_monitor(train: Split, config: Config, device: torch.device) -> Monitor | None:
    """Build the monitor, or None when there are no labels or it is turned off.

    The queries are the held-out training images; the bank is the rest. With ``data.holdout`` 0
    there are none, so a tenth of the training images, which pretraining has seen without their
    labels, is taken as queries instead. Both sides are capped, stratified, for speed.

    Args:
        train: the training split, all of it.
        config: of the run.
        device: of the networks.
    """
    if train.labels is None or config.training.knn_every == 0:
        return None
    bank, queries = split_for_monitor(train, config)
    if len(queries) == 0:
        bank, queries = stratified_split(train.labels, len(train), SEEN_SHARE, config.seed)
    sides = []
    for indices, largest in ((bank, LARGEST_BANK), (queries, LARGEST_QUERY)):
        split = train.select(indices)
        if len(split) > largest:
            _, kept = stratified_split(split.labels, len(split), largest / len(split), config.seed)
            split = split.select(kept)
        assert split.labels is not None
        sides.append((batches_of(split.images, config, device), split.labels.to(device)))
    (bank_batches, bank_labels), (query_batches, query_labels) = sides
    neighbours = min(NEIGHBOURS, len(bank_labels))

    def monitor(model: Model) -> dict[str, float]:
        size = config.data.image_size
        queries = compute_features(model, query_batches, size).representation
        bank = compute_features(model, bank_batches, size).representation
        if not (queries.isfinite().all() and bank.isfinite().all()):
            raise Diverged(
                "features are not finite: training has diverged; lower optimiser.learning_rate "
                f"({config.optimiser.learning_rate}) or lengthen optimiser.warmup_epochs"
            )
        return {"knn": knn_accuracy(queries, query_labels, bank, bank_labels, k=neighbours)}

    return monitor
