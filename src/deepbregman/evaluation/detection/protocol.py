"""Detection as MoCo judges it: Faster R-CNN, VOC07+12 trainval, tested on VOC07 test.

::

    RUN/detection/c4-pretrained-seed0/
      last.pt             while it trains; removed when the result is written
      result.json         settings and scores
      detections.json     every detection in every test image
      detections.png      a few of them, to look at
"""

from deepbregman.errors import UserError
from deepbregman.evaluation.job import Job
from deepbregman.evaluation.rows import Measured, rows_of
from deepbregman.runs import Record

from .arm import Subject, judge, say
from .models import require_fitting
from .showing import class_table


def check_detect(job: Job) -> None:
    """Refuse a job without a whole devkit, or an encoder that no detector is built around."""
    if job.options.data is None:
        raise UserError(
            "protocol 'detect' needs --data: the folder VOCdevkit of Pascal VOC, or the one that "
            "holds it; `deepbregman data check voc` says how to get it"
        )
    require_fitting(job.trained.model.encoder)
    _ = job.voc


def detect(job: Job) -> list[Record]:
    """Fine-tune detectors around a run's encoder and score them on Pascal VOC.

    An arm that was stopped goes on where it was when the same is asked again; one that is finished
    is not trained again. There is a row per metric (see :mod:`.metric`) for each architecture and
    arm, with AP50 by class among its details.
    """
    assert job.options.data is not None  # check_detect has made sure
    options, console = job.options.detect, job.console
    voc = job.voc
    say(
        console,
        f"{len(voc.train):,} images to train on, {len(voc.test):,} to test on: "
        f"{', '.join(voc.found)}"
        + (f"; without {', '.join(voc.missing)}, which the protocol has" * bool(voc.missing)),
    )
    trained = job.trained
    subject = Subject(job.run, trained, voc, job.options.data, options, job.device, console)
    arms = [(architecture, arm) for architecture in options.architectures for arm in options.arms]
    results: dict[tuple[str, str, int], Record] = {
        (architecture, arm, seed): judge(subject, architecture, arm, seed)
        for architecture, arm in arms
        for seed in job.options.each_seed
    }
    told = {
        "iterations": options.iterations,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "image_side": list(options.image_side),
        "norm": options.norm,
        "train_on_difficult": options.train_on_difficult,
        "splits": list(voc.found),
    }
    measured = [
        [
            Measured(
                f"{architecture.upper()}, {arm}",
                results[architecture, arm, seed]["scores"],
                len(voc.train),
                len(voc.test),
                details={**told, "num_loaded": results[architecture, arm, seed]["num_loaded"]},
            )
            for architecture, arm in arms
        ]
        for seed in job.options.each_seed
    ]
    console.print(class_table({name: result["per_class"] for name, result in results.items()}))
    return rows_of(measured)
