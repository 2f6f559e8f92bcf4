"""Lightning Fabric, imported without torchmetrics.

Where torchmetrics is installed, Fabric imports it, only to compare its version. With it come scipy,
torchvision and whatever else it finds: seconds that no run needs.
"""

import importlib
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


def _import_fabric() -> None:
    """Import Fabric while a module with nothing but the version stands in for torchmetrics."""
    stand_in = ModuleType("torchmetrics")
    with suppress(PackageNotFoundError):
        stand_in.__dict__["__version__"] = version("torchmetrics")
        if sys.modules.setdefault("torchmetrics", stand_in) is stand_in:
            try:
                importlib.import_module("lightning_fabric")
            except (AttributeError, ImportError, ValueError):  # it needs more: import both below
                pass
            finally:
                del sys.modules["torchmetrics"]


_import_fabric()
# ruff: noqa: E402  # the imports below come after the stand-in
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy

__all__ = [
    "DDPStrategy",
    "Fabric",
    "LightningEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
]
