"""Protocols that train all weights of a copy of the network: semi, transfer and supervised.

A variant is a network to start from, trained on labelled images and tested once.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepbregman.config import OptimiserSettings
from deepbregman.data import Batches, Source, Split, stratified_split
from deepbregman.data.datasets import expand_home
from deepbregman.data.folders import quote_some
from deepbregman.errors import Diverged, UserError, notify
from deepbregman.method.views import Views, centre_view
from deepbregman.objectives import build_untrained_encoder
from deepbregman.runs import Record
from deepbregman.terminal import ReportProgress, count_words, ignore_progress
from deepbregman.training.devices import is_mixed
from deepbregman.training.optimisers import learning_rate, split_by_decay
from deepbregman.training.randomness import derive_seed, epoch_order, seed_dropout

from .features import BATCH_SIZE, LabelledFeatures, SplitFeatures, build_crop_and_flip
from .finished import describe_part
from .frozen import keep_frozen
from .inputs import Evaluation
from .linear import check_linear, measure_on_cached
from .results import Measurement, make_rows, pack, top_k_accuracy

EPOCHS = 50
"""Epochs of the protocols transfer and supervised."""
FEW_LABELS = 0.05
"""Below this share of the labels, the few images are trained on for more epochs."""
FEW_LABELS_EPOCHS, MANY_LABELS_EPOCHS = 60, 30
CHOICE_SHARE = 0.2
"""Share of the labelled images that is held out to choose a learning rate."""


@dataclass(frozen=True)
class Budget:
    """Length, batch size, learning rate and weight decay of fine-tuning."""

    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float

    def steps_per_epoch(self, num_images: int) -> int:
        """Count the steps; a last, short batch is left out, and each epoch has another order."""
        return num_images // self.batch(num_images)

    def batch(self, num_images: int) -> int:
        """Return the images in a step: all, where there are fewer than the batch."""
        return min(self.batch_size, num_images)


class Classifier(nn.Module):
    """A feature extractor, images (N, 3, H, W) to features (N, d), and a linear layer on it.

    The linear layer's first weights are small, so that no class is preferred.
    """

    def __init__(
        self, extractor: nn.Module, num_features: int, num_classes: int, seed: int
    ) -> None:
        super().__init__()
        self.extractor = extractor
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "classifier"))
            self.linear = nn.Linear(num_features, num_classes)
            nn.init.normal_(self.linear.weight, std=0.01)
            nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, C)."""
        logits: Tensor = self.linear(self.extractor(images))
        return logits


def finetune(
    network: Classifier,
    batches: Batches,
    labels: Tensor,
    views: Views,
    budget: Budget,
    *,
    seed: int,
    indices: Tensor | None = None,
    mixed: bool = False,
    progress: ReportProgress = ignore_progress,
    title: str = "fine-tuning",
) -> None:
    """Train every weight of a network in place, on random views of labelled images.

    It is SGD with Nesterov momentum 0.9 and a cosine schedule; batch normalisation learns the
    statistics of the new images. The same seed gives the same weights to the bit on a CPU. The host
    waits for the device once an epoch.

    Args:
        labels: int64 (N,) of all images in ``batches``.
        indices: int64 (M,) on the CPU, the images to train on; all when None.
    """
    rows = torch.arange(batches.num_images) if indices is None else indices
    if len(rows) < 2:
        raise UserError(f"{len(rows)} labelled images: batch normalisation needs 2 to train on")
    device, size, steps = labels.device, budget.batch(len(rows)), budget.steps_per_epoch(len(rows))
    schedule = OptimiserSettings(
        name="sgd", learning_rate=budget.learning_rate, schedule="cosine", warmup_epochs=0.0
    )
    optimiser = torch.optim.SGD(
        split_by_decay(network.named_parameters(), budget.weight_decay, decay_all=False),
        budget.learning_rate,
        momentum=0.9,
        nesterov=True,
        fused=device.type == "cuda",
    )

    def order(epoch: int) -> Tensor:
        return rows[epoch_order(len(rows), seed, epoch)[: steps * size]]

    feed = batches.chain((order(epoch) for epoch in range(budget.epochs)), size)
    generator = torch.Generator(device)
    network.train()
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):  # its state belongs to the caller
        for epoch in range(budget.epochs):
            targets = torch.split(labels[order(epoch).to(device)], size)
            total = torch.zeros((), device=device)
            for step in range(steps):
                position = epoch * steps + step
                rate = learning_rate(schedule, position, steps, budget.epochs)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                batch = next(feed)
                generator.manual_seed(derive_seed(seed, "finetuning", position))
                uniforms = views.draw(size, device=device, generator=generator)
                view = views(batch.images, batch.sizes, uniforms)[0]
                seed_dropout(derive_seed(seed, "finetuning dropout", position), device)
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=mixed):
                    logits = network(view)
                loss = functional.cross_entropy(logits.float(), targets[step])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
                optimiser.step()
                total += loss.detach()
                progress(title, position + 1, budget.epochs * steps)
            if not total.isfinite():
                raise Diverged(
                    f"{title}: the loss is {total.item()}, training has diverged at learning rate "
                    f"{budget.learning_rate:g}; give a lower one with --learning-rate"
                )
    network.eval()


