"""Settings that fit the images and the machine: what the recipe ``auto`` chooses, and why."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepbregman.config import Config, DivergenceSettings, override
from deepbregman.errors import is_out_of_memory
from deepbregman.objectives import OwnParts, Samples, build_step
from deepbregman.terminal import PLANNED_SHARE, choose_budget, count_words, format_duration

from .devices import is_mixed
from .health import USEFUL_STEPS
from .optimisers import build_optimiser
from .randomness import BatchShare, count_steps

LIMITS = {"cpu": 30 * 60.0, "gpu": 2 * 3600.0}
"""Seconds that a run may take where no budget is given."""
_SIDES = (32, 64, 96, 128)
_IMAGES_SEEN = 2_000_000  # over all epochs, within these bounds:
_EPOCHS = (200, 800)  # fewest and most that are wanted
_LARGEST_BATCH, _SMALLEST_BATCH = 512, 16
_STEPS_PER_EPOCH = 4  # at least, where the batch can be made small enough
_BASE_BATCH, _BASE_RATE = 512, 1.0  # of the recipe best
# Fewer steps are a short run: smaller batches make more of them, at a lower rate. docs/log.md has
# what was measured on a CPU.
_SHORT_STEPS, _SHORT_BATCH, _LOWEST_SHARE = 1000, 32, 0.1
# Below so many images the rate of a short run falls with their number too, down to this share.
_FEW_IMAGES, _LOWEST_FOR_FEW = 1000, 0.3
_TOO_FEW_IMAGES = 100  # fewer bring a warning
_SHORT_RISE = 0.5  # share of a short run over which the weight of the divergence rises
_BANK, _FILLING = 4096, 0.05  # largest bank, and share of the run after which it must be full
_WARMUP, _LONGEST_WARMUP = 0.05, 10.0  # share of the epochs, and most epochs
_ENCODERS = ("resnet18", "small")
_MEASURED_BATCH = 16  # on a CPU, where the time of a step is in proportion to its batch
_MEASURED_SECONDS = 2.0  # for each encoder that is tried
_CHECKED_SHARE, _CHECKED_SECONDS = 0.03, 30.0  # of the limit, and at most, for the chosen one
_CHECKS = 3  # it is measured so many times within these seconds, and the fastest counts


class Choice(NamedTuple):
    """One setting that was chosen."""

    field: str
    value: Any
    why: str


class Facts(NamedTuple):
    """Properties of the images and the machine by which settings are chosen."""

    num_images: int
    side: int
    """Median of the images' shorter sides."""
    num_classes: int
    """0 without labels."""
    on_gpu: bool
    processes: int
    cpus: int
    budget: float | None
    """Seconds that the user grants."""

    @property
    def limit(self) -> float:
        """Seconds that the run may take."""
        return LIMITS["gpu" if self.on_gpu else "cpu"] if self.budget is None else self.budget


@dataclass(frozen=True)
class Plan:
    """A complete configuration, and what was chosen in it."""

    config: Config
    choices: tuple[Choice, ...]
    seconds: float
    enough: int
    """Epochs after which more bring little, for such a number of images."""
    warning: str = ""
    """If the time is too short to learn much."""


Measure = Callable[[Config, float], float]
"""Returns the seconds of an optimiser step, measured for so many seconds."""


def choose_image_size(side: int, on_gpu: bool) -> Choice:
    """Choose the side of the images by the median of their shorter sides."""
    most = _SIDES[-1] if on_gpu else _SIDES[0]
    size = max([s for s in _SIDES if s <= min(side, most)] or [max(8, side)])
    why = f"the images have {side} px"
    if size == most and side > most:
        why += f"; {most} is fast on {'a GPU' if on_gpu else 'a CPU'}"
    return Choice("data.image_size", size, why)


