"""The trained network of `loss.teacher`, whose answers another one learns (losses/distill.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segpipe.errors import CheckpointError, ConfigError
from segpipe.files import sha256
from segpipe.train.checkpoint import load_network
from segpipe.train.start import teacher_path

if TYPE_CHECKING:
    import torch

    from segpipe.models.layers import SegmentationNet
    from segpipe.settings.config import Config
    from segpipe.train.checkpoint import TrainedNetwork


def read_teacher(config: Config) -> TrainedNetwork:
    """The averaged network, in eval mode on the CPU. Raises CheckpointError when the file was replaced meanwhile."""
    path, expected = teacher_path(config), config.loss.teacher_sha256
    if not path.is_file():
        raise CheckpointError(f"{path} of loss.teacher does not exist any more.")
    if expected and sha256(path) != expected:
        raise CheckpointError(
            f"{path} of loss.teacher has another SHA-256 than the run was started with, {expected}. Put that file back."
        )
    return load_network(path)


def check_teacher(config: Config, names: tuple[str, ...]) -> None:
    """Raise ConfigError for a teacher of other classes than `names`, those of the data set."""
    if not config.loss.teacher:
        return
    known = read_teacher(config).classes.names
    if known != names:
        raise ConfigError(
            f"loss.teacher = {config.loss.teacher} knows the classes {', '.join(known)}, but those of the data set are "
            f"{', '.join(names)}. Take a run that was trained with them."
        )


def teacher_of(config: Config, device: torch.device) -> SegmentationNet | None:
    """The network of `loss.teacher` on the device; None without one."""
    return read_teacher(config).model.to(device) if config.loss.teacher else None
