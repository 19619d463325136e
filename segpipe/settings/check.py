"""The checks of a configuration that need no files: ranges, and settings that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segpipe.errors import ConfigError, refuse
from segpipe.settings.config import SETTINGS, flat
from segpipe.settings.groups import FILE_SETS, STEPS
from segpipe.settings.setting import Setting, nearest

if TYPE_CHECKING:
    from segpipe.settings.config import Config
    from segpipe.settings.groups import DataConfig, ExportConfig

# Of an entry of data.mix.
MIX = {
    entry.key: entry
    for entry in (
        Setting("root", "", "folder"),
        replace(SETTINGS["data.name"], key="name"),
        Setting("weight", 1.0, "share of the samples", low=1e-9, high=1e9),
        Setting("map", {}, "{class of this set: class of the shared table}"),
        Setting("classes", "", "class table"),
        Setting("split", "", "split that validation reads"),
    )
}


def check(config: Config, *, world_size: int) -> None:
    """Raise ConfigError with a line for each setting that a run could not work with. Reads no files."""
    ranges = (SETTINGS[key].problem(value) for key, value in flat(config).items())
    refuse(filter(None, ranges))  # what follows needs sound values
    refuse(_contradictions(config, world_size))


def _contradictions(config: Config, world_size: int) -> Iterator[str]:
    yield from _names(config)
    yield from _delivery(config.data)
    yield from _sequences(config.data)
    yield from _start(config)
    yield from _processes(config, world_size)
    yield from _plugins(config)
    yield from _loss(config)
    yield from _length(config)
    low, high = config.augment.scale
    if low > high:
        yield f"augment.scale = {config.augment.scale}, but [smallest, largest] was needed."
    if config.augment.color_on == "device" and config.augment.extra:
        yield (
            f"augment.color_on = device, but augment.extra = {config.augment.extra} comes after color and needs the "
            f"colored pixels in the loader process. Set augment.color_on=worker, or augment.extra=[]."
        )
    yield from export_problems(config.export)


def _plugins(config: Config) -> Iterator[str]:
    for group, part in (("loss", config.loss), ("data", config.data)):
        if part.args and ":" not in part.name:
            yield f"{group}.args = {part.args}, but {part.name} takes none: only plug-ins (package.module:Name) do."


def _loss(config: Config) -> Iterator[str]:
    loss, device = config.loss, config.compute.device
    if ":" in loss.name:
        if loss.label_smoothing:
            yield (
                f"loss.label_smoothing = {loss.label_smoothing}, but {loss.name} is your own loss. Smooth there, and "
                f"set loss.label_smoothing=0."
            )
        if loss.backend not in ("auto", "plain"):
            yield (
                f"loss.backend = {loss.backend}, but {loss.name} takes logits at full resolution. Set "
                f"loss.backend=auto."
            )
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
            f"train.steps, train.steps=0 leaves it to train.epochs."
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
            f"after {earliest} updates at the earliest, but ends after train.steps = {train.steps}. Lower one of them."
        )
    if 0 < schedule_steps < train.steps:
        yield (
            f"optim.schedule_steps = {schedule_steps}, but the run has train.steps = {train.steps} updates: the "
            f"last ones would have a learning rate of 0. Set optim.schedule_steps=0, or at least train.steps."
        )


def _names(config: Config) -> Iterator[str]:
    name = config.run.name
    parts = Path(name).parts
    if not parts or {"..", "/"} & set(parts) or not name.isprintable():
        yield f"run.name = {name!r} must name a folder below run.root = {config.run.root}."
    yield from filter(None, _mixture(config.data))
    if config.data.name in FILE_SETS and not config.data.root and not config.data.mix:
        yield f"data.root is empty, but data={config.data.name} reads files. Set data.root=FOLDER."
    for key, value in (("images", config.data.images), ("masks", config.data.masks)):
        if value and config.data.name not in FILE_SETS:
            yield f"data.{key} = {value}, but only data in files reads it. Remove it, or set data=folder."


def _delivery(data: DataConfig) -> Iterator[str]:
    if (
        data.pack != "off"
        and not data.mix
        and (data.name == "synthetic" or ":" in data.name)
    ):
        yield (
            f"data.pack = {data.pack}, but the samples of data={data.name} do not lie in files. Set data.pack=off; "
            f"data.cache_mib keeps them in memory."
        )
    if not data.pack:
        yield ("data.pack is empty, but off, auto or a folder was needed.")
    if data.pack_images != "raw" and data.pack == "off":
        yield f"data.pack_images = {data.pack_images}, but data.pack = off. Set data.pack=auto."


def _mixture(data: DataConfig) -> Iterator[str]:
    """What is wrong with the entries of data.mix, as far as no file is needed to tell."""
    for number, entry in enumerate(data.mix):
        key = f"data.mix[{number}]"
        for name, value in entry.items():
            if name in MIX:
                yield _entry_problem(replace(MIX[name], key=f"{key}.{name}"), value)
            else:
                yield f"{key}.{name} is not one of {', '.join(MIX)}.{nearest(name, MIX)}"
        is_drawn = entry.get("name") == "synthetic"
        inherits = data.root and "name" not in entry
        if not (entry.get("root") or is_drawn or inherits):
            yield f"{key} has no root. Set root to the folder of this data set, such as {{root: FOLDER}}."
    if 0 < sum("weight" in entry for entry in data.mix) < len(data.mix):
        yield (
            "data.mix gives some sets a weight and others none. Give all a weight, or none: then each set counts by "
            "its number of images."
        )


def _entry_problem(kind: Setting, value: Any) -> str:
    texts = list(value.values()) if isinstance(value, dict) else [value]
    if isinstance(kind.default, str | dict) and not all(
        isinstance(text, str) and text for text in texts
    ):
        return f"{kind.key} = {value!r}, but text was needed."
    try:
        return kind.problem(kind.convert(value))
    except ConfigError as error:
        return str(error)


def _sequences(data: DataConfig) -> Iterator[str]:
    try:
        re.compile(data.sequence)
    except re.error as error:
        yield f"data.sequence = {data.sequence!r} is not a regular expression: {error}."
    if data.hold_out and (data.mix or data.name not in FILE_SETS):
        kind = "data.mix" if data.mix else f"data={data.name}"
        yield (
            f"data.hold_out = {data.hold_out}, but {kind} cannot leave a sequence out, as data=folder and other data "
            f"in files can. Leave it empty."
        )


def _start(config: Config) -> Iterator[str]:
    model = config.model
    if model.weights_sha256 and not re.fullmatch("[0-9a-f]{64}", model.weights_sha256):
        yield f"model.weights_sha256 = {model.weights_sha256!r}, but 64 digits 0-9a-f were needed, as sha256sum prints."
    for key in ("weights_sha256", "weights_partial"):
        if getattr(model, key) and not model.weights:
            yield f"model.{key} is set, but model.weights is empty. Set model.weights=FILE."
    if model.weights and model.name == "timm" and model.args.get("pretrained"):
        yield (
            f"model.weights = {model.weights} and model.args.pretrained = true, but a run starts from one of them. Set "
            f"model.args.pretrained=false."
        )
    if model.freeze and not (
        model.weights or model.args.get("pretrained") or ":" in model.name
    ):
        yield (
            f"model.freeze = {model.freeze}, but without model.weights these parameters would stay at their random "
            f"initial values. Set model.weights=FILE."
        )


def _processes(config: Config, world_size: int) -> Iterator[str]:
    compute = config.compute
    if compute.nproc != "auto" and not (
        compute.nproc.isdecimal() and int(compute.nproc) > 0
    ):
        yield f"compute.nproc = {compute.nproc!r}, but auto or at least 1 was needed."
    if compute.shards < world_size:
        yield (
            f"compute.shards = {compute.shards}, but there are {world_size} processes and each needs a shard. Start at "
            f"most {compute.shards} processes, or set compute.shards={world_size} (another global batch)."
        )
    if compute.mode in ("off", "ddp") and compute.shards % world_size:
        yield (
            f"compute.shards = {compute.shards} cannot be divided among {world_size} processes, and compute.mode = "
            f"{compute.mode} gives all of them equal batches. Use compute.mode=elastic, which takes any number of "
            f"processes up to {compute.shards}, or a number that divides it."
        )
    for name in ("compile", "cuda_graph"):
        if getattr(compute, name) and compute.mode != "elastic":
            yield (
                f"compute.{name} = true, but compute.mode = {compute.mode}: DDP needs the gradients one by one, and an "
                f"audit the layers. Set compute.mode=elastic or compute.{name}=false."
            )
    if compute.compile and compute.cuda_graph:
        yield "compute.compile = true and compute.cuda_graph = true: set one of them to false."
    if config.model.norm == "sync" and compute.mode in ("elastic", "audit"):
        yield (
            f"model.norm = sync, but compute.mode = {compute.mode} promises the same bits for any number of processes, "
            f"which is impossible with statistics over all ranks. Set compute.mode=ddp or model.norm=batch."
        )


def export_problems(export: ExportConfig) -> list[str]:
    """Contradictions between export settings, one sentence each."""
    reduced = [name for name in export.precision if name != "fp32"]
    precision, formats = (
        f"export.precision = {export.precision}",
        f"export.formats = {export.formats}",
    )
    rules = (
        (
            "fp32" not in export.precision,
            f"{precision} lacks fp32, from which the others are made. Add it.",
        ),
        (
            reduced and "onnx" not in export.formats,
            f"{precision}, but only ONNX files come in {' or '.join(reduced)} and {formats}. Add onnx.",
        ),
        (
            export.engines and "onnx" not in export.formats,
            f"export.engines = {export.engines}, but only ONNX files run there and {formats}. Add onnx.",
        ),
        (
            "int8" in reduced and export.profile == "isaac",
            "export.profile = isaac, but int8 is calibrated on a graph that takes bytes. Set export.profile=robot, or "
            "remove int8 from export.precision: TensorRT quantizes the model itself.",
        ),
        (
            bool(export.height) != bool(export.width),
            f"export.height = {export.height} and export.width = {export.width}. Set both or neither.",
        ),
    )
    return [sentence for broken, sentence in rules if broken]


def check_critical_classes(chosen: Sequence[str], names: Sequence[str]) -> None:
    """Raise ConfigError for a name in `export.critical_classes` that is no class of the data set."""
    if unknown := [name for name in chosen if name not in names]:
        raise ConfigError(
            f"export.critical_classes = {list(chosen)}, but {unknown[0]} is no class: {', '.join(names)}."
            f"{nearest(unknown[0], list(names))}"
        )
