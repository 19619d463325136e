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
    enough = losses.device.type == "cpu" and bool((detached >= cut).sum() >= fewest)
    if fewest > 0 and not enough:
        count = torch.full((), fewest, device=losses.device)
        cut = torch.minimum(cut, kth_largest(detached, count))
    # NaN counts as hard, so that it reaches the sum and is noticed.
    kept = valid & ~(detached < cut)
    return kept, valid.sum() / kept.sum().clamp_min(1)


def kth_largest(values: Tensor, k: Tensor) -> Tensor:
    """The k-th largest of non-negative float32 `values` (1-based), exactly, as a 0-d tensor.

    Builds the answer bit by bit: the bits of non-negative floats are ordered like integers, so 31 counts replace a
    sort. Depends on the values only, not on their order, and does not synchronise with the host.
    """
    bits = values.flatten().view(torch.int32)
    answer = torch.zeros((), dtype=torch.int32, device=values.device)
    for place in range(30, -1, -1):
        candidate = answer | (1 << place)
        answer = torch.where((bits >= candidate).sum() >= k, candidate, answer)
    return answer.view(torch.float32)