def predict(
    network: nn.Module, batches: Batches, image_size: int, indices: Tensor | None = None
) -> Tensor:
    """Return the logits (M, C) of whole images, resized and centre-cropped; of all by default."""
    rows = torch.arange(batches.num_images) if indices is None else indices
    with keep_frozen(network):
        logits = torch.cat(
            [
                network(centre_view(batch.images, batch.sizes, image_size))
                for batch in batches.iterate(rows, BATCH_SIZE)
            ]
        )
    if not logits.isfinite().all():
        raise Diverged("the outputs of a fine-tuned network are not finite: lower --learning-rate")
    return logits


MakeNetwork = Callable[[LabelledFeatures, int], tuple[nn.Module, int]]
"""Makes the network that training starts from, given a seed; returns it with its width."""


def from_encoder(labelled: LabelledFeatures, seed: int) -> tuple[nn.Module, int]:
    """Start from the run's encoder."""
    del seed  # nothing is drawn
    encoder = copy.deepcopy(labelled.model.encoder)
    return encoder, encoder.num_features


def from_projection(labelled: LabelledFeatures, seed: int) -> tuple[nn.Module, int]:
    """Start from the encoder and the projection up to its first activation, as SimCLR-v2 does."""
    encoder, _ = from_encoder(labelled, seed)
    layers = list(copy.deepcopy(labelled.model.projection).children())
    last = next(i for i, layer in enumerate(layers) if isinstance(layer, nn.ReLU))
    assert isinstance(layers[0], nn.Linear)  # build_projection begins with it
    return nn.Sequential(encoder, nn.Sequential(*layers[: last + 1])), layers[0].out_features


def from_scratch(labelled: LabelledFeatures, seed: int) -> tuple[nn.Module, int]:
    """Start from random weights of the same architecture: what pretraining is compared with."""
    encoder = build_untrained_encoder(
        labelled.model.encoder, labelled.config, *labelled.pixel_statistics, seed
    )
    return encoder, encoder.num_features


def check_untrained_copy(evaluation: Evaluation) -> None:
    """Refuse an encoder that cannot be copied with new random weights."""
    loaded = evaluation.loaded
    mean, deviation, seed = (0.0,) * 3, (1.0,) * 3, evaluation.options.seed
    build_untrained_encoder(loaded.model.encoder, loaded.config, mean, deviation, seed)


def check_supervised(evaluation: Evaluation) -> None:
    """Check what can be checked before anything is trained."""
    check_untrained_copy(evaluation)
    _check_choice(evaluation, evaluation.labelled.source.train)


def supervised(evaluation: Evaluation) -> list[Record]:
    """Train the same architecture on all labels from random weights, for reference."""
    train, epochs = evaluation.labelled.train, evaluation.options.epochs or EPOCHS
    variant = _Variant("from scratch", train, from_scratch, epochs)
    seeds = evaluation.options.each_seed
    return make_rows([[_measure_variant(evaluation, variant, seed)] for seed in seeds])


