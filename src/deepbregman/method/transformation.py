"""The random views of an image: batched, on the device, each image with its own parameters.

A call is three steps: ``draw`` takes all its random numbers at once, ``parametrise`` turns them
into crop boxes, factors and flags, ``render`` applies those. No step waits for the device, and
every operator equals torchvision's functional one on float images given the same parameters.
"""

import difflib
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from deepbregman.method import colour, geometry

OPERATORS = ("crop", "rotation", "flip", "jitter", "greyscale", "blur")
_ATTEMPTS = 10  # torchvision tries this many crop boxes before it falls back to a central one
# How many uniforms each decision takes. The layout is the same whichever operators are on, so that
# removing one leaves the draws of the others as they were.
_LAYOUT = {
    "area": _ATTEMPTS,
    "aspect": _ATTEMPTS,
    "position": 2,
    "flip": 1,
    "angle": 1,
    "jitter": 1,
    "factors": 4,
    "order": 4,
    "grey": 1,
    "blur": 1,
    "sigma": 1,
}


class ViewParameters(NamedTuple):
    """What is done to each of N images in each of M views; (M, N) each unless said otherwise.

    An operator that is off, or not drawn for an image, has the parameters that change nothing.
    """

    top: Tensor  # the crop box, in whole pixels (int64)
    left: Tensor
    height: Tensor
    width: Tensor
    flipped: Tensor  # bool
    angle: Tensor  # degrees, counter-clockwise
    brightness: Tensor  # factors: 1 changes nothing
    contrast: Tensor
    saturation: Tensor
    hue: Tensor  # turns: 0 changes nothing
    order: Tensor  # (M, N, 4): which of the four above comes at each step (int64)
    grey: Tensor  # bool
    blurred: Tensor  # bool
    blur_sigma: Tensor  # pixels: 0 where not blurred


