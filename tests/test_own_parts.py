"""Views, images, a method and callbacks of the user's own: trained, resumed, judged, refused."""

import functools
import random
from collections.abc import Callable as Function
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torchvision.transforms import v2

from deepbregman import (
    Callback,
    Objective,
    Outputs,
    build_head,
    cluster,
    draw_first_images,
    duplicates,
    embed,
    evaluate,
    explore,
    label,
    load_encoder,
    own_data,
    pretrain,
    resume,
    search,
)
from deepbregman.commands.pretrain import _check_callbacks
from deepbregman.config import Config, load_recipe, override
from deepbregman.data import open_source
from deepbregman.errors import UserError
from deepbregman.method.networks import Model
from deepbregman.objectives import (
    OwnParts,
    OwnViews,
    Samples,
    StepOutputs,
    ViewGroups,
    build_step,
)
from deepbregman.objectives.own import _check_forward, _check_hooks
from deepbregman.runs import Run
from deepbregman.training import loop, planning
from deepbregman.training.callbacks import collect_metrics
from deepbregman.training.diagnostics import RECORDED

SMALL: Mapping[str, Any] = {
    "data.holdout": 0.0,
    "training.epochs": 2,
    "training.batch_size": 50,
    "training.save_seconds": 0.0,
    "training.knn_every": 1,
    "training.health_every": 1,
    "training.tensorboard": False,
    "optimiser.warmup_epochs": 0.5,
    "encoder.projection_hidden": 16,
    "encoder.embedding": 8,
    "divergence.num_subnetworks": 4,
    "divergence.hidden": 4,
}


def darken_and_add_noise(images: Tensor) -> Tensor:
    """Draw from all of torch, NumPy and Python."""
    level = 0.5 + 0.25 * np.random.random() + 0.25 * random.random()
    darker = level * images.float() / 255
    return (darker + 0.1 * torch.rand_like(darker)).clamp(0, 1)


class Agreement(Objective):
    """Views agree, and embeddings keep their spread: a method in a few lines."""

    def __init__(self, encoder: Any, widths: Any) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"distance": 1.0, "variance": 0.5})

    def forward(self, views: ViewGroups[Tensor], gather: Any, samples: Samples) -> Outputs:
        h, z = self.embed(views.main)
        z = gather(z)
        terms = {
            "distance": (z[0] - z[1]).square().sum(dim=1).mean(),
            "variance": (1 - z.flatten(0, 1).std(dim=0)).clamp_min(0).mean(),
        }
        return Outputs(terms, student=z, teacher=None, representation=h.detach())


class Diary(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, run: Run, step: int, total_steps: int) -> None:
        self.events.append(("start", step, total_steps))

    def on_step(self, step: int, losses: Mapping[str, Tensor]) -> None:
        torch.rand(3)  # what a callback draws must not matter
        self.events.append(("step", step, sorted(losses)))

    def on_epoch(self, record: Mapping[str, Any], model: Model) -> Mapping[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        self.events.append(("epoch", record["epoch"], "knn" in record))
        return {"first_weight": next(model.encoder.parameters()).flatten()[0].item()}

    def on_end(self, run: Run) -> None:
        self.events.append(("end", "pretrain" in run.result()))


@pytest.fixture(scope="module")
def digits(few_digits) -> tuple[Tensor, Tensor]:
    train = open_source(few_digits, image_size=8).train
    assert train.labels is not None
    return train.images.pixels, train.labels


@pytest.fixture(scope="module")
def config() -> Config:
    return override(load_recipe("digits"), SMALL)


@pytest.fixture(scope="module")
def parts(digits) -> dict[str, Any]:
    return {"data": digits, "augment": darken_and_add_noise, "objective": Agreement}


@pytest.fixture(scope="module")
def diary() -> Diary:
    return Diary()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config, parts, diary) -> Run:
    folder = tmp_path_factory.mktemp("own") / "run"
    return pretrain(config, run=folder, callbacks=[diary], **parts)


