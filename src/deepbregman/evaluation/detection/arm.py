"""One detector: a trunk, a seed, its training and its scores, in a folder of its own."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepbregman.data.voc import CLASSES, Detections, Voc
from deepbregman.errors import UserError
from deepbregman.runs import Record, Run, now, parse_json, replacing, write_json
from deepbregman.training.assembly import untrained_encoder
from deepbregman.training.checkpoints import Trained, fingerprint
from deepbregman.training.processes import device_name
from deepbregman.training.seeds import derived

from .metric import Found, score
from .models import Detector, build_detector, load_trunk
from .options import Architecture, Arm, Detect
from .showing import draw_detections
from .training import Plan, check_settings, detect_all, fine_tune


@dataclass(frozen=True)
class Subject:
    """What is judged, on what, and where."""

    run: Run
    trained: Trained
    voc: Voc
    data: str
    options: Detect
    device: torch.device
    console: Console


def judge(subject: Subject, architecture: Architecture, arm: Arm, seed: int) -> Record:
    """Train and score one detector, or read what it came to before."""
    options, device = subject.options, subject.device
    name = f"{architecture}-{arm}-seed{seed}"
    folder = subject.run.path / "detection" / name
    settings = _settings(subject, architecture, arm, seed)
    if (folder / "result.json").is_file():
        say(subject.console, f"{name}: finished before, see {folder}")
        return _finished(folder / "result.json", settings)
    folder.mkdir(parents=True, exist_ok=True)
    detector, num_loaded = _assemble(subject, architecture, arm, seed)
    num_tensors = len(subject.trained.model.encoder.trunk.state_dict())
    say(
        subject.console,
        f"{name}: loaded {num_loaded} of {num_tensors} tensors of the encoder"
        + " (its weights are random)" * (arm == "random"),
    )
    plan = Plan(
        options.iterations,
        options.batch_size,
        options.learning_rate,
        options.clip_gradient,
        options.train_on_difficult,
        seed,
        options.workers,
        options.save_seconds,
    )
    with _progress(subject.console) as progress:
        training = progress.add_task(f"{name}, training", total=plan.iterations, status="")

        def trained(iterations: int, loss: float) -> None:
            progress.update(training, completed=iterations, status=f"loss {loss:.3f}")

        fine_tune(
            detector,
            subject.voc.train,
            plan,
            device=device,
            checkpoint=folder / "last.pt",
            settings=settings,
            report=trained,
        )
        testing = progress.add_task(f"{name}, testing", total=len(subject.voc.test), status="")
        found = detect_all(
            detector,
            subject.voc.test,
            device=device,
            workers=options.workers,
            report=lambda images: progress.update(testing, completed=images),
        )
    scores = score(subject.voc.test.objects, found)
    result: Record = {
        "settings": settings,
        "num_loaded": num_loaded,
        "scores": scores.means,
        "per_class": scores.per_class,
        "device": device_name(device),
        "finished": now(),
    }
    write_json(folder / "detections.json", _listed(subject.voc.test, found))
    draw_detections(folder / "detections.png", subject.voc.test, found)
    if options.keep_weights:
        _keep_weights(folder / "detector.safetensors", detector)
    write_json(folder / "result.json", result)
    (folder / "last.pt").unlink(missing_ok=True)
    return result


def _finished(path: Path, settings: Record) -> Record:
    """Read the result of a detector that was trained before, with the same settings."""
    try:
        result: Record = parse_json(path.read_text())
        before = result["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): remove the folder {path.parent} to begin anew"
        ) from None
    check_settings(before, settings, path)
    return result


def _assemble(
    subject: Subject, architecture: Architecture, arm: Arm, seed: int
) -> tuple[Detector, int]:
    """Build a detector, its new layers the same in both arms, and load the trunk if it is to be."""
    options, encoder = subject.options, subject.trained.model.encoder
    mean, deviation = encoder.mean.flatten().tolist(), encoder.deviation.flatten().tolist()
    trunk_seed = derived(seed, "detector's trunk")
    fresh = untrained_encoder(encoder, subject.trained.config, mean, deviation, trunk_seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived(seed, "detector"))
        detector = build_detector(
            fresh,
            architecture,
            norm=options.norm,
            image_side=options.image_side,
            regions=options.regions,
            proposals=options.proposals,
            mixed=subject.device.type == "cuda",
        )
    num_loaded = 0
    if arm == "pretrained":
        origin = str(subject.run.last_checkpoint)
        num_loaded = load_trunk(detector, encoder.trunk.state_dict(), origin)
    return detector.to(subject.device), num_loaded


def _settings(subject: Subject, architecture: str, arm: str, seed: int) -> Record:
    """Collect everything that the numbers of one detector depend on."""
    options, voc = subject.options, subject.voc
    names = "\n".join((*voc.train.names, "", *voc.test.names))
    return {
        "architecture": architecture,
        "arm": arm,
        "seed": seed,
        "iterations": options.iterations,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "image_side": list(options.image_side),
        "norm": options.norm,
        "regions": options.regions,
        "proposals": options.proposals,
        "train_on_difficult": options.train_on_difficult,
        "clip_gradient": options.clip_gradient,
        "images": hashlib.sha256(names.encode()).hexdigest()[:16],
        "encoder": fingerprint(subject.trained.model.encoder),
    }


def _listed(data: Detections, found: list[Found]) -> Record:
    """Return detections as JSON has them: image -> rows of class, score and box."""
    return {
        name: [
            [CLASSES[label], round(value, 4), *(round(corner, 1) for corner in box)]
            for box, label, value in zip(*(part.tolist() for part in one), strict=True)
        ]
        for name, one in zip(data.names, found, strict=True)
    }


def _keep_weights(path: Path, detector: Detector) -> None:
    from safetensors.torch import save

    state = {name: tensor.cpu().contiguous() for name, tensor in detector.state_dict().items()}
    with replacing(path) as file:
        file.write(save(state))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def say(console: Console, words: str) -> None:
    """Print a plain line."""
    console.print(words, highlight=False, markup=False, soft_wrap=True)
