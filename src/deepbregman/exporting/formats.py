"""The formats of an exported encoder: each function turns a trained encoder into a file's bytes."""

import contextlib
import io
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from deepbregman.config import Config, to_toml
from deepbregman.errors import UserError, first_line
from deepbregman.files import Record
from deepbregman.method.networks import TIMM, Encoder, create_timm
from deepbregman.method.resnet import ResNet
from deepbregman.runs import Run
from deepbregman.training.checkpoints import load_trained

VERSION = 1
"""Version of the record that goes with the weights."""


class TrainedEncoder(NamedTuple):
    """A trained encoder in evaluation mode on the CPU, its configuration and its record."""

    encoder: Encoder
    config: Config
    record: Record


class Content(NamedTuple):
    """An encoder in one of the formats."""

    data: bytes
    usage: str
    """Lines of Python that load the file; ``FILE`` stands for its name."""
    sidecar: Record | None = None
    """What the file itself cannot hold; None when the file holds everything."""


def load_to_export(run: Run, format_name: str, encoder: nn.Module | None = None) -> TrainedEncoder:
    """Load a run's encoder and describe it."""
    model, config, epoch, _ = load_trained(run, encoder=encoder)
    if model.encoder.patch is not None and format_name not in ("safetensors", "onnx"):
        raise UserError(
            f"--format {format_name} holds a network for whole images, and this run's encoder, of "
            f"{config.objective.name}, cuts them into patches of {model.encoder.patch} px: export "
            "it as safetensors or onnx"
        )
    if config.objective.colour_space is not None and format_name not in ("safetensors", "onnx"):
        raise UserError(
            f"--format {format_name} holds one network, and this run's encoder, of "
            f"{config.objective.name}, has one for brightness and one for colours: export it as "
            "safetensors or onnx"
        )
    name = config.encoder.name
    record = {
        "format": format_name,
        "version": VERSION,
        "architecture": type(model.encoder.trunk).__name__ if name == "custom" else name,
        "num_features": model.encoder.num_features,
        "image_size": config.data.image_size,
        "pixels": "RGB in [0, 1], (x - mean) / std",
        "mean": model.encoder.mean.flatten().tolist(),
        "std": model.encoder.deviation.flatten().tolist(),
        "epoch": epoch,
        "config": to_toml(config),
        "provenance": run.provenance(),
    }
    return TrainedEncoder(model.encoder, config, record)


def _copy_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, each with its own memory in the usual order."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}


