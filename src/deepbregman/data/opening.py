"""Opening data with the settings of a run."""

from pathlib import Path

import torch

from deepbregman.config import Config
from deepbregman.data import Batches, Images, Source, open_batches, open_source
from deepbregman.launching import current_process


def open_data(config: Config, source: str | None = None) -> Source:
    """Open a run's source, or another one in its place, with the run's settings.

    A folder without a test split has one set aside; which images depends on the folder alone, so
    that runs of several seeds are judged by the same.
    """
    return open_source(
        source or config.data.source,
        root=Path(config.data.root),
        image_size=config.data.image_size,
        skip_unreadable=config.data.skip_unreadable,
    )


def batch_images(images: Images, config: Config, device: torch.device) -> Batches:
    """Bring images to a device, resident or streamed, with the run's settings."""
    return open_batches(
        images,
        device,
        resident=config.data.resident,
        num_workers=config.data.workers,
        local_processes=current_process().local_processes,
        skip_unreadable=config.data.skip_unreadable,
    )
