"""The finished parts of a stopped evaluation, kept so that the same command continues it.

A part is one variant of a protocol with one seed. ``RUN/finished_arms.json`` holds parts under a
digest of everything that their numbers depend on. A part leaves it when the rows of its protocol
are written, or when the run's networks have changed.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from deepbregman.config import to_toml
from deepbregman.data import Split
from deepbregman.files import digest, now, read_json
from deepbregman.runs import Record, Run, list_versions
from deepbregman.training.checkpoints import fingerprint_weights
from deepbregman.training.devices import device_name

from .feature_cache import digest_images
from .features import LabelledFeatures
from .results import Measurement

NAME = "finished_arms.json"
_SHAPE = {...: {"settings": {}, "measured": {"values": {...: float}, "predicted": str}}}


def describe_part(
    labelled: LabelledFeatures, images: Split, variant: str, seed: int, options: Record
) -> Record:
    """Collect everything that the numbers of a part depend on."""
    settings = {
        "variant": variant,
        "seed": seed,
        "networks": fingerprint_weights(labelled.model),
        "config": digest(to_toml(labelled.config).encode()),
        "data": labelled.source.name,
        "labelled": digest_split(images),
        "test": digest_split(labelled.source.known_test),
        "pixels": labelled.pixel_statistics,
        "num_classes": labelled.num_classes,
        "balanced": labelled.balanced,
        "device": device_name(labelled.device),
        "versions": list_versions(),
        **options,
    }
    record: Record = json.loads(json.dumps(settings))  # in the form in which it will be read
    return record


def digest_split(split: Split) -> str:
    """Tell splits apart by their labels and images."""
    return digest(split.known_labels.numpy().tobytes(), digest_images(split.images).encode())


@dataclass(frozen=True)
class FinishedParts:
    """The parts of a run's evaluation that need not be trained again."""

    run: Run
    say: Callable[[str], None]
    can_record: bool = True
    """Whether the run's folder can be written to; where not, nothing is kept."""
    _used: set[str] = field(default_factory=set, init=False)
    """Keys of the parts that the current protocol has measured or read."""

    def measure(self, settings: Record, work: Callable[[], Measurement]) -> Measurement:
        """Read a part that was measured before the evaluation was stopped, or measure it."""
        key, path = digest(json.dumps(settings, sort_keys=True).encode()), self.run.path / NAME
        finished = read_json(path, _SHAPE) if path.is_file() else {}
        if key in finished:
            self.say(
                f"not trained again, from {path}: {settings['variant']}, seed {settings['seed']}"
            )
            self._used.add(key)
            return Measurement(**finished[key]["measured"])
        measured = work()
        if self.can_record:
            with self.run.edit_record(NAME) as parts:
                for other, part in list(parts.items()):
                    if part["settings"]["networks"] != settings["networks"]:
                        del parts[other]  # it can never be used again
                parts[key] = {"settings": settings, "measured": asdict(measured), "finished": now()}
            self._used.add(key)
        return measured

    def forget(self) -> None:
        """Remove the parts of a protocol whose rows are written."""
        if self._used:
            with self.run.edit_record(NAME) as parts:
                for key in self._used:
                    parts.pop(key, None)
            self._used.clear()
