"""Training all weights: what an arm starts from, that it learns, repeats, and says what fails."""

import copy
import itertools
import json
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepbregman.commands.evaluate import evaluate
from deepbregman.data import ArrayImages, ResidentBatches
from deepbregman.errors import Diverged, UserError
from deepbregman.evaluation import retraining
from deepbregman.evaluation.features import build_crop_and_flip
from deepbregman.evaluation.options import Semi, Tuning
from deepbregman.evaluation.protocols import PROTOCOLS
from deepbregman.evaluation.retraining import (
    Budget,
    Classifier,
    draw_labelled,
    finetune,
    from_encoder,
    from_projection,
    from_scratch,
    predict,
)
from deepbregman.method.networks import Model, build_encoder
from deepbregman.method.views import Views
from deepbregman.training import checkpoints

LABELS = torch.arange(60) % 3
BUDGET = Budget(epochs=8, batch_size=20, learning_rate=0.05, weight_decay=1e-4)
VIEWS = Views(8, num_views=1, jitter_probability=0.0, greyscale=0.0)


def coloured(device: str = "cpu") -> ResidentBatches:
    """Noisy images, each of its class's colour: what a crop and a flip cannot hide."""
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 60, (60, 3, 8, 8), generator=random)
    pixels[torch.arange(60), LABELS] += 150
    return ResidentBatches(ArrayImages(pixels.to(torch.uint8)), torch.device(device))


def classifier(seed: int = 0) -> Classifier:
    torch.manual_seed(3)
    encoder = build_encoder("small", 8)
    return Classifier(encoder, encoder.num_features, 3, seed)


def tuned(seed: int = 0, **options: Any) -> Classifier:
    network = classifier()
    finetune(network, coloured(), LABELS, VIEWS, replace(BUDGET, **options), seed=seed)
    return network


