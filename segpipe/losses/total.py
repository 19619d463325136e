"""The loss of one logical shard, ready for backward.

A term has a file of its own: cross_entropy, ohem, dice, boundary. The compiled passes over the pixels (strips, native,
triton) know no term: they give the cross-entropy of every pixel and sums of probabilities by class, and take back the
derivatives by both. So a term of pixels is one file, an entry in PIXEL_TERMS and its settings in settings/groups.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segpipe import IGNORE_INDEX, plugins
from segpipe.errors import ConfigError
from segpipe.losses import compiled, strips
from segpipe.losses.boundary import as_two_classes, boundary_sum, boundary_target
from segpipe.losses.cross_entropy import pixel_losses
from segpipe.losses.dice import dice_sum
from segpipe.losses.fused import Evaluate, Terms, class_loss
from segpipe.losses.ohem import hard_pixels
from segpipe.losses.strips import ClassHead
from segpipe.models.resize import bilinear, bilinear_axes, bilinear_matmul

if TYPE_CHECKING:
    from segpipe.settings.groups import LossConfig

KEY = "loss.name"
# Which pixels of a class head count, by `loss.name`; None: all.
PIXEL_TERMS: dict[str, Callable[..., tuple[Tensor, Tensor]] | None] = {
    "cross_entropy": None,
    "ohem": hard_pixels,
}
NEEDS = {"native": "a C compiler and a CPU", "triton": "triton and CUDA"}
# Pixels that the boundary head calls an edge this surely get the extra class loss.
EDGE_CONFIDENCE = 0.8


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
    shard = _Shard(heads, target, config, class_weights, scale, align_corners)
    name = backend(config, target.device.type)
    of_head = shard.plain if name == "plain" else partial(shard.fused, _evaluate(name))
    parts: dict[str, Tensor] = {}
    addends: list[Tensor] = []
    for head, logits in heads.items():
        added, own = of_head(head, logits)
        addends += added
        parts |= own
    parts["total"] = torch.stack(addends).sum()
    return parts


def backend(config: LossConfig, device_type: str) -> str:
    """What computes the loss on a device (cpu, cuda).

    Plug-ins take logits at full resolution, so theirs is plain. Raises ConfigError for a loss that does not exist, and
    for a backend that cannot run on the device.
    """
    if plugins.is_path(config.name):
        return "plain"
    if config.name not in PIXEL_TERMS:
        raise ConfigError(
            f"{KEY} = {config.name} is not one of {', '.join(PIXEL_TERMS)}."
        )
    fastest = {"cpu": "native", "cuda": "triton"}.get(device_type, "torch")
    missing = (
        find_spec("triton") is None
        if fastest == "triton"
        else compiled.library() is None
    )
    wanted = config.backend
    if wanted == "auto":
        return "torch" if missing else fastest
    if wanted in NEEDS and (missing or wanted != fastest):
        raise ConfigError(
            f"loss.backend = {wanted} on {device_type}, but {NEEDS[wanted]} was needed. Set loss.backend=auto."
        )
    return wanted


def _evaluate(name: str) -> Evaluate:
    if name == "triton":
        # Seconds to import, and not installed everywhere.
        from segpipe.losses import triton_pass

        return triton_pass.evaluate
    return {"native": compiled.evaluate, "torch": strips.evaluate}[name]


@dataclass(frozen=True)
class _Shard:
    """The heads of a shard. The loss of one is what to add to the total, and its parts by name."""

    heads: dict[str, Tensor]
    target: Tensor
    config: LossConfig
    class_weights: Tensor | None
    scale: Tensor
    align_corners: bool

    def plain(
        self, name: str, logits: Tensor
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Loss of logits at the size of the target; autograd finds the gradient."""
        if name == "boundary":
            edges = boundary_target(self.target, ignore_index=IGNORE_INDEX)
            resized = self._at_target(logits, stride=1)
            total = boundary_sum(resized, edges, self.target != IGNORE_INDEX)
            parts = {name: self.config.boundary_weight * self.scale * total}
        else:
            parts = self._plain_class(name, logits)
        return list(parts.values()), parts

    def _plain_class(self, name: str, logits: Tensor) -> dict[str, Tensor]:
        config, weight, strided = self.config, self._weight(name), self._strided(name)
        resized = self._at_target(logits, self._stride(name))
        sure = self._sure_edges(name)
        own = plugins.is_path(config.name)
        if not own or sure is not None:  # the part `edge` is of cross-entropy
            losses = pixel_losses(
                resized,
                strided,
                self.class_weights,
                ignore_index=IGNORE_INDEX,
                label_smoothing=config.label_smoothing,
            )
        if own:
            total = plugin_sum(
                config.name,
                config.args,
                resized,
                strided,
                self.class_weights,
                ignore_index=IGNORE_INDEX,
            )
        elif select := PIXEL_TERMS[config.name]:
            kept, ratio = select(losses, strided != IGNORE_INDEX, config)
            total = torch.where(kept, losses, 0.0).sum() * ratio
        else:
            total = losses.sum()
        parts = {name: weight * total}
        if name == "main" and config.dice_weight:
            dice = dice_sum(resized, strided, ignore_index=IGNORE_INDEX)
            parts["dice"] = config.dice_weight * weight * dice
        if sure is not None:
            counted = sure & (strided != IGNORE_INDEX)
            parts["edge"] = weight * torch.where(counted, losses, 0.0).sum()
        return parts

    def fused(
        self, evaluate: Evaluate, name: str, logits: Tensor
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Loss of logits at output stride, whose gradient is computed with it. Only what is added has one."""
        if name == "boundary":
            both, ids, weights = as_two_classes(
                logits, self.target, ignore_index=IGNORE_INDEX
            )
            head = self._head(both, ids, 1, weights)
            scale = self.config.boundary_weight * self.scale
            total, own = class_loss(head, Terms(), scale, evaluate)
        else:
            select = PIXEL_TERMS[self.config.name]
            terms = Terms(
                select=select and partial(select, config=self.config),
                dice_weight=self.config.dice_weight if name == "main" else 0.0,
                sure=self._sure_edges(name),
            )
            head = self._head(
                logits,
                self._strided(name),
                self._stride(name),
                self.class_weights,
                self.config.label_smoothing,
            )
            total, own = class_loss(head, terms, self._weight(name), evaluate)
        parts = {name if part == "class" else part: own[part] for part in own}
        return [total], parts

    def _head(
        self,
        logits: Tensor,
        target: Tensor,
        stride: int,
        weights: Tensor | None,
        smoothing: float = 0.0,
    ) -> ClassHead:
        wide = logits.float()
        rows, columns = bilinear_axes(
            wide, self._size, align_corners=self.align_corners, stride=stride
        )
        return ClassHead(
            wide, target.contiguous(), rows, columns, IGNORE_INDEX, weights, smoothing
        )

    @property
    def _size(self) -> tuple[int, int]:
        return self.target.shape[1], self.target.shape[2]

    def _stride(self, name: str) -> int:
        return self.config.stride if name == "main" else self.config.aux_stride

    def _strided(self, name: str) -> Tensor:
        """The target at the pixels that the loss of a class head reads."""
        stride = self._stride(name)
        return self.target[:, stride // 2 :: stride, stride // 2 :: stride]

    def _weight(self, name: str) -> Tensor:
        """Factor of the sum over the pixels of a class head, 0-d."""
        sparse = self.target.numel() / self._strided(name).numel()
        return sparse * (1.0 if name == "main" else self.config.aux_weight) * self.scale

    def _sure_edges(self, name: str) -> Tensor | None:
        """Where the boundary head is sure of an edge, bool (B, H, W); None if that is no part of this head's loss."""
        if name != "main" or "boundary" not in self.heads:
            return None
        edge = self._at_target(self.heads["boundary"].detach(), self._stride(name))
        return torch.sigmoid(edge).squeeze(1) > EDGE_CONFIDENCE

    def _at_target(self, logits: Tensor, stride: int) -> Tensor:
        """Logits in fp32 at the size of the target, of which every `stride`-th row and column is computed.

        Resizing to fewer pixels instead would shift them by up to stride / 2 against the target with align_corners: at
        stride 2 the loss of a perfect network then fell from 0.43 to 0.35.
        """
        wide, align_corners = logits.float(), self.align_corners
        if stride == 1:
            return bilinear(wide, self._size, align_corners=align_corners)
        return bilinear_matmul(
            wide, self._size, align_corners=align_corners, stride=stride
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
    loss = _loss(name)(
        logits, target.long(), ignore_index=ignore_index, **weights, **args
    )
    what = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        if loss.dtype == torch.float32 and loss.shape == target.shape:
            return torch.where(target != ignore_index, loss, 0.0).sum()
        if loss.dtype == torch.float32 and loss.shape == ():
            return loss
        what = f"{loss.dtype} {tuple(loss.shape)}"
    raise ConfigError(
        f"{KEY} = {name} returned {what} for logits of {tuple(logits.shape)}, but the float32 loss of each pixel, "
        f"{tuple(target.shape)}, or their sum, (), was needed."
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
