"""Deep InfoMax (Hjelm et al. 2019): the embedding of an image matches the features of its parts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import DIMSettings
from deepbregman.method.bregman import widen
from deepbregman.method.networks import Encoder

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head


class DeepInfoMax(Objective, settings=DIMSettings):
    """Tells by its embedding which places, parts of a feature map, belong to an image.

    It is DIM(L) of the paper, by dot products, without the term that matches a prior.
    """

    def __init__(self, settings: DIMSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"infomax": settings.weight})
        self.stage = settings.stage - 1
        self.local_head = build_local_head(encoder.stage_widths[self.stage], widths)
        self.loss = LOSSES[settings.loss]

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Compare the whole and the parts of every main view, each view by itself."""
        shape = views.main.shape[:2]
        with self.autocast():
            h, maps = self.encoder.encode_with_maps(views.main.flatten(0, 1))
            z = self.projection(h).unflatten(0, shape)
            local = self.local_head(maps[self.stage])  # (M * n, d, G, G)
        z, places = gather(z), gather_places(local, shape, gather)  # (M, N, d), (M, N, P, d)
        with self.autocast():  # in float32, scoring took a sixth of a step on a GPU
            losses = [self.loss(*view) for view in zip(z, places, strict=True)]
        h = h.detach().view(*shape, -1)
        return Outputs({"infomax": torch.stack(losses).mean()}, z, None, h)


def build_local_head(channels: int, widths: EncoderSettings) -> nn.Sequential:
    """Build the head of each place: two convolutions of one pixel."""
    return nn.Sequential(
        nn.Conv2d(channels, widths.projection_hidden, 1, bias=False),
        nn.BatchNorm2d(widths.projection_hidden),
        nn.ReLU(inplace=True),
        nn.Conv2d(widths.projection_hidden, widths.embedding, 1),
    )


def gather_places(maps: Tensor, shape: torch.Size, gather: Gather) -> Tensor:
    """Join the maps (M * n, d, G, G) of all processes; return (M, N, P, d), P = G * G places.

    ``shape`` is (M, n).
    """
    width = maps.shape[1]
    flat = maps.flatten(2).transpose(1, 2).reshape(*shape, -1)  # (M, n, P * d)
    joint = gather(flat)
    return joint.view(*joint.shape[:2], -1, width)


def score_places(z: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Score every image's embedding (N, d) against every image's places (N, P, d).

    Returns:
        The scores (N, N, P), embeddings first, and the mask (N, N, 1) of an image with itself.
    """
    scores = widen(torch.einsum("id,jpd->ijp", z, places))
    return scores, torch.eye(len(z), dtype=torch.bool, device=z.device)[..., None]


def jensen_shannon(z: Tensor, places: Tensor) -> Tensor:
    """Negative estimate of the information by Jensen and Shannon, without its constant.

    The mean of ``softplus(-score)`` over an image's own places plus the mean of ``softplus(score)``
    over those of other images; ``z`` is (N, d), ``places`` (N, P, d).
    """
    scores, itself = score_places(z, places)
    count, num_places = len(z), places.shape[1]
    own = (F.softplus(-scores) * itself).sum() / (count * num_places)
    others = (F.softplus(scores) * ~itself).sum() / (count * (count - 1) * num_places)
    return own + others


def info_nce_of_places(z: Tensor, places: Tensor) -> Tensor:
    """Cross-entropy of each of an image's places (N, P, d) among it and the places of others."""
    return nce_of_scores(*score_places(z, places))


def nce_of_scores(scores: Tensor, itself: Tensor) -> Tensor:
    """Return the cross-entropy for scores (N, N, P) and the mask (N, N, 1) of own places."""
    others = scores.masked_fill(itself, -torch.inf).logsumexp(dim=(1, 2))  # (N,)
    own = scores.diagonal(dim1=0, dim2=1).T  # (N, P)
    return F.softplus(others[:, None] - own).mean()


LOSSES = {"jsd": jensen_shannon, "info_nce": info_nce_of_places}
