"""What a run is about to do, in a few lines at its start."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from segpipe.data.samples import sequences
from segpipe.train.scores import flattering

if TYPE_CHECKING:
    from torch import nn

    from segpipe.data.samples import Samples
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config


def header(config: Config, group: Group, train: Samples, val: Samples, model: nn.Module) -> str:
    """Four lines on network, data, batch and hardware, and a warning when validation sees sequences of training."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    height, width = config.augment.crop_size
    compute, steps = config.compute, config.train.steps
    epochs = steps * config.global_batch / len(train)
    held_out = f" (sequence {config.data.hold_out})" if config.data.hold_out else ""
    lines = [
        f"model   {config.model.name}, {parameters:,} parameters{f', {frozen:,} of them frozen' if frozen else ''}, "
        f"{val.classes.num_classes} classes",
        f"data    {val.classes.name}: {len(train)} training images, crop {height}x{width}; {len(val)} validation images"
        f"{held_out}",
        f"batch   {config.global_batch} = {_count(compute.shards, 'shard')} x {compute.samples_per_shard} samples; "
        f"{_count(steps, 'step')}, {epochs:.1f} epochs; {config.train.precision}",
        f"device  {_device(group.device)}, {_count(group.world_size, 'process')} with "
        f"{_count(compute.threads, 'thread')}; mode {compute.mode}",
    ]
    warning = flattering(_validated(config, train, val))
    return "\n".join([*lines, warning] if warning else lines)


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _device(device: torch.device) -> str:
    return f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def _validated(config: Config, train: Samples, val: Samples) -> dict[str, dict[str, int | bool]]:
    seen, counts = set(sequences(train, config.data.sequence)), Counter(sequences(val, config.data.sequence))
    if len(counts) == len(val):  # the names tell nothing
        return {}
    return {name: {"images": images, "in_training": name in seen} for name, images in sorted(counts.items())}