def check_semi(evaluation: Evaluation) -> None:
    """Draw every subset before the training, and say where a class gets more than its share."""
    check_untrained_copy(evaluation)
    _choose_starts(evaluation)
    for seed in evaluation.options.each_seed:
        subsets = _select_labelled(evaluation, seed)
        for subset in subsets:
            _check_choice(evaluation, subset.split)
    for subset in subsets:
        if subset.rounded_up:
            words = "one image is drawn of each class whose share is below one"
            notify(f"{subset.name}: {words}: {quote_some(subset.rounded_up)}")


def semi(evaluation: Evaluation) -> list[Record]:
    """Fine-tune all weights on a part of the labels, and for comparison without pretraining.

    Each seed draws another share of the labels. A list of labels is the same for all seeds; then
    only the order, the crops and the classifier's first weights differ.
    """
    starts = _choose_starts(evaluation)
    labelled, seeds = evaluation.labelled, []
    for seed in evaluation.options.each_seed:
        measured = []
        for split, name, epochs, rounded_up in _select_labelled(evaluation, seed):
            train = labelled.of(split)
            more = {"classes_rounded_up": list(rounded_up)} if rounded_up else {}
            for words, start in starts.items():
                variant = _Variant(f"{name}, {words}", train, start, epochs)
                one = _measure_variant(evaluation, variant, seed)
                measured.append(replace(one, details={**one.details, **more}))
        seeds.append(measured)
    return make_rows(seeds)


def _choose_starts(evaluation: Evaluation) -> dict[str, MakeNetwork]:
    """Return the networks that semi starts from, by their names in rows."""
    known: dict[str, tuple[str, MakeNetwork]] = {
        "encoder": ("from encoder", from_encoder),
        "projection": ("from projection layer 1", from_projection),
        "scratch": ("supervised", from_scratch),
    }
    if not len(evaluation.loaded.model.projection):
        del known["projection"]
    starts = dict(known[name] for name in evaluation.options.semi.starts if name in known)
    if not starts:
        raise UserError(
            "--starts projection: this run has no trained projection, or one of your own; give "
            "--starts encoder"
        )
    return starts


def check_transfer(evaluation: Evaluation) -> None:
    """Refuse the dataset of the pretraining, since nothing would be transferred."""
    check_untrained_copy(evaluation)
    data, own = evaluation.options.data, evaluation.loaded.config.data.source
    assert data is not None  # the options refuse that
    if data == own or expand_home(Path(data)).resolve() == expand_home(Path(own)).resolve():
        raise UserError(
            f"transfer: --data {data} is the dataset of the pretraining; name another dataset, or "
            "use linear, semi or supervised"
        )
    check_linear(evaluation)
    _check_choice(evaluation, evaluation.labelled.source.train)


def transfer(evaluation: Evaluation) -> list[Record]:
    """Evaluate on another dataset: frozen, fine-tuned on all labels, and without pretraining."""
    labelled, epochs = evaluation.labelled, evaluation.options.epochs or EPOCHS
    starts: dict[str, MakeNetwork] = {"fine-tuned": from_encoder}
    if evaluation.with_references:
        starts["supervised"] = from_scratch
    variants = [_Variant(name, labelled.train, start, epochs) for name, start in starts.items()]
    linear, seeds = "linear, cached features", []
    for seed in evaluation.options.each_seed:
        settings = describe_part(labelled, labelled.source.train, linear, seed, {})
        fit = partial(measure_on_cached, labelled, seed, name=linear)
        measured = [evaluation.finished.measure(settings, fit)]
        measured += [_measure_variant(evaluation, variant, seed) for variant in variants]
        seeds.append(measured)
    return make_rows(seeds)


class _Subset(NamedTuple):
    split: Split
    name: str
    epochs: int
    rounded_up: Sequence[str]
    """Classes that have one label, though their share is below one image."""


