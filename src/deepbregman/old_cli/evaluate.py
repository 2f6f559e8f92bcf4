"""deepbregman evaluate: how good a run's encoder is."""

from pathlib import Path
from typing import Literal

import tyro

from deepbregman.evaluation.detection.options import Detect
from deepbregman.evaluation.options import Semi, Tuning

from .options import Accelerator, parse, say, screen

Protocol = Literal["knn", "linear", "semi", "transfer", "detect", "supervised"]


def command(arguments: list[str]) -> None:
    """Judge a run: frozen, fine-tuned on few labels, or on another data set."""

    def options(
        run: tyro.conf.Positional[Path],
        protocol: tuple[Protocol, ...] = ("knn", "linear"),
        data: str | None = None,
        epochs: int | None = None,
        seed: int = 0,
        seeds: int = 1,
        crops: int = 0,
        image_size: int = 0,
        balanced: bool = False,
        skip_unreadable: bool = False,
        accelerator: Accelerator = "auto",
        semi: tyro.conf.OmitArgPrefixes[Semi] = Semi(),  # noqa: B008  # frozen
        tuning: tyro.conf.OmitArgPrefixes[Tuning] = Tuning(),  # noqa: B008  # frozen
        detect: Detect = Detect(),  # noqa: B008  # frozen
    ) -> None:
        """Judge a run; its rows also go into RUN/result.json, protocol by protocol as they end.

        Args:
            run: Folder of the run.
            protocol: knn: neighbours by cosine and by the learned divergence. linear: a classifier
                on frozen features, cached and of random crops. semi: all weights fine-tuned on a
                part of the labels. transfer: linear and fine-tuned on another data set. detect:
                Faster R-CNN around the encoder on Pascal VOC. supervised: the same architecture
                trained from random weights on all labels, for reference.
            data: A labelled source in place of the run's own; transfer needs one. Its images are
                resized to the size of the run's. For detect the folder VOCdevkit, or
                voc, as `deepbregman data prepare voc` leaves it.
            epochs: Of whatever is trained; by default 50, and in semi 60 below a twentieth of the
                labels and 30 above. 0 leaves the linear classifier on random crops out.
            seed: Of splits, subsets, order, crops and first weights.
            seeds: Run so many seeds, from --seed on, and report their mean and deviation.
            crops: Of knn by cosine and linear on cached features only: also judge features averaged
                over so many random crops and flips of each image, training and test images alike,
                drawn as in pretraining but without colour, anew for each seed; 0 for none.
            image_size: Of knn and linear only: side in pixels at which images are judged, as
                rows of their own; 0 for the run's data.image_size. Crops enlarge things, so an
                encoder trained on views as large as the images may do better on larger ones.
            balanced: Also report the mean over classes; imbalanced sources always do.
            skip_unreadable: Go on without images that cannot be read.
            accelerator: Where to compute; auto takes a GPU if there is one.
            semi: Which labels semi may see.
            tuning: How semi, transfer and supervised train.
            detect: How detect trains.
        """
        from deepbregman.evaluation.protocols import evaluate
        from deepbregman.reporting.tables import evaluation_table

        console = screen()
        rows = evaluate(
            run,
            protocols=protocol,
            data=data,
            epochs=epochs,
            seed=seed,
            seeds=seeds,
            crops=crops,
            image_size=image_size,
            balanced=balanced,
            semi=semi,
            tuning=tuning,
            detect=detect,
            skip_unreadable=skip_unreadable,
            accelerator=accelerator,
            console=console,
        )
        console.print(evaluation_table(rows, f"{run} on {rows[0]['data']}"))
        replaced = max(row["num_replaced"] for row in rows)
        if replaced:
            say(
                console,
                f"warning: {replaced} unreadable images were judged or learned from by images that "
                "stood in for them; remove them for exact numbers",
            )
        if rows[0]["epoch"] < rows[0]["epochs"]:
            words = f"after {rows[0]['epoch']:g} of {rows[0]['epochs']} epochs"
            say(console, f"warning: this run is not finished; it was judged {words}")

    parse(options, "evaluate", arguments)
