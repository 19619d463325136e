"""Everything that a training run changes: network, average, optimizer. Also what is trained, and how fast."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from segpipe.errors import ConfigError, listed
from segpipe.keys import torch_seed
from segpipe.models import build_model
from segpipe.models.layers import SegmentationNet
from segpipe.models.weights import WeightsSource, fit, sha256_of
from segpipe.train.forward import frozen_modules

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable
    from segpipe.settings.config import Config
    from segpipe.settings.groups import EmaConfig, OptimConfig


def freeze(
    model: nn.Module, patterns: Sequence[str], random: Sequence[str] = ()
) -> str:
    """Freeze all parameters whose names match one of the patterns; returns a note on what is frozen.

    random: names of parameters that no weights file has set.

    A frozen parameter has no gradient, so it gets no weight decay and does not count in the gradient norm.
    `frozen_modules` are put into eval mode: their BatchNorm uses its statistics and keeps them, and their dropout does
    nothing. Raises ConfigError for a pattern that matches nothing or random values, and when nothing is left to train.
    """
    if not patterns:
        return ""
    parameters = dict(model.named_parameters())

    frozen = {
        name
        for pattern in patterns
        for name in _matches(model, pattern, "model.freeze")
    }
    if len(frozen) == len(parameters):
        raise ConfigError(
            f"model.freeze = {list(patterns)} freezes every parameter: nothing is left to train."
        )

    if stuck := sorted(frozen.intersection(random)):
        raise ConfigError(
            f"model.freeze = {list(patterns)} would keep {listed(stuck, 4)} at random initial values: the weights "
            f"file has none that fit. Narrow the patterns."
        )

    for name in frozen:
        parameters[name].requires_grad_(False)
    for module in frozen_modules(model):
        module.training = False

    count = sum(parameters[name].numel() for name in frozen)
    total = sum(p.numel() for p in parameters.values())
    return f"frozen: {len(frozen)} of {len(parameters)} tensors, {100 * count / total:.1f} % of the parameters"


def _matches(model: nn.Module, pattern: str, key: str) -> list[str]:
    """Names of the parameters that match, in network order. Raises ConfigError if none does."""
    names = [name for name, _ in model.named_parameters()]
    found = [name for name in names if fnmatchcase(name, pattern)]

    if not found:
        tops = dict.fromkeys(name.partition(".")[0] for name in names)
        valid = [top if top in names else f"{top}.*" for top in tops]
        raise ConfigError(
            f"{key}: {pattern!r} matches no parameter of {type(model).__name__}, which has {', '.join(valid)}."
        )
    return found


def parameter_groups(
    model: nn.Module, weight_decay: float, lr_scale: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Parameter groups: convolution and linear weights with weight decay, norms and biases (all 1-D tensors) without.

    With `lr_scale`, the parameters of each pattern follow in two groups of their own, with their factor as `lr_scale`.
    Patterns are sorted, so the groups do not depend on their order in a file. Raises ConfigError for a pattern that
    matches nothing or only frozen parameters, and for a parameter that matches two patterns.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    left = dict(trained)
    groups = []
    for pattern, factor in sorted((lr_scale or {}).items()):
        names = _matches(model, pattern, "optim.lr_scale")
        own = [left.pop(name) for name in names if name in left]
        if len(own) < len(trained.keys() & set(names)):
            raise ConfigError(
                f"optim.lr_scale: {pattern!r} and another pattern match the same parameter. Let each parameter match "
                f"only one pattern, so that the factor does not depend on their order."
            )
        if not own:
            raise ConfigError(
                f"optim.lr_scale: {pattern!r} matches only parameters that model.freeze freezes."
            )
        groups += _by_decay(own, weight_decay, lr_scale=float(factor))

    return [*_by_decay(list(left.values()), weight_decay), *groups]


def _by_decay(
    parameters: Sequence[nn.Parameter], weight_decay: float, **options: float
) -> list[dict[str, Any]]:
    groups = []
    for decays, decay in ((True, weight_decay), (False, 0.0)):
        if own := [p for p in parameters if (p.ndim > 1) == decays]:
            groups.append({"params": own, "weight_decay": decay, **options})
    return groups


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group: `rate`, times the group's factor if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, fused: bool = False
) -> torch.optim.Optimizer:
    """SGD with Nesterov-free momentum, or AdamW, over `parameter_groups`.

    On a GPU `foreach` launches few kernels. On a CPU it goes through all parameters once per operation, so none stays
    in cache: with 7.7 million parameters, a step of SGD takes 15.2 ms, against 6.3 ms in a loop over the parameters,
    and AdamW 25.6 ms against 19.0 ms. Both give the same bits. `fused` kernels (6.5 and 7.8 ms) give different bits,
    but can skip an update that overflowed under a loss scale without waiting for the GPU.
    """
    groups = parameter_groups(model, config.weight_decay, config.lr_scale)
    way = {"fused": True} if fused else {"foreach": groups[0]["params"][0].is_cuda}

    built: torch.optim.Optimizer
    if config.name == "sgd":
        built = _SGD(groups, lr=config.lr, momentum=config.momentum, **way)
    else:
        built = _ADAMW(groups, lr=config.lr, betas=tuple(config.betas), **way)

    if fused:
        built.register_step_pre_hook(_fill_momenta)
    return built


def _fill_momenta(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Start momenta at 0. torch's fused SGD leaves them uninitialized if the first update overflowed."""
    for group in optimizer.param_groups:
        if not group.get("momentum"):
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if parameter.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def _light(kind: type[torch.optim.Optimizer]) -> Any:
    """`kind` without the wrappers that shield its methods from torch.compile; optimizers here are not compiled.

    In torch 2.14 these wrappers import torch._dynamo in every public optimizer's constructor and `step`: 1.7 s of CPU
    time (2.2 s against 3.9 s for a process that does one update) and 146 MiB per process. There is no public switch. A
    method without a wrapper is used as it is, so nothing here needs to change once torch fixes this.
    """
    names = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")

    methods = {
        name: torch.no_grad()(inspect.unwrap(getattr(kind, name))) for name in names
    }
    return type(kind.__name__, (kind,), methods)


