"""CPC v2 (Henaff et al. 2020): what lies above in an image predicts the patches below."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import CPCSettings
from deepbregman.method.bregman import widen
from deepbregman.method.networks import Encoder, embed_patches

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head

OVERLAP = 1
"""Rows next to a patch that share pixels with it, and are too easy to predict."""


class CPC(Objective, settings=CPCSettings):
    """Patches are embedded one by one; a masked convolution sums up those above each.

    The same is done with the image turned, once for each direction, by context networks of their
    own. The encoder keeps its batch normalisation, which the paper replaces. An image's
    representation and embedding are the means of its patches'; the encoder cuts the patches itself.
    """

    def __init__(self, settings: CPCSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"prediction": settings.weight})
        self.settings, width, directions = settings, widths.embedding, settings.directions
        self.contexts = ContextNetworks(directions, width, settings.layers)
        self.predictors = DirectedLinear(directions, width, settings.steps * width, bias=False)

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw the patches that are negatives."""
        return torch.rand(self.settings.negatives, device=device, generator=generator)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Predict the patches of every main view, each view by itself."""
        assert samples.random is not None  # `draw` made it
        shape = views.main.shape[:2]
        with self.autocast():
            h = self.encoder.encode_patches(views.main.flatten(0, 1))  # (M * n, G * G, h)
            grid = round(h.shape[1] ** 0.5)
            z = self.projection(h.flatten(0, 1)).unflatten(0, (-1, grid, grid))
            context = self.contexts(self._turn(z))  # (D, M * n, G, G, d)
        z = _join(z, shape, gather)  # (M, N, G, G, d)
        context = _join(context.flatten(0, 1), (-1, shape[1]), gather)  # (D * M, N, G, G, d)
        context = context.view(-1, *z.shape)
        with self.autocast():
            loss = self._predict(context, self._turn(z), samples.random)
        h = h.detach().mean(dim=1).view(*shape, -1)
        return Outputs({"prediction": loss}, z.mean(dim=(2, 3)), None, h)

    def join_student(self) -> nn.Sequential:
        """Return encoder and projection as one network; its teacher sees patches as it does."""
        return _PatchEmbedder(self.encoder, self.projection)

    def _turn(self, z: Tensor) -> Tensor:
        """Turn grids (..., G, G, d) so that each direction is from the top: (D, ..., G, G, d)."""
        turns = range(self.settings.directions)
        return torch.stack([torch.rot90(z, turn, (-3, -2)) for turn in turns])

    def _predict(self, context: Tensor, targets: Tensor, random: Tensor) -> Tensor:
        """Return the mean loss over steps, directions and views; both are (D, M, N, G, G, d).

        The rows that a step predicts are R in all.
        """
        grid, steps = targets.shape[3], range(1 + OVERLAP, 1 + OVERLAP + self.settings.steps)
        guesses = self.predictors(context[:, :, :, : grid - steps[0]])
        guesses = guesses.unflatten(-1, (len(steps), -1)).unbind(-2)
        predicted = torch.cat(
            [part[:, :, :, : grid - step] for step, part in zip(steps, guesses, strict=True)], dim=3
        )  # (D, M, N, R, G, d)
        own = torch.cat([targets[:, :, :, step:] for step in steps], dim=3)
        flat = targets.flatten(2, 4)  # (D, M, N * G * G, d)
        count = flat.shape[2]
        chosen = (random * count).long().clamp_max(count - 1)  # (m,)
        places = torch.arange(count, device=flat.device).view(targets.shape[2:5])
        places = torch.cat([places[:, step:] for step in steps], dim=1)  # (N, R, G)
        losses = patch_info_nce(
            predicted.flatten(2, 4),
            own.flatten(2, 4),
            flat[:, :, chosen],
            places.view(-1, 1) == chosen,
        ).view(predicted.shape[:-1])
        of_rows = losses.mean(dim=(0, 1, 2, 4))  # (R,)
        of_steps = torch.split(of_rows, [grid - step for step in steps])
        return torch.stack([part.mean() for part in of_steps]).mean()


class _PatchEmbedder(nn.Sequential):
    """An encoder and a projection: images to the mean of their patches' embeddings."""

    def forward(self, images: Tensor) -> Tensor:
        encoder = cast(Encoder, self[0])
        return embed_patches(self[1], encoder.encode_patches(images))


class DirectedLinear(nn.Module):
    """A linear layer for each direction, all by one batched product."""

    def __init__(self, directions: int, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        bound = inputs**-0.5  # as in nn.Linear and nn.Conv2d
        self.weight = nn.Parameter(torch.empty(directions, inputs, outputs).uniform_(-bound, bound))
        self.bias = (
            nn.Parameter(torch.empty(directions, outputs).uniform_(-bound, bound)) if bias else None
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (D, ..., inputs) to (D, ..., outputs)."""
        flat = inputs.flatten(1, -2)
        if self.bias is None:
            found = torch.bmm(flat, self.weight)
        else:
            found = torch.baddbmm(self.bias[:, None], flat, self.weight)
        return found.view(*inputs.shape[:-1], -1)


class Neighbours(nn.Module):
    """Puts the six places side by side that a place sees: three in its row, three in that above."""

    def forward(self, found: Tensor) -> Tensor:
        """Map (D, N, G, G, d) to (D, N, G, G, 6d), zeros beyond the rim."""
        side = found.shape[2]
        padded = F.pad(found, (0, 0, 1, 1, 1, 0))  # columns left and right, a row above
        rows = torch.cat([padded[:, :, :-1], padded[:, :, 1:]], dim=-1)
        return torch.cat([rows[:, :, :, start : start + side] for start in range(3)], dim=-1)


class ContextNetworks(nn.Module):
    """Residual blocks of masked convolutions: a place sees itself and the rows above, no others.

    Each of the ``layers`` lets a place see one row more. Each direction has weights of its own.
    """

    def __init__(self, directions: int, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                DirectedLinear(directions, width, width),
                nn.ReLU(),
                Neighbours(),
                DirectedLinear(directions, 6 * width, width),
                nn.ReLU(),
                DirectedLinear(directions, width, width),
            )
            for _ in range(layers)
        )

    def forward(self, z: Tensor) -> Tensor:
        """Sum up what is above: (D, N, G, G, d) to the same."""
        for block in self.blocks:
            z = z + block(z)
        return z


def _join(grids: Tensor, shape: Sequence[int], gather: Gather) -> Tensor:
    """Join grids (M * n, G, G, d) of all processes to (M, N, G, G, d); ``shape`` is (M, n)."""
    joint = gather(grids.reshape(*shape, grids[0].numel()))
    return joint.view(*joint.shape[:2], *grids.shape[1:])


def patch_info_nce(predicted: Tensor, own: Tensor, others: Tensor, itself: Tensor) -> Tensor:
    """InfoNCE: the dot product with the patch itself, among those with patches drawn at random.

    Args:
        predicted: (..., B, d)
        own: (..., B, d) the patches that were to be predicted.
        others: (..., m, d)
        itself: (B, m), where one of the others is the patch itself, by chance.

    Returns:
        (..., B)
    """
    positive = (widen(predicted) * widen(own)).sum(dim=-1)  # (..., B)
    negative = widen(predicted @ others.mT).masked_fill(itself, -torch.inf)  # (..., B, m)
    return F.softplus(negative.logsumexp(dim=-1) - positive)
