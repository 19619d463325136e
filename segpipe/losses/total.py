"""The loss of one logical shard, ready for backward."""

from __future__ import annotations

import torch
from torch import Tensor

from segpipe.config import LossConfig
from segpipe.losses.boundary import boundary_sum, boundary_target
from segpipe.losses.pixelwise import IGNORE_INDEX, ohem_sum, pixel_losses
from segpipe.resize import bilinear

EDGE_CONFIDENCE = 0.8  # pixels that the boundary head calls an edge this surely get the extra class loss


def valid_pixels(target: Tensor) -> int:
    """Number of pixels of a CPU target that are not ignored; int64 and exact, summed over shards by the engine."""
    return int((target != IGNORE_INDEX).sum())


def shard_loss(
    heads: dict[str, Tensor],
    target: Tensor,
    config: LossConfig,
    *,
    class_weights: Tensor | None,
    global_valid: Tensor,
    align_corners: bool,
) -> dict[str, Tensor]:
    """The shard's part of the step's loss, in `total`, and of each head, as 0-d float32 tensors.

    Parts add up over the shards: everything is divided by `global_valid`, the valid pixels of the whole step (int64,
    0-d, on the device, so that nobody waits for it), which the engine knows before the forward. With no valid pixel
    anywhere every part is 0 and so are the gradients.

    Shapes: heads (B, C, h, w) or (B, 1, h, w) for `boundary`; target uint8 (B, H, W).
    """
    scale = global_valid.clamp_min(1).float().reciprocal()
    parts: dict[str, Tensor] = {}
    for name, logits in heads.items():
        if name == "boundary":
            edge_logits = _resized(logits, target, align_corners)
            total = boundary_sum(edge_logits, boundary_target(target), target != IGNORE_INDEX)
            parts[name] = config.boundary_weight * scale * total
            continue
        stride = config.stride if name == "main" else config.aux_stride
        seen = _every(target, stride)
        losses = pixel_losses(_resized(logits, seen, align_corners), seen, class_weights)
        weight = stride * stride * (1.0 if name == "main" else config.aux_weight)
        parts[name] = weight * scale * _class_sum(losses, seen != IGNORE_INDEX, config)
        if name == "main" and "boundary" in heads:
            parts["edge"] = weight * scale * _edge_sum(losses, heads["boundary"], seen, align_corners)
    parts["total"] = torch.stack(list(parts.values())).sum()
    return parts


def _every(target: Tensor, stride: int) -> Tensor:
    """Every `stride`-th row and column, from the middle of the first cell on."""
    return target[:, stride // 2 :: stride, stride // 2 :: stride] if stride > 1 else target


def _resized(logits: Tensor, target: Tensor, align_corners: bool) -> Tensor:
    """Logits in fp32 at the size of the target."""
    return bilinear(logits.float(), (target.shape[-2], target.shape[-1]), align_corners=align_corners)


def _class_sum(losses: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    if config.name == "ohem":
        return ohem_sum(losses, valid, threshold=config.ohem_threshold, min_kept=config.ohem_min_kept)
    return losses.sum()


def _edge_sum(losses: Tensor, edge_logits: Tensor, seen: Tensor, align_corners: bool) -> Tensor:
    """Sum of the class losses where the boundary head is sure of an edge."""
    probability = torch.sigmoid(_resized(edge_logits.detach(), seen, align_corners)).squeeze(1)
    return torch.where((probability > EDGE_CONFIDENCE) & (seen != IGNORE_INDEX), losses, 0.0).sum()
