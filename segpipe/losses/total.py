"""The loss of one logical shard, ready for backward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX, plugins
from segpipe.errors import ConfigError
from segpipe.losses import compiled, strips
from segpipe.losses.fused import Evaluate, Terms, class_loss
from segpipe.losses.pixelwise import (
    boundary_sum,
    boundary_target,
    boundary_weights,
    dice_sum,
    ohem_sum,
    pixel_losses,
)
from segpipe.losses.strips import ClassHead
from segpipe.models.resize import bilinear, bilinear_axes, bilinear_matmul

if TYPE_CHECKING:
    from segpipe.settings.groups import LossConfig

KEY = "loss.name"
NEEDS = {"native": "a C compiler and a CPU", "triton": "triton and CUDA"}
KNOWN = ("cross_entropy", "ohem")
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

    Only `total` has a gradient for sure: unless `loss.backend` is plain, gradients are computed with the loss.

    Shards add up: everything is divided by `global_valid`, the number of valid pixels of the whole step, which is
    known before the forward pass. It is an int64 0-d tensor on the device, so that the host never waits for it. Without
    any valid pixel every part is 0, and so are the gradients.

    Shapes: heads (B, C, h, w), or (B, 1, h, w) for `boundary`; target uint8 (B, H, W).
    """
    scale = global_valid.clamp_min(1).float().reciprocal()
    name = backend(config, target.device.type)
    loss = _Plain if name == "plain" else partial(_Fused, _evaluate(name))
    return loss(heads, target, config, class_weights, scale, align_corners).parts()


def backend(config: LossConfig, device_type: str) -> str:
    """What computes the loss on a device (cpu, cuda). Raises ConfigError for a backend that cannot run there.

    Plug-ins take logits at full resolution, so theirs is plain.
    """
    return (
        "plain"
        if plugins.is_path(config.name)
        else resolved(config.backend, device_type)
    )


def resolved(name: str, device_type: str) -> str:
    """`loss.backend`, or what `auto` stands for on a device. Raises ConfigError for one that cannot run there."""
    fastest = {"cpu": "native", "cuda": "triton"}.get(device_type, "torch")
    missing = (
        find_spec("triton") is None
        if fastest == "triton"
        else compiled.library() is None
    )
    if name == "auto":
        return "torch" if missing else fastest
    if name in NEEDS and (missing or name != fastest):
        raise ConfigError(
            f"loss.backend = {name} on {device_type}, but {NEEDS[name]} was needed. Set loss.backend=auto."
        )
    return name


def _evaluate(name: str) -> Evaluate:
    if name == "triton":
        from segpipe.losses import (
            triton_pass,
        )  # seconds to import, and not installed everywhere

        return triton_pass.evaluate
    return compiled.evaluate if name == "native" else strips.evaluate


