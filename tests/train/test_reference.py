"""Whole trainings held against a loop that is written here, from formulas and in float64.

It shares the network's layers and the order of the samples with segpipe, and nothing else: files are read by OpenCV,
and preprocessing, loss, its division, gradients of several shards, BatchNorm statistics, clipping, schedule, optimizer,
average and what is logged are computed afresh. Equal digests say that two runs did the same; this says that they did
the right thing.
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
TOLERANCE = 1e-4  # rounding to fp32 gives 3e-5
CLASS_WEIGHTS, SMOOTHING = [0.5, 1.0, 1.5, 2.0], 0.1
STRIDES = {"sgd": {"main": 2, "aux": 3}, "adamw": {"main": 1, "aux": 1}}
SCHEDULE_STEPS = {"sgd": 9, "adamw": STEPS}
NETWORK = """
    from torch import nn
    from torch.nn import functional as F
    from segpipe.models.layers import SegmentationNet

    class Repeated(SegmentationNet):
        '''A block that is used three times, a head that shares another's weight, and one that is sure of edges.'''

        def __init__(self, num_classes):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, stride=4, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(8)
            self.block = nn.Conv2d(8, 8, 3, padding=1)
            self.main = nn.Conv2d(8, num_classes, 1)
            self.aux = nn.Conv2d(8, num_classes, 1)
            self.aux.weight = self.main.weight
            self.edge = nn.Conv2d(8, 1, 1)

        def logits(self, image, *, aux):
            x = F.relu(self.norm(self.stem(image)))
            early = x
            for _ in range(3):
                x = x + F.relu(self.block(x))
            heads = {"main": self.main(x)}
            if aux:
                heads |= {"aux": self.aux(early), "boundary": self.edge(x / 9) + 4}
            return heads
"""
RECIPES: dict[str, tuple[str, ...]] = {
    "sgd": (
        "optim.name=sgd", f"loss.class_weights={CLASS_WEIGHTS}", f"loss.label_smoothing={SMOOTHING}",
        "loss.stride=2", "loss.aux_stride=3", "model.standardize=true", "model.freeze=[block.bias]",
        "optim.lr_scale={stem.*: 0.5}", "optim.schedule_steps=9", "loss.boundary_weight=1",
    ),
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


def sample(folder: Path, index: int, recipe: str) -> tuple[Tensor, Tensor]:
    """Normalized image (3, H, W), float64, and target (H, W)."""
    name = f"train/{index:02}.png"
    image = cv2.imread(str(folder / "images" / name))
    assert image is not None
    values = image[..., ::-1].astype(np.float64)
    if recipe == "sgd":
        normalized = (values - values.mean()) / np.sqrt(values.var() + 1)
    else:
        centered = values / 255 - (0.485, 0.456, 0.406)
        normalized = centered / (0.229, 0.224, 0.225)
    target = cv2.imread(str(folder / "masks" / name), cv2.IMREAD_UNCHANGED)
    return torch.from_numpy(normalized).permute(2, 0, 1), torch.from_numpy(
        target
    ).long()


def rate(step: int, recipe: str) -> float:
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / (SCHEDULE_STEPS[recipe] - WARMUP)
    if recipe == "adamw":
        return RATE * (1 + math.cos(math.pi * done)) / 2
    return float(RATE * (1 - done) ** POWER)


def entropy_sum(logits: Tensor, target: Tensor, recipe: str) -> Tensor:
    weights = torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype)
    return F.cross_entropy(
        logits,
        target,
        weights if recipe == "sgd" else None,
        ignore_index=255,
        reduction="sum",
        label_smoothing=SMOOTHING if recipe == "sgd" else 0.0,
    )


def pixel_sum(logits: Tensor, target: Tensor, recipe: str) -> Tensor:
    """The loss of a head, summed over a shard's pixels."""
    if recipe == "sgd":
        return entropy_sum(logits, target, recipe)
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


def boundary_sum(logits: Tensor, target: Tensor) -> Tensor:
    """Pixels with another class within 2 pixels against the rest, both kinds weighted alike."""
    around = F.pad(target, (2, 2, 2, 2), value=255).unfold(1, 5, 1).unfold(2, 5, 1)
    other = (around != target[..., None, None]) & (around != 255)
    valid = target != 255
    edge = other.flatten(3).any(3)[valid].to(logits.dtype)
    losses = F.binary_cross_entropy_with_logits(
        logits[:, 0][valid], edge, reduction="none"
    )
    return (losses * torch.where(edge > 0, 1 - edge.mean(), edge.mean())).sum()


