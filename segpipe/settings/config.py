"""The configuration of a run: all groups of settings, conversion from and to plain mappings, and their checks.

Imports no torch and builds nothing, so `segpipe train --help` and errors about wrong keys appear at once.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from segpipe.errors import ConfigError, refuse
from segpipe.files import read_json
from segpipe.settings.groups import (
    FILE_SETS,
    STEPS,
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
from segpipe.settings.setting import (
    Setting,
    Values,
    converted,
    declared,
    group,
    nearest,
    problems_of,
    setting,
)


@dataclass
class Config:
    seed: int = setting(
        0, "seed of weights, data order and augmentation", high=2**63 - 1
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
        """Folder of the run. Depends only on the configuration, so all ranks agree on it."""
        return Path(self.run.root) / self.run.name

    @property
    def global_batch(self) -> int:
        """Samples per optimizer update, for any number of processes."""
        return self.compute.shards * self.compute.samples_per_shard

    @property
    def import_paths(self) -> list[tuple[str, str]]:
        """(setting, import path) of the user's code that can affect the numbers."""
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

# Keys of an entry of data.mix.
MIX = ("root", "name", "weight", "map", "classes", "split")


def from_mapping(values: Values) -> Config:
    """Config from nested mappings, as composed by Hydra or stored in a checkpoint.

    Raises ConfigError with a line for each unknown key, with the nearest valid one, and each value of the wrong type.
    """
    config = Config()
    given: Values = {}
    for name, value in values.items():
        is_group = value or name in vars(config)
        if isinstance(value, Mapping) and is_group and name not in SETTINGS:
            given |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            given[str(name)] = value

    if given.get("augment.color_on") == "worker":  # today's only behavior
        del given["augment.color_on"]
    given.pop("track.register", None)  # withdrawn; no result depends on it
    for key, value in converted(SETTINGS, given, no_setting).items():
        group, _, name = key.rpartition(".")
        setattr(getattr(config, group) if group else config, name, value)
    return config


def no_setting(key: str) -> str:
    """Why `key` cannot be set: it is a group, or unknown."""
    inside = [known for known in SETTINGS if known.startswith(f"{key}.")]
    if inside:
        return f"{key} is a group of settings. Set one of them, such as {inside[0]}."
    return f"{key} is not a setting of segpipe.{nearest(key, [*SETTINGS, *GROUPS])}"


def saved_config(folder: Path) -> Config:
    """The configuration of a run, from config.json. Raises ConfigError if the file is missing, damaged or foreign."""
    path = folder / "config.json"
    try:
        return from_mapping(read_json(path))
    except (OSError, ValueError, AttributeError, ConfigError) as error:
        raise ConfigError(
            f"{path} is not the configuration of a run: {error}"
        ) from error


def to_mapping(config: Config) -> Values:
    """Nested plain dictionaries, as stored in checkpoints and in config.json."""
    return asdict(config)


def flat(config: Config) -> Values:
    """All settings by dotted name."""
    return {key: attrgetter(key)(config) for key in SETTINGS}


def recipe(config: Config) -> Values:
    """Settings that determine the training result, by dotted name: all that are not free."""
    found = deciding(flat(config))
    found["data.mix"] = [  # where a data set lies is free, as for data.root
        {key: value for key, value in entry.items() if key not in ("root", "classes")}
        for entry in config.data.mix
    ]
    if config.train.patience:  # then validations decide when training stops
        found["train.validate_every"] = config.train.validate_every
    if config.compute.mode == "audit":
        found["compute.mode"] = "elastic"  # the same numbers; audit only records more
    return found


def course(found: Values) -> Values:
    """The part of a recipe that affects an update: train.steps only if the learning rates depend on it."""
    whole = deciding(found)
    if found.get("optim.schedule_steps"):
        del whole["train.steps"]
    return whole


def deciding(found: Values) -> Values:
    """The settings that are not free, by this version's names: defaults for missing ones, without unknown ones."""
    kept = SETTINGS.items()
    return {key: found.get(key, each.default) for key, each in kept if not each.free}


def changed_course(before: Values, now: Values) -> str:
    """How a resumed run's recipe differs from the original, with what to do; empty if it does not."""
    old, new = course(before), course(now)
    changed = [
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in new
        if old.get(name) != new[name]
    ]
    if not changed:
        return ""
    fix = "Resume with the same settings, or start a new run with another run.name."
    if len(changed) == 1 and "train.steps" in changed[0]:
        fix = (
            f"The learning rates depend on it, since optim.schedule_steps = 0. Resume with train.steps="
            f"{before.get('train.steps')}, or start a new run from its weights: model.weights=FOLDER of this "
            f"run and another run.name. A run with optim.schedule_steps can be extended."
        )
    return f"was trained with a different recipe ({'; '.join(changed[:5])}). {fix}"


