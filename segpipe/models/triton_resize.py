# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Bilinear resize on CUDA in Triton: one launch forward and one backward, in gather form, without atomics.

Both are a product with a row matrix and a column matrix, each of whose lines holds a few adjacent weights. One kernel
computes it in the tensor's own dtype and memory format, where torch's matrix products would need fp32 copies and
another channel order. Sums are in fp32 in a fixed order, so the bits repeat.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 512  # most values that a program computes
Axes = tuple[Any, Any]  # rows and columns, each an Axis of resize.py
# Tensors that CUDA graphs read in every replay; kept here because the caches may drop them.
_recorded: list[tuple[Any, ...]] = []


@triton.jit
def _product(
    source,
    out,
    row_first,
    row_weights,
    row_taps,
    col_first,
    col_weights,
    col_taps,
    rows_in,
    cols_in,
    rows,
    inner,
    width,
    block: tl.constexpr,
):
    """Each program computes a stretch of one output row: values of adjacent pixels, or of a single pixel."""
    plane, y = tl.program_id(0).to(tl.int64) // rows, tl.program_id(0) % rows
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    x, lane = place // inner, place % inner
    top = plane * rows_in + tl.load(row_first + y)
    left = tl.load(col_first + x, mask=inside, other=0)
    total = tl.zeros((block,), tl.float32)
    for column in range(col_taps):
        at = source + (top * cols_in + left + column) * inner + lane
        across = tl.load(col_weights + x * col_taps + column, mask=inside, other=0.0)
        counts = inside & (across != 0.0)
        along = tl.zeros((block,), tl.float32)
        for row in range(row_taps):
            down = tl.load(row_weights + y * row_taps + row)
            value = tl.load(at + row * cols_in * inner, mask=counts, other=0.0)
            along += value.to(tl.float32) * down
        total += along * across
    target = out + tl.program_id(0).to(tl.int64) * width + place
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


class Band(NamedTuple):
    """A matrix whose lines have adjacent weights: the first column of each, int32 (N,), and weights, fp32 (N, taps)."""

    first: Tensor
    weights: Tensor


def band(matrix: NDArray[Any], device: torch.device) -> Band:
    """The band of a matrix, on a device; a line without weights gets zeros."""
    used = matrix != 0
    first = used.argmax(1)
    ends = matrix.shape[1] - used[:, ::-1].argmax(1)
    taps = int(np.where(used.any(1), ends - first, 1).max())
    first = np.minimum(first, matrix.shape[1] - taps)
    weights = np.take_along_axis(matrix, first[:, None] + np.arange(taps), 1)
    with torch.inference_mode(False):
        return Band(
            torch.from_numpy(first.astype(np.int32)).to(device),
            torch.from_numpy(weights.astype(np.float32)).to(device),
        )


def product(x: Tensor, rows: Band, columns: Band, order: torch.memory_format) -> Tensor:
    """rows @ x @ columns.T, in the dtype of `x` and the memory format `order`, which `x` must have.

    Shapes: (B, C, h, w) -> (B, C, H, W).
    """
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        _recorded.append((*rows, *columns))
    height, width = len(rows.first), len(columns.first)
    out = torch.empty(
        (*x.shape[:2], height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=order,
    )
    inner = x.shape[1] if order is torch.channels_last else 1
    block = min(BLOCK, triton.next_power_of_2(width * inner))
    lines = out.numel() // (width * inner)
    _product[(lines, triton.cdiv(width * inner, block))](
        x,
        out,
        *rows,
        rows.weights.shape[1],
        *columns,
        columns.weights.shape[1],
        *x.shape[2:],
        height,
        inner,
        width * inner,
        block=block,
    )
    return out


def resized(x: Tensor, axes: Axes, order: torch.memory_format, back: bool) -> Tensor:
    """`x` resized by `axes` or, with `back`, the gradient of that, in the memory format `order`."""
    rows, columns = (_bands(axis)[back] for axis in axes)
    return product(x.contiguous(memory_format=order), rows, columns, order)


class _Resize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, order: torch.memory_format) -> Tensor:
        ctx.axes, ctx.order = axes, order
        return resized(x, axes, order, back=False)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return resized(given, ctx.axes, ctx.order, back=True), None, None


def bilinear(x: Tensor, axes: Axes, order: torch.memory_format) -> Tensor:
    """`x`, float (B, C, h, w), resized by `axes`, in its dtype and the memory format `order`; differentiable."""
    return _Resize.apply(x, axes, order)


@lru_cache(maxsize=256)
def _bands(axis: Any) -> tuple[Band, Band]:
    """Bands of the resize and of its gradient."""
    matrix = axis.weights
    return band(matrix, axis.low.device), band(matrix.T, axis.low.device)
