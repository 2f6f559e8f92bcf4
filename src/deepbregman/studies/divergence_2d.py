"""The study ``divergence-2d``: learned divergences from every point of the plane to a sample.

The paper has such a figure but describes neither its data nor its training. Here samples of five
Gaussian classes train K affine subnetworks directly on the plane. Then phi(x) = max_k w_k x + b_k
is convex in x, and the functional divergence of single points is an ordinary, piecewise linear
Bregman divergence of the plane, as in Siahkamari et al. 2019, whom the paper follows. Training is
supervised: a contrastive loss with a margin on pairs of one class and of two. The classical
divergences are drawn for comparison. KL and Itakura-Saito need positive coordinates, so for them
the plane is shifted into the positive quadrant.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from deepbregman.method import bregman
from deepbregman.objectives.deep_divergence import FORMS
from deepbregman.reporting.charts import name_figures
from deepbregman.reporting.figures import PlaneMap, save_plane_figure
from deepbregman.runs import collect_provenance
from deepbregman.training.devices import device_name
from deepbregman.training.randomness import derive_seed

from .definition import StudyResult
from .plane import Form, PlaneNetwork, fit
from .results import begin_study, write_rows

CENTRES = ((0.0, 0.0), (1.5, 1.8), (-1.4, 1.7), (-1.5, -1.8), (1.4, -1.7))
DEVIATION = (0.3, 0.65)
"""Deviation of each class along the two axes; they differ, so that Euclidean distance misleads."""
NUM_SUBNETWORKS = 10
TARGET = 1
"""Class of the sample to which divergences are drawn."""
BORDER = 0.8
"""Width of the plane that is drawn around the samples."""
LEAST_COORDINATE = 0.25
"""In the shifted plane."""
Divergence = Callable[[Tensor, Tensor], Tensor]
LEARNED: dict[str, Form] = {"learned, max form": "max", "learned, smooth form": "smooth"}
CLASSICAL: dict[str, tuple[bregman.Generator, bool]] = {
    "squared Euclidean": (bregman.squared_euclidean, False),
    "Kullback-Leibler": (bregman.kl, True),
    "Itakura-Saito": (bregman.itakura_saito, True),
}
"""Name -> generator, and whether it needs the shifted plane."""


def draw_classes(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw samples (N, 2) of the classes in turn, and their labels (N,)."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "classes"))
    labels = torch.arange(num_samples) % len(CENTRES)
    noise = torch.randn(num_samples, 2, generator=generator)
    return torch.tensor(CENTRES)[labels] + torch.tensor(DEVIATION) * noise, labels


def measure_separation(distance: Tensor, labels: Tensor) -> dict[str, float]:
    """Measure how well divergences between all samples (N, N) tell classes apart.

    Returns:
        The area under the ROC curve of "of two classes" by divergence and, where a tenth of the
        pairs of one class or more has divergence zero, the shares of pairs of one class and of two
        that have.
    """
    from sklearn.metrics import roc_auc_score

    other = labels[:, None] != labels
    pairs = ~torch.eye(len(labels), dtype=torch.bool)
    found = {"AUC": float(roc_auc_score(other[pairs].numpy(), distance[pairs].numpy()))}
    zero = distance <= 1e-6 * distance.max()
    same_at_zero = zero[pairs & ~other].double().mean().item()
    if same_at_zero >= 0.1:
        other_at_zero = zero[other].double().mean().item()
        found |= {"same class at zero": same_at_zero, "other class at zero": other_at_zero}
    return found


def run_divergence_2d(
    out: Path,
    *,
    seeds: int,
    samples: int = 250,
    steps: int = 300,
    resolution: int = 160,
    console: Console | None = None,
) -> StudyResult:
    """Learn divergences on classes of points and draw them, beside the classical ones."""
    console = console or Console(quiet=True)
    begin_study(out, seeds)
    record = collect_provenance(device_name(torch.device("cpu")))
    values: dict[tuple[str, str], list[float]] = {}
    for seed in range(seeds):
        points, labels = draw_classes(samples, derive_seed(seed, "train"))
        held_out, truth = draw_classes(samples, derive_seed(seed, "test"))
        with console.status(f"divergence-2d, seed {seed}"):
            measures, network = learn(points, labels, steps, seed)
        ends = points.amin(dim=0), points.amax(dim=0)
        middle, half = (ends[0] + ends[1]) / 2, (ends[1] - ends[0]).max() / 2 + BORDER
        low, high = middle - half, middle + half  # the square that is drawn
        shift = LEAST_COORDINATE - torch.minimum(low, held_out.amin(dim=0))
        measures |= list_classical(shift)
        for name, measure in measures.items():
            for metric, found in measure_separation(measure(held_out, held_out), truth).items():
                values.setdefault((name, metric), []).append(found)
        if seed == 0:
            axes = [torch.linspace(*ends, resolution) for ends in zip(low, high, strict=True)]
            _draw(out, measures, network, points, labels, axes)
    settings = {
        "num_subnetworks": NUM_SUBNETWORKS,
        "samples": samples,
        "steps": steps,
        "centres": CENTRES,
        "deviation": DEVIATION,
        "target": TARGET,
    }
    notes = " ".join((__doc__ or "").replace("``", "").split())
    return write_rows(out, "divergence-2d", settings, record, values, notes)


def learn(
    points: Tensor, labels: Tensor, steps: int, seed: int
) -> tuple[dict[str, Divergence], PlaneNetwork]:
    """Train the two learned forms; return D of points for each, and the max form's network."""
    measures: dict[str, Divergence] = {}
    networks: dict[Form, PlaneNetwork] = {}
    for name, form in LEARNED.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "weights"))
            network = PlaneNetwork((), NUM_SUBNETWORKS, subnetworks=True, activation=None)
        networks[form] = fit(
            network,
            points,
            labels,
            form=form,
            loss="contrastive",
            margin=1.0,
            steps=steps,
            batch_size=len(points),
            learning_rate=0.02,
            seed=seed,
        )
        measures[name] = partial(_diverge, networks[form], form)
    return measures, networks["max"]


