# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Upsampling and cross-entropy on CUDA by Triton: as strips.Evaluate, in gather form and without atomics.

A program owns a block of PIXELS columns of the output rows between two rows of the logits. It keeps the gradients of
both rows in registers, gathers them into the columns of the logits by a product with the weights, and writes them to a
place of its own. A second kernel adds up the places that a logit has, in a fixed order. So the bits repeat.
"""

from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from segpipe.losses.strips import ClassHead, LossPass

if TYPE_CHECKING:
    from segpipe.models.resize import Axis

# Names in the kernels: `pixels` columns of the target that a program owns; `padded`, the classes up to the next power
# of 2, at least 16 as products need; `cells`, columns of the logits that its pixels touch, padded likewise. Shapes in
# docstrings are those of the registers of one program.
PIXELS = 64  # 16 where there are so many classes that the registers of a program would not hold them
MOST_CLASSES = 64
JOINED = 64  # columns of the logits that a program of the second kernel adds up


@triton.jit
def _upsampled(row, mask, left, right, share):
    """A row of the logits at the columns of the target, (pixels, padded).

    row: address of each class at column 0 of the row, (1, padded). left, right, share: for each pixel the two columns
    between which it lies, and the weight of the right one, (pixels,).
    """
    before = tl.load(row + left[:, None], mask=mask, other=0.0)
    after = tl.load(row + right[:, None], mask=mask, other=0.0)
    return before * (1.0 - share)[:, None] + after * share[:, None]


@triton.jit
def _loss_of(z, total, hit, is_class, weight, on, smoothing, even_share, known):
    """Cross-entropy of pixels, (pixels,), from their logits less the largest, (pixels, padded).

    total: sum of their exponentials. hit: 1 at the class of the target. on: weight of that class, less what label
    smoothing takes from it. even_share: what it gives to each class. known: whether the target is a class.

    NaN where the target is not known as a class: that must not pass in silence.
    """
    log_total = tl.log(total)
    loss = on * (log_total - tl.sum(tl.where(hit, z, 0.0), 1))
    spread = weight[None, :] * (log_total[:, None] - z)
    spread = tl.where(is_class[None, :], spread, 0.0)
    loss += tl.where(smoothing > 0.0, even_share * tl.sum(spread, 1), 0.0)
    return tl.where(known, loss, float("nan"))


@triton.jit
def _gradient_of(probability, hit, valid, on, even, weight, slopes, ids, is_class):
    """By the logits of pixels, (pixels, padded).

    Of the cross-entropy, it is the probability times the sum of all weights of the pixel (`along`), less the weight of
    each class: `on` at the target's, `even` times the class weight at all. With `slopes`, derivatives by the
    probabilities of another loss, it also is p (slope - mean of the slopes under p), as of any softmax.
    """
    along = on + even * tl.sum(weight, 0)
    if slopes is None:
        found = probability * along[:, None]
    else:
        everywhere, on_target = slopes
        slope = tl.load(everywhere + ids, mask=is_class, other=0.0)[None, :]
        extra = tl.load(on_target + ids, mask=is_class, other=0.0)[None, :]
        slope += tl.where(hit, extra, 0.0)
        slope = tl.where(valid[:, None], slope, 0.0)
        mean = tl.sum(probability * slope, 1)
        found = probability * (slope + (along - mean)[:, None])
    found -= tl.where(hit, on[:, None], 0.0)
    return found - even[:, None] * weight[None, :]


@triton.jit
def _store_parts(
    parts,
    to_upper,
    to_lower,
    left,
    right,
    share,
    inside,
    ids,
    classes,
    cells: tl.constexpr,
):
    """Gathers gradients of two upsampled rows, (pixels, padded), into the columns of the logits, (cells, padded).

    The matrix (cells, pixels) holds the weight of each column of the logits in each pixel, so a product gathers.
    """
    cell = tl.arange(0, cells)
    first = tl.min(tl.where(inside, left, 1 << 30), 0)
    column = (first + cell)[:, None]
    from_left = (left[None, :] == column) & inside[None, :]
    from_right = (right[None, :] == column) & inside[None, :]
    matrix = tl.where(from_left, (1.0 - share)[None, :], 0.0)
    matrix += tl.where(from_right, share[None, :], 0.0)
    places = parts + ids[None, :] * cells + cell[:, None]
    mask = (ids < classes)[None, :] & (cell >= 0)[:, None]
    upper = tl.dot(matrix, to_upper, input_precision="ieee")
    lower = tl.dot(matrix, to_lower, input_precision="ieee")
    tl.store(places, upper, mask=mask)
    tl.store(places + classes * cells, lower, mask=mask)


@triton.jit
def _store_sums(sums, common, everything, size, classes, is_class):
    tl.store(sums, tl.sum(common, 0), mask=is_class)
    tl.store(sums + classes, tl.sum(everything, 0), mask=is_class)
    tl.store(sums + 2 * classes, tl.sum(size, 0), mask=is_class)


@triton.jit
def _losses(
    logits,
    target,
    weights,
    factors,
    slopes,
    losses,
    sums,
    parts,
    axes,
    shape,
    smoothing,
    padded: tl.constexpr,
    pixels: tl.constexpr,
    cells: tl.constexpr,
):
    """Losses, sums and parts of the gradient. Programs: (image and row of the logits, block of columns).

    A program goes over the output rows that lie between its row of the logits (`upper`) and the next one (`lower`).
    None for `factors`, `slopes`, `sums` or `parts`, which holds the gradient: it is not given, or not wanted.
    """
    # Where this program is.
    row_start, row_share, col_low, col_share = axes
    classes, rows_in, cols_in, rows, cols, ignore_index = shape
    smooth, even_share = smoothing
    image = tl.program_id(0) // rows_in
    row = tl.program_id(0) % rows_in
    block = tl.program_id(1)
    task = (tl.program_id(0) * tl.num_programs(1) + block).to(tl.int64)
    ids = tl.arange(0, padded)
    is_class = ids < classes
    weight = tl.load(weights + ids, mask=is_class, other=0.0)

    # Its columns of the target, and both rows of the logits at these.
    column = block * pixels + tl.arange(0, pixels)
    inside = column < cols
    left = tl.load(col_low + column, mask=inside, other=0)
    right = tl.minimum(left + 1, cols_in - 1)
    share = tl.load(col_share + column, mask=inside, other=0.0)
    mask = inside[:, None] & is_class[None, :]
    plane = logits + (image * classes + ids).to(tl.int64)[None, :] * rows_in * cols_in
    below = tl.minimum(row + 1, rows_in - 1)
    upper = _upsampled(plane + row * cols_in, mask, left, right, share)
    lower = _upsampled(plane + below * cols_in, mask, left, right, share)

    zeros = tl.zeros((pixels, padded), tl.float32)
    to_upper, to_lower = zeros, zeros
    common, everything, size = zeros, zeros, zeros
    for y in range(tl.load(row_start + row), tl.load(row_start + row + 1)):
        # The logits of one output row, less the largest of each pixel.
        part = tl.load(row_share + y)
        mixed = upper * (1.0 - part) + lower * part
        z = tl.where(is_class[None, :], mixed, -float("inf"))
        z -= tl.max(z, 1)[:, None]
        total = tl.sum(tl.exp(z), 1)

        # Its targets: `on` is the weight of the cross-entropy of each pixel.
        place = (image * rows + y).to(tl.int64) * cols + column
        wanted = tl.load(target + place, mask=inside, other=ignore_index).to(tl.int32)
        valid = wanted != ignore_index
        known = wanted < classes
        hit = (ids[None, :] == wanted[:, None]) & valid[:, None]
        on = (1.0 - smooth) * tl.sum(tl.where(hit, weight[None, :], 0.0), 1)
        loss = _loss_of(z, total, hit, is_class, weight, on, smooth, even_share, known)
        tl.store(losses + place, tl.where(valid, loss, 0.0), mask=inside)

        probability = tl.exp(z) / total[:, None]
        if sums is not None:
            common += tl.where(hit, probability, 0.0)
            everything += tl.where(valid[:, None], probability, 0.0)
            size += tl.where(hit, 1.0, 0.0)

        # Each row gives its gradient to the rows above and below, by its distance.
        if parts is not None:
            factor = 1.0
            if factors is not None:
                factor = tl.load(factors + place, mask=inside, other=0.0)
            on *= factor
            even = tl.where(valid, even_share, 0.0) * factor
            found = _gradient_of(
                probability, hit, valid, on, even, weight, slopes, ids, is_class
            )
            to_upper += found * (1.0 - part)
            to_lower += found * part
    if sums is not None:
        own = sums + task * 3 * classes + ids
        _store_sums(own, common, everything, size, classes, is_class)
    if parts is not None:
        own = parts + task * 2 * classes * cells
        _store_parts(
            own, to_upper, to_lower, left, right, share, inside, ids, classes, cells
        )


@triton.jit
def _join(
    parts,
    gradient,
    col_low,
    first_block,
    last_block,
    shape,
    blocks,
    pixels: tl.constexpr,
    cells: tl.constexpr,
    width: tl.constexpr,
    overlap: tl.constexpr,
):
    """The gradient of the logits from its parts. Programs: (image, class and row of the logits, columns of the logits).

    A logit has parts of the programs of its own row and of the row above, in up to `overlap` neighboring blocks of
    columns. They are added in this order, so the bits do not depend on which program came first.
    """
    classes, rows_in, cols_in = shape
    plane = tl.program_id(0) // rows_in
    row = tl.program_id(0) % rows_in
    image = plane // classes
    channel = plane % classes
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < cols_in
    first = tl.load(first_block + column, mask=inside, other=0)
    last = tl.load(last_block + column, mask=inside, other=-1)
    total = tl.zeros((width,), tl.float32)
    # The lower half of the row above, the upper half of this one; the last row is its own lower.
    for side in range(3):
        above = tl.where(side == 0, row - 1, row)
        half = tl.where(side == 1, 0, 1)
        counts = (above >= 0) & ((side < 2) | (row == rows_in - 1))
        for number in range(overlap):
            block = first + number
            seen = inside & (block <= last) & counts
            cell = column - tl.load(col_low + block * pixels, mask=seen, other=0)
            task = ((image * rows_in + above) * blocks + block).to(tl.int64)
            place = ((task * 2 + half) * classes + channel) * cells + cell
            total += tl.load(parts + place, mask=seen, other=0.0)
    start = tl.program_id(0).to(tl.int64) * cols_in
    tl.store(gradient + start + column, total, mask=inside)


class _Blocks:
    """Which rows and blocks of columns belong to which logits; tensors on the device of the axes."""

    def __init__(
        self,
        rows: "Axis",
        columns: "Axis",
        rows_in: int,
        cols_in: int,
        pixels: int,
    ) -> None:
        device, low = columns.low.device, columns.first
        edges = torch.searchsorted(torch.tensor(rows.first), torch.arange(rows_in + 1))
        self.row_start = edges.to(torch.int32).to(device)

        # Of each block, the first and the last column of the logits that it touches.
        self.number = triton.cdiv(len(low), pixels)
        starts = low[::pixels]
        ends = [*range(pixels, len(low), pixels), len(low)]
        lasts = [min(low[end - 1] + 1, cols_in - 1) for end in ends]

        widest = max(b - a + 1 for a, b in zip(starts, lasts, strict=True))
        self.cells = max(16, triton.next_power_of_2(widest))

        # Blocks that touch a column of the logits; where none does, the first comes after the last.
        first = [bisect_left(lasts, column) for column in range(cols_in)]
        last = [bisect_right(starts, column) - 1 for column in range(cols_in)]
        self.overlap = max(1, *(b - a + 1 for a, b in zip(first, last, strict=True)))
        self.first = torch.tensor(first, dtype=torch.int32, device=device)
        self.last = torch.tensor(last, dtype=torch.int32, device=device)


_blocks = lru_cache(maxsize=64)(_Blocks)


def evaluate(
    head: ClassHead,
    *,
    gradient: bool = False,
    sums: bool = False,
    factors: Tensor | None = None,
    slopes: tuple[Tensor, Tensor] | None = None,
) -> LossPass:
    """As `strips.Evaluate`, for float32; the loss of a target that is no class is NaN. Never waits for the device."""
    logits, rows, columns = head.logits, head.rows, head.columns
    batch, classes, rows_in, cols_in = logits.shape
    pixels = PIXELS if classes <= MOST_CLASSES else 16
    blocks = _blocks(rows, columns, rows_in, cols_in, pixels)
    tasks = batch * rows_in * blocks.number
    losses = torch.empty_like(head.target, dtype=torch.float32)
    found = logits.new_empty(tasks, 3, classes) if sums else None
    parts = logits.new_empty(tasks, 2, classes, blocks.cells) if gradient else None
    _losses[(batch * rows_in, blocks.number)](
        logits,
        head.target,
        head.class_weights(),
        factors,
        slopes,
        losses,
        found,
        parts,
        (blocks.row_start, rows.share, columns.low, columns.share),
        (classes, rows_in, cols_in, *head.target.shape[1:], head.ignore_index),
        (head.smoothing, head.smoothing / classes),
        padded=max(16, triton.next_power_of_2(classes)),
        pixels=pixels,
        cells=blocks.cells,
    )
    total = None
    if parts is not None:
        total = torch.empty_like(logits)
        _join[(batch * classes * rows_in, triton.cdiv(cols_in, JOINED))](
            parts,
            total,
            columns.low,
            blocks.first,
            blocks.last,
            (classes, rows_in, cols_in),
            blocks.number,
            pixels=pixels,
            cells=blocks.cells,
            width=JOINED,
            overlap=blocks.overlap,
        )
    return LossPass(losses, total, None if found is None else found.double().sum(0))
