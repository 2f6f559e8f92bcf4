"""Fine-tune a pretrained encoder with timm: python examples/finetune_timm.py ENCODER.pth.

Write the file first, of a run whose encoder is a ResNet for large images or timm:NAME:

    deepbregman pretrain digits --encoder.name timm:test_vit --data.image-size 16 --run RUN
    deepbregman export RUN --format timm --out ENCODER.pth
"""

import json
import sys
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.nn.functional import interpolate

EPOCHS, BATCH = 5, 64

if not sys.argv[1:]:
    sys.exit(__doc__)
path = Path(sys.argv[1])
settings = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))["timm"]
side = settings["pretrained_cfg"]["input_size"][1]
mean, deviation = (
    torch.tensor(settings["pretrained_cfg"][name]).view(3, 1, 1) for name in ("mean", "std")
)

torch.manual_seed(0)
model = timm.create_model(settings["architecture"], num_classes=10, **settings["model_args"])
missing, unexpected = model.load_state_dict(torch.load(path, weights_only=True), strict=False)
assert not unexpected, unexpected
print("drawn anew:", *missing)  # the classifier only

digits = load_digits()
pixels = torch.from_numpy(digits.images / 16).float()[:, None].expand(-1, 3, -1, -1)
pixels = (interpolate(pixels, (side, side), mode="bilinear") - mean) / deviation
labels = torch.from_numpy(digits.target)
train, test = torch.randperm(len(labels)).split([1280, len(labels) - 1280])

optimiser = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
schedule = CosineLRScheduler(optimiser, t_initial=EPOCHS, warmup_t=1, warmup_lr_init=1e-5)
mixup = Mixup(mixup_alpha=0.2, num_classes=10)
for epoch in range(EPOCHS):
    schedule.step(epoch)
    model.train()
    for chosen in train[torch.randperm(len(train))].split(BATCH):
        images, targets = mixup(pixels[chosen], labels[chosen])
        loss = SoftTargetCrossEntropy()(model(images), targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
model.eval()
with torch.inference_mode():
    right = (model(pixels[test]).argmax(dim=1) == labels[test]).float().mean()
print(f"accuracy: {100 * right:.1f} %")
