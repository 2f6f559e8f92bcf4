"""SCE (Denize et al. 2023): ReSSL's relations together with InfoNCE, in one soft target.

The target of an image is its own key with weight ``coefficient``, and the teacher's relations to
the bank with the rest. The cross-entropy with it is a sum of three terms: InfoNCE, the matched
divergence of ReSSL (up to the entropy of the target), and what ties the two together.
"""

from torch import Tensor

from deepbregman.config import EncoderSettings
from deepbregman.config.methods import SCESettings
from deepbregman.method.losses import bank_share_loss, info_nce
from deepbregman.method.networks import Encoder

from .ressl import ReSSL


class SCE(ReSSL, settings=SCESettings):
    """The three terms of similarity contrastive estimation, each logged by its name."""

    def __init__(self, settings: SCESettings, encoder: Encoder, widths: EncoderSettings) -> None:
        super().__init__(settings, encoder, widths)
        own, rest = settings.coefficient, 1.0 - settings.coefficient
        shares = {"contrastive": own, "relation": rest, "bank_share": rest}
        self.weights = {name: settings.weight * share for name, share in shares.items()}

    def compare(self, z: Tensor, target: Tensor, bank: Tensor) -> dict[str, Tensor]:
        """Compute the loss terms of one view (N, d) and one target (N, d)."""
        temperature = self.temperature
        return {
            "contrastive": info_nce(z, target, bank, temperature=temperature, in_batch=False),
            **super().compare(z, target, bank),
            "bank_share": bank_share_loss(z, target, bank, temperature=temperature),
        }