def _select_labelled(evaluation: Evaluation, seed: int) -> list[_Subset]:
    """Return the labelled parts of the training split that semi is to use."""
    source, options = evaluation.labelled.source, evaluation.options

    def select(indices: Tensor, name: str, rounded_up: Sequence[str] = ()) -> _Subset:
        few = len(indices) < FEW_LABELS * len(source.train)
        epochs = options.epochs or (FEW_LABELS_EPOCHS if few else MANY_LABELS_EPOCHS)
        return _Subset(source.train.select(indices), name, epochs, rounded_up)

    file = options.semi.labelled_list
    if file is not None:
        return [select(read_labelled(source, file), f"labels of {file.name}")]
    subsets = []
    for share in dict.fromkeys(options.semi.labels):
        indices, rounded_up = draw_labelled(source, share, seed), list_rounded_up(source, share)
        subsets.append(select(indices, f"{100 * share:g} % labels", rounded_up))
    return subsets


def _check_choice(evaluation: Evaluation, split: Split) -> None:
    """Refuse to choose a learning rate where a class has no second image to choose it on."""
    rates = evaluation.options.tuning.learning_rate
    if len(rates) == 1:
        return
    present, counts = torch.unique(split.known_labels, return_counts=True)
    if int(counts.min()) < 2:
        name = evaluation.labelled.source.class_name(int(present[int(counts.argmin())]))
        raise UserError(
            f"a choice among {len(rates)} learning rates needs 2 labelled images of each class, "
            f"and {name!r} has 1 of the {len(split)}: give one --learning-rate, or more labels"
        )


class _Variant(NamedTuple):
    name: str
    train: SplitFeatures
    """The labelled images to train on."""
    start: MakeNetwork
    epochs: int


def _measure_variant(evaluation: Evaluation, variant: _Variant, seed: int) -> Measurement:
    """Train from one start on one set of labelled images and test; or read the finished result."""
    name, train, start, epochs = variant
    options = {"start": start.__name__, "epochs": epochs, **asdict(evaluation.options.tuning)}
    settings = describe_part(evaluation.labelled, train.split, name, seed, options)
    work = partial(_train_and_test, evaluation, variant, seed)
    return evaluation.finished.measure(settings, work)


def _train_and_test(evaluation: Evaluation, variant: _Variant, seed: int) -> Measurement:
    labelled, tuning = evaluation.labelled, evaluation.options.tuning
    name, train, start, epochs = variant
    budget = Budget(epochs, tuning.batch_size, tuning.learning_rate[0], tuning.weight_decay)

    def train_network(budget: Budget, indices: Tensor | None) -> Classifier:
        network = Classifier(*start(labelled, seed), labelled.num_classes, seed)
        network.requires_grad_(True)
        network.to(memory_format=torch.channels_last)
        network.to(labelled.device)
        finetune(
            network,
            train.batches,
            train.labels,
            build_crop_and_flip(labelled.config),
            budget,
            seed=seed,
            indices=indices,
            mixed=is_mixed(labelled.config, labelled.device),
            progress=evaluation.progress,
            title=f"{name}, seed {seed}",
        )
        return network

    chosen: Record = {"learning_rate": budget.learning_rate}
    size = labelled.config.data.image_size
    if len(tuning.learning_rate) > 1:
        kept, held_out = stratified_split(train.split.labels, len(train.split), CHOICE_SHARE, seed)
        truth = train.labels[held_out.to(train.labels.device)]
        scores: dict[float, float] = {}  # of the rates that do not diverge
        for rate in sorted(tuning.learning_rate):
            with suppress(Diverged):
                network = train_network(replace(budget, learning_rate=rate), kept)
                logits = predict(network, train.batches, size, held_out)
                scores[rate] = top_k_accuracy(logits, truth)
        if not scores:
            raise Diverged(f"{name}: every --learning-rate of {tuning.learning_rate} diverges")
        best = max(scores, key=scores.__getitem__)
        budget = replace(budget, learning_rate=best)
        chosen = {"learning_rate": best, "held_out": scores[best]}
    network = train_network(budget, None)
    logits = predict(network, labelled.test.batches, size)
    count = len(train.split)
    details = {
        "epochs": epochs,
        "steps": epochs * budget.steps_per_epoch(count),
        "batch_size": budget.batch(count),
        "learning_rates": list(tuning.learning_rate),
        "weight_decay": budget.weight_decay,
    }
    predicted = logits.argmax(dim=1)
    values = labelled.measure(predicted, logits)
    num_test = len(labelled.test.labels)
    return Measurement(name, values, count, num_test, details, chosen, pack(predicted))


