"""The configuration of a run: all groups of settings, and conversion from and to plain mappings.

Imports no torch and builds nothing, so that `segpipe train --help` and a wrong key answer at once.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from segpipe.errors import ConfigError
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
from segpipe.settings.setting import brief, declared, group, nearest, setting, shown


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

# Settings that hold a mapping: {key}.NAME=VALUE sets one entry.
MAPPINGS = tuple(
    key for key, entry in SETTINGS.items() if isinstance(entry.default, dict)
)

# Settings that may change when a run is resumed, because they cannot reach the numbers.
FREE_KEYS = frozenset(key for key, entry in SETTINGS.items() if entry.free)

# Settings of earlier versions, in whose files they still are, each with the value at which it did nothing.
REMOVED: dict[str, Any] = {
    "data.shuffle_labels": False,
    "data.transport": "ring",
    "data.on_dead_worker": "fail",
}


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Config from nested mappings, as composed by Hydra or stored in a checkpoint.

    Raises ConfigError for an unknown key, with the nearest valid one, and for a value of the wrong type.
    """
    built = _build(Config, values, "")
    assert isinstance(built, Config)
    return built


def saved_config(folder: Path) -> Config:
    """The configuration of a run, from config.json. Raises ConfigError when that is missing, damaged or foreign."""
    path = folder / "config.json"
    try:
        return from_mapping(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(
            f"{path} is not the configuration of a run: {error}"
        ) from error


def _build(kind: type, values: Mapping[str, Any], prefix: str) -> Any:
    built = kind()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in vars(built):
            _check_removed(key, value)
            continue
        default = getattr(built, name)
        if not is_dataclass(default):
            setattr(built, name, convert(key, value, default))
        elif isinstance(value, Mapping):
            setattr(built, name, _build(type(default), value, f"{key}."))
        else:
            raise ConfigError(
                f"{key} = {value!r}, but {key} is a group of settings. Set one of "
                f"them, such as {key}.name."
            )
    return built


def _check_removed(key: str, value: Any) -> None:
    """Raise ConfigError for a key that this version does not have, unless it is from an earlier one and did nothing."""
    if key not in REMOVED:
        raise ConfigError(
            f"{key} is not a setting of segpipe.{nearest(key, list(SETTINGS))}"
        )
    if value != REMOVED[key]:
        raise ConfigError(
            f"{key} = {value!r} is a setting of an earlier version. This version "
            f"cannot do it."
        )


def convert(key: str, value: Any, default: Any) -> Any:
    """`value` as the type of `default`; a number given for a text (`compute.nproc=4`) becomes text.

    Raises ConfigError for a value that does not fit.
    """
    entry = SETTINGS.get(key)
    if isinstance(default, dict):
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            return dict(value)
        raise _unfit(key, value, "a mapping such as {name: value}")
    if isinstance(default, list):
        kind = default[0] if default else {} if entry and entry.mappings else ""
        if isinstance(value, list | tuple) and (value or not default):
            return _converted_items(key, value, kind)
        raise _unfit(key, value, f"a list such as {default or [kind or 'name']}")
    is_list = isinstance(value, list | tuple) and bool(value)
    if entry and (entry.numbers or entry.several) and is_list:
        return _converted_items(key, value, 1.0 if entry.numbers else "")
    kinds: dict[type, Any] = {
        bool: bool,
        float: int | float,
        int: int,
        str: str | int | float,
    }
    fits = isinstance(value, kinds[type(default)])
    if isinstance(value, bool) and not isinstance(default, bool):
        fits = False
    if isinstance(default, float) and fits:
        fits = abs(value) <= sys.float_info.max
    if not fits:
        raise _unfit(key, value, _needed(key, default), _example(value, default))
    return type(default)(value)


def _converted_items(key: str, values: Sequence[Any], kind: Any) -> list[Any]:
    return [convert(f"{key}[{place}]", item, kind) for place, item in enumerate(values)]


def _unfit(key: str, value: Any, needed: str, example: str = "") -> ConfigError:
    such = f", such as {example}" if example else ""
    return ConfigError(f"{key} = {brief(value)}, but {needed} was needed{such}.")


def _needed(key: str, default: Any) -> str:
    """Type and range of a setting."""
    entry = SETTINGS.get(key.partition("[")[0])
    kinds = {float: "a number", int: "a whole number", bool: "true or false"}
    valid = f" of {entry.valid}" if entry and entry.valid and not entry.choices else ""
    return kinds.get(type(default), "text") + valid


def _example(value: Any, default: Any) -> str:
    """The value itself, if it only has to be written in another way; the default otherwise, if there is one."""
    if type(default) is int and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(default, bool):
        return shown(default)
    return repr(default) if default != "" else ""


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
    """A recipe as this version would write it: an earlier one had no later settings, and removed ones that did nothing.

    A removed setting that did something stays.
    """
    kept = {
        key: value
        for key, value in found.items()
        if key not in REMOVED or value != REMOVED[key]
    }
    return {
        key: entry.default for key, entry in SETTINGS.items() if not entry.free
    } | kept


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