def test_the_run_says_what_is_the_users(trained):
    config = trained.config
    assert config.views.custom
    assert (config.data.source, config.objective.name) == ("custom", "custom")
    own = trained.provenance()["own"]
    assert own["views"].endswith("darken_and_add_noise")
    assert own["objective"].endswith("Agreement")


def test_callbacks_see_every_step_and_epoch_and_add_metrics(trained, diary):
    # 160 of 200 digits: a fifth of labelled images is the test split.
    names = ["distance", "divergence", "total", "variance"]
    steps = [("step", step, names) for step in range(1, 7)]
    expected = [("start", 0, 6), *steps[:3], ("epoch", 1, True), *steps[3:], ("epoch", 2, True)]
    assert diary.events == [*expected, ("end", True)]
    weights = [row["first_weight"] for row in trained.metrics()]
    last = next(load_encoder(trained.path).trunk.parameters()).flatten()[0].item()
    assert weights[-1] == last
    assert weights[0] != last


def test_the_weight_of_the_settings_multiplies_all_its_terms(config):
    chosen = override(config, {"objective.name": "custom", "objective.weight": 3.0})
    step = build_step(chosen, own=OwnParts(objective=Agreement))
    assert step.objective.weights == {"distance": 3.0, "variance": 1.5}


def test_its_losses_are_weighed_and_logged(trained):
    for row in trained.metrics():
        terms = row["distance"] + 0.5 * row["variance"]
        weight = trained.config.divergence.weight
        assert row["total"] == pytest.approx(
            trained.config.objective.weight * terms + weight * row["divergence"], rel=1e-5
        )


def test_it_is_judged_on_the_same_or_other_images(trained, digits, few_digits):
    source = own_data(digits, image_size=8)
    mine = evaluate(trained, protocols=["knn"], source=source)
    other = evaluate(trained, protocols=["knn"], data=few_digits)
    assert mine[0]["value"] > 40.0
    assert other[0]["value"] > 40.0


@pytest.mark.usefixtures("without_umap")
def test_images_of_the_program_go_to_every_verb(trained, digits, tmp_path):
    source = own_data(digits, image_size=8)
    how: dict[str, Any] = {"source": source}
    shapes = embed(trained, tmp_path / "features.npz", **how)
    assert shapes["train_labels"] == (160,)
    given = {f"train:{i}": str(digits[1][i].item()) for i in range(60)}
    names = [f"train:{i}" for i in range(160)] + [f"test:{i}" for i in range(40)]
    assert list(label(trained, given, **how).names) == names
    assert search(trained, ["test:0"], k=2, **how).answers[0].query.name == "test:0"
    assert len(cluster(trained, 3, by=["features"], seeds=1, **how).names) == 200
    assert duplicates(trained, threshold=1.0, **how).threshold == 1.0
    first = draw_first_images(trained, out=tmp_path / "first.csv", suggest=9, **how)
    assert set(first.names) < set(names)
    explore(trained, tmp_path / "map.html", **how)
    assert (tmp_path / "map.html").exists()


def stop_after_an_epoch(monkeypatch: pytest.MonkeyPatch, start: Function[[], object]) -> None:
    write = loop.Pretraining._write_epoch

    def write_and_stop(self: loop.Pretraining, record: dict[str, object], *rest: Any) -> None:
        write(self, record, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Pretraining, "_write_epoch", write_and_stop)
        with pytest.raises(KeyboardInterrupt, match=r"with: deepbregman\.resume\(.*\) in Python"):
            start()


@pytest.mark.parametrize("as_array", [True, False])
@pytest.mark.parametrize(
    ("name", "rule"),
    [("data", "images of your program go to "), ("source", "it must be a data source, such as ")],
)
def test_bare_images_are_refused(trained, digits, tmp_path, name, rule, as_array):
    """``pretrain`` takes them, so people try it with the other functions, too."""
    how: dict[str, Any] = {name: digits[0].numpy() if as_array else digits}
    calls: dict[str, Function[[], object]] = {
        "evaluate": lambda: evaluate(trained, **how),
        "detect": lambda: evaluate(trained, protocols=["detect"], **how),
        "embed": lambda: embed(trained, tmp_path / "features.npz", **how),
        "label": lambda: label(trained, {"train:0": "a", "train:1": "b"}, **how),
        "first": lambda: draw_first_images(trained, out=tmp_path / "first.csv", **how),
        "search": lambda: search(trained, ["test:0"], **how),
        "cluster": lambda: cluster(trained, 3, **how),
        "duplicates": lambda: duplicates(trained, **how),
        "explore": lambda: explore(trained, tmp_path / "map.html", **how),
    }
    kind = "ndarray" if as_array else "tuple"
    words = rf"{name} is of the type {kind}: .*{rule}.*source=own_data\("
    for verb, call in calls.items():
        with pytest.raises(UserError, match=words):
            call()
        assert list(tmp_path.iterdir()) == [], verb


