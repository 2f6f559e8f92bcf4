"""Labels for all images from labels for a few: the classifier, its accuracy, what to label next.

Four kinds of classifiers compete by cross-validation on the labelled images: nearest neighbours by
cosine, a linear classifier, the nearest class by the learned divergence ``D(image || class)``,
where a class is the empirical distribution of its labelled images, and the nearest class by the
divergence over a bank of all images. The accuracy of the best of several is too good to be true of
other images, so it is corrected by the bootstrap of Tsamardinos et al. (2018): choose on a
resample, judge on what the resample left out. Accuracy is counted twice, by images and as the mean
over the classes; the first one chooses, unless classes are to count the same.
"""

import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.data import FileImages, Progress, ResidentBatches, open_files
from deepbregman.data.folders import quote_some
from deepbregman.data.images import digest_content
from deepbregman.data.labels import GivenLabel, check_counts
from deepbregman.errors import UserError
from deepbregman.files import create_csv
from deepbregman.runs import Record
from deepbregman.statistics import wilson_interval
from deepbregman.terminal import ReportProgress, ignore_progress
from deepbregman.training.randomness import derive_seed

from .classes import FeatureBank, class_means, divergence_to
from .features import Features, compute_features
from .gallery import Gallery, OpenedRun, Pixels, join_features, open_gallery
from .knn import VOTE_TEMPERATURE, cosine_neighbours, select_features
from .linear import measure_scale

KINDS = ("knn", "linear", "divergence", "bank")
NEIGHBOURS = (1, 5, 20)
PENALTIES = (1e-1, 1e-2, 1e-3)
FOLDS = 10
MANY_LABELS = 500
"""With this number of labels or more, half the folds are enough."""
RESAMPLES = 1000
_ENTRIES = 2**24  # of a matrix of images and classes at a time


class Candidate(NamedTuple):
    """A kind of classifier with its setting: k of knn, the penalty of linear."""

    kind: str
    setting: float = 0.0
    weighted: bool = False
    """Whether every class counts the same in the loss of linear."""

    @property
    def title(self) -> str:
        """Its name for people."""
        if self.kind == "knn":
            return f"{self.setting:g} nearest by cosine"
        if self.kind == "linear":
            return f"linear, penalty {self.setting:g}" + ", weighted classes" * self.weighted
        over = " over a bank of images" if self.kind == "bank" else ""
        return f"nearest class by divergence{over}"

    def logits(
        self,
        train: Features,
        labels: Tensor,
        queries: Features,
        num_classes: int,
        smoothing: float,
        bank: FeatureBank,
    ) -> Tensor:
        """Learn from labelled features and return the logits (Q, C) of others, float64."""
        if self.kind == "bank":
            known, asked = train.representation, queries.representation
            return bank.class_logits(known, labels, asked, num_classes)
        if self.kind == "linear":
            return _linear_logits(train, labels, queries, self.setting, self.weighted)
        if self.kind == "divergence":
            scores, known = (select_features(part, "divergence") for part in (queries, train))
            return -divergence_to(scores, class_means(known, labels, num_classes), smoothing)
        found = cosine_neighbours(queries.representation, train.representation, int(self.setting))
        nearest = found.similarities[:, :1]
        weights = ((found.similarities - nearest) / VOTE_TEMPERATURE).exp().double()  # (Q, k)
        totals = weights.new_zeros(len(weights), num_classes)
        totals.scatter_add_(1, labels[found.indices], weights)
        return (totals + 1.0 / num_classes).log()  # one vote of weight 1 is shared by all classes


