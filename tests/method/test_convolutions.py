"""The faster gradients of convolutions are the gradients of convolutions, on every machine."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from deepbregman.method import convolutions
from deepbregman.method.convolutions import use_fast_gradients


@pytest.fixture(autouse=True)
def _as_on_arm(monkeypatch) -> None:
    monkeypatch.setattr(convolutions, "ON_ARM", True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Count how often the replacement is used."""
    made: list[int] = []
    apply = convolutions._Convolution.apply
    monkeypatch.setattr(
        convolutions._Convolution, "apply", lambda *given: (made.append(1), apply(*given))[1]
    )
    return made


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "bias"),
    [
        (3, 1, 1, False),
        (3, 2, 1, True),
        (1, 1, 0, False),
        (1, 2, 0, True),
        (7, 2, 3, False),
        ((3, 1), (2, 1), (1, 0), True),
        (2, 3, 0, False),  # pixels that no patch covers
    ],
)
def test_output_is_the_same_and_gradients_are_those_of_float64(
    calls, kernel, stride, padding, bias, layout
):
    torch.manual_seed(0)
    layer = nn.Conv2d(5, 6, kernel, stride, padding, bias=bias).to(memory_format=layout)
    images = torch.randn(4, 5, 8, 6).contiguous(memory_format=layout).requires_grad_()
    with use_fast_gradients(images):
        found = layer(images)
    assert calls
    assert torch.equal(found, layer(images))
    weights = torch.randn_like(found)
    tensors = [images, *layer.parameters()]
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    exact_images, exact = images.detach().double().requires_grad_(), layer.double()
    total = (exact(exact_images) * weights.double()).sum()
    expected = torch.autograd.grad(total, [exact_images, *exact.parameters()])
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)


def test_no_images_have_no_gradient(calls):
    layer, images = nn.Conv2d(3, 4, 3), torch.ones(0, 3, 6, 6, requires_grad=True)
    with use_fast_gradients(images):
        layer(images).sum().backward()
    assert calls
    assert images.grad is not None
    assert images.grad.shape == images.shape
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("of", ["weights", "images"])
def test_gradients_of_each_image_by_torch_func(calls, of):
    torch.manual_seed(0)
    layer, images = nn.Conv2d(3, 4, 3, padding=1, bias=False), torch.randn(5, 3, 6, 6)

    def total(weight: Tensor, image: Tensor) -> Tensor:
        with use_fast_gradients(image):
            return functional_call(layer, {"weight": weight}, image[None]).square().sum()

    place = ("weights", "images").index(of)
    weight = layer.weight.detach()
    found = vmap(grad(total, argnums=place), in_dims=(None, 0))(weight, images)
    assert calls
    for image, mine in zip(images, found, strict=True):
        tensors = [weight.clone().requires_grad_(), image.clone().requires_grad_()]
        output = torch.conv2d(tensors[1][None], tensors[0], padding=1)
        (expected,) = torch.autograd.grad(output.square().sum(), tensors[place])
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3).double(),
    ],
)
def test_other_convolutions_are_left_alone(calls, layer):
    images = torch.randn(2, 4, 8, 8, dtype=layer.weight.dtype)
    with use_fast_gradients(images):
        layer(images).sum().backward()
    with torch.no_grad(), use_fast_gradients(images):
        layer(images)
    assert calls == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_traced_graph_has_the_plain_convolution(calls):
    class Network(nn.Conv2d):
        def forward(self, images: Tensor) -> Tensor:
            with use_fast_gradients(images):
                return super().forward(images)

    traced = torch.jit.trace(Network(3, 4, 3), torch.ones(2, 3, 6, 6))
    assert "aten::_convolution" in str(traced.graph)
    assert calls == []


def test_networks_in_bfloat16_are_left_alone(calls):
    images = torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16), use_fast_gradients(images):
        nn.Conv2d(3, 4, 3)(images).sum().backward()
    assert calls == []


def test_large_maps_are_left_alone(calls):
    images = torch.randn(2, 3, 16, 16)
    with use_fast_gradients(images):
        nn.Conv2d(3, 4, 3)(images).sum().backward()
    assert calls == []


def test_nothing_changes_on_other_processors(calls, monkeypatch):
    monkeypatch.setattr(convolutions, "ON_ARM", False)
    images = torch.randn(2, 3, 4, 4)
    with use_fast_gradients(images):
        nn.Conv2d(3, 4, 3)(images)
    assert calls == []