def make_plan(
    config: Config, facts: Facts, given: Mapping[str, Any], size: Choice, measure: Measure
) -> Plan:
    """Choose what the user has not given.

    Args:
        config: to start from; the fields that are given are in it, and stay.
        size: the image size, which had to be chosen before the images were opened.
    """
    plan = _Choices(config, given)
    plan.take(size, _choose_batch(facts, config.training.accumulate))
    divergence = config.divergence
    if divergence.is_on and divergence.source == "learned":
        usual = DivergenceSettings.num_subnetworks
        plan.take(Choice("divergence.num_subnetworks", usual, "as in the paper"))
    fewest, most = _EPOCHS
    enough = min(most, max(fewest, _IMAGES_SEEN // facts.num_images))
    wanted = given.get("training.epochs", enough)
    tried, seconds, length, too_slow = _try_encoders(plan.config, facts, given, wanted, measure)
    if tried.training.batch_size != plan.config.training.batch_size:
        why = "what fits in memory" if facts.on_gpu else "small, for more steps in a short run"
        plan.take(Choice("training.batch_size", tried.training.batch_size, why))
    why = f"{1e3 * seconds:,.0f} ms a step, measured"
    if too_slow:
        why += f"; {too_slow[0]} would take too long"
    plan.take(Choice("encoder.name", tried.encoder.name, why), length)
    steps = plan.config.training.epochs * count_steps(plan.config, facts.num_images)
    if divergence.is_on and divergence.source == "bank":
        plan.take(_choose_bank(plan.config, facts, steps))
    plan.take(*_choose_schedule(plan.config, facts, steps))
    warning = ""
    if "training.epochs" not in given and length.value < wanted and 0 < steps < USEFUL_STEPS:
        enough_time = choose_budget(_SHORT_STEPS * seconds)
        warning = (
            f"warning: only {count_words(steps, 'step')}, too few to learn much, and "
            f"{format_duration(facts.limit)} allows no more at this speed: --budget {enough_time} "
            f"allows {_SHORT_STEPS:,}; if other programs keep the machine busy now, start again "
            "later"
        )
    elif facts.num_images < _TOO_FEW_IMAGES:
        images = count_words(facts.num_images, "image")
        warning = f"warning: {images} teach an encoder little; give hundreds, better thousands"
    return Plan(plan.config, tuple(plan.made), steps * seconds, enough, warning)


class _Choices:
    """A configuration, and the choices made in it so far."""

    def __init__(self, config: Config, given: Mapping[str, Any]) -> None:
        self.config, self.given = config, given
        self.made: list[Choice] = []

    def take(self, *choices: Choice) -> None:
        """Make choices, unless the user has given the field; a later one replaces an earlier."""
        for choice in choices:
            if choice.field in self.given:
                choice = Choice(choice.field, self.given[choice.field], "as given")
            else:
                self.config = override(self.config, {choice.field: choice.value})
            self.made = [*(made for made in self.made if made.field != choice.field), choice]


class _Tried(NamedTuple):
    """A configuration whose speed has been measured."""

    config: Config
    seconds: float
    """Of an optimiser step."""
    length: Choice
    """The epochs for which there is time."""
    too_slow: list[str]
    """Encoders that were tried before."""


def _try_encoders(
    config: Config, facts: Facts, given: Mapping[str, Any], wanted: int, measure: Measure
) -> _Tried:
    """Try encoders until there is time for half of the wanted epochs, and measure their speed."""
    # On a GPU the first encoder is fast enough; weights and a stem are those of a ResNet.
    start, is_fixed = config.encoder, facts.on_gpu or "encoder.name" in given
    is_fixed |= start.stem != "auto" or start.weights not in ("auto", "random")
    too_slow: list[str] = []
    for name in _ENCODERS:
        tried = config
        if "encoder.name" not in given:
            tried = override(tried, {"encoder.name": name})
        tried, seconds = _fit_into_memory(tried, given, facts.processes, measure)
        tried, seconds = _lengthen(tried, facts, given, wanted, seconds)
        steps_per_epoch = count_steps(tried, facts.num_images)
        length = _choose_epochs(facts, wanted, seconds * steps_per_epoch)
        if is_fixed or length.value >= 0.5 * wanted:
            break
        too_slow.append(name)
    if length.value < wanted and not facts.on_gpu:
        # The limit decides, so the speed must be right: other programs make it go up and down, and
        # a length that was planned in a bad moment stays.
        each = min(_CHECKED_SECONDS, _CHECKED_SHARE * facts.limit) / _CHECKS
        seconds = min(measure(tried, each) for _ in range(_CHECKS))
        length = _choose_epochs(facts, wanted, seconds * steps_per_epoch)
    return _Tried(tried, seconds, length, too_slow)


def _choose_batch(facts: Facts, accumulate: int) -> Choice:
    images = facts.num_images // accumulate  # for each of the batches of a step
    most = min(_LARGEST_BATCH, max(_SMALLEST_BATCH, images // _STEPS_PER_EPOCH))
    batch = 2 ** (min(most, max(2, images)).bit_length() - 1)
    batch = max(batch - batch % facts.processes, facts.processes)
    why = "as in the recipe best"
    if batch < _LARGEST_BATCH:
        several = f"{accumulate} " * (accumulate > 1)
        why = f"{facts.num_images:,} images are too few for {several}batches of {_LARGEST_BATCH}"
    return Choice("training.batch_size", batch, why)


def _choose_bank(config: Config, facts: Facts, steps: int) -> Choice:
    """Choose the bank: the divergence counts only once it is full, and older entries are stale."""
    batch = config.training.batch_size * config.training.accumulate
    early = int(_FILLING * steps * batch)
    most = min(_BANK, facts.num_images, early)
    size = max(batch, 2 ** (max(1, most).bit_length() - 1))
    if size == _BANK:
        why = "as in the recipe best"
    elif size == batch:
        why = "the size of a batch"
    elif most == early:
        why = f"such a bank is full after {_FILLING:.0%} of the run"
    else:
        why = "no larger than the dataset"
    return Choice("divergence.num_subnetworks", size, why)


def _choose_epochs(facts: Facts, wanted: int, seconds: float) -> Choice:
    """Choose the length: as wanted, or less where an epoch takes too many seconds."""
    possible = int(PLANNED_SHARE * facts.limit / seconds)
    granted = "" if facts.budget else f"; --budget {choose_budget(wanted * seconds)} allows that"
    if possible >= wanted:
        return Choice("training.epochs", wanted, f"enough for {facts.num_images:,} images")
    limit = format_duration(facts.limit)
    why = f"what fits in {limit}" if possible else f"at least one, though it takes over {limit}"
    return Choice(
        "training.epochs", max(1, possible), f"{why}; up to {wanted:,} improve the result{granted}"
    )


def _lengthen(
    config: Config, facts: Facts, given: Mapping[str, Any], wanted: int, seconds: float
) -> tuple[Config, float]:
    """Halve the batch of a short run on a CPU, where the time of a step is in proportion to it."""
    while True:
        epoch = seconds * count_steps(config, facts.num_images)
        epochs = _choose_epochs(facts, wanted, epoch).value
        half = config.training.batch_size // 2
        is_short = epochs * count_steps(config, facts.num_images) < _SHORT_STEPS
        fixed = facts.on_gpu or not _can_be_halved_to(half, config, given, facts.processes)
        if fixed or not is_short or half < _SHORT_BATCH:
            return config, seconds
        config, seconds = override(config, {"training.batch_size": half}), seconds / 2


def _choose_schedule(config: Config, facts: Facts, steps: int) -> Iterator[Choice]:
    epochs, accumulate = config.training.epochs, config.training.accumulate
    warmup = round(min(_LONGEST_WARMUP, _WARMUP * epochs), 2)
    share = f"{_WARMUP:.0%} of the epochs, at most {_LONGEST_WARMUP:g}"
    yield Choice("optimiser.warmup_epochs", warmup, share)
    images = config.training.batch_size * accumulate
    rate = _BASE_RATE * images / _BASE_BATCH
    what = "a batch" if accumulate == 1 else "a step"
    why = f"{_BASE_RATE:g} for {what} of {_BASE_BATCH} images, so {rate:.3g} for {images:,}"
    is_short = 0 < steps < _SHORT_STEPS
    if is_short and not facts.on_gpu:  # on a GPU a third of the rate was worse
        part = max(_LOWEST_SHARE, steps / _SHORT_STEPS)
        part *= min(1.0, max(_LOWEST_FOR_FEW, facts.num_images / _FEW_IMAGES))
        few = count_words(steps, "step") + " and the images" * (facts.num_images < _FEW_IMAGES)
        rate *= part
        if round(100 * part) < 100:
            why += f"; {part:.0%} of that, since {few} are few"
    yield Choice("optimiser.learning_rate", float(f"{rate:.3g}"), why)
    if is_short and config.divergence.weight > 0.0:
        why = "an untrained teacher gives poor targets; the loss may rise"
        why = f"half of a short run, since {why}"
        yield Choice("divergence.warmup_epochs", round(_SHORT_RISE * epochs, 2), why)
    yield Choice("data.workers", min(16, facts.cpus), count_words(facts.cpus, "CPU"))
    every = max(1, epochs // 20)
    often = "about 20 times" if every > 1 else "after each epoch"
    why = f"a line of progress {often}"
    if facts.num_classes:
        why = f"kNN accuracy {often}, by the labels of {facts.num_classes} classes"
    yield Choice("training.knn_every", every, why)


def _fit_into_memory(
    config: Config, given: Mapping[str, Any], processes: int, measure: Measure
) -> tuple[Config, float]:
    """Measure a configuration; halve the batch until it fits in memory."""
    while True:
        try:
            return config, measure(config, _MEASURED_SECONDS)
        except (RuntimeError, MemoryError) as error:
            half = config.training.batch_size // 2
            if not (_can_be_halved_to(half, config, given, processes) and is_out_of_memory(error)):
                raise
        config = override(config, {"training.batch_size": half})


def _can_be_halved_to(batch: int, config: Config, given: Mapping[str, Any], processes: int) -> bool:
    """Whether a batch may be halved to this: processes and the method need whole parts of it."""
    parts = (processes, config.objective.batch_multiple)
    is_whole = batch >= max(2, processes) and not any(batch % part for part in parts)
    return is_whole and "training.batch_size" not in given


def measure_step(
    config: Config,
    frame: tuple[int, int],
    device: torch.device,
    processes: int = 1,
    own: OwnParts = OwnParts(),  # noqa: B008  # immutable
    spend: float = _MEASURED_SECONDS,
) -> float:
    """Return the median seconds of an optimiser step of one of several processes, on noise.

    The step is not compiled, so that measuring takes seconds: on a GPU the run itself is faster.

    Args:
        frame: height and width of the images before they are cropped.
        spend: seconds to measure for.
    """
    share = config.training.batch_size // processes
    part = config.objective.batch_multiple
    most = share if device.type == "cuda" else min(share, _MEASURED_BATCH)
    batch = max(1, most // part) * part
    tried = override(config, {"training.batch_size": batch, "training.accumulate": 1})
    mixed = is_mixed(config, device)
    step = build_step(tried, mixed=mixed, own=own, num_images=batch, num_classes=2)
    step.to(memory_format=torch.channels_last)
    step.to(device)
    step.train()
    optimiser = build_optimiser(config.optimiser, step.parameter_groups(), device)
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    draws = BatchShare(tried, batch, device, 0, 1)
    pixels = torch.randint(0, 256, (batch, 3, *frame), dtype=torch.uint8, device=device)
    indices = torch.arange(batch, device=device)
    turns: list[float] = []
    began = time.perf_counter()
    while len(turns) < 2 or time.perf_counter() - began < spend:
        started = time.perf_counter()
        for _ in range(config.training.accumulate):
            uniforms = draws.draw_uniforms(step.views, len(turns))
            random = draws.draw_for(step.objective, len(turns))
            outputs = step(pixels, None, uniforms, Samples(indices, indices % 2, random))
            outputs.total.backward()
        optimiser.step()
        step.after_step(0.0)
        optimiser.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        turns.append(time.perf_counter() - started)
    return statistics.median(turns[1:]) * share / batch
