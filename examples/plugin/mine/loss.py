"""Focal loss, arXiv:1708.02002, for several classes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def focal(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    class_weights: Tensor | None = None,
    gamma: float = 2.0,
) -> Tensor:
    """(1 - p)^gamma times the cross-entropy of each pixel, p being the probability of its class.

    Shapes: logits float32 (B, C, H, W), target int64 (B, H, W) -> (B, H, W); segpipe sums and divides.
    """
    losses = F.cross_entropy(
        logits, target, ignore_index=ignore_index, reduction="none"
    )
    # At p = 1 the power would have the gradient 0 * infinity for gamma below 1.
    focus = (1 - (-losses).exp()).clamp_min(1e-6) ** gamma
    if class_weights is None:
        return focus * losses
    weights = class_weights[
        target.clamp_max(len(class_weights) - 1)
    ]  # any weight will do for ignored pixels: their loss is 0
    return weights * focus * losses
