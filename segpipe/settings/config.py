"""The configuration of a run: all groups of settings, and conversion from and to plain mappings.

Imports no torch and builds nothing, so that `segpipe train --help` and a wrong key answer at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from segpipe.errors import ConfigError, refuse
from segpipe.settings.groups import (
    AugmentConfig,
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    EmaConfig,
    ExportConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrackConfig,
    TrainConfig,
)
from segpipe.settings.setting import declared, group, nearest, setting


@dataclass
class Config:
    seed: int = setting(
        0, "seed of weights, data order and augmentation", low=0, high=2**63 - 1
    )
    run: RunConfig = group(RunConfig, free=True)
    model: ModelConfig = group(ModelConfig)
    data: DataConfig = group(DataConfig)
    augment: AugmentConfig = group(AugmentConfig)
    loss: LossConfig = group(LossConfig)
    optim: OptimConfig = group(OptimConfig)
    ema: EmaConfig = group(EmaConfig)
    train: TrainConfig = group(TrainConfig)
    compute: ComputeConfig = group(ComputeConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig, free=True)
    track: TrackConfig = group(TrackConfig, free=True)
    export: ExportConfig = group(ExportConfig, free=True)

    @property
    def run_dir(self) -> Path:
        """Folder of the run. It depends on nothing but the configuration, so all ranks agree on it."""
        return Path(self.run.root) / self.run.name

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer update, for any number of processes."""
        return self.compute.shards * self.compute.samples_per_shard

    @property
    def import_paths(self) -> list[tuple[str, str]]:
        """Settings that name code of the user which can reach the numbers, with the import path of each."""
        named = []
        for key, value in flat(self).items():
            if SETTINGS[key].plugin and not SETTINGS[key].free:
                paths = value if isinstance(value, list) else [value]
                named += [(key, path) for path in paths if ":" in path]
        return named


SETTINGS = {entry.key: entry for entry in declared(Config)}

# Groups of files in conf/.
GROUPS = ("model", "data", "augment", "track", "export", "experiment")

# Settings that hold a mapping: {key}.NAME=VALUE sets one entry.
MAPPINGS = tuple(
    key for key, entry in SETTINGS.items() if isinstance(entry.default, dict)
)

# Settings that may change when a run is resumed, because they cannot reach the numbers.
FREE_KEYS = frozenset(key for key, entry in SETTINGS.items() if entry.free)


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Config from nested mappings, as composed by Hydra or stored in a checkpoint.

    Raises ConfigError with a line for each unknown key, with the nearest valid one, and each value of the wrong type.
    """
    problems: list[str] = []
    built = _build(Config, values, "", problems)
    refuse(problems)
    assert isinstance(built, Config)
    return built


def _build(
    kind: type, values: Mapping[str, Any], prefix: str, problems: list[str]
) -> Any:
    built = kind()
    for name, value in values.items():
        key = f"{prefix}{name}"
        default = vars(built).get(name)
        if key in SETTINGS:
            try:
                setattr(built, name, SETTINGS[key].convert(value))
            except ConfigError as error:
                problems.append(str(error))
        elif is_dataclass(default) and isinstance(value, Mapping):
            setattr(built, name, _build(type(default), value, f"{key}.", problems))
        else:
            problems.append(no_setting(key))
    return built


def no_setting(key: str) -> str:
    """Why `key` cannot be set: a group, or unknown."""
    inside = [known for known in SETTINGS if known.startswith(f"{key}.")]
    if inside:
        return f"{key} is a group of settings. Set one of them, such as {inside[0]}."
    return f"{key} is not a setting of segpipe.{nearest(key, [*SETTINGS, *GROUPS])}"


def saved_config(folder: Path) -> Config:
    """The configuration of a run, from config.json. Raises ConfigError when that is missing, damaged or foreign."""
    path = folder / "config.json"
    try:
        return from_mapping(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(
            f"{path} is not the configuration of a run: {error}"
        ) from error


def to_mapping(config: Config) -> dict[str, Any]:
    """Nested plain dictionaries, as stored in checkpoints and in config.json."""
    return asdict(config)


def flat(config: Config) -> dict[str, Any]:
    """All settings by dotted name."""
    return {key: attrgetter(key)(config) for key in SETTINGS}


def recipe(config: Config) -> dict[str, Any]:
    """Settings that decide what is trained, by dotted name: all except FREE_KEYS."""
    found = {key: value for key, value in flat(config).items() if key not in FREE_KEYS}
    found["data.mix"] = [  # of a data set as of data.root, the place is free
        {key: value for key, value in entry.items() if key not in ("root", "classes")}
        for entry in config.data.mix
    ]
    if config.train.patience:  # then it decides where training may stop
        found["train.validate_every"] = config.train.validate_every
    if config.compute.mode == "audit":
        found["compute.mode"] = "elastic"  # the same numbers; audit only records more
    return found


def course(found: Mapping[str, Any]) -> dict[str, Any]:
    """What of a recipe decides an update: train.steps only while the learning rates follow it."""
    fixed = found.get("optim.schedule_steps")
    return {
        key: value
        for key, value in of_this_version(found).items()
        if key != "train.steps" or not fixed
    }


def of_this_version(found: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as this version would write it: an earlier one lacks later settings."""
    defaults = {key: entry.default for key, entry in SETTINGS.items() if not entry.free}
    return defaults | dict(found)


def changed_course(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between the recipes of a run and of its continuation, with what to do; empty if nothing does."""
    old, new = course(before), course(now)
    changed = [
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in new
        if old.get(name) != new[name]
    ]
    if not changed:
        return ""
    fix = "Resume with the same settings, or start another run with another run.name."
    if len(changed) == 1 and "train.steps" in changed[0]:
        fix = (
            f"The learning rates follow it, since optim.schedule_steps = 0. Resume with train.steps="
            f"{before.get('train.steps')}, or train on from its weights in another run: model.weights=FOLDER of this "
            f"run and another run.name. A run with optim.schedule_steps can be made longer."
        )
    return f"was trained with another recipe ({'; '.join(changed[:5])}). {fix}"


def config_hash(config: Config | Mapping[str, Any]) -> str:
    """Hex digest of all settings, also as an earlier version saved them; ranks compare it when they join."""
    text = json.dumps(
        to_mapping(config) if isinstance(config, Config) else config, sort_keys=True
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
