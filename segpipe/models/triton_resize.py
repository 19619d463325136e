# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Bilinear resize on CUDA by Triton: one launch forward and one backward, in gather form and without atomics.

Both read and write the tensor in its own dtype and memory format, where two products of matrices would take fp32 copies
and another order of channels. Sums are fp32 in a fixed order, so the bits repeat.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # most values that a program computes
Axes = tuple[Any, Any]  # rows and columns, each an Axis of resize.py
_recorded: list[
    list[Tensor]
] = []  # what CUDA graphs read in every replay, when the caches may have dropped it


@triton.jit
def _weight(low, share, at, wanted, num_in):
    """Share of input `wanted` in the outputs `at`, whose inputs are low and low + 1."""
    first, part = tl.load(low + at), tl.load(share + at)
    found = tl.where(first == wanted, 1.0 - part, 0.0)
    return found + tl.where(tl.minimum(first + 1, num_in - 1) == wanted, part, 0.0)


@triton.jit
def _forward(
    source,
    out,
    row_low,
    row_share,
    col_low,
    col_share,
    rows_in,
    cols_in,
    rows,
    inner,
    width,
    block: tl.constexpr,
):
    """Each program computes a stretch of one output row: values of pixels side by side, or of one pixel."""
    plane, y = tl.program_id(0).to(tl.int64) // rows, tl.program_id(0) % rows
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    x, lane = place // inner, place % inner
    top, down = tl.load(row_low + y), tl.load(row_share + y)
    left, right = (
        tl.load(col_low + x, mask=inside, other=0),
        tl.load(col_share + x, mask=inside, other=0.0),
    )
    beside = tl.minimum(left + 1, cols_in - 1)
    upper = source + (plane * rows_in + top) * cols_in * inner + lane
    lower = (
        source
        + (plane * rows_in + tl.minimum(top + 1, rows_in - 1)) * cols_in * inner
        + lane
    )
    a = tl.load(upper + left * inner, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(upper + beside * inner, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(lower + left * inner, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(lower + beside * inner, mask=inside, other=0.0).to(tl.float32)
    above, under = a * (1.0 - right) + b * right, c * (1.0 - right) + d * right
    at = out + tl.program_id(0).to(tl.int64) * width + place
    tl.store(
        at, (above * (1.0 - down) + under * down).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _backward(
    given, out, row_low, row_share, col_low, col_share, row_edges, col_edges,
    rows_in, cols_in, rows, cols, inner, width, block: tl.constexpr,
):  # fmt: skip
    """As _forward for a row of the input, which adds up what the outputs that read it were given."""
    plane, y = tl.program_id(0).to(tl.int64) // rows_in, tl.program_id(0) % rows_in
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    x, lane = place // inner, place % inner
    start, end = (
        tl.load(col_edges + 2 * x, mask=inside, other=0),
        tl.load(col_edges + 2 * x + 1, mask=inside, other=0),
    )
    first, last = tl.load(row_edges + 2 * y), tl.load(row_edges + 2 * y + 1)
    total = tl.zeros((block,), tl.float32)
    for step in range(0, tl.max(end - start, 0)):
        column = start + step
        there = inside & (column < end)
        column = tl.where(there, column, 0)
        along = tl.zeros((block,), tl.float32)
        for row in range(first, last):
            at = given + (plane * rows + row) * cols * inner + column * inner + lane
            along += tl.load(at, mask=there, other=0.0).to(tl.float32) * _weight(
                row_low, row_share, row, y, rows_in
            )

        total += tl.where(
            there, along * _weight(col_low, col_share, column, x, cols_in), 0.0
        )

    at = out + tl.program_id(0).to(tl.int64) * width + place
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


class _Resize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, size: tuple[int, int]) -> Tensor:
        ctx.axes, ctx.small, ctx.format = axes, x.shape, _format(x)
        x = x.contiguous(memory_format=ctx.format)
        out = torch.empty(
            (*x.shape[:2], *size),
            dtype=x.dtype,
            device=x.device,
            memory_format=ctx.format,
        )
        inner, block, grid = _work(out, ctx.format)
        _forward[grid](
            x,
            out,
            *_kept(_taps(axes)),
            *x.shape[2:],
            size[0],
            inner,
            size[1] * inner,
            block=block,
        )

        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        given = given.contiguous(memory_format=ctx.format)
        out = torch.empty(
            ctx.small, dtype=given.dtype, device=given.device, memory_format=ctx.format
        )
        inner, block, grid = _work(out, ctx.format)
        small = ctx.small[2:]
        edges = _kept(
            [_edges(axis, length) for axis, length in zip(ctx.axes, small, strict=True)]
        )
        width = small[1] * inner
        _backward[grid](
            given,
            out,
            *_taps(ctx.axes),
            *edges,
            *small,
            *given.shape[2:],
            inner,
            width,
            block=block,
        )

        return out, None, None


def bilinear(x: Tensor, axes: Axes) -> Tensor:
    """`x`, float (B, C, h, w), at the rows and columns of `axes`, in its dtype and memory format; differentiable."""
    found: Tensor = _Resize.apply(x, axes, tuple(len(axis.first) for axis in axes))
    return found


def _format(x: Tensor) -> torch.memory_format:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _work(out: Tensor, order: torch.memory_format) -> tuple[int, int, tuple[int, int]]:
    """Values side by side at one pixel of `out`, values that a program computes, and programs: of rows, and in one."""
    batch, channels, rows, columns = out.shape
    inner = channels if order is torch.channels_last else 1
    block = min(BLOCK, triton.next_power_of_2(columns * inner))

    return (
        inner,
        block,
        (batch * channels // inner * rows, triton.cdiv(columns * inner, block)),
    )


def _taps(axes: Axes) -> list[Tensor]:
    return [values for axis in axes for values in (axis.low, axis.share)]


def _kept(values: list[Tensor]) -> list[Tensor]:
    """The same; never given back where they are recorded into a CUDA graph."""
    if values[0].is_cuda and torch.cuda.is_current_stream_capturing():
        _recorded.append(values)
    return values


@lru_cache(maxsize=256)
def _edges(axis: Any, num_in: int) -> Tensor:
    """First output that reads each input, and the first after it that does not, int32 (num_in, 2)."""
    low, place = np.array(axis.first), np.arange(num_in)
    edges = np.stack(
        [np.searchsorted(low, place - 1), np.searchsorted(low, place, side="right")],
        axis=1,
    )
    return torch.from_numpy(edges.astype(np.int32)).to(axis.low.device)
