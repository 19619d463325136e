# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Upsampling and cross-entropy on CUDA by Triton: as strips.evaluate, in gather form and without atomics.

A program owns a block of PIXELS columns of the output rows between two rows of the logits. It keeps the gradients of
both rows in registers, gathers them into the columns of the logits by a product with the weights, and writes them to a
place of its own. A second kernel adds up the places that a logit has, in a fixed order. So the bits repeat.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from segpipe.losses.strips import ClassHead, LossPass

if TYPE_CHECKING:
    from segpipe.models.resize import Axis

PIXELS = 64  # 16 where there are so many classes that the registers of a program would not hold them
MOST_CLASSES = 64


@triton.jit
def _upsampled(at, both, left, right, share):
    """A row of the logits at the columns of the target, (pixels, padded)."""
    found = tl.load(at + left[:, None], mask=both, other=0.0) * (1.0 - share)[:, None]
    return found + tl.load(at + right[:, None], mask=both, other=0.0) * share[:, None]


@triton.jit
def _loss_of(z, total, hit, is_class, weight, on, smoothing, even_share, known):
    """Cross-entropy of pixels, (pixels,), from their logits less the largest, (pixels, padded).

    NaN where the target is not known as a class: that must not pass in silence.
    """
    log_total = tl.log(total)
    loss = on * (log_total - tl.sum(tl.where(hit, z, 0.0), 1))
    spread = tl.where(
        is_class[None, :], weight[None, :] * (log_total[:, None] - z), 0.0
    )
    loss += tl.where(smoothing > 0.0, even_share * tl.sum(spread, 1), 0.0)
    return tl.where(known, loss, float("nan"))


@triton.jit
def _gradient_of(
    probability,
    hit,
    valid,
    on,
    even,
    weight,
    everywhere,
    on_target,
    ids,
    is_class,
    has_slopes: tl.constexpr,
):
    """By the logits of pixels, (pixels, padded)."""
    along = on + even * tl.sum(weight, 0)
    if has_slopes:
        slope = tl.load(everywhere + ids, mask=is_class, other=0.0)[None, :]
        slope += tl.where(
            hit, tl.load(on_target + ids, mask=is_class, other=0.0)[None, :], 0.0
        )
        slope = tl.where(valid[:, None], slope, 0.0)
        mean = tl.sum(probability * slope, 1)
        found = probability * (slope + (along - mean)[:, None])
    else:
        found = probability * along[:, None]
    return found - tl.where(hit, on[:, None], 0.0) - even[:, None] * weight[None, :]


@triton.jit
def _store_parts(
    at,
    to_upper,
    to_lower,
    left,
    right,
    share,
    inside,
    ids,
    is_class,
    classes,
    cells: tl.constexpr,
):
    """Gathers gradients of two upsampled rows, (pixels, padded), into the columns of the logits."""
    cell, first = tl.arange(0, cells), tl.min(tl.where(inside, left, 1 << 30), 0)
    matrix = tl.where(
        (left[None, :] == (first + cell)[:, None]) & inside[None, :],
        (1.0 - share)[None, :],
        0.0,
    )
    matrix += tl.where(
        (right[None, :] == (first + cell)[:, None]) & inside[None, :],
        share[None, :],
        0.0,
    )
    places = at + ids[None, :] * cells + cell[:, None]
    kept = is_class[None, :] & (cell >= 0)[:, None]
    tl.store(places, tl.dot(matrix, to_upper, input_precision="ieee"), mask=kept)
    tl.store(
        places + classes * cells,
        tl.dot(matrix, to_lower, input_precision="ieee"),
        mask=kept,
    )


@triton.jit
def _store_sums(at, common, everything, size, classes, is_class):
    tl.store(at, tl.sum(common, 0), mask=is_class)
    tl.store(at + classes, tl.sum(everything, 0), mask=is_class)
    tl.store(at + 2 * classes, tl.sum(size, 0), mask=is_class)


