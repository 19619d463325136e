"""Checks of a network before the first step: its weights, and patterns of parameter names. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from segpipe.errors import ConfigError
from segpipe.plugins import is_path

if TYPE_CHECKING:
    from segpipe.data.samples import Samples
    from segpipe.distributed.group import Group
    from segpipe.settings.config import Config


def pin(config: Config) -> None:
    """Put the SHA-256 of `model.weights` into the configuration, see `pin_weights`."""
    from segpipe.train.start import pin_weights

    pin_weights(config)


def check_pins(config: Config, group: Group) -> None:
    """Refuse files of weights that differ between ranks, as copies on the disks of several machines may."""
    found = group.gather(config.model.weights_sha256)
    if len(set(found)) > 1:
        listed = ", ".join(f"rank {rank} {digest[:12] or 'none'}" for rank, digest in enumerate(found[:8]))
        raise ConfigError(
            f"model.weights = {config.model.weights} has other content on other machines (SHA-256: {listed}). Copy one "
            f"file to all of them."
        )


def check_network(config: Config, samples: Samples) -> None:
    """Refuse what stops or spoils a training, before any process starts.

    Networks of the user with state or foreign randomness, weights that do not fit, patterns that match no parameter.
    """
    if is_path(config.model.name):
        from segpipe.contracts.network_contract import check_plugin

        check_plugin(config, samples.classes.num_classes)
    if not (config.model.weights or config.model.freeze or config.optim.lr_scale or config.model.args):
        return
    import torch

    from segpipe.train import checkpoint
    from segpipe.train.start import read_start
    from segpipe.train.state import build_state

    resumes = config.run.exists == "resume" and checkpoint.candidates(config.run_dir)
    batch_norm = replace(config, model=replace(config.model, norm="batch"))  # the other needs a GPU
    start = None if resumes else read_start(config, checkpoint.load)
    build_state(batch_norm, samples.classes, torch.device("cpu"), start)
