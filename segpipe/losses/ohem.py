"""Online hard example mining: only pixels with the highest losses count. Source: arXiv:1604.03540; chosen by value."""

import math

import numpy as np
import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.losses.fused import Chosen, without_weights
from segpipe.settings.groups import LossConfig


def ohem(
    losses: Tensor, target: Tensor, class_weights: Tensor | None, config: LossConfig
) -> Chosen:
    """The losses of hard pixels only, scaled up so that they count as much as all valid ones.

    Whether a pixel is hard depends on the probability of its class, not on the class weight; a weight of 0 leaves the
    class out.

    Shapes: losses float32 (B, H, W), target uint8 (B, H, W), class_weights (C,).
    """
    unweighted = without_weights(losses, target, class_weights)
    valid = target != IGNORE_INDEX
    if class_weights is not None:
        valid &= class_weights[torch.where(valid, target, 0).long()] > 0
    kept, ratio = hard_pixels(unweighted, valid, config)
    # Pixels that are not kept have finite losses.
    return Chosen(losses * kept, kept, ratio)


def hard_pixels(
    losses: Tensor, valid: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Which pixels are hard, and the ratio of valid to hard pixels.

    A pixel is hard if its loss is at least `-log(ohem_threshold)`. If fewer than `ohem_min_kept` (a fraction of the
    shard's pixels) are hard, that many of the highest losses are kept, ties included.

    Shapes: losses float32 (B, H, W), valid bool (B, H, W) -> bool (B, H, W), 0-d.
    """
    detached = losses.detach().clamp_min(0)
    fewest = math.ceil(config.ohem_min_kept * losses.numel())
    # In fp32, like the losses; not a tensor, because the host would wait for a copy to a GPU.
    cut = float(np.float32(-math.log(max(config.ohem_threshold, 1e-12))))
    # On a CPU, a cheap check whether the threshold keeps enough pixels; on a GPU the host would have to wait.
    enough = not losses.is_cuda and bool((detached >= cut).sum() >= fewest)
    limit: Tensor | float = cut
    if fewest > 0 and not enough:
        limit = kth_largest(detached, fewest).clamp_max(cut)
    # Valid and not below: NaN counts as hard, so that it reaches the sum and is noticed.
    kept = valid > (detached < limit)
    return kept, valid.sum() / kept.sum().clamp_min(1)


@torch.library.custom_op("segpipe::kth_largest", mutates_args=())
def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest value (1-based), 0-d. A custom op, because topk picks arbitrarily among equal values on a GPU.

    The value is the same each time, whichever is picked.
    """
    return values.flatten().topk(k, sorted=False).values.min()


@kth_largest.register_fake
def _(values: Tensor, k: int) -> Tensor:
    return values.new_empty(())
