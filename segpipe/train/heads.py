"""The network's training heads as a forward: as they are, compiled, or as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segpipe.errors import ConfigError

if TYPE_CHECKING:
    from segpipe.settings.groups import ComputeConfig


class AllHeads(nn.Module):
    """The network's training heads as a forward, which is what DDP hooks into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        heads: dict[str, Tensor] = self.model.logits(image, aux=True)  # type: ignore[operator]
        return heads


class _Traced(AllHeads):
    """Heads that keep their last outputs."""

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        self.last = super().forward(image)
        return self.last


class GraphedHeads(AllHeads):
    """Heads whose forward and backward are recorded at the first batch, as one CUDA graph each, and replayed.

    A replay starts the kernels that were recorded, so its bits should be those of AllHeads; gpu-check compares them.
    All batches must have the shape of the first, and outputs are overwritten by the next forward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._replay: Any = None

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        if self._replay is None:
            self._replay = self._recorded(image)
        heads: dict[str, Tensor] = self._replay(image)
        return heads

    def _recorded(self, image: Tensor) -> Any:
        """The callable that replays. Trial passes precede the recording; what they change is put back."""
        kind = image.device.type
        before = [buffer.clone() for buffer in self.model.buffers()]
        random = torch.random.fork_rng([image.device] if kind == "cuda" else [])
        # Weights that were cast for an earlier pass must not be read in a replay, so nothing is cached.
        amp = torch.autocast(
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
            cache_enabled=False,
        )
        traced = _Traced(self.model)
        with random, amp:
            replay = torch.cuda.make_graphed_callables(
                traced, (image.detach().clone(),), allow_unused_input=True
            )
        # torch keeps these for the replays, and their graph would keep the nodes that take the parameters' gradients on
        # the stream of the recording: a wait between streams per parameter and step, and hooks on that stream.
        for logits in traced.last.values():
            if not logits._is_view():  # torch refuses those
                logits.detach_()
        for buffer, value in zip(self.model.buffers(), before, strict=True):
            buffer.copy_(value)
        return replay


def training_heads(
    model: nn.Module, compute: ComputeConfig, device: torch.device
) -> Any:
    """The heads as `compute.compile` and `compute.cuda_graph` want them. Raises ConfigError without a GPU."""
    if compute.compile:
        return _compiled(model)
    if not compute.cuda_graph:
        return AllHeads(model)
    if device.type != "cuda":
        raise ConfigError(
            "compute.cuda_graph = true, but training runs on a CPU. Set compute.cuda_graph=false."
        )
    return GraphedHeads(model)


def _compiled(model: nn.Module) -> Any:
    """The heads by torch.compile, without the trials on the device that would choose kernels by their speed.

    So ranks with equal hardware and versions compile alike, and one shape is compiled once.
    """
    from torch._inductor import config

    config.deterministic = True
    return torch.compile(AllHeads(model), dynamic=False)
