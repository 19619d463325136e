"""Online hard example mining: only the pixels with the highest losses count. Source: arXiv:1604.03540, by value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.losses.strips import Chosen

if TYPE_CHECKING:
    from segpipe.settings.groups import LossConfig


def ohem(
    losses: Tensor, target: Tensor, class_weights: Tensor | None, config: LossConfig
) -> Chosen:
    """The losses of the hard pixels alone, lifted so that they count as much as all valid ones.

    Shapes: losses float32 (B, H, W), target uint8 (B, H, W).
    """
    kept, ratio = hard_pixels(losses, target != IGNORE_INDEX, config)
    return Chosen(torch.where(kept, losses, 0.0), kept, ratio)


def hard_pixels(
    losses: Tensor, valid: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Which pixels are hard, and the number of valid pixels per hard one.

    A pixel is hard when its loss exceeds `-log(ohem_threshold)`. When fewer than `ohem_min_kept` (a fraction of the
    shard's pixels) are hard, the highest losses down to that number are kept, ties included.

    Shapes: losses float32 (B, H, W), valid bool (B, H, W) -> bool (B, H, W), 0-d.
    """
    detached = losses.detach().clamp_min(0)
    fewest = min(math.ceil(config.ohem_min_kept * losses.numel()), losses.numel())
    # Filled on the device: torch.tensor and new_tensor copy a number to it, and the host waits for that.
    cut = detached.new_full((), -math.log(max(config.ohem_threshold, 1e-12)))
    # On a CPU it costs little to see that the threshold leaves enough; a GPU would have to be waited for.
    enough = not losses.is_cuda and bool((detached >= cut).sum() >= fewest)
    if fewest > 0 and not enough:
        count = torch.full((), fewest, device=losses.device)
        cut = torch.minimum(cut, kth_largest(detached, count))
    # NaN counts as hard, so that it reaches the sum and is noticed.
    kept = valid & ~(detached < cut)
    return kept, valid.sum() / kept.sum().clamp_min(1)


def kth_largest(values: Tensor, k: Tensor, *, at_once: int | None = None) -> Tensor:
    """The k-th largest of non-negative float32 `values` (1-based), exactly, as a 0-d tensor.

    Builds the answer from its highest bit down: the bits of non-negative floats are ordered like integers, so counts of
    the values above some candidates replace a sort. Depends on the values only, not on their order, and does not
    synchronise with the host. Of `at_once` bits every candidate is counted: 3 on a GPU, which takes 66 launches for the
    31 bits instead of 186, else 1, which compares the least.
    """
    at_once = at_once or (3 if values.is_cuda else 1)
    bits = values.flatten().view(torch.int32)
    answer = torch.zeros((), dtype=torch.int32, device=values.device)
    steps = torch.arange(1, 1 << at_once, dtype=torch.int32, device=values.device)
    # The highest bit by itself: of three, candidates would not fit into 32.
    for place in (30, *range(30 - at_once, -1, -at_once)):
        tried = steps[:1] if place == 30 else steps
        candidates = torch.add(answer, tried, alpha=1 << place)
        counts = (bits >= candidates[:, None]).sum(1)
        reached = (counts >= k).sum(dtype=torch.int32)
        answer = torch.add(answer, reached, alpha=1 << place)
    return answer.view(torch.float32)
