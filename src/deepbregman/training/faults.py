"""What stops a run from outside, in words that say how to go on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepbregman.config import Config
from deepbregman.errors import UserError, explain_error, is_out_of_memory


@contextmanager
def explained(config: Config, folder: Path) -> Iterator[None]:
    """Turn what the disk, the memory or a second Ctrl-C did to a run into words.

    Args:
        config: of the run.
        folder: of the run, which may not exist yet.
    """
    go_on = f"continue with: deepbregman pretrain --resume {folder}"
    try:
        yield
    except KeyboardInterrupt:
        if not (folder / "config.toml").is_file():
            raise
        words = f"stopped at once, without saving; what was saved before is kept, {go_on}"
        raise KeyboardInterrupt(words) from None
    except OSError as error:
        if not folder.exists() and str(error.filename or "").startswith(str(folder)):
            raise UserError(
                f"the run folder {folder} is gone: it was removed or moved while the run was "
                f"training; put it back, then {go_on}"
            ) from error
        told = explain_error(error)
        if told is None or not (folder / "config.toml").is_file():
            raise
        raise UserError(f"{told[0]}; then {go_on}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(_memory(config, error)) from error


def _memory(config: Config, error: BaseException) -> str:
    training = config.training
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return (
        f"out of memory ({reason}) with training.batch_size {training.batch_size} times "
        f"{config.views.num_views} views of {config.view_size} px and encoder "
        f"{config.encoder.name}: lower training.batch_size and raise training.accumulate "
        f"({training.accumulate}) in proportion, lower views.relative_size, data.image_size or "
        "divergence.num_subnetworks, or keep the images off the device with --data.resident no"
    )
