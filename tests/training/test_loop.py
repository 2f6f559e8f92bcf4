"""The loop: what it trains, what it writes, and that an interruption changes nothing."""

import importlib.metadata
import io
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from deepbregman.commands.embed import embed
from deepbregman.commands.evaluate import evaluate
from deepbregman.commands.pretrain import pretrain, resume
from deepbregman.config import override
from deepbregman.data import ArrayImages, open_source
from deepbregman.errors import UserError
from deepbregman.objectives import Step, build_step, build_views
from deepbregman.runs import Run
from deepbregman.training import checkpoints, display
from deepbregman.training.callbacks import Callback
from deepbregman.training.faults import Interrupted
from deepbregman.training.loop import Pretraining
from deepbregman.training.processes import launch
from deepbregman.training.randomness import count_steps

ONE_EPOCH = {"training.epochs": 1, "optimiser.warmup_epochs": 0.5}
CLOCK = {"images_per_second", "views_per_second", "peak_gigabytes"}
PLAIN_SGD = {
    "optimiser.name": "sgd",
    "optimiser.momentum": 0.0,
    "optimiser.weight_decay": 0.0,
    "optimiser.schedule": "constant",
    "optimiser.warmup_epochs": 0.0,
    "optimiser.learning_rate": 0.1,
}


def digits(count: int = 300) -> ArrayImages:
    images = open_source("digits", image_size=8).train.images.select(torch.arange(count))
    assert isinstance(images, ArrayImages)
    return images


def states(run: Run) -> dict[str, Any]:
    saved = checkpoints.load(run.last_checkpoint)
    moments = saved["optimiser"]["state"]
    flat = {f"optimiser.{i}.{k}": v for i, part in moments.items() for k, v in part.items()}
    return {**saved["objective"], **saved["divergence"], **flat}


def assert_identical(run: Run, reference: Run) -> None:
    """Parameters, buffers and moments to the bit; metrics without gaps, doubles or differences."""
    found, expected = states(run), states(reference)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])), name
    strip = [{k: v for k, v in row.items() if k not in CLOCK} for row in run.metrics()]
    assert strip == [
        {k: v for k, v in row.items() if k not in CLOCK} for row in reference.metrics()
    ]


def copy_step(job: Pretraining) -> Step:
    """Build a step of the same settings and weights; its pixels are normalised as the job's."""
    step = build_step(job.config, (0.0,) * 3, (1.0,) * 3)
    step.load_state_dict(job.step_module.state_dict())
    return step.train()


def assert_one_step(job: Pretraining, reference: Step) -> None:
    """The job's weights are those of a step of plain SGD on the reference's gradients."""
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        after = job.step_module.get_parameter(name)
        torch.testing.assert_close(after, parameter - 0.1 * parameter.grad)


