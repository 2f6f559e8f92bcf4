"""The random views of an image: batched, on the device, each image with its own parameters.

A call is three steps: ``draw`` takes all its random numbers at once, ``parametrise`` turns them
into crop boxes, factors and flags, ``render`` applies those. No step waits for the device, and
every operator equals torchvision's functional one on float images given the same parameters.
"""

import math
from collections.abc import Collection, Sequence, Sized
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from .colours import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    greyscale_images,
    jitter_images,
    solarise_images,
)

OPERATORS = ("crop", "rotation", "flip", "jitter", "greyscale", "blur", "solarise")
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
# Drawn after all others, so that runs from before these decisions existed draw what they drew.
_LATER = {"solarise": 1}
_COLUMNS = {**_LAYOUT, **_LATER}


class ViewParameters(NamedTuple):
    """The transformations of N images in M views; each is (M, N) unless said otherwise.

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
    solarised: Tensor  # bool


class Views(nn.Module):
    """Random views: crop and flip, rotation, jitter, greyscale, blur, solarisation, in this order.

    Args:
        size: Height and width of a view, in pixels.
        num_views: M, the number of views of each image.
        crop_area: Least and greatest share of the image's area in a crop.
        crop_aspect: Least and greatest width / height of a crop.
        flip: Probability of a horizontal flip.
        jitter: Strength of brightness, contrast, saturation (factors in 1 +- strength) and hue.
        jitter_probability: Probability of colour jitter.
        greyscale: Probability of greyscale.
        blur: Probability of Gaussian blur, with a kernel of about a tenth of ``size``: of all
            views, or of each in turn.
        blur_sigma: Least and greatest standard deviation of the blur, in pixels.
        rotation: Greatest rotation to either side, in degrees.
        solarise: Probability of inverting what is brighter than half: of all views, or of each.
        without: Names out of ``OPERATORS`` to leave out. Without "crop" the whole image is resized.
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
        blur: float | Sequence[float] = 0.0,
        blur_sigma: tuple[float, float] = (0.1, 2.0),
        rotation: float = 0.0,
        solarise: float | Sequence[float] = 0.0,
        without: Collection[str] = (),
    ) -> None:
        super().__init__()
        _require(size >= 2, "size", size, "at least 2 pixels")
        _require(num_views >= 1, "num_views", num_views, "at least 1")
        _require_range("crop_area", crop_area, 1.0)
        _require_range("crop_aspect", crop_aspect, float("inf"))
        _require_range("blur_sigma", blur_sigma, float("inf"))
        names = ("flip", "jitter_probability", "greyscale")
        chances = (flip, jitter_probability, greyscale)
        for name, chance in zip(names, chances, strict=True):
            _require(0 <= chance <= 1, name, chance, "a probability between 0 and 1")
        rule = "four strengths (brightness, contrast, saturation, hue), from 0, hue up to 0.5"
        _require(
            _count(jitter) == 4 and min(jitter) >= 0 and jitter[3] <= 0.5, "jitter", jitter, rule
        )
        _require(0 <= rotation <= 180, "rotation", rotation, "between 0 and 180 degrees")
        removed = {without} if isinstance(without, str) else set(without)
        rule = f"made of names out of {', '.join(OPERATORS)}"
        _require(removed <= set(OPERATORS), "without", without, rule)
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
        self.blur = _spread_chance("blur", 0.0 if "blur" in removed else blur, num_views)
        self.blur_sigma = blur_sigma
        # An odd number of pixels near a tenth of the view (SimCLR: 23 of 224), hence this radius.
        self.blur_radius = max(1, round((0.1 * size - 1) / 2))
        self.solarise = _spread_chance(
            "solarise", 0.0 if "solarise" in removed else solarise, num_views
        )

    def draw(
        self, num_images: int, *, device: torch.device | str, generator: Generator | None = None
    ) -> Tensor:
        """Draw all the randomness of one call: (M, num_images, R) uniforms in [0, 1)."""
        parts = [
            torch.rand(
                (self.num_views, num_images, sum(layout.values())),
                device=device,
                generator=generator,
                dtype=torch.float32,
            )
            for layout in (_LAYOUT, _LATER)
        ]
        return torch.cat(parts, dim=-1)

    def parametrise(self, uniforms: Tensor, sizes: Tensor) -> ViewParameters:
        """Turn uniforms (M, N, R) of ``draw`` into parameters; nothing else is random.

        ``sizes`` (N, 2) are the height and width of each image.
        """
        parts = torch.split(uniforms, list(_COLUMNS.values()), dim=-1)
        columns = dict(zip(_COLUMNS, parts, strict=True))  # (M, N, width) each
        single = {name: part[..., 0] for name, part in columns.items()}  # (M, N) each
        jittered = single["jitter"] < self.jitter_probability
        factors = []  # (M, N) each
        for index, strength in enumerate(self.jitter):
            neutral = 0.0 if index == HUE else 1.0
            low = -strength if index == HUE else max(0.0, 1 - strength)
            factor = low + (neutral + strength - low) * columns["factors"][..., index]
            factors.append(torch.where(jittered, factor, neutral))
        if self.crop:
            uniform = (columns["area"], columns["aspect"], columns["position"])
            boxes = choose_boxes(*uniform, sizes, self.crop_area, self.crop_aspect)
        else:
            whole = F.pad(sizes.long(), (2, 0))  # (N, 4): top and left are 0
            boxes = whole.expand(self.num_views, -1, -1)
        top, left, height, width = boxes.unbind(dim=-1)  # (M, N) each
        blurred = _decide(single["blur"], self.blur)
        least, greatest = self.blur_sigma
        return ViewParameters(
            top=top,
            left=left,
            height=height,
            width=width,
            flipped=single["flip"] < self.flip,
            angle=self.rotation * (2 * single["angle"] - 1),
            brightness=factors[BRIGHTNESS],
            contrast=factors[CONTRAST],
            saturation=factors[SATURATION],
            hue=factors[HUE],
            order=columns["order"].argsort(dim=-1),
            grey=single["grey"] < self.greyscale,
            blurred=blurred,
            blur_sigma=torch.where(blurred, least + (greatest - least) * single["sigma"], 0.0),
            solarised=_decide(single["solarise"], self.solarise),
        )

    @torch.no_grad()
    def render(self, images: Tensor, parameters: ViewParameters) -> Tensor:
        """Apply the parameters to images (N, C, H, W), uint8; see ``forward``.

        It computes in float32 also under autocast. On a GPU the images between the operators are
        float16: its tensor cores multiply it faster, and half the bytes go to memory and back. An
        operator is then off by less than half a level of 255, which is what rounding to uint8
        costs.
        """
        precision = torch.float16 if images.is_cuda else torch.float32
        with torch.autocast(images.device.type, enabled=False):
            top, left, height, width, flipped, *_ = parameters
            views = resample(images, top, left, height, width, self.size, flipped, precision)
            shape = views.shape
            views = views.flatten(0, 1)  # (M * N, C, size, size)
            flat = ViewParameters(*(value.flatten(0, 1) for value in parameters))  # (M * N,) each
            if self.rotation > 0:
                views = rotate_images(views, flat.angle)
            if self.jitter_probability > 0:
                factors = torch.stack((flat.brightness, flat.contrast, flat.saturation), dim=-1)
                hue = flat.hue if self.jitter[HUE] > 0 else None
                views = jitter_images(views, factors, hue, flat.order)
            if self.greyscale > 0:
                views = greyscale_images(views, flat.grey)
            if any(self.blur):
                views = blur_images(views, flat.blur_sigma, self.blur_radius, precision)
            if any(self.solarise):
                views = solarise_images(views, flat.solarised)
            return views.float().clamp_(0, 1).view(shape)  # weights sum to 1 only up to rounding

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
        """
        _require_images(images)
        if uniforms is None:
            uniforms = self.draw(len(images), device=images.device)
        fits = tuple(uniforms.shape) == (self.num_views, len(images), sum(_COLUMNS.values()))
        rule = "(num_views, number of images, columns): use draw(len(images), device=...)"
        _require(fits, "uniforms.shape", tuple(uniforms.shape), rule)
        sizes = _fill_sizes(images) if sizes is None else sizes
        return self.render(images, self.parametrise(uniforms, sizes))


@torch.no_grad()
def centre_view(images: Tensor, sizes: Tensor | None, size: int) -> Tensor:
    """Return the central square of each image, resized: the view at test time.

    It does "resize the shorter side, then crop the centre" as one resampling. It
    differs from the two steps at the edges of the box, beyond which the antialiasing filter does
    not reach.

    Args:
        images: (N, C, H, W) uint8 with one or three channels.
        sizes: (N, 2) each image's own height and width in a padded batch, or None.

    Returns:
        (N, C, size, size) float32 in [0, 1].
    """
    _require_images(images)
    _require(size >= 1, "size", size, "at least 1 pixel")
    sizes = _fill_sizes(images) if sizes is None else sizes
    side = sizes.amin(dim=-1).float()  # (N,)
    top, left = ((sizes - side.unsqueeze(-1)) / 2).round().unbind(-1)
    with torch.autocast(images.device.type, enabled=False):
        view = resample(images, top[None], left[None], side[None], side[None], size)
    return view.squeeze(0).clamp_(0, 1)


def _fill_sizes(images: Tensor) -> Tensor:
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
    fits = _count(value) == 2 and 0 < value[0] <= value[1] <= most and value[1] < float("inf")
    _require(fits, name, value, rule)


def _count(value: object) -> int:
    """Count the items of a tuple, list or array; a number, which somebody may give, has none."""
    return len(value) if isinstance(value, Sized) else 0


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}, but must be {rule}")


def _spread_chance(name: str, chance: float | Sequence[float], num_views: int) -> tuple[float, ...]:
    """Return the probability of each view."""
    chances = tuple(chance) if isinstance(chance, Sequence) else (chance,) * num_views
    fits = len(chances) == num_views and all(0 <= each <= 1 for each in chances)
    rule = f"a probability between 0 and 1, or one for each of the {num_views} views"
    _require(fits, name, chance, rule)
    return chances


def _decide(uniforms: Tensor, chances: tuple[float, ...]) -> Tensor:
    """Decide for each of M views of N images; ``uniforms`` (M, N), ``chances`` one of each view."""
    if len(set(chances)) == 1:
        return uniforms < chances[0]
    # Row by row: a tensor made of the chances would be copied to the device, and waited for.
    rows = zip(uniforms.unbind(), chances, strict=True)
    return torch.stack([row < chance for row, chance in rows])


def choose_boxes(
    area: Tensor,
    aspect: Tensor,
    position: Tensor,
    sizes: Tensor,
    area_range: tuple[float, float],
    aspect_range: tuple[float, float],
) -> Tensor:
    """Choose crop boxes as torchvision's RandomResizedCrop does, all its attempts at once.

    Args:
        area: (M, N, attempts) uniforms in [0, 1).
        aspect: (M, N, attempts) uniforms in [0, 1).
        position: (M, N, 2) uniforms in [0, 1).
        sizes: (N, 2) height and width of each image.

    Returns:
        (M, N, 4) int64: top, left, height and width of a box within the image.
    """
    smallest, largest = area_range
    narrow, wide = aspect_range
    image_height, image_width = sizes.float().unbind(-1)  # (N,) each
    pixels = (image_height * image_width).unsqueeze(-1) * (smallest + (largest - smallest) * area)
    ratio = torch.exp(math.log(narrow) + math.log(wide / narrow) * aspect)
    sides = torch.stack((pixels / ratio, pixels * ratio), dim=-1).sqrt().round()
    valid = ((sides > 0) & (sides <= sizes.unsqueeze(-2))).all(dim=-1)  # (M, N, attempts)
    first = valid.int().argmax(dim=-1)[..., None, None]  # argmax takes the first of equals
    chosen = sides.gather(-2, first.expand(-1, -1, 1, 2)).squeeze(-2)  # (M, N, 2)
    # Where no attempt was valid: the greatest central box whose aspect is within the range.
    found = valid.any(dim=-1, keepdim=True)
    limits = torch.stack((image_width / narrow, image_height * wide), dim=-1).round().clamp_min(1)
    chosen = torch.where(found, chosen, torch.minimum(sizes, limits))
    free = sizes - chosen
    random = torch.minimum((position * (free + 1)).floor(), free)
    start = torch.where(found, random, (free / 2).floor())
    return torch.cat((start, chosen), dim=-1).long()


def resample(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    height: Tensor,
    width: Tensor,
    size: int,
    flipped: Tensor | None = None,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Crop and resize as two batched matrix products, one along each side.

    Args:
        images: (N, C, H, W) uint8.
        top: (M, N), and so are left, height, width and flipped (bool).
        size: Height and width of the result.
        flipped: Which results to mirror, left to right; None for none.
        precision: Of the factors of the products and of the result.

    Returns:
        (M, N, C, size, size) of that precision, in [0, 1] up to rounding, contiguous.
    """
    num_views, num_images = top.shape
    channels = images.shape[1]
    mirror = None if flipped is None else flipped.T
    rows = _weigh_pixels(top.T, height.T, size, images.shape[2]).div_(255)  # (N, M, size, H)
    columns = _weigh_pixels(left.T, width.T, size, images.shape[3], mirror)  # (N, M, size, W)
    # With rows outside channels both products work on whole matrices, all views of an image share
    # the image, and nothing is copied between them.
    source = images.transpose(1, 2).to(precision, memory_format=torch.contiguous_format)
    half = torch.bmm(rows.flatten(1, 2).to(precision), source.flatten(2))  # (N, M * size, C * W)
    half = half.view(num_images * num_views, size * channels, -1)
    full = torch.bmm(half, columns.flatten(0, 1).to(precision).mT)  # (N * M, size * C, size)
    full = full.view(num_images, num_views, size, channels, size)
    return full.permute(1, 0, 3, 2, 4).contiguous()  # (M, N, C, size, size)


