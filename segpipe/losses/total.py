"""The loss of one logical shard, ready for backward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX, plugins
from segpipe.errors import ConfigError
from segpipe.losses.pixelwise import boundary_sum, boundary_target, dice_sum, ohem_sum, pixel_losses
from segpipe.models.resize import bilinear, bilinear_matmul

if TYPE_CHECKING:
    from segpipe.settings.groups import LossConfig

KEY = "loss.name"
EDGE_CONFIDENCE = 0.8  # pixels that the boundary head calls an edge this surely get the extra class loss


def valid_pixels(target: Tensor) -> int:
    """Number of pixels of a CPU target that are not ignored."""
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
    """The shard's part of the step's loss, as `total` and by part, 0-d float32 tensors.

    Shards add up: everything is divided by `global_valid`, the number of valid pixels of the whole step, which is
    known before the forward pass. It is an int64 0-d tensor on the device, so that the host never waits for it. Without
    any valid pixel every part is 0, and so are the gradients.

    Shapes: heads (B, C, h, w), or (B, 1, h, w) for `boundary`; target uint8 (B, H, W).
    """
    scale = global_valid.clamp_min(1).float().reciprocal()
    needs_pixels = "boundary" in heads or not plugins.is_path(config.name)  # the part `edge` is of cross-entropy
    parts: dict[str, Tensor] = {}
    for name, logits in heads.items():
        if name == "boundary":
            edges = boundary_target(target, ignore_index=IGNORE_INDEX)
            total = boundary_sum(_at_target(logits, target, 1, align_corners), edges, target != IGNORE_INDEX)
            parts[name] = config.boundary_weight * scale * total
            continue
        stride = config.stride if name == "main" else config.aux_stride
        strided = target[:, stride // 2 :: stride, stride // 2 :: stride]
        resized = _at_target(logits, target, stride, align_corners)
        losses = pixel_losses(resized, strided, class_weights, ignore_index=IGNORE_INDEX) if needs_pixels else resized
        weight = target.numel() / strided.numel() * (1.0 if name == "main" else config.aux_weight)
        parts[name] = weight * scale * _class_sum(losses, resized, strided, class_weights, config)
        if name == "main" and config.dice_weight:
            dice = dice_sum(resized, strided, ignore_index=IGNORE_INDEX)
            parts["dice"] = config.dice_weight * weight * scale * dice
        if name == "main" and "boundary" in heads:
            edge_logits = _at_target(heads["boundary"].detach(), target, stride, align_corners)
            sure = torch.sigmoid(edge_logits).squeeze(1) > EDGE_CONFIDENCE
            parts["edge"] = weight * scale * torch.where(sure & (strided != IGNORE_INDEX), losses, 0.0).sum()
    parts["total"] = torch.stack(list(parts.values())).sum()
    return parts


def _at_target(logits: Tensor, target: Tensor, stride: int, align_corners: bool) -> Tensor:
    """Logits in fp32 at the size of the target, of which every `stride`-th row and column is computed.

    Resizing to fewer pixels instead would shift them by up to stride / 2 against the target with align_corners: at
    stride 2 the loss of a perfect network then fell from 0.43 to 0.35.
    """
    size = (target.shape[-2], target.shape[-1])
    if stride == 1:
        return bilinear(logits.float(), size, align_corners=align_corners)
    return bilinear_matmul(logits.float(), size, align_corners=align_corners, stride=stride)


def _class_sum(
    losses: Tensor, logits: Tensor, target: Tensor, class_weights: Tensor | None, config: LossConfig
) -> Tensor:
    if plugins.is_path(config.name):
        return plugin_sum(config.name, config.args, logits, target, class_weights, ignore_index=IGNORE_INDEX)
    if config.name == "ohem":
        valid = target != IGNORE_INDEX
        return ohem_sum(losses, valid, threshold=config.ohem_threshold, min_kept=config.ohem_min_kept)
    return losses.sum()


def plugin_sum(
    name: str,
    args: Mapping[str, Any],
    logits: Tensor,
    target: Tensor,
    class_weights: Tensor | None,
    *,
    ignore_index: int,
) -> Tensor:
    """Loss of the function `name`, summed over the valid pixels, 0-d float32; what it says of ignored ones is dropped.

    The function returns the loss of each pixel, or their sum. Raises ConfigError when it returns anything else, or
    does not take the arguments.

    Shapes: logits float32 (B, C, H, W), target uint8 (B, H, W), class_weights (C,).
    """
    weights = {} if class_weights is None else {"class_weights": class_weights}
    found = _loss(name)(logits, target.long(), ignore_index=ignore_index, **weights, **args)
    if not isinstance(found, Tensor) or found.dtype != torch.float32 or found.shape not in ((), target.shape):
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ConfigError(
            f"{KEY} = {name} returned {what} for logits of {tuple(logits.shape)}, but the float32 loss of each pixel, "
            f"{tuple(target.shape)}, or their sum, (), was needed."
        )
    return torch.where(target != ignore_index, found, 0.0).sum() if found.ndim else found


def check_call(name: str, args: Mapping[str, Any], *, weighted: bool) -> None:
    """Raise ConfigError unless the function can be imported and called with `args`. Calls nothing."""
    weights = {"class_weights": None} if weighted else {}
    plugins.check_arguments(KEY, name, _loss(name), args, "logits", "target", ignore_index=0, **weights)


@cache
def _loss(name: str) -> Any:
    return plugins.load(KEY, name)
