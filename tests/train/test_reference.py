"""Whole trainings held against a loop that is written here, from formulas and in float64.

It shares the network's layers and the order of the samples with segpipe, and nothing else: files are read by OpenCV,
and preprocessing, loss, its division, gradients of several shards, BatchNorm statistics, clipping, schedule, optimizer
and average are computed afresh. Equal digests say that two runs did the same; this says that they did the right thing.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import runs
from ranks import launched
from segpipe.data.order import Order
from segpipe.keys import torch_seed
from segpipe.models import build_model

STEPS, SHARDS, BATCH, SIZE, IMAGES, CLASSES = 6, 4, 2, 64, 12, 4
DECAY, WEIGHT_DECAY, RATE, CLIP, WARMUP, POWER = 0.9, 0.01, 0.02, 0.5, 2, 0.9
TOLERANCE = 1e-4  # rounding to fp32 gives 1e-6
CLASS_WEIGHTS = [0.5, 1.0, 1.5, 2.0]
NETWORK = """
    from torch import nn
    from torch.nn import functional as F
    from segpipe.models.layers import SegmentationNet

    class Repeated(SegmentationNet):
        '''A block that is used three times, and a head that shares its weight with another.'''

        def __init__(self, num_classes):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, stride=4, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(8)
            self.block = nn.Conv2d(8, 8, 3, padding=1)
            self.main = nn.Conv2d(8, num_classes, 1)
            self.aux = nn.Conv2d(8, num_classes, 1)
            self.aux.weight = self.main.weight

        def logits(self, image, *, aux):
            x = F.relu(self.norm(self.stem(image)))
            early = x
            for _ in range(3):
                x = x + F.relu(self.block(x))
            heads = {"main": self.main(x)}
            return {**heads, "aux": self.aux(early)} if aux else heads
"""
RECIPES: dict[str, tuple[str, ...]] = {
    "sgd": ("optim.name=sgd", f"loss.class_weights={CLASS_WEIGHTS}"),
    "adamw": (
        "optim.name=adamw", "optim.schedule=cosine", "loss.name=ohem",
        "loss.ohem_threshold=0.3", "loss.dice_weight=0.5",
    ),
}  # fmt: skip


def write_images(folder: Path) -> None:
    """Images of colored squares with noise, and masks with some pixels to ignore."""
    draws = np.random.default_rng(0)
    for split, count in (("train", IMAGES), ("val", 1)):
        for number in range(count):
            mask = np.kron(draws.integers(0, CLASSES, (4, 4)), np.ones((16, 16)))
            image = 50 * mask[..., None] + draws.integers(0, 50, (SIZE, SIZE, 3))
            mask[: 4 + number] = 255
            for kind, pixels in (("images", image), ("masks", mask)):
                path = folder / kind / split / f"{number:02}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(path), pixels.astype(np.uint8))
    names = [f"class_{number}" for number in range(CLASSES)]
    (folder / "classes.yaml").write_text(json.dumps({"names": names}))


def sample(folder: Path, index: int) -> tuple[Tensor, Tensor]:
    """Normalized image (3, H, W), float64, and target (H, W)."""
    name = f"train/{index:02}.png"
    image = cv2.imread(str(folder / "images" / name))
    assert image is not None
    normalized = (image[..., ::-1] / 255.0 - (0.485, 0.456, 0.406)) / (
        0.229,
        0.224,
        0.225,
    )
    target = cv2.imread(str(folder / "masks" / name), cv2.IMREAD_UNCHANGED)
    return torch.from_numpy(normalized).permute(2, 0, 1), torch.from_numpy(
        target
    ).long()


def rate(step: int, schedule: str) -> float:
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    if schedule == "cosine":
        return RATE * (1 + math.cos(math.pi * done)) / 2
    return float(RATE * (1 - done) ** POWER)


def pixel_sum(logits: Tensor, target: Tensor, recipe: str) -> Tensor:
    """The loss of a head, summed over a shard's pixels."""
    if recipe == "sgd":
        weights = torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype)
        return F.cross_entropy(
            logits, target, weights, ignore_index=255, reduction="sum"
        )
    losses = F.cross_entropy(logits, target, ignore_index=255, reduction="none")
    hard = losses[(target != 255) & (losses > -math.log(0.3))]
    fewest = math.ceil(losses.numel() / 16)
    if len(hard) < fewest:
        hard = losses.flatten().sort(descending=True).values[:fewest]
    return hard.mean() * (target != 255).sum()


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """1 - 2 |P T| / (|P| + |T|), mean over the classes of the shard, times its labelled pixels."""
    valid = target != 255
    probability = logits.softmax(1).movedim(1, -1)[valid]
    truth = F.one_hot(target[valid], CLASSES)
    both = (probability * truth).sum(0)
    each = 1 - 2 * both / (probability.sum(0) + truth.sum(0))
    return each[truth.sum(0) > 0].mean() * valid.sum()


