"""AMDIM (Bachman et al. 2019): the whole of one view fits the parts of another, at two scales."""

import torch
from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import AMDIMSettings
from deepbregman.method.bregman import widen
from deepbregman.method.networks import Encoder

from .dim import build_local_head, gather_places, nce_of_scores, score_places
from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head, list_pairs

COARSE, FINE = -1, -2
"""The stages whose features are compared: the last, and the one before."""


class AMDIM(Objective, settings=AMDIMSettings):
    """Whole against coarse, whole against fine, and coarse against coarse, across views."""

    def __init__(self, settings: AMDIMSettings, encoder: Encoder, widths: EncoderSettings) -> None:
        weights = {"infomax": settings.weight, "penalty": settings.weight * settings.penalty}
        super().__init__(encoder, build_head(encoder, widths), weights)
        self.coarse_head = build_local_head(encoder.stage_widths[COARSE], widths)
        self.fine_head = build_local_head(encoder.stage_widths[FINE], widths)
        self.clip = settings.clip

    def draw(self, num_images: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw the place of each image whose coarse features look for those of another view."""
        return torch.rand(num_images, device=device, generator=generator)

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Compare every main view with every other, in both directions."""
        assert samples.random is not None  # `draw` made it
        shape = views.main.shape[:2]
        with self.autocast():
            h, maps = self.encoder.encode_with_maps(views.main.flatten(0, 1))
            z = self.projection(h).unflatten(0, shape)
            local = self.coarse_head(maps[COARSE]), self.fine_head(maps[FINE])
        z = gather(z)  # (M, N, d)
        whole = widen(z)
        coarse, fine = (widen(gather_places(part, shape, gather)) for part in local)
        place = (samples.random * coarse.shape[2]).long().clamp_max(coarse.shape[2] - 1)
        one = coarse[:, torch.arange(len(place), device=place.device), place]  # (M, N, d)
        losses, squares = [], []
        for a, b in list_pairs(len(whole)):
            for query, places in ((whole, coarse), (whole, fine), (one, coarse)):
                loss, square = tell_places(query[a], places[b], self.clip)
                losses.append(loss)
                squares.append(square)
        # Sums over the three comparisons, means over the pairs of views.
        terms = {
            "infomax": 3 * torch.stack(losses).mean(),
            "penalty": 3 * torch.stack(squares).mean(),
        }
        return Outputs(terms, z, None, h.detach().view(*shape, -1))


def tell_places(query: Tensor, places: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy of finding an image's own places among all places, by bounded scores.

    Args:
        query: (N, d) of one view.
        places: (N, P, d) of another.
        clip: c; a score s becomes ``c tanh(s / c)``.

    Returns:
        The loss, and the mean square of the scores before they are bounded.
    """
    scores, itself = score_places(query / query.shape[1] ** 0.5, places)
    return nce_of_scores(clip * torch.tanh(scores / clip), itself), scores.square().mean()
