"""Detection as MoCo does it: Faster R-CNN, VOC07+12 trainval, tested on VOC07 test.

::

    RUN/detection/c4-pretrained-seed0/
      last.pt             while it trains; removed when the result is written
      result.json         settings and scores
      detections.json     every detection in every test image
"""

import hashlib
import itertools
from collections.abc import Mapping
from statistics import fmean

import torch
from rich.table import Table

from deepbregman.data.voc import CLASSES
from deepbregman.errors import UserError
from deepbregman.evaluation.inputs import Evaluation
from deepbregman.evaluation.options import Architecture, Trunk
from deepbregman.evaluation.results import Measurement, make_rows
from deepbregman.files import now, read_json, refuse_link, write_json
from deepbregman.objectives import build_untrained_encoder
from deepbregman.runs import Record
from deepbregman.training.checkpoints import fingerprint_weights
from deepbregman.training.devices import device_name
from deepbregman.training.randomness import derive_seed

from .detectors import Detector, build_detector, load_trunk, require_fitting
from .training import check_settings, detect_all, fine_tune

OPTIONS = (
    "iterations",
    "batch_size",
    "learning_rate",
    "image_side",
    "norm",
    "regions",
    "proposals",
    "clip_gradient",
)
"""Options that the numbers of a detector depend on."""


def check_detect(evaluation: Evaluation) -> None:
    """Refuse to begin without a whole devkit, a fitting encoder, and a folder to write to."""
    if not evaluation.can_record:
        raise UserError(
            f"protocol 'detect' keeps its detectors in {evaluation.run.path}, which cannot be "
            "written to: copy the run to a folder of yours"
        )
    folder = evaluation.run.path / "detection"
    for path in (folder, *folder.glob("*"), *folder.glob("*/*")):
        refuse_link(path)
    require_fitting(evaluation.loaded.model.encoder)
    _ = evaluation.voc


def detect(evaluation: Evaluation) -> list[Record]:
    """Fine-tune detectors around a run's encoder and score them on Pascal VOC.

    The same command continues a detector that was stopped; a finished one is not trained again.
    There is a row for each metric (see :mod:`.average_precision`), architecture and trunk.
    """
    options, voc = evaluation.options.detect, evaluation.voc
    missing = f"; without {', '.join(voc.missing)}, which the protocol has" * bool(voc.missing)
    evaluation.say(
        f"{len(voc.train):,} images to train on, {len(voc.test):,} to test on: "
        f"{', '.join(voc.found)}{missing}"
    )
    details = _select_options(evaluation) | {"splits": list(voc.found)}
    sizes = len(voc.train), len(voc.test)
    seeds: list[list[Measurement]] = []
    per_class: dict[tuple[str, str, int], dict[str, float]] = {}
    for seed in evaluation.options.each_seed:
        measured = []
        for architecture, trunk in itertools.product(options.architectures, options.arms):
            result = score_detector(evaluation, architecture, trunk, seed)
            per_class[architecture, trunk, seed] = result["per_class"]
            settings = {**details, "num_loaded": result["num_loaded"]}
            name = f"{architecture.upper()}, {trunk}"
            measured.append(Measurement(name, result["scores"], *sizes, details=settings))
        seeds.append(measured)
    evaluation.console.print(draw_class_table(per_class))
    return make_rows(seeds)


