"""What a run will write, against what its disk has free: told before the first step, not after a night."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from segpipe.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from segpipe.settings.config import Config
    from segpipe.train.state import TrainState

MIB = 2**20
EXPORTED = 3  # sizes of the averaged weights that an exported folder has, about


def check_space(config: Config, state: TrainState, world_size: int) -> None:
    """Raise CheckpointError when the run's disk has less room than checkpoints, ledger and export need."""
    weights, averages = (_bytes(model.state_dict().values()) for model in (state.model, state.ema.model))
    trained = _bytes(parameter for parameter in state.model.parameters() if parameter.requires_grad)
    moments = 2 if config.optim.name == "adamw" else int(config.optim.momentum > 0)
    one, files = weights + averages + moments * trained, _files(config, state.step)
    there = sum(path.stat().st_size for name in ("last.pt", "best.pt") if (path := config.run_dir / name).is_file())
    rows = (config.train.steps - state.step) * (config.compute.shards + world_size) if config.compute.ledger else 0
    ledger = rows * (64 + 24 * config.compute.samples_per_shard)
    exported = EXPORTED * averages if config.export.enabled and not config.export.dir else 0
    needed = max(0, files * one - there) + ledger + exported
    nearest = next(path for path in (config.run_dir, *config.run_dir.absolute().parents) if path.exists())
    if needed > (free := _free(nearest)):
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


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
