"""Lovasz-softmax: a convex extension of 1 - IoU, averaged over the classes that a shard's target has.

The errors of a class are 1 - p at its own pixels and p at all other valid ones, over all images of the shard together.
Sorted, each counts by what it adds to the Jaccard loss. Source: arXiv:1705.08790, algorithm 1, `per_image` off.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lovasz_sum(logits: Tensor, target: Tensor, *, ignore_index: int) -> Tensor:
    """The loss times the shard's valid pixels; autograd finds its gradient. Sorts all pixels once for each class.

    Shapes: logits float (B, C, H, W), target uint8 (B, H, W) -> 0-d.
    """
    valid = (target != ignore_index).flatten()
    probability = logits.softmax(1).movedim(1, 0).flatten(1)
    losses, present = [], []
    for number, scores in enumerate(probability.unbind()):
        own = target.flatten() == number
        errors = torch.where(own, 1 - scores, scores)
        slopes = _jaccard_slopes(errors.detach(), own, valid)
        losses.append((errors * slopes.to(errors.dtype)).sum())
        present.append(own.any())
    counts = torch.stack(present)
    mean = torch.where(counts, torch.stack(losses), 0.0).sum() / counts.sum().clamp_min(
        1
    )
    return mean * valid.sum()


def _jaccard_slopes(errors: Tensor, own: Tensor, valid: Tensor) -> Tensor:
    """What each error adds to the Jaccard loss when they come from the largest down; 0 where ignored, float64.

    Counts are integers, whose running sums are exact. Equal errors count in the order of the pixels.

    Shapes: all (N,).
    """
    order = torch.where(valid, errors, -1.0).argsort(descending=True, stable=True)
    hits = own[order].long()
    size = hits.sum()
    left = size - hits.cumsum(0)  # of the intersection
    union = size + (1 - hits).cumsum(0)
    loss = 1 - left.double() / union
    slopes = torch.diff(loss, prepend=loss.new_zeros(1))
    return torch.where(valid, slopes[order.argsort(stable=True)], 0.0)
