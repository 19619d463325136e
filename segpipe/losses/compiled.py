"""Upsampling and cross-entropy on a CPU by upsampled.c: the same bits for any number of threads and any x86.

A task is a block of 64 columns of an image, for any number of threads. The C file only uses sums, products and
divisions, so IEEE 754 defines its bits; it is compiled without contraction to fused operations (native.FLAGS).
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe import IGNORE_INDEX, native
from segpipe.errors import DataError
from segpipe.losses.fused import ClassHead, LossPass, Wanted

SOURCE = Path(__file__).with_name("upsampled.c")
WIDTH = 64  # columns of a task
POINTERS = (
    "logits", "target", "row_low", "col_low", "row_share", "col_share", "weights", "factors", "everywhere",
    "on_target", "losses", "sums", "parts", "gradient", "pred",
)  # fmt: skip
NUMBERS = ("images", "classes", "rows_in", "cols_in", "rows", "cols", "span")


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


def evaluate(head: ClassHead, wanted: Wanted) -> LossPass:
    """The pass that `fused.Wanted` describes, for float32 on a CPU. Raises DataError for a target that is no class."""
    batch, classes, rows_in, cols_in = head.logits.shape
    tasks = batch * -(-head.target.shape[2] // WIDTH)
    span = _span(head.columns.host[0], cols_in)

    losses, sums, gradient = torch.empty(head.target.shape), None, None
    held = {
        "weights": head.class_weights,
        "losses": losses,
        "factors": wanted.factors,
    }
    if wanted.slopes:
        held["everywhere"], held["on_target"] = wanted.slopes
    if wanted.sums:
        held["sums"] = sums = torch.zeros(tasks, 3, classes, dtype=torch.float64)
    if wanted.gradient:
        held["gradient"] = gradient = torch.empty_like(head.logits)
        held["parts"] = torch.zeros(tasks, classes, rows_in, span)

    given = _given(head, **held, span=span, smoothing=head.smoothing)
    calls, threads = library(), native.threads()
    _check(calls.segpipe_losses(given, tasks, threads))
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
    _check(library().segpipe_classes(given, tasks, threads, counts.data_ptr()))
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


def _check(code: int) -> None:
    if code == 0:
        raise MemoryError("no memory for the loss")
    if code == -1:
        raise DataError(
            "a target is neither a class nor ignored, but the files were checked: look for a transform that adds ids"
        )