class TestEngine:
    @pytest.mark.usefixtures("true_encoder")
    def test_learns_what_can_be_learned(self):
        logits = predict(tuned(), coloured(), 8)
        assert torch.equal(logits.argmax(1), LABELS)
        untrained = predict(classifier().eval(), coloured(), 8)
        assert (untrained.argmax(1) == LABELS).float().mean() < 0.7

    def test_the_same_seed_gives_the_same_bits_and_another_does_not(self):
        first, again, other = (tuned(seed, epochs=1).state_dict() for seed in (0, 0, 1))
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["linear.weight"], other["linear.weight"])

    def test_every_weight_moves_and_normalisation_learns(self):
        before = classifier().state_dict()
        after = tuned(epochs=1).state_dict()
        still = [name for name in before if torch.equal(before[name], after[name])]
        assert still == ["extractor.mean", "extractor.deviation"]  # of the pixels: no weights

    def test_a_step_is_torchs_nesterov_on_a_cosine(self):
        """Whole images, one batch in an epoch: a loop by hand, without the engine's machinery."""
        plain = Views(8, num_views=1, without=("crop", "flip", "jitter", "greyscale"))
        budget = Budget(epochs=3, batch_size=60, learning_rate=0.1, weight_decay=0.01)
        found, expected = classifier(), classifier()
        finetune(found, coloured(), LABELS, plain, budget, seed=0)
        decayed = [p for p in expected.parameters() if p.ndim > 1]
        spared = [p for p in expected.parameters() if p.ndim == 1]
        optimiser = torch.optim.SGD(
            [{"params": decayed, "weight_decay": 0.01}, {"params": spared}],
            lr=0.1,
            momentum=0.9,
            nesterov=True,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=3)
        (batch,) = coloured().iterate(torch.arange(60), 60)
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.cross_entropy(expected(batch.images), LABELS).backward()
            optimiser.step()
            schedule.step()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-3, atol=1e-4)

    def test_images_come_in_another_order_and_other_crops_each_time(self):
        """Of 60 images two batches of 25 are seen in an epoch; other ten are left out each time."""
        (whole,) = coloured().iterate(torch.arange(60), 60)
        seen, draws = [], []

        class Watched(Views):
            def forward(self, images: Tensor, sizes: Any = None, uniforms: Any = None) -> Any:
                seen.append((images[:, None] == whole.images).flatten(2).all(dim=2).int().argmax(1))
                draws.append(uniforms)
                return super().forward(images, sizes, uniforms)

        budget = replace(BUDGET, epochs=2, batch_size=25)
        finetune(classifier(), coloured(), LABELS, Watched(8, num_views=1), budget, seed=0)
        epochs = [torch.cat(seen[:2]).tolist(), torch.cat(seen[2:]).tolist()]
        assert [len(set(epoch)) for epoch in epochs] == [50, 50]
        assert set(epochs[0]) != set(epochs[1])
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))

    @pytest.mark.usefixtures("true_encoder")
    def test_only_the_given_images_are_trained_on(self):
        """Wrong labels elsewhere do no harm, nor does a batch larger than what is left."""
        indices = torch.arange(0, 60, 2)
        wrong = torch.full_like(LABELS, 2)
        wrong[indices] = LABELS[indices]
        network = classifier()
        options = replace(BUDGET, batch_size=1000, epochs=20)
        finetune(network, coloured(), wrong, VIEWS, options, seed=0, indices=indices)
        held_out = torch.arange(1, 60, 2)
        logits = predict(network, coloured(), 8, held_out)
        assert torch.equal(logits.argmax(1), LABELS[held_out])

    def test_a_diverged_loss_is_an_error_with_a_way_out(self):
        with pytest.raises(Diverged, match=r"diverged at learning rate 1e\+30; give a lower one"):
            tuned(learning_rate=1e30)

    def test_one_image_is_too_few(self):
        with pytest.raises(UserError, match="1 labelled images"):
            finetune(
                classifier(), coloured(), LABELS, VIEWS, BUDGET, seed=0, indices=torch.tensor([4])
            )

    def test_progress_counts_the_steps(self):
        seen: list[tuple[str, int, int]] = []
        arguments = (classifier(), coloured(), LABELS, VIEWS, replace(BUDGET, epochs=1))
        finetune(*arguments, seed=0, progress=lambda *at: seen.append(at), title="a title")
        assert seen == [("a title", step, 3) for step in (1, 2, 3)]

    def test_dropout_is_drawn_from_the_seed(self):
        """Whatever the global generator holds, which is left as it was."""

        def train(seed: int, state: int) -> Tensor:
            network = classifier()
            network.extractor = nn.Sequential(network.extractor, nn.Dropout(0.5))
            torch.manual_seed(state)
            finetune(network, coloured(), LABELS, VIEWS, replace(BUDGET, epochs=1), seed=seed)
            assert torch.equal(torch.get_rng_state(), torch.manual_seed(state).get_state())
            return network.linear.weight.detach()

        assert torch.equal(train(0, 1), train(0, 2))
        assert not torch.equal(train(0, 1), train(1, 1))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_the_host_never_waits_inside_an_epoch(self, no_host_sync, monkeypatch):
        """Every step of an epoch runs in a block where waiting is an error; the GPU learns too."""
        network, batches, labels = classifier().cuda(), coloured("cuda"), LABELS.cuda()
        finetune(network, batches, labels, VIEWS, BUDGET, seed=0, mixed=True)  # warm up
        assert (predict(network, batches, 8).argmax(1) == labels).float().mean() > 0.95
        guards: list[AbstractContextManager[None]] = []
        left: list[AbstractContextManager[None]] = []
        chain = batches.chain

        def guarded(orders: Any, size: int) -> Any:
            for batch in chain(orders, size):
                if not guards:  # from the first batch of an epoch to its last loss
                    guards.append(no_host_sync())
                    guards[0].__enter__()
                yield batch

        def leave(_title: str, done: int, _steps: int) -> None:
            if done % 3 == 0:  # the last step of an epoch
                left.append(guards.pop())
                left[-1].__exit__(None, None, None)

        monkeypatch.setattr(batches, "chain", guarded)
        finetune(network, batches, labels, VIEWS, BUDGET, seed=0, mixed=True, progress=leave)
        assert not guards
        assert len(left) == BUDGET.epochs


@pytest.fixture
def images() -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (5, 3, 8, 8), generator=random, dtype=torch.uint8)


