"""The weights files that a run starts from: their paths, and the content its recipe pins. Imports no torch."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError, ConfigError
from segpipe.files import file_sha256, read_json
from segpipe.settings.config import Config, saved_config
from segpipe.settings.groups import LossConfig

WEIGHTS = "weights.json"  # in a run's folder: what became of every tensor


def pin_weights(config: Config) -> None:
    """Set `model.weights_sha256` and `loss.teacher_sha256` from the files, so that the recipe names their content.

    A resumed run no longer needs the file of model.weights: if it is gone, the value comes from config.json. Raises
    ConfigError if a file is missing, and CheckpointError if its SHA-256 differs from the setting.
    """
    model = config.model
    if config.loss.teacher:
        pinned_teacher(config.loss)
    if not model.weights:
        return
    path = weights_file(model.weights)
    if path.is_file():
        model.weights_sha256 = _pinned(
            path, "model.weights_sha256", model.weights_sha256
        )
        return
    with contextlib.suppress(ConfigError):
        saved = saved_config(config.run_dir).model
        known = config.run.exists == "resume" and saved.weights == model.weights
        if known and model.weights_sha256 in ("", saved.weights_sha256):
            model.weights_sha256 = saved.weights_sha256
            return
    raise ConfigError(
        f"model.weights = {model.weights}: {path} does not exist. Set it to a weights file (.pth, .pt, "
        f".safetensors) or to the folder of a run."
    )


def pinned_teacher(loss: LossConfig) -> Path:
    """The file of `loss.teacher`, which must be set; pins and raises as `pin_weights`."""
    path = weights_file(loss.teacher)
    if not path.is_file():
        raise ConfigError(
            f"loss.teacher = {loss.teacher}: {path} does not exist. Set it to the folder of a finished run or to one "
            f"of its checkpoints."
        )
    loss.teacher_sha256 = _pinned(path, "loss.teacher_sha256", loss.teacher_sha256)
    return path


def _pinned(path: Path, key: str, expected: str) -> str:
    """SHA-256 of the file. Raises CheckpointError if it cannot be read or is not the expected one."""
    try:
        found = file_sha256(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. Copy it again, or check its permissions."
        ) from error
    if expected not in ("", found):
        raise CheckpointError(
            f"{path} has SHA-256 {found}, but {key} = {expected}. This is not the intended file: fetch it again, or "
            f"leave {key} out."
        )
    return found


def check_pins(config: Config, pins: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError if weights files differ between ranks, as copies on the disks of several machines may.

    `pins`: `model.weights_sha256` and `loss.teacher_sha256` of each rank.
    """
    settings = (
        f"model.weights = {config.model.weights}",
        f"loss.teacher = {config.loss.teacher}",
    )
    for setting, found in zip(settings, zip(*pins, strict=True), strict=True):
        if len(set(found)) > 1:
            listed = ", ".join(
                f"rank {rank} {digest[:12] or 'none'}"
                for rank, digest in enumerate(found[:8])
            )
            raise ConfigError(
                f"{setting} has different content on other machines (SHA-256: {listed}). Copy one file to all of them."
            )


def weights_file(name: str) -> Path:
    """The file that `model.weights` or `loss.teacher` names; last.pt if it is a run folder."""
    path = Path(name)
    return path / "last.pt" if path.is_dir() else path


def weights_summary(config: Config) -> dict[str, Any]:
    """Entry of result.json from the run's weights.json, with counts of tensors instead of their names.

    Empty for a run that starts from the seed.
    """
    try:
        record = dict(read_json(config.run_dir / WEIGHTS))
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
