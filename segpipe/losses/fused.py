"""Losses of heads whose logits are never upsampled as a whole: the gradient is computed along with the loss.

The pixels of a head are gone over once, or twice where a figure of all of them comes first (OHEM, Dice). What is kept
has one number per pixel, not one per pixel and class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from segpipe.losses.pixelwise import ohem_kept
from segpipe.losses.strips import ClassHead, LossPass

Evaluate = Callable[
    ..., LossPass
]  # strips.evaluate, or another function that does the same


@dataclass(frozen=True)
class Terms:
    """What is summed over the pixels of a class head besides their cross-entropy."""

    ohem: tuple[float, float] | None = (
        None  # threshold and min_kept: instead of all pixels, the hard ones
    )
    dice_weight: float = 0.0
    sure: Tensor | None = (
        None  # bool (B, H, W): pixels that count once more, as the part `edge`
    )


class _WithGradient(torch.autograd.Function):
    """A number whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad, None, None


def class_loss(
    head: ClassHead, terms: Terms, scale: Tensor, evaluate: Evaluate
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a class head with its gradient, and without one its parts: `class`, `dice` and `edge`; 0-d.

    All are multiplied by `scale`, 0-d.
    """
    given = head.logits
    head = replace(head, logits=given.detach().contiguous())
    wanted = torch.is_grad_enabled() and given.requires_grad
    with torch.no_grad(), torch.autocast(given.device.type, enabled=False):
        parts, gradient = _passes(head, terms, evaluate, wanted=wanted)
        parts = {
            name: (scale * part).to(head.logits.dtype) for name, part in parts.items()
        }
        total = torch.stack(list(parts.values())).sum()
        if gradient is not None:
            gradient.mul_(scale).add_(
                head.logits, alpha=0
            )  # no pass hides a NaN where nothing counts
    return total if gradient is None else _with_gradient(given, total, gradient), parts


def _with_gradient(logits: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    found: Tensor = _WithGradient.apply(logits, value, gradient)  # type: ignore[no-untyped-call]
    return found


def _passes(
    head: ClassHead, terms: Terms, evaluate: Evaluate, *, wanted: bool
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Parts of the loss, and the gradient of their sum where it is wanted."""
    dice = terms.dice_weight > 0
    twice = wanted and (
        terms.ohem is not None or dice
    )  # a figure of all pixels enters the gradient
    factors = None if terms.sure is None else 1.0 + terms.sure
    found = evaluate(
        head,
        sums=dice,
        gradient=wanted and not twice,
        factors=None if twice else factors,
    )
    losses, slopes = found.losses, None
    parts = {"class": _sum(losses)}
    if terms.ohem is not None:
        kept, ratio = ohem_kept(
            losses, head.valid, threshold=terms.ohem[0], min_kept=terms.ohem[1]
        )
        parts["class"] = _sum(torch.where(kept, losses, 0.0)) * ratio
        factors = kept * ratio if terms.sure is None else kept * ratio + terms.sure
    if dice:
        assert found.sums is not None
        parts["dice"], slopes = _dice(
            found.sums, terms.dice_weight * head.valid.sum(), losses.dtype
        )
    if terms.sure is not None:
        parts["edge"] = _sum(torch.where(terms.sure, losses, 0.0))
    if twice:
        found = evaluate(head, gradient=True, factors=factors, slopes=slopes)
    return parts, found.gradient


def _sum(losses: Tensor) -> Tensor:
    """Row by row, and those in float64: the number of threads does not enter."""
    return losses.sum(2).sum(dtype=torch.float64)


def _dice(
    sums: Tensor, factor: Tensor, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`dice_sum` of a shard with `factor` valid pixels, and its slopes."""
    common, probability, size = sums
    present = size > 0
    share = factor * present / present.sum().clamp_min(1)
    both = (probability + size).clamp_min(1e-6)
    loss = (share * (1.0 - 2.0 * common / both)).sum()
    return loss, (
        (share * 2.0 * common / both**2).to(dtype),
        (share * -2.0 / both).to(dtype),
    )
