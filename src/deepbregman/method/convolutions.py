"""Gradients of convolutions over small maps as one matrix product each, for ARM processors.

PyTorch convolves by oneDNN on Linux. On ARM oneDNN has fast forward convolutions only: gradients
over maps of a few pixels fall back to plain loops, ten times slower than the forward pass.
"""

import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ON_ARM = platform.machine().lower() in ("aarch64", "arm64")
LARGEST_MAP = 64
"""Pixels of an output map up to which a matrix product is faster than oneDNN."""


class _Call(NamedTuple):
    """The arguments of ``torch.conv2d``."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1

    def is_suited(self) -> bool:
        """Whether the faster gradients exist for this call and pay off."""
        images = self.input
        if images.ndim != 4 or images.dtype != torch.float32 or self.weight.dtype != torch.float32:
            return False
        if images.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        if isinstance(self.padding, str) or self.groups != 1 or set(_pair(self.dilation)) != {1}:
            return False
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch's
            return False
        height, width = _map_size(self)
        return height * width <= LARGEST_MAP


def use_fast_gradients(images: Tensor) -> AbstractContextManager[object]:
    """Give convolutions over small maps the faster gradients, where they are faster.

    Outputs stay the same to the bit; gradients differ in rounding. ``images`` are what a network is
    about to be applied to.
    """
    needed = ON_ARM and torch.is_grad_enabled() and images.device.type == "cpu"
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # torch's
    is_traced = is_traced or torch.compiler.is_compiling()
    return _FastGradients() if needed and not is_traced else nullcontext()


class _FastGradients(TorchFunctionMode):
    """Replaces calls of ``torch.conv2d`` by :class:`_Convolution` where that is suited."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.conv2d:
            call = _Call(*args, **kwargs)
            if call.is_suited():
                return _Convolution.apply(*call[:5])
        return function(*args, **kwargs)


class _Convolution(torch.autograd.Function):
    """A convolution with the usual output, and with gradients by one matrix product each."""

    generate_vmap_rule = True  # torch.func.vmap and grad work on ARM as elsewhere

    @staticmethod
    def forward(
        images: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any
    ) -> Tensor:
        return torch.conv2d(images, weight, bias, stride, padding)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, weight, _, stride, padding = inputs
        context.save_for_backward(images, weight)
        context.stride, context.padding = _pair(stride), _pair(padding)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        images, weight = context.saved_tensors
        of_images = of_weight = of_bias = None
        flat = gradient.permute(0, 2, 3, 1).reshape(-1, len(weight))  # (N*h*w, out)
        if context.needs_input_grad[0]:
            of_images = _compute_image_gradient(flat, gradient, images, weight, context)
        if context.needs_input_grad[1]:
            patches = _lay_out_patches(images, weight, gradient, context)
            side = (len(weight), *weight.shape[2:], weight.shape[1])
            of_weight = (flat.t() @ patches).view(side).permute(0, 3, 1, 2)
        if context.needs_input_grad[2]:
            of_bias = flat.sum(0)
        return of_images, of_weight, of_bias, None, None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _map_size(call: _Call) -> tuple[int, int]:
    sizes = zip(
        call.input.shape[2:],
        call.weight.shape[2:],
        _pair(call.stride),
        _pair(call.padding),
        strict=True,
    )
    height, width = ((side + 2 * pad - kernel) // step + 1 for side, kernel, step, pad in sizes)
    return height, width


def _list_windows(weight: Tensor, gradient: Tensor, context: Any) -> list[tuple[slice, slice]]:
    """List, for each position in the kernel, which padded pixels it meets."""
    (down, right), (rows, columns) = context.stride, gradient.shape[2:]
    return [
        (slice(i, i + (rows - 1) * down + 1, down), slice(j, j + (columns - 1) * right + 1, right))
        for i in range(weight.shape[2])
        for j in range(weight.shape[3])
    ]


def _lay_out_patches(images: Tensor, weight: Tensor, gradient: Tensor, context: Any) -> Tensor:
    """Lay out what the kernel meets at each output pixel as a row, (N*h*w, kernel*in)."""
    (above, left), windows = context.padding, _list_windows(weight, gradient, context)
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, left, left, above, above))
    parts = [padded[:, rows, columns] for rows, columns in windows]
    return torch.cat(parts, dim=3).view(-1, len(windows) * images.shape[1])


def _compute_image_gradient(
    flat: Tensor, gradient: Tensor, images: Tensor, weight: Tensor, context: Any
) -> Tensor:
    """Compute the gradient of every patch at once, then add up where patches overlap."""
    count, channels, height, width = images.shape
    above, left = context.padding
    product = flat @ weight.permute(0, 2, 3, 1).reshape(len(weight), -1)
    patches = product.view(count, *gradient.shape[2:], weight[0, 0].numel(), channels)
    padded = product.new_zeros(count, height + 2 * above, width + 2 * left, channels)
    for index, (rows, columns) in enumerate(_list_windows(weight, gradient, context)):
        padded[:, rows, columns] += patches[:, :, :, index]
    inner = padded[:, above : above + height, left : left + width]
    return inner.permute(0, 3, 1, 2)