def config_hash(config: Config | Values) -> str:
    """Hex digest of all settings, also of ones that an earlier version saved; ranks compare it when they join."""
    text = json.dumps(
        to_mapping(config) if isinstance(config, Config) else config, sort_keys=True
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check(config: Config, *, world_size: int = 1) -> None:
    """Raise ConfigError with a line for each invalid setting or contradiction. Reads no files."""
    values = flat(config)
    wrong = problems_of(SETTINGS, values)
    # The checks below need valid values, so invalid ones become defaults and are not reported twice.
    defaults = {key: SETTINGS[key].default for key in wrong}
    config = from_mapping(values | defaults)
    found = chain(
        _mixture(config.data),
        _data(config),
        _augment(config.augment),
        _network_and_loss(config),
        _length(config),
        _processes(config, world_size),
        export_problems(config.export),
    )
    about_others = [each for each in found if not any(key in each for key in wrong)]
    refuse([*wrong.values(), *about_others])


def _data(config: Config) -> Iterator[str]:
    data, name = config.data, config.run.name
    parts = Path(name).parts
    if not parts or {"..", "/"} & set(parts) or not name.isprintable():
        yield f"run.name = {name!r} must name a folder below run.root = {config.run.root}."

    in_files = data.name in FILE_SETS
    if in_files and not data.root and not data.mix:
        yield f"data.root is empty, but data={data.name} reads files. Set data.root=FOLDER."
    for key in ("images", "masks"):
        if getattr(data, key) and not in_files:
            yield f"data.{key} is set, but only data sets in files use it. Remove it, or set data=folder."
    if data.pack != "off" and not (in_files or data.mix):
        yield (
            f"data.pack = {data.pack}, but the samples of data={data.name} are not files. Set data.pack=off; "
            f"data.cache_mib caches them in memory."
        )
    if not data.pack:
        yield "data.pack is empty, but off, auto or a folder was needed."
    try:
        re.compile(data.sequence)
    except re.error as error:
        yield f"data.sequence = {data.sequence!r} is not a regular expression: {error}."
    if data.balance_by == "sequence" and data.balance:
        yield f"data.balance = {data.balance} counts classes, but data.balance_by = sequence. Set data.balance=0."
    for key in ("train_split", "hold_out"):
        name, value = f"data.{key}", getattr(data, key)
        default = SETTINGS[name].default
        if value != default and (data.mix or not in_files):
            yield (
                f"{name} = {value}, but only a single data set in files, such as data=folder, uses it; an entry of "
                f"data.mix has its own `split`. Set {name}={default or repr(default)}."
            )


def _augment(augment: AugmentConfig) -> Iterator[str]:
    for name in ("scale", "gamma"):
        values = getattr(augment, name)
        if values[0] > values[1]:
            yield f"augment.{name} = {values}, but [smallest, largest] was needed."


def _mixture(data: DataConfig) -> Iterator[str]:
    """Problems of the entries of data.mix that can be found without reading files."""
    for number, entry in enumerate(data.mix):
        key = f"data.mix[{number}]"
        for name, value in entry.items():
            yield _entry_problem(f"{key}.{name}", name, value)
        is_drawn = entry.get("name") == "synthetic"
        inherits = data.root and "name" not in entry
        if not (entry.get("root") or is_drawn or inherits):
            yield f"{key} has no root. Set root to the folder of this data set, such as {{root: FOLDER}}."
    if 0 < sum("weight" in entry for entry in data.mix) < len(data.mix):
        yield (
            "data.mix gives some sets a weight and others none. Give all a weight, or none: then each set is weighted "
            "by its number of images."
        )


def _entry_problem(place: str, name: str, value: Any) -> str:
    if name not in MIX:
        return f"{place} is not one of {', '.join(MIX)}.{nearest(name, MIX)}"
    if name == "weight":
        kind = Setting(place, 1.0, "share of the samples", low=1e-9)
        try:
            return kind.problem(kind.convert(value))
        except ConfigError as error:
            return str(error)
    is_map = isinstance(value, dict)
    texts = value.values() if is_map else [value]
    is_text = all(isinstance(text, str) and text for text in texts)
    if is_map != (name == "map") or not is_text:
        needed = "{CLASS: SHARED CLASS}" if name == "map" else "text"
        return f"{place} = {value!r}, but {needed} was needed."
    if name == "name":
        return replace(SETTINGS["data.name"], key=place).problem(value)
    return ""


def _network_and_loss(config: Config) -> Iterator[str]:
    model, loss, device = config.model, config.loss, config.compute.device
    for name in ("weights_sha256", "weights_partial"):
        if getattr(model, name) and not model.weights:
            yield f"model.{name} is set, but model.weights is empty. Set model.weights=FILE."
    pretrained = model.args.get("pretrained")
    if model.weights and pretrained and ":" not in model.name:
        yield (
            f"model.weights = {model.weights} and model.args.pretrained = true, but a run starts from one of them. Set "
            f"model.args.pretrained=false."
        )
    if model.freeze and not (model.weights or pretrained or ":" in model.name):
        yield (
            f"model.freeze = {model.freeze}, but without model.weights these parameters would stay at their random "
            f"initial values. Set model.weights=FILE."
        )

    for name, part in (("loss", loss), ("data", config.data)):
        if part.args and ":" not in part.name:
            yield f"{name}.args = {part.args}, but {part.name} takes none: only plug-ins (package.module:Name) do."
    weighted_focal = loss.name == "focal" and loss.class_weights != "none"
    if loss.label_smoothing and (loss.name == "ohem" or weighted_focal):
        yield (
            f"loss.label_smoothing = {loss.label_smoothing}, but loss.name = {loss.name} needs the probability of a "
            "pixel's class without smoothing. Set loss.label_smoothing=0, or another loss; focal: or no class weights."
        )
    own = ":" in loss.name
    if own and loss.label_smoothing:
        yield (
            f"loss.label_smoothing = {loss.label_smoothing}, but {loss.name} is your own loss. Smooth labels there and "
            f"set loss.label_smoothing=0."
        )
    if own and loss.backend not in ("auto", "plain"):
        yield f"loss.backend = {loss.backend}, but {loss.name} takes logits at full resolution. Set loss.backend=auto."
    if (loss.backend, device) in (("native", "cuda"), ("triton", "cpu")):
        yield (
            f"loss.backend = {loss.backend}, but compute.device = {device}: native runs on CPUs, triton on CUDA. Set "
            f"loss.backend=auto."
        )


def _length(config: Config) -> Iterator[str]:
    train, schedule_steps = config.train, config.optim.schedule_steps
    if train.epochs and train.steps not in (0, STEPS):
        yield (
            f"train.steps = {train.steps} and train.epochs = {train.epochs}. Set one of them; if an experiment sets "
            f"train.steps, add train.steps=0."
        )
    if train.patience and not train.validate_every:
        yield (
            f"train.patience = {train.patience}, but train.validate_every = 0: there is no validation before the end. "
            f"Set train.validate_every to a number of updates."
        )
    if train.epochs:  # the number of updates is not known yet
        return
    if not train.steps:
        yield "train.steps = 0, but a number of updates was needed. Set it, or train.epochs."
    earliest = (train.patience + 1) * train.validate_every
    if train.patience and earliest >= train.steps:
        yield (
            f"train.patience = {train.patience} and train.validate_every = {train.validate_every}: training could stop "
            f"early only after {earliest} updates, but ends after train.steps = {train.steps}. Lower one of them."
        )
    if 0 < schedule_steps < train.steps:
        yield (
            f"optim.schedule_steps = {schedule_steps}, but the run has train.steps = {train.steps} updates: the "
            f"last ones would have a learning rate of 0. Set optim.schedule_steps=0, or at least train.steps."
        )


def _processes(config: Config, world_size: int) -> Iterator[str]:
    compute = config.compute
    count = compute.nproc
    if count != "auto" and not (count.isdecimal() and int(count) > 0):
        yield f"compute.nproc = {count!r}, but auto or at least 1 was needed."
    if compute.shards < world_size:
        yield (
            f"compute.shards = {compute.shards}, but there are {world_size} processes and each needs a shard. Start at "
            f"most {compute.shards} processes, or set compute.shards={world_size} (changes the global batch)."
        )
    by_torch = compute.mode in ("off", "ddp")
    if by_torch and compute.shards % world_size:
        yield (
            f"compute.shards = {compute.shards} cannot be divided among {world_size} processes, and compute.mode = "
            f"{compute.mode} needs equal batches per process. Use compute.mode=elastic, which takes any number of "
            f"processes up to {compute.shards}, or a number that divides it."
        )
    if compute.compile and compute.mode != "elastic":
        yield (
            f"compute.compile = true, but compute.mode = {compute.mode}: DDP needs each gradient separately, and an "
            f"audit each layer. Set compute.mode=elastic or compute.compile=false."
        )
    if config.model.norm == "sync" and not by_torch:
        yield (
            f"model.norm = sync, but compute.mode = {compute.mode} guarantees equal bits for any number of processes, "
            f"which is impossible with statistics over all ranks. Set compute.mode=ddp or model.norm=batch."
        )


def export_problems(export: ExportConfig) -> Iterator[str]:
    """Contradictions between export settings, one message each."""
    precision = f"export.precision = {export.precision}"
    if "fp32" not in export.precision:
        yield f"{precision} lacks fp32, from which the others are converted. Add it."
    if "onnx" not in export.formats:
        formats = f"export.formats = {export.formats}"
        if set(export.precision) - {"fp32"}:
            yield f"{precision}, but only ONNX files come in fp16 or int8 and {formats}. Add onnx."
        if export.engines:
            yield f"export.engines = {export.engines}, but only ONNX files run there and {formats}. Add onnx."
    if "int8" in export.precision and export.profile == "isaac":
        yield (
            "export.profile = isaac, but int8 is calibrated on a graph that takes bytes. Set export.profile=robot, or "
            "remove int8 from export.precision: TensorRT quantizes the model itself."
        )
    if bool(export.height) != bool(export.width):
        yield f"export.height = {export.height} and export.width = {export.width}. Set both or neither."


def check_critical_classes(chosen: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for a name in `export.critical_classes` that is not a class of the data set."""
    if unknown := [name for name in chosen if name not in names]:
        raise ConfigError(
            f"export.critical_classes = {list(chosen)}, but {unknown[0]} is not a class: {', '.join(names)}."
            f"{nearest(unknown[0], names)}"
        )
