"""Linear classification of frozen features, and the protocol ``linear``.

On cached features it is a convex problem, solved to the optimum: the mean cross-entropy plus
``l2 / 2 * ||weight||^2`` on standardised features, the bias free. That is scikit-learn's
LogisticRegression with ``C = 1 / (l2 * n)``, for 3 classes or more; with ``weighted``, that with
``class_weight="balanced"``. On features of random crops, which change every epoch, it is SGD.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepbregman.data import stratified_split
from deepbregman.errors import UserError
from deepbregman.runs import Record
from deepbregman.terminal import ReportProgress, ignore_progress
from deepbregman.training.randomness import derive_seed, epoch_order

from .features import BATCH_SIZE, LabelledFeatures, build_crop_and_flip
from .frozen import keep_frozen
from .inputs import Evaluation
from .results import Measurement, balanced_accuracy, make_rows, pack, top_k_accuracy

CHOICE_SHARE = 0.1
"""Share of the training images that is held out to choose settings."""
EPOCHS = 50
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3)
WEIGHT_DECAYS = (1e-3, 1e-4, 1e-5)
MOMENTUM = 0.9
MAX_ITERATIONS = 100
"""Newton's steps; far fewer are enough where the penalty is not tiny."""
L2_GRID = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PATIENCE = 2
"""Penalties in a row that are worse than the best, after which weaker ones are not tried."""
WEIGHTED = "weighted classes"
"""Names the variant in which every class counts the same."""
# Up to here (1 GiB) float64 is affordable, and only float64 reaches the optimum when l2 is small.
FLOAT64_ELEMENTS = 2**27
_ONE_THREAD_ELEMENTS = 2**18
_PRODUCTS_AT_ONCE, _MOST_PRODUCTS = 4, 1000
# Building and factoring the matrix of U unknowns takes at most as long as U / 4 products.
_UNKNOWNS_PER_PRODUCT, _MOST_UNKNOWNS = 4, 2048
_COARSE = 0.1  # relative accuracy of a step far from the optimum
_HALVINGS = 20
_ROWS_AT_ONCE = 2**16


class LinearClassifier(NamedTuple):
    """An affine map of standardised features."""

    weight: Tensor  # (C, d); zero for a class that the training labels lack
    bias: Tensor  # (C,); minus infinity for a class that the training labels lack
    mean: Tensor  # (d,), of the training features
    deviation: Tensor  # (d,), of the training features; 1 for a constant one

    def predict(self, features: Tensor) -> Tensor:
        """Return the logits (n, C) of features (n, d)."""
        standardised = (features.to(self.weight) - self.mean) / self.deviation
        return standardised @ self.weight.T + self.bias


