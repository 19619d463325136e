"""A loss that every class weighs equally in, however few its pixels are."""

from __future__ import annotations

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX


def dice_sum(logits: Tensor, target: Tensor) -> Tensor:
    """Soft Dice loss, 1 - 2 |P T| / (|P| + |T|), averaged over the shard's classes, times its valid pixels.

    P are the probabilities and T the target of a class over all valid pixels of the shard; a class without a target
    pixel in the shard is left out. 0, and so is the gradient, where nothing is labelled. Per shard, like OHEM: the
    number of processes is not in it.

    Shapes: logits float32 (B, C, H, W), target uint8 (B, H, W) -> 0-d. Source: V-Net, arXiv:1606.04797, with the plain
    sums of arXiv:1707.03237 in the denominator.
    """
    valid = (target != IGNORE_INDEX).unsqueeze(1)
    probability = logits.softmax(1) * valid.float()  # a CPU takes ten times as long for torch.where
    classes = torch.arange(logits.shape[1], device=target.device, dtype=target.dtype).view(1, -1, 1, 1)
    belongs = (target.unsqueeze(1) == classes).float()
    common = (probability * belongs).sum((0, 2, 3))
    size = belongs.sum((0, 2, 3))
    loss = 1.0 - 2.0 * common / (probability.sum((0, 2, 3)) + size).clamp_min(1e-6)
    present = size > 0
    mean = torch.where(present, loss, 0.0).sum() / present.sum().clamp_min(1)
    return mean * valid.sum()