def test_resuming_is_to_the_bit(trained, tmp_path, config, parts, monkeypatch, refusal):
    told: dict[str, Any] = {"callbacks": [Diary()]}
    folder = tmp_path / "run"
    stop_after_an_epoch(monkeypatch, lambda: pretrain(config, run=folder, **told, **parts))
    said = refusal("pretrain", "--resume", folder)
    assert "data.source is 'custom'" in said
    assert "`data=` to deepbregman.pretrain and resume" in said
    for missing, words in (
        ("data", "data.source is 'custom'"),
        ("augment", "views.custom says that this part is your own code, .* as `augment=`"),
        ("objective", "objective.name says that .* as `objective=`"),
    ):
        rest = {name: part for name, part in parts.items() if name != missing}
        with pytest.raises(UserError, match=words):
            resume(folder, **told, **rest)
    other = {**parts, "data": (parts["data"][0].flip(-1), parts["data"][1])}
    with pytest.raises(UserError, match="trained on other images"):
        resume(folder, **told, **other)
    np.random.seed(7)  # what the program draws before does not matter
    resumed = resume(folder, **told, **parts)
    first, second = (load_encoder(run.path).state_dict() for run in (trained, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert resumed.metrics()[-1]["total"] == trained.metrics()[-1]["total"]


def test_another_method_than_the_one_trained_is_refused(tmp_path, config, parts, monkeypatch):
    class Wider(Agreement):
        def __init__(self, encoder: Any, widths: Any) -> None:
            super().__init__(encoder, widths)
            self.predictor = nn.Linear(8, 8)

    folder = tmp_path / "run"
    stop_after_an_epoch(monkeypatch, lambda: pretrain(config, run=folder, **parts))
    with pytest.raises(
        UserError, match=r"predictor.weight is missing.*and method if they are your own"
    ):
        resume(folder, **{**parts, "objective": Wider})


def test_a_run_without_such_parts_refuses_them(short_run, parts):
    for name, words in (
        ("augment", "`augment=` was given for views, but the run has no such part"),
        ("objective", "`objective=` was given for objective, but the run has no"),
        ("data", "was trained on 'digits' and goes on with that"),
    ):
        with pytest.raises(UserError, match=words):
            resume(short_run.path, **{name: parts[name]})


class TestViews:
    IMAGES = torch.randint(0, 256, (6, 3, 12, 10), dtype=torch.uint8)
    TRANSFORM = v2.Compose(
        [v2.RandomResizedCrop(8), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)]
    )

    def draw(self, views: OwnViews, seed: int = 0) -> Tensor:
        return views.draw(6, device="cpu", generator=torch.Generator().manual_seed(seed))

    def test_transforms_of_torchvision_draw_for_each_image(self):
        views = OwnViews(self.TRANSFORM, size=8, num_views=2)
        drawn = self.draw(views)
        same = self.IMAGES[:1].expand(6, -1, -1, -1)
        made = views(same, None, drawn)
        assert made.shape == (2, 6, 3, 8, 8)
        assert len(torch.unique(made.flatten(0, 1), dim=0)) == 12  # as a batch: 2
        # Two processes with three images each make the views of one with all six.
        halves = [
            views(self.IMAGES[part], None, drawn[:, part]) for part in (slice(3), slice(3, 6))
        ]
        assert torch.equal(views(self.IMAGES, None, drawn), torch.cat(halves, dim=1))

    def test_they_see_an_image_without_its_padding(self):
        seen: list[tuple[int, ...]] = []

        class Look(v2.Transform):
            def forward(self, image: Tensor) -> Tensor:
                seen.append(tuple(image.shape))
                return v2.functional.resize(image, [8, 8])

        sizes = torch.tensor([[12, 10], [5, 7]])
        OwnViews(Look(), 8, 1)(self.IMAGES[:2], sizes)
        assert seen == [(3, 12, 10), (3, 5, 7)]

    def test_a_call_repeats_itself_and_leaves_the_random_states(self):
        views = OwnViews(lambda x: darken_and_add_noise(x[..., :8, :8]), size=8, num_views=2)
        drawn = self.draw(views)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        first = views(self.IMAGES, None, drawn)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert (np.random.get_state()[1] == states[2]).all()
        random.seed(3)
        np.random.seed(3)
        torch.rand(5)
        assert torch.equal(views(self.IMAGES, None, drawn), first)

    @pytest.mark.parametrize("draw", [lambda: torch.rand(()), np.random.random, random.random])
    def test_views_and_steps_differ_whatever_the_code_draws_from(self, draw):
        views = OwnViews(lambda x: torch.full((len(x), 3, 8, 8), float(draw())), 8, 2)
        made = [views(self.IMAGES, None, self.draw(views, seed)) for seed in (0, 1)]
        assert len(torch.cat(made).unique()) == 4

    def test_uint8_becomes_float(self):
        views = OwnViews(lambda images: images[..., :8, :8], size=8, num_views=1)
        made = views(self.IMAGES)
        torch.testing.assert_close(made[0], self.IMAGES[..., :8, :8] / 255)

    def test_a_callable_may_take_sizes(self):
        sizes = torch.full((6, 2), 9)

        def crop(images: Tensor, sizes: Tensor) -> Tensor:
            assert sizes.eq(9).all()
            return images[..., :8, :8]

        assert OwnViews(crop, 8, 1)(self.IMAGES, sizes).shape == (1, 6, 3, 8, 8)
        with pytest.raises(UserError, match="second argument `sizes`"):
            OwnViews(lambda images: images, 8, 1)(self.IMAGES, sizes)

    @pytest.mark.parametrize(
        ("augment", "words"),
        [
            (lambda images: images, r"shape \(6, 3, 12, 10\): \(6, 3, 8, 8\) is expected"),
            (lambda images: images[:2], "is expected"),
            (lambda images: images[..., :8, :8] / 50, "leave out Normalize"),
            (lambda images: images[..., :8, :8] / 255 - 1, "leave out Normalize"),
            (lambda images: None, "returned a NoneType"),
            (lambda images: [images, images], "returned a list: .* called once for each view"),
            (v2.Compose([v2.Resize((8, 8)), v2.ToPILImage()]), "returned a Image"),
        ],
    )
    def test_what_is_no_view_is_refused(self, augment, words):
        with pytest.raises(UserError, match=words):
            OwnViews(augment, size=8, num_views=1)(self.IMAGES)

    def test_code_that_fails_says_what_it_was_given(self):
        with pytest.raises(ZeroDivisionError) as caught:
            OwnViews(lambda images: 1 // 0, size=8, num_views=1)(self.IMAGES)
        assert "uint8 tensor of shape (6, 3, 12, 10) on cpu" in caught.value.__notes__[0]

    def test_transforms_for_pil_images_fit_behind_one_that_makes_them(self):
        """Such as those of lightly, here without its normalisation."""
        transforms = pytest.importorskip("lightly.transforms")
        view = transforms.SimCLRViewTransform(input_size=8, normalize=None)
        made = OwnViews(v2.Compose([v2.ToPILImage(), view]), 8, 2)(self.IMAGES)
        assert made.shape == (2, 6, 3, 8, 8)


def test_an_augmentation_that_fails_leaves_no_run(tmp_path, config, few_digits):
    with pytest.raises(UserError, match="let it crop or resize to 8"):
        pretrain(config, run=tmp_path / "run", data=few_digits, augment=v2.RandomCrop(4))
    assert not (tmp_path / "run").exists()


def test_each_table_of_views_may_have_its_own(config):
    weak = override(config, {"weak_views": {}, "teacher": {}, "weak_views.custom": True})
    own = OwnParts(augment={"weak_views": darken_and_add_noise})
    step = build_step(weak, own=own)
    assert isinstance(step.views.weak, OwnViews)
    assert not isinstance(step.views.main, OwnViews)
    with pytest.raises(UserError, match="augment has 'strong_views': give one callable"):
        OwnParts(augment={"strong_views": darken_and_add_noise}).as_changes()
    with pytest.raises(UserError, match="augment has 3: give one callable"):
        OwnParts(augment=3).as_changes()


class Renamed(Agreement):
    """The same method with other names."""

    def __init__(self, encoder: Any, widths: Any, name: str = "spread", metric: str = "") -> None:
        super().__init__(encoder, widths)
        self.weights = {name: 1.0, "variance": 0.5}
        self.metric = metric

    def metrics(self) -> dict[str, Tensor]:
        return {self.metric: torch.zeros(())} if self.metric else {}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"name": "spread"}, "loss term 'spread'"),
        ({"name": "knn"}, "loss term 'knn'"),
        ({"name": "divergence"}, "loss term 'divergence'"),
        ({"name": "stopped"}, "loss term 'stopped'"),
        ({"name": "distance", "metric": "rankme"}, "metric 'rankme'"),
        ({"name": "distance", "metric": "distance"}, "metric 'distance'"),
    ],
)
def test_names_of_the_record_are_refused_before_the_first_step(
    tmp_path, config, parts, names, words
):
    objective = functools.partial(Renamed, **names)
    with pytest.raises(UserError, match=f"the method Renamed has a {words}"):
        pretrain(config, run=tmp_path / "run", **{**parts, "objective": objective})
    assert not (tmp_path / "run").exists()


