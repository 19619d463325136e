"""Soft Dice loss, 1 - 2 |P T| / (|P| + |T|), averaged over the classes in a shard's target.

P are the probabilities and T the target of a class over all valid pixels of the shard. Without labelled pixels, loss
and gradient are 0. Source: V-Net, arXiv:1606.04797, with the plain sums of arXiv:1707.03237 in the denominator.
"""

import torch
from torch import Tensor


def dice_of_sums(
    sums: Tensor, factor: Tensor, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The loss times `factor`, from `LossPass.sums`, and its slopes for `Wanted.slopes`.

    With c = |P T|, p = |P| and t = |T|, the loss is 1 - 2 c / (p + t). A pixel's probability enters p, with the slope
    2 c / (p + t)^2, and for its own class also c, with the slope -2 / (p + t).

    Shapes: sums float64 (3, C) -> 0-d, and two of `dtype` (C,).
    """
    common, probability, size = sums
    present = size > 0
    share = factor * present / present.sum().clamp_min(1)
    both = (probability + size).clamp_min(1e-6)
    loss = (share * (1.0 - 2.0 * common / both)).sum()
    everywhere = share * 2.0 * common / both**2
    on_target = share * -2.0 / both
    return loss, (everywhere.to(dtype), on_target.to(dtype))
