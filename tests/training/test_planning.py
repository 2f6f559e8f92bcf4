"""What the recipe auto chooses: by made-up speeds, so that no test depends on the machine."""

from typing import Any

import pytest
import torch

from deepbregman.config import Config, differing_fields, from_toml, load_recipe, override, to_toml
from deepbregman.training.planning import (
    Choice,
    Facts,
    Plan,
    choose_image_size,
    make_plan,
    measure_step,
)

SIZE = Choice("data.image_size", 32, "")
CPU = Facts(2000, 400, 0, on_gpu=False, processes=1, cpus=2, budget=None)


def plan(
    facts: Facts = CPU, speed: float = 1e-4, given: dict[str, Any] | None = None, resnet: float = 50
) -> Plan:
    """Plan for a machine that takes so many seconds for an image, ResNets so many times as long."""

    def measure(config: Config, _: float) -> float:
        slower = 1.0 if config.encoder.name == "small" else resnet
        return speed * slower * config.training.batch_size * config.training.accumulate

    given = given or {}
    return make_plan(override(load_recipe("auto"), given), facts, given, SIZE, measure)


@pytest.mark.parametrize(
    ("side", "on_gpu", "size"),
    [
        *((8, False, 8), (4, False, 8), (28, True, 28), (32, False, 32), (600, False, 32)),
        *((64, True, 64), (90, True, 64), (600, True, 128)),
    ],
)
def test_image_size(side, on_gpu, size):
    assert choose_image_size(side, on_gpu).value == size


def test_of_20_000_images_like_those_of_cifar10_auto_makes_best():
    """On a GPU that is fast enough, so docs/guide.md compares the two no further."""
    facts = Facts(20_000, 32, 10, on_gpu=True, processes=1, cpus=16, budget=None)
    best = load_recipe("best")
    found = differing_fields(best, plan(facts, speed=1e-6).config)
    assert found.keys() <= {"data.workers", "data.skip_unreadable", "training.knn_every"}, found


