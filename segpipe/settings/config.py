"""The configuration of a run: every setting, its meaning, and the one check.

Imports no torch and builds nothing, so that `train.py --help` and a wrong key answer at once.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from segpipe.errors import ConfigError
from segpipe.settings.export_settings import EXPORT_KEYS, ExportConfig, export_choices, export_problems, export_ranges

MODEL_NAMES = ("fast_scnn", "ddrnet23_slim", "pidnet_s")
DATA_NAMES = ("synthetic", "camvid", "folder")


@dataclass
class RunConfig:
    name: str = "run"  # the folder below `root`; a pure function of the configuration
    root: str = "runs"
    exists: str = "error"  # error | resume | replace: what to do when the folder already holds a run
    allow_fingerprint_change: bool = False  # resume under other versions or hardware, where bits may differ


@dataclass
class ModelConfig:
    name: str = "fast_scnn"  # a key of segpipe.models.MODELS
    norm: str = "batch"  # batch | sync: statistics of a shard, or of all ranks (compute.mode ddp or off, GPUs)


@dataclass
class DataConfig:
    name: str = "synthetic"  # synthetic | camvid | folder
    root: str = ""  # folder of the data set; unused by synthetic
    split: str = "val"  # the split that validation reads
    classes: str = ""  # folder: YAML class table; empty means <root>/classes.yaml
    size: list[int] = field(default_factory=lambda: [192, 384])  # synthetic: (height, width) in pixels
    num_train: int = 2000  # synthetic: number of distinct training scenes
    num_val: int = 64  # synthetic: number of validation scenes
    shuffle_labels: bool = False  # control experiment: targets of other images; a network must not learn
    verify: str = "auto"  # auto | full | headers: how much is read before the first step
    hash: bool = True  # write a SHA-256 of every file into the run's inputs.json, for audits; reads all files once
    workers: int = 2  # loader processes per rank; 0 loads in the training process
    start_method: str = "fork"  # fork | forkserver | spawn: how the loader processes start
    cache_mib: int = 0  # decoded training samples that each loader process may keep in memory
    prefetch: int = 4  # shard batches that each loader process prepares ahead
    timeout_s: float = 300.0  # without a word from a loader process after which the run ends and says where it stands


@dataclass
class AugmentConfig:
    crop_size: list[int] = field(default_factory=lambda: [192, 384])  # (height, width) in pixels
    scale: list[float] = field(default_factory=lambda: [0.75, 1.5])  # range of the random resize, uniform in log
    flip: float = 0.5  # probability of a left-right flip
    brightness: float = 0.2  # largest relative change
    contrast: float = 0.2
    saturation: float = 0.2
    hue: float = 0.02  # largest shift, in turns
    extra: list[str] = field(default_factory=list)  # further transforms: keys of segpipe.data.transforms.TRANSFORMS
    check: bool = True  # probe at the start of training that augmentation is a pure function of sample and key
    canary: int = 1000  # one sample in so many is augmented again by other processes and compared; 0 means none
    keyed: bool = True  # False is the control: albumentations' own random state, as other trainers use it


@dataclass
class LossConfig:
    name: str = "cross_entropy"  # cross_entropy | ohem
    class_weights: str = "none"  # none | log: 1 / log(1.02 + frequency), mean 1 over the training pixels
    aux_weight: float = 0.4  # of each auxiliary class head
    stride: int = 1  # the main head's loss takes every n-th row and column of the target, which costs n * n less
    aux_stride: int = 1  # the same for the auxiliary class heads
    dice_weight: float = 0.0  # of a soft Dice loss on the main head, in which all classes weigh the same
    boundary_weight: float = 20.0  # of the boundary head, where the network has one
    ohem_threshold: float = 0.7  # pixels whose correct-class probability is above this are easy
    ohem_min_kept: float = 0.0625  # fraction of a shard's pixels that are always kept


@dataclass
class OptimConfig:
    name: str = "sgd"  # sgd | adamw
    lr: float = 0.05
    momentum: float = 0.9
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 5e-4  # not applied to norms and biases
    schedule: str = "poly"  # poly | cosine
    power: float = 0.9  # of poly
    schedule_steps: int = 0  # updates after which the rate would be 0; 0 means train.steps, which may end earlier
    warmup_steps: int = 20
    clip_norm: float = 0.0  # largest gradient norm; 0 means no clipping


@dataclass
class EmaConfig:
    decay: float = 0.99  # 0 turns the average off


@dataclass
class TrainConfig:
    steps: int = 400
    precision: str = "fp32"  # fp32 | bf16 | fp16: autocast in the network; the loss is always fp32
    channels_last: bool = True
    log_every: int = 10  # steps between lines of metrics.jsonl
    validate_every: int = 0  # steps between validations; 0 means at the end only
    progress: bool = True


@dataclass
class ComputeConfig:
    mode: str = "elastic"  # off | ddp | elastic | audit: which runs give the same bits; see docs/determinism.md
    nproc: str = "auto"  # processes of this machine; auto: the number of GPUs, or 1
    device: str = "auto"  # auto | cpu | cuda
    shards: int = 4  # logical shards, a power of two: the global batch is shards * samples_per_shard
    samples_per_shard: int = 4
    threads: int = 2  # intra-op threads per process; part of the numerics on a CPU
    ledger: bool = True  # write digests of every step, and compare those of the state across the ranks
    timeout_s: float = 600.0  # of a collective


@dataclass
class CheckpointConfig:
    every: int = 100  # steps between writes of last.pt; 0 means at the end only
    keep_every: int = 0  # steps between checkpoints that stay, step_NNNNNN.pt, for audits; 0 means none


@dataclass
class TrackConfig:
    name: str = "none"  # none | wandb; metrics.jsonl is always written
    project: str = "segpipe"
    entity: str = ""
    mode: str = "online"  # wandb: online | offline


@dataclass
class Config:
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    @property
    def run_dir(self) -> Path:
        """Folder of the run; the same on every rank because nothing but the configuration enters it."""
        return Path(self.run.root) / self.run.name

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer update, whatever the number of processes."""
        return self.compute.shards * self.compute.samples_per_shard


