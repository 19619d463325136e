"""What a run says before its first step, and the content of result.json at its end."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from segpipe import __version__
from segpipe.data.samples import sequences
from segpipe.determinism import flags
from segpipe.errors import CheckpointError
from segpipe.ledger.digest import state_digest
from segpipe.settings.config import config_hash
from segpipe.train.scores import scores
from segpipe.train.start import weights_summary

if TYPE_CHECKING:
    from torch import Tensor, nn

    from segpipe.data.data_set import Samples
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config
    from segpipe.train.state import TrainState
    from segpipe.train.training import Run
    from segpipe.train.validate import Validation

MIB = 2**20
EXPORTED = 3  # sizes of the averaged weights that an exported folder has, about


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

    device = group.device.type
    if device == "cuda":
        device = f"cuda ({torch.cuda.get_device_name(group.device)})"

    return (
        f"model   {config.model.name}, {_elements(parameters):,} parameters, {frozen:,} of them frozen, "
        f"{val.classes.num_classes} classes\n"
        f"data    {val.classes.name}: {len(train)} training images, crop {height}x{width}; {len(val)} validation images"
        f"{held_out}\n"
        f"batch   {config.global_batch} = {compute.shards} shards x {compute.samples_per_shard} samples; {steps} steps,"
        f" {epochs:.1f} epochs; {config.train.precision}\n"
        f"device  {device}; processes {group.world_size}, threads of each {compute.threads}; mode {compute.mode}"
    )


def check_space(config: Config, state: TrainState, group: Group) -> None:
    """Raise CheckpointError on rank 0 when the run's disk has less room than checkpoints, ledger and export need."""
    if not group.is_main:
        return

    weights = 4 * _elements(state.model.state_dict().values())
    trained = 4 * _elements(p for p in state.model.parameters() if p.requires_grad)
    moments = 2 if config.optim.name == "adamw" else 1
    one = 2 * weights + moments * trained  # with the average

    files = _files(config, state.step)

    there = 0
    for path in (config.run_dir / "last.pt", config.run_dir / "best.pt"):
        there += path.stat().st_size if path.is_file() else 0

    ledger = 0
    if config.compute.ledger:
        rows = config.compute.shards + group.world_size
        size = 64 + 24 * config.compute.samples_per_shard
        ledger = (config.train.steps - state.step) * rows * size

    exports = config.export.enabled and not config.export.dir
    exported = EXPORTED * weights if exports else 0

    needed = max(0, files * one - there) + ledger + exported

    folder = config.run_dir.absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())

    if needed > (free := shutil.disk_usage(nearest).free):
        raise CheckpointError(
            f"{config.run_dir} will need {needed / MIB:.0f} MiB ({files} checkpoints of {one / MIB:.0f} MiB, ledger "
            f"{ledger / MIB:.0f} MiB, export {exported / MIB:.0f} MiB), but its disk has {free / MIB:.0f} MiB free. "
            f"Free some space, choose another run.root, or keep fewer checkpoints: checkpoint.keep_last."
        )


def _files(config: Config, done: int) -> int:
    """Checkpoints on the disk at once: last, best, the one being written, and those that are kept."""
    every, last = config.checkpoint.keep_every, config.checkpoint.keep_last
    kept = (config.train.steps - 1) // every - done // every if every else 0
    return 3 + (min(kept, last) if last else kept)


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def result_of(
    run: Run, found: Validation, images_per_second: float, *, stopped_early: bool
) -> dict[str, Any]:
    """Content of result.json. `miou` is that of the last averaged weights in fp32, not of the best checkpoint."""
    config, current = run.config, run.state

    where = sequences(run.val_samples, config.data.sequence)
    seen = sequences(run.train_samples, config.data.sequence)
    return {
        "name": config.run.name,
        "images": len(run.val_samples),
        **scores(found, run.val_samples.classes.names, where, set(seen)),
        "best_miou": current.best_miou,
        "steps": current.step,
        "stopped_early": stopped_early,
        "images_per_second": round(images_per_second, 3),
        "train_seconds": round(run.clock.seconds, 3),
        "world_size": run.group.world_size,
        "shards": config.compute.shards,
        "global_batch": config.global_batch,
        "weights_digest": state_digest(current.model.state_dict()),
        "ema_digest": state_digest(current.ema.model.state_dict()),
        "config_hash": config_hash(config),
        "segpipe": __version__,
        "mode": config.compute.mode,
        "versions": run.fingerprint,
        "switches": flags.switches(),
        **weights_summary(config),
    }
