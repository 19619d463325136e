"""The checks of a configuration that need no files: ranges, and settings that contradict each other."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from segpipe.errors import ConfigError
from segpipe.settings.config import SETTINGS
from segpipe.settings.groups import STEPS

if TYPE_CHECKING:
    from segpipe.settings.config import Config
    from segpipe.settings.groups import ExportConfig


def check(config: Config, *, world_size: int) -> None:
    """Raise ConfigError for the first setting that a run could not work with. Reads no files."""
    if config.compute.mode == "run":  # in checkpoints and commands from before the name changed
        raise ConfigError(
            "compute.mode = run is now called ddp: torch's DDP, deterministic run to run. Set compute.mode=ddp."
        )
    for key, entry in SETTINGS.items():
        if problem := entry.problem(attrgetter(key)(config)):
            raise ConfigError(problem)
    _check_names(config)
    _check_processes(config, world_size)
    _check_length(config)
    low, high = config.augment.scale
    if low > high:
        raise ConfigError(f"augment.scale = {config.augment.scale}, but [smallest, largest] was needed.")
    for problem in export_problems(config.export):
        raise ConfigError(problem)


def _check_length(config: Config) -> None:
    train, schedule_steps = config.train, config.optim.schedule_steps
    if train.epochs and train.steps not in (0, STEPS):
        raise ConfigError(
            f"train.steps = {train.steps} and train.epochs = {train.epochs}. Set one of them; if an experiment sets "
            f"train.steps, train.steps=0 leaves it to train.epochs."
        )
    if train.patience and not train.validate_every:
        raise ConfigError(
            f"train.patience = {train.patience}, but train.validate_every = 0: there is no validation before the end. "
            f"Set train.validate_every to a number of updates."
        )
    if train.epochs:  # the number of updates is not known yet
        return
    if not train.steps:
        raise ConfigError("train.steps = 0, but a number of updates was needed. Set it, or train.epochs.")
    earliest = (train.patience + 1) * train.validate_every
    if train.patience and earliest >= train.steps:
        raise ConfigError(
            f"train.patience = {train.patience} and train.validate_every = {train.validate_every}: training could stop "
            f"after {earliest} updates at the earliest, but ends after train.steps = {train.steps}. Lower one of them."
        )
    if 0 < schedule_steps < train.steps:
        raise ConfigError(
            f"optim.schedule_steps = {schedule_steps}, but the run has train.steps = {train.steps} updates: the "
            f"last ones would have a learning rate of 0. Set optim.schedule_steps=0, or at least train.steps."
        )


def _check_names(config: Config) -> None:
    for part in (config.run.name, *Path(config.run.name).parts):
        if not part or part in (".", "..") or part.startswith("/") or not part.isprintable():
            raise ConfigError(f"run.name = {config.run.name!r} must name a folder below run.root = {config.run.root}.")
    if config.data.name in ("camvid", "folder") and not config.data.root:
        raise ConfigError(f"data.root is empty, but data={config.data.name} reads files. Set data.root=FOLDER.")
    try:
        re.compile(config.data.sequence)
    except re.error as error:
        raise ConfigError(f"data.sequence = {config.data.sequence!r} is not a regular expression: {error}.") from None
    if config.data.name == "synthetic" and config.data.hold_out:
        raise ConfigError(
            f"data.hold_out = {config.data.hold_out}, but data=synthetic has no sequences. Leave it empty."
        )


def _check_processes(config: Config, world_size: int) -> None:
    compute = config.compute
    if compute.nproc != "auto" and not (compute.nproc.isdecimal() and int(compute.nproc) > 0):
        raise ConfigError(f"compute.nproc = {compute.nproc!r}, but auto or at least 1 was needed.")
    if compute.shards & (compute.shards - 1):
        raise ConfigError(f"compute.shards = {compute.shards}, but a power of two was needed: the reduction is a tree.")
    if compute.shards % world_size:
        enough = "" if world_size & (world_size - 1) else f", or set compute.shards={world_size}"
        raise ConfigError(
            f"compute.shards = {compute.shards} cannot be divided among {world_size} processes. Use a number of "
            f"processes that divides it, a power of two{enough}."
        )
    if config.model.norm == "sync" and compute.mode in ("elastic", "audit"):
        raise ConfigError(
            f"model.norm = sync, but compute.mode = {compute.mode} promises the same bits for any number of processes, "
            f"which is impossible with statistics over all ranks. Set compute.mode=ddp or model.norm=batch."
        )


def export_problems(export: ExportConfig) -> list[str]:
    """Contradictions between export settings, one sentence each."""
    reduced = [name for name in export.precision if name != "fp32"]
    variable = f"export.dynamic = {export.dynamic}" if export.dynamic != "none" else ""
    precision, formats = f"export.precision = {export.precision}", f"export.formats = {export.formats}"
    rules = (
        ("fp32" not in export.precision, f"{precision} lacks fp32, from which the others are made. Add it."),
        (
            reduced and "onnx" not in export.formats,
            f"{precision}, but only ONNX files come in {' or '.join(reduced)} and {formats}. Add onnx.",
        ),
        (
            "int8" in reduced and export.profile == "isaac",
            "export.profile = isaac, but int8 is calibrated on a graph that takes bytes. Set export.profile=robot, or "
            "remove int8 from export.precision: TensorRT quantizes the model itself.",
        ),
        (
            export.dynamic == "hw" and "torchscript" in export.formats,
            f"{variable}, but {formats} has torchscript, whose trace keeps the size of its example. Remove it.",
        ),
        (
            variable and "int8" in reduced,
            f"{variable}, but int8 is calibrated for one shape. Remove int8 from export.precision, or set "
            "export.dynamic=none.",
        ),
        (
            variable and export.profile == "isaac",
            f"{variable}, but export.profile = isaac: the nodes of Isaac ROS take one shape. Set export.dynamic=none "
            "or export.profile=robot.",
        ),
        (
            bool(export.height) != bool(export.width),
            f"export.height = {export.height} and export.width = {export.width}. Set both or neither.",
        ),
    )
    return [sentence for broken, sentence in rules if broken]
