"""What is replaced; that it computes the joint batch's norm is tested in test_processes.py."""

import pytest
import torch
from torch import nn

from deepbregman.config import load_recipe, override
from deepbregman.errors import UserError
from deepbregman.objectives import build_step
from deepbregman.training.processes import SynchronisedNorm, synchronise_norms

KINDS = {"cpu": SynchronisedNorm, "cuda": nn.SyncBatchNorm}


@pytest.mark.parametrize("device", KINDS)
def test_every_norm_is_replaced_and_nothing_else(device):
    model = build_step(override(load_recipe("digits"), {"encoder.name": "resnet18"})).objective
    names = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert len(names) == 20 + 1  # the encoder's and the projection's
    before, parameters = model.state_dict(), list(model.parameters())
    synchronise_norms(model, torch.device(device))
    replaced = [n for n, m in model.named_modules() if isinstance(m, KINDS[device])]
    assert replaced == names
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert model.state_dict().keys() == before.keys()  # a checkpoint fits one process and many
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_evaluation_needs_no_other_process():
    ordinary = nn.Sequential(nn.BatchNorm1d(3))
    ordinary(torch.randn(5, 3))
    ordinary.eval()
    inputs = torch.randn(4, 3)
    expected = ordinary(inputs)
    synchronise_norms(ordinary, torch.device("cpu"))
    assert torch.equal(ordinary(inputs), expected)


class NormThenReLU(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize("device", KINDS)
def test_a_norm_that_does_more_is_not_replaced(device):
    with pytest.raises(UserError, match=r"NormThenReLU does more.*sync_norm to false"):
        synchronise_norms(nn.Sequential(nn.Sequential(NormThenReLU(3))), torch.device(device))
