"""Mean, deviation and intervals, and how they are written. The only copy; needs no torch.

A summary is a record ``{"mean", "deviation", "n"}`` as JSON files hold it: ``deviation`` is the
sample deviation (n - 1), None of a single value. A paired summary has ``interval`` besides.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Summary = dict[str, Any]
CONFIDENCE = 0.95
"""Probability with which an interval holds the mean difference."""


def summarise(values: Sequence[float]) -> Summary:
    """Return mean, sample deviation (None of a single value) and number."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation, "n": len(values)}


def summarise_pairs(mine: Mapping[int, float], reference: Mapping[int, float]) -> Summary | None:
    """Summarise the differences to a reference seed by seed; None without a common seed.

    Pairing removes what the seed alone does. ``interval`` holds the mean difference with 95 %
    confidence, by Student's t with n - 1 degrees of freedom; None of a single seed.
    """
    from scipy.special import stdtrit

    changes = [value - reference[seed] for seed, value in mine.items() if seed in reference]
    if not changes:
        return None
    summary = summarise(changes)
    interval = None
    if summary["deviation"] is not None:
        quantile = float(stdtrit(len(changes) - 1, (1.0 + CONFIDENCE) / 2.0))
        margin = quantile * summary["deviation"] / math.sqrt(len(changes))
        interval = [summary["mean"] - margin, summary["mean"] + margin]
    return {**summary, "interval": interval}


def interval_over_images(
    changes: Sequence[Sequence[float]], classes: Sequence[int] | None = None
) -> list[float]:
    """Return the 95 % interval of a mean difference for other seeds and other test images.

    An interval over seeds alone holds for these test images only. Here the variance of the mean
    over the images is added. The sum counts what a seed does to single images twice, so where seeds
    differ little the interval holds the mean more often than 95 %. (With few seeds, taking it off
    once would leave so few degrees of freedom that the interval is hardly narrower, or wider.) The
    quantile is Student's, with the degrees of freedom of Welch and Satterthwaite. Of one seed, it
    is the interval over images.

    Args:
        changes: (S, N), for each seed and image 1, 0 or -1: right now and wrong before, no change,
            the reverse.
        classes: (N,), the class of each image, for the mean over classes instead of over images.
    """
    import numpy as np
    from scipy.special import stdtrit

    table = np.asarray(changes, dtype=np.float64)
    groups = [np.arange(table.shape[1])]
    if classes is not None:
        groups = [np.flatnonzero(np.asarray(classes) == label) for label in np.unique(classes)]
    per_seed = np.mean([table[:, group].mean(axis=1) for group in groups], axis=0)  # (S,)
    per_image = table.mean(axis=0)  # (N,)
    parts = []  # variance of the mean, and its degrees of freedom
    for group in groups:
        if len(group) > 1:
            variance = float(per_image[group].var(ddof=1)) / len(group) / len(groups) ** 2
            parts.append((variance, len(group) - 1))
    if len(per_seed) > 1:
        parts.append((float(per_seed.var(ddof=1)) / len(per_seed), len(per_seed) - 1))
    total, mean = sum(variance for variance, _ in parts), float(per_seed.mean())
    if total == 0.0:
        return [mean, mean]
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in parts)
    margin = float(stdtrit(freedom, (1.0 + CONFIDENCE) / 2.0)) * math.sqrt(total)
    return [mean - margin, mean + margin]


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a share, from 0 to 1, that was seen in n draws (Wilson, 1927)."""
    from scipy.special import ndtri

    square = float(ndtri((1.0 + CONFIDENCE) / 2.0)) ** 2
    centre = (share + square / (2 * n)) / (1 + square / n)
    margin = math.sqrt(square * (share * (1 - share) / n + square / (4 * n * n))) / (1 + square / n)
    return min(share, max(0.0, centre - margin)), max(share, min(1.0, centre + margin))


def format_spread(mean: float, deviation: float | None, digits: int = 2) -> str:
    """Write ``a ± b``, or ``a`` where there is no deviation."""
    words = "" if deviation is None else f" ± {deviation:.{digits}f}"
    return f"{mean:.{digits}f}{words}"


def format_seeds(counts: Iterable[int]) -> str:
    """Write the number of seeds: ``n = 3``, or ``n = 2-3`` where arms differ; empty for none."""
    found = sorted(set(counts))
    return f"n = {'-'.join(map(str, dict.fromkeys((found[0], found[-1]))))}" if found else ""


def format_summary(summary: Summary, digits: int = 2) -> str:
    """Write ``a ± b (n=3)``."""
    return f"{format_spread(summary['mean'], summary['deviation'], digits)} (n={summary['n']})"


def format_signed(value: float) -> str:
    """Write a difference with its sign; a rounded zero is ``+0.00``, never ``-0.00``."""
    return f"{round(value, 2) + 0.0:+.2f}"


def format_difference(summary: Summary) -> str:
    """Write a paired summary as ``+a ± b [low, high] (n=3)``."""
    words = "" if summary["deviation"] is None else f" ± {summary['deviation']:.2f}"
    if summary["interval"] is not None:
        words += f" [{', '.join(map(format_signed, summary['interval']))}]"
    return f"{format_signed(summary['mean'])}{words} (n={summary['n']})"
