"""STDC's detail loss for a head of one channel: binary cross-entropy and Dice with the edges of a Laplacian pyramid.

Source: arXiv:2104.13188, section 3.3. The published third level, of stride 4, has weight 0.1 and the threshold is above
0.1, so that the levels of stride 1 and 2 alone decide; the rule for ignored pixels is ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STRIDES = (1, 2)
THRESHOLD = 0.1


def detail_target(target: Tensor, *, ignore_index: int) -> Tensor:
    """Pixels whose class id exceeds the mean of their 8 neighbors, at full or half resolution.

    Ignored pixels and those beyond the image make no edge, and are none.

    Shapes: target uint8 (B, H, W) -> float32 (B, 1, H, W), values 0 or 1. No gradient.
    """
    valid = (target != ignore_index).unsqueeze(1).float()
    labels = target.unsqueeze(1).float() * valid
    window = labels.new_ones(1, 1, 3, 3)
    found = torch.zeros_like(valid)
    for stride in STRIDES:
        # The published kernel, 8 times the center less its neighbors, without those that are ignored.
        around = F.conv2d(labels, window, stride=stride, padding=1)
        counted = F.conv2d(valid, window, stride=stride, padding=1)
        center = labels[:, :, ::stride, ::stride]
        contrast = counted * center - around
        edge = (contrast > THRESHOLD) & (valid[:, :, ::stride, ::stride] > 0)
        found += F.interpolate(edge.float(), found.shape[2:])
    return (found > 0).float() * valid


def detail_sum(logits: Tensor, target: Tensor, *, ignore_index: int) -> Tensor:
    """The two losses, of which Dice is a mean over the images, times the shard's valid pixels.

    Shapes: logits float (B, 1, H, W), target uint8 (B, H, W) -> 0-d.
    """
    valid = (target != ignore_index).unsqueeze(1)
    edge = detail_target(target, ignore_index=ignore_index).to(logits.dtype)
    entropy = F.binary_cross_entropy_with_logits(logits, edge, reduction="none")

    pixels = (1, 2, 3)
    probability = logits.sigmoid() * valid.to(logits.dtype)
    common = (probability * edge).sum(pixels)
    sizes = probability.sum(pixels) + edge.sum(pixels)
    # The ones keep an image without edges finite; one without labels has Dice 0.
    dice = 1 - (2 * common + 1) / (sizes + 1)
    return torch.where(valid, entropy, 0.0).sum() + dice.mean() * valid.sum()
