"""The loss of one logical shard, ready for backward."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from segpipe import IGNORE_INDEX
from segpipe.losses.boundary import boundary_sum, boundary_target
from segpipe.losses.dice import dice_sum
from segpipe.losses.pixelwise import ohem_sum, pixel_losses
from segpipe.models.resize import bilinear, bilinear_weights
from segpipe.settings.config import LossConfig

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
            edge_logits = _sampled(logits, target, 1, align_corners)
            total = boundary_sum(edge_logits, boundary_target(target), target != IGNORE_INDEX)
            parts[name] = config.boundary_weight * scale * total
            continue
        stride = config.stride if name == "main" else config.aux_stride
        seen = _every(target, stride)
        sampled = _sampled(logits, target, stride, align_corners)
        losses = pixel_losses(sampled, seen, class_weights)
        weight = target.numel() / max(seen.numel(), 1) * (1.0 if name == "main" else config.aux_weight)
        parts[name] = weight * scale * _class_sum(losses, seen != IGNORE_INDEX, config)
        if name == "main" and config.dice_weight:
            parts["dice"] = config.dice_weight * weight * scale * dice_sum(sampled, seen)
        if name == "main" and "boundary" in heads:
            parts["edge"] = (
                weight
                * scale
                * _edge_sum(losses, _sampled(heads["boundary"].detach(), target, stride, align_corners), seen)
            )
    parts["total"] = torch.stack(list(parts.values())).sum()
    return parts


def _every(target: Tensor, stride: int) -> Tensor:
    """Every `stride`-th row and column, from the middle of the first cell on."""
    return target[:, stride // 2 :: stride, stride // 2 :: stride] if stride > 1 else target


def _sampled(logits: Tensor, target: Tensor, stride: int, align_corners: bool) -> Tensor:
    """Logits in fp32, as at the size of the target, at the pixels that `_every` takes.

    Resizing to fewer pixels instead would compare them with their neighbours: by up to stride / 2 pixels with
    align_corners, where the loss of a perfect network then fell from 0.43 to 0.35 at stride 2.
    """
    height, width = target.shape[-2:]
    if stride == 1:
        return bilinear(logits.float(), (height, width), align_corners=align_corners)
    rows = _sampling(logits.shape[-2], height, stride, align_corners, logits.device)
    columns = _sampling(logits.shape[-1], width, stride, align_corners, logits.device)
    return rows @ (logits.float() @ columns.t())


@cache
def _sampling(num_in: int, num_out: int, stride: int, align_corners: bool, device: torch.device) -> Tensor:
    """Every `stride`-th row of the matrix that resizes one axis."""
    weights = bilinear_weights(num_in, num_out, np.float32, align_corners=align_corners)[stride // 2 :: stride]
    with torch.inference_mode(False):  # a tensor made in inference mode could not take part in a later backward
        return torch.from_numpy(np.ascontiguousarray(weights)).to(device)


def _class_sum(losses: Tensor, valid: Tensor, config: LossConfig) -> Tensor:
    if config.name == "ohem":
        return ohem_sum(losses, valid, threshold=config.ohem_threshold, min_kept=config.ohem_min_kept)
    return losses.sum()


def _edge_sum(losses: Tensor, edge_logits: Tensor, seen: Tensor) -> Tensor:
    """Sum of the class losses where the boundary head is sure of an edge."""
    probability = torch.sigmoid(edge_logits).squeeze(1)
    return torch.where((probability > EDGE_CONFIDENCE) & (seen != IGNORE_INDEX), losses, 0.0).sum()