class Views(nn.Module):
    """Random views: crop and flip, rotation, colour jitter, greyscale, blur, in this order.

    Args:
        size: Height and width of a view, in pixels.
        num_views: M, the number of views of each image.
        crop_area: Least and greatest share of the image's area in a crop.
        crop_aspect: Least and greatest width / height of a crop.
        flip: Probability of a horizontal flip.
        jitter: Strength of brightness, contrast, saturation (factors in 1 +- strength) and hue.
        jitter_probability: Probability of colour jitter.
        greyscale: Probability of greyscale.
        blur: Probability of Gaussian blur, with a kernel of about a tenth of ``size``.
        blur_sigma: Least and greatest standard deviation of the blur, in pixels.
        rotation: Greatest rotation to either side, in degrees.
        without: Names out of ``OPERATORS`` to leave out. Without "crop" the whole image is resized.

    Raises:
        ValueError: If an argument is out of its range or ``without`` has an unknown name.
    """

    def __init__(
        self,
        size: int,
        *,
        num_views: int = 2,
        crop_area: tuple[float, float] = (0.2, 1.0),
        crop_aspect: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1),
        jitter_probability: float = 0.8,
        greyscale: float = 0.2,
        blur: float = 0.0,
        blur_sigma: tuple[float, float] = (0.1, 2.0),
        rotation: float = 0.0,
        without: Collection[str] = (),
    ) -> None:
        super().__init__()
        _require(size >= 2, "size", size, "at least 2 pixels")
        _require(num_views >= 1, "num_views", num_views, "at least 1")
        _require_range("crop_area", crop_area, 1.0)
        _require_range("crop_aspect", crop_aspect, float("inf"))
        _require_range("blur_sigma", blur_sigma, float("inf"))
        names = ("flip", "jitter_probability", "greyscale", "blur")
        chances = (flip, jitter_probability, greyscale, blur)
        for name, chance in zip(names, chances, strict=True):
            _require(0 <= chance <= 1, name, chance, "a probability between 0 and 1")
        rule = "four strengths (brightness, contrast, saturation, hue), from 0, hue up to 0.5"
        _require(len(jitter) == 4 and min(jitter) >= 0 and jitter[3] <= 0.5, "jitter", jitter, rule)
        _require(0 <= rotation <= 180, "rotation", rotation, "between 0 and 180 degrees")
        removed = {without} if isinstance(without, str) else set(without)
        for name in sorted(removed.difference(OPERATORS)):
            close = difflib.get_close_matches(name, OPERATORS, n=1, cutoff=0.0)[0]
            rule = f"made of names out of {', '.join(OPERATORS)}; did you mean {close!r}?"
            _require(False, "without", name, rule)
        if not any(jitter):
            removed.add("jitter")
        self.size = size
        self.num_views = num_views
        self.crop = "crop" not in removed
        self.crop_area = crop_area
        self.crop_aspect = crop_aspect
        self.flip = 0.0 if "flip" in removed else flip
        self.rotation = 0.0 if "rotation" in removed else rotation
        self.jitter = jitter
        self.jitter_probability = 0.0 if "jitter" in removed else jitter_probability
        self.greyscale = 0.0 if "greyscale" in removed else greyscale
        self.blur = 0.0 if "blur" in removed else blur
        self.blur_sigma = blur_sigma
        # An odd number of pixels near a tenth of the view (SimCLR: 23 of 224), hence this radius.
        self.blur_radius = max(1, round((0.1 * size - 1) / 2))

    def draw(
        self, num_images: int, *, device: torch.device | str, generator: Generator | None = None
    ) -> Tensor:
        """Draw all the randomness of one call: (M, num_images, R) uniforms in [0, 1)."""
        shape = (self.num_views, num_images, sum(_LAYOUT.values()))
        return torch.rand(shape, device=device, generator=generator, dtype=torch.float32)

    def parametrise(self, uniforms: Tensor, sizes: Tensor) -> ViewParameters:
        """Turn uniforms into parameters; nothing else is random.

        Args:
            uniforms: (M, N, R) in [0, 1), as from ``draw``.
            sizes: (N, 2) height and width of each image.

        Returns:
            The parameters of every view of every image.
        """
        parts = torch.split(uniforms, list(_LAYOUT.values()), dim=-1)
        columns = dict(zip(_LAYOUT, parts, strict=True))  # (M, N, width) each
        single = {name: part[..., 0] for name, part in columns.items()}  # (M, N) each
        jittered = single["jitter"] < self.jitter_probability
        factors = []  # (M, N) each
        for index, strength in enumerate(self.jitter):
            neutral = 0.0 if index == colour.HUE else 1.0
            low = -strength if index == colour.HUE else max(0.0, 1 - strength)
            factor = low + (neutral + strength - low) * columns["factors"][..., index]
            factors.append(torch.where(jittered, factor, neutral))
        if self.crop:
            uniform = (columns["area"], columns["aspect"], columns["position"])
            boxes = geometry.crop_boxes(*uniform, sizes, self.crop_area, self.crop_aspect)
        else:
            whole = functional.pad(sizes.long(), (2, 0))  # (N, 4): top and left are 0
            boxes = whole.expand(self.num_views, -1, -1)
        top, left, height, width = boxes.unbind(dim=-1)  # (M, N) each
        blurred = single["blur"] < self.blur
        least, greatest = self.blur_sigma
        return ViewParameters(
            top=top,
            left=left,
            height=height,
            width=width,
            flipped=single["flip"] < self.flip,
            angle=self.rotation * (2 * single["angle"] - 1),
            brightness=factors[colour.BRIGHTNESS],
            contrast=factors[colour.CONTRAST],
            saturation=factors[colour.SATURATION],
            hue=factors[colour.HUE],
            order=columns["order"].argsort(dim=-1),
            grey=single["grey"] < self.greyscale,
            blurred=blurred,
            blur_sigma=torch.where(blurred, least + (greatest - least) * single["sigma"], 0.0),
        )

    @torch.no_grad()
    def render(self, images: Tensor, parameters: ViewParameters) -> Tensor:
        """Apply the parameters, in float32 also under autocast.

        Args:
            images: (N, C, H, W) uint8, contents at the top left of the padding.
            parameters: From ``parametrise``.

        Returns:
            (M, N, C, size, size) float32 in [0, 1].
        """
        with torch.autocast(images.device.type, enabled=False):
            views = geometry.resample(images, *parameters[:4], self.size, parameters.flipped)
            shape = views.shape
            views = views.flatten(0, 1)  # (M * N, C, size, size)
            of = ViewParameters(*(value.flatten(0, 1) for value in parameters))  # (M * N,) each
            if self.rotation > 0:
                views = geometry.rotate(views, of.angle)
            if self.jitter_probability > 0:
                factors = torch.stack((of.brightness, of.contrast, of.saturation), dim=-1)
                hue = of.hue if self.jitter[colour.HUE] > 0 else None
                views = colour.jitter(views, factors, hue, of.order)
            if self.greyscale > 0:
                views = colour.greyscale(views, of.grey)
            if self.blur > 0:
                views = geometry.blur(views, of.blur_sigma, self.blur_radius)
            return views.clamp_(0, 1).view(shape)  # weights sum to 1 only up to rounding

    def forward(
        self, images: Tensor, sizes: Tensor | None = None, uniforms: Tensor | None = None
    ) -> Tensor:
        """Make M random views of each image.

        Args:
            images: (N, C, H, W) uint8 with one or three channels.
            sizes: (N, 2) integers, each image's own height and width where the batch is padded at
                the bottom and right; None if the images fill the batch.
            uniforms: (M, N, R) from ``draw``, to repeat a call; None draws them here.

        Returns:
            (M, N, C, size, size) float32 in [0, 1].

        Raises:
            ValueError: If the images are not such a batch or the uniforms do not fit it.
        """
        _require_images(images)
        if uniforms is None:
            uniforms = self.draw(len(images), device=images.device)
        fits = tuple(uniforms.shape) == (self.num_views, len(images), sum(_LAYOUT.values()))
        rule = "(num_views, number of images, columns): use draw(len(images), device=...)"
        _require(fits, "uniforms.shape", tuple(uniforms.shape), rule)
        sizes = _whole(images) if sizes is None else sizes
        return self.render(images, self.parametrise(uniforms, sizes))