def shard_sums(
    model: Any, image: Tensor, target: Tensor, recipe: str
) -> dict[str, Tensor]:
    """The parts of the loss, summed over a shard's pixels."""
    sums: dict[str, Tensor] = {}
    wide = {
        name: F.interpolate(logits, (SIZE, SIZE), mode="bilinear", align_corners=False)
        for name, logits in model.logits(image, aux=True).items()
    }
    share = 1 if recipe == "sgd" else 20
    sums["boundary"] = share * boundary_sum(wide["boundary"], target)
    sure = wide["boundary"].detach()[:, 0].sigmoid() > 0.8
    for name, stride in STRIDES[recipe].items():
        grid = (..., *2 * (slice(stride // 2, None, stride),))
        logits, ids = wide[name][grid], target[grid]
        scale = target.numel() / ids.numel()
        weight = scale if name == "main" else 0.4 * scale
        sums[name] = weight * pixel_sum(logits, ids, recipe)
        if name == "main":
            edges = ids.where(sure[grid], 255)
            sums["edge"] = scale * entropy_sum(logits, edges, recipe)
    if recipe == "adamw":
        sums["dice"] = 0.5 * dice(wide["main"], target)
    return sums


def update(
    weight: Tensor, rate: float, memory: list[Tensor], step: int, recipe: str
) -> None:
    """One step of SGD or AdamW, as published; torch.optim would import the compiler, which takes seconds."""
    assert weight.grad is not None
    decay = WEIGHT_DECAY if weight.ndim > 1 else 0.0
    if recipe == "sgd":
        memory[0] = 0.9 * memory[0] + weight.grad + decay * weight.data
        weight.data -= rate * memory[0]
    else:
        memory[0] = 0.9 * memory[0] + 0.1 * weight.grad
        memory[1] = 0.999 * memory[1] + 0.001 * weight.grad**2
        mean, square = (
            kept / (1 - beta ** (step + 1))
            for kept, beta in zip(memory, (0.9, 0.999), strict=True)
        )
        weight.data -= rate * (decay * weight.data + mean / (square.sqrt() + 1e-8))


def trained(
    folder: Path, model: nn.Module, recipe: str, *, faster: float = 1.0
) -> tuple[nn.Module, nn.Module, list[dict[str, float]]]:
    """The network after all updates, its average, and what is logged; `faster` multiplies the learning rate."""
    model = model.double().train()
    average, logged = copy.deepcopy(model), []
    if recipe == "sgd":
        model.get_parameter("block.bias").requires_grad_(False)
    memory = {
        name: [torch.zeros_like(p)] * 2
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    order = Order(0, IMAGES, SHARDS, BATCH)
    for step in range(STEPS):
        shards = []
        for shard in range(SHARDS):
            pairs = [
                sample(folder, index, recipe) for _, index in order.shard(step, shard)
            ]
            images, targets = zip(*pairs, strict=True)
            shards.append((torch.stack(images), torch.stack(targets)))
        valid = sum(int((target != 255).sum()) for _, target in shards)
        before = {
            name: value.clone()
            for name, value in model.named_buffers()
            if "running" in name
        }
        means = {name: torch.zeros_like(value) for name, value in before.items()}
        parts: dict[str, float] = {}
        for image, target in shards:
            buffers = dict(model.named_buffers())
            for name, value in before.items():
                buffers[name].data.copy_(value)
            sums = shard_sums(model, image, target, recipe)
            loss = torch.stack([*sums.values()]).sum() / valid
            loss.backward()  # type: ignore[no-untyped-call]
            for name, value in {**sums, "total": loss * valid}.items():
                parts[name] = parts.get(name, 0.0) + value.item() / valid
            for name in means:
                means[name] += buffers[name] / SHARDS
        for name, value in means.items():
            buffers[name].data.copy_(value)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        figures = {
            "lr": rate(step, recipe),
            "grad_norm": norm,
            "loss": parts.pop("total"),
        }
        logged.append(figures | {f"loss_{name}": part for name, part in parts.items()})
        for name, kept in memory.items():
            half = recipe == "sgd" and name == "stem.weight"
            speed = faster * rate(step, recipe) * (0.5 if half else 1)
            update(model.get_parameter(name), speed, kept, step, recipe)
        model.zero_grad()
        decay = min(DECAY, (1 + step) / (10 + step))
        for slow, live in (
            *zip(average.parameters(), model.parameters(), strict=True),
            *zip(average.buffers(), model.buffers(), strict=True),
        ):
            if live.is_floating_point():
                slow.data.mul_(decay).add_(live.data, alpha=1 - decay)
    return model, average, logged


def difference(
    state: dict[str, Tensor], reference: nn.Module, start: nn.Module
) -> tuple[float, str]:
    """Largest difference of a tensor, as a share of how far that tensor moved, and its name."""
    first, worst = start.state_dict(), (0.0, "")
    for name, value in reference.state_dict().items():
        if value.is_floating_point():
            moved = (value - first[name].double()).norm()
            apart = (state[name].double() - value).norm()
            worst = max(worst, (float(apart / moved if moved else apart), name))
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
    """Weights, statistics and averages after all updates, and each line of metrics.jsonl.

    The control: a rate that is wrong by 1 % is noticed.
    """
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
        "train.log_every=1",
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
    model, average, logged = trained(data, copy.deepcopy(start), recipe)
    assert difference(saved["model"], model, start) < (TOLERANCE,)
    assert difference(saved["ema"], average, start) < (TOLERANCE,)

    for line, figures in zip(runs.updates(folder), logged, strict=True):
        found = {name: line[name] for name in line if name in figures or "loss" in name}
        assert found == pytest.approx(figures, rel=TOLERANCE)

    model, *_ = trained(data, copy.deepcopy(start), recipe, faster=1.01)
    assert difference(saved["model"], model, start) > (10 * TOLERANCE,)
