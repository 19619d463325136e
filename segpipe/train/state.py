"""Everything that a training run changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from segpipe.errors import ConfigError
from segpipe.keys import torch_seed
from segpipe.models import build_model
from segpipe.models.layers import SegmentationNet
from segpipe.train.optim import Ema, build_optimizer

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable
    from segpipe.settings.config import Config


@dataclass
class TrainState:
    """Network, its average, optimizer and loss scale after `step` updates."""

    model: SegmentationNet
    ema: Ema
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # does nothing unless train.precision is fp16
    step: int = 0  # updates done
    best_miou: float = -1.0
    stale: int = 0  # validations since the one with best_miou


def build_state(config: Config, classes: ClassTable, device: torch.device) -> TrainState:
    """A fresh state; its weights are a function of the seed and the network alone."""
    torch.manual_seed(torch_seed(config.seed, 0, 0, "weights"))
    model = build_model(config.model.name, classes.num_classes).to(device)
    if config.model.norm == "sync":
        model = _with_sync_batchnorm(model, device)
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, config.optim)
    scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
    return TrainState(model, Ema(model, config.ema), optimizer, scaler)


def _with_sync_batchnorm(model: SegmentationNet, device: torch.device) -> SegmentationNet:
    """The network with statistics over all ranks. Parameter names stay, so checkpoints fit both."""
    if device.type != "cuda":
        raise ConfigError("model.norm = sync, but torch has SyncBatchNorm for GPUs only. Set model.norm=batch.")
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    assert isinstance(converted, SegmentationNet)
    return converted