def test_every_name_of_a_record_is_reserved(trained):
    terms = {"distance", "variance", "divergence", "first_weight"}
    for record in trained.metrics():
        assert set(record) <= RECORDED | terms


class Headless(Objective):
    def __init__(self, encoder: Any, widths: Any) -> None:
        head: Any = nn.Linear(encoder.num_features, 3)  # which is no sequence
        super().__init__(encoder, head, {"zero": 1.0})

    def forward(self, views: ViewGroups[Tensor], gather: Any, samples: Samples) -> Outputs:
        h, z = self.embed(views.main)
        assert samples.labels is not None
        return Outputs({"zero": z.square().mean()}, gather(z), None, h.detach())


def test_a_method_with_another_head_that_needs_labels(tmp_path, config, digits, few_digits):
    once = override(config, {"training.epochs": 1, "divergence.weight": 0.0})
    assert once.training.knn_every == 1
    run = pretrain(
        once,
        run=tmp_path / "run",
        data=digits,
        objective=Headless,
        changes={"objective.name": "custom", "objective.needs_labels": True},
    )
    rows = evaluate(run, protocols=["knn", "cluster"], data=few_digits)
    variants = " ".join(row["variant"] for row in rows)
    assert "divergence" not in variants
    assert "embeddings" not in variants