def _weigh_pixels(
    start: Tensor, extent: Tensor, size: int, length: int, mirrored: Tensor | None = None
) -> Tensor:
    """Return the weights (..., size, length) with which each source pixel enters each target pixel.

    It is bilinear interpolation with antialiasing: a triangle around the target's centre, reaching
    one source pixel or, when shrinking, one target pixel; cut off at the box's edges, normalised.
    ``start``, ``extent`` and ``mirrored`` (...) are the box's, along one side.
    """
    extent = extent.float()[..., None, None]  # (..., 1, 1)
    scale = extent / size
    source = torch.arange(length, device=start.device) + 0.5 - start[..., None, None]
    # A pixel outside the box is infinitely far away, which gives it the weight 0.
    source = torch.where((source > 0) & (source < extent), source, torch.inf)  # (..., 1, length)
    target = torch.arange(size, device=start.device).unsqueeze(-1) + 0.5  # (size, 1)
    if mirrored is not None:
        target = torch.where(mirrored[..., None, None], size - target, target)
    distance = (source - target * scale).abs_().div_(scale.clamp_min(1))  # (..., size, length)
    weights = distance.neg_().add_(1).clamp_min_(0)
    return weights.div_(weights.sum(dim=-1, keepdim=True))


def rotate_images(images: Tensor, angle: Tensor) -> Tensor:
    """Rotate square ``images`` (B, C, H, H) by ``angle`` (B,) degrees; what comes in is black."""
    cosine, sine = angle.deg2rad().cos(), angle.deg2rad().sin()
    zero = torch.zeros_like(sine)
    matrix = torch.stack((cosine, -sine, zero, sine, cosine, zero), dim=-1).view(-1, 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images.float(), grid, align_corners=False)


