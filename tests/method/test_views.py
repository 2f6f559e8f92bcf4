import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, ks_2samp
from torch import Tensor
from torchvision import transforms as tv1
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from deepbregman.method import views as operators
from deepbregman.method.colours import greyscale_images, jitter_images, solarise_images
from deepbregman.method.views import OPERATORS, ViewParameters, Views, centre_view

BILINEAR = InterpolationMode.BILINEAR
# Both sides compute in float32 in a different order: a few units in the last place of 1 (6e-8).
ATOL = 1e-5


def pictures(num_images: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Noise on waves: flat, smooth and rough places, all grey levels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_images, channels, height, width)
    noise = torch.randint(0, 256, shape, generator=generator)
    x, y = torch.arange(width) / width, torch.arange(height).unsqueeze(-1) / height
    phase = 6 * torch.rand((num_images, channels, 1, 1), generator=generator)
    wave = 127.5 + 150 * torch.sin(6 * (x + y) + phase)
    share = torch.rand((num_images, 1, 1, 1), generator=generator)
    return (share * noise + (1 - share) * wave).clamp(0, 255).to(torch.uint8)


def colours(num_images: int, channels: int, size: int, seed: int = 0) -> Tensor:
    """Float pictures in [0, 1] with exact black, white, grey and primary patches in the first."""
    images = pictures(num_images, channels, size, size, seed).float() / 255
    images[0, :, :4, :4] = 0
    images[0, :, :4, 4:8] = 1
    images[0, :, 4:8, :4] = 0.5
    images[0, 0, 4:8, 4:8] = 1
    images[0, 1:, 4:8, 4:8] = 0
    return images


def assert_same_law(actual: Tensor, expected: Tensor) -> None:
    """Kolmogorov-Smirnov; its asymptotic form is conservative for whole numbers."""
    test = ks_2samp(actual.flatten().numpy(), expected.flatten().numpy(), method="asymp")
    assert test.pvalue > 1e-3, test


def close(actual: Tensor, expected: Tensor, atol: float = ATOL) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def all_sizes(images: Tensor) -> Tensor:
    return torch.tensor([images.shape[-2:]] * len(images))


def sample(views: Views, num_images: int, height: int, width: int, seed: int = 0) -> ViewParameters:
    uniforms = views.draw(num_images, device="cpu", generator=torch.Generator().manual_seed(seed))
    return views.parametrise(uniforms, torch.tensor([[height, width]]).expand(num_images, 2))


def reference(image: Tensor, size: int, p: dict[str, Tensor], kernel: int) -> Tensor:
    """One view of one float image by torchvision's functional operators."""
    box = [int(p[name]) for name in ("top", "left", "height", "width")]
    view = tv.resized_crop(image, *box, [size, size], interpolation=BILINEAR, antialias=True)
    if p["flipped"]:
        view = tv.horizontal_flip(view)
    view = tv.rotate(view, float(p["angle"]), interpolation=BILINEAR)
    adjust = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    factors = [float(p[name]) for name in ("brightness", "contrast", "saturation", "hue")]
    for step in p["order"].tolist():
        view = adjust[step](view, factors[step])
    if p["grey"] and image.shape[0] == 3:
        view = tv.rgb_to_grayscale(view, 3)
    if p["blurred"]:
        view = tv.gaussian_blur(view, [kernel, kernel], [float(p["blur_sigma"])] * 2)
    if p["solarised"]:
        view = tv.solarize(view, 0.5)
    return view


# ---- each operator against torchvision

# Float32 has positions up to 500 pixels; half precision, as on a GPU, may cost an operator half a
# level of 255, as rounding to uint8 does.
PRECISIONS = [(torch.float32, 5e-5), (torch.float16, 0.5 / 255)]


@pytest.mark.parametrize("size", [9, 32, 56])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (45, 80), (130, 61)])
@pytest.mark.parametrize("channels", [1, 3])
def test_crop_and_flip(size, height, width, channels):
    images = pictures(12, channels, height, width)
    views = Views(size, crop_area=(0.02, 1.0), without=("jitter", "greyscale"))
    parameters = sample(views, 12, height, width)
    actual = views.render(images, parameters)
    assert parameters.flipped.any()
    assert not parameters.flipped.all()
    for m, n in itertools.product(range(2), range(12)):
        box = [int(value[m, n]) for value in parameters[:4]]
        expected = tv.resized_crop(
            images[n].float() / 255, *box, [size, size], interpolation=BILINEAR, antialias=True
        )
        close(actual[m, n], expected.flip(-1) if parameters.flipped[m, n] else expected)