class TestTraining:
    def test_one_step_is_the_methods_gradient_step(self, short_config, tmp_path):
        """SGD by hand on the objective's own loss, with the batch and views the loop drew."""
        config = override(
            short_config, {"training.epochs": 1, **PLAIN_SGD, "training.batch_size": 300}
        )
        job = Pretraining(config, digits(), launch("cpu"), tmp_path / "run")
        (batch,) = list(job.feed(0, 0))
        reference = copy_step(job)
        reference(
            batch.images, batch.sizes, job.share.draw_uniforms(job.step_module.views, 0)
        ).total.backward()
        job.fit()
        assert_one_step(job, reference)

    def test_loss_and_gradients_are_the_mean_over_accumulated_batches(self, short_config, tmp_path):
        config = override(
            short_config,
            {
                "training.epochs": 1,
                "training.batch_size": 150,
                "training.accumulate": 2,
                **PLAIN_SGD,
            },
        )
        job = Pretraining(config, digits(), launch("cpu"), tmp_path / "run")
        reference, totals = copy_step(job), []
        for part, batch in enumerate(job.feed(0, 0)):
            uniforms = job.share.draw_uniforms(job.step_module.views, part)
            total = reference(batch.images, batch.sizes, uniforms).total
            (total / 2).backward()
            totals.append(total.item())
        (record,) = job.fit().metrics()
        assert job.step == 1
        assert record["total"] == pytest.approx(sum(totals) / 2, rel=1e-5)
        assert_one_step(job, reference)

    def test_the_teacher_follows_the_weights_that_a_step_has_just_made(self, tiny_config, tmp_path):
        """By the recursion of its definition, from the student's weights after every step."""
        config = override(
            tiny_config,
            {
                **{"teacher.momentum": 0.5, "teacher.schedule": "cosine"},
                "weak_views.num_views": 1,
                **{"divergence.source": "bank", "divergence.compare": "match"},
                "divergence.smoothing": 0.2,
            },
        )
        students: list[Tensor] = []

        class Watch(Callback):
            def on_step(self, step: int, losses: Mapping[str, Tensor]) -> None:
                students.append(job.step_module.objective.projection[0].weight.detach().clone())

        watched = [Watch()]
        job = Pretraining(config, digits(64), launch("cpu"), tmp_path / "run", callbacks=watched)
        assert job.step_module.teacher is not None
        followed = job.step_module.teacher.network[1][0].weight
        expected = followed.detach().clone()
        job.fit()
        assert len(students) == 6
        for step, student in enumerate(students, start=1):
            momentum = 1.0 - 0.5 * (1.0 + math.cos(math.pi * step / 6)) / 2.0
            expected = momentum * expected + (1.0 - momentum) * student
        torch.testing.assert_close(followed, expected)

    def test_each_step_has_the_rate_and_the_weight_of_its_schedules(self, tiny_config, tmp_path):
        """Six steps, three of them of both warm-ups, by hand; an epoch's loss is their mean."""
        config = override(
            tiny_config,
            {
                **{"optimiser.schedule": "cosine", "optimiser.warmup_epochs": 1.5},
                **{"optimiser.learning_rate": 0.02, "divergence.warmup_epochs": 1.5},
                **{"objective.weight": 2.0, "divergence.weight": 3.0},
            },
        )
        rates, weights, totals = [], [], []

        class Watch(Callback):
            def on_step(self, step: int, losses: Mapping[str, Tensor]) -> None:
                rates.append(job.optimiser.param_groups[0]["lr"])
                rest = losses["total"] - 2.0 * losses["contrastive"]
                weights.append((rest / losses["divergence"]).item())
                totals.append(losses["total"].item())

        watched = [Watch()]
        job = Pretraining(config, digits(64), launch("cpu"), tmp_path / "run", callbacks=watched)
        records = job.fit().metrics()
        expected = [0.02 / 3, 0.04 / 3, 0.02, 0.02, 0.015, 0.005]  # cos 0, 60 and 120 degrees
        assert rates == pytest.approx(expected)
        assert [record["learning_rate"] for record in records] == pytest.approx(expected[1::2])
        assert weights == pytest.approx([1.0, 2.0, 3.0, 3.0, 3.0, 3.0], rel=1e-3)
        means = [
            (first + second) / 2 for first, second in zip(totals[::2], totals[1::2], strict=True)
        ]
        assert [record["total"] for record in records] == pytest.approx(means)

    def test_on_a_cpu_the_first_step_tells_that_a_run_is_long(
        self, short_config, tmp_path, monkeypatch
    ):
        """Of `best` at 64 px a step takes minutes, and the next one as long."""
        for limit in ("FIRST_SECONDS", "MEASURED_SECONDS", "LONG_SECONDS"):
            monkeypatch.setattr(display, limit, 0.0)
        config = override(short_config, ONE_EPOCH)
        job = Pretraining(config, digits(256), launch("cpu"), tmp_path / "run")
        assert job.total_steps == 2
        stream = io.StringIO()
        job.fit(console=Console(file=stream, width=80))
        assert stream.getvalue().count("at this speed the run takes another") == 1

    def test_an_epoch_visits_every_image_of_its_batches_once(self, short_config, tmp_path):
        images = ArrayImages(
            torch.arange(300).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
        )
        job = Pretraining(short_config, images, launch("cpu"), tmp_path / "run")
        epochs = [
            torch.cat([batch.images[:, 0, 0, 0] for batch in islice(job.feed(epoch, 0), 2)])
            for epoch in (0, 1)
        ]
        assert all(len(seen) == 256 for seen in epochs)  # two batches of 128
        assert not torch.equal(*epochs)
        wrapped = torch.arange(300).to(torch.uint8).bincount(minlength=256)
        assert all((seen.bincount(minlength=256) <= wrapped).all() for seen in epochs)

    def test_the_feed_goes_on_through_the_epochs_and_from_any_step(self, short_config, tmp_path):
        job = Pretraining(short_config, digits(), launch("cpu"), tmp_path / "run")
        whole = [batch.images for batch in job.feed(0, 0)]
        assert len(whole) == 4  # two epochs of two batches
        for step in range(4):
            rest = [batch.images for batch in job.feed(*divmod(step, 2))]
            assert len(rest) == 4 - step
            assert all(map(torch.equal, rest, whole[step:]))

    def test_it_learns(self, short_run):
        first, last = short_run.metrics()[0], short_run.metrics()[-1]
        assert last["total"] < first["total"]
        assert last["knn"] > 60.0  # ten classes: chance is 10

    def test_the_run_folder_is_complete(self, short_run, short_config):
        assert short_run.config == short_config
        assert [row["epoch"] for row in short_run.metrics()] == [1, 2]
        assert short_run.result()["pretrain"]["epoch"] == 2
        recorded = short_run.provenance()
        assert recorded["versions"]["torch"] == importlib.metadata.version("torch")
        assert recorded["device"].startswith("cpu")
        assert {"total", "contrastive", "divergence", "learning_rate", "alignment"} <= set(
            short_run.metrics()[0]
        )

    def test_same_seed_same_run_other_seed_other_run(self, tiny_config, tiny_run, tmp_path):
        torch.rand(7)  # the state of the process does not matter, to dropout neither
        again = pretrain(tiny_config, run=tmp_path / "again")
        assert_identical(again, tiny_run)
        other = pretrain(tiny_config, run=tmp_path / "b", changes={"seed": 1})
        assert other.metrics()[0]["total"] != tiny_run.metrics()[0]["total"]

    def test_dropout_beside_the_labelled_baseline_is_drawn_from_the_seed(
        self, tiny_config, tmp_path
    ):
        """The authors' subnetworks drop units, also beside Deep Divergence."""
        changes = {"objective.name": "deep_divergence", **ONE_EPOCH}
        config = override(tiny_config, {**changes, "objective.num_subnetworks": 4})
        runs = []
        for state in (1, 2):
            torch.manual_seed(state)
            runs.append(pretrain(config, run=tmp_path / f"{state}"))
        assert_identical(*runs)

    def test_neighbours_are_asked_every_second_epoch_as_set_and_at_the_end(self, tiny_run):
        assert ["knn" in row for row in tiny_run.metrics()] == [False, True, True]

    def test_checkpoints_are_kept_where_asked(self, tiny_run):
        names = sorted(path.name for path in tiny_run.checkpoints.iterdir())
        assert names == ["epoch-0002.pt", "last.pt", "previous.pt"]

    def test_simclr_has_no_subnetworks(self, tiny_config, tmp_path):
        config = override(tiny_config, {"divergence.weight": 0.0, **ONE_EPOCH})
        run = pretrain(config, run=tmp_path / "run")
        assert checkpoints.load(run.last_checkpoint)["divergence"] == {}
        assert "divergence" not in run.metrics()[0]

    def test_four_views_as_distributions_train(self, tiny_config, tmp_path):
        changes = {"views.num_views": 4, "divergence.sets": "halves", **ONE_EPOCH}
        run = pretrain(tiny_config, run=tmp_path / "run", changes=changes)
        assert run.metrics()[0]["divergence"] > 0.0

    def test_a_diverged_run_stops_and_says_so(self, tiny_config, tmp_path):
        changes = {"optimiser.name": "sgd", "optimiser.learning_rate": 1e30}
        with pytest.raises(UserError, match=r"the loss is not finite.*optimiser\.learning_rate"):
            pretrain(tiny_config, run=tmp_path / "run", changes=changes)

    @pytest.mark.parametrize(("active", "warned"), [(26.0, False), (25.0, True)])
    def test_few_subnetworks_are_counted_against_all_views_of_a_batch(
        self, short_config, tmp_path, active, warned
    ):
        """128 images in two views are 256 samples; a tenth of the 1000 subnetworks cannot win."""
        config = override(short_config, {"divergence.num_subnetworks": 1000})
        job = Pretraining(config, digits(), launch("cpu"), tmp_path / "run")
        record = {"effective_rank": 9.0, "spread": 0.9, "active_subnetworks": active}
        assert bool(job._warnings(record)) == warned

    def test_held_out_images_are_not_trained_on(self, short_config):
        from deepbregman.data.opening import select_images, split_for_monitor

        source = open_source("digits", image_size=8)
        kept, held_out = split_for_monitor(source.train, short_config)
        assert len(held_out) == round(0.1 * len(source.train))
        assert not set(kept.tolist()) & set(held_out.tolist())
        images = select_images(source, kept)
        assert torch.equal(images.pixels, source.train.images.pixels[kept])


