"""Files of tensors that anybody may have written."""

import io
import zipfile
from typing import Any

import torch


def check_parts(archive: zipfile.ZipFile, num_bytes: int) -> None:
    """Refuse an archive whose parts would be larger than itself, before one of them is read."""
    if sum(part.file_size for part in archive.infolist()) > num_bytes:
        raise ValueError("its parts are larger than the file")


def read_tensors(content: bytes | memoryview, device: torch.device | str = "cpu") -> Any:
    """Read what ``torch.save`` wrote; nothing in it is executed.

    torch would unpack parts that are compressed, to whatever size they have, and read the format
    of before 2020 as well. ``torch.save`` writes neither.

    Raises:
        Exception: Of a dozen kinds, on bytes that ``torch.save`` did not write.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        check_parts(archive, len(content))
    return torch.load(io.BytesIO(content), map_location=device, weights_only=True)