def test_the_divergence_beside_a_head_of_ones_own_is_not_evaluated(tmp_path, config, digits):
    """The subnetworks score embeddings of a projection that only the method's code knows."""
    changes = {"training.epochs": 1, "encoder.embedding": 3, "divergence.weight": 1.0}
    run = pretrain(
        override(config, {**changes, "training.knn_every": 0}),
        run=tmp_path / "run",
        data=digits,
        objective=Headless,
        changes={"objective.name": "custom", "objective.needs_labels": True},
    )
    with pytest.raises(UserError, match=r"no divergence network \(its projection is your own\)"):
        cluster(run, source=own_data(digits, image_size=8), by=["divergence"])


class Queued(Agreement):
    """Forgets to register its queue."""

    def __init__(self, encoder: Any, widths: Any) -> None:
        super().__init__(encoder, widths)
        self.queue = torch.zeros(3, 8)


class Misspelt(Agreement):
    """Its teacher would never move."""

    def after_steps(self, progress: float) -> None: ...


class Unsampled(Agreement):
    """Does not take the samples."""

    def forward(self, views: ViewGroups[Tensor], gather: Any) -> Outputs: ...


class Wordless(Objective):
    """Has nothing to compute."""

    def __init__(self, encoder: Any, widths: Any) -> None:
        super().__init__(encoder, nn.Sequential(), {"none": 1.0})


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, *parts: None,
        lambda self, views, gather, samples, extra=None: None,
        lambda self, a, b, c, /: None,
        staticmethod(lambda views, gather, samples: None),
    ],
)
def test_a_forward_may_take_its_arguments_in_any_way(forward):
    made = object.__new__(type("Other", (Objective,), {"forward": forward}))
    _check_forward(made)


