"""Wraps the user's own network in our interface, and checks its outputs and its state in every shard."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from segpipe.errors import ConfigError
from segpipe.models.layers import SegmentationNet
from segpipe.plugins import is_path

if TYPE_CHECKING:
    from segpipe.settings.config import Config

MAIN = ("main", "out")  # the second is torchvision's
# Names of other parts of the loss.
RESERVED = ("total", "dice", "edge", "lovasz", "teacher")
# A one-channel head, supervised by class boundaries.
BOUNDARY = "boundary"
# Buffers of BatchNorm; a subclass may have more.
AVERAGED = ("running_mean", "running_var", "num_batches_tracked")
PROBE_SIZE = 448  # image side for measuring the stride; a multiple of 14 and 64


def check_heads(
    heads: Mapping[str, Tensor], image: Tensor, num_classes: int, name: str
) -> None:
    """Raise ConfigError unless each head of the network `name` is a batch of logits (B, C, h, w) for the image."""
    for head, logits in heads.items():
        channels = 1 if head == BOUNDARY else num_classes
        expected = (image.shape[0], channels)
        shape = tuple(logits.shape)
        if len(shape) != 4 or shape[:2] != expected or not logits.is_floating_point():
            raise ConfigError(
                f"model.name = {name}: head {head} is {logits.dtype} {shape} for an image of "
                f"{tuple(image.shape)}, but float ({image.shape[0]}, {channels}, h, w) was needed: a batch of "
                f"logits for {channels} {'channel' if head == BOUNDARY else 'classes'}."
            )


class PluginNetwork(SegmentationNet):
    """Wraps `net`, whose forward takes a float image (B, 3, H, W) and returns logits of any stride.

    It may return a tensor, a list whose first tensor is the main head, or a mapping with `main` or `out`; all others
    are auxiliary heads, which only the loss uses. In eval mode there may be fewer of them. `net` may have the
    attribute `align_corners`, how its logits are upsampled (default False).
    The state dict has the keys of `net`, prefixed with "net.".
    """

    def __init__(self, net: nn.Module, num_classes: int, name: str) -> None:
        super().__init__()

        self.net, self.num_classes, self.name = net, num_classes, name
        self.align_corners = bool(getattr(net, "align_corners", False))
        # Weights files have the tensor names of `net`.
        self.published_keys = ((r"^net\.", ""),)
        # Empty: auxiliary heads are somewhere inside `net`.
        self.train_only = nn.ModuleDict()
        self._trained_heads: tuple[str, ...] = ()  # heads of the first training forward

    @cached_property
    def output_stride(self) -> int:  # type: ignore[override]
        """Image rows per row of logits, rounded; measured with an image of zeros.

        An attribute of `net` with this name is often the stride of an encoder.
        """
        device = next((tensor.device for tensor in self.parameters()), None)
        before = self.training
        with torch.no_grad():
            found = self.eval()(
                torch.zeros(1, 3, PROBE_SIZE, PROBE_SIZE, device=device)
            )
        self.train(before)
        return max(1, round(PROBE_SIZE / found.shape[-2]))

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits per head: "main" and, with `aux`, all others. Raises ConfigError for outputs that do not fit."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        heads = named_heads(self.net(image), self.name)
        if not traced:
            check_heads(heads, image, self.num_classes, self.name)
        if self.training and not traced:
            self._trained_heads = self._trained_heads or tuple(heads)
            if tuple(heads) != self._trained_heads:
                raise ConfigError(
                    f"model.name = {self.name}: its forward returned the heads {', '.join(heads)}, but before that "
                    f"{', '.join(self._trained_heads)}. In training mode it must return the same heads every time."
                )

        return heads if aux else {"main": heads["main"]}


class ShardGuard:
    """Detects state that the user's network or loss carries from one shard to the next.

    This means writes to a parameter or a buffer, new tensors in their place, and draws from the global generators of
    random and numpy, in the forward and backward of every shard. BatchNorm's statistics may be written to, but not
    replaced: shards average the original tensors. Another buffer may get another shape: it is a cache for the size of
    the image, such as a grid of coordinates. Only reads counters on the host, 1 ms per shard. Does nothing without
    user code.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        names = {"model.name": config.model.name, "loss.name": config.loss.name}
        own = [f"{key} = {name}" for key, name in names.items() if is_path(name)]
        self.names = ", ".join(own)
        compute = config.compute
        watches = bool(own) and compute.mode != "off" and not compute.compile
        self._model = model if watches else nn.Module()
        self._parameters = dict(self._model.named_parameters())
        self._averaged: set[str] = set()
        for prefix, module in self._model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                self._averaged |= {f"{prefix}.{name}".lstrip(".") for name in AVERAGED}

        # A tracker's threads may draw, too.
        self._draws = watches and config.track.name == "none"
        self.start()

    def start(self) -> None:
        """Call it when a shard begins."""
        self._before = self._now()
        # torch counts the writes to a tensor as its version.
        self._buffers = {
            name: (buffer, buffer._version)
            for name, buffer in self._model.named_buffers()
        }

    def check(self, step: int, shard: int) -> None:
        """Call it after the shard's backward. Raises ConfigError, which names the parameter, buffer or generator."""
        if found := self.found():
            raise ConfigError(f"{self.names}: in step {step}, shard {shard}, {found}")

    def found(self) -> str:
        """What changed since the start, and what to do; empty if nothing did."""
        now = self._now()
        changed = [what for what in now if now[what] != self._before[what]]
        changed += self._changed_buffers()
        if not changed:
            return ""

        return (
            f"its forward or backward {changed[0]}: shards would no longer add up to the same bits. Draw only from "
            f"torch's generator, do not write into parameters or buffers, and move statistics of BatchNorm by copy_."
        )

    def _changed_buffers(self) -> Iterator[str]:
        now = dict(self._model.named_buffers())
        for name, (old, version) in self._buffers.items():
            new = now.get(name)
            is_cache = new is not None and new.shape != old.shape
            if name in self._averaged:
                if new is not old:
                    yield f"replaces {name} by another tensor"
            elif not is_cache and (new is not old or old._version != version):
                yield f"changes {name}"

    def _now(self) -> dict[str, Any]:
        """Versions of the parameters, and states of the generators."""
        now: dict[str, Any] = {
            f"changes {name}": own._version for name, own in self._parameters.items()
        }
        if self._draws:
            drawn = "draws from the global generator of"
            now[f"{drawn} random"] = random.getstate()
            now[f"{drawn} numpy.random"] = pickle.dumps(np.random.get_state())
        return now


def named_heads(output: Any, name: str) -> dict[str, Tensor]:
    """Heads by name, "main" first, from the output of network `name`. Raises ConfigError for any other output."""
    if isinstance(output, Tensor):
        return {"main": output}

    heads: dict[str, Any] = {}
    if isinstance(output, list | tuple):
        names = ("main", *(f"aux{place}" for place in range(1, len(output))))
        heads = dict(zip(names, output, strict=False))
    elif isinstance(output, Mapping):
        main = next((key for key in MAIN if key in output), None)
        others = {str(key): head for key, head in output.items() if key != main}
        heads = {"main": output[main], **others} if main else {}

    tensors = all(isinstance(head, Tensor) for head in heads.values())
    if not (heads and tensors) or set(RESERVED) & heads.keys():
        found = f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            found += f" with {', '.join(f'{key} ({type(head).__name__})' for key, head in output.items())}"
        raise ConfigError(
            f"model.name = {name}: its forward returned {found}, but a tensor of logits, a list of tensors (the main "
            f"head first) or a mapping of tensors with main or out was needed, without {', '.join(RESERVED)}."
        )

    return heads