def known_keys(kind: type = Config, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings, in the order of the dataclasses."""
    for entry in fields(kind):
        default = entry.default_factory() if callable(entry.default_factory) else None
        if is_dataclass(default):
            yield from known_keys(type(default), f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name


def nearest(word: str, choices: list[str] | tuple[str, ...]) -> str:
    """A sentence that names the choice nearest to `word`, led by a space; empty without choices."""
    found = difflib.get_close_matches(word, choices, n=1, cutoff=0.0)
    if not found:
        return ""
    alike = difflib.SequenceMatcher(None, word, found[0]).ratio() >= 0.5
    return f" Did you mean {found[0]}?" if alike else f" The nearest is {found[0]}."


def from_mapping(values: Mapping[str, Any]) -> Config:
    """Config from nested mappings, as Hydra composes it or a checkpoint holds it.

    Raises ConfigError on a key that no dataclass has, with the nearest valid one, and on a value of another type.
    """
    built = _build(Config, values, "")
    assert isinstance(built, Config)
    return built


def _build(kind: type, values: Mapping[str, Any], prefix: str) -> Any:
    built = {}
    valid = {entry.name: entry for entry in fields(kind)}
    for key, value in values.items():
        if key not in valid:
            found = nearest(f"{prefix}{key}", list(known_keys()))
            raise ConfigError(f"{prefix}{key} is not a setting of segpipe.{found}")
        entry = valid[key]
        default = entry.default_factory() if callable(entry.default_factory) else entry.default
        if is_dataclass(default):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{prefix}{key} = {value!r}, but it is a group of settings, such as {prefix}{key}.name."
                )
            built[key] = _build(type(default), value, f"{prefix}{key}.")
        else:
            built[key] = _convert(prefix + key, value, default)
    return kind(**built)


def _convert(name: str, value: Any, default: Any) -> Any:
    """`value` as the type of `default`; a number given for text (`compute.nproc=4`) is taken as text."""
    if isinstance(default, list):
        if not isinstance(value, list | tuple) or (default and not value):
            raise ConfigError(f"{name} = {value!r}, but a list such as {default or ['name']} was needed.")
        kind = default[0] if default else ""  # a list that may be empty is one of names
        return [_convert(f"{name}[{place}]", item, kind) for place, item in enumerate(value)]
    if isinstance(default, bool) or isinstance(value, bool):
        fits = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, float):
        fits = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    elif isinstance(default, str):
        fits = isinstance(value, str | int | float)
    else:
        fits = isinstance(value, type(default))
    if not fits:
        raise ConfigError(f"{name} = {value!r}, but {type(default).__name__} was needed, such as {default!r}.")
    return type(default)(value)


def to_mapping(config: Config) -> dict[str, Any]:
    """Nested plain dictionaries: what is stored in a checkpoint and in config.json."""
    return asdict(config)


# What may change between an interrupted run and its continuation: none of it reaches the numbers.
FREE_KEYS = frozenset(
    {
        "run.name", "run.root", "run.exists", "run.allow_fingerprint_change", "data.root", "data.classes",
        "data.verify", "data.hash", "data.workers",
        "data.start_method", "data.prefetch", "data.timeout_s", "data.cache_mib",
        "train.log_every", "train.validate_every", "train.progress", "compute.nproc", "compute.timeout_s",
        "compute.ledger", "checkpoint.every", "checkpoint.keep_every", "track.name", "track.project",
        "track.entity", "track.mode",
        "augment.check", "augment.canary", *EXPORT_KEYS,
    }
)  # fmt: skip


def recipe(config: Config) -> dict[str, Any]:
    """The settings that decide what is trained, as dotted names: all but FREE_KEYS."""
    flat: dict[str, Any] = {}
    for group, value in to_mapping(config).items():
        entries = {f"{group}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {group: value}
        flat.update({name: item for name, item in entries.items() if name not in FREE_KEYS})
    if config.compute.mode == "audit":
        flat["compute.mode"] = "elastic"  # the same numbers, with more of them written down
    return flat


def config_hash(config: Config) -> str:
    """Hex digest over all settings that ranks must share; ranks compare it when they meet."""
    text = json.dumps(to_mapping(config), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check(config: Config, *, world_size: int) -> None:
    """Raise ConfigError for the first setting with which the run could not work; touches no file but `data.root`."""
    _check_choices(config)
    _check_ranges(config)
    compute = config.compute
    if compute.shards & (compute.shards - 1):
        raise ConfigError(f"compute.shards = {compute.shards}, but a power of two was needed: the reduction is a tree.")
    if compute.shards % world_size:
        enough = "" if world_size & (world_size - 1) else f", or set compute.shards={world_size}"
        raise ConfigError(
            f"compute.shards = {compute.shards} cannot be divided among {world_size} processes. Take a number of "
            f"processes that divides it, a power of two{enough}."
        )
    if compute.samples_per_shard < 2:
        raise ConfigError(
            f"compute.samples_per_shard = {compute.samples_per_shard}, but at least 2 was needed: the networks pool "
            f"whole images, which leaves BatchNorm one value per image."
        )
    if config.model.norm == "sync" and compute.mode in ("elastic", "audit"):
        raise ConfigError(
            f"model.norm = sync, but compute.mode = {compute.mode} promises the same bits for any number of processes, "
            f"which statistics over all ranks cannot keep. Set compute.mode=ddp, or model.norm=batch."
        )
    if 0 < config.optim.schedule_steps < config.train.steps:
        raise ConfigError(
            f"optim.schedule_steps = {config.optim.schedule_steps}, but the run has train.steps = {config.train.steps} "
            f"updates: the last would have no learning rate. Set optim.schedule_steps=0, or at least train.steps."
        )
    for problem in export_problems(config.export):
        raise ConfigError(problem)
    if config.data.name in ("camvid", "folder") and not config.data.root:
        raise ConfigError(f"data.root is empty, but data={config.data.name} reads files. Set data.root=FOLDER.")


def _check_choices(config: Config) -> None:
    if config.compute.mode == "run":
        raise ConfigError(
            "compute.mode = run is now called ddp: torch's DDP, deterministic run to run. Set compute.mode=ddp."
        )
    choices: list[tuple[str, str, tuple[str, ...]]] = [
        ("run.exists", config.run.exists, ("error", "resume", "replace")),
        ("model.name", config.model.name, MODEL_NAMES),
        ("data.name", config.data.name, DATA_NAMES),
        ("data.verify", config.data.verify, ("auto", "full", "headers")),
        ("data.start_method", config.data.start_method, ("fork", "forkserver", "spawn")),
        ("loss.name", config.loss.name, ("cross_entropy", "ohem")),
        ("loss.class_weights", config.loss.class_weights, ("none", "log")),
        ("optim.name", config.optim.name, ("sgd", "adamw")),
        ("optim.schedule", config.optim.schedule, ("poly", "cosine")),
        ("train.precision", config.train.precision, ("fp32", "bf16", "fp16")),
        ("model.norm", config.model.norm, ("batch", "sync")),
        ("compute.mode", config.compute.mode, ("off", "ddp", "elastic", "audit")),
        ("compute.device", config.compute.device, ("auto", "cpu", "cuda")),
        ("track.name", config.track.name, ("none", "wandb")),
        ("track.mode", config.track.mode, ("online", "offline")),
        *export_choices(config.export),
    ]
    for name, value, valid in choices:
        if value not in valid:
            raise ConfigError(f"{name} = {value!r} is not one of {', '.join(valid)}.{nearest(value, valid)}")
    if config.compute.nproc != "auto" and not (config.compute.nproc.isdecimal() and int(config.compute.nproc) > 0):
        raise ConfigError(f"compute.nproc = {config.compute.nproc!r}, but auto or at least 1 was needed.")
    for part in (config.run.name, *Path(config.run.name).parts):
        if not part or part in (".", "..") or part.startswith("/") or not part.isprintable():
            raise ConfigError(f"run.name = {config.run.name!r} must name a folder below run.root = {config.run.root}.")


def _check_ranges(config: Config) -> None:
    ranges: list[tuple[str, float, float, float]] = [
        ("seed", config.seed, 0, 2**63 - 1),
        ("train.steps", config.train.steps, 1, math.inf),
        ("optim.schedule_steps", config.optim.schedule_steps, 0, math.inf),
        ("train.log_every", config.train.log_every, 1, math.inf),
        ("train.validate_every", config.train.validate_every, 0, math.inf),
        ("checkpoint.every", config.checkpoint.every, 0, math.inf),
        ("checkpoint.keep_every", config.checkpoint.keep_every, 0, math.inf),
        ("compute.shards", config.compute.shards, 1, 65536),
        ("compute.threads", config.compute.threads, 1, 1024),
        ("compute.timeout_s", config.compute.timeout_s, 1, 10**9),
        ("data.workers", config.data.workers, 0, 256),
        ("data.cache_mib", config.data.cache_mib, 0, math.inf),
        ("data.prefetch", config.data.prefetch, 1, 1024),
        ("data.timeout_s", config.data.timeout_s, 1, 10**9),
        ("data.num_train", config.data.num_train, 1, math.inf),
        ("data.num_val", config.data.num_val, 1, math.inf),
        ("augment.flip", config.augment.flip, 0, 1),
        ("augment.brightness", config.augment.brightness, 0, 1),
        ("augment.contrast", config.augment.contrast, 0, 1),
        ("augment.saturation", config.augment.saturation, 0, 1),
        ("augment.hue", config.augment.hue, 0, 0.5),
        ("augment.canary", config.augment.canary, 0, 10**6),
        ("optim.lr", config.optim.lr, 0, math.inf),
        ("optim.momentum", config.optim.momentum, 0, 1),
        *(("optim.betas", beta, 0, 1 - 1e-9) for beta in config.optim.betas),
        ("optim.weight_decay", config.optim.weight_decay, 0, math.inf),
        ("optim.power", config.optim.power, 0, math.inf),
        ("optim.warmup_steps", config.optim.warmup_steps, 0, math.inf),
        ("optim.clip_norm", config.optim.clip_norm, 0, math.inf),
        ("ema.decay", config.ema.decay, 0, 1),
        ("loss.aux_weight", config.loss.aux_weight, 0, math.inf),
        ("loss.dice_weight", config.loss.dice_weight, 0, math.inf),
        ("loss.boundary_weight", config.loss.boundary_weight, 0, math.inf),
        ("loss.stride", config.loss.stride, 1, 8),
        ("loss.aux_stride", config.loss.aux_stride, 1, 8),
        ("loss.ohem_min_kept", config.loss.ohem_min_kept, 0, 1),
        ("loss.ohem_threshold", config.loss.ohem_threshold, 0, 1),
        *export_ranges(config.export),
    ]
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise ConfigError(f"{name} = {value}, but a value from {low} to {high} was needed.")
    for name, pair in (("augment.crop_size", config.augment.crop_size), ("data.size", config.data.size)):
        if len(pair) != 2 or min(pair) < 32:
            raise ConfigError(f"{name} = {pair}, but [height, width] of at least 32 pixels each was needed.")
    if len(config.optim.betas) != 2:
        raise ConfigError(f"optim.betas = {config.optim.betas}, but two numbers such as [0.9, 0.999] were needed.")
    extra = config.augment.extra
    if len(set(extra)) < len(extra):
        raise ConfigError(f"augment.extra = {extra} names a transform twice; each may be given once.")
    scale = config.augment.scale
    if len(scale) != 2 or not 0.1 <= scale[0] <= scale[1] <= 10:
        raise ConfigError(f"augment.scale = {scale}, but [smallest, largest] within 0.1 to 10 was needed.")