def test_a_method_may_have_names_like_those_that_training_calls():
    class Both(Misspelt):
        metric = "cosine"

        def after_step(self, progress: float) -> None: ...

        def draw_pairs(self) -> None: ...

        def _draw(self) -> None: ...

    _check_hooks(Both)
    with pytest.raises(UserError, match="after_steps"):
        _check_hooks(Misspelt)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("simclr", "objective is 'simclr': .* a method of the package is a recipe"),
        (nn.Linear(2, 2), "give a subclass of deepbregman.Objective"),
        (lambda encoder, widths: nn.Linear(2, 2), "makes Linear with weights of no term"),
        (lambda encoder, widths: Objective(encoder, nn.Sequential(), {}), "of no term"),
        (
            lambda encoder, widths: Objective(nn.Identity(), nn.Sequential(), {"a": 1.0}),
            "another encoder",
        ),
        (
            lambda encoder, widths: Queued(encoder, widths),
            r"Queued keeps the tensor 'queue' of shape \(3, 8\) .*register_buffer\('queue', ",
        ),
        (
            lambda encoder, widths: Misspelt(encoder, widths),
            "Misspelt has a method after_steps, .* it calls after_step: rename it",
        ),
        (
            lambda encoder, widths: Unsampled(encoder, widths),
            r"Unsampled.forward takes \(views: .*, gather: .*\): .*\(views, gather, samples\)",
        ),
        (
            lambda encoder, widths: Wordless(encoder, widths),
            r"Wordless has no forward\(views, gather, samples\)",
        ),
    ],
)
def test_what_is_no_method_is_refused_before_the_images_are_read(tmp_path, config, make, words):
    class Unreadable:
        def __len__(self) -> int:
            raise AssertionError("read too early")

        def __getitem__(self, index: int) -> None: ...

    with pytest.raises(UserError, match=words):
        pretrain(config, run=tmp_path / "run", data=Unreadable(), objective=make)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made.terms["distance"], "Changed.forward returned Tensor: it must return"),
        (
            lambda made: made._replace(terms={"other": made.student.mean()}),
            "loss terms other: .* dict of distance",
        ),
        (
            lambda made: made._replace(terms={**made.terms, "distance": made.student[0, 0]}),
            r"loss term 'distance' as Tensor of shape \(8,\): .*take its mean",
        ),
        (lambda made: made._replace(student=made.student[..., :3]), "of width 3, .*takes 8"),
        (
            lambda made: made._replace(student=made.student[0]),
            r"student as Tensor of shape \(4, 8\): it must be .*\(M, N, d\)",
        ),
        (
            lambda made: made._replace(teacher=made.student[0]),
            r"teacher as Tensor of shape \(4, 8\)",
        ),
        (
            lambda made: made._replace(teacher=made.student[:, :3]),
            r"teacher of shape \(2, 3, 8\) beside a student of shape \(2, 4, 8\): .*same images",
        ),
        (
            lambda made: made._replace(representation=made.representation[0]),
            r"representation as Tensor of shape \(4, \d+\): it must be .*\(M, n, h\)",
        ),
        (lambda made: made._replace(representation=None), "representation as NoneType: .*a tensor"),
        (lambda made: made._replace(student=None), "student as NoneType: .*a tensor"),
        (
            lambda made: made._replace(terms=made.terms["distance"]),
            r"loss terms Tensor of shape \(\): they must be a dict of",
        ),
        (
            lambda made: made._replace(terms={**made.terms, "distance": 0.5}),
            "loss term 'distance' as float: it must be a scalar tensor",
        ),
    ],
)
def test_what_a_method_must_not_return(config, change, words):
    class Changed(Agreement):
        def forward(self, views: ViewGroups[Tensor], gather: Any, samples: Samples) -> Outputs:
            outputs: Outputs = change(super().forward(views, gather, samples))
            return outputs

    own = OwnParts(objective=Changed)
    step = build_step(override(config, own.as_changes()), own=own)
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    uniforms = ViewGroups(step.views.main.draw(4, device="cpu"))
    with pytest.raises(UserError, match=words):
        step(images, None, uniforms)


