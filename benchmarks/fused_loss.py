"""C5: upsampling and loss, forward and backward, against interpolate + cross_entropy: time, peak memory, error."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import measure as measuring
from segpipe.losses.total import shard_loss, valid_pixels
from segpipe.settings.groups import LossConfig

BATCH, CLASSES, SMALL, LARGE, IGNORED = 2, 19, 128, 1024, 0.1
EXACT = 64, 512  # SMALL and LARGE of the comparison with float64
RECIPE = "interpolate + cross_entropy"
ARMS: dict[str, dict[str, Any]] = {
    "native": {"backend": "native"},
    "native, OHEM": {"backend": "native", "name": "ohem"},
    "native, all terms": {
        "backend": "native",
        "name": "ohem",
        "dice_weight": 1.0,
        "label_smoothing": 0.1,
    },
    "plain, OHEM": {"backend": "plain", "name": "ohem"},
    "plain, stride 2": {"backend": "plain", "stride": 2},
}
MUST, STRETCH = {"time": 1.5, "memory": 15}, {"time": 4, "memory": 20}
SMOKE = {
    "SMALL": 8, "LARGE": 64, "EXACT": (8, 64), "ARMS": {"native": ARMS["native"]},
}  # fmt: skip
MOST_ERROR = 1e-6  # of the gradient against float64, relative to its largest value


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Times on 1 and 2 threads, peak memory of fresh processes, and the error of every arm against float64."""
    by_threads = {
        str(threads): times(threads, given.repeats or 15) for threads in (1, 2)
    }
    memory = {arm: peak_kib(arm) for arm in (RECIPE, *ARMS)}
    error = errors()
    ratios = {"memory": memory[RECIPE] / memory["native"]}
    lows = [found["recipe_over"]["native"]["low"] for found in by_threads.values()]
    exact = error["native"] <= MOST_ERROR
    return {
        "what": f"batch {BATCH}, {CLASSES} classes, fp32, {SMALL}x{SMALL} to {LARGE}x{LARGE}, {IGNORED:.0%} ignored",
        "machine": measuring.machine(),
        "threads": by_threads,
        "peak_extra_mib": {arm: round(kib / 1024, 1) for arm, kib in memory.items()},
        "recipe_memory_over_native": round(ratios["memory"], 1),
        "gradient_error": error,
        "must": MUST,
        "stretch": STRETCH,
        "passed": exact
        and min(lows) >= MUST["time"]
        and ratios["memory"] >= MUST["memory"],
        "passed_stretch": exact
        and min(lows) >= STRETCH["time"]
        and ratios["memory"] >= STRETCH["memory"],
    }


def times(threads: int, rounds: int) -> dict[str, Any]:
    """Times of all arms, and how many times the recipe's each is."""
    torch.set_num_threads(threads)
    logits, target = inputs()
    seconds = measuring.interleaved(
        {arm: partial(step(arm), logits, target) for arm in (RECIPE, *ARMS)},
        repeats=rounds,
    )
    return {
        "ms": {arm: measuring.summary(each) for arm, each in seconds.items()},
        "recipe_over": {
            arm: measuring.ratio(seconds[RECIPE], seconds[arm]) for arm in ARMS
        },
    }


def inputs(small: int = 0, large: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and targets, random; of SMALL and LARGE pixels unless told otherwise."""
    small, large = small or SMALL, large or LARGE
    torch.manual_seed(0)
    target = torch.randint(0, CLASSES, (BATCH, large, large), dtype=torch.uint8)
    return torch.randn(BATCH, CLASSES, small, small), target.masked_fill(
        torch.rand(target.shape) < IGNORED, 255
    )


def step(arm: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward and backward of an arm, which gives the gradient of the logits."""
    return recipe if arm == RECIPE else partial(ours, LossConfig(**ARMS[arm]))


def recipe(logits: Tensor, target: Tensor) -> Tensor:
    """What public trainers do."""
    logits = logits.detach().requires_grad_()
    resized = F.interpolate(
        logits, size=target.shape[-2:], mode="bilinear", align_corners=False
    )
    F.cross_entropy(resized, target.long(), ignore_index=255).backward()
    assert logits.grad is not None
    return logits.grad


def ours(config: LossConfig, logits: Tensor, target: Tensor) -> Tensor:
    """The loss of a shard as training computes it."""
    logits, valid = logits.detach().requires_grad_(), torch.tensor(valid_pixels(target))
    parts = shard_loss(
        {"main": logits},
        target,
        config,
        class_weights=None,
        global_valid=valid,
        align_corners=False,
    )
    parts["total"].backward()
    assert logits.grad is not None
    return logits.grad


def errors() -> dict[str, float]:
    """Largest error of the gradient of the cross-entropy against float64, relative to the largest gradient."""
    logits, target = inputs(*EXACT)
    exact = recipe(logits.double(), target)
    found = {arm: step(arm)(logits, target) for arm in (RECIPE, "native")}
    return {
        arm: float((each - exact).abs().max() / exact.abs().max())
        for arm, each in found.items()
    }


def peak_kib(arm: str) -> int:
    """Peak memory of an arm in KiB above what its inputs take, in a fresh process on one thread."""
    root = str(Path(__file__).resolve().parents[1])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from benchmarks import fused_loss; "
        f"fused_loss.print_peak({arm!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return int(json.loads(done.stdout.splitlines()[-1]))


def print_peak(arm: str) -> None:
    """Print the peak memory of an arm in KiB; a small call before loads its code."""
    torch.set_num_threads(1)
    step(arm)(*inputs(8, 64))
    logits, target = inputs()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    step(arm)(logits, target)
    print(_status("VmHWM") - before)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