class TestStarts:
    def test_the_encoder_is_the_runs(self, few, short_run):
        saved = checkpoints.load(short_run.last_checkpoint)["objective"]
        module, _ = from_encoder(few, 0)
        for name, value in module.state_dict().items():
            assert torch.equal(value, saved[f"encoder.{name}"])

    def test_the_projections_first_layer_by_hand(self, few, short_run, images):
        """Linear, batch norm with running statistics, ReLU, classifier: from the saved tensors."""
        saved = checkpoints.load(short_run.last_checkpoint)["objective"]
        network = Classifier(*from_projection(few, 0), 10, seed=4).eval()
        h = few.model.encoder(images)
        hidden = h @ saved["projection.0.weight"].T
        mean, variance = (saved[f"projection.1.running_{part}"] for part in ("mean", "var"))
        hidden = (hidden - mean) / (variance + 1e-5).sqrt()
        hidden = hidden * saved["projection.1.weight"] + saved["projection.1.bias"]
        expected = hidden.clamp_min(0) @ network.linear.weight.T + network.linear.bias
        torch.testing.assert_close(network(images), expected, rtol=1e-4, atol=1e-5)
        assert hidden.shape[1] == 32  # of short_config

    def test_from_scratch_is_random_and_seeded(self, few, images):
        first, again, other = (from_scratch(few, seed)[0] for seed in (0, 0, 1))
        assert torch.equal(first(images), again(images))
        assert not torch.equal(first(images), other(images))
        weights, trained = first.state_dict(), few.model.encoder.state_dict()
        same = [name for name in weights if torch.equal(weights[name], trained[name])]
        assert not any(name.endswith("conv.weight") or name == "trunk.0.weight" for name in same)

    def test_from_scratch_pixels_are_normalised_by_the_images_to_train_on(self, few):
        """Not by those of pretraining, which such a network has never seen."""
        pixels = few.source.train.images.pixels.double() / 255
        dark = replace(few.source.train, images=ArrayImages((255 * pixels / 3).round().byte()))
        module, _ = from_scratch(replace(few, source=replace(few.source, train=dark)), 0)
        for found, whole in ((module.mean, pixels.mean()), (module.deviation, pixels.std())):
            assert found.flatten().tolist() == pytest.approx([float(whole) / 3] * 3, rel=0.01)

    def test_training_an_arm_leaves_the_run_alone(self, few):
        before = copy.deepcopy(few.model.state_dict())
        for start in (from_encoder, from_projection):
            network = Classifier(*start(few, 0), 10, seed=0)
            views = build_crop_and_flip(few.config)
            finetune(
                network,
                few.train.batches,
                few.train.labels,
                views,
                replace(BUDGET, epochs=1),
                seed=0,
            )
        for name, value in few.model.state_dict().items():
            assert torch.equal(value, before[name])