class Sides(nn.Module):
    """A trunk that notes the sides of what it is shown, in training and where it is judged."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)
        self.seen: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}

    def forward(self, images: Tensor) -> Tensor:
        self.seen[self.training].add((len(images), images.shape[-1]))
        found: Tensor = self.layer(images).mean((2, 3))
        return found

    def __deepcopy__(self, memo: object) -> "Sides":
        return self  # so that the test sees what the copy saw


class TestSizeOfViews:
    def test_views_may_be_smaller_than_the_images_that_are_judged(self, tiny_config, tmp_path):
        trunk = Sides()
        changes = {"views.relative_size": 0.75, "encoder.name": "custom"}
        config = override(tiny_config, {**changes, "training.health_every": 0})
        pretrain(config, run=tmp_path / "run", encoder=trunk)
        assert trunk.seen[True] == {(64, 6)}  # two views of 32 images
        assert {side for count, side in trunk.seen[False] if count > 2} == {8}  # the kNN monitor
        trunk.seen[False].clear()
        rows = evaluate(tmp_path / "run", epochs=0, data="digits", encoder=trunk)
        assert rows
        assert {side for count, side in trunk.seen[False] if count > 2} == {8}
        trunk.seen[False].clear()
        embed(tmp_path / "run", tmp_path / "features.npz", encoder=trunk)
        assert {side for count, side in trunk.seen[False] if count > 2} == {8}
        assert trunk.seen[True] == {(64, 6)}

    @pytest.mark.parametrize(
        ("share", "side"), [(1.0, 8), (0.75, 6), (0.7, 6), (0.6875, 6), (0.5625, 5), (0.5, 4)]
    )
    def test_their_side_is_a_share_of_the_images(self, tiny_config, share, side):
        config = override(tiny_config, {"views.relative_size": share})
        assert config.view_size == side
        assert build_views(config.views, 8).size == side
        assert tiny_config.view_size == 8

    def test_an_encoder_of_one_size_only_is_refused_before_training(self, tiny_config, tmp_path):
        pytest.importorskip("timm")
        changes = {
            "data.image_size": 32,
            "views.relative_size": 0.5,
            "encoder.name": "timm:vit_tiny_patch16_224",
        }
        with pytest.raises(UserError, match=r"views.relative_size is 0.5 .*vit.*; set .* to 1.0"):
            pretrain(override(tiny_config, changes), run=tmp_path / "run")
        assert not (tmp_path / "run").exists()


class TestSteps:
    def test_short_batches_are_left_out(self, short_config):
        assert count_steps(short_config, 300) == 2
        assert count_steps(override(short_config, {"training.accumulate": 2}), 600) == 2

    def test_a_run_without_epochs_may_have_fewer_images_than_a_batch(self, short_config):
        assert count_steps(override(short_config, {"training.epochs": 0}), 100) == 1

    def test_processes_must_share_the_batch_evenly(self, short_config):
        with pytest.raises(UserError, match="multiple of their number"):
            count_steps(short_config, 300, world_size=3)

    def test_too_few_images_for_a_step_are_told_what_helps(self, short_config):
        """A batch of two is the smallest, so with one image there is nothing to lower."""
        several = override(short_config, {"training.batch_size": 8, "training.accumulate": 3})
        words = "batch_size 8 times training.accumulate 3 needs 24 images for a step, but there are"
        lower = "23 to pretrain on: lower it to 7 or less, or give more"
        with pytest.raises(UserError, match=f"{words} {lower}"):
            count_steps(several, 23)
        with pytest.raises(UserError, match="lower it to 6 or less"):  # two processes share it
            count_steps(several, 23, world_size=2)
        pair = override(short_config, {"training.batch_size": 2})
        with pytest.raises(UserError, match=r"2 needs 2 .* there is 1 to pretrain on: give more"):
            count_steps(pair, 1)


class TestResume:
    @pytest.mark.parametrize("stop_at", [1, 2, 3])
    def test_a_stopped_run_goes_on_to_the_bit(
        self, tiny_config, tiny_run, tmp_path, stop_after, stop_at
    ):
        """Stopped inside the first epoch, at its very end, and inside the second; with dropout."""
        with stop_after(stop_at), pytest.raises(Interrupted, match=r"SIGTERM.*--resume"):
            pretrain(tiny_config, run=tmp_path / "run")
        torch.manual_seed(6)  # dropout draws from torch's global state
        assert_identical(resume(tmp_path / "run"), tiny_run)

    @pytest.mark.parametrize("part", ["objective", "divergence", "optimiser", "step", "sums"])
    def test_a_checkpoint_that_lacks_a_part_is_refused(self, short_run, tmp_path, part):
        run = Run.create(tmp_path / "run", short_run.config, {})
        saved = checkpoints.load(short_run.last_checkpoint)
        del saved[part]
        checkpoints.save(run.last_checkpoint, saved)
        with pytest.raises(UserError, match=rf"last\.pt has no {part}: "):
            resume(run.path)

    def test_a_run_killed_before_its_first_save_starts_again(self, tiny_config, tiny_run, tmp_path):
        run = Run.create(tmp_path / "run", tiny_config, {"started": "once"})
        run.append_metrics({"epoch": 1, "total": 0.5})
        assert_identical(resume(run.path), tiny_run)
        assert len(run.provenance()["resumed"]) == 1

    def test_other_images_than_before_are_refused(self, short_config, tmp_path):
        job = Pretraining(short_config, digits(300), launch("cpu"), tmp_path / "run")
        job.fit()
        with pytest.raises(UserError, match=r"trained on 300 images.* now has 400"):
            Pretraining(short_config, digits(400), launch("cpu"), tmp_path / "run", resume=True)
        noise = ArrayImages(torch.randint_like(digits(300).pixels, 0, 256))
        with pytest.raises(UserError, match=r"contents differ.*put them back.*--encoder.weights"):
            Pretraining(short_config, noise, launch("cpu"), tmp_path / "run", resume=True)
        again = Pretraining(short_config, digits(300), launch("cpu"), tmp_path / "run", resume=True)
        assert again.step == job.step

    def test_a_complete_run_is_left_as_it_is(self, short_run):
        before = states(short_run)
        resume(short_run.path)
        assert all(torch.equal(torch.as_tensor(v), before[k]) for k, v in states(short_run).items())
        assert short_run.result()["pretrain"]["epoch"] == 2