class _Heads:
    """The heads of a shard, and what all their losses share."""

    def __init__(
        self,
        heads: dict[str, Tensor],
        target: Tensor,
        config: LossConfig,
        class_weights: Tensor | None,
        scale: Tensor,
        align_corners: bool,
    ) -> None:
        self.heads, self.target, self.config = heads, target, config
        self.class_weights, self.scale, self.align_corners = (
            class_weights,
            scale,
            align_corners,
        )

    def stride(self, name: str) -> int:
        return self.config.stride if name == "main" else self.config.aux_stride

    def strided(self, name: str) -> Tensor:
        """The target at the pixels that the loss of a class head reads."""
        stride = self.stride(name)
        return self.target[:, stride // 2 :: stride, stride // 2 :: stride]

    def weight(self, name: str) -> Tensor:
        """Factor of the sum over the pixels of a class head, 0-d."""
        sparse = self.target.numel() / self.strided(name).numel()
        return sparse * (1.0 if name == "main" else self.config.aux_weight) * self.scale

    def sure_edges(self, name: str) -> Tensor | None:
        """Where the boundary head is sure of an edge, bool (B, H, W); None if that is no part of this head's loss."""
        if name != "main" or "boundary" not in self.heads:
            return None
        logits = _at_target(
            self.heads["boundary"].detach(),
            self.target,
            self.stride(name),
            self.align_corners,
        )
        return torch.sigmoid(logits).squeeze(1) > EDGE_CONFIDENCE


class _Plain(_Heads):
    """Losses of logits at the size of the target; autograd finds the gradients."""

    def parts(self) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        for name, logits in self.heads.items():
            if name == "boundary":
                edges = boundary_target(self.target, ignore_index=IGNORE_INDEX)
                resized = _at_target(logits, self.target, 1, self.align_corners)
                total = boundary_sum(resized, edges, self.target != IGNORE_INDEX)
                parts[name] = self.config.boundary_weight * self.scale * total
            else:
                parts |= self._class_parts(name, logits)
        parts["total"] = torch.stack(list(parts.values())).sum()
        return parts

    def _class_parts(self, name: str, logits: Tensor) -> dict[str, Tensor]:
        config, strided, weight = self.config, self.strided(name), self.weight(name)
        resized = _at_target(logits, self.target, self.stride(name), self.align_corners)
        losses = resized
        if "boundary" in self.heads or not plugins.is_path(
            config.name
        ):  # the part `edge` is of cross-entropy
            losses = pixel_losses(
                resized,
                strided,
                self.class_weights,
                ignore_index=IGNORE_INDEX,
                label_smoothing=config.label_smoothing,
            )
        parts = {
            name: weight
            * _class_sum(losses, resized, strided, self.class_weights, config)
        }
        if name == "main" and config.dice_weight:
            parts["dice"] = (
                config.dice_weight
                * weight
                * dice_sum(resized, strided, ignore_index=IGNORE_INDEX)
            )
        sure = self.sure_edges(name)
        if sure is not None:
            parts["edge"] = (
                weight
                * torch.where(sure & (strided != IGNORE_INDEX), losses, 0.0).sum()
            )
        return parts


class _Fused(_Heads):
    """Losses of logits at output stride, whose gradients are computed with them. Only `total` has a gradient."""

    def __init__(self, evaluate: Evaluate, *shared: Any) -> None:
        super().__init__(*shared)
        self.evaluate = evaluate

    def parts(self) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        totals = []
        for name, logits in self.heads.items():
            if name == "boundary":
                total, own = self._boundary(logits)
            else:
                total, own = self._class_head(name, logits)
            totals.append(total)
            parts |= own
        parts["total"] = torch.stack(totals).sum()
        return parts

    def _boundary(self, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`boundary_sum`: the binary cross-entropy of a logit is the cross-entropy of the two logits 0 and itself."""
        valid = self.target != IGNORE_INDEX
        edges = boundary_target(self.target, ignore_index=IGNORE_INDEX)
        inside, outside = boundary_weights(edges, valid)
        ids = torch.where(valid, edges.squeeze(1).to(torch.uint8), IGNORE_INDEX)
        head = self._head(
            torch.cat([torch.zeros_like(logits), logits], 1),
            ids,
            1,
            torch.stack([outside, inside]),
        )
        total, own = class_loss(
            head, Terms(), self.config.boundary_weight * self.scale, self.evaluate
        )
        return total, {"boundary": own["class"]}

    def _class_head(
        self, name: str, logits: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        _check_known(config.name)
        terms = Terms(
            ohem=(config.ohem_threshold, config.ohem_min_kept)
            if config.name == "ohem"
            else None,
            dice_weight=config.dice_weight if name == "main" else 0.0,
            sure=self.sure_edges(name),
        )
        head = self._head(
            logits,
            self.strided(name),
            self.stride(name),
            self.class_weights,
            config.label_smoothing,
        )
        total, own = class_loss(head, terms, self.weight(name), self.evaluate)
        return total, {
            name if part == "class" else part: value for part, value in own.items()
        }

    def _head(
        self,
        logits: Tensor,
        seen: Tensor,
        stride: int,
        weights: Tensor | None,
        smoothing: float = 0.0,
    ) -> ClassHead:
        size, wide = (self.target.shape[1], self.target.shape[2]), logits.float()
        rows, columns = bilinear_axes(
            wide, size, align_corners=self.align_corners, stride=stride
        )
        return ClassHead(
            wide, seen.contiguous(), rows, columns, IGNORE_INDEX, weights, smoothing
        )


def _at_target(
    logits: Tensor, target: Tensor, stride: int, align_corners: bool
) -> Tensor:
    """Logits in fp32 at the size of the target, of which every `stride`-th row and column is computed.

    Resizing to fewer pixels instead would shift them by up to stride / 2 against the target with align_corners: at
    stride 2 the loss of a perfect network then fell from 0.43 to 0.35.
    """
    size = (target.shape[-2], target.shape[-1])
    if stride == 1:
        return bilinear(logits.float(), size, align_corners=align_corners)
    return bilinear_matmul(
        logits.float(), size, align_corners=align_corners, stride=stride
    )


def _class_sum(
    losses: Tensor,
    logits: Tensor,
    target: Tensor,
    class_weights: Tensor | None,
    config: LossConfig,
) -> Tensor:
    if plugins.is_path(config.name):
        return plugin_sum(
            config.name,
            config.args,
            logits,
            target,
            class_weights,
            ignore_index=IGNORE_INDEX,
        )
    _check_known(config.name)
    if config.name == "ohem":
        valid = target != IGNORE_INDEX
        return ohem_sum(
            losses,
            valid,
            threshold=config.ohem_threshold,
            min_kept=config.ohem_min_kept,
        )
    return losses.sum()


def _check_known(name: str) -> None:
    """Raise ConfigError for a built-in loss that nothing here computes."""
    if name not in KNOWN:
        raise ConfigError(
            f"{KEY} = {name}, but losses/total.py computes {', '.join(KNOWN)} only."
        )


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
    found = _loss(name)(
        logits, target.long(), ignore_index=ignore_index, **weights, **args
    )
    if (
        not isinstance(found, Tensor)
        or found.dtype != torch.float32
        or found.shape not in ((), target.shape)
    ):
        what = (
            f"{found.dtype} {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else f"a {type(found).__name__}"
        )
        raise ConfigError(
            f"{KEY} = {name} returned {what} for logits of {tuple(logits.shape)}, but the float32 loss of each pixel, "
            f"{tuple(target.shape)}, or their sum, (), was needed."
        )
    return (
        torch.where(target != ignore_index, found, 0.0).sum() if found.ndim else found
    )


def check_call(name: str, args: Mapping[str, Any], *, weighted: bool) -> None:
    """Raise ConfigError unless the function can be imported and called with `args`. Calls nothing."""
    weights = {"class_weights": None} if weighted else {}
    plugins.check_arguments(
        KEY, name, _loss(name), args, "logits", "target", ignore_index=0, **weights
    )


@cache
def _loss(name: str) -> Any:
    return plugins.load(KEY, name)
