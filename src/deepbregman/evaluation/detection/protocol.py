"""Detection as MoCo judges it: Faster R-CNN, VOC07+12 trainval, tested on VOC07 test.

::

    RUN/detection/c4-pretrained-seed0/
      last.pt             while it trains; removed when the result is written
      result.json         settings and scores
      detections.json     every detection in every test image
      detections.png      a few of them, to look at
"""

import statistics
from pathlib import Path

from rich.console import Console

from deepbregman.data.voc import CLASSES, open_voc
from deepbregman.runs import Record, Run
from deepbregman.training.checkpoints import load_trained
from deepbregman.training.processes import pick_device

from .arm import Subject, judge, say
from .metric import METRICS
from .models import require_fitting
from .options import DetectOptions as DetectOptions
from .showing import class_table


def detect(
    run: Run | Path | str,
    *,
    data: Path | str,
    options: DetectOptions = DetectOptions(),  # noqa: B008  # frozen
    accelerator: str = "auto",
    console: Console | None = None,
) -> list[Record]:
    """Fine-tune detectors around a run's encoder and score them on Pascal VOC.

    An arm that was stopped goes on where it was when the same is asked again; one that is finished
    is not trained again.

    Args:
        run: a run, or its folder.
        data: VOCdevkit, or the folder that holds it.
        options: how.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        console: to draw on.

    Returns:
        For each architecture and arm a row per metric (see :mod:`.metric`), in per cent: the mean
        over seeds, with ``values``, ``deviation`` (None of one seed) and the settings.
    """
    run = run if isinstance(run, Run) else Run.open(Path(run))
    console = console or Console(quiet=True)
    device = pick_device(accelerator)
    trained = load_trained(run)
    require_fitting(trained.model.encoder)
    voc = open_voc(data)
    say(
        console,
        f"{len(voc.train):,} images to train on, {len(voc.test):,} to test on: "
        f"{', '.join(voc.found)}"
        + (f"; without {', '.join(voc.missing)}, which the protocol has" * bool(voc.missing)),
    )
    subject = Subject(run, trained, voc, str(data), options, device, console)
    rows: list[Record] = []
    for architecture in options.architectures:
        for arm in options.arms:
            results = [
                judge(subject, architecture, arm, options.seed + repetition)
                for repetition in range(options.seeds)
            ]
            rows += _rows(subject, architecture, arm, results)
    console.print(class_table(rows))
    return rows


def _rows(subject: Subject, architecture: str, arm: str, results: list[Record]) -> list[Record]:
    options, voc = subject.options, subject.voc
    shared = {
        "epoch": subject.trained.epoch,
        "epochs": subject.trained.config.training.epochs,
        "num_train": len(voc.train),
        "num_test": len(voc.test),
        "seed": options.seed,
        "device": results[-1]["device"],
        "finished": results[-1]["finished"],
        "iterations": options.iterations,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "image_side": list(options.image_side),
        "norm": options.norm,
        "num_loaded": results[0]["num_loaded"],
        "splits": list(voc.found),
    }
    rows = []
    for metric in METRICS:
        values = [result["scores"][metric] for result in results]
        row = {
            "protocol": "detect",
            "variant": f"{architecture.upper()}, {arm}",
            "data": subject.data,
            "metric": metric,
            "value": statistics.fmean(values),
            "deviation": statistics.stdev(values) if len(values) > 1 else None,
            "values": values,
            "n": len(values),
            **shared,
        }
        if metric == "AP50":
            row["per_class"] = {
                name: statistics.fmean(result["per_class"][name] for result in results)
                for name in CLASSES
                if name in results[0]["per_class"]
            }
        rows.append(row)
    return rows
