"""Features without torch, by onnxruntime: python examples/onnx_features.py ENCODER.onnx IMAGE ...

Write the file first: deepbregman export RUN --format onnx --out ENCODER.onnx
"""

import sys

import numpy as np
import onnxruntime
from PIL import Image

if not sys.argv[2:]:
    sys.exit(__doc__)
path, *names = sys.argv[1:]
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
height, width = session.get_inputs()[0].shape[2:]
images = [Image.open(name).convert("RGB").resize((width, height)) for name in names]
pixels = np.stack([np.asarray(image, np.float32) / 255 for image in images])  # (N, H, W, 3)
(features,) = session.run(None, {"images": pixels.transpose(0, 3, 1, 2)})
print(f"{len(names)} images, {features.shape[1]} features each")
