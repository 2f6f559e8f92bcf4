"""ONNX: the whole encoder as a graph, normalisation inside, any number of images at a time."""

import json
import warnings

import torch

from deepbregman.errors import UserError
from deepbregman.method.base_network import Encoder

from .subject import Content, Subject

LARGEST = 2**31
"""Bytes of one protocol-buffer message, and so of an ONNX file with its weights inside."""
BATCH_SIZES = (1, 5)
TOLERANCE = 1e-4
"""Largest difference that is let pass, as a share of the largest feature (or of 1)."""


def to_onnx(subject: Subject) -> Content:
    """Export the graph, check it, and compare it with the encoder it came from."""
    import onnx

    encoder, size = subject.encoder, subject.config.data.image_size
    num_bytes = sum(t.numel() * t.element_size() for t in encoder.state_dict().values())
    if num_bytes >= LARGEST:
        raise UserError(
            f"--format onnx holds 2 GB of weights in one file, and this encoder has "
            f"{num_bytes / 2**30:.1f} GB: export it as safetensors"
        )
    graph = _exported(encoder, size)
    model = onnx.load_from_string(graph)
    onnx.helper.set_model_props(model, {"deepbregman": json.dumps(subject.record)})
    graph = model.SerializeToString()
    onnx.checker.check_model(graph, full_check=True)
    difference = largest_difference(graph, encoder, size)
    usage = (
        "import onnxruntime\n"
        'session = onnxruntime.InferenceSession("FILE")\n'
        '(features,) = session.run(None, {"images": images})  # float32 (N, 3, '
        f"{size}, {size}), RGB in [0, 1]\n"
        f"# checked with onnxruntime on batches of {' and '.join(map(str, BATCH_SIZES))}: largest "
        f"difference {difference:.1e}\n"
    )
    return Content(graph, usage)


def _exported(encoder: Encoder, size: int) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's inside; its result is checked below
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
        except torch.onnx.OnnxExporterError as error:
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise UserError(
                f"--format onnx cannot hold this encoder: torch's exporter fails ({reason}); "
                "export it as safetensors"
            ) from None
    assert program is not None  # it is, with dynamo
    graph: bytes = program.model_proto.SerializeToString()
    return graph


def largest_difference(graph: bytes, encoder: Encoder, size: int) -> float:
    """Run the graph beside the encoder, and refuse one that gives other features.

    Args:
        graph: an ONNX file's content.
        encoder: in evaluation mode.
        size: side of the images.

    Returns:
        The largest absolute difference of a feature.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for count in BATCH_SIZES:
        images = torch.rand(count, 3, size, size, generator=generator)
        with torch.no_grad():
            expected = encoder(images)
        (found,) = session.run(None, {"images": images.numpy()})
        difference = (torch.from_numpy(found) - expected).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
            raise UserError(
                f"--format onnx: onnxruntime's features of {count} images differ from the "
                f"encoder's by {difference:.1e}; nothing was written; export it as safetensors"
            )
        largest = max(largest, difference)
    return largest