@pytest.mark.parametrize(("precision", "error"), PRECISIONS)
def test_crop_of_a_large_image(precision, error):
    images = pictures(2, 3, 500, 375)
    box = [torch.tensor([[value, value + 3]]) for value in (11, 29, 410, 300)]
    actual = operators.resample(images, *box, 224, precision=precision)[0]
    assert actual.dtype == precision
    for n in range(2):
        ints = [int(value[0, n]) for value in box]
        expected = tv.resized_crop(
            images[n].float() / 255, *ints, [224, 224], interpolation=BILINEAR, antialias=True
        )
        close(actual[n].float(), expected, atol=error)


def test_whole_image_of_the_right_size_is_kept_exactly():
    images = pictures(4, 3, 32, 32)
    views = Views(32, without=OPERATORS)
    assert torch.equal((views(images)[0] * 255).round(), images.float())


@pytest.mark.parametrize("size", [17, 32])
def test_rotation(size):
    images = colours(10, 3, size)
    angles = torch.linspace(-180, 180, 10) + 0.5
    actual = operators.rotate_images(images, angles)
    for n in range(10):
        close(actual[n], tv.rotate(images[n], float(angles[n]), interpolation=BILINEAR), 3e-5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_jitter_in_every_order(order, channels):
    images = colours(8, channels, 16)
    generator = torch.Generator().manual_seed(sum(order[:2]))
    factors = 2 * torch.rand((8, 3), generator=generator)
    hue = torch.rand(8, generator=generator) - 0.5
    adjust = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    actual = jitter_images(images.clone(), factors, hue, torch.tensor(order).expand(8, 4))
    for n in range(8):
        expected = images[n]
        for step in order:
            value = hue[n] if step == 3 else factors[n, step]
            expected = adjust[step](expected, float(value))
        close(actual[n], expected)


@pytest.mark.parametrize(("precision", "error"), [(torch.float32, ATOL), PRECISIONS[1]])
@pytest.mark.parametrize("operator", range(4))
def test_each_colour_operator_alone(operator, precision, error):
    images = colours(9, 3, 16).to(precision)
    strengths = torch.linspace(0, 2, 9) if operator < 3 else torch.linspace(-0.5, 0.5, 9)
    factors = torch.ones(9, 3)
    if operator < 3:
        factors[:, operator] = strengths
    order = torch.arange(4).expand(9, 4)
    hue = strengths if operator == 3 else None
    adjust = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    actual = jitter_images(images.clone(), factors, hue, order)
    assert actual.dtype == precision
    for n in range(9):
        expected = adjust[operator](images[n].float(), float(strengths[n]))
        close(actual[n].float(), expected, error)


def test_greyscale():
    images = colours(4, 3, 16)
    actual = greyscale_images(images, torch.tensor([True, False, True, False]))
    close(actual[::2], tv.rgb_to_grayscale(images[::2], 3))
    assert torch.equal(actual[1::2], images[1::2])


@pytest.mark.parametrize(("size", "kernel"), [(8, 3), (32, 3), (96, 9), (224, 23)])
@pytest.mark.parametrize(("precision", "error"), PRECISIONS)
def test_blur(size, kernel, precision, error):
    images = colours(6, 3, size)
    sigma = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 5.0])
    radius = Views(size).blur_radius
    assert 2 * radius + 1 == kernel
    actual = operators.blur_images(images, sigma, radius, precision)
    assert actual.dtype == torch.float32
    is_half = precision == torch.float16
    assert is_half != torch.equal(actual, operators.blur_images(images, sigma, radius))
    close(actual[0], images[0], error if is_half else 1e-7)
    for n in range(1, 6):
        expected = tv.gaussian_blur(images[n], [kernel, kernel], [float(sigma[n])] * 2)
        close(actual[n], expected, error if is_half else ATOL)


@pytest.mark.parametrize("channels", [1, 3])
def test_solarisation(channels):
    images = colours(4, channels, 16)
    assert (images == 0.5).any()  # the threshold itself is inverted
    actual = solarise_images(images, torch.tensor([True, False, True, False]))
    assert torch.equal(actual[::2], tv.solarize(images[::2], 0.5))
    assert not torch.equal(actual[::2], images[::2])
    assert torch.equal(actual[1::2], images[1::2])


