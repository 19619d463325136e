"""Losses that compute the gradient together with the loss, without upsampling all logits of a head at once.

A pass goes over the pixels of a head: upsampled.c (CPU) and triton_pass.py (CUDA) never hold logits at the size of the
target; cross_entropy.py does. There is one pass, or two if the gradient needs a figure of all pixels first (OHEM,
Dice). Passes keep one number per pixel, not one per pixel and class.

upsampled.c has the same bits for any number of threads and any x86: a task is a block of 64 columns of an image, and
it only uses sums, products and divisions, compiled without contraction (native.FLAGS), so IEEE 754 defines its bits.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe import IGNORE_INDEX, native
from segpipe.errors import DataError
from segpipe.losses.dice import dice_of_sums
from segpipe.models.resize import Axis

SOURCE = Path(__file__).with_name("upsampled.c")
WIDTH = 64  # columns of a task
POINTERS = (
    "logits", "target", "row_low", "col_low", "row_share", "col_share", "weights", "factors", "everywhere",
    "on_target", "losses", "sums", "parts", "gradient", "pred",
)  # fmt: skip
NUMBERS = ("images", "classes", "rows_in", "cols_in", "rows", "cols", "span")


@dataclass(frozen=True)
class ClassHead:
    """Logits at output stride, and the pixels at which their cross-entropy is computed.

    Shapes: logits float (B, C, h, w); target uint8 (B, H, W), contiguous; rows from h to H and columns from w to W;
    weights (C,), of the type of the logits.
    """

    logits: Tensor
    target: Tensor
    rows: Axis
    columns: Axis
    weights: Tensor | None = None
    smoothing: float = 0.0

    @property
    def valid(self) -> Tensor:
        """Pixels that are not ignored, bool (B, H, W)."""
        return self.target != IGNORE_INDEX

    @cached_property
    def class_weights(self) -> Tensor:
        """The weights, or ones; (C,)."""
        if self.weights is None:
            return self.logits.new_ones(self.logits.shape[1])
        return self.weights


@dataclass(frozen=True)
class LossPass:
    """Result of a pass over the pixels of a head.

    Shapes: losses float (B, H, W), 0 where ignored, and possibly where the factor is 0; gradient as the logits; sums
    float64 (3, C): for each class its probability summed over its own pixels and over all valid pixels, and the number
    of its pixels.
    """

    losses: Tensor
    gradient: Tensor | None
    sums: Tensor | None


class Chosen(NamedTuple):
    """A term's values, computed from the cross-entropy of every pixel.

    Shapes: values, which are summed, and slopes, their derivatives by the cross-entropy, (B, H, W); factor of both,
    0-d.
    """

    values: Tensor
    slopes: Tensor
    factor: Tensor | float = 1.0


def without_weights(
    losses: Tensor, target: Tensor, class_weights: Tensor | None
) -> Tensor:
    """Cross-entropy of every pixel without its class weight; 0 for a class with weight 0.

    Shapes: losses float (B, H, W), 0 where the target, uint8 (B, H, W), is ignored; class_weights (C,).
    """
    if class_weights is None:
        return losses
    ids = torch.where(target == IGNORE_INDEX, 0, target).long()
    weights = class_weights.to(losses.dtype)[ids]
    return torch.where(weights > 0, losses / weights, 0.0)


class Wanted(NamedTuple):
    """What a pass computes besides the loss of every pixel: sums, and the gradient of the sum of losses.

    The gradient weights losses by `factors`, float (B, H, W), and adds that of a loss given by `slopes`, its
    derivatives by the probabilities of a valid pixel: for each class, plus an extra for the target's; float (C,) each.
    """

    gradient: bool = False
    sums: bool = False
    factors: Tensor | None = None
    slopes: tuple[Tensor, Tensor] | None = None


Evaluate = Callable[[ClassHead, Wanted], LossPass]
# From the cross-entropy of every pixel, the target and the class weights.
Term = Callable[[Tensor, Tensor, Tensor | None], Chosen]


@dataclass(frozen=True)
class Terms:
    """Terms of a class head's loss in place of, or in addition to, the plain cross-entropy."""

    term: Term | None = None  # None: plain cross-entropy
    dice_weight: float = 0.0
    # bool (B, H, W): pixels that count a second time, as the part `edge`
    sure: Tensor | None = None


