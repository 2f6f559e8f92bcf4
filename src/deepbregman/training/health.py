"""Whether training goes well, without labels: a fixed sample of images, measured between epochs.

Process 0 measures for all. The sample and its views depend on the seed alone; the neighbours of the
last measurements are part of a checkpoint. So a run that is resumed measures what it would have
measured.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepbregman.config import Config
from deepbregman.data import Images
from deepbregman.data.batches import open_batches
from deepbregman.method.views import centre_view
from deepbregman.objectives.own import AnyViews
from deepbregman.runs import SATURATED, Record
from deepbregman.terminal import count_words

from . import diagnostics
from .randomness import derive_seed

SAMPLE = 512
"""Images of the sample; a quarter of them are also seen through views, for LiDAR."""
SAMPLE_BYTES = 2**28
"""Most memory of the sample, which has fewer images where they are large."""
NUM_VIEWS = 8
NEIGHBOURS = 10
BATCH_SIZE = 256

USEFUL_STEPS = 100
"""With fewer optimiser steps nothing much is learned (docs/log.md), however settled it looks."""
COLLAPSED_SHARE = 1 / 3
"""The rank has collapsed below this share of the run's best effective rank."""
UNSETTLED = 0.5
"""Share of neighbours that stay; below it, they still change too much."""
LONG = 3
"""Measurements that the long stability looks back."""
SETTLED = 1.2
"""A run drifts if the share of neighbours that changed over ``LONG`` measurements is more than this
times the share that changed over one."""
HIGH_RATE = 0.5
"""Below this share of the highest learning rate, everything settles because the rate has fallen."""


class Health:
    """Measures the encoder on a fixed sample of the training images.

    The main views of the run are repeated until there are enough for LiDAR.
    """

    def __init__(
        self, images: Images, config: Config, views: AnyViews, device: torch.device
    ) -> None:
        self.views, self.device, self.size = views, device, config.data.image_size
        affordable = max(2, SAMPLE_BYTES * len(images) // max(1, images.nbytes))
        count = min(SAMPLE, len(images), affordable)
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "health"))
        chosen = torch.randperm(len(images), generator=generator)[:count]
        skip = config.data.skip_unreadable
        self.batches = open_batches(images.select(chosen), device, skip_unreadable=skip)
        self.uniforms = [
            views.draw(max(2, count // 4), device="cpu", generator=generator)  # (M, n, R)
            for _ in range(math.ceil(NUM_VIEWS / views.num_views))
        ]
        self.neighbours: list[Tensor] = []
        """Neighbours (N, k) of the last measurements, the oldest first."""

    def measure(self, encoder: nn.Module) -> dict[str, float]:
        """Measure the encoder, in evaluation mode, and remember the neighbours it finds.

        Not in the result is what cannot be computed: stability the first times, alpha-ReQ of
        collapsed representations, and everything that is not finite.
        """
        with torch.no_grad():
            order = torch.arange(self.batches.num_images)
            whole = [
                encoder(centre_view(batch.images, batch.sizes, self.size))
                for batch in self.batches.iterate(order, BATCH_SIZE)
            ]
            h = torch.cat(whole).cpu().double()  # for exact spectra
            views = self._embed_views(encoder, order[: self.uniforms[0].shape[1]])
        if not (h.isfinite().all() and views.isfinite().all()):
            return {}
        neighbours = diagnostics.find_nearest(h, min(NEIGHBOURS, len(h) - 1))
        found = {
            "rankme": diagnostics.rankme(h),
            "alpha_req": diagnostics.alpha_req(h),
            "lidar": diagnostics.lidar(views),
        }
        before = [older for older in self.neighbours if older.shape == neighbours.shape]
        for name, passed in (("neighbour_stability", 1), ("long_stability", LONG)):
            if len(before) >= passed:
                found[name] = diagnostics.neighbour_stability(before[-passed], neighbours)
        self.neighbours = [*before, neighbours][-LONG:]
        return {name: float(value) for name, value in found.items() if value.isfinite()}

    def _embed_views(self, encoder: nn.Module, order: Tensor) -> Tensor:
        """Embed (M, n, d) random views of some images."""
        (batch,) = self.batches.iterate(order, len(order))
        embedded = []
        for uniforms in self.uniforms:
            shown = self.views(batch.images, batch.sizes, uniforms.to(self.device))
            embedded.append(encoder(shown.flatten(0, 1)).view(*shown.shape[:2], -1))
        return torch.cat(embedded).cpu().double()


def judge(records: Sequence[Record]) -> dict[str, str]:
    """Return ``verdict`` and ``reason`` by all records; nothing if the last has no measurement."""
    last = records[-1]
    if "rankme" not in last:
        return {}
    word, reason = _find_verdict(records, last)
    return {"verdict": word, "reason": reason}


def _find_verdict(records: Sequence[Record], last: Record) -> tuple[str, str]:
    ranks = [record["effective_rank"] for record in records if "effective_rank" in record]
    if "effective_rank" in last:  # absent if the batch was skipped
        rank, best = ranks[-1], max(ranks)
        if diagnostics.find_collapse(last):
            return "collapsing", f"effective rank {rank:.1f}, spread {last['spread']:.3f}"
        if rank < COLLAPSED_SHARE * best:
            return "collapsing", f"the effective rank fell from {best:.0f} to {rank:.1f}"
    measured = [record for record in records if "rankme" in record]
    if last["step"] < USEFUL_STEPS:
        return "under-trained", f"only {count_words(last['step'], 'step')}, too few to learn much"
    if len(measured) < 2 or "neighbour_stability" not in last:
        return "under-trained", "measured only once, too early to tell more"
    before, stability = measured[-2], last["neighbour_stability"]
    passed = int(last["epoch"] - before["epoch"])
    words = (
        f"{stability:.0%} of the nearest neighbours are the same as "
        f"{count_words(passed, 'epoch')} ago"
    )
    if last["learning_rate"] > before["learning_rate"]:
        return "under-trained", f"the learning rate still rises; {words}"
    if stability < UNSETTLED:
        return "under-trained", f"only {words}"
    # Much is still gained while the rate falls (docs/health.md), so nothing is saturated then.
    highest = max(record["learning_rate"] for record in records)
    if last["learning_rate"] < max(before["learning_rate"], HIGH_RATE * highest):
        return "healthy", f"{words}, while the learning rate falls"
    if 1.0 - last.get("long_stability", 0.0) > SETTLED * (1.0 - stability):
        return "healthy", f"{words}, and they still drift"
    return SATURATED, (
        f"more epochs bring little: {words}, and {last['long_stability']:.0%} as "
        f"{LONG} measurements ago"
    )


def should_stop(records: Sequence[Record]) -> bool:
    """Whether two judgements in a row, the second in the last record, found saturation."""
    judged = [record["verdict"] for record in records if "verdict" in record]
    return "verdict" in records[-1] and judged[-2:] == [SATURATED, SATURATED]
