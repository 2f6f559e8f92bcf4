"""Where images live: on the device when they fit, else they are streamed."""

import torch

from deepbregman.data.batches import Batches
from deepbregman.data.images import ArrayImages, Images, Progress
from deepbregman.data.memory import free_memory
from deepbregman.data.resident import ResidentBatches
from deepbregman.data.streaming import StreamingBatches
from deepbregman.errors import UserError, nearest

_RESIDENT_SHARE = 0.4
"""Images live on the device when they take at most this share of its free memory."""


def open_batches(
    images: Images,
    device: torch.device,
    *,
    resident: str = "auto",
    num_workers: int = 2,
    skip_unreadable: bool = False,
    progress: Progress | None = None,
) -> Batches:
    """Put images on the device when they fit, and stream them otherwise.

    Args:
        images: The images.
        device: Where the batches are wanted.
        resident: ``yes``, ``no``, or ``auto``: yes when they take at most 0.4 of the free memory
            of the device, or are an array in the memory of the CPU that is the device.
        num_workers: Processes that decode files when streaming.
        skip_unreadable: Replace what cannot be decoded by its neighbour instead of stopping.
        progress: Called with the files decoded and the files in all, when resident.

    Raises:
        UserError: When ``resident`` is not one of the three, or is ``yes`` and they do not fit.
    """
    choices = ("auto", "yes", "no")
    if resident not in choices:
        raise UserError(
            f"data.resident {resident!r}: not one of {', '.join(choices)}"
            f"{nearest(resident, choices)}"
        )
    in_place = isinstance(images, ArrayImages) and device.type == images.pixels.device.type
    free = _free_memory(device)
    if resident == "yes" and not in_place and images.nbytes > free:
        raise UserError(
            f"data.resident 'yes': the images take {images.nbytes / 1e9:.1f} GB and {device} has "
            f"{free / 1e9:.1f} GB free; use 'auto' or 'no', or a smaller data.image_size"
        )
    fits = in_place or images.nbytes <= _RESIDENT_SHARE * free
    if resident == "yes" or (resident == "auto" and fits):
        return ResidentBatches(images, device, skip_unreadable=skip_unreadable, progress=progress)
    return StreamingBatches(
        images, device, num_workers=num_workers, skip_unreadable=skip_unreadable
    )


def _free_memory(device: torch.device) -> int:
    """Return the free bytes of the device."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()
