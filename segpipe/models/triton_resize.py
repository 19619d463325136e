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

from segpipe.models.resize import Axis

BLOCK = 512  # values that a program computes
Axes = tuple[Axis, Axis]  # rows and columns
_recorded: list[list[Tensor]] = []  # what CUDA graphs read in every replay, when the caches may have dropped it


@triton.jit
def _weight(low, share, at, wanted, num_in):
    """Share of input `wanted` in the outputs `at`, whose inputs are low and low + 1."""
    first, part = tl.load(low + at), tl.load(share + at)
    found = tl.where(first == wanted, 1.0 - part, 0.0)
    return found + tl.where(tl.minimum(first + 1, num_in - 1) == wanted, part, 0.0)


@triton.jit
def _forward(
    source, out, row_low, row_share, col_low, col_share, rows_in, cols_in, rows, cols, inner, total, block: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < total
    lane, pixel = place % inner, place // inner
    x, y, plane = pixel % cols, pixel // cols % rows, pixel // cols // rows
    top, down = tl.load(row_low + y, mask=inside, other=0), tl.load(row_share + y, mask=inside, other=0.0)
    left, right = tl.load(col_low + x, mask=inside, other=0), tl.load(col_share + x, mask=inside, other=0.0)
    below, beside = tl.minimum(top + 1, rows_in - 1), tl.minimum(left + 1, cols_in - 1)
    upper, lower = (plane * rows_in + top) * cols_in, (plane * rows_in + below) * cols_in
    a = tl.load(source + (upper + left) * inner + lane, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + (upper + beside) * inner + lane, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(source + (lower + left) * inner + lane, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(source + (lower + beside) * inner + lane, mask=inside, other=0.0).to(tl.float32)
    above, under = a * (1.0 - right) + b * right, c * (1.0 - right) + d * right
    tl.store(out + place, (above * (1.0 - down) + under * down).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    given, out, row_low, row_share, col_low, col_share, row_edges, col_edges,
    rows_in, cols_in, rows, cols, inner, width, block: tl.constexpr,
):  # fmt: skip
    """Each program owns values of one pixel of the input, or of a stretch of its row where a pixel has one value."""
    plane, y = tl.program_id(0).to(tl.int64) // rows_in, tl.program_id(0) % rows_in
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    x, lane = place // inner, place % inner
    start, end = tl.load(col_edges + 2 * x, mask=inside, other=0), tl.load(col_edges + 2 * x + 1, mask=inside, other=0)
    most = tl.max(end - start, 0)
    total = tl.zeros((block,), tl.float32)
    for row in range(tl.load(row_edges + 2 * y), tl.load(row_edges + 2 * y + 1)):
        along = tl.zeros((block,), tl.float32)
        for step in range(0, most):
            column = start + step
            there = inside & (column < end)
            column = tl.where(there, column, 0)
            at = ((plane * rows + row) * cols + column) * inner + lane
            value = tl.load(given + at, mask=there, other=0.0).to(tl.float32)
            along += tl.where(there, value * _weight(col_low, col_share, column, x, cols_in), 0.0)
        total += along * _weight(row_low, row_share, row, y, rows_in)
    at = (plane * rows_in + y) * width + place
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


class _Resize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, size: tuple[int, int]) -> Tensor:
        ctx.axes, ctx.small, ctx.format = axes, x.shape, _format(x)
        x = x.contiguous(memory_format=ctx.format)
        out = torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=ctx.format)
        total = out.numel()
        _forward[(triton.cdiv(total, BLOCK),)](
            x, out, *_kept(_taps(axes)), *x.shape[2:], *size, _inner(ctx.format, x), total, block=BLOCK
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        batch, channels, *small = ctx.small
        given = given.contiguous(memory_format=ctx.format)
        out = torch.empty(ctx.small, dtype=given.dtype, device=given.device, memory_format=ctx.format)
        inner = _inner(ctx.format, given)
        width = small[1] * inner
        block = min(BLOCK, triton.next_power_of_2(width))
        grid = (batch * channels // inner * small[0], triton.cdiv(width, block))
        edges = _kept([_edges(axis, length) for axis, length in zip(ctx.axes, small, strict=True)])
        _backward[grid](
            given, out, *_taps(ctx.axes), *edges, *small, *given.shape[2:], inner, width, block=block
        )  # fmt: skip
        return out, None, None


def bilinear(x: Tensor, axes: Axes) -> Tensor:
    """`x`, float (B, C, h, w), at the rows and columns of `axes`, in its dtype and memory format; differentiable."""
    found: Tensor = _Resize.apply(x, axes, tuple(len(axis.first) for axis in axes))
    return found


def _format(x: Tensor) -> torch.memory_format:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _inner(order: torch.memory_format, x: Tensor) -> int:
    """Values that lie side by side at one pixel."""
    return x.shape[1] if order is torch.channels_last else 1


def _taps(axes: Axes) -> list[Tensor]:
    return [values for axis in axes for values in (axis.low, axis.share)]


def _kept(values: list[Tensor]) -> list[Tensor]:
    """The same; never given back where they are recorded into a CUDA graph."""
    if values[0].is_cuda and torch.cuda.is_current_stream_capturing():
        _recorded.append(values)
    return values


@lru_cache(maxsize=256)
def _edges(axis: Axis, num_in: int) -> Tensor:
    """First output that reads each input, and the first after it that does not, int32 (num_in, 2)."""
    low, place = np.array(axis.first), np.arange(num_in)
    edges = np.stack([np.searchsorted(low, place - 1), np.searchsorted(low, place, side="right")], axis=1)
    return torch.from_numpy(edges.astype(np.int32)).to(axis.low.device)
