# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Upsampling and cross-entropy on CUDA in Triton: a fused.Evaluate in gather form, without atomics.

A program owns a block of `pixels` columns of the output rows between two rows of the logits. It keeps the gradients of
both rows in registers, at the columns of the target, and writes them to its own memory. The resize kernel gathers those
into the gradient of the logits in a fixed order, so the bits repeat.
"""

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.losses.fused import ClassHead, LossPass, Wanted
from segpipe.models.resize import Axis
from segpipe.models.triton_resize import Band, band, product

# Names in the kernels: `pixels`, the number of target columns that a program owns; `padded`, the number of classes
# rounded up to a power of 2. Shapes in docstrings are those of one program's registers.
MOST_PIXELS = 64
LOGITS = 512  # of a program, unless 8 pixels have more; on an H200, four times as many took up to three times as long


def block(classes: int) -> dict[str, int]:
    """How many classes and pixels a program owns, and its warps; measured on an H200 for 2 to 150 classes."""
    padded = triton.next_power_of_2(classes)
    pixels = min(max(LOGITS // padded, 8), MOST_PIXELS)
    size = pixels * padded
    warps = 1 if size <= LOGITS else min(max(size // 1024, 2), 8)
    return {"padded": padded, "pixels": pixels, "num_warps": warps}


@triton.jit
def _upsampled(row, mask, left, right, share):
    """A row of the logits, interpolated at the columns of the target, (pixels, padded).

    row: address of each class at column 0 of the row, (1, padded). left, right, share: for each pixel, the two columns
    between which it lies and the weight of the right one, (pixels,).
    """
    before = tl.load(row + left[:, None], mask=mask, other=0.0)
    after = tl.load(row + right[:, None], mask=mask, other=0.0)
    return before * (1.0 - share)[:, None] + after * share[:, None]


@triton.jit
def _loss_of(z, total, hit, is_class, weight, on, smoothing, even_share, known):
    """Cross-entropy of pixels, (pixels,), from their logits minus the largest, (pixels, padded).

    total: sum of their exponentials. hit: 1 at the target's class. on: weight of that class, minus what label smoothing
    takes from it. even_share: what label smoothing gives to each class. known: whether the target is a class.

    NaN where the target is not a class, so that it does not go unnoticed.
    """
    log_total = tl.log(total)
    loss = on * (log_total - tl.sum(tl.where(hit, z, 0.0), 1))
    spread = weight[None, :] * (log_total[:, None] - z)
    spread = tl.where(is_class[None, :], spread, 0.0)
    loss += tl.where(smoothing > 0.0, even_share * tl.sum(spread, 1), 0.0)
    return tl.where(known, loss, float("nan"))


@triton.jit
def _gradient_of(probability, hit, valid, on, even, weight, slopes, ids, is_class):
    """Gradient by the logits of pixels, (pixels, padded).

    For the cross-entropy, it is the probability times the sum of all weights of the pixel (`along`), minus the weight
    of each class: `on` at the target's, `even` times the class weight at all. `slopes`, the derivatives of another loss
    by the probabilities, add p (slope - mean of the slopes under p), as for any softmax.
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
):
    """Writes losses, sums and parts of the gradient. Programs: (image and row of the logits, block of columns).

    A program goes over the output rows between its row of the logits (`upper`) and the next one (`lower`). `factors`
    and `slopes` are None if not given; `sums` and `parts`, which receives the gradient, are None if not wanted.
    """
    # Position of this program.
    row_start, row_share, col_low, col_share = axes
    classes, rows_in, cols_in, rows, cols, ignore_index = shape
    smooth, even_share = smoothing
    image = tl.program_id(0) // rows_in
    row = tl.program_id(0) % rows_in
    block = tl.program_id(1)
    ids = tl.arange(0, padded)
    is_class = ids < classes
    weight = tl.load(weights + ids, mask=is_class, other=0.0)

    # Its target columns, and both rows of the logits interpolated there.
    column = block * pixels + tl.arange(0, pixels)
    inside = column < cols
    left = tl.load(col_low + column, mask=inside, other=0)
    right = tl.minimum(left + 1, cols_in - 1)
    share = tl.load(col_share + column, mask=inside, other=0.0)
    mask = inside[:, None] & is_class[None, :]
    channel = (image * classes + ids).to(tl.int64)[None, :]
    plane = logits + channel * rows_in * cols_in
    below = tl.minimum(row + 1, rows_in - 1)
    upper = _upsampled(plane + row * cols_in, mask, left, right, share)
    lower = _upsampled(plane + below * cols_in, mask, left, right, share)

    zeros = tl.zeros((pixels, padded), tl.float32)
    to_upper, to_lower = zeros, zeros
    common, everything, size = zeros, zeros, zeros
    for y in range(tl.load(row_start + row), tl.load(row_start + row + 1)):
        # The logits of one output row, minus the largest of each pixel.
        part = tl.load(row_share + y)
        mixed = upper * (1.0 - part) + lower * part
        z = tl.where(is_class[None, :], mixed, -float("inf"))
        z -= tl.max(z, 1)[:, None]
        total = tl.sum(tl.exp(z), 1)

        # Its targets; `on` is the weight of each pixel's cross-entropy.
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

        # Each output row adds its gradient to the logit rows above and below, weighted by distance.
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
        task = (tl.program_id(0) * tl.num_programs(1) + block).to(tl.int64)
        own = sums + task * 3 * classes + ids
        tl.store(own, tl.sum(common, 0), mask=is_class)
        tl.store(own + classes, tl.sum(everything, 0), mask=is_class)
        tl.store(own + 2 * classes, tl.sum(size, 0), mask=is_class)
    if parts is not None:
        own = parts + (channel * rows_in + row) * 2 * cols + column[:, None]
        tl.store(own, to_upper, mask=mask)
        tl.store(own + cols, to_lower, mask=mask)


