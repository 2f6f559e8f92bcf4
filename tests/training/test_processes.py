"""Several processes with one joint batch take the step that one process takes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepbregman.config import load_recipe, override
from deepbregman.training.processes import is_mixed

SCRIPT = """
import sys
import torch
from torch import nn
from deepbregman.method.base_network import Encoder
from deepbregman.method.divergence_network import BregmanNetwork
from deepbregman.method.losses import TotalLoss
from deepbregman.method.model import Model
from deepbregman.method.transformation import Views
from deepbregman.training.assembly import Objective
from deepbregman.training.processes import gathering, launch

torch.set_num_threads(1)
fabric = launch("cpu")
torch.manual_seed(0)
trunk = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 12), nn.Tanh())
model = Model(Encoder(trunk, 12), nn.Linear(12, 6), BregmanNetwork(6, 5, 4, norm="none"))
loss = TotalLoss(contrastive=sys.argv[2], pairs=sys.argv[3], learn_sigma=True, smoothing=0.5)
gather = gathering(fabric) if fabric.world_size > 1 else None
views = Views(8)
objective = Objective(views, model.double(), loss.double(), gather)
objective, optimiser = fabric.setup(objective, torch.optim.SGD(objective.parameters(), 0.1))
images = torch.randint(0, 256, (3, 16, 3, 8, 8), dtype=torch.uint8)
for batch in images:
    draw = views.draw(16, device="cpu")
    mine = batch.chunk(fabric.world_size)[fabric.global_rank]
    draws = draw.chunk(fabric.world_size, dim=1)[fabric.global_rank]
    fabric.backward(objective(mine, None, draws).losses.total)
    optimiser.step()
    optimiser.zero_grad()
if fabric.is_global_zero:
    torch.save({k: v.detach() for k, v in objective.named_parameters()}, sys.argv[1])
"""


def trained(folder: Path, processes: int, *words: str) -> dict[str, torch.Tensor]:
    script, out = folder / "script.py", folder / f"{processes}.pt"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(script), str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    state: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return {name.split("module.")[-1]: value for name, value in state.items()}


@pytest.mark.parametrize(("contrastive", "pairs"), [("nt_xent", "all")])
def test_two_processes_equal_one(tmp_path: Path, contrastive: str, pairs: str) -> None:
    one, two = (trained(tmp_path, count, contrastive, pairs) for count in (1, 2))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0.0, atol=1e-10)


def test_precision_follows_the_device_unless_chosen() -> None:
    config = load_recipe("digits")
    assert not is_mixed(config, torch.device("cpu"))
    assert is_mixed(config, torch.device("cuda"))
    chosen = override(config, {"training.precision": "bf16-mixed"})
    assert is_mixed(chosen, torch.device("cpu"))
    assert not is_mixed(override(config, {"training.precision": "32-true"}), torch.device("cuda"))