# ---- the whole pipeline


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [24, 40])
def test_pipeline_on_a_padded_batch(size, channels):
    images = pictures(10, channels, 60, 48)
    generator = torch.Generator().manual_seed(5)
    heights = torch.randint(12, 61, (10,), generator=generator)
    widths = torch.randint(12, 49, (10,), generator=generator)
    sizes = torch.stack((heights, widths), dim=-1)
    views = Views(size, num_views=3, blur=[0.9, 0.0, 0.5], rotation=30.0, solarise=[0.0, 0.0, 0.8])
    uniforms = views.draw(10, device="cpu", generator=generator)
    actual = views(images, sizes, uniforms)
    assert actual.shape == (3, 10, channels, size, size)
    assert actual.dtype == torch.float32
    parameters = views.parametrise(uniforms, sizes)
    for m, n in itertools.product(range(3), range(10)):
        one = {name: value[m, n] for name, value in parameters._asdict().items()}
        image = images[n, :, : heights[n], : widths[n]].float() / 255
        expected = reference(image, size, one, 2 * views.blur_radius + 1)
        # Rotation's grid differs by rounding, and strong contrast magnifies it. What lies within
        # that of the solarisation's threshold may come out on either side of it.
        difference = (actual[m, n] - expected).abs()
        difference[(expected - 0.5).abs() < 1e-4] = 0.0
        assert difference.max() < 1e-4
        assert difference.mean() < 3e-6


@pytest.mark.parametrize("operator", range(4))
def test_one_strength_of_jitter_may_be_above_0(operator):
    images = pictures(6, 3, 24, 24)
    strengths = tuple(0.4 if index == operator else 0.0 for index in range(4))
    views = Views(24, jitter=strengths, jitter_probability=1.0, without=("crop", "greyscale"))
    parameters = sample(views, 6, 24, 24)
    actual = views.render(images, parameters)
    for m, n in itertools.product(range(2), range(6)):
        one = {name: value[m, n] for name, value in parameters._asdict().items()}
        expected = reference(images[n].float() / 255, 24, one, kernel=3)
        close(actual[m, n], expected)
        assert not torch.allclose(expected, images[n].float() / 255, atol=0.01)


def test_padding_never_leaks():
    images = pictures(6, 3, 40, 40)
    sizes = torch.tensor([[40, 40], [13, 40], [40, 13], [20, 31], [5, 7], [1, 1]])
    for n, (height, width) in enumerate(sizes.tolist()):
        images[n, :, height:] = 0
        images[n, :, :, width:] = 0
    garbage = images.clone()
    for n, (height, width) in enumerate(sizes.tolist()):
        garbage[n, :, height:] = 255
        garbage[n, :, :, width:] = 255
    views = Views(16, blur=0.5)
    uniforms = views.draw(6, device="cpu", generator=torch.Generator().manual_seed(0))
    assert torch.equal(views(images, sizes, uniforms), views(garbage, sizes, uniforms))
    assert torch.equal(centre_view(images, sizes, 16), centre_view(garbage, sizes, 16))


def test_sizes_default_to_the_whole_batch():
    images = pictures(4, 3, 20, 30)
    views = Views(16)
    uniforms = views.draw(4, device="cpu")
    assert torch.equal(views(images, None, uniforms), views(images, all_sizes(images), uniforms))


def test_same_uniforms_same_views_and_views_differ():
    images = pictures(5, 3, 32, 32)
    views = Views(32)
    uniforms = views.draw(5, device="cpu", generator=torch.Generator().manual_seed(1))
    again = views.draw(5, device="cpu", generator=torch.Generator().manual_seed(1))
    first = views(images, None, uniforms)
    assert torch.equal(first, views(images, None, again))
    assert (first[0] - first[1]).abs().flatten(1).amax(dim=1).min() > 0.01
    torch.manual_seed(1)
    drawn = views(images)
    assert not torch.equal(drawn, views(images))
    torch.manual_seed(1)
    assert torch.equal(drawn, views(images))


@pytest.mark.parametrize("value", [0, 255])
def test_range_and_input_untouched(value):
    images = torch.full((8, 3, 20, 20), value, dtype=torch.uint8)
    views = Views(24, blur=1.0, rotation=10.0)(images)
    assert views.min() >= 0
    assert views.max() <= 1
    assert (images == value).all()


def test_float32_without_gradient_under_autocast():
    images = pictures(3, 3, 20, 20)
    views = Views(16, blur=1.0, rotation=20.0)
    uniforms = views.draw(3, device="cpu")
    expected = views(images, None, uniforms)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = views(images, None, uniforms)
        centre = centre_view(images, None, 16)
    assert torch.equal(actual, expected)
    assert centre.dtype == torch.float32
    assert not actual.requires_grad