@lru_cache(maxsize=64)
def _gathering(rows: Axis, columns: Axis) -> tuple[Tensor, Band, Band]:
    """The first output row of each row of the logits, and the bands that gather the gradient's parts: rows, columns.

    A row of the logits has two rows of parts: its own, and its programs' share for the next one.
    """
    device, number = rows.low.device, np.arange(rows.num_in)
    starts = np.searchsorted(rows.host[0], np.arange(rows.num_in + 1))
    halves = np.zeros((rows.num_in, 2 * rows.num_in))
    halves[number, 2 * number] = 1
    halves[np.minimum(number + 1, rows.num_in - 1), 2 * number + 1] = 1
    return (
        torch.from_numpy(starts.astype(np.int32)).to(device),
        band(halves, device),
        band(columns.weights.T, device),
    )


def evaluate(head: ClassHead, wanted: Wanted) -> LossPass:
    """The pass that `fused.Wanted` describes, for float32. Never waits for the device.

    The loss of a target that is not a class is NaN.
    """
    logits, rows, columns = head.logits, head.rows, head.columns
    batch, classes, rows_in, cols_in = logits.shape
    height, width = head.target.shape[1:]
    shape = block(classes)
    grid = (batch * rows_in, triton.cdiv(width, shape["pixels"]))
    starts, down, across = _gathering(rows, columns)

    losses = torch.empty_like(head.target, dtype=torch.float32)
    found = logits.new_empty(grid[0] * grid[1], 3, classes) if wanted.sums else None
    parts = None
    if wanted.gradient:
        parts = logits.new_empty(batch, classes, 2 * rows_in, width)

    _losses[grid](
        logits,
        head.target,
        head.class_weights,
        wanted.factors,
        wanted.slopes,
        losses,
        found,
        parts,
        (starts, rows.share, columns.low, columns.share),
        (classes, rows_in, cols_in, height, width, IGNORE_INDEX),
        (head.smoothing, head.smoothing / classes),
        **shape,
    )
    total = None
    if parts is not None:
        total = product(parts, down, across, torch.contiguous_format)
    return LossPass(losses, total, None if found is None else found.double().sum(0))
