"""Everything that a training run changes, and how it is kept and brought back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segpipe.data.catalog import ClassTable
from segpipe.errors import CheckpointError, ConfigError
from segpipe.keys import sample_key
from segpipe.models import build_model
from segpipe.models.layers import SegmentationNet
from segpipe.settings.config import Config, from_mapping, recipe, to_mapping
from segpipe.train import checkpoint
from segpipe.train.optim import Ema, build_optimizer


@dataclass
class TrainState:
    """The network, its average, the optimizer, the loss scale, and how far they are."""

    model: SegmentationNet
    ema: Ema
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # does nothing unless train.precision is fp16
    step: int = 0  # updates done
    best_miou: float = -1.0


def seed_torch(seed: int, epoch: int, index: int, stream: str) -> None:
    """Set torch's generators from a key, so that what is drawn next depends on nothing that ran before."""
    torch.manual_seed(sample_key(seed, epoch, index, stream) & (2**63 - 1))


def build_state(config: Config, classes: ClassTable, device: torch.device) -> TrainState:
    """A fresh state; its weights are a function of the seed and the network alone."""
    seed_torch(config.seed, 0, 0, "weights")
    model = build_model(config.model.name, classes.num_classes).to(device)
    if config.model.norm == "sync":
        model = _synchronised(model, device)
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, config.optim)
    scaler = torch.amp.GradScaler(device.type, enabled=config.train.precision == "fp16")
    return TrainState(model, Ema(model, config.ema), optimizer, scaler)


def _synchronised(model: SegmentationNet, device: torch.device) -> SegmentationNet:
    """The network with statistics over all ranks. Its weights keep their names, so any checkpoint fits both."""
    if device.type != "cuda":
        raise ConfigError("model.norm = sync, but torch has SyncBatchNorm for GPUs only. Set model.norm=batch.")
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    assert isinstance(converted, SegmentationNet)
    return converted


def save(path: Path, state: TrainState, config: Config, classes: ClassTable, fingerprint: dict[str, Any]) -> None:
    """Write the state as a checkpoint, with what its bits depend on. Raises CheckpointError when the disk is full."""
    checkpoint.save(
        path,
        {
            "step": state.step,
            "config": to_mapping(config),
            "classes": asdict(classes),
            "fingerprint": fingerprint,
            "model": _on_cpu(state.model),
            "ema": _on_cpu(state.ema.model),
            "optimizer": state.optimizer.state_dict(),
            "scaler": state.scaler.state_dict(),
            "best_miou": state.best_miou,
        },
        listed=True,
    )


def _on_cpu(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu() for name, value in model.state_dict().items()}


def restore(path: Path, state: TrainState, config: Config, classes: ClassTable, fingerprint: dict[str, Any]) -> None:
    """Bring a checkpoint back into `state`.

    Raises CheckpointError when it cannot be read, was trained with another recipe, or on versions or hardware with
    which the bits may be others; names what differs.
    """
    saved = checkpoint.load(path)
    _same_recipe(path, saved["config"], config)
    if config.compute.mode != "off" and not config.run.allow_fingerprint_change:
        _same_environment(path, saved["fingerprint"], fingerprint)
    for part in ("names", "train_ids"):
        before, now = saved["classes"][part], asdict(classes)[part]
        if before != now:
            raise CheckpointError(f"{path} was trained with the class {part} {before}, the data set has {now}.")
    checkpoint.load_weights(state.model, saved["model"], path)
    checkpoint.load_weights(state.ema.model, saved["ema"], path)
    state.optimizer.load_state_dict(saved["optimizer"])
    state.scaler.load_state_dict(saved["scaler"])
    state.step, state.best_miou = int(saved["step"]), float(saved["best_miou"])


def _same_recipe(path: Path, saved: dict[str, Any], config: Config) -> None:
    before, now = recipe(from_mapping(saved)), recipe(config)
    changed = [f"{name}: {before[name]} -> {now[name]}" for name in now if before[name] != now[name]]
    if changed:
        raise CheckpointError(
            f"{path} was trained with another recipe ({'; '.join(changed[:5])}). Give the same settings to resume, "
            f"or start another run with another run.name."
        )


def _same_environment(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    names = [*before, *(name for name in now if name not in before)]
    changed = [f"{name}: {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]
    if changed:
        raise CheckpointError(
            f"{path} was trained where other bits may come out ({'; '.join(changed)}). Resume where it was trained, "
            f"or set run.allow_fingerprint_change=true and give up the promise of equal bits for this run."
        )
