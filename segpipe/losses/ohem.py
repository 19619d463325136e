"""Online hard example mining: only the pixels with the highest losses count. Source: arXiv:1604.03540, by value."""

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
    """The losses of the hard pixels alone, lifted so that they count as much as all valid ones.

    The probability of its class decides whether a pixel is hard, not the weight of that class.

    Shapes: losses float32 (B, H, W), target uint8 (B, H, W), class_weights (C,).
    """
    unweighted = without_weights(losses, target, class_weights)
    kept, ratio = hard_pixels(unweighted, target != IGNORE_INDEX, config)
    # Where none is kept, losses are finite.
    return Chosen(losses * kept, kept, ratio)


def hard_pixels(
    losses: Tensor, valid: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """Which pixels are hard, and the number of valid pixels per hard one.

    A pixel is hard when its loss exceeds `-log(ohem_threshold)`. When fewer than `ohem_min_kept` (a fraction of the
    shard's pixels) are hard, the highest losses down to that number are kept, ties included.

    Shapes: losses float32 (B, H, W), valid bool (B, H, W) -> bool (B, H, W), 0-d.
    """
    detached = losses.detach().clamp_min(0)
    fewest = math.ceil(config.ohem_min_kept * losses.numel())
    # In fp32, as the losses are; no tensor, because the host would wait for a copy to a GPU.
    cut = float(np.float32(-math.log(max(config.ohem_threshold, 1e-12))))
    # On a CPU it costs little to see that the threshold leaves enough; a GPU would have to be waited for.
    enough = not losses.is_cuda and bool((detached >= cut).sum() >= fewest)
    limit: Tensor | float = cut
    if fewest > 0 and not enough:
        limit = kth_largest(detached, fewest).clamp_max(cut)
    # NaN counts as hard, so that it reaches the sum and is noticed.
    kept = valid & ~(detached < limit)
    return kept, valid.sum() / kept.sum().clamp_min(1)


@torch.library.custom_op("segpipe::kth_largest", mutates_args=())
def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest (1-based), 0-d. An operator of its own, as topk chooses among equal values by chance on a GPU.

    What it chooses has the same values each time.
    """
    return values.flatten().topk(k, sorted=False).values.min()


@kth_largest.register_fake
def _(values: Tensor, k: int) -> Tensor:
    return values.new_empty(())