def _linear_logits(
    train: Features, labels: Tensor, queries: Features, l2: float, weighted: bool
) -> Tensor:
    """Fit as `fit_linear` does, not to the last digit: cross-validation fits dozens of times."""
    from sklearn.linear_model import LogisticRegression

    values = train.representation.cpu().double()
    mean, deviation = measure_scale(values, one_scale=True)
    weights = "balanced" if weighted else None
    fit = LogisticRegression(C=1.0 / (l2 * len(values)), max_iter=1000, class_weight=weights)
    with warnings.catch_warnings():  # with two labels of each class it suspects a regression
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        fit.fit(((values - mean) / deviation).numpy(), labels.cpu().numpy())
    design = (queries.representation.cpu().double() - mean) / deviation
    logits = torch.from_numpy(fit.decision_function(design.numpy()))
    return logits if logits.ndim == 2 else torch.stack([-logits / 2, logits / 2], dim=1)


class Judged(NamedTuple):
    """A classifier and how it did on labelled images that it had not learned from."""

    classifier: Candidate
    accuracy: float
    """In per cent."""
    balanced: float
    """Mean of the accuracies of the classes, in per cent."""
    log_loss: float
    """Mean, of the calibrated probabilities."""
    temperature: float
    """Divides the logits; chosen so that the probabilities are right."""


class ExpectedAccuracy(NamedTuple):
    """What to expect on other images, in per cent, with a 95 % interval."""

    value: float
    low: float
    high: float


class Prediction(NamedTuple):
    """Labels for all images."""

    probabilities: Tensor
    """(N, C) float64 on the CPU; those of labelled images are 0 and 1."""
    judged: list[Judged]
    """All classifiers that were tried, the chosen one first."""
    expected: ExpectedAccuracy
    expected_balanced: ExpectedAccuracy
    """The mean over the classes."""
    class_accuracies: tuple[float, ...]
    """Per cent of the labelled images of each class that the chosen one got right."""