def _serialise(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def to_safetensors(source: TrainedEncoder) -> Content:
    """Write the whole encoder, its configuration beside the tensors, for this library."""
    metadata = {"format": "pt", "deepbregman": json.dumps(source.record)}
    data = safetensors.torch.save(_copy_tensors(source.encoder.state_dict()), metadata)
    own = ", encoder=module" if source.config.encoder.name == "custom" else ""
    side = source.config.data.image_size
    usage = (
        "from deepbregman import load_encoder\n"
        f'encoder = load_encoder("FILE"{own})  # needs no run; the normalisation is inside\n'
        f"features = encoder(images)  # uint8, or floats in [0, 1]: (N, 3, {side}, {side}), RGB\n"
    )
    return Content(data, usage)


THUMBNAIL_STEM = (
    "model.conv1 = torch.nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)\n"
    "model.maxpool = torch.nn.Identity()\n"
)
"""Lines that give a ResNet of torchvision or timm the stem of an encoder for thumbnails."""
LOAD = 'model.load_state_dict(torch.load("FILE", weights_only=True))\n'


def _get_resnet(source: TrainedEncoder) -> ResNet:
    trunk = source.encoder.trunk
    assert isinstance(trunk, ResNet)  # the command has checked its name
    return trunk


def to_torchvision(source: TrainedEncoder) -> Content:
    """Write the trunk of a ResNet as torchvision's network without its classifier."""
    trunk = _get_resnet(source)
    usage = (
        "import torch, torchvision\n"
        f"model = torchvision.models.{source.config.encoder.name}()\n"
        f"{THUMBNAIL_STEM * (trunk.stem == 'thumbnail')}"
        "model.fc = torch.nn.Identity()  # or: strict=False, which misses fc.*\n"
        f"{LOAD}{_describe_pixels(source)}"
    )
    data = _serialise(_copy_tensors(trunk.state_dict()))
    return Content(data, usage, {**source.record, "stem": trunk.stem})


def to_timm(source: TrainedEncoder) -> Content:
    """Write the trunk as timm's network with ``num_classes=0``; ResNets have the same names."""
    trunk, name = source.encoder.trunk, source.config.encoder.name
    image_size = source.config.data.image_size
    options: dict[str, int] = {}
    stem_code = ""
    if name.startswith(TIMM):
        name = name.removeprefix(TIMM)
        options = create_timm(name, image_size)[1]
    else:
        stem_code = THUMBNAIL_STEM * (_get_resnet(source).stem == "thumbnail")
    arguments = "".join(f", {key}={value}" for key, value in options.items())
    usage = (
        "import timm, torch\n"
        f'model = timm.create_model("{name}", num_classes=0{arguments})\n'
        f"{stem_code}{LOAD}{_describe_pixels(source)}"
    )
    settings = {
        "architecture": name,
        "num_classes": 0,
        "num_features": source.encoder.num_features,
        "model_args": options,
        "pretrained_cfg": {
            "input_size": [3, image_size, image_size],
            "mean": source.record["mean"],
            "std": source.record["std"],
            "interpolation": "bilinear",
            "crop_pct": 1.0,
        },
    }
    stem = {"stem": trunk.stem} if isinstance(trunk, ResNet) else {}
    data = _serialise(_copy_tensors(trunk.state_dict()))
    return Content(data, usage, {**source.record, **stem, "timm": settings})


def _describe_pixels(source: TrainedEncoder) -> str:
    mean, deviation = source.record["mean"], source.record["std"]
    return (
        f"# images: RGB, {source.config.data.image_size} px, in [0, 1], minus "
        f"{[round(x, 4) for x in mean]}, over {[round(x, 4) for x in deviation]}; exact values in "
        "FILE.json\n"
    )


DETECTRON2_DEPTHS = {"resnet50": 50, "resnet101": 101}
_DETECTRON2_NAMES = (
    (re.compile(r"^(conv1|bn1)\."), r"stem.\1."),
    (re.compile(r"^layer(\d)\."), lambda match: f"res{int(match[1]) + 1}."),
    (re.compile(r"\bbn(\d)\."), r"conv\1.norm."),
    (re.compile(r"\bdownsample\.0\."), "shortcut."),
    (re.compile(r"\bdownsample\.1\."), "shortcut.norm."),
)


def _rename_for_detectron2(name: str) -> str:
    for pattern, replacement in _DETECTRON2_NAMES:
        name = pattern.sub(replacement, name)
    return name


def to_detectron2(source: TrainedEncoder) -> Content:
    """Write a ResNet-50 or 101 with the standard stem as detectron2's backbone.

    Counts of batches are left out: the frozen batch normalisation there has none.
    """
    trunk = _get_resnet(source)
    if trunk.stem != "standard":
        raise UserError(
            "--format detectron2 holds the standard stem, and this run's encoder has the thumbnail "
            "stem, of images up to 64 px: train with --encoder.stem standard, or export it as "
            "torchvision"
        )
    model = {
        _rename_for_detectron2(name): tensor
        for name, tensor in _copy_tensors(trunk.state_dict()).items()
        if not name.endswith("num_batches_tracked")
    }
    # With its heuristics detectron2 finds "res2.0." in a detector's "backbone.bottom_up.res2.0.";
    # without them it continues with random weights, and only its log mentions that.
    data = _serialise({"model": model, "__author__": "deepbregman", "matching_heuristics": True})
    settings = {
        "MODEL.RESNETS.DEPTH": DETECTRON2_DEPTHS[source.config.encoder.name],
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
        "MODEL.PIXEL_MEAN": [255.0 * value for value in source.record["mean"]],
        "MODEL.PIXEL_STD": [255.0 * value for value in source.record["std"]],
        "INPUT.FORMAT": "RGB",
    }
    lines = [
        "# detectron2 has other defaults for each of these; exact values in FILE.json",
        'cfg.MODEL.WEIGHTS = "FILE"',
    ]
    for name, value in settings.items():
        shown = [round(x, 3) for x in value] if isinstance(value, list) else value
        lines.append(f"cfg.{name} = {shown!r}")
    usage = "".join(f"{line}\n" for line in lines)
    return Content(data, usage, {**source.record, "stem": trunk.stem, "detectron2": settings})


ONNX_BATCH_SIZES = (1, 5)
ONNX_TOLERANCE = 1e-4
"""Largest accepted difference, as a share of the largest feature (or of 1)."""


def to_onnx(source: TrainedEncoder) -> Content:
    """Write the whole encoder as a graph, and compare its features with the encoder's."""
    import onnx

    encoder, size = source.encoder, source.config.data.image_size
    with _refuse_onnx_failures("torch's exporter"):
        graph = _trace_onnx(encoder, size)
    with _refuse_onnx_failures("the check of the graph"):
        model = onnx.load_from_string(graph)
        if not model.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
            raise ValueError("it unrolls a loop over the images, and holds one number of them only")
        onnx.helper.set_model_props(model, {"deepbregman": json.dumps(source.record)})
        graph = model.SerializeToString()
        onnx.checker.check_model(graph, full_check=True)
    with _refuse_onnx_failures("onnxruntime"):
        difference = compare_onnx(graph, encoder, size)
    sizes = " and ".join(map(str, ONNX_BATCH_SIZES))
    usage = (
        "import onnxruntime\n"
        'session = onnxruntime.InferenceSession("FILE")\n'
        '(features,) = session.run(None, {"images": images})  # float32 (N, 3, '
        f"{size}, {size}), RGB in [0, 1]\n"
        f"# checked with onnxruntime on batches of {sizes}: largest difference {difference:.1e}\n"
    )
    return Content(graph, usage)


@contextlib.contextmanager
def _refuse_onnx_failures(what: str) -> Iterator[None]:
    """Report a failure of the tools as an error of the encoder: they fail in many ways."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"--format onnx cannot hold this encoder: {what} fails "
            f"({first_line(error.__cause__ or error)}); export it as safetensors"
        ) from None


def _trace_onnx(encoder: Encoder, size: int) -> bytes:
    before = logging.root.manager.disable
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        # The messages of the exporter are about its internals; its result is checked.
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            program = torch.onnx.export(
                encoder,
                (torch.zeros(2, 3, size, size),),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            )
        finally:
            logging.disable(before)
    assert program is not None  # dynamo=True always returns a program
    graph: bytes = program.model_proto.SerializeToString()
    return graph


def compare_onnx(graph: bytes, encoder: Encoder, size: int) -> float:
    """Return the largest difference of a graph's features to its encoder's; refuse a large one."""
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for count in ONNX_BATCH_SIZES:
        images = torch.rand(count, 3, size, size, generator=generator)
        with torch.no_grad():
            expected = encoder(images)
        (found,) = session.run(None, {"images": images.numpy()})
        difference = (torch.from_numpy(found) - expected).abs().max().item()
        if not difference <= ONNX_TOLERANCE * max(1.0, expected.abs().max().item()):
            raise UserError(
                f"--format onnx: onnxruntime's features of {count} images differ from the "
                f"encoder's by {difference:.1e}; nothing was written; export it as safetensors"
            )
        largest = max(largest, difference)
    return largest


MAKERS: dict[str, Callable[[TrainedEncoder], Content]] = {
    "torchvision": to_torchvision,
    "timm": to_timm,
    "safetensors": to_safetensors,
    "onnx": to_onnx,
    "detectron2": to_detectron2,
}
