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
    valid = target != IGNORE_INDEX
    height, width = target.shape[-2:]
    scale = global_valid.clamp_min(1).float().reciprocal()
    parts: dict[str, Tensor] = {}
    full = {
        name: bilinear(logits.float(), (height, width), align_corners=align_corners) for name, logits in heads.items()
    }
    for name, logits in full.items():
        if name == "boundary":
            edge = boundary_target(target)
            parts[name] = config.boundary_weight * scale * boundary_sum(logits, edge, valid)
            continue
        losses = pixel_losses(logits, target, class_weights)
        weight = scale * (1.0 if name == "main" else config.aux_weight)
        parts[name] = weight * _class_sum(losses, valid, config)
        if name == "main" and "boundary" in full:
            sure = torch.sigmoid(full["boundary"].detach()).squeeze(1) > EDGE_CONFIDENCE
            parts["edge"] = scale * torch.where(sure & valid, losses, 0.0).sum()
    parts["total"] = torch.stack(list(parts.values())).sum()
    return parts


def _class_sum(losses: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    if config.name == "ohem":
        return ohem_sum(losses, valid, threshold=config.ohem_threshold, min_kept=config.ohem_min_kept)
    return losses.sum()