def predict_labels(
    features: Features,
    labels: Tensor,
    *,
    num_classes: int,
    smoothing: float = 0.0,
    kinds: Sequence[str] = KINDS,
    balanced: bool = False,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> Prediction:
    """Predict the labels of images from those of a few among them.

    Args:
        labels: (N,) int64; -1 for an image without label. Each class has at least 2.
        kinds: which of ``KINDS`` may compete.
        balanced: Every class counts the same, in linear classifiers and in the choice.
    """
    labels = labels.to(features.representation.device)
    bank = FeatureBank.gather(features.representation)
    places = (labels >= 0).nonzero().flatten()
    known, targets = features.select(places), labels[places]
    folds = _draw_folds(targets.cpu(), seed)
    least = len(places) - max(int((folds == fold).sum()) for fold in set(folds.tolist()))
    possible = [kind for kind in kinds if kind != "divergence" or features.scores is not None]
    tried = _list_classifiers(possible, least, balanced)
    held_out = torch.empty(len(tried), len(places), num_classes, dtype=torch.float64)
    numbers = sorted(set(folds.tolist()))
    for done, fold in enumerate(numbers, start=1):
        here = (folds == fold).to(places.device)
        parts = known.select(~here), targets[~here], known.select(here)
        for index, classifier in enumerate(tried):
            logits = classifier.logits(*parts, num_classes, smoothing, bank)
            held_out[index, folds == fold] = logits.cpu()
        progress(done, len(numbers))
    truth = targets.cpu()
    temperatures = [fit_temperature(logits, truth) for logits in held_out]
    correct = torch.stack([logits.argmax(dim=1) == truth for logits in held_out])  # (M, n)
    losses = torch.stack(
        [
            functional.cross_entropy(logits / temperature, truth, reduction="none")
            for logits, temperature in zip(held_out, temperatures, strict=True)
        ]
    )
    sizes = torch.bincount(truth, minlength=num_classes).double()
    weights = len(truth) / (num_classes * sizes[truth])  # (n,), of the mean over the classes
    equal = torch.ones_like(weights)
    hits = correct.double()
    judged = [
        Judged(
            one,
            100.0 * right.mean().item(),
            100.0 * (weights * right).mean().item(),
            loss.mean().item(),
            temperature,
        )
        for one, right, loss, temperature in zip(tried, hits, losses, temperatures, strict=True)
    ]

    def rank(one: Judged) -> tuple[float, float]:
        return -(one.balanced if balanced else one.accuracy), one.log_loss

    chosen = min(range(len(judged)), key=lambda i: rank(judged[i]))
    shares = torch.zeros_like(sizes).scatter_add_(0, truth, hits[chosen]) / sizes
    judged.sort(key=rank)
    best = judged[0]
    logits = best.classifier.logits(known, targets, features, num_classes, smoothing, bank).cpu()
    probabilities = (logits / best.temperature).softmax(dim=1)
    probabilities[places.cpu()] = functional.one_hot(truth, num_classes).double()
    choosing = weights if balanced else equal
    return Prediction(
        probabilities,
        judged,
        _expect(correct, losses, choosing, equal, seed),
        _expect(correct, losses, choosing, weights, seed),
        tuple((100.0 * shares).tolist()),
    )


def _expect(
    correct: Tensor, losses: Tensor, choosing: Tensor, counted: Tensor, seed: int
) -> ExpectedAccuracy:
    share = expect_accuracy(correct, losses, seed, choosing=choosing, counted=counted)
    # As many equal weights would be as informative (Kish).
    size = float(counted.sum().square() / counted.square().sum())
    low, high = wilson_interval(share, size)
    return ExpectedAccuracy(100 * share, 100 * low, 100 * high)


def _draw_folds(labels: Tensor, seed: int) -> Tensor:
    """Return the fold (n,) of each labelled image; every class is spread evenly over the folds."""
    from sklearn.model_selection import StratifiedKFold

    most = int(torch.bincount(labels).max())
    wanted = FOLDS if len(labels) < MANY_LABELS else FOLDS // 2
    splitter = StratifiedKFold(min(wanted, most), shuffle=True, random_state=seed)
    folds = torch.empty_like(labels)
    with warnings.catch_warnings():  # a class with fewer images than folds is in fewer of them
        warnings.simplefilter("ignore", UserWarning)
        for fold, (_, held) in enumerate(splitter.split(labels, labels)):
            folds[torch.from_numpy(held)] = fold
    return folds


def _list_classifiers(kinds: Sequence[str], num_train: int, balanced: bool) -> list[Candidate]:
    settings: dict[str, Sequence[float]] = {
        "knn": [k for k in NEIGHBOURS if k <= num_train],
        "linear": PENALTIES,
        "divergence": (0.0,),
        "bank": (0.0,),
    }
    return [
        Candidate(kind, setting, weighted=balanced and kind == "linear")
        for kind in kinds
        for setting in settings[kind]
    ]


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature that makes probabilities of held-out logits (n, C) right.

    It minimises the cross-entropy. As Platt (1999) does, the target of the true class is a little
    below 1, ``(n + 1) / (n + 2)``: n images that are all right make no answer certain.
    """
    from scipy.optimize import minimize_scalar

    n, num_classes = logits.shape
    targets = torch.full_like(logits, 1.0 / ((n + 2) * (num_classes - 1)))
    targets.scatter_(1, labels[:, None], (n + 1) / (n + 2))
    scale = max(float(logits.std()), 1e-12)  # divergences may be small throughout

    def loss(log_temperature: float) -> float:
        scaled = logits / (scale * math.exp(log_temperature))
        return functional.cross_entropy(scaled, targets).item()

    found = minimize_scalar(loss, bounds=(-8.0, 8.0), method="bounded")
    return scale * math.exp(float(found.x))


def expect_accuracy(
    correct: Tensor,
    losses: Tensor,
    seed: int = 0,
    *,
    choosing: Tensor | None = None,
    counted: Tensor | None = None,
) -> float:
    """Estimate the accuracy, from 0 to 1, of the best of several classifiers on other images.

    Args:
        correct: (M, n) bool, whether each of M classifiers was right on each held-out image.
        losses: (M, n), which decide among classifiers that are equally often right.
        choosing: (n,), weights of the images in the accuracy that chooses; equal ones by default.
        counted: (n,), weights of the images in the accuracy that is estimated.
    """
    num_images = correct.shape[1]
    equal = torch.ones(num_images).double()
    choosing, counted = (equal if w is None else w for w in (choosing, counted))
    random = np.random.default_rng(seed)
    drawn = random.multinomial(num_images, [1.0 / num_images] * num_images, size=RESAMPLES)
    counts = torch.from_numpy(drawn).double()  # (R, n)
    right = correct.double()
    inside = counts @ (choosing * right).T  # (R, M)
    ties = counts @ losses.double().T
    least = 0.5 * float(choosing.min())  # below what one image counts
    inside -= least * (ties - ties.min()) / (ties.max() - ties.min()).clamp_min(1e-12)
    outside = (counts == 0).double() * counted
    judged = (outside @ right.T).gather(1, inside.argmax(dim=1, keepdim=True))[:, 0]
    estimate = float(judged.sum() / outside.sum().clamp_min(1e-12))
    return min(estimate, float((right @ counted).max() / counted.sum()))


def suggest_images(
    representation: Tensor, probabilities: Tensor, labelled: Tensor, count: int
) -> list[int]:
    """List the images whose labels would teach most, the most useful first.

    One after the other, it takes the image with the largest product of its uncertainty, one minus
    the gap between the two most probable classes, and its distance by cosine from the nearest image
    that is labelled or listed already. So near-duplicates are not listed twice.

    Args:
        representation: (N, d), of which ``labelled`` (N,) are left out.
        probabilities: (N, C).
    """
    first, second = probabilities.topk(2, dim=1).values.T
    uncertainty = (1.0 - (first - second)).to(representation.device).float()
    labelled = labelled.to(representation.device)
    uncertainty[labelled] = -1.0  # never listed
    points = functional.normalize(representation.float(), dim=1)
    nearest = torch.full_like(uncertainty, -1.0)
    for part in torch.split(points[labelled], max(1, _ENTRIES // len(points))):
        nearest = nearest.maximum((points @ part.T).amax(dim=1))
    chosen: list[int] = []
    for _ in range(min(count, int((~labelled).sum()))):
        value = uncertainty * (1.0 - nearest).clamp_min(1e-6)
        place = int(value.argmax())
        chosen.append(place)
        uncertainty[place] = -1.0
        nearest = nearest.maximum(points @ points[place])
    return chosen


def draw_images(
    opened: OpenedRun, count: int, seed: int, *, with_pixels: bool
) -> dict[str, Pixels | None]:
    """Draw images at random, in the order of the data: their names, and pixels if asked for."""
    gallery = open_gallery(opened, "all")
    names = gallery.names
    generator = torch.Generator().manual_seed(derive_seed(seed, "images to label"))
    drawn = torch.randperm(len(names), generator=generator)[:count].sort().values.tolist()
    pixels = gallery.pictures(drawn) if with_pixels else {}
    return {names[index]: pixels.get(index) for index in drawn}


class Suggestion(NamedTuple):
    """An image whose label would teach much."""

    name: str
    guess: str
    probability: float
    """Probability of the guess."""
    pixels: Pixels | None
    """(H, W, 3), where they were asked for."""


@dataclass(frozen=True, eq=False)
class Labelling:
    """Labels for all images of a dataset."""

    names: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: Tensor
    """(N, C) float64 on the CPU."""
    given: Tensor
    """(N,) bool: labelled by the user."""
    judged: list[Judged]
    """The classifiers that were tried, the chosen one first."""
    expected: ExpectedAccuracy
    expected_balanced: ExpectedAccuracy
    """The mean over the classes."""
    class_accuracies: tuple[float | None, ...]
    """Of the labelled images of each class, the share that the chosen classifier, which had not
    learned from them, got right; in per cent. None of a class with one label, which is left out."""
    suggestions: list[Suggestion]
    class_sizes: tuple[int, ...]
    """Labelled images of each class, those from outside the data among them."""
    is_balanced: bool
    """Whether every class counted the same."""
    run: Path
    measured: tuple[float, int] | None = None
    """Accuracy in per cent, and of how many images, where the data have labels of their own."""
    table: Path | None = None
    sheet: Path | None = None

    @property
    def num_examples(self) -> int:
        """Labelled images that were learned from, those from outside the data among them."""
        return sum(size for size in self.class_sizes if size > 1)

    @property
    def labels(self) -> list[str]:
        """The label of each image, given or predicted."""
        return [self.classes[index] for index in self.probabilities.argmax(dim=1).tolist()]


def label_images(
    opened: OpenedRun,
    given: Sequence[GivenLabel],
    *,
    kinds: Sequence[str],
    balanced: bool,
    suggest: int,
    with_pixels: bool,
    out: Path | None,
    seed: int,
    progress: ReportProgress = ignore_progress,
) -> Labelling:
    """Label all images of a run's data from labels for a few; see :func:`deepbregman.label`."""
    allowed = opened.choose_measures(kinds, KINDS)
    gallery = open_gallery(opened, "all", progress)
    names = gallery.names
    known, extra = match_images(given, gallery)
    every = [*known.values(), *extra.values()]
    check_counts(every, "labels")
    classes = tuple(sorted(set(every)))
    # What a class with one label teaches cannot be judged, so that class is left out.
    taught = [place for place, name in enumerate(classes) if every.count(name) > 1]
    if len(known) == len(names):
        raise UserError(f"all {len(names)} images of {opened.data!r} have labels: none is left")
    labels = torch.full((len(names) + len(extra),), -1)
    for index, label in known.items():
        labels[index] = classes.index(label)
    labels[len(names) :] = torch.tensor([classes.index(label) for label in extra.values()])
    features = gallery.features
    if extra:
        loaded, size = opened.loaded, opened.loaded.config.data.image_size
        images = ResidentBatches(open_files(list(extra), image_size=size), loaded.device)
        more = compute_features(loaded.model, images, size).require_finite()
        features = join_features([features, more])
    ranks = torch.full((len(classes) + 1,), -1)  # the last one is of no label
    ranks[taught] = torch.arange(len(taught))
    found = predict_labels(
        features,
        ranks[labels],
        num_classes=len(taught),
        smoothing=opened.loaded.config.divergence.smoothing,
        kinds=allowed,
        balanced=balanced,
        seed=seed,
        progress=partial(progress, "cross-validation"),
    )
    probabilities = found.probabilities.new_zeros(len(labels), len(classes))
    probabilities[:, taught] = found.probabilities
    is_given = labels >= 0
    probabilities[is_given] = functional.one_hot(labels[is_given], len(classes)).double()
    chosen = suggest_images(features.representation, probabilities, is_given, suggest)
    probabilities, is_given = probabilities[: len(names)], is_given[: len(names)]
    shares = dict(zip(taught, found.class_accuracies, strict=True))
    pixels = gallery.pictures(chosen) if with_pixels else {}
    best, guesses = probabilities.max(dim=1)
    suggestions = [
        Suggestion(names[i], classes[int(guesses[i])], float(best[i]), pixels.get(i))
        for i in chosen
    ]
    labelling = Labelling(
        names,
        classes,
        probabilities,
        is_given,
        found.judged,
        found.expected,
        found.expected_balanced,
        tuple(shares.get(place) for place in range(len(classes))),
        suggestions,
        tuple(torch.bincount(labels[labels >= 0], minlength=len(classes)).tolist()),
        balanced,
        opened.loaded.run.path,
        _measure(opened, gallery, classes, guesses, is_given),
        out,
    )
    if out is not None:
        write_labels(out, labelling, chosen)
    return labelling


def _measure(
    opened: OpenedRun, gallery: Gallery, classes: Sequence[str], guesses: Tensor, given: Tensor
) -> tuple[float, int] | None:
    """Compare predictions with the data's own labels, where they have the same classes."""
    if gallery.labels is None:
        return None
    truth = [opened.class_name(label) for label in gallery.labels.tolist()]
    judged = [i for i, known in enumerate(given.tolist()) if not known]
    if not set(classes) <= set(truth):
        return None
    right = sum(classes[int(guesses[i])] == truth[i] for i in judged)
    return 100.0 * right / len(judged), len(judged)


def match_images(
    given: Sequence[GivenLabel], gallery: Gallery
) -> tuple[dict[int, str], dict[Path, str]]:
    """Find the images that labels are given to.

    A name is that of the gallery, a path, or the last part of a path if it is unique. A file of a
    class folder is the image with the same bytes, or an example of its own.

    Returns:
        The label by position in the gallery, and the label by path of files from elsewhere.
    """
    finder = _Finder(gallery)
    labels: dict[int, str] = {}
    extra: dict[Path, str] = {}
    unknown = []
    for image, label, is_file in given:
        index = finder.find_copy(Path(image)) if is_file else finder.find(image)
        if index is None and is_file:
            extra[Path(image)] = label
        elif index is None:
            unknown.append(image)
        elif labels.setdefault(index, label) != label:
            raise UserError(
                f"labels: {gallery.names[index]!r} is {labels[index]!r} and {label!r}; give each "
                "image one label"
            )
    if unknown:
        raise UserError(
            f"labels: {len(unknown)} of {len(given)} names are no image of the data "
            f"({quote_some(unknown)}); names are relative to the data's folder, such as "
            f"{gallery.names[0]!r}"
        )
    return labels, extra


class _Finder:
    def __init__(self, gallery: Gallery) -> None:
        self._names = {name: index for index, name in enumerate(gallery.names)}
        last = [name.rpartition("/")[2] for name in gallery.names]
        counts = Counter(last)
        self._last = {name: index for index, name in enumerate(last) if counts[name] == 1}
        self._paths: dict[str, int] = {}
        self._sizes: dict[int, list[tuple[Path, int]]] = {}
        start = 0
        for part in gallery.parts.values():
            images = part.split.images
            if isinstance(images, FileImages) and isinstance(images.paths, tuple):
                for index, path in enumerate(images.paths, start=start):
                    self._paths[os.path.abspath(path)] = index
            start += len(part.split)

    def find(self, name: str) -> int | None:
        for word in (name, name.removeprefix("'")):  # as csv_text protects it
            if word in self._names:
                return self._names[word]
            if (path := os.path.abspath(word)) in self._paths:
                return self._paths[path]
            if word in self._last:
                return self._last[word]
        return None

    def find_copy(self, path: Path) -> int | None:
        if (place := os.path.abspath(path)) in self._paths:
            return self._paths[place]
        if not self._sizes:
            for other, index in self._paths.items():
                size = os.stat(other).st_size
                self._sizes.setdefault(size, []).append((Path(other), index))
        same = self._sizes.get(path.stat().st_size, [])
        if not same:
            return None
        content = digest_content(path)
        return next((index for other, index in same if digest_content(other) == content), None)


def write_labels(path: Path, found: Labelling, suggested: Sequence[int]) -> None:
    """Write a line for each image, so that `read_labels` can take the file again."""
    ranks: Mapping[int, int] = {index: rank for rank, index in enumerate(suggested, start=1)}
    rows: list[Record] = []
    values = found.probabilities.tolist()
    for index, (name, label) in enumerate(zip(found.names, found.labels, strict=True)):
        row: Record = {
            "image": name,
            "label": label,
            "probability": f"{max(values[index]):.4f}",
            "given": "yes" if found.given[index] else "no",
            "label next": ranks.get(index, ""),
        }
        for kind, value in zip(found.classes, values[index], strict=True):
            row[f"probability of {kind}"] = f"{value:.4f}"
        rows.append(row)
    create_csv(path, rows)
