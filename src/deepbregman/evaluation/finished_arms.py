"""What a stopped evaluation had measured: kept arm by arm, so that the same command goes on.

``RUN/finished_arms.json`` holds arms under a digest of everything that their numbers depend on. An
arm leaves it when the rows of its protocol are written, or when the run's networks have changed.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from rich.console import Console

from deepbregman.config import to_toml
from deepbregman.data import Split
from deepbregman.data.images import ArrayImages
from deepbregman.errors import UserError
from deepbregman.runs import Record, Run, now, read_json
from deepbregman.training.checkpoints import fingerprint
from deepbregman.training.processes import device_name

from .rows import Measured
from .subject import Subject

NAME = "finished_arms.json"


def settings_of(subject: Subject, labelled: Split, variant: str, seed: int, told: Record) -> Record:
    """Collect everything that the numbers of one arm depend on.

    Args:
        subject: what is judged, and on what.
        labelled: the images that the arm learns from.
        variant: its name.
        seed: of all that is drawn.
        told: its budget and grids.
    """
    assert subject.source.test is not None  # open_labelled has made sure
    settings = {
        "variant": variant,
        "seed": seed,
        "networks": fingerprint(subject.model),
        "config": _digest(to_toml(subject.config).encode()),
        "data": subject.source.name,
        "labelled": _digest_of(labelled),
        "test": _digest_of(subject.source.test),
        "pixels": subject.pixels,
        "num_classes": subject.num_classes,
        "balanced": subject.balanced,
        "device": device_name(subject.device),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepbregman")},
        **told,
    }
    record: Record = json.loads(json.dumps(settings))  # as it is read again
    return record


def _digest(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} ".encode())
        digest.update(part)
    return digest.hexdigest()[:16]


def _digest_of(split: Split) -> str:
    """Tell splits apart: by pixels, or by the paths, sizes and times of files; and by labels."""
    assert split.labels is not None
    labels = split.labels.numpy().tobytes()
    images = split.images
    if isinstance(images, ArrayImages):
        sizes = images.true_sizes().contiguous().numpy().tobytes()
        return _digest(labels, sizes, images.pixels.contiguous().numpy().data.cast("B"))
    files = [(str(path), path.stat()) for path in images.paths]
    known = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
    return _digest(labels, json.dumps([images.side, known]).encode())


@dataclass(frozen=True)
class FinishedArms:
    """The arms of a run's evaluation that need not be trained again."""

    run: Run
    console: Console
    _used: set[str] = field(default_factory=set, init=False)
    """Those that the protocol which runs now has measured or taken."""
    _taken: list[str] = field(default_factory=list, init=False)
    """Those taken that the user has not been told of."""

    def measure(self, settings: Record, work: Callable[[], Measured]) -> Measured:
        """Measure an arm and keep that, or take what it came to before the evaluation was stopped.

        Args:
            settings: of :func:`settings_of`.
            work: trains and tests the arm.
        """
        key = _digest(json.dumps(settings, sort_keys=True).encode())
        found = self._find(key)
        if found is not None:
            self._taken.append(f"{settings['variant']}, seed {settings['seed']}")
            self._used.add(key)
            return found
        self._tell()
        try:
            measured = work()
        except KeyboardInterrupt as error:
            if not self._used:
                raise
            words = f"stopped; {len(self._used)} finished arms are kept, continue by giving the "
            raise KeyboardInterrupt(f"{words}same command again") from error
        with self.run.changing(NAME) as arms:
            for other in [other for other in arms if not _is_of(arms[other], settings)]:
                del arms[other]  # of networks that are no more
            arms[key] = {"settings": settings, "measured": asdict(measured), "finished": now()}
        self._used.add(key)
        return measured

    def forget(self) -> None:
        """Remove the arms of a protocol whose rows are written."""
        self._tell()
        if self._used:
            with self.run.changing(NAME) as arms:
                for key in self._used:
                    arms.pop(key, None)
            self._used.clear()

    def _find(self, key: str) -> Measured | None:
        path = self.run.path / NAME
        arms = read_json(path) if path.is_file() else {}
        if key not in arms:
            return None
        try:
            measured = Measured(**arms[key]["measured"])
            numbers = [*measured.values.values(), measured.num_train, measured.num_test]
            if not all(isinstance(number, int | float) for number in numbers):
                raise TypeError("an arm without numbers")
        except (AttributeError, KeyError, TypeError) as error:
            words = f"{path} holds an arm that none of ours wrote ({error}): remove it"
            raise UserError(words) from None
        return measured

    def _tell(self) -> None:
        if self._taken:
            words = f"not trained again, from {self.run.path / NAME}: {'; '.join(self._taken)}"
            self.console.print(words, soft_wrap=True, highlight=False, markup=False)
            self._taken.clear()


def _is_of(arm: object, settings: Record) -> bool:
    """Whether an arm was measured with the networks of these settings."""
    before = arm.get("settings") if isinstance(arm, dict) else None
    return isinstance(before, dict) and before.get("networks") == settings["networks"]
