"""The network in training: its heads as a forward, BatchNorm's state between passes, and the precision."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from shutil import which
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from segpipe.distributed.health import is_out_of_memory
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
    # No cache: a recorded graph must not read what an earlier pass cast. Eager does the same, for the same sums.
    cast = torch.autocast(
        device.type, dtype=dtype, enabled=enabled, cache_enabled=False
    )
    with cast, tf32(precision):
        yield


@contextlib.contextmanager
def tf32(precision: str) -> Iterator[None]:
    """Runs convolutions and matrix products in TF32 if `precision` is tf32; wrap forward and backward separately."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    if precision == "tf32":
        products.allow_tf32 = convolutions.allow_tf32 = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


class AllHeads(nn.Module):
    """The network's training heads as a forward method, which DDP hooks into."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        heads: dict[str, Tensor] = self.model.logits(image, aux=True)  # type: ignore[operator]
        return heads


class _Traced(nn.Module):
    """Heads that keep their last outputs, in the memory format that BatchLoss uses."""

    def __init__(self, heads: nn.Module, precision: str) -> None:
        super().__init__()
        self.heads = heads
        self.precision = precision

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        with autocast(image.device, self.precision):
            heads = self.heads(image)
        self.last = {
            name: logits.clone(memory_format=torch.contiguous_format)
            for name, logits in heads.items()
        }
        return self.last


class GraphedHeads(nn.Module):
    """Heads whose forward and backward are each recorded as a CUDA graph at the first batch, then replayed.

    If a replay of the first batch has other bits than `heads`, eager or compiled, this warns and runs those. All
    batches must have the shape of the first, and the next forward overwrites the outputs.
    """

    def __init__(self, heads: nn.Module, precision: str) -> None:
        super().__init__()
        self.heads = heads
        self.precision = precision
        self._replay: Any = None

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        if self._replay is None:
            self._replay = self._replayed(image)
        return self._replay(image)  # type: ignore[no-any-return]

    def _replayed(self, image: Tensor) -> Any:
        """The callable that replays, or `heads` if bits differ. Undoes what the trial passes change.

        Raises ConfigError if recording fails: torch then leaves its generator and stream in recording state.
        """
        with torch.random.fork_rng([image.device] if image.is_cuda else []):
            found = self._trial(self.heads, image)
            try:
                replay = self._recorded(image)
            except (AssertionError, RuntimeError) as error:
                # torch ends a capture that broke, which raises a second error.
                cause = ("previous error" in str(error) and error.__context__) or error
                if is_out_of_memory(cause):
                    raise cause from None
                raise ConfigError(
                    f"compute.cuda_graph: this network cannot be recorded: {first_line(cause)}. Set it to off."
                ) from error
            if self._trial(replay, image) == found:
                return replay
        warnings.warn(
            "compute.cuda_graph: a replay of this network gave different bits, so its kernels are launched one by one.",
            stacklevel=2,
        )
        return self.heads

    def _recorded(self, image: Tensor) -> Any:
        traced = _Traced(self.heads, self.precision)
        # The warning is right, but no gradient is kept while recording.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")
        # The backward is recorded as it runs elsewhere: without autocast.
        with self._unchanged(), torch.autocast(image.device.type, enabled=False):
            # Not of the pixels with which the replay is then compared.
            other = image.detach().flip(-1)
            replay = torch.cuda.make_graphed_callables(
                traced, (other,), allow_unused_input=True
            )
        # torch keeps these tensors for replays. Their autograd graph would keep the AccumulateGrad nodes on the
        # recording's stream: a wait between streams per parameter and step, and hooks on that stream.
        for logits in traced.last.values():
            logits.detach_()
        return replay

    def _trial(self, heads: Any, image: Tensor) -> int:
        """Digest of the logits, gradients and buffers of a pass with a fixed random seed."""
        torch.manual_seed(0)
        with self._unchanged():
            # A replay also has a gradient for the logits of a frozen head, and drops it.
            found = list(heads(image).values())
            trained = [logits for logits in found if logits.requires_grad]
            with torch.autocast(image.device.type, enabled=False):
                grads = torch.autograd.grad(
                    trained,
                    [p for p in self.heads.parameters() if p.requires_grad],
                    [logits.detach().contiguous() for logits in trained],
                    materialize_grads=True,
                )
            given = [logits.detach().contiguous() for logits in found]
            return int(digest_many([*given, *grads, *self.heads.buffers()]))

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Restores buffers that change inside. Writes to no others: ShardGuard would blame the user's code."""
        before = [(each, each.clone()) for each in self.heads.buffers()]
        yield
        for buffer, value in before:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


# Networks whose replay was checked on a GPU to have the bits of eager mode.
RECORDED = (
    "fast_scnn", "ddrnet23_slim", "ddrnet23", "ddrnet39", "pidnet_s", "pidnet_m", "pidnet_l", "erfnet", "dabnet",
    "regseg", "regseg_exp53", "bisenetv2", "stdc1", "stdc2", "efficientvit_seg_b0",
)  # fmt: skip


def training_heads(model: nn.Module, config: Config, device: torch.device) -> Any:
    """The heads that `compute.compile` and `compute.cuda_graph` select.

    Raises ConfigError when compute.compile lacks a compiler.
    """
    compute = config.compute
    heads: Any = AllHeads(model)
    if compute.compile:
        # torch would only say so in the first update, with a traceback.
        variable, compiler = ("CC", "gcc") if device.type == "cuda" else ("CXX", "g++")
        if not (os.environ.get(variable) or which(compiler)):
            raise ConfigError(
                f"compute.compile = true needs {compiler}, which is not installed, or another compiler in {variable}. "
                "Install it, or set compute.compile=false."
            )
        from torch._inductor import config as inductor

        # Without autotuning, which picks kernels by measured speed, ranks with equal hardware compile the same code.
        inductor.deterministic = True
        heads = torch.compile(heads, dynamic=False)
    wanted = {"on": True, "auto": config.model.name in RECORDED}
    fits = (device.type, compute.mode) == ("cuda", "elastic")
    if fits and wanted.get(compute.cuda_graph):
        return GraphedHeads(heads, config.train.precision)
    return heads


def frozen_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that have parameters, all of them frozen, and their submodules."""
    found: dict[nn.Module, None] = {}
    for module in model.modules():
        own = list(module.parameters())
        if own and not any(parameter.requires_grad for parameter in own):
            found |= dict.fromkeys(module.modules())
    return list(found)


def norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """BatchNorm layers that update statistics, by name in module order: all except those in frozen parts."""
    frozen = set(frozen_modules(model))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module not in frozen
    }


def statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of `norms`, in module order."""
    return [
        value
        for layer in norms(model).values()
        for value in (layer.running_mean, layer.running_var)
        if value is not None
    ]


class Norms:
    """State of a network's `norms` before a step; every shard starts from it."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = list(norms(model).values())
        self.statistics = statistics(model)
        # Number of passes of each layer; layers without a momentum compute with it.
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
        """Inside the block, layers with a fixed momentum do not count passes; `TrainStep.apply` sets the counters.

        Counting would launch a kernel per layer and shard, 79 for PIDNet-S, only for `put_back` to undo it.
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
    """Copy each value into its tensor, with one launch per dtype."""
    if into:  # torch rejects empty lists
        torch._foreach_copy_(into, values)
