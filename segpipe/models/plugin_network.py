"""The user's own network behind the interface of ours, with its outputs checked at every forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from segpipe.errors import ConfigError
from segpipe.models.layers import SegmentationNet

MAIN = ("main", "out")  # the second is torchvision's
RESERVED = ("total", "dice", "edge")  # names of other parts of the loss
BOUNDARY = "boundary"  # a head of one channel, supervised by the borders between classes
PROBE_SIZE = 256  # image side with which an unknown stride is measured


class PluginNetwork(SegmentationNet):
    """`net`, whose forward takes a float image (B, 3, H, W) and returns logits of any stride.

    It may return a tensor, a list whose first tensor is the main head, or a mapping with `main` or `out`; all others
    are auxiliary heads, which only the loss uses. In eval mode there may be fewer of them. An attribute
    `align_corners` of `net` says how its logits are upsampled (False without it), `output_stride` their stride.
    The state dict has the keys of `net` behind "net.".
    """

    def __init__(self, net: nn.Module, num_classes: int, name: str) -> None:
        super().__init__()
        self.net, self.num_classes, self.name = net, num_classes, name
        self.align_corners = bool(getattr(net, "align_corners", False))
        self.published_keys = {"net.": ""}  # files of weights name the tensors as `net` does
        self.train_only = nn.ModuleDict()  # auxiliary heads are inside `net`, wherever it has them
        self._stride: int | None = getattr(net, "output_stride", None)
        self._trained_heads: tuple[str, ...] = ()  # of the first forward in training

    @property
    def output_stride(self) -> int:  # type: ignore[override]
        """Rows of the image for each row of logits, rounded; measured with an image of zeros if `net` has none."""
        if self._stride is None:
            device = next((tensor.device for tensor in self.parameters()), None)
            before = self.training
            with torch.no_grad():
                found = self.eval()(torch.zeros(1, 3, PROBE_SIZE, PROBE_SIZE, device=device))
            self.train(before)
            self._stride = max(1, round(PROBE_SIZE / found.shape[-2]))
        return self._stride

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits per head: "main" and, with `aux`, all others. Raises ConfigError for outputs that do not fit."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        checked = self.training and not traced
        before = {name: (buffer, buffer._version) for name, buffer in self._plain_buffers()} if checked else {}
        heads = named_heads(self.net(image), self.name)
        if not traced:
            self._check(heads, image)
        if checked:
            self._check_names(heads)
            self._check_buffers(before)
        return heads if aux else {"main": heads["main"]}

    def _plain_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that nothing averages over the shards: all but those of BatchNorm."""
        for prefix, module in self.net.named_modules():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                yield from module.named_buffers(prefix, recurse=False)

    def _check(self, heads: Mapping[str, Tensor], image: Tensor) -> None:
        for name, logits in heads.items():
            channels = 1 if name == BOUNDARY else self.num_classes
            shape = tuple(logits.shape)
            if len(shape) != 4 or shape[:2] != (image.shape[0], channels) or not logits.is_floating_point():
                raise ConfigError(
                    f"model.name = {self.name}: head {name} is {logits.dtype} {shape} for an image of "
                    f"{tuple(image.shape)}, but float ({image.shape[0]}, {channels}, h, w) was needed: a batch of "
                    f"logits for {channels} {'channel' if name == BOUNDARY else 'classes'}."
                )

    def _check_names(self, heads: Mapping[str, Tensor]) -> None:
        self._trained_heads = self._trained_heads or tuple(heads)
        if tuple(heads) != self._trained_heads:
            raise ConfigError(
                f"model.name = {self.name}: its forward returned the heads {', '.join(heads)}, and before that "
                f"{', '.join(self._trained_heads)}. In training mode it must return the same heads every time."
            )

    def _check_buffers(self, before: Mapping[str, tuple[Tensor, int]]) -> None:
        """Refuse a forward that wrote into a buffer, or put another tensor of its shape in its place.

        One of another shape is a cache for the size of the image, such as a grid of coordinates.
        """
        now = dict(self._plain_buffers())
        for name, (old, version) in before.items():
            new = now.get(name)
            replaced = new is not old and (new is None or new.shape == old.shape)
            if replaced or old._version != version:
                raise ConfigError(
                    f"model.name = {self.name}: its forward changes the buffer {name}, which is no statistic of a "
                    f"BatchNorm: shards would no longer add up to the same bits. Keep such state out of the forward."
                )


def named_heads(output: Any, name: str) -> dict[str, Tensor]:
    """Heads by name, "main" first, of what the forward of network `name` returned. Raises ConfigError for the rest."""
    if isinstance(output, Tensor):
        return {"main": output}
    heads: dict[str, Any] = {}
    if isinstance(output, list | tuple) and output:
        heads = {f"aux{place}" if place else "main": head for place, head in enumerate(output)}
    elif isinstance(output, Mapping) and (main := next((key for key in MAIN if key in output), None)):
        heads = {"main": output[main], **{str(key): head for key, head in output.items() if key != main}}
    wrong = [key for key, head in heads.items() if not isinstance(head, Tensor) or key in RESERVED]
    if not heads or wrong:
        found = f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            found += f" with {', '.join(f'{key} ({type(head).__name__})' for key, head in output.items())}"
        raise ConfigError(
            f"model.name = {name}: its forward returned {found}, but a tensor of logits, a list of tensors (the main "
            f"head first) or a mapping of tensors with main or out was needed, without {', '.join(RESERVED)}."
        )
    return heads
