"""CPC v2 (Henaff et al. 2020): what lies above in an image predicts the patches below."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import CPCSettings
from deepbregman.method.losses import widen
from deepbregman.method.networks import Encoder
from deepbregman.method.patches import cut_patches

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head

OVERLAP = 1
"""Rows next to a patch that share pixels with it, and are too easy to predict."""


class CPC(Objective, settings=CPCSettings):
    """Patches are embedded one by one; a masked convolution sums up those above each.

    The same is done with the image turned, once for each direction, by context networks of their
    own. The encoder keeps its batch normalisation, which the paper replaces. In training an image's
    embedding is the mean of its patches'. Later the encoder cuts images into the same patches
    itself, and the embedding is that of their mean representation.
    """

    def __init__(self, settings: CPCSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"prediction": settings.weight})
        self.settings, width = settings, widths.embedding
        turns = range(settings.directions)
        self.contexts = nn.ModuleList(ContextNetwork(width, settings.layers) for _ in turns)
        count = settings.directions * settings.steps
        self.predictors = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw the patches that are negatives."""
        return torch.rand(self.settings.negatives, device=device, generator=generator)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Predict the patches of every main view, each view by itself."""
        assert samples.random is not None  # `draw` made it
        shape, patches = views.main.shape[:2], self._cut(views.main)
        grid = patches.shape[1]
        with self.autocast():
            h = self.encoder(patches.flatten(0, 2))  # (M * n * G * G, h)
            z = self.projection(h).view(-1, grid, grid, self.contexts[0].width)
            turned = [torch.rot90(z, turn, (1, 2)) for turn in range(len(self.contexts))]
            contexts = [net(part) for net, part in zip(self.contexts, turned, strict=True)]
        losses = []
        steps = self.settings.steps
        for turn, (part, context) in enumerate(zip(turned, contexts, strict=True)):
            predictors = self.predictors[turn * steps : (turn + 1) * steps]
            targets, seen = (_join(each, shape, gather) for each in (part, context))
            losses += [
                self._predict(predictors, *view, samples.random)
                for view in zip(seen, targets, strict=True)
            ]
        student = gather(z.mean(dim=(1, 2)).unflatten(0, shape))
        h = h.view(*shape, grid * grid, -1).mean(dim=2)
        return Outputs({"prediction": torch.stack(losses).mean()}, student, None, h.detach())

    def embed_by(self, teacher: nn.Module, views: Tensor, gather: Gather) -> Tensor:
        """Embed views by a teacher as the student does: the mean of the patches' embeddings."""
        patches = self._cut(views)
        with self.autocast():
            z: Tensor = teacher(patches.flatten(0, 2))
        z = z.view(*views.shape[:2], -1, z.shape[1]).mean(dim=2)
        return gather(z).detach()

    def _cut(self, views: Tensor) -> Tensor:
        """Cut views (M, n, 3, S, S) into patches (M * n, G, G, 3, side, side)."""
        side = self.settings.patch_side(views.shape[-1])
        return cut_patches(views.flatten(0, 1), side, side // 2)

    def _predict(
        self, predictors: nn.ModuleList, context: Tensor, targets: Tensor, random: Tensor
    ) -> Tensor:
        """Return the mean loss over the steps; context and targets are (N, G, G, d) of a view."""
        flat = targets.flatten(0, 2)  # (N * G * G, d)
        chosen = (random * len(flat)).long().clamp_max(len(flat) - 1)  # (m,)
        places = torch.arange(len(flat), device=flat.device).view(targets.shape[:3])
        others = flat[chosen]  # (m, d), gathered once for all steps
        losses = []
        for step, predictor in enumerate(predictors, start=1 + OVERLAP):
            predicted = predictor(context[:, :-step]).flatten(0, 2)
            itself = places[:, step:].flatten()[:, None] == chosen
            own = targets[:, step:].flatten(0, 2)
            losses.append(patch_info_nce(predicted, own, others, itself))
        return torch.stack(losses).mean()


class ContextNetwork(nn.Module):
    """Residual blocks of masked convolutions: a place sees itself and the rows above, no others.

    Each of the ``layers`` lets a place see one row more.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 1),
                nn.ReLU(),
                nn.ZeroPad2d((1, 1, 1, 0)),  # a row above, so that the kernel ends at its place
                nn.Conv2d(width, width, (2, 3)),
                nn.ReLU(),
                nn.Conv2d(width, width, 1),
            )
            for _ in range(layers)
        )

    def forward(self, z: Tensor) -> Tensor:
        """Sum up what is above: (N, G, G, d) to the same."""
        found = z.movedim(-1, 1)
        for block in self.blocks:
            found = found + block(found)
        return found.movedim(1, -1)


def _join(grid: Tensor, shape: torch.Size, gather: Gather) -> Tensor:
    """Join grids (M * n, G, G, d) of all processes to (M, N, G, G, d)."""
    joint = gather(grid.reshape(*shape, -1))
    return widen(joint.view(*joint.shape[:2], *grid.shape[1:]))


def patch_info_nce(predicted: Tensor, own: Tensor, others: Tensor, itself: Tensor) -> Tensor:
    """InfoNCE: the dot product with the patch itself, among those with patches drawn at random.

    Args:
        predicted: (B, d)
        own: (B, d) the patches that were to be predicted.
        others: (m, d)
        itself: (B, m), where one of the others is the patch itself, by chance.
    """
    positive = (predicted * own).sum(dim=1)  # (B,)
    negative = (predicted @ others.T).masked_fill(itself, -torch.inf)  # (B, m)
    return F.softplus(negative.logsumexp(dim=1) - positive).mean()
