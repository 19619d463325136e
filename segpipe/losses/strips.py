"""Upsampling and cross-entropy in plain torch: a strip of rows at a time, on any device and in any float type.

A strip is made by products with the two matrices of the bilinear resize, and its gradient goes back through their
transposes, strip after strip. Nothing larger than a strip has the axis of the classes at full resolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from segpipe.models.resize import Axis

STRIP = 1 << 19  # elements of a strip's logits on a CPU: 2 MiB, which its caches hold
DEVICE_STRIP = 1 << 21  # on a GPU, where every strip is some 30 launches


@dataclass(frozen=True)
class ClassHead:
    """Logits at output stride, and the pixels at which their cross-entropy is taken.

    Shapes: logits float (B, C, h, w); target uint8 (B, H, W), contiguous; rows from h to H and columns from w to W;
    weights (C,), of the type of the logits.
    """

    logits: Tensor
    target: Tensor
    rows: Axis
    columns: Axis
    ignore_index: int
    weights: Tensor | None = None
    smoothing: float = 0.0

    @property
    def valid(self) -> Tensor:
        """Pixels that are not ignored, bool (B, H, W)."""
        return self.target != self.ignore_index

    def class_weights(self) -> Tensor:
        """The weights, or ones; (C,)."""
        return (
            self.logits.new_ones(self.logits.shape[1])
            if self.weights is None
            else self.weights
        )


@dataclass(frozen=True)
class LossPass:
    """What a pass over the pixels of a head found.

    Shapes: losses float (B, H, W), 0 where ignored, and perhaps where the factor is 0; gradient as the logits; sums
    float64 (3, C): for each class its probability at its own pixels, at all valid pixels, and the number of its pixels.
    """

    losses: Tensor
    gradient: Tensor | None
    sums: Tensor | None


def evaluate(
    head: ClassHead,
    *,
    gradient: bool = False,
    sums: bool = False,
    factors: Tensor | None = None,
    slopes: tuple[Tensor, Tensor] | None = None,
) -> LossPass:
    """The loss of every pixel, and on demand the sums, and the gradient of the losses' sum.

    For the gradient, losses count `factors` times, float (B, H, W), and a loss is added whose derivatives by the
    probabilities of a valid pixel are `slopes`: of each class, and more where it is the target's; float (C,) each.
    """
    logits, rows, columns = head.logits, head.rows.matrix, head.columns.matrix
    losses = logits.new_empty(head.target.shape)
    total = torch.zeros_like(logits) if gradient else None
    found = (
        torch.zeros(3, logits.shape[1], dtype=torch.float64, device=logits.device)
        if sums
        else None
    )
    for part, read, upsampled in _strips(head):
        strip = _Strip(head, head.target[:, part], upsampled)
        losses[:, part] = strip.losses()
        if found is not None:
            found += strip.sums()
        if total is not None:
            share = strip.gradient(
                None if factors is None else factors[:, part], slopes
            )
            total[:, :, read] += (rows[part, read].t() @ share) @ columns
    return LossPass(losses, total, found)


def classes(head: ClassHead) -> Tensor:
    """Most probable class of every pixel, uint8 (B, H, W); the target is not read."""
    pred = torch.empty_like(head.target)
    for part, _, logits in _strips(head):
        pred[:, part] = logits.max(1).indices  # six times as fast as argmax on a CPU
    return pred


def _strips(head: ClassHead) -> Iterator[tuple[slice, slice, Tensor]]:
    """Strips of the output: their rows, the rows of the logits that they read, and their logits (B, C, n, W)."""
    logits, rows, columns, first = (
        head.logits,
        head.rows.matrix,
        head.columns.matrix,
        head.rows.first,
    )
    elements = STRIP if logits.device.type == "cpu" else DEVICE_STRIP
    depth = max(1, elements // (logits.shape[0] * logits.shape[1] * len(columns)))
    for start in range(0, len(rows), depth):
        part = slice(start, start + depth)
        read = slice(first[part][0], first[part][-1] + 2)
        yield part, read, rows[part, read] @ (logits[:, :, read] @ columns.t())


class _Strip:
    """Some rows of a head, from their logits (B, C, n, W)."""

    def __init__(self, head: ClassHead, target: Tensor, logits: Tensor) -> None:
        self.head, self.valid = head, target != head.ignore_index
        self.ids = torch.where(self.valid, target, 0).long().unsqueeze(1)
        self.log_probability = logits.log_softmax(1)
        weights = head.class_weights()
        self.weights = weights
        self.target_share = (1 - head.smoothing) * torch.where(
            self.valid, weights[self.ids.squeeze(1)], 0.0
        )
        self.even_share = head.smoothing / len(weights)

    def losses(self) -> Tensor:
        found = -self.log_probability.gather(1, self.ids).squeeze(1) * self.target_share
        if self.even_share:
            found -= self.even_share * torch.einsum(
                "bcyx,c->byx", self.log_probability, self.weights
            )
        return torch.where(self.valid, found, 0.0)

    def _at_target(self) -> Tensor:
        """1 at the class of each pixel, also of ignored ones, else 0."""
        classes = torch.arange(len(self.weights), device=self.ids.device).view(
            1, -1, 1, 1
        )
        return (self.ids == classes).to(self.log_probability.dtype)

    def sums(self) -> Tensor:
        probability, one_hot = (
            self.log_probability.exp(),
            self._at_target() * self.valid.unsqueeze(1),
        )
        found = (probability * one_hot, probability * self.valid.unsqueeze(1), one_hot)
        return torch.stack([each.sum((0, 2, 3), dtype=torch.float64) for each in found])

    def gradient(
        self, factors: Tensor | None, slopes: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """By the strip's logits; uses up the log probabilities."""
        one_hot, probability = self._at_target(), self.log_probability.exp_()
        on_target, even = (
            self.target_share,
            self.even_share * self.valid.to(probability.dtype),
        )
        if factors is not None:
            on_target, even = on_target * factors, even * factors
        along = on_target + even * self.weights.sum()  # of the probability itself
        if slopes is None:
            found = probability * along.unsqueeze(1)
        else:
            by_class = slopes[0].view(1, -1, 1, 1) + one_hot * slopes[1].view(
                1, -1, 1, 1
            )
            by_class = by_class * self.valid.unsqueeze(1)
            mean = (probability * by_class).sum(1)
            found = probability * (by_class + (along - mean).unsqueeze(1))
        found -= one_hot.mul_(on_target.unsqueeze(1))
        if self.even_share:
            found -= even.unsqueeze(1) * self.weights.view(1, -1, 1, 1)
        return found