def score_detector(
    evaluation: Evaluation, architecture: Architecture, trunk: Trunk, seed: int
) -> Record:
    """Train and score one detector in its own folder, or read the result from there."""
    # Only this protocol needs pycocotools. Whoever lacks it is told before hours of training.
    from .average_precision import score_detections

    options, voc, device = evaluation.options.detect, evaluation.voc, evaluation.loaded.device
    name = f"{architecture}-{trunk}-seed{seed}"
    folder = evaluation.run.path / "detection" / name
    names = "\n".join((*voc.train.names, "", *voc.test.names))
    settings = {  # everything that the numbers depend on
        "architecture": architecture,
        "arm": trunk,
        "seed": seed,
        **_select_options(evaluation),
        "images": hashlib.sha256(names.encode()).hexdigest()[:16],
        "encoder": fingerprint_weights(evaluation.loaded.model.encoder),
    }
    if (folder / "result.json").is_file():
        evaluation.say(f"{name}: finished before, see {folder}")
        before = read_json(folder / "result.json", {"settings": {}})
        check_settings(before.get("settings") or {}, settings, folder / "result.json")
        return before
    folder.mkdir(parents=True, exist_ok=True)
    detector, num_loaded = assemble_detector(evaluation, architecture, trunk, seed)
    num_tensors = len(evaluation.loaded.model.encoder.trunk.state_dict())
    evaluation.say(
        f"{name}: loaded {num_loaded} of {num_tensors} tensors of the encoder"
        + " (its weights are random)" * (trunk == "random")
    )
    fine_tune(
        detector,
        voc.train,
        options,
        seed,
        device=device,
        checkpoint=folder / "last.pt",
        settings=settings,
        report=lambda done, loss: evaluation.progress(
            f"{name}, training", done, options.iterations
        ),
    )
    found = detect_all(
        detector,
        voc.test,
        device=device,
        workers=options.workers,
        report=lambda images: evaluation.progress(f"{name}, testing", images, len(voc.test)),
    )
    scores = score_detections(voc.test.objects, found)
    result: Record = {
        "settings": settings,
        "num_loaded": num_loaded,
        "scores": scores.means,
        "per_class": scores.per_class,
        "device": device_name(device),
        "finished": now(),
    }
    rows = {  # image -> rows of class, score and box
        image: [
            [CLASSES[label], round(value, 4), *(round(corner, 1) for corner in box)]
            for box, label, value in zip(*(part.tolist() for part in one), strict=True)
        ]
        for image, one in zip(voc.test.names, found, strict=True)
    }
    write_json(folder / "detections.json", rows)
    write_json(folder / "result.json", result)
    (folder / "last.pt").unlink(missing_ok=True)
    return result


def assemble_detector(
    evaluation: Evaluation, architecture: Architecture, trunk: Trunk, seed: int
) -> tuple[Detector, int]:
    """Build a detector whose new layers depend on the seed alone, and load the pretrained trunk."""
    options, loaded = evaluation.options.detect, evaluation.loaded
    encoder = loaded.model.encoder
    mean, deviation = encoder.mean.flatten().tolist(), encoder.deviation.flatten().tolist()
    trunk_seed = derive_seed(seed, "detector's trunk")
    fresh = build_untrained_encoder(encoder, loaded.config, mean, deviation, trunk_seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "detector"))
        on_gpu = loaded.device.type == "cuda"
        detector = build_detector(fresh, architecture, options, mixed=on_gpu)
    num_loaded = 0
    if trunk == "pretrained":
        origin = str(evaluation.run.last_checkpoint)
        num_loaded = load_trunk(detector, encoder.trunk.state_dict(), origin)
    return detector.to(loaded.device), num_loaded


def _select_options(evaluation: Evaluation) -> Record:
    options = evaluation.options.detect
    values = {name: getattr(options, name) for name in OPTIONS}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def draw_class_table(per_class: Mapping[tuple[str, str, int], Mapping[str, float]]) -> Table:
    """Draw AP50 by class, a column for each architecture and arm: the mean over seeds."""
    columns: dict[str, list[Mapping[str, float]]] = {}
    for (architecture, arm, _), values in per_class.items():
        columns.setdefault(f"{architecture.upper()}, {arm}", []).append(values)
    table = Table(title="AP50 by class, %", title_justify="left")
    table.add_column("class")
    for variant in columns:
        table.add_column(variant, justify="right")
    means = [
        {name: fmean(seed[name] for seed in seeds) for name in seeds[0]}
        for seeds in columns.values()
    ]
    for name in means[0]:  # all have the same test images, so the same classes
        table.add_row(name, *(f"{mean[name]:.1f}" for mean in means))
    table.add_section()
    table.add_row("mean", *(f"{fmean(mean.values()):.1f}" for mean in means))
    return table
