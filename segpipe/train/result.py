"""What a run says before its first step, and the content of result.json at its end."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from segpipe import __version__
from segpipe.data.samples import sequences
from segpipe.determinism import flags
from segpipe.errors import CheckpointError
from segpipe.ledger.digest import state_digest
from segpipe.settings.config import config_hash
from segpipe.train.scores import flattering, scores
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
    """Four lines on network, data, batch and hardware, and a warning when validation sees sequences of training."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    frozen = sum(
        parameter.numel()
        for parameter in model.parameters()
        if not parameter.requires_grad
    )
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
    return (
        f"{device.type} ({torch.cuda.get_device_name(device)})"
        if device.type == "cuda"
        else device.type
    )


def _validated(
    config: Config, train: Samples, val: Samples
) -> dict[str, dict[str, int | bool]]:
    seen, counts = (
        set(sequences(train, config.data.sequence)),
        Counter(sequences(val, config.data.sequence)),
    )
    if len(counts) == len(val):  # the names tell nothing
        return {}
    return {
        name: {"images": images, "in_training": name in seen}
        for name, images in sorted(counts.items())
    }


def check_space(config: Config, state: TrainState, group: Group) -> None:
    """Raise CheckpointError on rank 0 when the run's disk has less room than checkpoints, ledger and export need."""
    if not group.is_main:
        return
    weights, averages = (
        _bytes(model.state_dict().values()) for model in (state.model, state.ema.model)
    )
    trained = _bytes(
        parameter for parameter in state.model.parameters() if parameter.requires_grad
    )
    moments = 2 if config.optim.name == "adamw" else int(config.optim.momentum > 0)
    one, files = weights + averages + moments * trained, _files(config, state.step)
    there = sum(
        path.stat().st_size
        for name in ("last.pt", "best.pt")
        if (path := config.run_dir / name).is_file()
    )
    rows = (
        (config.train.steps - state.step) * (config.compute.shards + group.world_size)
        if config.compute.ledger
        else 0
    )
    ledger = rows * (64 + 24 * config.compute.samples_per_shard)
    exported = (
        EXPORTED * averages if config.export.enabled and not config.export.dir else 0
    )
    needed = max(0, files * one - there) + ledger + exported
    nearest = next(
        path
        for path in (config.run_dir, *config.run_dir.absolute().parents)
        if path.exists()
    )
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


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def result_of(
    run: Run, found: Validation, images_per_second: float, *, stopped_early: bool
) -> dict[str, Any]:
    """Content of result.json. `miou` is that of the last averaged weights in fp32, not of the best checkpoint."""
    config, current = run.config, run.state
    where, seen = (
        sequences(samples, config.data.sequence)
        for samples in (run.val_samples, run.train_samples)
    )
    return {
        "name": config.run.name,
        "images": len(run.val_samples),
        **scores(found, run.val_samples.classes.names, where, set(seen)),
        "best_miou": current.best_miou,
        "steps": current.step,
        "stopped_early": stopped_early,
        **_speed(run, images_per_second),
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


def _speed(run: Run, images_per_second: float) -> dict[str, float]:
    """How fast the updates were; if a resumed run had none left, the figures of the earlier result.json."""
    found = {
        "images_per_second": round(images_per_second, 3),
        "train_seconds": round(run.clock.seconds, 3),
    }
    path = run.folder / "result.json"
    if run.clock.updates or not path.is_file():
        return found
    try:
        earlier = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):  # altered by hand
        return found
    return {name: earlier.get(name, value) for name, value in found.items()}
