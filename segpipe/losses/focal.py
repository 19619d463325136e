"""Focal loss: (1 - p) ** gamma times the cross-entropy, p the probability of the target. Source: arXiv:1708.02002."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.losses.fused import Chosen

if TYPE_CHECKING:
    from segpipe.settings.groups import LossConfig


def focal(
    losses: Tensor, target: Tensor, class_weights: Tensor | None, config: LossConfig
) -> Chosen:
    """Values and slopes with `loss.focal_gamma`; p is exp(-cross-entropy), of which class weights are taken out again.

    With label smoothing p is less than the probability of the target. Pixels of a class of weight 0 do not count.

    Shapes: losses float (B, H, W), 0 where the target, uint8 (B, H, W), is ignored; class_weights (C,).
    """
    gamma, unweighted = config.focal_gamma, losses.detach()
    if class_weights is not None:
        ids = torch.where(target == IGNORE_INDEX, 0, target).long()
        weights = class_weights.to(losses.dtype)[ids]
        unweighted = torch.where(weights > 0, unweighted / weights, 0.0)
    miss = -torch.expm1(-unweighted)  # 1 - p, exact where p is near 1
    scale = miss.clamp_min(0) ** gamma
    # p l / (1 - p) goes to 1 where the loss l goes to 0.
    ratio = torch.where(miss > 0, (1 - miss) * unweighted / miss, 1.0)
    return Chosen(scale * losses, scale * (1 + gamma * ratio))
