"""A pass over the pixels of a head written out in any float type: what compiled and Triton's passes must compute."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from segpipe.losses.strips import ClassHead, LossPass


def evaluate(
    head: ClassHead,
    *,
    gradient: bool = False,
    sums: bool = False,
    factors: Tensor | None = None,
    slopes: tuple[Tensor, Tensor] | None = None,
) -> LossPass:
    """As `strips.Evaluate`, by autograd through logits at the size of the target."""
    logits = head.logits.detach().requires_grad_()
    weights, classes = head.class_weights(), logits.shape[1]
    valid = head.valid
    ids = torch.where(valid, head.target, 0).long()
    with torch.enable_grad():
        wide = head.rows.matrix @ (logits @ head.columns.matrix.t())
        log_p = wide.log_softmax(1)
        on_target = log_p.gather(1, ids[:, None])[:, 0] * weights[ids]
        everywhere = (log_p * weights.view(1, -1, 1, 1)).sum(1) / classes
        losses = -(1 - head.smoothing) * on_target - head.smoothing * everywhere
        losses = torch.where(valid, losses, 0.0)
        p = torch.where(valid[:, None], log_p.exp(), 0.0)
        own = F.one_hot(ids, classes).movedim(3, 1) * valid[:, None]
        total = (losses if factors is None else losses * factors).sum()
        if slopes is not None:
            first, second = (each.view(1, -1, 1, 1) for each in slopes)
            total = total + (p * (first + own * second)).sum()
        grad = torch.autograd.grad(total, logits)[0] if gradient else None
    counts = torch.stack(
        [(p * own).sum((0, 2, 3)), p.sum((0, 2, 3)), own.sum((0, 2, 3))]
    )
    return LossPass(losses.detach(), grad, counts.detach().double() if sums else None)
