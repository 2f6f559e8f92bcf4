"""Features of images in ten lines: python examples/features.py RUN IMAGE [IMAGE ...]."""

import sys

import torch
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2.functional import resize

from deepbregman import load_encoder

if not sys.argv[2:]:
    sys.exit(__doc__)
run, *names = sys.argv[1:]
encoder = load_encoder(run)  # or a file of `deepbregman export`; it normalises pixels itself
images = [resize(decode_image(name, ImageReadMode.RGB), [64, 64]) for name in names]
with torch.inference_mode():
    features = encoder(torch.stack(images))  # (N, d)
nearest = torch.nn.functional.cosine_similarity(features[:1], features, dim=1).argsort(
    descending=True
)
print(f"{len(names)} images, {features.shape[1]} features each")
print("most like the first:", *(names[index] for index in nearest[1:4]))