def shard_sum(model: Any, image: Tensor, target: Tensor, recipe: str) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for name, logits in model.logits(image, aux=True).items():
        wide = F.interpolate(logits, (SIZE, SIZE), mode="bilinear", align_corners=False)
        total = total + (1.0 if name == "main" else 0.4) * pixel_sum(
            wide, target, recipe
        )
        if recipe == "adamw" and name == "main":
            total = total + 0.5 * dice(wide, target)
    return total


def trained(
    folder: Path, model: nn.Module, recipe: str, *, faster: float = 1.0
) -> tuple[nn.Module, nn.Module]:
    """The network after all updates and its average; `faster` multiplies the learning rate."""
    model = model.double().train()
    average = copy.deepcopy(model)
    wide = [p for p in model.parameters() if p.ndim > 1]
    narrow = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": wide, "weight_decay": WEIGHT_DECAY},
        {"params": narrow, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if recipe == "sgd":
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=RATE)

    order = Order(0, IMAGES, SHARDS, BATCH)
    for step in range(STEPS):
        shards = []
        for shard in range(SHARDS):
            pairs = [sample(folder, index) for _, index in order.shard(step, shard)]
            images, targets = zip(*pairs, strict=True)
            shards.append((torch.stack(images), torch.stack(targets)))
        valid = sum(int((target != 255).sum()) for _, target in shards)
        before = {
            name: value.clone()
            for name, value in model.named_buffers()
            if "running" in name
        }
        means = {name: torch.zeros_like(value) for name, value in before.items()}
        for image, target in shards:
            buffers = dict(model.named_buffers())
            for name, value in before.items():
                buffers[name].data.copy_(value)
            loss = shard_sum(model, image, target, recipe) / valid
            loss.backward()  # type: ignore[no-untyped-call]
            for name in means:
                means[name] += buffers[name] / SHARDS
        for name, value in means.items():
            buffers[name].data.copy_(value)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = faster * rate(step, "poly" if recipe == "sgd" else "cosine")
        optimizer.step()
        optimizer.zero_grad()
        decay = min(DECAY, (1 + step) / (10 + step))
        for kept, live in (
            *zip(average.parameters(), model.parameters(), strict=True),
            *zip(average.buffers(), model.buffers(), strict=True),
        ):
            if live.is_floating_point():
                kept.data.mul_(decay).add_(live.data, alpha=1 - decay)
    return model, average


def difference(
    state: dict[str, Tensor], reference: nn.Module, start: nn.Module
) -> tuple[float, str]:
    """Largest difference of a tensor, as a share of how far that tensor moved, and its name."""
    first, worst = start.state_dict(), (0.0, "")
    for name, value in reference.state_dict().items():
        if value.is_floating_point():
            moved = (value - first[name].double()).norm()
            apart = (state[name].double() - value).norm()
            worst = max(worst, (float(apart / moved), name))
    return worst


def _trained(rank: int, folder: Path, changes: tuple[str, ...]) -> int:
    """Without the start of another process that asks what test_contracts.py asks."""
    with mock.patch("segpipe.checks.contracts.check_plugin"):
        return runs.run(folder, *changes)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_is_that_of_a_loop_in_float64(
    recipe: str, project: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, statistics and averages after all updates; the control: a rate that is wrong by 1 % is noticed."""
    project("reference_net.py", NETWORK)
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{runs.ROOT}")
    monkeypatch.syspath_prepend(Path.cwd())
    data = tmp_path / "data"
    write_images(data)
    settings = (
        "model.name=reference_net:Repeated", "data=folder", f"data.root={data}", f"train.steps={STEPS}",
        f"compute.shards={SHARDS}", f"augment.crop_size=[{SIZE},{SIZE}]", f"compute.samples_per_shard={BATCH}",
        "augment.scale=[1,1]", "augment.flip=0", "augment.brightness=0", "augment.contrast=0", "augment.saturation=0",
        "augment.hue=0", f"optim.lr={RATE}", f"optim.warmup_steps={WARMUP}", f"optim.power={POWER}",
        f"optim.weight_decay={WEIGHT_DECAY}", f"optim.clip_norm={CLIP}", f"ema.decay={DECAY}", "compute.ledger=false",
    )  # fmt: skip
    folder = tmp_path / "runs" / "run"
    changes = (*RECIPES[recipe], *settings)
    if recipe == "sgd":
        assert _trained(0, folder, changes) == 0
    else:
        assert launched(2, _trained, folder, changes) == [0, 0]
    saved = torch.load(folder / "last.pt", weights_only=True)

    torch.manual_seed(torch_seed(0, 0, 0, "weights"))
    start = build_model("reference_net:Repeated", CLASSES, {})
    model, average = trained(data, copy.deepcopy(start), recipe)
    assert difference(saved["model"], model, start) < (TOLERANCE,)
    assert difference(saved["ema"], average, start) < (TOLERANCE,)

    model, _ = trained(data, copy.deepcopy(start), recipe, faster=1.01)
    assert difference(saved["model"], model, start) > (10 * TOLERANCE,)