def test_fullgraph_compile():
    torch._dynamo.reset()
    images = pictures(4, 3, 20, 24)
    views = Views(16, blur=0.5, rotation=10.0, solarise=[0.0, 0.5])
    uniforms = views.draw(4, device="cpu", generator=torch.Generator().manual_seed(3))
    expected = views(images, None, uniforms)
    compiled = torch.compile(views, fullgraph=True, backend="eager")
    close(compiled(images, None, uniforms), expected)


@pytest.mark.slow  # half a minute of C++ compilation
def test_fullgraph_compile_to_code():
    torch._dynamo.reset()
    images = pictures(4, 3, 20, 24)
    views = Views(16, blur=0.5, rotation=10.0)
    uniforms = views.draw(4, device="cpu", generator=torch.Generator().manual_seed(3))
    expected = views(images, None, uniforms)
    compiled = torch.compile(views, fullgraph=True)
    close(compiled(images, None, uniforms), expected)
    # The last, smaller batch of an epoch.
    close(compiled(images[:3], None, uniforms[:, :3]), expected[:, :3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_never_waits_for_the_device(no_host_sync):
    images = pictures(64, 3, 40, 40).cuda()
    sizes = all_sizes(images).cuda()
    views = Views(32, blur=0.5, rotation=10.0, solarise=[0.0, 0.5])
    uniforms = views.draw(64, device="cuda")
    expected = views(images.cpu(), sizes.cpu(), uniforms.cpu())
    views(images)
    with no_host_sync():
        actual = views(images, sizes, uniforms)
        views(images)
        centre_view(images, None, 32)
    close(actual.cpu(), expected, 2 / 255)  # half precision, all operators one after the other


# ---- what is drawn


@pytest.mark.parametrize(
    ("height", "width", "area", "aspect"),
    [
        (32, 32, (0.2, 1.0), (3 / 4, 4 / 3)),
        (40, 100, (0.5, 1.0), (3 / 4, 4 / 3)),
        (90, 30, (0.8, 1.0), (3 / 4, 4 / 3)),
        (13, 12, (0.08, 1.0), (3 / 4, 4 / 3)),
        (50, 50, (0.1, 0.3), (1.0, 2.5)),  # never taller than wide
    ],
)
def test_crop_distribution(height, width, area, aspect):
    parameters = sample(Views(8, crop_area=area, crop_aspect=aspect), 2000, height, width)
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    expected = torch.tensor(
        [tv1.RandomResizedCrop.get_params(image, area, aspect) for _ in range(4000)]
    )
    for index in range(4):
        assert_same_law(parameters[index], expected[:, index])
    assert_same_law(parameters.width / parameters.height, expected[:, 3] / expected[:, 2])


@pytest.mark.parametrize(
    ("height", "width", "aspect"),
    [(10, 100, (3 / 4, 4 / 3)), (101, 20, (0.5, 2.0)), (50, 50, (2.0, 3.0)), (50, 50, (0.2, 0.5))],
)
def test_crop_fallback(height, width, aspect):
    area = (0.999, 1.0)
    views = Views(8, crop_area=area, crop_aspect=aspect)
    parameters = sample(views, 3, height, width)
    expected = tv1.RandomResizedCrop.get_params(torch.empty(3, height, width), area, aspect)
    for value, wanted in zip(parameters[:4], expected, strict=True):
        assert (value == wanted).all()


def test_jitter_distribution():
    strengths = (0.4, 1.3, 0.2, 0.1)
    parameters = sample(Views(8, jitter=strengths, jitter_probability=1.0), 1500, 9, 9)
    torch.manual_seed(0)
    ranges = [(max(0.0, 1 - s), 1 + s) for s in strengths[:3]] + [(-strengths[3], strengths[3])]
    draws = torch.tensor([tv1.ColorJitter.get_params(*ranges)[1:] for _ in range(3000)])
    for index, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        assert_same_law(getattr(parameters, name), draws[:, index])


def test_a_view_can_have_chances_of_its_own():
    p = sample(Views(8, blur=[1.0, 0.0], solarise=[0.0, 0.25]), 4000, 9, 9)
    assert p.blurred[0].all()
    assert not p.blurred[1].any()
    assert not p.solarised[0].any()
    assert abs(p.solarised[1].float().mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)


def test_solarisation_leaves_the_earlier_draws_as_they_were():
    views = Views(8)
    drawn = views.draw(5, device="cpu", generator=torch.Generator().manual_seed(2))
    earlier = torch.rand((2, 5, 36), generator=torch.Generator().manual_seed(2))
    assert torch.equal(drawn[..., :36], earlier)
    assert drawn.shape[-1] == 37


def test_frequencies_and_order():
    n = 4000
    views = Views(8, flip=0.5, jitter_probability=0.8, greyscale=0.2, blur=0.3, rotation=25.0)
    p = sample(views, n, 9, 9)
    jittered = (p.brightness != 1) | (p.contrast != 1) | (p.saturation != 1) | (p.hue != 0)
    for flag, probability in (
        (p.flipped, 0.5),
        (jittered, 0.8),
        (p.grey, 0.2),
        (p.blurred, 0.3),
        (p.flipped & p.grey & p.blurred & jittered, 0.5 * 0.8 * 0.2 * 0.3),
    ):
        sigma = math.sqrt(probability * (1 - probability) / (2 * n))
        assert abs(flag.float().mean().item() - probability) < 4 * sigma
    assert ((p.hue == 0) == ~jittered).all()
    assert ((p.blur_sigma == 0) == ~p.blurred).all()
    assert_same_law(p.blur_sigma[p.blurred], torch.linspace(0.1, 2.0, 5000))
    assert_same_law(p.angle, torch.linspace(-25, 25, 5000))
    codes = (p.order * torch.tensor([64, 16, 4, 1])).sum(dim=-1).flatten()
    counts = torch.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert chisquare(counts.numpy()).pvalue > 1e-3


def test_every_decision_has_uniforms_of_its_own():
    """So that no two of them go together: each column in turn is drawn anew."""
    views = Views(8, blur=0.5, rotation=25.0, solarise=0.5)
    uniforms = views.draw(500, device="cpu", generator=torch.Generator().manual_seed(0))
    other = views.draw(500, device="cpu", generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([[60, 50]]).expand(500, 2)
    before = views.parametrise(uniforms, sizes)
    changed = []
    for column in range(uniforms.shape[-1]):
        mixed = uniforms.clone()
        mixed[..., column] = other[..., column]
        after = views.parametrise(mixed, sizes)
        fields = zip(ViewParameters._fields, before, after, strict=True)
        changed.append([name for name, a, b in fields if not torch.equal(a, b)])
    box, jitter = [*ViewParameters._fields[:4]], ["brightness", "contrast", "saturation", "hue"]
    for attempts in (changed[:10], changed[10:20]):  # areas, aspects; the last are hardly needed
        assert attempts[0] == box
        assert all(set(fields) <= set(box) for fields in attempts)
    assert changed[20:] == [
        *(["top"], ["left"], ["flipped"], ["angle"]),
        *(jitter, *([name] for name in jitter)),
        *[["order"]] * 4,
        *(["grey"], ["blurred", "blur_sigma"], ["blur_sigma"], ["solarised"]),
    ]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), min_size=1, max_size=8),
    low=st.floats(0.001, 1.0),
    aspect=st.floats(0.1, 10.0),
    extreme=st.sampled_from([None, 0.0, 1 - 2**-24]),
    seed=st.integers(0, 2**31),
)
def test_boxes_lie_within_the_images(sizes, low, aspect, extreme, seed):
    views = Views(8, crop_area=(low, 1.0), crop_aspect=(aspect, 2 * aspect))
    uniforms = views.draw(len(sizes), device="cpu", generator=torch.Generator().manual_seed(seed))
    if extreme is not None:
        uniforms[...] = extreme
    bounds = torch.tensor(sizes)
    p = views.parametrise(uniforms, bounds)
    assert (p.top >= 0).all()
    assert (p.left >= 0).all()
    assert (p.height >= 1).all()
    assert (p.width >= 1).all()
    assert (p.top + p.height <= bounds[:, 0]).all()
    assert (p.left + p.width <= bounds[:, 1]).all()