_SGD, _ADAMW = _light(torch.optim.SGD), _light(torch.optim.AdamW)


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Learning rate of update `step` of `steps`: linear warm-up, then poly or cosine decay to 0 after the last."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps

    done = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    if config.schedule == "poly":
        return config.lr * float((1.0 - done) ** config.power)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * done))


class Ema:
    """Exponential moving average of parameters and float buffers, in a second network that is always in eval mode.

    The decay of update t is min(decay, (1 + t) / (10 + t)), so that the initial weights do not dominate a short run.
    """

    def __init__(self, model: SegmentationNet, config: EmaConfig) -> None:
        self.decay = config.decay
        self.model: SegmentationNet = copy.deepcopy(model).eval().requires_grad_(False)
        averaged = self.model.state_dict(keep_vars=True)
        # Float tensors of the network and the average, each once: tied tensors have two names.
        self._pairs = {
            live: averaged[name]
            for name, live in model.state_dict(keep_vars=True).items()
            if live.is_floating_point()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the network after update `step` (0-based)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        live, averaged = list(self._pairs), list(self._pairs.values())
        torch._foreach_lerp_(averaged, live, 1.0 - decay)


@dataclass
class TrainState:
    """Network, its average, optimizer and loss scale after `step` updates."""

    model: SegmentationNet
    ema: Ema
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # does nothing unless train.precision is fp16
    step: int = 0  # updates done
    best_miou: float = -1.0
    weights: dict[str, Any] | None = (
        None  # content of weights.json, if a weights file was read
    )
    notes: tuple[str, ...] = ()  # for the user, about the start
    stale: int = 0  # validations since the one with best_miou
    teacher: SegmentationNet | None = None  # of loss.teacher; never changes


def build_state(
    config: Config,
    classes: ClassTable,
    device: torch.device,
    start: WeightsSource | None = None,
) -> TrainState:
    """A new state; its weights depend only on the seed, the network and the file of `model.weights`.

    Omit `start`, the content of that file, for a state that a checkpoint is restored into. Raises ConfigError for
    patterns of model.freeze and optim.lr_scale that match nothing, and WeightsError for weights that do not fit.
    """
    seed = torch_seed(config.seed, 0, 0, "weights")
    model = build_model(config.model.name, classes.num_classes, config.model.args, seed)
    model.train()  # the user's code may return it in eval mode, or freeze parts here
    record, notes = _load(model, config, classes, start) if start else (None, [])
    model = model.to(device)
    if config.model.norm == "sync":
        if device.type != "cuda":
            raise ConfigError(
                "model.norm = sync, but torch's SyncBatchNorm needs a GPU. Set model.norm=batch."
            )
        # Parameter names stay, so checkpoints fit both.
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    random = [*record["adapted"], *record["fresh"]] if record else []
    notes.append(freeze(model, config.model.freeze, random))
    scales = config.train.precision == "fp16"
    optimizer = build_optimizer(
        model, config.optim, fused=scales and device.type == "cuda"
    )
    scaler = torch.amp.GradScaler(device.type, enabled=scales)
    return TrainState(
        model,
        Ema(model, config.ema),
        optimizer,
        scaler,
        weights=record,
        notes=tuple(filter(None, notes)),
    )


def _load(
    model: SegmentationNet, config: Config, classes: ClassTable, start: WeightsSource
) -> tuple[dict[str, Any] | None, list[str]]:
    """Load the weights of the file into the network; returns the content of weights.json, and notes."""
    partial = config.model.weights_partial
    if not start.tensors:
        path, tensors = model.pretrained()
        start, partial = WeightsSource(tensors, path, sha256=sha256_of(tensors)), True
    if not start.tensors:
        return None, []
    found = fit(model, start, num_classes=classes.num_classes, partial=partial)
    if getattr(model, "wants_pretrained", False) and any(
        name.startswith("encoder.") and name.endswith("weight") for name in found.fresh
    ):
        raise ConfigError(
            f"model.args.pretrained = true, but the weights come from {start.where}, which lacks tensors of the "
            f"encoder: they would be random. Use a file with the encoder, or set model.args.pretrained=false."
        )
    notes = [f"weights of {start.where}, SHA-256 {start.sha256[:16]}: {found.summary}"]
    if start.class_names and not found.classes and start.class_names != classes.names:
        notes.append(
            f"the class layers of {start.path} were kept, but its classes are {listed(start.class_names, 9)}, and the "
            f"data set has {listed(classes.names, 9)}"
        )
    if start.standardize not in (None, config.model.standardize):
        notes.append(
            f"{start.path} was trained with model.standardize={start.standardize}, but this run has the opposite: its "
            f"first layers get inputs on another scale than they learned from"
        )
    return found.record(start), notes
