"""Loss terms of a shard. Each is a sum over valid pixels only; the caller divides by the global count."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def pixel_losses(
    logits: Tensor,
    target: Tensor,
    class_weights: Tensor | None = None,
    *,
    ignore_index: int,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of every pixel, 0 where the target is ignored.

    `reduction="none"` because the reducing kernels have no deterministic form on CUDA.

    Shapes: logits (B, C, H, W), target uint8 (B, H, W), class_weights (C,) -> float32 (B, H, W).
    """
    return F.cross_entropy(
        logits.float(),
        target.long(),
        weight=class_weights,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def class_weights(pixels: Tensor, name: str) -> Tensor:
    """Weight of each class from its pixel count, scaled so that the mean over the training pixels is 1.

    "log": 1 / log(1.02 + frequency), which lifts rare classes by at most a factor of 50. A class without a pixel gets
    the weight of frequency 0. Source: ENet, arXiv:1606.02147, equation 1.

    "sqrt": 1 / sqrt(frequency), without a bound: a class of 0.01 % of the pixels weighs 100 times as much as one of
    all. A class without a pixel gets the weight of a single pixel.

    Shapes: int64 (C,) -> float32 (C,).
    """
    total = pixels.sum().clamp_min(1)
    frequency = pixels.double() / total
    if name == "log":
        weights = 1.0 / torch.log(1.02 + frequency)
    else:
        assert name == "sqrt"
        weights = 1.0 / (pixels.clamp_min(1).double() / total).sqrt()
    return (weights / (weights * frequency).sum().clamp_min(1e-12)).float()


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


def ohem_kept(
    losses: Tensor, valid: Tensor, *, threshold: float, min_kept: float
) -> tuple[Tensor, Tensor]:
    """Which pixels are hard, and the number of valid pixels per hard one.

    A pixel is hard when its loss exceeds `-log(threshold)`. When fewer than `min_kept` (a fraction of the shard's
    pixels) are hard, the highest losses down to that number are kept, ties included.

    Shapes: losses float32 (B, H, W), valid bool (B, H, W) -> bool (B, H, W), 0-d. Source: OHEM, arXiv:1604.03540, by
    value.
    """
    detached = losses.detach().clamp_min(0)
    fewest = min(math.ceil(min_kept * losses.numel()), losses.numel())
    # Filled on the device: torch.tensor and new_tensor copy a number to it, and the host waits for that.
    cut = detached.new_full((), -math.log(max(threshold, 1e-12)))
    # On a CPU it costs little to see that the threshold leaves enough; a GPU would have to be waited for.
    enough = losses.device.type == "cpu" and bool((detached >= cut).sum() >= fewest)
    if fewest > 0 and not enough:
        count = torch.full((), fewest, device=losses.device)
        cut = torch.minimum(cut, kth_largest(detached, count))
    kept = valid & ~(
        detached < cut
    )  # NaN counts as hard, so that it reaches the sum and is noticed
    return kept, valid.sum() / kept.sum().clamp_min(1)


def ohem_sum(
    losses: Tensor, valid: Tensor, *, threshold: float, min_kept: float
) -> Tensor:
    """Mean loss of the hard pixels (`ohem_kept`) times the number of valid pixels, 0-d."""
    kept, ratio = ohem_kept(losses, valid, threshold=threshold, min_kept=min_kept)
    return torch.where(kept, losses, 0.0).sum() * ratio


def dice_sum(logits: Tensor, target: Tensor, *, ignore_index: int) -> Tensor:
    """Soft Dice loss, 1 - 2 |P T| / (|P| + |T|), averaged over the shard's classes, times its valid pixels.

    P are the probabilities and T the target of a class over all valid pixels of the shard. Classes without a target
    pixel in the shard are left out. Without any labelled pixel, loss and gradient are 0.

    Shapes: logits float32 (B, C, H, W), target uint8 (B, H, W) -> 0-d. Source: V-Net, arXiv:1606.04797, with the plain
    sums of arXiv:1707.03237 in the denominator.
    """
    valid = (target != ignore_index).unsqueeze(1)
    probability = (
        logits.softmax(1) * valid.float()
    )  # on a CPU, torch.where takes ten times as long
    classes = torch.arange(
        logits.shape[1], device=target.device, dtype=target.dtype
    ).view(1, -1, 1, 1)
    one_hot = (target.unsqueeze(1) == classes).float()
    common = (probability * one_hot).sum((0, 2, 3))
    size = one_hot.sum((0, 2, 3))
    loss = 1.0 - 2.0 * common / (probability.sum((0, 2, 3)) + size).clamp_min(1e-6)
    present = size > 0
    mean = torch.where(present, loss, 0.0).sum() / present.sum().clamp_min(1)
    return mean * valid.sum()


def boundary_target(target: Tensor, *, width: int = 2, ignore_index: int) -> Tensor:
    """Band around class changes that supervises the edge branch.

    A pixel is positive when another labelled class lies within `width` pixels (square window). Contact with ignored
    pixels makes no edge, so an unlabelled car bonnet does not become one long boundary. `ignore_index` must be above
    all classes.

    Shapes: target uint8 (B, H, W) -> float32 (B, 1, H, W), values 0 or 1. No gradient.
    Source: edge supervision as in PIDNet, arXiv:2206.02066; the ignore rule is ours.
    """
    labels = target.unsqueeze(1).float()
    ignored = labels == ignore_index
    window = 2 * width + 1
    highest = F.max_pool2d(
        labels.masked_fill(ignored, -1.0), window, stride=1, padding=width
    )
    lowest = -F.max_pool2d(-labels, window, stride=1, padding=width)
    return ((highest > lowest) & ~ignored).float()


def boundary_weights(edge: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of a pixel on an edge and of any other, with which both kinds count equally; 0-d."""
    positives = (edge * valid.unsqueeze(1)).sum()
    total = valid.sum().clamp_min(1)
    return (total - positives) / total, positives / total


def boundary_sum(logits: Tensor, edge: Tensor, valid: Tensor) -> Tensor:
    """Binary cross-entropy summed over the valid pixels, with edges weighted as much as all other pixels together.

    Shapes: logits (B, 1, H, W), edge float32 (B, 1, H, W), valid bool (B, H, W) -> 0-d.
    """
    mask = valid.unsqueeze(1)
    inside, outside = boundary_weights(edge, valid)
    weight = torch.where(edge > 0.5, inside, outside)
    losses = F.binary_cross_entropy_with_logits(
        logits.float(), edge, weight=weight, reduction="none"
    )
    return torch.where(mask, losses, 0.0).sum()