# ---- removal


FIELDS = {
    "crop": {"top", "left", "height", "width"},
    "rotation": {"angle"},
    "flip": {"flipped"},
    "jitter": {"brightness", "contrast", "saturation", "hue"},
    "greyscale": {"grey"},
    "blur": {"blurred", "blur_sigma"},
    "solarise": {"solarised"},
}


@pytest.mark.parametrize("name", OPERATORS)
def test_removing_one_leaves_the_others(name):
    options = {"blur": 0.5, "rotation": 20.0, "solarise": 0.5}
    full, less = Views(16, **options), Views(16, **options, without=[name])
    images = pictures(12, 3, 30, 20)
    uniforms = full.draw(12, device="cpu", generator=torch.Generator().manual_seed(0))
    assert less.draw(12, device="cpu").shape == uniforms.shape
    before = full.parametrise(uniforms, all_sizes(images))
    after = less.parametrise(uniforms, all_sizes(images))
    for field in ViewParameters._fields:
        same = torch.equal(getattr(before, field), getattr(after, field))
        assert same == (field not in FIELDS[name]), field
    # What remains is the full pipeline with that operator's parameters made neutral.
    close(less(images, None, uniforms), full.render(images, after))


def test_without_everything_is_a_plain_resize():
    images = pictures(3, 3, 30, 20)
    views = Views(16, blur=1.0, rotation=20.0, solarise=1.0, without=OPERATORS)
    expected = tv.resize(images.float() / 255, [16, 16], interpolation=BILINEAR, antialias=True)
    close(views(images), expected.expand(2, -1, -1, -1, -1))