@pytest.mark.parametrize(
    ("count", "batch"),
    [(50_000, 512), (2048, 512), (2047, 256), (300, 64), (40, 16), (10, 8), (3, 2)],
)
def test_the_batch_is_no_larger_than_the_data(count, batch):
    config = plan(CPU._replace(num_images=count)).config
    assert config.training.batch_size == batch <= count
    steps = config.training.epochs * (count // batch)
    share = 1.0 if steps >= 1000 else 0.3 * steps / 1000
    assert config.optimiser.learning_rate == pytest.approx(batch / 512 * share, rel=5e-3)


@pytest.mark.parametrize(
    ("count", "epochs", "bank", "why"),
    [
        (50_000, 200, 4096, "as in the recipe best"),
        (2000, 800, 1024, "no larger than the dataset"),
        (2000, 30, 1024, "no larger than the dataset"),  # 5 % of 53,760 images are 2,688
        (2000, 10, 512, "such a bank is full after 5% of the run"),  # and of 17,920 they are 896
        (2000, 2, 128, "such a bank is full after 5% of the run"),  # of batches of 32
        (40, 4, 16, "the size of a batch"),
    ],
)
def test_the_bank_is_full_early(count, epochs, bank, why):
    found = plan(CPU._replace(num_images=count), given={"training.epochs": epochs})
    assert found.config.divergence.num_subnetworks == bank
    assert {c.why for c in found.choices if c.field == "divergence.num_subnetworks"} == {why}


def test_accumulated_batches_fill_the_bank_too():
    found = plan(given={"training.epochs": 10, "training.accumulate": 2})
    # A short run has batches of 32: 10 epochs of 31 steps of 64 images, of which 5 % are 992.
    assert found.config.training.batch_size == 32
    assert found.config.divergence.num_subnetworks == 512


@pytest.mark.parametrize(("count", "batch"), [(50_000, 512), (2000, 32), (120, 8)])
def test_accumulated_batches_count_for_the_batch_and_the_rate(count, batch):
    """Eight batches make a step: they fit into the data, and the rate is that of their images."""
    found = plan(CPU._replace(num_images=count, on_gpu=True), given={"training.accumulate": 8})
    assert found.config.training.batch_size == batch
    assert found.config.optimiser.learning_rate == 8 * batch / 512
    reasons = {choice.field: choice.why for choice in found.choices}
    words = f"1 for a step of 512 images, so {8 * batch / 512:g} for {8 * batch:,}"
    assert reasons["optimiser.learning_rate"] == words
    few = f"{count:,} images are too few for 8 batches of 512"
    assert reasons["training.batch_size"] == ("as in the recipe best" if batch == 512 else few)


def test_the_batch_is_a_multiple_of_the_processes():
    assert plan(CPU._replace(processes=3)).config.training.batch_size == 255


def test_a_slow_cpu_gets_a_small_encoder_and_ends_in_time():
    found = plan(speed=0.01)  # 20 s an epoch: 800 epochs would take 4.4 hours
    assert found.config.encoder.name == "small"
    # Batches of 256 would make 630 steps in that time, which are few. Batches of 128 leave out 80
    # of 2,000 images: an epoch is 15 steps of 1.28 s.
    assert found.config.training.batch_size == 128
    assert found.config.training.epochs == int(0.9 * 1800 / (15 * 1.28))
    assert found.seconds == pytest.approx(found.config.training.epochs * 15 * 1.28)
    assert found.seconds <= 1800


@pytest.mark.parametrize(("possible", "encoder"), [(500, "resnet18"), (380, "small")])
def test_the_better_encoder_stays_if_half_of_the_epochs_fit(possible, encoder):
    """Of 800 epochs of seven steps of 256 images, in 90 % of half an hour."""
    an_image = 0.9 * 1800 / ((possible + 0.5) * 7 * 256)
    found = plan(speed=an_image / 50).config
    assert found.encoder.name == encoder
    assert found.training.epochs == (possible if encoder == "resnet18" else 800)


@pytest.mark.parametrize(
    "given", [{"encoder.stem": "standard"}, {"encoder.weights": "torchvision:DEFAULT"}]
)
def test_but_not_where_what_is_given_suits_a_resnet_only(given):
    found = plan(speed=0.01, given=given)
    assert found.config.encoder.name == "resnet18"
    (why,) = (choice.why for choice in found.choices if choice.field == "encoder.name")
    assert "too long" not in why


@pytest.mark.parametrize(
    ("speed", "given", "batch", "share"),
    [
        (0.1, {}, 32, 0.496),  # 16,200 images in all: 8 epochs of 62 steps of 32
        (0.04, {}, 32, 1.0),
        (0.1, {"training.batch_size": 256}, 256, 0.1),  # 9 epochs of 7 steps
        (0.001, {}, 256, 1.0),
    ],
)
def test_a_short_run_has_small_batches_and_a_low_rate(speed, given, batch, share):
    found = plan(speed=speed, given=given)
    assert found.config.training.batch_size == batch
    rate = batch / 512 * share
    assert found.config.optimiser.learning_rate == pytest.approx(rate, rel=5e-3)
    (why,) = [c.why for c in found.choices if c.field == "optimiser.learning_rate"]
    assert ("steps are few" in why) == (share < 1.0)
    # The divergence rises over half of a short run; in a long one it counts from the start.
    half = found.config.training.epochs / 2 if share < 1.0 else 0.0
    assert found.config.divergence.warmup_epochs == pytest.approx(half, abs=0.01)


@pytest.mark.parametrize(
    ("count", "epochs", "share"),
    [
        (300, 25, 0.225 * 0.3),  # 9 steps of 32 an epoch
        (300, 5, 0.1 * 0.3),
        (300, 200, 1.0),  # of 4 steps of 64, 800, batches are halved: 1,800 are enough
        (1000, 10, 0.310),
        (5000, 2, 0.312),
    ],
)
def test_few_images_lower_the_rate_of_a_short_run(count, epochs, share):
    found = plan(CPU._replace(num_images=count), given={"training.epochs": epochs})
    assert found.config.training.batch_size == 32
    rate = 32 / 512 * share
    assert found.config.optimiser.learning_rate == pytest.approx(rate, rel=5e-3)
    (why,) = [c.why for c in found.choices if c.field == "optimiser.learning_rate"]
    assert ("and the images are few" in why) == (share < 1.0 and count < 1000)


def test_a_run_without_epochs_is_not_short():
    found = plan(CPU._replace(num_images=300), given={"training.epochs": 0})
    (why,) = [c.why for c in found.choices if c.field == "optimiser.learning_rate"]
    assert "few" not in why


def test_subnetworks_that_are_learned_are_as_many_as_in_the_paper():
    learned = {"divergence.source": "learned"}
    found = plan(given=learned)
    assert found.config.divergence.num_subnetworks == 100
    assert Choice("divergence.num_subnetworks", 100, "as in the paper") in found.choices
    found = plan(given={**learned, "divergence.num_subnetworks": 7})
    assert found.config.divergence.num_subnetworks == 7


def test_without_divergence_nothing_is_chosen_for_it():
    found = plan(speed=0.1, given={"divergence.weight": 0.0})
    assert found.config.divergence.warmup_epochs == 0.0
    chosen = [choice.field for choice in found.choices]
    assert [field for field in chosen if field.startswith("divergence.")] == []


@pytest.mark.parametrize(("epochs", "often"), [(2, "after each epoch"), (200, "about 20 times")])
def test_a_short_run_is_not_said_to_have_20_lines(epochs, often):
    for classes, why in ((0, f"a line of progress {often}"), (3, f"kNN accuracy {often}, by")):
        found = plan(CPU._replace(num_classes=classes), given={"training.epochs": epochs})
        (told,) = [c.why for c in found.choices if c.field == "training.knn_every"]
        assert told.startswith(why)


def test_a_fast_cpu_gets_the_better_encoder_and_all_epochs():
    found = plan(speed=1e-6)
    assert found.config.encoder.name == "resnet18"
    assert found.config.training.epochs == 800


def test_a_gpu_keeps_the_better_encoder_however_short_the_run():
    found = plan(CPU._replace(on_gpu=True, budget=600), speed=1e-3)
    assert found.config.encoder.name == "resnet18"
    assert found.config.training.epochs == int(540 / (7 * 256 * 0.05))
    # 42 steps: the divergence rises as on a CPU, but the rate and the batch stay.
    assert found.config.divergence.warmup_epochs == found.config.training.epochs / 2
    assert found.config.optimiser.learning_rate == 256 / 512


@pytest.mark.parametrize("budget", [60.0, 600.0, 3600.0])
def test_a_budget_is_kept(budget):
    found = plan(CPU._replace(budget=budget), speed=2e-3)
    assert 0.75 * budget < found.seconds <= budget
    warmup = found.config.optimiser.warmup_epochs
    assert warmup == pytest.approx(min(10, 0.05 * found.config.training.epochs), abs=0.01)


def test_a_budget_too_short_for_an_epoch_is_said():
    found = plan(CPU._replace(budget=1.0), speed=2e-3)
    assert found.config.training.epochs == 1
    whys = {choice.field: choice.why for choice in found.choices}
    assert (
        whys["training.epochs"]
        == "at least one, though it takes over 1 s; up to 800 improve the result"
    )


def test_one_step_is_no_plural():
    found = plan(CPU._replace(num_images=12), given={"training.epochs": 1})
    (why,) = [c.why for c in found.choices if c.field == "optimiser.learning_rate"]
    assert why.endswith("since 1 step and the images are few")


def test_what_is_given_stays():
    given = {
        "training.epochs": 7,
        "training.batch_size": 100,
        "encoder.name": "resnet34",
        "optimiser.learning_rate": 0.3,
        "divergence.num_subnetworks": 5000,
    }
    found = plan(given=given, speed=0.01)
    assert override(found.config, given) == found.config
    reasons = {choice.field: choice.why for choice in found.choices}
    assert {reasons[field] for field in given} == {"as given"}
    assert found.seconds == pytest.approx(7 * 20 * 100 * 0.5)


def test_the_table_is_what_differs_and_the_configuration_is_a_recipe():
    found = plan()
    assert from_toml(to_toml(found.config), "plan") == found.config
    named = {choice.field: choice.value for choice in found.choices}
    assert override(load_recipe("auto"), named) == found.config
    assert len(named) == len(found.choices)


def test_the_chosen_speed_is_measured_again_where_it_decides_the_length():
    """The first seconds were free of other programs; the longer look is what counts."""
    spent: list[float] = []

    def measure(config: Config, seconds: float) -> float:
        spent.append(seconds)
        slower = 0.01 if config.encoder.name == "small" else 1.0
        return slower * config.training.batch_size * (2.0 if seconds > 2.0 else 1.0)

    facts = CPU._replace(budget=600.0)
    found = make_plan(load_recipe("auto"), facts, {}, SIZE, measure)
    assert spent == [2.0, 2.0, 6.0, 6.0, 6.0]
    assert found.config.training.epochs == 13  # of 39.7 s each
    assert found.seconds < 600.0
    spent.clear()
    given = {"encoder.name": "small", "training.epochs": 3}
    make_plan(override(load_recipe("auto"), given), facts, given, SIZE, measure)
    assert spent == [2.0]  # the user decides the length


def test_programs_that_come_and_go_do_not_shorten_a_run():
    """Two of three looks meet a busy machine, on which a step takes fifty times as long."""
    busy = iter([1.0, 1.0, 50.0, 50.0, 1.0])

    def measure(config: Config, _: float) -> float:
        slower = 0.01 if config.encoder.name == "small" else 1.0
        return slower * config.training.batch_size * next(busy)

    found = make_plan(load_recipe("auto"), CPU._replace(budget=600.0), {}, SIZE, measure)
    assert found.config.training.epochs == 27  # of 19.8 s each


def test_a_budget_too_short_to_learn_is_said():
    found = plan(CPU._replace(budget=60.0), speed=0.03)  # 0.96 s a step of 32, 62 an epoch
    assert found.config.training.epochs == 1
    assert "only 62 steps, too few to learn much, and 1 min allows no more" in found.warning
    assert "--budget 18m allows 1,000" in found.warning  # 960 s are nine tenths of 17.8 min
    assert plan(CPU._replace(budget=600.0), speed=0.03).warning == ""
    given = {"training.epochs": 5}  # 90 steps, as asked for
    few = CPU._replace(num_images=607, budget=60.0)
    assert plan(few, speed=0.03, given=given).warning == ""
    slow = plan(CPU._replace(budget=60.0), speed=3.0).warning
    assert "--budget 30h allows 1,000" in slow


def test_a_batch_that_does_not_fit_is_halved():
    def measure(config: Config, _: float) -> float:
        if config.training.batch_size > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.01

    facts = CPU._replace(on_gpu=True)
    found = make_plan(load_recipe("auto"), facts, {}, SIZE, measure)
    assert found.config.training.batch_size == 64
    assert [c.why for c in found.choices if c.field == "training.batch_size"] == [
        "what fits in memory"
    ]
    given = {"training.batch_size": 512}
    with pytest.raises(torch.OutOfMemoryError):
        make_plan(override(load_recipe("auto"), given), facts, given, SIZE, measure)


def test_another_error_is_not_taken_for_a_full_memory():
    tried: list[int] = []

    def measure(config: Config, _: float) -> float:
        tried.append(config.training.batch_size)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        make_plan(load_recipe("auto"), CPU, {}, SIZE, measure)
    assert len(tried) == 1


def test_a_step_is_measured_in_proportion_to_the_batch(monkeypatch):
    clock = iter([*range(7), *range(10, 100)])  # one step takes four ticks
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    small = {"encoder.name": "small", "encoder.projection_hidden": 16, "data.image_size": 8}
    config = override(load_recipe("auto"), {**small, "training.batch_size": 256})
    # The others take one. On a CPU 16 of the 128 images of a process are measured.
    assert measure_step(config, (8, 8), torch.device("cpu"), processes=2, spend=20.0) == 8.0
    # So do the steps of which each adds up two batches.
    both = override(config, {"training.accumulate": 2})
    assert measure_step(both, (8, 8), torch.device("cpu"), processes=2, spend=20.0) == 8.0


def test_a_batch_is_measured_and_halved_by_what_the_method_needs():
    """W-MSE whitens groups of 128 images, more than the 16 that are measured on a CPU."""
    whitened = {
        "objective.name": "wmse",
        "encoder.name": "small",
        "encoder.embedding": 64,
        "encoder.projection_hidden": 16,
        "data.image_size": 8,
    }
    config = override(load_recipe("auto"), {**whitened, "training.batch_size": 256})
    assert measure_step(config, (8, 8), torch.device("cpu"), spend=0.0) > 0.0
    assert plan(speed=0.1).config.training.batch_size == 32
    assert plan(speed=0.1, given=whitened).config.training.batch_size == 128
