"""What a pass over the pixels of a class head is given and finds, and its most probable classes by plain torch.

The passes are compiled.py (CPU) and triton_pass.py (CUDA): upsampling, cross-entropy and its gradient without ever
holding logits at the size of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
        if self.weights is None:
            return self.logits.new_ones(self.logits.shape[1])
        return self.weights


@dataclass(frozen=True)
class LossPass:
    """What a pass over the pixels of a head found.

    Shapes: losses float (B, H, W), 0 where ignored, and perhaps where the factor is 0; gradient as the logits; sums
    float64 (3, C): for each class its probability at its own pixels, at all valid pixels, and the number of its pixels.
    """

    losses: Tensor
    gradient: Tensor | None
    sums: Tensor | None


class Chosen(NamedTuple):
    """What a term makes of the cross-entropy of every pixel.

    Shapes: values, which are summed, and slopes, their derivatives by the cross-entropy: (B, H, W); factor of both 0-d.
    """

    values: Tensor
    slopes: Tensor
    factor: Tensor | float = 1.0


class Evaluate(Protocol):
    """A pass: the loss of every pixel, and on demand the sums, and the gradient of the losses' sum.

    For the gradient, losses count `factors` times, float (B, H, W), and a loss is added whose derivatives by the
    probabilities of a valid pixel are `slopes`: of each class, and more where it is the target's; float (C,) each.
    """

    def __call__(
        self,
        head: ClassHead,
        *,
        gradient: bool = False,
        sums: bool = False,
        factors: Tensor | None = None,
        slopes: tuple[Tensor, Tensor] | None = None,
    ) -> LossPass: ...


def classes(head: ClassHead) -> Tensor:
    """Most probable class of every pixel, uint8 (B, H, W), a strip of rows at a time; the target is not read."""
    logits, rows, columns = head.logits, head.rows.matrix, head.columns.matrix
    pred = torch.empty_like(head.target)
    elements = STRIP if logits.device.type == "cpu" else DEVICE_STRIP
    depth = max(1, elements // (logits.shape[0] * logits.shape[1] * len(columns)))
    for start in range(0, len(rows), depth):
        part = slice(start, start + depth)
        first = head.rows.first[part]
        read = slice(first[0], first[-1] + 2)
        strip = rows[part, read] @ (logits[:, :, read] @ columns.t())
        pred[:, part] = strip.max(1).indices  # six times as fast as argmax on a CPU
    return pred
