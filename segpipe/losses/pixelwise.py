"""Per-pixel class losses. All sums are over valid pixels only; the caller divides by the global count."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from segpipe import IGNORE_INDEX


def pixel_losses(logits: Tensor, target: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of every pixel, 0 where the target is ignored.

    `reduction="none"` because the reducing kernels have no deterministic form on CUDA.

    Shapes: logits (B, C, H, W), target uint8 (B, H, W), class_weights (C,) -> float32 (B, H, W).
    """
    return F.cross_entropy(
        logits.float(), target.long(), weight=class_weights, ignore_index=IGNORE_INDEX, reduction="none"
    )


def class_weights(pixels: Tensor, name: str) -> Tensor:
    """Weight of each class from its pixel count, scaled so that the mean over the training pixels is 1.

    "log": 1 / log(1.02 + frequency), which lifts rare classes by at most a factor of 50. A class without a pixel gets
    the weight of frequency 0, which no pixel uses.

    Shapes: int64 (C,) -> float32 (C,). Source: ENet, arXiv:1606.02147, equation 1.
    """
    assert name == "log"
    frequency = pixels.double() / pixels.sum().clamp_min(1)
    weights = 1.0 / torch.log(1.02 + frequency)
    return (weights / (weights * frequency).sum().clamp_min(1e-12)).float()


def kth_largest(values: Tensor, k: Tensor) -> Tensor:
    """The k-th largest of non-negative float32 `values` (1-based), exactly, as a 0-d tensor.

    Builds the answer bit by bit: the bits of non-negative floats are ordered as integers, so 31 counts replace a sort.
    Depends on values only, never on their order, and does not synchronise with the host.
    """
    bits = values.flatten().view(torch.int32)
    answer = torch.zeros((), dtype=torch.int32, device=values.device)
    for place in range(30, -1, -1):
        candidate = answer | (1 << place)
        answer = torch.where((bits >= candidate).sum() >= k, candidate, answer)
    return answer.view(torch.float32)


def ohem_sum(losses: Tensor, valid: Tensor, *, threshold: float, min_kept: float) -> Tensor:
    """Sum of the hard pixels' losses, scaled up to all valid pixels: mean of the kept times the number of the valid.

    A pixel is hard when its loss exceeds `-log(threshold)`; when fewer than `min_kept` (a fraction of the shard's
    pixels) are hard, the highest losses down to that number are kept, ties included.

    Shapes: losses float32 (B, H, W), valid bool (B, H, W) -> 0-d. Source: OHEM, arXiv:1604.03540, by value.
    """
    detached = losses.detach().clamp_min(0)
    fewest = min(math.ceil(min_kept * losses.numel()), losses.numel())
    cut = detached.new_tensor(-math.log(max(threshold, 1e-12)))
    if fewest > 0:
        count = torch.tensor(fewest, device=losses.device)
        cut = torch.minimum(cut, kth_largest(detached, count))
    kept = valid & ~(detached < cut)  # a NaN counts as hard, so that it reaches the sum and is seen
    num_kept = kept.sum().clamp_min(1)
    return torch.where(kept, losses, 0.0).sum() * (valid.sum() / num_kept)