def measure_scale(features: Tensor, one_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation, (d,) each, of features (n, d).

    The deviation of a constant feature is 1. With ``one_scale`` all have the same deviation.
    """
    mean, deviation = features.mean(dim=0), features.std(dim=0, correction=0)
    if one_scale:
        deviation = deviation.square().mean().sqrt().expand_as(deviation)
    # Constant up to the rounding of the float32 in which features are cached.
    constant = deviation <= torch.finfo(torch.float32).eps * mean.abs()
    return mean, deviation.masked_fill(constant, 1.0)


def fit_linear(
    features: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    l2: float = 1e-3,
    start: LinearClassifier | None = None,
    one_scale: bool = False,
    weighted: bool = False,
) -> LinearClassifier:
    """Fit multinomial logistic regression by Newton's method, in float64 where affordable.

    A fit that ends before the optimum gives a RuntimeWarning.

    Args:
        l2: Strength of the penalty on the weights; positive, which makes the optimum unique.
        start: Where to start, to save iterations; the optimum does not depend on it.
        one_scale: Divide all features by one deviation, so that a handful of rows cannot blow up
            the features that happen to be nearly constant among them.
        weighted: Every class counts the same in the mean cross-entropy, however many rows it has.
    """
    with torch.inference_mode(False), torch.no_grad():
        present, targets = torch.unique(labels.to(features.device).long(), return_inverse=True)
        wide = features.numel() <= FLOAT64_ELEMENTS
        values = features.detach().to(torch.float64 if wide else torch.float32, copy=True)
        mean, deviation = measure_scale(values, one_scale)
        design = values.sub_(mean).div_(deviation)  # (n, d)
        # The bias of an absent class would go to minus infinity: solve without it, then set that.
        weight, bias = design.new_zeros(len(present), design.shape[1]), mean.new_zeros(len(present))
        if start is not None:
            weight = start.weight[present].to(design)  # more rows may be fitted in float32
            bias = start.bias[present].to(design).nan_to_num(neginf=0.0)
        counts = torch.bincount(targets)
        shares = len(targets) / (len(counts) * counts.to(design)) if weighted else None
        weight, bias = minimise(design, targets, weight, bias, l2, shares)
        all_weight = weight.new_zeros(num_classes, weight.shape[1])
        all_bias = bias.new_full((num_classes,), -math.inf)
        all_weight[present], all_bias[present] = weight, bias
        return LinearClassifier(all_weight, all_bias, mean, deviation)


def choose_l2(
    features: Tensor,
    labels: Tensor,
    held_out: Tensor,
    *,
    num_classes: int,
    grid: Sequence[float] | None = None,
    weighted: bool = False,
) -> tuple[float, dict[float, float]]:
    """Choose the penalty by the accuracy on a part held out of the training set.

    Penalties are tried from the strongest to the weakest, each fit starting where the last ended,
    until ``PATIENCE`` in a row are worse than the best: too weak a penalty overfits, a weaker one
    overfits more, and the weakest take most of the time.

    Args:
        held_out: (m,), indices of the held-out part; the fits see the other n - m rows only.
        weighted: every class counts the same, in the fits and in the accuracy that chooses.

    Returns:
        The best penalty (the strongest among equals), and the held-out accuracies by penalty.
    """
    held_out, labels = held_out.to(features.device), labels.to(features.device)
    kept = torch.ones(len(features), dtype=torch.bool, device=features.device)
    kept[held_out] = False
    validation: dict[float, float] = {}
    fit: LinearClassifier | None = None
    rows = features[kept], labels[kept]  # once: of ImageNet they are 9 GB
    best, num_worse = -math.inf, 0
    for l2 in sorted(grid or L2_GRID, reverse=True):
        fit = fit_linear(*rows, num_classes=num_classes, l2=l2, start=fit, weighted=weighted)
        logits, truth = fit.predict(features[held_out]), labels[held_out]
        if weighted:
            accuracy = balanced_accuracy(logits.argmax(dim=1), truth)
        else:
            accuracy = top_k_accuracy(logits, truth)
        validation[l2] = accuracy
        best, num_worse = max(best, accuracy), num_worse + 1 if accuracy < best else 0
        if num_worse == PATIENCE:
            break
    # max keeps the first of equals, and the strongest comes first.
    return max(validation, key=lambda l2: validation[l2]), validation


def fit_best(
    features: Tensor, labels: Tensor, num_classes: int, seed: int, *, weighted: bool = False
) -> tuple[LinearClassifier, float]:
    """Fit to all rows with the penalty that is best on a held-out part; return both."""
    held_out = hold_out(labels, seed)
    l2, _ = choose_l2(features, labels, held_out, num_classes=num_classes, weighted=weighted)
    return fit_linear(features, labels, num_classes=num_classes, l2=l2, weighted=weighted), l2


def hold_out(labels: Tensor, seed: int) -> Tensor:
    """Return the indices (m,) of the part that is held out to choose settings."""
    _, held_out = stratified_split(labels.cpu(), len(labels), CHOICE_SHARE, seed)
    return held_out.to(labels.device)


def minimise(
    design: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor,
    l2: float,
    class_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return weight and bias at the optimum of mean cross-entropy plus ``l2 / 2 * ||weight||^2``.

    It is Newton's method with a line search. Its linear systems are solved by conjugate gradients
    with a preconditioner, and small ones by a Cholesky factor where that is cheaper. A GPU waits
    for the host a few times a step.

    Args:
        design: (n, d), standardised features.
        targets: (n,), classes from 0 to C - 1, each of them present.
        weight: (C, d), the start.
        bias: (C,), the start.
        class_weights: (C,), of the classes in the mean cross-entropy; equal ones when None.
    """
    # The distance to the optimum is at most the gradient's norm over l2.
    tolerance = min(1e-7, 1e-3 * l2) if design.dtype == torch.float64 else 1e-5
    with _limit_threads(design):
        basis = None
        if len(design) < design.shape[1]:
            # The optimum is in the span of the rows: n coordinates are enough.
            basis, factor = torch.linalg.qr(design.T)  # (d, n), (n, n)
            design, weight = factor.T, weight @ basis
        objective = _Objective(design, targets, l2, class_weights)
        point = objective.evaluate(torch.cat([weight, bias[:, None]], dim=1))
        first = norm = point.gradient_norm()
        preconditioner = None
        for _ in range(MAX_ITERATIONS):
            if norm <= tolerance:
                break
            # Far from the optimum an exact step would be wasted, and the curvature still changes.
            accuracy = min(_COARSE, max(math.sqrt(norm / first), tolerance / norm / 2))
            if preconditioner is None or accuracy == _COARSE:
                preconditioner = objective.compute_preconditioner(point)
            step = _solve(objective, point, preconditioner, accuracy)
            moved = _line_search(objective, point, step)
            if moved is None or (moved.gradient_norm() >= norm and moved.value >= point.value):
                break  # rounding prevents further progress
            point, norm = moved, moved.gradient_norm()
        weight, bias = point.at[:, :-1], point.at[:, -1]
        if basis is not None:
            weight = weight @ basis.T
    if not norm <= 100 * tolerance:
        message = (
            f"the fit stopped at a gradient of norm {norm:.1e}, above {100 * tolerance:.0e}, after "
            f"at most {MAX_ITERATIONS} iterations: its accuracy is not that of the optimum; "
            "it is reached sooner with a larger l2"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return weight, bias


class _Point(NamedTuple):
    """A classifier, with the value and the gradient of the objective."""

    at: Tensor  # (C, d + 1), weights and biases
    value: Tensor  # ()
    gradient: Tensor  # (C, d + 1)
    probabilities: Tensor  # (n, C)

    def gradient_norm(self) -> float:
        """Return the largest norm of a class's gradient; the host waits for the device."""
        return float(self.gradient.norm(dim=1).max())


class _Objective:
    """The mean cross-entropy of an affine map of the rows, plus the penalty on its weights."""

    def __init__(
        self, design: Tensor, targets: Tensor, l2: float, class_weights: Tensor | None
    ) -> None:
        self.design, self.targets, self.l2 = design, targets[:, None], l2
        shares = design.new_ones(len(design)) if class_weights is None else class_weights[targets]
        self.shares = (shares / shares.sum())[:, None]  # (n, 1), of the rows in the mean

    def evaluate(self, at: Tensor) -> _Point:
        """Compute value and gradient at a classifier (C, d + 1)."""
        weight = at[:, :-1]
        logs = (self.design @ weight.T + at[:, -1]).log_softmax(dim=1)  # (n, C)
        value = -(self.shares * logs.gather(1, self.targets)).sum()
        value = value + self.l2 / 2 * weight.square().sum()
        probabilities = logs.exp_()
        residuals = (probabilities * self.shares).scatter_add_(1, self.targets, -self.shares)
        gradient = torch.cat([residuals.T @ self.design, residuals.sum(dim=0)[:, None]], dim=1)
        gradient[:, :-1] += self.l2 * weight
        return _Point(at, value, gradient, probabilities)

    def multiply_hessian(self, point: _Point, along: Tensor) -> Tensor:
        """Multiply a direction (C, d + 1) by the Hessian."""
        product = self.l2 * along
        # Adding one number to all biases changes nothing; this keeps it out of the solution.
        product[:, -1] = along[:, -1].mean()
        for rows, p, share in self._split(point):
            logits = torch.addmm(along[:, -1], rows, along[:, :-1].T)
            logits = (logits - (p * logits).sum(dim=1, keepdim=True)) * p * share
            product[:, :-1] += logits.T @ rows
            product[:, -1] += logits.sum(dim=0)
        return product

    def compute_hessian(self, point: _Point) -> Tensor:
        """Return the matrix (C (d + 1), C (d + 1)) of :meth:`multiply_hessian`."""
        num_classes, width = point.at.shape
        hessian = point.at.new_zeros(num_classes, width, num_classes, width)
        hessian[:, -1, :, -1] = 1 / num_classes
        for rows, p, share in self._split(point):
            rows = torch.cat([rows, torch.ones_like(share)], dim=1)
            for i in range(num_classes):
                for j in range(i + 1):
                    importance = p[:, i] * (float(i == j) - p[:, j]) * share[:, 0]  # (n,)
                    block = rows.T @ (rows * importance[:, None])
                    hessian[i, :, j] += block
                    if i != j:
                        hessian[j, :, i] += block
        diagonal = hessian.view(point.at.numel(), -1).diagonal().view(num_classes, width)
        diagonal[:, :-1] += self.l2
        return hessian.view(point.at.numel(), -1)

    def compute_preconditioner(self, point: _Point) -> Tensor:
        """Return a preconditioner (d + 1, d + 1) that all classes share.

        It is the inverse of a Cholesky factor of the covariance of the rows, each weighted by its
        mean p (1 - p), plus l2.
        """
        design, width = self.design, self.design.shape[1]
        curvature = design.new_zeros(width + 1, width + 1)
        for rows, p, share in self._split(point):
            importance = (p * (1 - p)).mean(dim=1, keepdim=True) * share  # (n, 1)
            weighted = rows * importance
            curvature[:-1, :-1] += rows.T @ weighted
            curvature[-1, :-1] += weighted.sum(dim=0)
            curvature[-1, -1] += importance.sum()
        curvature[:-1, -1] = curvature[-1, :-1]
        curvature.diagonal()[:-1] += self.l2
        # Any factor gives the same optimum; the rounding of collinear features must not make it
        # fail.
        rounding = 10 * torch.finfo(design.dtype).eps * curvature.diagonal().sum()
        curvature.diagonal().add_(rounding)
        identity = torch.eye(width + 1, dtype=design.dtype, device=design.device)
        factor = torch.linalg.cholesky(curvature)
        inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
        return inverse

    def _split(self, point: _Point) -> Iterator[tuple[Tensor, ...]]:
        """Return rows, probabilities and shares a part at a time: of ImageNet all take 15 GB."""
        parts = (self.design, point.probabilities, self.shares)
        return zip(*(torch.split(part, _ROWS_AT_ONCE) for part in parts), strict=True)


def _solve(objective: _Objective, point: _Point, inverse: Tensor, accuracy: float) -> Tensor:
    """Return Newton's step (C, d + 1), up to a relative accuracy, by conjugate gradients.

    Where a small penalty makes them slow, a small system is solved by a factor of its matrix.
    """
    most, unknowns = _MOST_PRODUCTS, point.at.numel()
    is_small = unknowns <= _MOST_UNKNOWNS and point.at.dtype == torch.float64
    if is_small:
        most = min(most, unknowns // _UNKNOWNS_PER_PRODUCT + _PRODUCTS_AT_ONCE)
    step, residual = torch.zeros_like(point.at), -point.gradient
    along = scaled = residual @ inverse.T @ inverse
    size = first = (residual * scaled).sum()
    tiny, noise = torch.finfo(size.dtype).tiny, torch.finfo(size.dtype).eps ** 2 * first
    for number in range(1, most + 1):
        product = objective.multiply_hessian(point, along)
        length = size / (along * product).sum().clamp_min(tiny) * (size > noise)
        step, residual = step + length * along, residual - length * product
        scaled = residual @ inverse.T @ inverse
        before, size = size, (residual * scaled).sum()
        # The comparison makes the host wait for a GPU, so it is rare.
        if number % _PRODUCTS_AT_ONCE == 0 and size <= accuracy**2 * first:
            break
        along = scaled + size / before.clamp_min(tiny) * along
    else:
        if is_small:
            factor, failed = torch.linalg.cholesky_ex(objective.compute_hessian(point))
            if not failed:  # rounding may make it singular
                return torch.cholesky_solve(-point.gradient.view(-1, 1), factor).view_as(step)
    return step


def _line_search(objective: _Objective, point: _Point, step: Tensor) -> _Point | None:
    """Take a step, halved until it lowers the objective; None if it never does."""
    promised = (point.gradient * step).sum()
    rounding = 10 * torch.finfo(step.dtype).eps * point.value.abs()
    for halvings in range(_HALVINGS):
        length = 0.5**halvings
        there = objective.evaluate(point.at + length * step)
        if there.value <= point.value + 1e-4 * length * promised + rounding:
            return there
    return None


@contextmanager
def _limit_threads(design: Tensor) -> Iterator[None]:
    """Solve a small problem with one thread; on a busy machine several threads block each other."""
    before = torch.get_num_threads()
    if design.numel() <= _ONE_THREAD_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SgdSetting(NamedTuple):
    """The settings of one classifier."""

    learning_rate: float
    """Rate of the first epoch; it falls along a cosine to 0."""
    weight_decay: float
    """On the weights, not on the bias."""
    kept_only: bool = False
    """Learn from the kept rows only, so that the others can choose the setting."""


SgdRows = tuple[Tensor, Tensor, Tensor]
"""Features (b, d), labels (b,), and which rows are kept (b,), bool."""


def fit_linear_sgd(
    batches: Callable[[int], Iterable[SgdRows]],
    settings: Sequence[SgdSetting],
    *,
    num_classes: int,
    epochs: int,
    seed: int,
    mean: Tensor,
    deviation: Tensor,
) -> list[LinearClassifier]:
    """Fit one classifier for each setting, all on the same features in one pass over them.

    Features of augmented images cost a pass through the encoder, classifiers next to nothing. A
    classifier that diverges does not affect the others. The host never waits in an epoch.

    Args:
        batches: Maps an epoch to its rows, of augmented images.
        mean: (d,), subtracted from the features; its device is trained on.
        deviation: (d,), divides the features; nowhere zero.
    """
    # Drawn on the host, so that every device starts from the same weights.
    initial = torch.randn(num_classes, len(mean), generator=torch.Generator().manual_seed(seed))
    device = mean.device
    with torch.inference_mode(False):
        mean, deviation = mean.float().clone(), deviation.float().clone()
        weights = [(0.01 * initial).to(device).requires_grad_() for _ in settings]
        biases = [torch.zeros(num_classes, device=device).requires_grad_() for _ in settings]
    groups: list[dict[str, Any]] = []
    for weight, bias, setting in zip(weights, biases, settings, strict=True):
        rate, decay = setting.learning_rate, setting.weight_decay
        groups.append({"params": [weight], "lr": rate, "weight_decay": decay})
        groups.append({"params": [bias], "lr": rate})
    optimiser = torch.optim.SGD(groups, momentum=MOMENTUM)
    first_rates = [group["lr"] for group in optimiser.param_groups]
    for epoch in range(epochs):
        for group, rate in zip(optimiser.param_groups, first_rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
        for features, labels, kept in batches(epoch):
            # A generator that yields inside no_grad or inference_mode would switch ours off too.
            with torch.inference_mode(False), torch.enable_grad():
                inputs = (features.detach().to(mean) - mean) / deviation  # (b, d)
                targets = labels.to(device, torch.long, copy=True)
                share = kept.to(device, torch.float32, copy=True)  # (b,)
                total = torch.zeros((), device=device)
                for weight, bias, setting in zip(weights, biases, settings, strict=True):
                    losses = functional.cross_entropy(
                        functional.linear(inputs, weight, bias), targets, reduction="none"
                    )
                    few = (losses * share).sum() / share.sum().clamp_min(1.0)
                    total = total + (few if setting.kept_only else losses.mean())
                optimiser.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
                optimiser.step()
    pairs = zip(weights, biases, strict=True)
    return [LinearClassifier(w.detach(), b.detach(), mean, deviation) for w, b in pairs]


def check_linear(evaluation: Evaluation) -> None:
    """Refuse data too small to hold out a part for the choice of a penalty."""
    labels = evaluation.labelled.source.train.known_labels
    if len(hold_out(labels, evaluation.options.seed)) == 0:
        raise UserError(
            "the settings of a linear classifier are chosen on held-out training images, and data "
            f"{evaluation.data!r} has {len(labels)} images, no two of a class: give 2 or more of "
            "some class, or use --protocol knn"
        )


def linear(evaluation: Evaluation) -> list[Record]:
    """Train a linear classifier on frozen features: cached, and of random crops and flips.

    Where accuracy is balanced over the classes, another classifier is made for that: every class
    counts the same in its loss and in the choice of its penalty.
    """
    labelled, options = evaluation.labelled, evaluation.options
    seeds, epochs = options.each_seed, EPOCHS if options.epochs is None else options.epochs
    rows = make_rows([[measure_on_cached(labelled, seed)] for seed in seeds])
    if labelled.balanced:
        rows += make_rows([[measure_on_cached(labelled, seed, weighted=True)] for seed in seeds])
    if epochs:
        rows += make_rows(
            [[measure_on_crops(labelled, seed, epochs, evaluation.progress)] for seed in seeds]
        )
    return rows


def measure_on_cached(
    labelled: LabelledFeatures, seed: int, name: str = "cached features", *, weighted: bool = False
) -> Measurement:
    """Fit to features of whole images; the seed chooses the held-out images."""
    train, test = labelled.train, labelled.test.features.representation
    known = (train.features.representation, train.labels, labelled.num_classes)
    classifier, l2 = fit_best(*known, seed, weighted=weighted)
    details: Record = {"l2_grid": list(L2_GRID)}
    if weighted:
        name, details = f"{name}, {WEIGHTED}", {**details, "chosen_by": "balanced"}
    return _measure(labelled, classifier.predict(test), name, details, {"l2": l2})


def measure_on_crops(
    labelled: LabelledFeatures, seed: int, epochs: int, progress: ReportProgress = ignore_progress
) -> Measurement:
    """Train a classifier by SGD on features of random crops and flips of the training images.

    Every pair of learning rate and weight decay is tried at once, in one pass over the views. Each
    is trained twice, without the held-out tenth and with it: the first of the two chooses the pair,
    the second is tested. The seed is of the held-out part, the order, the crops and the weights.
    """
    train, device = labelled.train, labelled.device
    views, encoder = build_crop_and_flip(labelled.config), labelled.model.encoder
    mean, deviation = measure_scale(train.features.representation)
    held_out = hold_out(train.labels, seed)
    kept = torch.ones(len(train.labels), dtype=torch.bool, device=device)
    kept[held_out] = False

    def epoch_features(epoch: int) -> Iterable[SgdRows]:
        order = epoch_order(len(train.labels), seed, epoch)
        generator = torch.Generator(device).manual_seed(derive_seed(seed, "linear", epoch))
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
        progress(f"linear: crop and flip, seed {seed}", epoch + 1, epochs)

    pairs = [(rate, decay) for decay in WEIGHT_DECAYS for rate in LEARNING_RATES]
    settings = [SgdSetting(*pair, kept_only) for kept_only in (True, False) for pair in pairs]
    with keep_frozen(labelled.model), torch.enable_grad():
        classifiers = fit_linear_sgd(
            epoch_features,
            settings,
            num_classes=labelled.num_classes,
            epochs=epochs,
            seed=seed,
            mean=mean,
            deviation=deviation,
        )
    features, labels = train.features.representation[held_out], train.labels[held_out]
    # A diverged classifier scores 0.
    scores = [
        top_k_accuracy(logits, labels) if logits.isfinite().all() else 0.0
        for logits in (classifier.predict(features) for classifier in classifiers[: len(pairs)])
    ]
    best = max(range(len(pairs)), key=scores.__getitem__)  # the first of equals
    rate, decay = pairs[best]
    details = {
        "epochs": epochs,
        "batch_size": BATCH_SIZE,
        "learning_rates": list(LEARNING_RATES),
        "weight_decays": list(WEIGHT_DECAYS),
    }
    chosen = {"learning_rate": rate, "weight_decay": decay, "held_out": scores[best]}
    logits = classifiers[len(pairs) + best].predict(labelled.test.features.representation)
    return _measure(labelled, logits, "crop and flip", details, chosen)


def _measure(
    labelled: LabelledFeatures, logits: Tensor, name: str, details: Record, chosen: Record
) -> Measurement:
    predicted = logits.argmax(dim=1)
    values = labelled.measure(predicted, logits)
    return Measurement(name, values, *labelled.counts, details, chosen, pack(predicted))