@triton.jit
def _losses(
    logits, target, weights, factors, everywhere, on_target, losses, sums, parts,
    row_start, row_share, col_low, col_share,
    classes, rows_in, cols_in, rows, cols, ignore_index, smoothing, even_share,
    padded: tl.constexpr, pixels: tl.constexpr, cells: tl.constexpr, has_factors: tl.constexpr,
    has_slopes: tl.constexpr, wants_sums: tl.constexpr, wants_gradient: tl.constexpr,
):  # fmt: skip
    image, row, block = (
        tl.program_id(0) // rows_in,
        tl.program_id(0) % rows_in,
        tl.program_id(1),
    )
    task = (tl.program_id(0) * tl.num_programs(1) + block).to(tl.int64)
    ids = tl.arange(0, padded)
    is_class = ids < classes
    weight = tl.load(weights + ids, mask=is_class, other=0.0)
    column = block * pixels + tl.arange(0, pixels)
    inside = column < cols
    both = inside[:, None] & is_class[None, :]
    left = tl.load(col_low + column, mask=inside, other=0)
    right, share = (
        tl.minimum(left + 1, cols_in - 1),
        tl.load(col_share + column, mask=inside, other=0.0),
    )
    at = logits + (image * classes + ids).to(tl.int64)[None, :] * rows_in * cols_in
    upper = _upsampled(at + row * cols_in, both, left, right, share)
    lower = _upsampled(
        at + tl.minimum(row + 1, rows_in - 1) * cols_in, both, left, right, share
    )
    zeros = tl.zeros((pixels, padded), tl.float32)
    to_upper, to_lower, common, everything, size = zeros, zeros, zeros, zeros, zeros
    for y in range(tl.load(row_start + row), tl.load(row_start + row + 1)):
        part = tl.load(row_share + y)
        z = tl.where(
            is_class[None, :], upper * (1.0 - part) + lower * part, -float("inf")
        )
        z -= tl.max(z, 1)[:, None]
        total = tl.sum(tl.exp(z), 1)
        place = (image * rows + y).to(tl.int64) * cols + column
        wanted = tl.load(target + place, mask=inside, other=ignore_index).to(tl.int32)
        valid = wanted != ignore_index
        hit = (ids[None, :] == wanted[:, None]) & valid[:, None]
        on = (1.0 - smoothing) * tl.sum(tl.where(hit, weight[None, :], 0.0), 1)
        loss = _loss_of(
            z, total, hit, is_class, weight, on, smoothing, even_share, wanted < classes
        )
        tl.store(losses + place, tl.where(valid, loss, 0.0), mask=inside)
        probability = tl.exp(z) / total[:, None]
        if wants_sums:
            common += tl.where(hit, probability, 0.0)
            everything, size = (
                everything + tl.where(valid[:, None], probability, 0.0),
                size + tl.where(hit, 1.0, 0.0),
            )
        if wants_gradient:
            factor = (
                tl.load(factors + place, mask=inside, other=0.0) if has_factors else 1.0
            )
            even = tl.where(valid, even_share, 0.0) * factor
            found = _gradient_of(
                probability,
                hit,
                valid,
                on * factor,
                even,
                weight,
                everywhere,
                on_target,
                ids,
                is_class,
                has_slopes,
            )
            to_upper, to_lower = (
                to_upper + found * (1.0 - part),
                to_lower + found * part,
            )
    if wants_sums:
        _store_sums(
            sums + task * 3 * classes + ids, common, everything, size, classes, is_class
        )
    if wants_gradient:
        at = parts + task * 2 * classes * cells
        _store_parts(
            at,
            to_upper,
            to_lower,
            left,
            right,
            share,
            inside,
            ids,
            is_class,
            classes,
            cells,
        )