class WithGradient(torch.autograd.Function):
    """A scalar with a precomputed gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad, None, None


def class_loss(
    head: ClassHead, terms: Terms, scale: Tensor, evaluate: Evaluate
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a class head, which has a gradient, and its parts `class`, `dice` and `edge`, which have none; 0-d.

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
        first, *others = parts.values()
        total = sum(others, first)
        if gradient is None:
            return total, parts
        # Adding 0 * logits lets NaN through even where nothing counts.
        gradient.mul_(scale).add_(head.logits, alpha=0)
    return WithGradient.apply(given, total, gradient), parts  # type: ignore[no-untyped-call]


def _passes(
    head: ClassHead, terms: Terms, evaluate: Evaluate, *, wanted: bool
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Parts of the loss, and the gradient of their sum if it is wanted."""
    term, sure = terms.term, terms.sure
    has_dice = terms.dice_weight > 0
    # The gradients of a term and of Dice need a figure of all pixels first.
    once = wanted and term is None and not has_dice
    factors = None if sure is None or term else 1.0 + sure
    found = evaluate(head, Wanted(once, has_dice, factors if once else None))

    losses, slopes = found.losses, None
    parts = {}
    if term is None:
        parts["class"] = _sum(losses)
    else:
        chosen = term(losses, head.target, head.weights)
        parts["class"] = _sum(chosen.values) * chosen.factor
        factors = chosen.slopes * chosen.factor
        if sure is not None:
            factors = factors + sure
    if found.sums is not None:
        weight = terms.dice_weight * head.valid.sum()
        parts["dice"], slopes = dice_of_sums(found.sums, weight, losses.dtype)
    if sure is not None:
        parts["edge"] = _sum(losses * sure)

    if wanted and not once:
        found = evaluate(head, Wanted(True, factors=factors, slopes=slopes))
    return parts, found.gradient


def _sum(losses: Tensor) -> Tensor:
    """Sum by rows, then over rows in float64, so that the number of threads does not matter."""
    return losses.sum(2).sum(dtype=torch.float64)


class _Pass(ctypes.Structure):
    """`Pass` of upsampled.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in NUMBERS),
        ("smoothing", ctypes.c_float),
        ("ignore_index", ctypes.c_int32),
    )


def library() -> Any:
    """upsampled.c as a ctypes library; None if it cannot be compiled."""
    found = native.load(SOURCE)
    if found is not None:
        found.segpipe_join.restype = None
        for call in (found.segpipe_losses, found.segpipe_join):
            call.argtypes = [ctypes.POINTER(_Pass), ctypes.c_int64, ctypes.c_int64]
        found.segpipe_classes.argtypes = [*found.segpipe_join.argtypes, ctypes.c_void_p]
    return found


def native_pass(head: ClassHead, wanted: Wanted) -> LossPass:
    """The pass by upsampled.c, for float32 on a CPU. Raises DataError for a target that is no class."""
    batch, classes, rows_in, cols_in = head.logits.shape
    tasks = batch * -(-head.target.shape[2] // WIDTH)
    span = _span(head.columns.host[0], cols_in)

    losses, sums, gradient = torch.empty(head.target.shape), None, None
    held = {"weights": head.class_weights, "losses": losses, "factors": wanted.factors}
    if wanted.slopes:
        held["everywhere"], held["on_target"] = wanted.slopes
    if wanted.sums:
        held["sums"] = sums = torch.zeros(tasks, 3, classes, dtype=torch.float64)
    if wanted.gradient:
        held["gradient"] = gradient = torch.empty_like(head.logits)
        held["parts"] = torch.zeros(tasks, classes, rows_in, span)

    given = _given(head, **held, span=span, smoothing=head.smoothing)
    calls, threads = library(), native.threads()
    _refuse(calls.segpipe_losses(given, tasks, threads))
    if gradient is not None:
        calls.segpipe_join(given, batch * classes, threads)
    return LossPass(losses, gradient, None if sums is None else sums.sum(0))


def classes_and_counts(head: ClassHead) -> tuple[Tensor, Tensor]:
    """Most probable class of every pixel, and its confusion counts with every target id, including ignored ones.

    Shapes: -> uint8 (B, H, W), int64 (256, C).
    """
    classes = head.logits.shape[1]
    pred = torch.empty_like(head.target)
    tasks, threads = len(pred) * -(-pred.shape[2] // WIDTH), native.threads()
    counts = torch.zeros(threads, 256, classes, dtype=torch.int64)
    given = _given(head, pred=pred, span=0)
    _refuse(library().segpipe_classes(given, tasks, threads, counts.data_ptr()))
    return pred, counts.sum(0)


def _span(low: NDArray[np.int64], num_in: int) -> int:
    """The largest number of logit columns that a task touches."""
    first = low[::WIDTH]
    last = np.append(low[WIDTH - 1 :: WIDTH], low[-1])[: len(first)]
    return int((np.minimum(last + 1, num_in - 1) - first).max()) + 1


def _given(head: ClassHead, **others: Any) -> _Pass:
    """The struct that the C file reads and writes; valid as long as the tensors."""
    tensors = {
        "logits": head.logits,
        "target": head.target,
        "row_low": head.rows.low,
        "col_low": head.columns.low,
        "row_share": head.rows.share,
        "col_share": head.columns.share,
        **others,
    }
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            assert value.is_contiguous(), name
            assert value.device.type == "cpu", name
            tensors[name] = value.data_ptr()
    assert head.logits.dtype == torch.float32
    lengths = (*head.logits.shape, *head.target.shape[1:])
    shape = dict(zip(NUMBERS, lengths, strict=False))  # all but `span`
    return _Pass(**tensors, **shape, ignore_index=IGNORE_INDEX)


def _refuse(code: int) -> None:
    if code == 0:
        raise MemoryError("no memory for the loss")
    if code == -1:
        raise DataError(
            "a target is neither a class nor ignored, but the files were checked: look for a transform that adds ids"
        )
