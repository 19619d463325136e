"""Everything that a training run changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from segpipe.errors import ConfigError
from segpipe.keys import torch_seed
from segpipe.models import build_model
from segpipe.models.layers import SegmentationNet
from segpipe.models.weights import WeightsSource, fit, sha256_of
from segpipe.train.optim import Ema, build_optimizer, describe_rates, freeze

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
    weights: dict[str, Any] | None = (
        None  # content of weights.json, if a file of weights was read
    )
    notes: tuple[str, ...] = ()  # what a person should know about its start
    stale: int = 0  # validations since the one with best_miou
    teacher: SegmentationNet | None = None  # of loss.teacher; never changes


def build_state(
    config: Config,
    classes: ClassTable,
    device: torch.device,
    start: WeightsSource | None = None,
) -> TrainState:
    """A fresh state; its weights are a function of the seed, the network and the file of `model.weights` alone.

    Without `start` the file is not read: for a state that a checkpoint is restored into. Raises ConfigError for
    patterns of model.freeze and optim.lr_scale that match nothing, and WeightsError for weights that do not fit.
    """
    torch.manual_seed(torch_seed(config.seed, 0, 0, "weights"))
    model = build_model(config.model.name, classes.num_classes, config.model.args)
    record, notes = _load(model, config, classes, start) if start else (None, [])
    model = model.to(device)
    if config.model.norm == "sync":
        model = _with_sync_batchnorm(model, device)
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    notes.append(freeze(model, config.model.freeze))
    scales = config.train.precision == "fp16"
    optimizer = build_optimizer(
        model, config.optim, fused=scales and device.type == "cuda"
    )
    notes.append(describe_rates(optimizer))
    scaler = torch.amp.GradScaler(device.type, enabled=scales)
    known = tuple(note for note in notes if note)
    return TrainState(
        model, Ema(model, config.ema), optimizer, scaler, weights=record, notes=known
    )


def _load(
    model: SegmentationNet, config: Config, classes: ClassTable, start: WeightsSource
) -> tuple[dict[str, Any] | None, list[str]]:
    """Put the weights of the file into the network; content of weights.json, and notes."""
    partial = config.model.weights_partial
    if not start.tensors:
        path, tensors = model.pretrained()
        start, partial = WeightsSource(tensors, path, sha256=sha256_of(tensors)), True
    if not start.tensors:
        return None, []
    found = fit(model, start, num_classes=classes.num_classes, partial=partial)
    notes = [f"weights of {start.where}, SHA-256 {start.sha256[:16]}: {found.summary}"]
    if start.class_names and not found.classes and start.class_names != classes.names:
        notes.append(
            f"the class layers of {start.path} were kept, but its classes are {', '.join(start.class_names)}, those of "
            f"the data set {', '.join(classes.names)}"
        )
    return found.record(start), notes


def _with_sync_batchnorm(
    model: SegmentationNet, device: torch.device
) -> SegmentationNet:
    """The network with statistics over all ranks. Parameter names stay, so checkpoints fit both."""
    if device.type != "cuda":
        raise ConfigError(
            "model.norm = sync, but torch has SyncBatchNorm for GPUs only. Set model.norm=batch."
        )
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    assert isinstance(converted, SegmentationNet)
    return converted