class Alone(Agreement):
    """One view is enough; if there is a teacher, its targets are of the same views."""

    teaches_same_views = True

    def forward(self, views: ViewGroups[Tensor], gather: Any, samples: Samples) -> Outputs:
        h, z = self.embed(views.main)
        z = gather(z)
        return Outputs({"distance": z.square().mean(), "variance": z.var()}, z, None, h.detach())


ALONE = {"views.num_views": 1, "divergence.weight": 1.0, "divergence.num_subnetworks": 8}
PROMISED = {"objective.has_teacher": True, "divergence.source": "bank", "views.num_views": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [({}, "1 views as student, .* needs two views"), (PROMISED, "2 views .* needs targets")],
)
def test_a_divergence_without_anything_to_compare_is_refused(config, changes, words):
    """An only view, or targets that a method has promised and does not return."""
    with pytest.raises(UserError, match=f"returned None as teacher and {words}"):
        step_alone(config, changes)


def test_a_teacher_beside_a_method_of_the_same_views_sees_others(config):
    """The targets are of the weak views, whatever the method's own would be of."""
    outputs = step_alone(config, {"teacher.momentum": 0.9, "weak_views.num_views": 1})
    assert outputs.losses[-1] > 0.0


def step_alone(config: Config, changes: dict[str, Any]) -> StepOutputs:
    own = OwnParts(objective=Alone)
    step = build_step(override(config, {**own.as_changes(), **ALONE, **changes}), own=own)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    uniforms = (None if g is None else g.draw(4, device="cpu") for g in step.views)
    outputs: StepOutputs = step(images, None, ViewGroups(*uniforms))
    return outputs


def test_a_method_that_trains_nothing(config):
    class Detached(Agreement):
        def forward(self, views: ViewGroups[Tensor], gather: Any, samples: Samples) -> Outputs:
            with torch.no_grad():
                return super().forward(views, gather, samples)

    own = OwnParts(objective=Detached)
    alone = override(config, {**own.as_changes(), "divergence.weight": 0.0})
    step = build_step(alone, own=own)
    uniforms = ViewGroups(step.views.main.draw(4, device="cpu"))
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(UserError, match="no loss term of Detached depends on a weight"):
        step(images, None, uniforms)
    with torch.no_grad():
        assert step(images, None, uniforms).total.isfinite()


@pytest.mark.parametrize("wrong", ["resnet18", nn.Linear])
def test_an_encoder_that_is_no_module(tmp_path, config, wrong):
    with pytest.raises(UserError, match=r"encoder is .*: give a torch.nn.Module, or name"):
        pretrain(config, run=tmp_path / "run", encoder=wrong)


@pytest.mark.parametrize("name", ["total", "verdict", "stopped"])
def test_a_metric_of_the_runs_own_is_refused(config, name):
    """Also one that this epoch does not have: its words would be numbers to the next reader."""

    class Wrong(Callback):
        def on_epoch(self, record: Mapping[str, Any], model: Model) -> Mapping[str, float]:
            return {name: 1.0}

    with pytest.raises(UserError, match=f"Wrong.on_epoch returned {name}, a name that the run's"):
        collect_metrics([Wrong()], {"epoch": 1}, build_step(config).model)


