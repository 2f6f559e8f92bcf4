"""Methods that compare parts of images with the whole: against loops from their formulas."""

import math

import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor
from torch.nn import functional as F

from deepbregman.config import load_recipe
from deepbregman.config.methods import DIMSettings
from deepbregman.errors import UserError
from deepbregman.method.networks import build_encoder
from deepbregman.method.patches import cut_patches
from deepbregman.objectives import Samples, ViewGroups, build_step
from deepbregman.objectives.amdim import tell_places
from deepbregman.objectives.cpc import CPC, ContextNetworks, DirectedLinear, patch_info_nce
from deepbregman.objectives.dim import info_nce_of_places, jensen_shannon
from deepbregman.objectives.step import gather_alone
from deepbregman.objectives.teacher import Teacher

from ..conftest import normal
from .methods import configure, draw_views


def dot(a: list[float], b: list[float]) -> float:
    return sum(map(float.__mul__, a, b))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


Z, PLACES = normal(4, 3), normal(4, 5, 3, seed=1)
SCORES = [[[dot(z, place) for place in image] for image in PLACES.tolist()] for z in Z.tolist()]


def test_jensen_and_shannons_estimate():
    own = [softplus(-s) for i in range(4) for s in SCORES[i][i]]
    others = [softplus(s) for i in range(4) for j in range(4) if i != j for s in SCORES[i][j]]
    assert float(jensen_shannon(Z, PLACES)) == pytest.approx(mean(own) + mean(others), rel=1e-9)