@torch.no_grad()
def centre_view(
    images: Tensor, sizes: Tensor | None, size: int, *, resize_fraction: float = 1.0
) -> Tensor:
    """Return the central square of each image, resized: the view at test time.

    This stands for "resize the shorter side to size / fraction, then crop the centre", done as one
    resampling of the central square whose side is the shorter side times the fraction, in whole
    pixels. It differs from the two steps by the rounding of the box, and at the edges of the box,
    beyond which the antialiasing filter does not reach.

    Args:
        images: (N, C, H, W) uint8 with one or three channels.
        sizes: (N, 2) each image's own height and width in a padded batch, or None.
        size: Height and width of the result, in pixels.
        resize_fraction: Share of the shorter side that is kept (224 / 256 is usual for ImageNet).

    Returns:
        (N, C, size, size) float32 in [0, 1].

    Raises:
        ValueError: If an argument is out of its range.
    """
    _require_images(images)
    _require(size >= 1, "size", size, "at least 1 pixel")
    _require(0 < resize_fraction <= 1, "resize_fraction", resize_fraction, "above 0 and up to 1")
    sizes = _whole(images) if sizes is None else sizes
    side = (sizes.amin(dim=-1) * resize_fraction).round().clamp_min(1)  # (N,)
    top, left = ((sizes - side.unsqueeze(-1)) / 2).round().unbind(-1)
    with torch.autocast(images.device.type, enabled=False):
        view = geometry.resample(images, top[None], left[None], side[None], side[None], size)
    return view.squeeze(0).clamp_(0, 1)


def _whole(images: Tensor) -> Tensor:
    """Return the sizes (N, 2) of images (N, C, H, W) that fill their batch."""
    height, width = images.shape[-2:]
    # Filled on the device: a tensor made from a list would be copied there, and waited for.
    sides = [torch.full((len(images),), side, device=images.device) for side in (height, width)]
    return torch.stack(sides, dim=-1)


def _require_images(images: Tensor) -> None:
    _require(images.dtype == torch.uint8, "images.dtype", images.dtype, "torch.uint8, values 0-255")
    is_batch = images.ndim == 4 and images.shape[1] in (1, 3)
    _require(is_batch, "images.shape", tuple(images.shape), "(N, C, H, W) with C = 1 or 3")


def _require_range(name: str, value: tuple[float, float], most: float) -> None:
    rule = f"two numbers (least, greatest), finite, above 0, in order and up to {most}"
    fits = len(value) == 2 and 0 < value[0] <= value[1] <= most and value[1] < float("inf")
    _require(fits, name, value, rule)


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}, but must be {rule}")
