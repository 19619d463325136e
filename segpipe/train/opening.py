"""What happens before the first update: the run's state, its disk space, and its header."""

import math
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from segpipe.data.catalog import ClassTable
from segpipe.data.data_set import Samples
from segpipe.determinism import flags
from segpipe.distributed.agreement import common_fingerprint
from segpipe.distributed.group import Group
from segpipe.errors import CheckpointError
from segpipe.losses.total import backend
from segpipe.settings.config import Config
from segpipe.train import checkpoint
from segpipe.train.state import TrainState, build_state

MIB = 2**20


def state_of(
    config: Config, group: Group, classes: ClassTable, found: checkpoint.Found | None
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """The state, new or from the checkpoint; the fingerprint of rank 0; warnings."""
    apply = partial(flags.apply, config.compute.threads, config.compute.mode)
    apply()  # plug-in modules may have changed the switches on import
    state = build_state(
        config, classes, group.device, None if found else checkpoint.read_start(config)
    )
    if config.loss.teacher:
        state.teacher = checkpoint.read_teacher(config).model.to(group.device)
    apply()  # and so may the network
    fingerprint, rank_differences = common_fingerprint(
        config, group, backend(config.loss, group.device.type)
    )
    if found:
        checkpoint.restore(found, state, config, classes, fingerprint)
        if found.note and group.is_main:
            print(found.note, file=sys.stderr)  # also without train.progress
    warnings = []
    if group.device.type == "cuda" and config.train.precision == "fp32":
        warnings.append(
            "train.precision = fp32 runs without TF32, at an estimated third of the speed of train.precision=bf16. "
            "tf32 lies in between, with equal bits on GPUs of one kind."
        )
    instructions = fingerprint["instructions"]
    bf16_on_cpu = group.device.type == "cpu" and config.train.precision == "bf16"
    if bf16_on_cpu and instructions is not None and "bf16" not in instructions:
        warnings.append(
            "train.precision = bf16, but this CPU has no bf16 instructions: an update takes 12 to 16 times as long as "
            "with train.precision=fp32."
        )
    if rank_differences and config.compute.mode != "off":
        warnings.append(
            f"ranks differ, so another number of processes may give different bits: {'; '.join(rank_differences[:4])}"
        )
    return state, fingerprint, warnings


def header(
    config: Config, group: Group, train: Samples, val: Samples, model: nn.Module
) -> str:
    """Four lines on network, data, batch and hardware."""
    parameters = list(model.parameters())
    frozen = _elements(p for p in parameters if not p.requires_grad)

    height, width = config.augment.crop_size
    compute, steps = config.compute, config.train.steps
    epochs = steps * config.global_batch / len(train)
    held_out = f" (sequence {config.data.hold_out})" if config.data.hold_out else ""
    split = config.data.train_split
    of = "" if split == "train" else f" of {split}"

    device = group.device.type
    if device == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(group.device)})"
    compiled = ", compiled (minutes before the first update)" if compute.compile else ""

    return (
        f"model   {config.model.name}, {_elements(parameters):,} parameters, {frozen:,} of them frozen, "
        f"{val.classes.num_classes} classes\n"
        f"data    {val.classes.name}: {len(train)} training images{of}, crop {height}x{width}; "
        f"{len(val)} validation images{held_out}\n"
        f"batch   {config.global_batch} = {compute.shards} shards x {compute.samples_per_shard} samples; {steps} steps,"
        f" {epochs:.1f} epochs; {config.train.precision}\n"
        f"device  {device}; processes {group.world_size}, threads per process {compute.threads}; mode {compute.mode}"
        f"{compiled}"
    )


def check_space(config: Config, state: TrainState, group: Group) -> None:
    """Raise CheckpointError on rank 0 when the run's disk has too little space for its checkpoints."""
    if not group.is_main:
        return

    weights = 4 * _elements(state.model.state_dict().values())
    trained = 4 * _elements(p for p in state.model.parameters() if p.requires_grad)
    moments = 2 if config.optim.name == "adamw" else 1
    one = 2 * weights + moments * trained  # weights and their average

    # At the same time: last, best, the one being written, and those that are kept.
    every, last = config.checkpoint.keep_every, config.checkpoint.keep_last
    kept = (config.train.steps - state.step - 1) // every if every else 0
    files = 3 + (min(kept, last) if last else kept)
    paths = (config.run_dir / "last.pt", config.run_dir / "best.pt")
    needed = files * one - sum(path.stat().st_size for path in paths if path.is_file())

    folder = config.run_dir.absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if needed > (free := shutil.disk_usage(nearest).free):
        fewer = ", or keep fewer checkpoints: checkpoint.keep_last" * (files > 3)
        raise CheckpointError(
            f"{config.run_dir} will need {math.ceil(needed / MIB)} MiB ({files} checkpoints of {one / MIB:.0f} MiB), "
            f"but its disk has {free // MIB:.0f} MiB free. Free some space or choose another run.root{fewer}."
        )


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
