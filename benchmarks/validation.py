"""C7: from logits at output stride to the counts of a validation, against three peers' recipes."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import measure as measuring
from benchmarks.baselines import validation as peers
from segpipe.train.metrics import confusion
from segpipe.train.validate import classes_and_confusion

CLASSES, SMALL, LARGE = 19, (128, 256), (1024, 2048)
MUST = {"torchvision": 4.0, "pidnet": 2.5, "mmseg": 6.0}
SMOKE = {"SMALL": (16, 32), "LARGE": (128, 256)}
STRETCH = {"torchvision": 10.0, "pidnet": 6.0, "mmseg": 15.0}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Times on 1 and 2 threads, and how many of the pixels are counted otherwise."""
    logits, target = inputs()
    by_threads = {
        str(threads): times(logits, target, threads, given.repeats or 15)
        for threads in (1, 2)
    }
    lows = {
        name: min(found["over_ours"][name]["low"] for found in by_threads.values())
        for name in MUST
    }
    moved = differences()
    return {
        "what": f"1 image, {CLASSES} classes, fp32, {SMALL[0]}x{SMALL[1]} to {LARGE[0]}x{LARGE[1]}",
        "machine": measuring.machine(),
        "threads": by_threads,
        "pixels_counted_otherwise": moved,
        "must": MUST,
        "stretch": STRETCH,
        "passed": all(lows[name] >= must for name, must in MUST.items())
        and moved["share"] <= 1e-6,
        "passed_stretch": all(
            lows[name] >= stretch for name, stretch in STRETCH.items()
        ),
    }


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits with regions, as a network's, and a target of which 10 % is ignored."""
    torch.manual_seed(seed)
    regions = F.interpolate(torch.randn(1, CLASSES, 16, 32), size=SMALL, mode="bicubic")
    target = torch.randint(0, CLASSES, (1, *LARGE), dtype=torch.uint8)
    logits = 2 * regions + 0.3 * torch.randn(1, CLASSES, *SMALL)
    return logits, target.masked_fill(torch.rand(target.shape) < 0.1, peers.IGNORED)


def times(logits: Tensor, target: Tensor, threads: int, rounds: int) -> dict[str, Any]:
    """Times of all arms. The peers' loaders deliver targets as int64, so that conversion is not counted."""
    torch.set_num_threads(threads)
    wide = target.long()
    arms = {name: partial(getattr(peers, name), logits, wide) for name in MUST}
    for arm, backend in (("native", "native"), ("torch", "triton")):
        arms[arm] = partial(
            classes_and_confusion, logits, target, align_corners=False, backend=backend
        )
    arms["plain"] = partial(plain, logits, target)
    seconds = measuring.interleaved(arms, repeats=rounds)
    return {
        "ms": {arm: measuring.summary(each) for arm, each in seconds.items()},
        "over_ours": {
            name: measuring.ratio(seconds[name], seconds["native"]) for name in MUST
        },
    }


def plain(logits: Tensor, target: Tensor) -> Tensor:
    """With `loss.backend=plain`."""
    resized = F.interpolate(logits, size=LARGE, mode="bilinear", align_corners=False)
    return confusion(resized.argmax(1).to(torch.uint8), target, CLASSES)


def differences() -> dict[str, Any]:
    """Half the sum of differences of the cells of the confusion, over 8 images: pixels whose two best classes tie but
    for rounding. The largest of the peers, each with its own value of align_corners."""
    most, images = 0.0, 8
    for seed in range(images):
        logits, target = inputs(seed)
        own = {
            corners: classes_and_confusion(
                logits, target, align_corners=corners, backend="native"
            )[1].numpy()
            for corners in (False, True)
        }
        found = (
            peers.torchvision(logits, target.long()).numpy(),
            peers.pidnet(logits, target.long()),
        )
        pairs = zip(found, (own[False], own[True]), strict=True)
        most += max(float(np.abs(a - b).sum()) / 2 for a, b in pairs)
        areas = peers.mmseg(logits, target.long())
        assert abs(float(areas[2].sum()) - own[False].sum()) == 0
    pixels = images * LARGE[0] * LARGE[1]
    return {"pixels": most, "of": pixels, "share": most / pixels}