# ---- test time


@pytest.mark.parametrize("size", [16, 40])
def test_centre_view(size):
    images = pictures(4, 3, 64, 48)
    sizes = torch.tensor([[64, 48], [48, 48], [33, 48], [64, 25]])
    actual = centre_view(images, sizes, size)
    for n, (height, width) in enumerate(sizes.tolist()):
        image = images[n, :, :height, :width].float() / 255
        side = min(height, width)
        square = tv.center_crop(image, [side, side])
        expected = tv.resize(square, [size, size], interpolation=BILINEAR, antialias=True)
        close(actual[n], expected)


def test_centre_view_stands_for_resize_and_crop():
    image = torch.nn.functional.interpolate(
        torch.rand((1, 3, 6, 8), generator=torch.Generator().manual_seed(0)),
        size=(192, 256),
        mode="bicubic",
    ).clamp(0, 1)
    images = (image * 255).to(torch.uint8)
    actual = centre_view(images, None, 84)
    resized = tv.resize(images.float() / 255, [84], interpolation=BILINEAR, antialias=True)
    assert (actual - tv.center_crop(resized, [84, 84])).abs().mean() < 2e-3


# ---- bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"num_views": 0}, "num_views is 0"),
        ({"crop_area": (0.0, 1.0)}, r"crop_area is \(0.0, 1.0\)"),
        ({"crop_area": (0.5, 1.5)}, r"crop_area is \(0.5, 1.5\)"),
        ({"crop_aspect": (2.0, 1.0)}, r"crop_aspect is \(2.0, 1.0\)"),
        ({"crop_aspect": (1.0, float("inf"))}, "crop_aspect is .*inf"),
        ({"flip": 1.5}, "flip is 1.5"),
        ({"jitter_probability": -0.1}, "jitter_probability is -0.1"),
        ({"greyscale": 2}, "greyscale is 2"),
        ({"blur": float("nan")}, "blur is nan"),
        ({"solarise": [0.1, 0.2, 0.3]}, r"solarise is \[0.1.*one for each of the 2 views"),
        ({"solarise": [0.1, 1.2]}, r"solarise is \[0.1, 1.2\]"),
        ({"blur_sigma": (0.0, 1.0)}, r"blur_sigma is \(0.0, 1.0\)"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, r"jitter is .*hue up to 0.5"),
        ({"jitter": (-0.4, 0.4, 0.4, 0.1)}, r"jitter is \(-0.4"),
        ({"rotation": 200.0}, "rotation is 200.0"),
        ({"without": ("grayscale",)}, "'grayscale'.*, greyscale, blur"),
        ({"without": "flop"}, "'flop'.*, flip, jitter"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Views(**{"size": 32, **options})


def test_bad_batches():
    views = Views(8)
    images = pictures(2, 3, 9, 9)
    with pytest.raises(ValueError, match=r"images.dtype is torch.float32"):
        views(images.float())
    with pytest.raises(ValueError, match=r"images.shape is \(2, 2, 9, 9\)"):
        views(images[:, :2])
    with pytest.raises(ValueError, match=r"uniforms.shape is \(2, 3, .*draw\("):
        views(images, None, views.draw(3, device="cpu"))
    with pytest.raises(ValueError, match=r"size is 0"):
        centre_view(images, None, 0)
