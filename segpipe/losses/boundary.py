"""The edge supervision of networks with a boundary branch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from segpipe import IGNORE_INDEX


def boundary_target(target: Tensor, *, width: int = 2) -> Tensor:
    """Band around class changes that supervises the edge branch.

    A pixel is positive when another labelled class lies within `width` pixels (square window); contact with ignored
    pixels makes no edge, so an unlabelled car bonnet does not become one long boundary.

    Shapes: target uint8 (B, H, W) -> float32 (B, 1, H, W), values 0 or 1. No gradient.
    Source: edge supervision as in PIDNet, arXiv:2206.02066; the ignore rule is ours.
    """
    labels = target.unsqueeze(1).float()
    ignored = labels == IGNORE_INDEX
    window = 2 * width + 1
    highest = F.max_pool2d(labels.masked_fill(ignored, -1.0), window, stride=1, padding=width)
    lowest = -F.max_pool2d(-labels, window, stride=1, padding=width)  # IGNORE_INDEX is above all classes
    return ((highest > lowest) & ~ignored).float()


def boundary_sum(logits: Tensor, edge: Tensor, valid: Tensor) -> Tensor:
    """Class-balanced binary cross-entropy, summed over the valid pixels: edges weigh as much as all the rest.

    Shapes: logits (B, 1, H, W), edge float32 (B, 1, H, W), valid bool (B, H, W) -> 0-d.
    """
    mask = valid.unsqueeze(1)
    positives = (edge * mask).sum()
    total = mask.sum().clamp_min(1)
    weight = torch.where(edge > 0.5, (total - positives) / total, positives / total)
    losses = F.binary_cross_entropy_with_logits(logits.float(), edge, weight=weight, reduction="none")
    return torch.where(mask, losses, 0.0).sum()