def draw_labelled(source: Source, share: float, seed: int) -> Tensor:
    """Draw a share of the labelled training images, class by class, at least one of each.

    Of a class with ``n`` images ``n * share`` are drawn, rounded down or up so that the total is
    that of the whole set. Only classes whose share is below one image add to it. Returned are
    indices into the training split, ascending.
    """
    labels = source.train.known_labels
    if share == 1:
        return torch.arange(len(labels))
    drawn = stratified_split(labels, len(labels), share, seed)[1]
    _, positions, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    single = torch.nonzero(counts[positions] == 1).flatten()  # a split never draws these
    return torch.cat([drawn, single]).sort().values


def list_rounded_up(source: Source, share: float) -> list[str]:
    """Name the classes whose share is below one image; one image of each is drawn anyway."""
    present, counts = torch.unique(source.train.known_labels, return_counts=True)
    exact = Fraction(share).limit_denominator(10**6)
    return [
        source.class_name(label)
        for label, count in zip(present.tolist(), counts.tolist(), strict=True)
        if count * exact < 1
    ]


def read_labelled(source: Source, file: Path) -> Tensor:
    """Read the names of the labelled training images from a file, one on each line.

    A name is a path in the data folder or the end of one, such as the bare file name, and must fit
    exactly one training image. Empty lines are passed over; a name twice counts once. Returned are
    indices into the training split, ascending.
    """
    if source.train.names is None:
        raise UserError(
            f"--labelled-list {file}: the images of {source.name} have no file names; it needs a "
            "folder of images, or use --labels"
        )
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--labelled-list {file} cannot be read: {error}") from None
    wanted = dict.fromkeys(line.strip().removeprefix("./") for line in lines if line.strip())
    if not wanted:
        raise UserError(f"--labelled-list {file} names no image: write one name on each line")
    found = _find_names(list(wanted), source.train.names)
    missing = [name for name in wanted if not found[name]]
    if missing:
        raise UserError(
            f"--labelled-list {file}: {len(missing)} of its {len(wanted)} names are not training "
            f"images of {source.name}, such as {quote_some(missing)}; correct the list, or give "
            "the data folder that it was made for"
        )
    twice = [name for name in wanted if len(found[name]) > 1]
    if twice:
        raise UserError(
            f"--labelled-list {file}: {len(twice)} of its names fit several training images, such "
            f"as {quote_some(twice)}; write them with their folders"
        )
    chosen = torch.tensor(sorted({places[0] for places in found.values()}), dtype=torch.int64)
    labels = source.train.known_labels
    absent = sorted(set(labels.tolist()) - set(labels[chosen].tolist()))
    if absent:
        names = quote_some(map(source.class_name, absent))
        number = count_words(len(absent), "class")
        raise UserError(
            f"--labelled-list {file} names no image of {number} ({names}): a "
            "classifier cannot learn a class that it never sees; list at least one of each"
        )
    return chosen


def _find_names(wanted: Sequence[str], names: Sequence[str]) -> dict[str, list[int]]:
    """Find the position of the path that each wanted name is, or of all that it is the end of."""
    by_file: dict[str, list[int]] = {}
    for position, path in enumerate(names):
        by_file.setdefault(path.rpartition("/")[2], []).append(position)
    found = {}
    for name in wanted:
        places = by_file.get(PurePosixPath(name).name, [])
        whole = [place for place in places if names[place] == name]
        found[name] = whole or [place for place in places if names[place].endswith(f"/{name}")]
    return found
