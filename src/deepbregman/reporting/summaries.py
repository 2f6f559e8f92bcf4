"""What a study measured, in words: means, differences, and the conditions behind them."""

from collections.abc import Iterable
from pathlib import Path

from deepbregman.runs import Record

COMPARED = {
    "linear, cached features": "linear classifier",
    "linear, crop and flip": "linear classifier, crop and flip",
    "knn, cosine, k=200": "kNN, k = 200",
    "knn, cosine, k=20": "kNN, k = 20",
}
"""Metrics in which recipes are compared before the eye; ``results.json`` compares them in all."""
COSTS = {
    "epochs": "epochs",
    "views_per_image": "views per image",
    "view_size": "pixels of a side",
    "samples_per_step": "samples per step",
    "steps": "steps",
}
"""What is said of the cost of an arm."""


def costs_known(results: Record) -> dict[str, str]:
    """Return those of ``COSTS`` that any arm has; earlier versions did not write all of them."""
    costs = [arm["cost"] for arm in results["arms"] if arm.get("cost")]
    return {
        name: words
        for name, words in COSTS.items()
        if any(cost.get(name) is not None for cost in costs)
    }


def spread(summary: Record | None, digits: int = 2) -> str:
    """Write mean, deviation and number, with so many decimals."""
    if summary is None:
        return ""
    deviation = summary["deviation"]
    words = "" if deviation is None else f" ± {deviation:.{digits}f}"
    return f"{summary['mean']:.{digits}f}{words} (n={summary['n']})"


def change(summary: Record | None) -> str:
    """Write a paired difference: mean, deviation, 95 % interval and number."""
    if summary is None:
        return ""
    words = "" if summary["deviation"] is None else f" ± {summary['deviation']:.2f}"
    if summary["interval"] is not None:
        words += f" [{', '.join(map(signed, summary['interval']))}]"
    return f"{signed(summary['mean'])}{words} (n={summary['n']})"


def seeds_of(counts: Iterable[int]) -> str:
    """Say how many seeds there are: ``n = 3``, or ``n = 2-3`` where it is not the same of all."""
    found = sorted(set(counts))
    return f"n = {found[0]}" + f"-{found[-1]}" * (len(found) > 1)


def signed(value: float) -> str:
    """Write a difference with its sign, which zero has none of its own."""
    return f"{round(value, 2) + 0.0:+.2f}"


def reference_words(results: Record) -> str | None:
    """Name what the arms are seen against; None where they stand for themselves."""
    names = {arm["against"] for arm in results["arms"] if arm.get("difference")}
    if not names:
        return None
    return str(names.pop()) if len(names) == 1 else "the first of its series"


def unequal_words(results: Record) -> str:
    """Say in which ways the arms do not spend alike; nothing where they do."""
    found = results.get("unequal_budget")
    return f"unequal budget: {'; '.join(found)}" if found else ""


def as_sentence(words: str) -> str:
    """Begin words with a capital, and leave the names within them as they are."""
    return words[:1].upper() + words[1:]


def diverged_words(results: Record) -> str:
    """Name the arms of which seeds diverged, which no mean holds; nothing where none did."""
    found = []
    for arm in results["arms"]:
        if arm.get("num_diverged"):
            begun = sum(row["arm"] == arm["arm"] for row in results["cells"])
            found.append(f"{arm['arm']} ({arm['num_diverged']} of {begun} seeds)")
    return f"diverged: {', '.join(found)}" if found else ""


def trained_for(results: Record) -> str:
    """Say how many epochs the arms were trained, which are of different numbers perhaps."""
    if results["epochs"] is not None:
        return str(results["epochs"])
    counts = sorted({arm["cost"]["epochs"] for arm in results["arms"] if arm.get("cost")})
    return " or ".join(map(str, counts))


def caption(results: Record) -> str:
    """Say what was measured, on what."""
    split = "test" if results["judge"] == "test" else "held-out training"
    unequal = unequal_words(results)
    return (
        f"{results['study']['title']} {results['recipe']} on {Path(results['data']).name}, "
        f"{trained_for(results)} epochs, {split} images, top-1 %" + f"; {unequal}" * bool(unequal)
    )