@triton.jit
def _join(
    parts, gradient, col_low, first_block, last_block, classes, rows_in, cols_in, blocks,
    pixels: tl.constexpr, cells: tl.constexpr, width: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Programs (image, class and row of the logits, columns of the logits)."""
    plane, row = tl.program_id(0) // rows_in, tl.program_id(0) % rows_in
    image, channel = plane // classes, plane % classes
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < cols_in
    first = tl.load(first_block + column, mask=inside, other=0)
    last = tl.load(last_block + column, mask=inside, other=-1)
    found = tl.zeros((width,), tl.float32)
    for side in range(
        3
    ):  # the lower half of the row above, the upper half of this one; the last row is its own lower
        above = tl.where(side == 0, row - 1, row)
        half = tl.where(side == 1, 0, 1)
        counts = (above >= 0) & ((side < 2) | (row == rows_in - 1))
        for number in range(overlap):
            block = first + number
            seen = inside & (block <= last) & counts
            cell = column - tl.load(col_low + block * pixels, mask=seen, other=0)
            task = ((image * rows_in + above) * blocks + block).to(tl.int64)
            at = parts + ((task * 2 + half) * classes + channel) * cells + cell
            found += tl.load(at, mask=seen, other=0.0)
    tl.store(
        gradient + tl.program_id(0).to(tl.int64) * cols_in + column, found, mask=inside
    )


class _Blocks:
    """Which rows and blocks of columns belong to which logits; tensors on the device of the axes."""

    def __init__(
        self, rows: "Axis", columns: "Axis", rows_in: int, cols_in: int, pixels: int
    ) -> None:
        device, low = columns.low.device, columns.first
        edges = torch.searchsorted(torch.tensor(rows.first), torch.arange(rows_in + 1))
        self.row_start = edges.to(torch.int32).to(device)
        self.number = -(-len(low) // pixels)
        ends = [min((block + 1) * pixels, len(low)) - 1 for block in range(self.number)]
        starts = [low[block * pixels] for block in range(self.number)]
        lasts = [min(low[end] + 1, cols_in - 1) for end in ends]
        self.cells = max(
            16,
            triton.next_power_of_2(
                max(b - a + 1 for a, b in zip(starts, lasts, strict=True))
            ),
        )
        # A column of the logits that no block touches has its first block after its last.
        first = [
            next((n for n, last in enumerate(lasts) if last >= column), self.number)
            for column in range(cols_in)
        ]
        last = [
            next((n for n in reversed(range(self.number)) if starts[n] <= column), -1)
            for column in range(cols_in)
        ]
        self.overlap = max(1, *(b - a + 1 for a, b in zip(first, last, strict=True)))
        self.first, self.last = (
            torch.tensor(each, dtype=torch.int32, device=device)
            for each in (first, last)
        )


_blocks = lru_cache(maxsize=64)(_Blocks)


def evaluate(
    head: ClassHead,
    *,
    gradient: bool = False,
    sums: bool = False,
    factors: Tensor | None = None,
    slopes: tuple[Tensor, Tensor] | None = None,
) -> LossPass:
    """As `strips.evaluate`, for float32; the loss of a target that is no class is NaN. Never waits for the device."""
    logits, (batch, classes, rows_in, cols_in) = head.logits, head.logits.shape
    pixels = PIXELS if classes <= MOST_CLASSES else 16
    blocks = _blocks(head.rows, head.columns, rows_in, cols_in, pixels)
    tasks = batch * rows_in * blocks.number
    losses, none = torch.empty_like(head.target, dtype=torch.float32), logits
    found = logits.new_empty(tasks, 3, classes) if sums else none
    parts = logits.new_empty(tasks, 2, classes, blocks.cells) if gradient else none
    flags: dict[str, Any] = {
        "has_factors": factors is not None,
        "has_slopes": slopes is not None,
        "wants_sums": sums,
        "wants_gradient": gradient,
    }
    everywhere, on_target = slopes or (none, none)
    tensors = (
        logits,
        head.target,
        head.class_weights(),
        none if factors is None else factors,
        everywhere,
        on_target,
    )
    sizes = (classes, rows_in, cols_in, *head.target.shape[1:], head.ignore_index)
    axes = (blocks.row_start, head.rows.share, head.columns.low, head.columns.share)
    padded = max(16, triton.next_power_of_2(classes))
    shape = {"padded": padded, "pixels": pixels, "cells": blocks.cells}
    grid = (batch * rows_in, blocks.number)
    _losses[grid](
        *tensors,
        losses,
        found,
        parts,
        *axes,
        *sizes,
        head.smoothing,
        head.smoothing / classes,
        **shape,
        **flags,
    )
    total = torch.empty_like(logits) if gradient else None
    if gradient:
        width = 64
        _join[(batch * classes * rows_in, triton.cdiv(cols_in, width))](
            parts, total, head.columns.low, blocks.first, blocks.last, classes, rows_in, cols_in, blocks.number,
            pixels=pixels, cells=blocks.cells, width=width, overlap=blocks.overlap,
        )  # fmt: skip
    return LossPass(losses, total, found.double().sum(0) if sums else None)
