"""The divergence in a Lightning module (pip install lightning)."""

try:
    from lightning import LightningModule, Trainer
except ImportError:
    from pytorch_lightning import LightningModule, Trainer  # its other name
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from deepbregman import BregmanNetwork, Views, divergence_loss, gather, nt_xent


class Contrastive(LightningModule):
    """SimCLR with the paper's divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.views = Views(size=8)
        self.base = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 32)
        )
        self.subnetworks = BregmanNetwork(in_features=32, num_subnetworks=20)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        z = self.base(self.views(batch[0]).flatten(0, 1))
        (z1, z2), (o1, o2) = z.chunk(2), self.subnetworks(z).chunk(2)
        # With several devices the losses see the joint batch; give Trainer sync_batchnorm=True too.
        contrastive = nt_xent(z1, z2, temperature=0.2, gather=gather)
        divergence = divergence_loss(o1, o2, sigma=1.5, gather=gather)
        self.log_dict({"contrastive": contrastive, "divergence": divergence})
        return contrastive + 0.2 * divergence

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    digits = torch.from_numpy(load_digits().images * 15.9).to(torch.uint8)
    images = TensorDataset(digits[:, None].repeat(1, 3, 1, 1))
    trainer = Trainer(
        max_epochs=1,
        limit_train_batches=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Contrastive(), DataLoader(images, batch_size=64, shuffle=True, drop_last=True))
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
