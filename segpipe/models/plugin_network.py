"""The user's own network behind the interface of ours, with its outputs checked at every forward."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
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
RESERVED = (
    "total",
    "dice",
    "edge",
    "lovasz",
    "teacher",
)  # names of other parts of the loss
BOUNDARY = (
    "boundary"  # a head of one channel, supervised by the borders between classes
)
AVERAGED = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)  # of BatchNorm; a subclass may have more
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
        # Files of weights name the tensors as `net` does.
        self.published_keys = ((r"^net\.", ""),)
        self.train_only = (
            nn.ModuleDict()
        )  # auxiliary heads are inside `net`, wherever it has them
        self._stride: int | None = getattr(net, "output_stride", None)
        self._trained_heads: tuple[str, ...] = ()  # of the first forward in training

    @property
    def output_stride(self) -> int:  # type: ignore[override]
        """Rows of the image for each row of logits, rounded; measured with an image of zeros if `net` has none."""
        if self._stride is None:
            device = next((tensor.device for tensor in self.parameters()), None)
            before = self.training
            with torch.no_grad():
                found = self.eval()(
                    torch.zeros(1, 3, PROBE_SIZE, PROBE_SIZE, device=device)
                )
            self.train(before)
            self._stride = max(1, round(PROBE_SIZE / found.shape[-2]))
        return self._stride

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits per head: "main" and, with `aux`, all others. Raises ConfigError for outputs that do not fit."""
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        checked = self.training and not traced
        before = (
            {
                name: (buffer, buffer._version)
                for name, buffer in plain_buffers(self.net)
            }
            if checked
            else {}
        )
        averaged = dict(norm_statistics(self.net)) if checked else {}
        heads = named_heads(self.net(image), self.name)
        if not traced:
            self._check(heads, image)
        if checked:
            self._check_names(heads)
            self._check_buffers(before)
            self._check_statistics(averaged)
        return heads if aux else {"main": heads["main"]}

    def _check(self, heads: Mapping[str, Tensor], image: Tensor) -> None:
        for name, logits in heads.items():
            channels = 1 if name == BOUNDARY else self.num_classes
            shape = tuple(logits.shape)
            if (
                len(shape) != 4
                or shape[:2] != (image.shape[0], channels)
                or not logits.is_floating_point()
            ):
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
        now = dict(plain_buffers(self.net))
        for name, (old, version) in before.items():
            new = now.get(name)
            replaced = new is not old and (new is None or new.shape == old.shape)
            if replaced or old._version != version:
                raise ConfigError(
                    f"model.name = {self.name}: its forward changes the buffer {name}, which is no statistic of a "
                    f"BatchNorm: shards would no longer add up to the same bits. Keep such state out of the forward."
                )

    def _check_statistics(self, before: Mapping[str, Tensor]) -> None:
        """Refuse another tensor in the place of a statistic: what the shards average would not be the network's."""
        now = dict(norm_statistics(self.net))
        if moved := [
            name for name, tensor in before.items() if now.get(name) is not tensor
        ]:
            raise ConfigError(
                f"model.name = {self.name}: its forward puts another tensor in the place of {moved[0]}, but shards "
                f"average the tensor that was there. Write into it: {moved[0].rpartition('.')[2]}.copy_(...)."
            )


def norm_statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Statistics and counters of BatchNorm, which are averaged over the shards, or set by the update."""
    for name, buffer, averaged in _buffers(model):
        if averaged:
            yield name, buffer


def plain_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that nothing averages over the shards: all others."""
    for name, buffer, averaged in _buffers(model):
        if not averaged:
            yield name, buffer


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    for prefix, module in model.named_modules():
        averages = isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, buffer in module.named_buffers(prefix, recurse=False):
            yield name, buffer, averages and name.rpartition(".")[2] in AVERAGED


class ShardGuard:
    """Refuses what the user's network or loss leaves to the next shard, in the forward and backward of every shard.

    That is a write into a parameter or a buffer that is no BatchNorm's, and a draw from the global generators of random
    and numpy. Reads counters of the host alone, 0.1 ms per shard. Does nothing without code of the user.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        names = {"model.name": config.model.name, "loss.name": config.loss.name}
        self._names = ", ".join(
            f"{key} = {name}" for key, name in names.items() if is_path(name)
        )
        watches = (
            bool(self._names)
            and config.compute.mode != "off"
            and not config.compute.compile
        )
        buffers = (
            {} if config.compute.cuda_graph else dict(plain_buffers(model))
        )  # its recording puts them back
        self._tensors: dict[str, Tensor] = (
            {**dict(model.named_parameters()), **buffers} if watches else {}
        )
        self._draws = (
            watches and config.track.name == "none"
        )  # threads of a tracker may draw
        self._before = self._now()

    def start(self) -> None:
        """A shard begins."""
        self._before = self._now()

    def check(self, step: int, shard: int) -> None:
        """The shard's backward is done. Raises ConfigError that names the parameter, buffer or generator."""
        if found := self.found():
            raise ConfigError(f"{self._names}: in step {step}, shard {shard}, {found}")

    def found(self) -> str:
        """What changed since the start, and what to do; empty if nothing did."""
        now = self._now()
        if now == self._before:
            return ""
        moved = [
            name
            for name, *pair in zip(self._tensors, self._before[0], now[0], strict=True)
            if pair[0] != pair[1]
        ]
        pairs = zip(("random", "numpy.random"), self._before[1], now[1], strict=False)
        drawn = [name for name, one, two in pairs if one != two]
        found = (
            f"changes {moved[0]}"
            if moved
            else f"draws from the global generator of {drawn[0]}"
        )
        return (
            f"its forward or backward {found}: shards would no longer add up to the same bits. Draw from torch's "
            f"generator alone, and write into no parameter or buffer."
        )

    def _now(self) -> tuple[list[int], list[bytes]]:
        """Versions of the tensors, which every write into them counts, and states of the generators."""
        states = (
            (random.getstate(), np.random.get_state(legacy=False))
            if self._draws
            else ()
        )
        return [tensor._version for tensor in self._tensors.values()], [
            pickle.dumps(state) for state in states
        ]


def named_heads(output: Any, name: str) -> dict[str, Tensor]:
    """Heads by name, "main" first, of what the forward of network `name` returned. Raises ConfigError for the rest."""
    if isinstance(output, Tensor):
        return {"main": output}
    heads: dict[str, Any] = {}
    if isinstance(output, list | tuple) and output:
        heads = {
            f"aux{place}" if place else "main": head
            for place, head in enumerate(output)
        }
    elif isinstance(output, Mapping) and (
        main := next((key for key in MAIN if key in output), None)
    ):
        heads = {
            "main": output[main],
            **{str(key): head for key, head in output.items() if key != main},
        }
    wrong = [
        key
        for key, head in heads.items()
        if not isinstance(head, Tensor) or key in RESERVED
    ]
    if not heads or wrong:
        found = f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            found += f" with {', '.join(f'{key} ({type(head).__name__})' for key, head in output.items())}"
        raise ConfigError(
            f"model.name = {name}: its forward returned {found}, but a tensor of logits, a list of tensors (the main "
            f"head first) or a mapping of tensors with main or out was needed, without {', '.join(RESERVED)}."
        )
    return heads
