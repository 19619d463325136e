"""Cross-entropy of every pixel, and weights of the classes in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pixel_losses(
    logits: Tensor,
    target: Tensor,
    class_weights: Tensor | None = None,
    *,
    ignore_index: int,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of every pixel, 0 where the target is ignored.

    `reduction="none"` because the reducing kernels have no deterministic form on CUDA.

    Shapes: logits (B, C, H, W), target uint8 (B, H, W), class_weights (C,) -> float32 (B, H, W).
    """
    return F.cross_entropy(
        logits.float(),
        target.long(),
        weight=class_weights,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def class_weights(pixels: Tensor, name: str) -> Tensor:
    """Weight of each class from its pixel count, scaled so that the mean over the training pixels is 1.

    "logX": 1 / log(X + frequency), which lifts rare classes by at most a factor of log(X + 1) / log(X): 36 for
    X = 1.02, which "log" stands for, 8 for 1.10. A class without a pixel gets the weight of frequency 0. Source: ENet,
    arXiv:1606.02147, equation 1.

    "sqrt": 1 / sqrt(frequency), without a bound: a class of 0.01 % of the pixels weighs 100 times as much as one of
    all. A class without a pixel gets the weight of a single pixel.

    Shapes: int64 (C,) -> float32 (C,).
    """
    total = pixels.sum().clamp_min(1)
    frequency = pixels.double() / total
    if name == "sqrt":
        weights = 1.0 / (pixels.clamp_min(1).double() / total).sqrt()
    else:
        offset = float(name.removeprefix("log") or 1.02)
        weights = 1.0 / torch.log(offset + frequency)
    return (weights / (weights * frequency).sum().clamp_min(1e-12)).float()