def _diverge(network: PlaneNetwork, form: Form, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return FORMS[form](network(x), network(y))


def list_classical(shift: Tensor) -> dict[str, Divergence]:
    """Return D of points for each classical divergence; ``shift`` makes coordinates positive."""

    def measure(phi: bregman.Generator, offset: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return bregman.bregman(phi, (x + offset)[:, None], (y + offset)[None])

    return {
        name: partial(measure, phi, shift if shifted else torch.zeros_like(shift))
        for name, (phi, shifted) in CLASSICAL.items()
    }


def _draw(
    out: Path,
    measures: dict[str, Divergence],
    network: PlaneNetwork,
    points: Tensor,
    labels: Tensor,
    axes: list[Tensor],
) -> None:
    """Map D(x || x0) over the plane for every measure, and the regions of the subnetworks."""
    resolution = len(axes[0])
    grid = torch.stack(torch.meshgrid(*axes, indexing="xy"), dim=-1).flatten(0, 1)  # (G^2, 2)
    away = (points - torch.tensor(CENTRES[TARGET])).square().sum(dim=1)
    chosen = int(away.masked_fill(labels != TARGET, torch.inf).argmin())
    one = points[chosen : chosen + 1]

    def panel(name: str, measure: Divergence) -> PlaneMap:
        is_shifted = name in CLASSICAL and CLASSICAL[name][1]
        shifted = "\n(plane shifted into the positive quadrant)" * is_shifted
        heights = measure(grid, one).view(resolution, resolution).numpy()
        zero = "\n(grey: exactly zero)" * (name == "learned, max form")
        return PlaneMap(f"D(x, x0), {name}{shifted}{zero}", heights)

    panels = [panel(name, measure) for name, measure in measures.items()]
    with torch.no_grad():
        winner = network(grid).argmax(dim=1).view(resolution, resolution).numpy()
    won = len(np.unique(winner))
    title = f"winning subnetwork, max form\n({won} of {network.num_outputs} win somewhere)"
    panels.insert(1, PlaneMap(title, winner, is_partition=True))
    save_plane_figure(
        name_figures(out, "divergence-2d"),
        panels,
        x=axes[0].numpy(),
        y=axes[1].numpy(),
        points=points.numpy(),
        labels=labels.numpy(),
        chosen=chosen,
    )
