"""Deep Divergence (Cilingir et al. 2020): a divergence learned from labels, as a reference."""

from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import DeepDivergenceSettings
from deepbregman.method.bregman import divergence, moment_divergence, soft_divergence
from deepbregman.method.losses import METRIC_LOSSES
from deepbregman.method.networks import BregmanNetwork, Encoder

from .objective import Gather, Objective, Outputs, Samples, ViewGroups, build_head

FORMS = {"max": divergence, "smooth": soft_divergence, "moment": moment_divergence}
"""Form -> the divergence (N, M) of scores (N, K) and (M, K), or of sets of them (N, S, K)."""


class DeepDivergence(Objective, settings=DeepDivergenceSettings):
    """Its own subnetworks, with ReLU, score embeddings; images of one class are to diverge less."""

    def __init__(
        self, settings: DeepDivergenceSettings, encoder: Encoder, widths: EncoderSettings
    ) -> None:
        super().__init__(encoder, build_head(encoder, widths), {"metric": settings.weight})
        self.subnetworks = BregmanNetwork(
            widths.embedding, settings.num_subnetworks, settings.hidden, activation="relu"
        )
        self.form, self.loss = FORMS[settings.form], METRIC_LOSSES[settings.loss]
        self.margin = settings.margin

    def forward(self, views: ViewGroups[Tensor], gather: Gather, samples: Samples) -> Outputs:
        """Compare every sample with every other."""
        assert samples.labels is not None  # the settings ask for them
        h, z = self.embed(views.main)
        scores = gather(self.apply_head(self.subnetworks, z)).flatten(0, 1)  # (MN, K)
        loss = self.loss(self.form(scores, scores), samples.labels.repeat(len(z)), self.margin)
        return Outputs({"metric": loss}, gather(z), None, h.detach())
