"""The loss of one logical shard, ready for backward.

Each term has its own file. Pixel terms (ohem, focal) are computed from the cross-entropy of every pixel and have an
entry in PIXEL_TERMS. Shard terms (dice, lovasz, distill) are added to the main head's loss with a weight. The passes
over the pixels (fused, triton_pass, cross_entropy) do not depend on the terms.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segpipe import IGNORE_INDEX, native, plugins
from segpipe.errors import ConfigError
from segpipe.losses import cross_entropy, fused
from segpipe.losses.boundary import as_two_classes, detail_sum
from segpipe.losses.distill import TeacherLogits, distill_sum
from segpipe.losses.focal import focal
from segpipe.losses.fused import Chosen, ClassHead, Evaluate, Terms, class_loss
from segpipe.losses.lovasz import lovasz_sum
from segpipe.losses.ohem import ohem
from segpipe.models.resize import bilinear, bilinear_axes, bilinear_matmul
from segpipe.settings.groups import LossConfig

KEY = "loss.name"
# What is done with the cross-entropy of every pixel of a class head, by `loss.name`; None: it is simply summed.
PIXEL_TERMS: dict[str, Callable[..., Chosen] | None] = {
    "cross_entropy": None,
    "ohem": ohem,
    "focal": focal,
}
NEEDS = {
    "native": "a C compiler and a CPU",
    "triton": "triton, gcc or clang, Python.h, and CUDA",
}
# Pixels get the extra class loss if the boundary head's edge probability exceeds this.
EDGE_CONFIDENCE = 0.8


def valid_pixels(target: Tensor) -> int:
    """Number of valid (not ignored) pixels of a CPU target. numpy counts 35 times as fast as torch sums booleans."""
    return int(np.count_nonzero(target.numpy() != IGNORE_INDEX))


def shard_loss(
    heads: dict[str, Tensor],
    target: Tensor,
    config: LossConfig,
    *,
    class_weights: Tensor | None,
    global_valid: Tensor,
    align_corners: bool,
    teacher: TeacherLogits | None = None,
) -> dict[str, Tensor]:
    """The shard's share of the step's loss, as `total` and by part; 0-d float32 tensors.

    Only `total` is sure to have a gradient: for most parts, it was computed with the loss.

    Shards add up: everything is divided by `global_valid`, the number of valid pixels of the whole step, which is known
    before the forward pass. It is a 0-d int64 tensor on the device, so that the host never waits for it. Without valid
    pixels, all parts and gradients are 0.

    Shapes: heads (B, C, h, w), or (B, 1, h, w) for `boundary`; target uint8 (B, H, W).
    """
    scale = global_valid.clamp_min(1).reciprocal()
    shard = _Shard(heads, target, config, class_weights, scale, align_corners)
    evaluate = _evaluate(backend(config, target.device.type))
    parts: dict[str, Tensor] = {}
    addends: list[Tensor] = []
    for name in heads:
        own = shard.by_autograd(name, teacher)
        total, found = shard.by_pass(name, evaluate)
        addends += own.values()
        if total is not None:
            addends.append(total)
        parts |= found | own
    parts["total"] = torch.stack(addends).sum()
    return parts


def backend(config: LossConfig, device_type: str) -> str:
    """The backend that computes the loss on a device type (cpu, cuda): native, triton or plain.

    Plug-ins take logits at full resolution, so theirs is plain. Raises ConfigError for a loss that does not exist, and
    for a backend that cannot run on the device.
    """
    if config.name not in PIXEL_TERMS:
        if plugins.is_path(config.name):
            return "plain"
        raise ConfigError(
            f"{KEY} = {config.name} is not one of {', '.join(PIXEL_TERMS)}."
        )
    fastest = "plain"
    if device_type == "cuda" and native.triton_builds():
        fastest = "triton"
    if device_type == "cpu" and fused.library():
        fastest = "native"
    if config.backend == "auto":
        return fastest
    if config.backend not in (fastest, "plain"):
        raise ConfigError(
            f"loss.backend = {config.backend} on {device_type}, but {NEEDS[config.backend]} was needed. Set "
            f"loss.backend=auto."
        )
    return config.backend


def _evaluate(name: str) -> Evaluate:
    if name != "triton":
        return fused.native_pass if name == "native" else cross_entropy.evaluate
    # Takes seconds to import, and is not available everywhere.
    from segpipe.losses import triton_pass

    return triton_pass.evaluate


def _nothing(losses: Tensor, *_: Any, config: LossConfig) -> Chosen:
    """The pixel term under a plug-in loss: the cross-entropy does not count."""
    return Chosen(torch.zeros_like(losses), torch.zeros_like(losses))


@dataclass(frozen=True)
class _Shard:
    """The heads of a shard. The loss of a head is a dictionary of its parts by name."""

    heads: dict[str, Tensor]
    target: Tensor
    config: LossConfig
    class_weights: Tensor | None
    scale: Tensor
    align_corners: bool

    def by_autograd(
        self, name: str, teacher: TeacherLogits | None
    ) -> dict[str, Tensor]:
        """Parts that need the head's logits at the size of the target; autograd computes their gradients."""
        config, logits = self.config, self.heads[name]
        if name == "boundary":
            if config.boundary != "detail":
                return {}
            total = detail_sum(self._at_target(logits, 1), self.target)
            return {name: config.boundary_weight * self.scale * total}

        own = config.name not in PIXEL_TERMS
        has_lovasz = name == "main" and config.lovasz_weight
        if name != "main":
            teacher = None
        if not (own or has_lovasz or teacher):
            return {}

        stride, target, weight = self._sampled(name)
        wide, parts = self._at_target(logits, stride), dict[str, Tensor]()
        if own:
            total = plugin_sum(
                config.name, config.args, wide, target, self.class_weights
            )
            parts[name] = weight * total
        if has_lovasz:
            parts["lovasz"] = config.lovasz_weight * weight * lovasz_sum(wide, target)
        if teacher:
            answers = self._at_target(teacher.logits, stride, teacher.align_corners)
            total = distill_sum(wide, answers, target, temperature=config.temperature)
            parts["teacher"] = config.teacher_weight * weight * total
        return parts

    def by_pass(
        self, name: str, evaluate: Evaluate
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Loss of logits at output stride, with a gradient computed alongside, and its parts, which have none.

        The loss is None if the head has no such part, as with only a plug-in loss.
        """
        config, logits = self.config, self.heads[name]
        has_band = "boundary" in self.heads and config.boundary == "band"
        if name == "boundary":
            if not has_band:
                return None, {}
            both, ids, weights = as_two_classes(logits, self.target)
            head = self._head(both, ids, 1, weights)
            scale = config.boundary_weight * self.scale
            total, own = class_loss(head, Terms(), scale, evaluate)
            return total, {name: own["class"]}

        stride, target, weight = self._sampled(name)
        term = PIXEL_TERMS.get(config.name, _nothing)
        dice_weight = config.dice_weight if name == "main" else 0.0
        sure = None
        if name == "main" and has_band:
            edge = self._at_target(self.heads["boundary"].detach(), stride)
            sure = torch.sigmoid(edge).squeeze(1) > EDGE_CONFIDENCE
        if term is _nothing and not dice_weight and sure is None:
            return None, {}

        terms = Terms(term and partial(term, config=config), dice_weight, sure)
        smoothing = config.label_smoothing
        head = self._head(logits, target, stride, self.class_weights, smoothing)
        total, own = class_loss(head, terms, weight, evaluate)

        return total, {name: own.pop("class"), **own}

    def _head(
        self,
        logits: Tensor,
        target: Tensor,
        stride: int,
        weights: Tensor | None,
        smoothing: float = 0.0,
    ) -> ClassHead:
        # A single copy, even from channels_last bf16 on a GPU.
        wide = logits.to(torch.float32, memory_format=torch.contiguous_format)
        axes = bilinear_axes(
            wide, self._size, align_corners=self.align_corners, stride=stride
        )
        return ClassHead(wide, target.contiguous(), *axes, weights, smoothing)

    @property
    def _size(self) -> torch.Size:
        return self.target.shape[1:]

    def _sampled(self, name: str) -> tuple[int, Tensor, Tensor]:
        """Stride of the pixels that a class head's loss reads, their target, and the factor of their sum."""
        config, factor = self.config, 1.0
        stride = config.stride
        if name != "main":
            stride, factor = config.aux_stride, config.aux_weight
        target = self.target[:, stride // 2 :: stride, stride // 2 :: stride]
        factor *= self.target.numel() / target.numel()

        return stride, target, self.scale if factor == 1 else factor * self.scale

    def _at_target(
        self, logits: Tensor, stride: int, align_corners: bool | None = None
    ) -> Tensor:
        """Every `stride`-th row and column of the logits resized to the size of the target, in fp32.

        With align_corners, resizing to fewer pixels instead would shift them by up to stride / 2 against the target: at
        stride 2 that lowered the loss of a perfect network from 0.43 to 0.35.
        """
        wide = logits.float()
        corners = self.align_corners if align_corners is None else align_corners
        if stride == 1:
            return bilinear(wide, self._size, align_corners=corners)
        return bilinear_matmul(wide, self._size, align_corners=corners, stride=stride)


def plugin_sum(
    name: str,
    args: Mapping[str, Any],
    logits: Tensor,
    target: Tensor,
    class_weights: Tensor | None,
) -> Tensor:
    """Loss of the function `name`, summed over the valid pixels, 0-d float32; its losses of ignored pixels are dropped.

    The function returns the loss of each pixel, or their sum. Raises ConfigError if it returns anything else or does
    not accept the arguments.

    Shapes: logits float32 (B, C, H, W), target uint8 (B, H, W), class_weights (C,).
    """
    weights = {} if class_weights is None else {"class_weights": class_weights}
    version = logits._version
    loss = _loss(name)(
        logits, target.long(), ignore_index=IGNORE_INDEX, **weights, **args
    )
    if logits._version != version:  # other terms read them, too
        raise ConfigError(
            f"{KEY} = {name} writes into its logits. Use operations that return a new tensor: clamp, not clamp_."
        )
    what = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        if loss.dtype == torch.float32 and loss.shape == target.shape:
            return torch.where(target != IGNORE_INDEX, loss, 0.0).sum()
        if loss.dtype == torch.float32 and loss.shape == ():
            return loss
        what = f"{loss.dtype} {tuple(loss.shape)}"
    raise ConfigError(
        f"{KEY} = {name} returned {what} for logits of {tuple(logits.shape)}, but the float32 loss of each pixel, "
        f"{tuple(target.shape)}, or their sum, (), was needed."
    )


def check_call(config: LossConfig) -> None:
    """Raise ConfigError unless the function can be imported and called with its arguments. Calls nothing."""
    found, named = _loss(config.name), {"ignore_index": 0}
    if isinstance(found, type | torch.nn.Module):
        raise ConfigError(
            f"{KEY} = {config.name} is a class or module, but a function was needed (docs/plugins.md)."
        )
    if config.class_weights != "none":
        named["class_weights"] = 0
    plugins.check_arguments(
        KEY, config.name, found, config.args, "logits", "target", **named
    )


_loss = cache(partial(plugins.load, KEY))