def test_two_callbacks_do_not_share_a_metric(config):
    class Same(Callback):
        def on_epoch(self, record: Mapping[str, Any], model: Model) -> Mapping[str, float]:
            return {"norm": 1.0}

    with pytest.raises(UserError, match=r"Same.on_epoch returned norm, a name that"):
        collect_metrics([Same(), Same()], {"epoch": 1}, build_step(config).model)


@pytest.mark.parametrize("wrong", [3.0, {"note": "words"}, {"norms": torch.rand(2)}])
def test_metrics_that_are_no_numbers_are_refused(config, wrong):
    class Wrong(Callback):
        def on_epoch(self, record: Mapping[str, Any], model: Model) -> Any:
            return wrong

    with pytest.raises(UserError, match=r"Wrong.on_epoch returned .* a dict of names and numbers"):
        collect_metrics([Wrong()], {"epoch": 1}, build_step(config).model)


def test_a_callback_may_end_the_run(tmp_path, config, few_digits):
    class Enough(Callback):
        def on_epoch(self, record: Mapping[str, Any], model: Model) -> None:
            if record["epoch"] == 2:
                self.stop = "two are enough"

    longer = override(config, {"training.epochs": 5, "training.save_seconds": 1e6})
    console = Console(record=True, width=200)
    run = pretrain(
        longer, run=tmp_path / "run", data=few_digits, callbacks=[Enough()], console=console
    )
    assert [row["epoch"] for row in run.metrics()] == [1, 2]
    assert run.result()["pretrain"]["stopped"] == "after epoch 2: two are enough"
    assert "stopped after epoch 2 of 5: two are enough" in console.export_text()
    load_encoder(run.path)  # it was saved, though no save was due
    assert len(resume(run.path).metrics()) == 2
    (run.path / "result.json").unlink()  # as if it had been killed before it wrote that
    assert len(resume(run.path, callbacks=[Enough()]).metrics()) == 2
    assert run.result()["pretrain"]["stopped"] == "after epoch 2: two are enough"


def test_an_event_that_nothing_calls_is_refused(tmp_path, config):
    class Lightning(Callback):
        def on_train_epoch_end(self) -> None: ...

    words = (
        "Lightning has on_train_epoch_end, .*: the events are on_end, on_epoch, on_start, on_step"
    )
    with pytest.raises(UserError, match=words):
        pretrain(config, run=tmp_path / "run", callbacks=[Lightning()])

    class Own(Callback):
        on_gpu = False  # no event

    _check_callbacks([Own()])


@pytest.mark.parametrize("wrong", [print, [print], "wandb", [Callback]])
def test_what_is_no_callback_is_refused_before_anything_is_read(tmp_path, config, wrong):
    with pytest.raises(UserError, match=r"callbacks is .*: give a list of deepbregman.Callback"):
        pretrain(config, run=tmp_path / "run", callbacks=wrong)
    with pytest.raises(UserError, match=r"callbacks is"):
        resume(tmp_path / "run", callbacks=wrong)
    assert not (tmp_path / "run").exists()


def test_auto_looks_at_images_of_the_program(tmp_path, digits, monkeypatch):
    monkeypatch.setattr(planning, "_MEASURED_SECONDS", 0.0)
    run = pretrain(
        "auto",
        data=digits,
        run=tmp_path / "run",
        changes={
            "training.epochs": 1,
            "encoder.name": "small",
            **{name: SMALL[name] for name in ("encoder.projection_hidden", "training.tensorboard")},
        },
    )
    assert run.config.data.image_size == 8


@pytest.mark.slow
def test_views_of_ones_own_go_with_a_compiled_step(tmp_path, config):
    known = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (100, 3, 8, 8), dtype=torch.uint8, generator=known)
    # At the usual rate, steps make a thousandth of a difference of 1e-6 in the weights.
    changes = {"training.health_every": 0, "optimiser.learning_rate": 1e-5}
    totals = []
    for compiled in ("yes", "no"):
        run = pretrain(
            override(config, {"training.compile": compiled, **changes}),
            run=tmp_path / compiled,
            data=images,
            augment=v2.RandomResizedCrop(8),
        )
        totals.append([row["total"] for row in run.metrics()])
    assert totals[0] == pytest.approx(totals[1], rel=1e-4)
