"""Where a fresh run gets its weights: from the seed, or from the file of `model.weights`.

models.weights is imported inside the functions: the launcher, which pins the file, imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import CheckpointError, ConfigError, WeightsError
from segpipe.files import sha256
from segpipe.settings.config import saved_config

if TYPE_CHECKING:
    import torch

    from segpipe.distributed.group import Group
    from segpipe.models.layers import SegmentationNet
    from segpipe.models.weights import WeightsSource
    from segpipe.settings.config import Config
    from segpipe.train.checkpoint import TrainedNetwork

LoadCheckpoint = Callable[
    [Path], dict[str, Any]
]  # checkpoint.load; imported here, it would lengthen the chain
LoadNetwork = Callable[[Path], "TrainedNetwork"]  # checkpoint.load_network
WEIGHTS = "weights.json"  # in a run's folder: what became of every tensor


def pin_weights(config: Config) -> None:
    """Set `model.weights_sha256` and `loss.teacher_sha256` to those of the files: the recipe names their content.

    A run that is resumed does not need the file any more: where it is gone, the value is that of config.json. Raises
    ConfigError without a file, and CheckpointError when it has another SHA-256 than the setting.
    """
    model, loss = config.model, config.loss
    if loss.teacher:
        path = teacher_path(config)
        if not path.is_file():
            raise ConfigError(
                f"loss.teacher = {loss.teacher}: {path} does not exist. Set it to the folder of a finished run, or to "
                f"one of its checkpoints."
            )
        loss.teacher_sha256 = _pinned(path, "loss.teacher_sha256", loss.teacher_sha256)
    if not model.weights:
        return
    path = weights_path(config)
    if not path.is_file():
        model.weights_sha256 = _earlier_sha256(config)
        return
    model.weights_sha256 = _pinned(path, "model.weights_sha256", model.weights_sha256)


def _pinned(path: Path, key: str, expected: str) -> str:
    """SHA-256 of the file. Raises CheckpointError where another one is expected."""
    found = sha256(path)
    if expected not in ("", found):
        raise CheckpointError(
            f"{path} has SHA-256 {found}, but {key} = {expected}. The file is not the one that was meant; fetch it "
            f"again, or leave {key} out."
        )
    return found


def check_pins(config: Config, group: Group) -> None:
    """Refuse files of weights that differ between ranks, as copies on the disks of several machines may."""
    pins = {
        f"model.weights = {config.model.weights}": config.model.weights_sha256,
        f"loss.teacher = {config.loss.teacher}": config.loss.teacher_sha256,
    }
    for setting, pin in pins.items():
        found = group.gather(pin)
        if len(set(found)) > 1:
            listed = ", ".join(
                f"rank {rank} {digest[:12] or 'none'}"
                for rank, digest in enumerate(found[:8])
            )
            raise ConfigError(
                f"{setting} has other content on other machines (SHA-256: {listed}). Copy one file to all of them."
            )


def weights_path(config: Config) -> Path:
    """The file that `model.weights` names; of a run's folder, last.pt."""
    path = Path(config.model.weights).expanduser()
    return path / "last.pt" if path.is_dir() else path


def teacher_path(config: Config) -> Path:
    """The checkpoint that `loss.teacher` names; of a run's folder, last.pt."""
    path = Path(config.loss.teacher).expanduser()
    return path / "last.pt" if path.is_dir() else path


def read_teacher(config: Config, load: LoadNetwork) -> TrainedNetwork:
    """The network of `loss.teacher`, averaged, in eval mode on the CPU.

    `load` reads a checkpoint of segpipe. Raises CheckpointError when the file is gone, or was replaced meanwhile.
    """
    path, expected = teacher_path(config), config.loss.teacher_sha256
    if not path.is_file():
        raise CheckpointError(f"{path} of loss.teacher does not exist any more.")
    if expected and sha256(path) != expected:
        raise CheckpointError(
            f"{path} of loss.teacher has another SHA-256 than the run was started with, {expected}. Put that file back."
        )
    return load(path)


def check_teacher(config: Config, names: tuple[str, ...], load: LoadNetwork) -> None:
    """Raise ConfigError for a teacher of other classes than `names`, those of the data set."""
    if not config.loss.teacher:
        return
    known = read_teacher(config, load).classes.names
    if known != names:
        raise ConfigError(
            f"loss.teacher = {config.loss.teacher} knows the classes {', '.join(known)}, but those of the data set are "
            f"{', '.join(names)}. Take a run that was trained with them."
        )


def teacher_of(
    config: Config, device: torch.device, load: LoadNetwork
) -> SegmentationNet | None:
    """The network of `loss.teacher` on the device; None without one."""
    if not config.loss.teacher:
        return None
    return read_teacher(config, load).model.to(device)


def _earlier_sha256(config: Config) -> str:
    """SHA-256 of the file with which the run was started, from config.json."""
    path = weights_path(config)
    with contextlib.suppress(ConfigError):
        saved, model = saved_config(config.run_dir).model, config.model
        known = config.run.exists == "resume" and saved.weights == model.weights
        if known and model.weights_sha256 in ("", saved.weights_sha256):
            return saved.weights_sha256
    raise ConfigError(
        f"model.weights = {config.model.weights}: {path} does not exist. Set it to a file of weights (.pth, .pt, "
        f".safetensors), or to the folder of a run."
    )


def read_start(config: Config, load: LoadCheckpoint) -> WeightsSource:
    """The weights for step 0. `load` reads a checkpoint of segpipe and compares its digests.

    Raises CheckpointError when the file is missing, damaged, or was replaced meanwhile, and WeightsError when it holds
    no tensor.
    """
    from segpipe.models.weights import WeightsSource

    if not config.model.weights:
        return WeightsSource()
    pin_weights(config)
    path = weights_path(config)
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist any more, and without a checkpoint the run starts at step 0, which needs it. "
            f"Put it back, or set model.weights to where it is now."
        )
    source = _read(path, load)
    if not source.tensors:
        raise WeightsError(
            f"{path} holds no tensor, so there is nothing to start from. Set model.weights to a file of weights."
        )
    model = config.model
    return replace(source, path=model.weights, sha256=model.weights_sha256)


def _read(path: Path, load: LoadCheckpoint) -> WeightsSource:
    """Tensors of the file; of a checkpoint of segpipe the averaged weights."""
    from segpipe.models import weights

    if path.suffix == ".safetensors":
        return weights.read_safetensors(path)
    saved = weights.read_torch(path)
    if isinstance(saved, dict) and {"format", "ema", "digests"} <= saved.keys():
        saved = load(path)  # again, with its digests
        return weights.WeightsSource(
            saved["ema"], part="ema", class_names=tuple(saved["classes"]["names"])
        )
    return weights.state_dict_in(saved, path)


def weights_summary(config: Config) -> dict[str, Any]:
    """weights.json of the run with numbers of tensors in place of their names, as an entry of result.json.

    Empty for a run from the seed.
    """
    try:
        record = dict(json.loads((config.run_dir / WEIGHTS).read_bytes()))
    except (OSError, ValueError, TypeError):  # from the seed, or altered by hand
        if not config.model.weights:
            return {}
        record = {"file": config.model.weights, "sha256": config.model.weights_sha256}
    return {
        "weights": {
            name: len(value) if isinstance(value, list) else value
            for name, value in record.items()
        }
    }
