"""The network in training: its heads as a forward, what BatchNorm keeps from pass to pass, and their precision."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from shutil import which
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segpipe.errors import ConfigError, first_line
from segpipe.ledger.digest import digest_many

if TYPE_CHECKING:
    from segpipe.settings.config import Config

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def autocast(device: torch.device, precision: str) -> Iterator[None]:
    """The context in which the network runs; the loss and all sums stay in fp32."""
    dtype = AUTOCAST.get(precision, torch.bfloat16)
    enabled = precision in AUTOCAST
    # Nothing is cached: a recorded graph must not read what an earlier pass has cast, and eager has the same sums.
    cast = torch.autocast(
        device.type, dtype=dtype, enabled=enabled, cache_enabled=False
    )
    with cast, tf32(precision):
        yield


@contextlib.contextmanager
def tf32(precision: str) -> Iterator[None]:
    """Convolutions and matrix products in TF32 where `precision` asks for it: forward, and again around a backward."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    if precision == "tf32":
        products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


class AllHeads(nn.Module):
    """The network's training heads as a forward, which is what DDP hooks into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        heads: dict[str, Tensor] = self.model.logits(image, aux=True)  # type: ignore[operator]
        return heads


class _Traced(AllHeads):
    """Heads that keep their last outputs, in the format in which BatchLoss takes them."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__(model)
        self.precision = precision

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        with autocast(image.device, self.precision):
            heads = super().forward(image)
        self.last = {
            name: logits.clone(memory_format=torch.contiguous_format)
            for name, logits in heads.items()
        }
        return self.last


class GraphedHeads(AllHeads):
    """Heads whose forward and backward are recorded at the first batch, as one CUDA graph each, and replayed.

    If a replay has other bits than AllHeads there, they are AllHeads, with a warning. All batches must have the shape
    of the first, and outputs are overwritten by the next forward.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__(model)
        self.precision = precision
        self._heads: Any = None

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        if self._heads is None:
            self._heads = self._replayed(image)
        return self._heads(image)  # type: ignore[no-any-return]

    def _replayed(self, image: Tensor) -> Any:
        """The callable that replays, if it may. What trial passes change is put back.

        Raises ConfigError where nothing can be recorded: torch leaves its generator and stream as in a recording.
        """
        eager = super().forward
        with torch.random.fork_rng([image.device] if image.is_cuda else []):
            found = self._trial(eager, image)
            try:
                replay = self._recorded(image)
            except (AssertionError, RuntimeError) as error:
                raise ConfigError(
                    f"compute.cuda_graph: this network cannot be recorded: {first_line(error)}. Set it to off."
                ) from error
            if self._trial(replay, image) == found:
                return replay
        warnings.warn(
            "compute.cuda_graph: a replay of this network had other bits, so its kernels start one by one.",
            stacklevel=2,
        )
        return eager

    def _recorded(self, image: Tensor) -> Any:
        traced = _Traced(self.model, self.precision)
        # True while recording, when no gradient is kept.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        # The backward is recorded as it runs otherwise: without autocast.
        with self._unchanged(), torch.autocast(image.device.type, enabled=False):
            replay = torch.cuda.make_graphed_callables(
                traced, (image.detach().clone(),), allow_unused_input=True
            )
        # torch keeps these for the replays, and their graph would keep the nodes that take the parameters' gradients on
        # the stream of the recording: a wait between streams per parameter and step, and hooks on that stream.
        for logits in traced.last.values():
            logits.detach_()
        return replay

    def _trial(self, heads: Any, image: Tensor) -> int:
        """Digest of logits, gradients and buffers of a pass from a fixed state of the random numbers."""
        torch.manual_seed(0)
        with self._unchanged():
            found = [each for each in heads(image).values() if each.requires_grad]
            given = [logits.detach().contiguous() for logits in found]
            with torch.autocast(image.device.type, enabled=False):
                grads = torch.autograd.grad(
                    found,
                    [p for p in self.model.parameters() if p.requires_grad],
                    given,
                    materialize_grads=True,
                )
            tensors = [*given, *grads, *self.model.buffers()]
            return int(digest_many(tensors))

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Puts back buffers that change inside. Writes into no other: ShardGuard would blame the user's code."""
        before = [(each, each.clone()) for each in self.model.buffers()]
        yield
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


# Seen to have eager's bits on a GPU.
RECORDED = ("fast_scnn", "ddrnet23_slim", "pidnet_s")


def training_heads(model: nn.Module, config: Config, device: torch.device) -> Any:
    """The heads as `compute.compile` and `compute.cuda_graph` want them. Raises ConfigError without a compiler."""
    compute = config.compute
    if compute.compile:
        # torch would say so in the first update, with a traceback.
        variable, compiler = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
        if not (os.environ.get(variable) or which(compiler)):
            raise ConfigError(
                f"compute.compile = true needs {compiler}, which is not installed, or {variable} as another compiler. "
                "Install it, or set compute.compile=false."
            )
        from torch._inductor import config as inductor

        # Without trials on the device, which choose kernels by their speed, ranks with equal hardware compile alike.
        inductor.deterministic = True
        return torch.compile(AllHeads(model), dynamic=False)
    wanted = {"on": True, "auto": config.model.name in RECORDED}
    fits = (device.type, compute.mode) == ("cuda", "elastic")
    if fits and wanted.get(compute.cuda_graph):
        return GraphedHeads(model, config.train.precision)
    return AllHeads(model)


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that have parameters, all of them frozen, and what is inside them."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        own = list(module.parameters())
        if own and not any(parameter.requires_grad for parameter in own):
            found |= dict.fromkeys(module.modules())
    return list(found)


def norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """BatchNorm layers that gather statistics, by name in module order: all but those in frozen parts."""
    frozen = set(frozen_modules(model))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in frozen
    }


def statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of `norms`, in module order."""
    layers = norms(model).values()
    found = [value for m in layers for value in (m.running_mean, m.running_var)]
    return [value for value in found if value is not None]


class Norms:
    """What the `norms` of a network have before a step: every shard starts from it."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(norms(model).values())
        self.statistics = statistics(model)
        # The passes of each layer, with which those without a momentum compute.
        self.counters = [
            layer.num_batches_tracked
            for layer in self._layers
            if layer.num_batches_tracked is not None
        ]
        self._groups = [
            (tensors, [torch.empty_like(value) for value in tensors])
            for tensors in (self.statistics, self.counters)
        ]

    def keep(self) -> None:
        for tensors, kept in self._groups:
            copy_all(kept, tensors)

    def put_back(self) -> None:
        for tensors, kept in self._groups:
            copy_all(tensors, kept)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, layers whose momentum is fixed count no passes: updates set the counters.

        A kernel for each layer and shard, 79 of PIDNet-S, would be undone.
        """
        hidden = {}
        for layer in self._layers:
            if type(layer) is nn.BatchNorm2d and layer.momentum is not None:
                hidden[layer] = layer._buffers["num_batches_tracked"]
                layer._buffers["num_batches_tracked"] = None
        try:
            yield
        finally:
            for layer, counter in hidden.items():
                layer._buffers["num_batches_tracked"] = counter


def copy_all(into: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value into its tensor, in one launch for all of a dtype."""
    if into:  # torch refuses empty lists
        torch._foreach_copy_(into, values)
