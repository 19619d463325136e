"""Losses of a one-channel head: class boundaries as in PIDNet, and STDC's edges from a Laplacian pyramid."""

import torch
import torch.nn.functional as F
from torch import Tensor

from segpipe import IGNORE_INDEX

STRIDES = (1, 2)


def boundary_target(target: Tensor, valid: Tensor, *, width: int = 2) -> Tensor:
    """Band around class changes that supervises the edge branch.

    A pixel is positive when another labelled class lies within `width` pixels (square window). Contact with ignored
    pixels makes no edge, so an unlabelled car bonnet does not become one long boundary. Relies on IGNORE_INDEX being
    above all classes.

    Shapes: target uint8 and valid, its pixels that are not ignored, bool, both (B, H, W) -> bool (B, 1, H, W). No
    gradient.
    Source: edge supervision as in PIDNet, arXiv:2206.02066; the ignore rule is ours.
    """
    # One more than each id, and 0 where ignored, as 255 + 1 wraps around; and 255 minus each id.
    ends = F.pad(torch.stack([target + 1, ~target]), (width,) * 4)
    for axis in (2, 3):
        # Maxima over a window that grows; max_pool2d took 16 times as long on a CPU.
        size, window = 1, 2 * width + 1
        while size < window:
            step = min(size, window - size)
            length = ends.shape[axis] - step
            ends = torch.maximum(
                ends.narrow(axis, 0, length), ends.narrow(axis, step, length)
            )
            size += step
    # Highest minus lowest id, as 256 wraps around to 0.
    edge = (ends[0] + ends[1]).bool() & valid
    return edge.unsqueeze(1)


def as_two_classes(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, target and class weights of the boundary loss; edges weigh as much as all other pixels together.

    The binary cross-entropy of a logit is the cross-entropy of the two logits 0 and itself.

    Shapes: logits (B, 1, h, w), target uint8 (B, H, W) -> (B, 2, h, w), uint8 (B, H, W), (2,).
    """
    valid = target != IGNORE_INDEX
    edge = boundary_target(target, valid).squeeze(1)
    positives = edge.sum()
    total = valid.sum().clamp_min(1)
    weights = torch.stack([positives, total - positives]) / total
    ids = torch.where(valid, edge.view(torch.uint8), target)
    return F.pad(logits, (0, 0, 0, 0, 1, 0)), ids, weights


def detail_target(target: Tensor) -> Tensor:
    """Pixels whose class id exceeds the mean of their 8 neighbors, at full or half resolution.

    Pixels that are ignored or outside the image neither make an edge nor are one.

    Shapes: target uint8 (B, H, W) -> float32 (B, 1, H, W), values 0 or 1. No gradient.
    """
    valid = (target != IGNORE_INDEX).unsqueeze(1).float()
    labels = target.unsqueeze(1).float() * valid
    window = labels.new_ones(1, 1, 3, 3)
    found = torch.zeros_like(valid)
    for stride in STRIDES:
        # The published kernel, 8 times the center minus its neighbors, but without ignored neighbors.
        around = F.conv2d(labels, window, stride=stride, padding=1)
        counted = F.conv2d(valid, window, stride=stride, padding=1)
        center = labels[:, :, ::stride, ::stride]
        contrast = counted * center - around
        # A whole number up to the rounding of a fast convolution, so 0.5 equals the published threshold of 0.1.
        edge = (contrast > 0.5) & (valid[:, :, ::stride, ::stride] > 0)
        found += F.interpolate(edge.float(), found.shape[2:])
    return (found > 0).float() * valid


def detail_sum(logits: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy summed over valid pixels, plus Dice averaged over images times the number of valid pixels.

    Source: arXiv:2104.13188, section 3.3. The published third level, of stride 4, has weight 0.1, but the threshold is
    above 0.1, so only the levels of stride 1 and 2 decide. The rule for ignored pixels is ours.

    Shapes: logits float (B, 1, H, W), target uint8 (B, H, W) -> 0-d.
    """
    valid = (target != IGNORE_INDEX).unsqueeze(1)
    edge = detail_target(target).to(logits.dtype)
    entropy = F.binary_cross_entropy_with_logits(logits, edge, reduction="none")

    pixels = (1, 2, 3)
    probability = logits.sigmoid() * valid.to(logits.dtype)
    common = (probability * edge).sum(pixels)
    sizes = probability.sum(pixels) + edge.sum(pixels)
    # The ones keep images without edges finite; an image without labels has a Dice loss of 0.
    dice = 1 - (2 * common + 1) / (sizes + 1)
    return torch.where(valid, entropy, 0.0).sum() + dice.mean() * valid.sum()