def blur_images(
    images: Tensor, sigma: Tensor, radius: int, precision: torch.dtype = torch.float32
) -> Tensor:
    """Blur ``images`` (B, C, H, H) by Gaussians of ``sigma`` (B,), reflecting at the edges.

    Sigma 0 changes nothing, but for rounding. The kernel, 2 * radius + 1 pixels wide, becomes a
    matrix: a pixel enters a target at its own distance and at those of its reflections in the two
    edges.
    """
    last = images.shape[-1] - 1
    index = torch.arange(last + 1, device=images.device)
    row, column = index.unsqueeze(1), index
    sharpness = 0.5 / sigma.square().clamp_min(1e-12).view(-1, 1, 1)
    # The pixels of the edges themselves are not repeated, so they have no reflection in their edge.
    weights = torch.zeros((), device=images.device)
    for distance, exists in (
        (row - column, column >= 0),
        (row + column, column > 0),
        (2 * last - row - column, column < last),
    ):
        reached = (distance.abs() <= radius) & exists  # (H, H)
        weights = weights + torch.exp(-sharpness * distance.square()) * reached  # (B, H, H)
    weights = (weights / weights.sum(dim=-1, keepdim=True)).to(precision)
    blurred = torch.bmm(images.to(precision).flatten(1, 2), weights.mT).view_as(images)
    return torch.matmul(weights.unsqueeze(1), blurred).float()
