"""deepbregman duplicates: find copies and near-duplicates among images."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from deepbregman.config.rules import has_type
from deepbregman.errors import UserError, notify
from deepbregman.runs import check_new_file
from deepbregman.terminal import MaybeFloat, MaybePath, MaybeText, count_words, ignore_progress, say

from .parameters import (
    Accelerator,
    Devices,
    PythonOnly,
    Reporter,
    RunFolder,
    check_picture,
    open_images,
)

if TYPE_CHECKING:
    from torch import nn

    from deepbregman.data import Source
    from deepbregman.evaluation.duplicates import Copy, Duplicates

NAMED_GROUPS = 10


def duplicates(
    run: Annotated[RunFolder, tyro.conf.Positional],
    *,
    data: MaybeText = None,
    threshold: MaybeFloat = None,
    out: MaybePath = None,
    sheet: MaybePath = None,
    skip_unreadable: bool = False,
    accelerator: Accelerator = "auto",
    devices: Devices = 1,
    source: PythonOnly["Source | None"] = None,
    encoder: PythonOnly["nn.Module | None"] = None,
    progress: Reporter = None,
) -> "Duplicates":
    """Find exact copies and near-duplicates among all images, in groups.

    Two images are in one group if they have the same content, if they are near-duplicates, or if
    a chain of such images connects them. Nothing is deleted.

    Args:
        run: Folder of a run, as `deepbregman pretrain` writes it.
        data: A dataset instead of the run's own.
        threshold: Cosine of features from which two images are near-duplicates, at most 1. By
            default it is measured on copies of images, with their edges cropped and compressed
            again: three of four copies reach it. Then the pixels of two images must also be as
            similar as those of such copies.
        out: CSV file for the groups; it must not exist.
        sheet: PNG file with the largest groups; it must not exist.
        skip_unreadable: Leave out images that cannot be read, instead of stopping.
        accelerator: Device to compute on; auto takes a GPU if there is one.
        devices: Number of GPUs that compute features together, or all.
        source: Images of your program, by :func:`own_data`, instead of a dataset.
        encoder: If the run trained an encoder of your own: a module of the same structure.
    """
    check_new_file(out, ".csv")
    check_new_file(sheet, ".png", "sheet")
    if threshold is not None and not (has_type(threshold, float) and 0.0 < threshold <= 1.0):
        raise UserError(f"threshold is {threshold!r}: it must be a number above 0 and at most 1")
    check_picture(run, data, source, sheet, "sheet")
    images = open_images(run, data, source, accelerator, devices, encoder, skip_unreadable)
    from deepbregman.evaluation.duplicates import find_duplicates

    found = find_duplicates(
        images,
        threshold=threshold,
        out=None if out is None else Path(out),
        progress=progress or ignore_progress,
    )
    if sheet is None:
        return found
    if not found.groups:
        notify(f"{sheet} is not written: there are no duplicates to show")
        return found
    write_sheet(Path(sheet), found)
    return replace(found, sheet=Path(sheet))


def show(found: "Duplicates", console: Console) -> None:
    """Print how many there are, and the largest groups."""
    exact, near = found.count("exact"), found.count("near")
    groups = count_words(len(found.groups), "group")
    say(
        console,
        f"{groups} among {count_words(found.num_images, 'image')}: {exact:,} exact "
        f"{'copy' if exact == 1 else 'copies'}, "
        f"{count_words(near, 'near-duplicate')} (a cosine of {found.threshold:.4f} or more to "
        "another image of the group)",
    )
    if near:
        say(console, "a weak encoder also takes images that are merely alike: look before deleting")
    else:
        say(console, "a lower --threshold finds copies that were changed more")
    for number, group in enumerate(found.groups[:NAMED_GROUPS], start=1):
        names = ", ".join(copy.name for copy in group[:5]) + (", ..." if len(group) > 5 else "")
        say(console, f"  {number}: {len(group)} images: {names}")
    if len(found.groups) > NAMED_GROUPS:
        say(console, f"  and {len(found.groups) - NAMED_GROUPS:,} more groups")
    if found.table is not None:
        say(console, f"groups: {found.table}")
    if found.sheet is not None:
        say(console, f"sheet: {found.sheet}")


def write_sheet(path: Path, found: "Duplicates") -> None:
    """Draw the largest groups, a strip each."""
    from deepbregman.evaluation.duplicates import SHOWN_GROUPS, SHOWN_IMAGES
    from deepbregman.reporting.sheets import Panel, Strip, Tile, caption_image, write_contact_sheet

    def draw(copy: "Copy") -> Tile:
        lines = caption_image(copy.name, copy.class_name)
        return Tile(copy.pixels, copy.kind, f"{copy.cosine:.3f}", lines)

    strips = [
        Strip(
            f"group {number}: {len(group)} images",
            tuple(draw(copy) for copy in group[:SHOWN_IMAGES]),
        )
        for number, group in enumerate(found.groups[:SHOWN_GROUPS], start=1)
    ]
    write_contact_sheet(path, [Panel(None, tuple(strips))])
