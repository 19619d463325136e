"""Lovasz-softmax, a loss on the IoU of a whole shard."""

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX


def lovasz_sum(logits: Tensor, target: Tensor) -> Tensor:
    """Lovasz-softmax, a convex extension of 1 - IoU, averaged over the classes of a shard's target; times valid pixels.

    The errors of a class are 1 - p at its own pixels and p at all other valid ones, over all images of the shard
    together. They are sorted, and each is weighted by what it adds to the Jaccard loss: one sort of all pixels per
    class. Source: arXiv:1705.08790, algorithm 1, `per_image` off.

    Shapes: logits float (B, C, H, W), target uint8 (B, H, W) -> 0-d.
    """
    valid = (target != IGNORE_INDEX).flatten()
    ids = target.flatten()
    probability = logits.softmax(1).movedim(1, 0).flatten(1)
    losses, present = [], []
    for number, scores in enumerate(probability.unbind()):
        own = ids == number
        errors = torch.where(own, 1 - scores, scores)
        slopes = _jaccard_slopes(errors.detach(), own, valid)
        losses.append((errors * slopes.to(errors.dtype)).sum())
        present.append(own.any())

    # A class without pixels has a loss too, but it says nothing about the IoU.
    counted = torch.stack(present)
    total = torch.where(counted, torch.stack(losses), 0.0).sum()
    return total / counted.sum().clamp_min(1) * valid.sum()


def _jaccard_slopes(errors: Tensor, own: Tensor, valid: Tensor) -> Tensor:
    """What each error adds to the Jaccard loss, from the largest down; 0 where ignored; float64.

    Counts are integers, so running sums are exact. Equal errors are taken in pixel order.

    Shapes: all (N,).
    """
    # Ignored pixels come last, where they do not affect the counts of others.
    order = torch.where(valid, errors, -1.0).argsort(descending=True, stable=True)
    hits = own[order].long()
    size = hits.sum()

    # Intersection and union if the largest n errors were misses.
    left = size - hits.cumsum(0)
    union = size + (1 - hits).cumsum(0)
    loss = 1 - left.double() / union
    slopes = torch.diff(loss, prepend=loss.new_zeros(1))

    # Back to pixel order, by a gather: a scatter to `order` needs a sort on a GPU too.
    places = order.argsort(stable=True)
    return torch.where(valid, slopes[places], 0.0)