def test_losses_of_places_are_in_float32_after_scores_in_bfloat16():
    """A million scores are bfloat16 products where a run is mixed; what follows is exact."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for loss in (jensen_shannon, info_nce_of_places):
            found = loss(Z.float(), PLACES.float())
            assert found.dtype == torch.float32
            assert float(found) == pytest.approx(float(loss(Z, PLACES)), rel=0.02)
        predicted, own, others = normal(6, 3), normal(6, 3, seed=1), normal(5, 3, seed=2)
        itself = torch.zeros(6, 5, dtype=torch.bool)
        exact = patch_info_nce(predicted, own, others, itself)
        found = patch_info_nce(predicted.float(), own.float(), others.float(), itself)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("stage", [1, 3])
def test_deep_infomax_compares_the_whole_of_a_view_with_places_of_one_stage(stage):
    objective = build_step(configure("dim", **{"objective.stage": stage})).double().objective.eval()
    views = draw_views(2, 3)
    losses = []
    for view in views:
        h, maps = objective.encoder.encode_with_maps(view)
        places = objective.local_head(maps[stage - 1]).flatten(2).transpose(1, 2)
        losses.append(jensen_shannon(objective.projection(h), places))
    found = objective(ViewGroups(views), gather_alone, Samples()).terms["infomax"]
    torch.testing.assert_close(found, sum(losses) / 2, rtol=1e-9, atol=0.0)


def cross_entropies(scores: list[list[list[float]]]) -> float:
    losses = []
    for i in range(len(scores)):
        others = sum(math.exp(s) for j, row in enumerate(scores[i]) if j != i for s in row)
        losses += [-math.log(math.exp(s) / (math.exp(s) + others)) for s in scores[i][i]]
    return mean(losses)


def test_own_places_among_those_of_other_images():
    assert float(info_nce_of_places(Z, PLACES)) == pytest.approx(cross_entropies(SCORES), rel=1e-9)


def test_amdim_bounds_its_scores_and_punishes_large_ones():
    raw = [[[s / math.sqrt(3) for s in image] for image in row] for row in SCORES]
    bounded = [[[2.0 * math.tanh(s / 2.0) for s in image] for image in row] for row in raw]
    loss, square = tell_places(Z, PLACES, 2.0)
    assert float(loss) == pytest.approx(cross_entropies(bounded), rel=1e-9)
    assert float(square) == pytest.approx(
        mean([s**2 for row in raw for image in row for s in image]), rel=1e-9
    )


def test_amdim_sums_its_three_comparisons_and_their_penalties():
    """Across views in both directions: whole and coarse, whole and fine, one coarse and coarse."""
    objective = build_step(configure("amdim")).double().objective.eval()
    views, random = draw_views(2, 3), torch.rand(3, dtype=torch.float64)
    terms = objective(ViewGroups(views), gather_alone, Samples(random=random)).terms
    whole, coarse, fine = [], [], []
    for view in views:
        h, maps = objective.encoder.encode_with_maps(view)
        whole.append(objective.projection(h).tolist())
        for head, found, part in (
            (objective.coarse_head, coarse, maps[3]),
            (objective.fine_head, fine, maps[2]),
        ):
            found.append(head(part).flatten(2).transpose(1, 2).tolist())
    one = [[image[int(r * len(image))] for image, r in zip(v, random, strict=True)] for v in coarse]
    loss = penalty = 0.0
    for query, places in ((whole, coarse), (whole, fine), (one, coarse)):
        for a, b in ((0, 1), (1, 0)):
            raw = [
                [[dot(q, place) / math.sqrt(len(q)) for place in image] for image in places[b]]
                for q in query[a]
            ]
            bounded = [[[20 * math.tanh(s / 20) for s in image] for image in row] for row in raw]
            loss += cross_entropies(bounded) / 2
            penalty += mean([s**2 for row in raw for image in row for s in image]) / 2
    assert terms["infomax"].item() == pytest.approx(loss, rel=1e-9)
    assert terms["penalty"].item() == pytest.approx(penalty, rel=1e-9)


def test_a_patch_is_found_among_others_drawn_at_random():
    predicted, own, others = normal(3, 4), normal(3, 4, seed=1), normal(5, 4, seed=2)
    itself = torch.zeros(3, 5, dtype=torch.bool)
    itself[2, 1] = True
    expected = 0.0
    for i, p in enumerate(predicted.tolist()):
        mine = math.exp(dot(p, own[i].tolist()))
        rest = [math.exp(dot(p, o)) for j, o in enumerate(others.tolist()) if not itself[i, j]]
        expected -= math.log(mine / (mine + sum(rest))) / 3
    found = patch_info_nce(predicted, own, others, itself).mean()
    assert float(found) == pytest.approx(expected, rel=1e-9)


def sum_up_above(objective: CPC, turn: int, z: Tensor) -> Tensor:
    """The context network of one direction, by plain convolutions: (N, d, G, G) to the same."""
    width = z.shape[1]
    for block in objective.contexts.blocks:
        layers = [(part.weight[turn].T, part.bias[turn]) for part in (block[0], block[3], block[5])]
        (first, a), (middle, b), (last, c) = layers
        found = F.relu(F.conv2d(z, first[..., None, None], a))
        kernel = middle.reshape(width, 3, 2, width).permute(0, 3, 2, 1)  # columns, rows, channels
        found = F.relu(F.conv2d(F.pad(found, (1, 1, 1, 0)), kernel, b))
        z = z + F.conv2d(found, last[..., None, None], c)
    return z


def predict_by_loops(objective: CPC, views: Tensor, random: Tensor) -> Tensor:
    """CPC's loss, one direction, view, step and prediction after the other."""
    settings, side = objective.settings, objective.encoder.patch
    losses = []
    grids = []
    for view in views.flatten(0, 1):
        starts = range(0, view.shape[-1] - side + 1, side // 2)
        grids += [view[:, i : i + side, j : j + side] for i in starts for j in starts]
    z = objective.projection(objective.encoder(torch.stack(grids)))
    grid = math.isqrt(len(grids) // views.shape[0] // views.shape[1])
    z = z.view(*views.shape[:2], grid, grid, -1)
    for turn in range(settings.directions):
        for view in torch.rot90(z, turn, (2, 3)):  # (N, G, G, d)
            context = sum_up_above(objective, turn, view.movedim(-1, 1)).movedim(1, -1)
            flat = [(n, i, j) for n in range(len(view)) for i in range(grid) for j in range(grid)]
            chosen = [flat[int(r * len(flat))] for r in random.tolist()]
            of_steps = []
            for step in range(settings.steps):
                weight = objective.predictors.weight[turn].unflatten(1, (settings.steps, -1))
                of_step = []
                for n, i, j in flat:
                    if i < step + 2:
                        continue
                    guess = context[n, i - step - 2, j] @ weight[:, step]
                    others = [guess @ view[place] for place in chosen if place != (n, i, j)]
                    scores = torch.stack([guess @ view[n, i, j], *others])
                    of_step.append(scores.logsumexp(0) - scores[0])
                of_steps.append(torch.stack(of_step).mean())
            losses.append(torch.stack(of_steps).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("directions", [1, 4])
def test_cpc_at_once_is_cpc_by_loops(directions):
    """Directions, steps and negatives in batched products: the same loss and gradients."""
    changes = {"directions": directions, "steps": 2, "layers": 2, "patch": 0.4, "negatives": 9}
    config = configure("cpc", **{f"objective.{key}": value for key, value in changes.items()})
    objective = build_step(config).double().objective
    views, random = draw_views(2, 3), torch.rand(9, dtype=torch.float64)
    found = objective(ViewGroups(views), gather_alone, Samples(random=random)).terms["prediction"]
    expected = predict_by_loops(objective, views, random)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    weights = dict(objective.named_parameters())
    gradients = [torch.autograd.grad(loss, list(weights.values())) for loss in (found, expected)]
    for name, mine, theirs in zip(weights, *gradients, strict=True):
        assert theirs.any(), name
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12, msg=name)


def test_gradients():
    z, places = Z.clone().requires_grad_(), PLACES.clone().requires_grad_()
    for loss in (jensen_shannon, info_nce_of_places):
        assert torch.autograd.gradcheck(loss, (z, places))
    assert torch.autograd.gradcheck(lambda a, b: tell_places(a, b, 2.0), (z, places))
    itself = torch.zeros(4, 5, dtype=torch.bool)
    inputs = (z, Z.flip(0).requires_grad_(), normal(5, 3, seed=2).requires_grad_(), itself)
    assert torch.autograd.gradcheck(patch_info_nce, inputs)


def test_layers_of_directions_start_as_linear_layers():
    torch.manual_seed(0)
    layer, theirs = DirectedLinear(4, 100, 60), torch.nn.Linear(100, 240)
    for mine, expected in ((layer.weight, theirs.weight), (layer.bias, theirs.bias)):
        parts = (values.detach().flatten().numpy() for values in (mine, expected))
        assert ks_2samp(*parts).pvalue > 1e-3


def test_a_context_sees_the_rows_above_and_its_own_and_none_below():
    torch.manual_seed(0)
    network = ContextNetworks(2, 3, 2).double()
    z = normal(2, 1, 5, 5, 3).requires_grad_()
    network(z)[1, 0, 3, 2].sum().backward()
    assert not z.grad[0].any()  # another direction
    seen = z.grad[1, 0].abs().sum(dim=2) > 0
    assert seen[4].tolist() == [False] * 5
    assert seen[1:4].any(dim=1).all()  # two blocks reach two rows up
    assert not seen[0].any()
    assert seen[3].tolist() == [True] * 5


def test_patches_overlap_as_asked():
    images = normal(2, 3, 10, 10)
    found = cut_patches(images, 4, 2)
    assert found.shape == (2, 4, 4, 3, 4, 4)
    for row in range(4):
        for column in range(4):
            expected = images[:, :, 2 * row : 2 * row + 4, 2 * column : 2 * column + 4]
            assert torch.equal(found[:, row, column], expected)


def test_cpc_predicts_only_what_it_has_not_seen():
    """Changing the last row of patches leaves the context of the first row as it was."""
    objective = (
        build_step(configure("cpc", **{"objective.directions": 1})).double().objective.eval()
    )
    views, random = draw_views(1, 4), torch.rand(20, dtype=torch.float64)
    seen = []
    objective.contexts.register_forward_hook(lambda *call: seen.append(call[2].detach()))
    for part in (views, torch.cat([views[..., :6, :], views[..., 6:, :] + 1.0], dim=-2)):
        objective(ViewGroups(part), gather_alone, Samples(random=random))
    assert torch.equal(seen[0][:, :, 0], seen[1][:, :, 0])
    assert not torch.equal(seen[0][:, :, 2], seen[1][:, :, 2])


def test_a_teacher_of_cpc_embeds_as_the_student_does():
    """By the mean of the patches, each of which the network sees by itself."""
    objective = build_step(configure("cpc")).double().objective
    views, random = draw_views(2, 4), torch.rand(20, dtype=torch.float64)
    outputs = objective(ViewGroups(views), gather_alone, Samples(random=random))
    teacher = Teacher(objective.join_student())
    found = objective.embed_by(teacher, views, gather_alone)
    torch.testing.assert_close(found, outputs.student.detach(), rtol=1e-12, atol=1e-12)


def test_cpc_keeps_an_encoder_of_patches():
    """Whole images would meet weights that no patch ever reached."""
    objective = build_step(configure("cpc", **{"data.image_size": 16})).double().objective.eval()
    views, random = draw_views(1, 2, 16), torch.rand(20, dtype=torch.float64)
    encoder = objective.encoder
    assert encoder.patch == 8
    for image, found in zip(views[0], encoder(views[0]), strict=True):
        patches = [image[:, i : i + 8, j : j + 8] for i in (0, 4, 8) for j in (0, 4, 8)]
        expected = sum(encoder.trunk(encoder.normalise(patch[None]))[0] for patch in patches) / 9
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    trained = objective(ViewGroups(views), gather_alone, Samples(random=random)).representation
    torch.testing.assert_close(encoder(views[0]), trained[0], rtol=1e-9, atol=1e-12)


def test_cpc_is_evaluated_by_the_embedding_that_it_trains():
    """The mean of the patches' embeddings, not the embedding of their mean."""
    step = build_step(configure("cpc")).double().eval()
    views, random = draw_views(1, 4), torch.rand(20, dtype=torch.float64)
    outputs = step.objective(ViewGroups(views), gather_alone, Samples(random=random))
    h, z, _ = step.model(views[0])
    torch.testing.assert_close(z, outputs.student[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(h, outputs.representation[0], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(z, step.objective.projection(h))


@pytest.mark.parametrize(("size", "patches"), [(12, 25), (8, 9), (4, 1), (3, 1)])
def test_a_teacher_of_cpc_cuts_views_of_any_side_once(size, patches):
    """Into patches of as many pixels as the student sees."""
    objective = build_step(configure("cpc")).double().objective.eval()
    teacher = Teacher(objective.join_student())
    shapes = []
    encoder = teacher.network[0]
    encoder.trunk.register_forward_hook(lambda *call: shapes.append(call[1][0].shape))
    views = draw_views(2, 3, size)
    found = objective.embed_by(teacher, views, gather_alone)
    side = min(size, 4)
    assert shapes == [(6 * patches, 3, side, side)]
    starts = range(0, size - side + 1, 2)
    cut = [views[1, 2, :, i : i + side, j : j + side] for i in starts for j in starts]
    expected = objective.projection(objective.encoder(torch.stack(cut))).mean(dim=0)
    torch.testing.assert_close(found[1, 2], expected.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["small", "resnet18", "resnet50"])
def test_maps_come_from_the_same_pass_as_the_representation(name):
    torch.manual_seed(0)
    encoder = build_encoder(name, 16, mean=(0.5,) * 3, deviation=(0.2,) * 3).eval()
    images = torch.rand(2, 3, 16, 16)
    h, maps = encoder.encode_with_maps(images)
    assert torch.equal(h, encoder(images))
    assert tuple(part.shape[1] for part in maps) == encoder.stage_widths
    torch.testing.assert_close(maps[-1].mean(dim=(2, 3)), h)
    sides = [part.shape[-1] for part in maps]
    assert sides == sorted(sides, reverse=True)


def test_encoders_without_maps_are_refused_by_name():
    words = r"objective.name is '{}' with encoder.name 'timm:resnet10t': the method takes only res"
    for name in ("dim", "amdim", "cpc", "pirl", "cmc"):
        with pytest.raises(UserError, match=words.format(name)):
            configure(name, **{"encoder.name": "timm:resnet10t"})
    encoder = build_encoder("small", 8)
    encoder.trunk = torch.nn.Flatten()
    assert encoder.stage_widths == ()
    with pytest.raises(ValueError, match="a Flatten has no stages"):
        encoder.encode_with_maps(torch.zeros(1, 3, 8, 8))


def test_too_few_rows_to_predict_are_refused_by_name():
    with pytest.raises(UserError, match=r"objective.patch is 0.5 .* patches of 4 px make 3 rows"):
        configure("cpc", **{"objective.steps": 2})
    with pytest.raises(UserError, match=r"objective.patch is 0.1 .* patches of 1 px make 0 rows"):
        configure("cpc", **{"objective.patch": 0.1})


def measure_sight(stage: int) -> int:
    """Rows of an image of 32 px that a part of ResNet-18 sees, where no part knows of others."""
    torch.manual_seed(0)
    encoder = build_encoder("resnet18", 32).eval()
    images = torch.rand(1, 3, 32, 32, requires_grad=True)
    features = encoder.encode_with_maps(images)[1][stage - 1]
    middle = features.shape[-1] // 2
    (gradient,) = torch.autograd.grad(features[..., middle, middle].square().sum(), images)
    rows = gradient.abs().sum(dim=(0, 1, 3)).nonzero().flatten()
    return int(rows[-1] - rows[0]) + 1


def test_parts_of_deep_infomax_see_a_part_of_the_image():
    """Else a part knows the whole, and there is little to learn."""
    objective = load_recipe("dim").objective
    assert isinstance(objective, DIMSettings)
    assert measure_sight(objective.stage) == 11
    assert measure_sight(2) == 25
    assert measure_sight(3) == 32  # all of it
