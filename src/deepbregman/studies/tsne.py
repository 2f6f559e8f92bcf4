"""The study ``tsne``: maps of the features of several encoders, with numbers under each.

The paper shows two such maps and concludes "better separation". A map is not a measurement, so each
comes with measurements of the features: silhouette (cosine), agreement of k-means with the classes,
and kNN accuracy.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from deepbregman.data import Source, Split, stratified_split, without_unreadable
from deepbregman.data.opening import batch_images
from deepbregman.errors import UserError
from deepbregman.evaluation.features import compute_features
from deepbregman.evaluation.inputs import open_labelled
from deepbregman.evaluation.knn import knn_accuracy
from deepbregman.exporting.loading import Export, read_export
from deepbregman.files import replace_file
from deepbregman.method.networks import Model
from deepbregman.reporting.charts import name_figures
from deepbregman.reporting.figures import FeatureMap, save_map_figure
from deepbregman.runs import Run, collect_provenance
from deepbregman.statistics import format_summary, summarise
from deepbregman.terminal import say
from deepbregman.training.checkpoints import load_trained
from deepbregman.training.devices import device_name, pick_device

from .definition import StudyResult
from .results import begin_study, write_rows

PERPLEXITY = 30.0
NEIGHBOURS = 20
NOTES = (
    "t-SNE (perplexity 30, PCA start) of the L2-normalised features of the frozen encoder on the "
    "same test images, a stratified subset. Silhouette (cosine), k-means (as many clusters as "
    "classes, on the same normalised features) and kNN (cosine, k = 20, bank: all training images) "
    "are of the features, not of the map. Seeds are of t-SNE and k-means; silhouette and kNN "
    "depend on none. One run of each kind is an anecdote: differences between runs have no "
    "deviation here."
)


def run_tsne(
    out: Path,
    runs: Sequence[Path],
    data: str | None = None,
    images: int = 2000,
    seeds: int = 3,
    accelerator: str = "auto",
    console: Console | None = None,
) -> StudyResult:
    """Map the features of runs, or of encoders exported from them, on the same test images."""
    console = console or Console(quiet=True)
    # A run that is named twice counts once.
    places = {Path(run).resolve(): Path(run) for run in runs}
    if not places:
        raise UserError("--runs names no run: give the folders of one or more")
    opened = [read_export(p) if p.is_file() else Run.open(p) for p in places.values()]
    names = [p.stem if p.is_file() else p.name for p in places]
    names = [
        n if names.count(n) == 1 else str(places[p]) for n, p in zip(names, places, strict=True)
    ]
    device = pick_device(accelerator)
    source = open_labelled(opened[0].config, data)
    if opened[0].config.data.skip_unreadable:
        source = without_unreadable(source)  # no other may replace one that has a label
    if source.skipped_notice:
        say(console, source.skipped_notice)
    chosen = _choose_subset(source, images)
    labels = chosen.known_labels.numpy()
    begin_study(out, seeds)
    record = collect_provenance(device_name(device))
    classes = list(source.classes or map(str, range(1 + int(labels.max()))))
    values: dict[tuple[str, str], list[float]] = {}
    maps: dict[str, list[np.ndarray]] = {}
    pictures = []
    for name, run in zip(names, opened, strict=True):
        with console.status(f"features of {name} ..."):
            features, widths, accuracy = _measure(run, source, chosen, device)
        found: dict[str, list[float]] = {}
        for seed in range(seeds):
            with console.status(f"t-SNE of {name}, seed {seed} ..."):
                maps.setdefault(name, []).append(_map_to_plane(features, seed))
                for metric, value in _measure_clusters(features, labels, seed).items():
                    found.setdefault(metric, []).append(value)
        silhouette = float(widths.mean())
        fixed = {"silhouette": [silhouette], f"kNN, k={NEIGHBOURS}, %": [accuracy]}
        for metric, each in {**fixed, **found}.items():
            values[name, metric] = each
        for label in np.unique(labels):
            of_class = float(widths[labels == label].mean())
            values[name, f"silhouette of class {classes[label]}"] = [of_class]
        words = [f"silhouette {silhouette:.3f}, kNN {accuracy:.1f} %"]
        spreads = [f"{name} {format_summary(summarise(each), 3)}" for name, each in found.items()]
        words.append(", ".join(spreads))
        pictures.append(FeatureMap(name, maps[name][0], tuple(words)))
    arrays = {f"map_{index}": np.stack(each) for index, each in enumerate(maps.values())}
    with replace_file(out / "coordinates.npz") as file:  # maps are (seeds, N, 2)
        np.savez(file, labels=labels, runs=np.array(list(maps)), **arrays)  # type: ignore[arg-type]  # numpy's stub
    save_map_figure(name_figures(out, "tsne"), pictures, labels, classes)
    settings = {
        "runs": names,
        "data": Path(data or opened[0].config.data.source).name,
        "images": len(labels),
        "perplexity": min(PERPLEXITY, (len(labels) - 1) / 3),
    }
    return write_rows(out, "tsne", settings, record, values, NOTES)


def _choose_subset(source: Source, images: int) -> Split:
    """Take at most ``images`` test images, stratified by class."""
    test = source.known_test
    least = 2 * len(torch.unique(test.known_labels))
    if images < least:
        raise UserError(f"--images {images}: there must be 2 of each class, so {least} or more")
    if len(test) <= images:
        return test
    _, taken = stratified_split(test.labels, len(test), images / len(test), seed=0)
    return test.select(taken)


def _measure(
    trained: Run | Export, source: Source, chosen: Split, device: torch.device
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return normalised features (N, d), silhouettes (N,), and the accuracy of kNN in per cent."""
    from sklearn.metrics import silhouette_samples

    if isinstance(trained, Run):
        model = load_trained(trained, device).model
    else:  # an exported encoder has no projection
        model = Model(trained.build(device), torch.nn.Sequential(), None)
    config, size = trained.config, trained.config.data.image_size
    parts = [
        compute_features(model, batch_images(split.images, config, device), size).representation
        for split in (chosen, source.train)
    ]
    known, k = source.train.known_labels.to(device), min(NEIGHBOURS, len(source.train))
    accuracy = knn_accuracy(parts[0], chosen.known_labels, parts[1], known, k=k)
    features = torch.nn.functional.normalize(parts[0].double(), dim=1).cpu().numpy()
    widths = silhouette_samples(features, chosen.known_labels.numpy(), metric="cosine")
    return features, widths, accuracy


def _map_to_plane(features: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.manifold import TSNE  # a second to import

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    mapped = TSNE(random_state=seed, init="pca", perplexity=perplexity).fit_transform(features)
    return np.asarray(mapped, dtype=np.float32)


def _measure_clusters(features: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    number = len(np.unique(labels))
    found = KMeans(number, n_init=10, random_state=seed).fit_predict(features)
    return {
        "k-means NMI": float(normalized_mutual_info_score(labels, found)),
        "k-means ARI": float(adjusted_rand_score(labels, found)),
    }
