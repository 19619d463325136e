"""What a host waits for in an update on a GPU, found without one: torch's fake tensors of CUDA, and no kernels.

Fake tensors of CUDA replace torch's guard of its devices for good, after which a real backward crashes: another process
runs the updates.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranks import launched
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.distributed.group import Group
from segpipe.settings.config import from_mapping
from segpipe.train.recorder import Watch
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep, train_step

GPU = torch.device("cuda", 0)
LOSSES = ("ohem", "cross_entropy")
READ = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal")
KEPT: list[
    TrainStep
] = []  # torch crashes where fake gradients are freed before the end
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None,
    reason="there is a GPU, which gpu-check asks, or no triton",
)


class Waits(TorchDispatchMode):
    """Ops for which the host waits: reads of a device, and copies between host and device that do not say otherwise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        kinds = {
            leaf.device.type
            for leaf in tree_leaves((args, kwargs, out))
            if isinstance(leaf, Tensor)
        }
        blocks = not (kwargs.get("non_blocking") or any(arg is True for arg in args))
        copies = name in ("_to_copy", "copy_") and len(kinds) > 1 and blocks
        if copies or (name in READ and "cuda" in kinds):
            stack = reversed(traceback.extract_stack()[:-1])
            lines = (f"{frame.filename}:{frame.lineno}" for frame in stack)
            ours = (
                line
                for line in lines
                if ("/segpipe/" in line and "site-packages" not in line)
                or line.startswith(__file__)
            )
            self.found.append(f"{name} at {next(ours)}")
        return out


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, launches and the backward of a GPU do nothing; gradients are zeros."""
    from triton.runtime.jit import JITFunction

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda chosen: contextlib.nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, chosen: None)
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: 0)
    monkeypatch.setattr(
        nn.Module, "to", lambda module, *args, **kwargs: module
    )  # its swap takes no fake tensors
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: None)
    monkeypatch.setattr("segpipe.native.triton_builds", lambda: True)
    monkeypatch.setattr("segpipe.train.step.valid_pixels", lambda target: 1)
    monkeypatch.setattr(torch.autocast, "__init__", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.autocast, "__enter__", lambda chosen: chosen)
    monkeypatch.setattr(torch.autocast, "__exit__", lambda *args: None)


def waits_of_an_update(monkeypatch: pytest.MonkeyPatch, loss: str) -> list[str]:
    """With Dice, edges, clipping, the sum over ranks and the watch for bad numbers; last the control, a number."""
    without_kernels(monkeypatch)
    settings = from_mapping(
        {
            "model": {"name": "pidnet_s"},
            "loss": {"name": loss, "dice_weight": 0.5, "label_smoothing": 0.1},
            "optim": {"name": "sgd", "clip_norm": 1.0},
            "compute": {"shards": 1, "samples_per_shard": 2, "cuda_graph": "off"},
        }
    )
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(GPU):
        state = build_state(settings, STREET, GPU)

        def backward(loss: Tensor) -> None:
            for parameter in state.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

        monkeypatch.setattr(Tensor, "backward", backward)
        step = TrainStep(settings, Watch(Group(0, 1, GPU), state))
        with torch.device("cpu"):
            image, ids = (
                torch.zeros(2, 64, 64, 3, dtype=torch.uint8),
                torch.zeros(2, dtype=torch.int64),
            )
            batch = ShardBatch(0, 0, image, image[..., 0], ids, ids)
            train_step(
                step, [batch], wait=False
            )  # keeps what it copies: the axes of every resize
            with Waits() as waits:
                assert train_step(step, [batch], wait=False) is not None
                torch.tensor(1.0, device=GPU)
    KEPT.append(step)
    return waits.found


def _waits(rank: int) -> list[str]:
    """Of an update with each loss."""
    warnings.simplefilter("ignore")
    found: list[str] = []
    for loss in LOSSES:
        with pytest.MonkeyPatch.context() as patched:
            found += waits_of_an_update(patched, loss)
    return found


def test_the_host_waits_for_nothing_in_an_update() -> None:
    (lines,) = launched(1, _waits)
    controls = [line.partition(" at ")[0] for line in lines if "test_waits.py" in line]
    assert controls == ["_to_copy"] * len(LOSSES), (
        "a number that is copied to the GPU was not seen"
    )
    assert len(lines) == len(LOSSES), lines
