"""Focal loss: (1 - p) ** gamma times the cross-entropy, with p the target's probability. Source: arXiv:1708.02002."""

import torch
from torch import Tensor

from segpipe.losses.fused import Chosen, without_weights
from segpipe.settings.groups import LossConfig


def focal(
    losses: Tensor, target: Tensor, class_weights: Tensor | None, config: LossConfig
) -> Chosen:
    """Values and slopes with `loss.focal_gamma`; p is exp(-cross-entropy) without class weights.

    With label smoothing, p is less than the target's probability. Pixels of a class with weight 0 do not count.

    Shapes: losses float (B, H, W), 0 where the target, uint8 (B, H, W), is ignored; class_weights (C,).
    """
    gamma = config.focal_gamma
    unweighted = without_weights(losses, target, class_weights)
    miss = -torch.expm1(-unweighted)  # 1 - p, exact where p is near 1
    scale = miss.clamp_min(0) ** gamma
    # p l / (1 - p) goes to 1 as the loss l goes to 0.
    ratio = torch.where(miss > 0, (1 - miss) * unweighted / miss, 1.0)
    return Chosen(scale * losses, scale * (1 + gamma * ratio))