class TestProtocols:
    def test_rows_of_every_protocol_have_the_same_keys(self, short_run, few_digits):
        checkpoint = short_run.last_checkpoint.read_bytes()
        protocols = ["knn", "linear", "semi", "transfer", "supervised"]
        others = {"detect", "retrieval", "cluster", "few", "ood", "corruptions"}
        assert {*protocols, *others} == set(PROTOCOLS)  # at the others' rows their tests look
        rows = evaluate(
            short_run, protocols=protocols, data=few_digits, epochs=1, semi=Semi(labels=(0.1,))
        )
        assert [row["protocol"] for row in rows if row["metric"] == "top1"] == [
            *["knn"] * 6,
            *["linear"] * 2,
            *["semi"] * 3,
            *["transfer"] * 3,
            "supervised",
        ]
        references = {"chance", "raw_pixels"}  # of the frozen encoder only
        assert len({tuple(sorted(row.keys() - references)) for row in rows}) == 1
        assert {row["data"] for row in rows} == {few_digits}
        kept = short_run.result()["evaluations"]  # other tests evaluate the run, too
        assert all(row in kept for row in json.loads(json.dumps(rows)))
        assert short_run.last_checkpoint.read_bytes() == checkpoint
        semi = [row for row in rows if row["protocol"] == "semi"]
        assert [row["variant"] for row in semi if row["metric"] == "top5"] == [
            "10 % labels, from encoder",
            "10 % labels, from projection layer 1",
            "10 % labels, supervised",
        ]
        for row in semi:
            assert (row["num_train"], row["num_test"], row["n"]) == (20, 100, 1)
            assert row["details"]["steps"] == 1
            assert row["details"]["batch_size"] == 20
        transfer = [row["variant"] for row in rows if row["protocol"] == "transfer"]
        assert transfer[::2] == ["linear, cached features", "fine-tuned", "supervised"]
        scratch = [row["value"] for row in rows if row["variant"] in ("supervised", "from scratch")]
        assert scratch[:2] == scratch[2:]  # the same arm, budget and seeds

    def test_epochs_depend_on_how_many_labels_there_are(self, short_run, monkeypatch):
        budgets: list[tuple[int, int]] = []

        def noted(network: nn.Module, batches: Any, *rest: Any, **options: Any) -> None:
            budgets.append((batches.num_images, rest[2].epochs))
            network.eval()

        monkeypatch.setattr(retraining, "finetune", noted)
        evaluate(short_run, protocols=["semi"])
        assert budgets == [(13, 60)] * 3 + [(130, 30)] * 3

    def test_each_seed_draws_its_own_labels_for_all_starts(
        self, short_run, few_digits, few, monkeypatch
    ):
        drawn, starts = [], []
        trained = next(few.model.encoder.parameters())

        def noted(network: Classifier, batches: Any, labels: Tensor, *_: Any, **__: Any) -> None:
            (batch,) = batches.iterate(torch.arange(20), 20)
            drawn.append(batch.images)
            assert labels.tolist() == [label for label in range(10) for _ in range(2)]
            is_deeper = isinstance(network.extractor, nn.Sequential)
            starts.append((torch.equal(next(network.parameters()), trained), is_deeper))
            network.eval()

        monkeypatch.setattr(retraining, "finetune", noted)
        semi = Semi(labels=(0.1,))
        evaluate(short_run, protocols=["semi"], data=few_digits, semi=semi, seed=4, seeds=2)
        assert starts == 2 * [(True, False), (True, True), (False, False)]
        for seed, found in ((4, drawn[:3]), (5, drawn[3:])):
            rows = draw_labelled(few.source, 0.1, seed)
            (batch,) = few.train.batches.iterate(rows, 20)
            assert all(torch.equal(images, batch.images) for images in found)
        assert not torch.equal(drawn[0], drawn[3])

    def test_a_method_without_our_projection_starts_from_the_others(
        self, short_run, few_digits, monkeypatch
    ):
        """As a method of the user's own may be."""

        def load(*words: Any, **options: Any) -> checkpoints.Trained:
            found = checkpoints.load_trained(*words, **options)
            return found._replace(model=Model(found.model.encoder, nn.Sequential(), None))

        monkeypatch.setattr("deepbregman.evaluation.inputs.load_trained", load)

        def variants(*starts: Any) -> list[str]:
            options = Semi(labels=(0.1,), starts=starts)
            rows = evaluate(short_run, protocols=["semi"], data=few_digits, epochs=1, semi=options)
            return [row["variant"] for row in rows if row["metric"] == "top1"]

        assert variants("encoder", "projection") == variants("encoder")
        assert variants("encoder") == ["10 % labels, from encoder"]
        with pytest.raises(
            UserError, match="--starts projection: this run has no trained projection"
        ):
            variants("projection")

    def test_the_rate_is_chosen_on_labels_held_out_of_the_given_ones(
        self, short_run, few_digits, monkeypatch
    ):
        """A rate that diverges is passed over, and the chosen one is used on all labels."""
        trained: list[tuple[float, int]] = []
        engine = retraining.finetune

        def noted(*arguments: Any, indices: Tensor | None, **options: Any) -> None:
            budget, labels = arguments[4], arguments[2]
            count = len(labels) if indices is None else len(indices)
            trained.append((budget.learning_rate, count))
            engine(*arguments, indices=indices, **options)

        monkeypatch.setattr(retraining, "finetune", noted)
        row = evaluate(
            short_run,
            protocols=["supervised"],
            data=few_digits,
            epochs=2,
            tuning=Tuning(learning_rate=(1e30, 1e-9, 0.1), batch_size=32),
        )[0]
        assert trained == [(1e-9, 160), (0.1, 160), (1e30, 160), (0.1, 200)]
        assert row["chosen"][0]["learning_rate"] == 0.1
        assert row["details"]["learning_rates"] == [1e30, 1e-9, 0.1]
        assert row["details"]["steps"] == 2 * 6  # of 32 images each, from 200
        with pytest.raises(Diverged, match="every --learning-rate"):
            evaluate(
                short_run,
                protocols=["supervised"],
                data=few_digits,
                epochs=1,
                tuning=Tuning(learning_rate=(1e29, 1e30)),
            )
