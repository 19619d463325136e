"""Checkpoints, written atomically with digests that are checked on reading, and the state that a run starts from."""

from __future__ import annotations

import hashlib
import io
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from segpipe import plugins
from segpipe.data.catalog import ClassTable
from segpipe.determinism import flags
from segpipe.errors import CheckpointError, ConfigError, WeightsError
from segpipe.files import write_atomically
from segpipe.ledger.digest import leaves, state_digest
from segpipe.losses.total import PIXEL_TERMS, backend
from segpipe.models import build_model
from segpipe.models.preprocess import Preprocess
from segpipe.models.weights import (
    WeightsSource,
    read_safetensors,
    read_torch,
    state_dict_in,
)
from segpipe.settings.config import (
    Config,
    changed_course,
    config_hash,
    from_mapping,
    recipe,
    to_mapping,
)
from segpipe.train.start import pin_weights, pinned_teacher, weights_file
from segpipe.train.state import TrainState, build_state

if TYPE_CHECKING:
    from segpipe.distributed.group import Group
    from segpipe.models.layers import SegmentationNet

FORMAT = "segpipe-checkpoint"
VERSION = 2


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network with everything needed to use it."""

    model: SegmentationNet  # the averaged weights, in eval mode, on the CPU
    preprocess: Preprocess
    config: Config
    classes: ClassTable
    ema_digest: str
    step: int
    # Hash of the settings in the file, which an earlier version may have written.
    config_hash: str = ""
    path: Path | None = None  # of the file it was read from


def snapshot(
    state: TrainState, config: Config, classes: ClassTable, fingerprint: dict[str, Any]
) -> dict[str, Any]:
    """Copy of the state and of all that its bits depend on, for `save`; later updates do not change it."""
    return {
        "step": state.step,
        "config": to_mapping(config),
        "classes": asdict(classes),
        "fingerprint": fingerprint,
        "model": _copied(state.model.state_dict()),
        "ema": _copied(state.ema.model.state_dict()),
        "optimizer": _copied(state.optimizer.state_dict()),
        "scaler": state.scaler.state_dict(),
        "best_miou": state.best_miou,
        "stale": state.stale,
    }


def _copied(value: Any) -> Any:
    """Nested dictionaries with copies of all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return value


class Found(NamedTuple):
    """An intact checkpoint."""

    path: Path
    content: dict[str, Any]
    note: str = ""  # why it is not last.pt


def candidates(folder: Path) -> list[Path]:
    """Checkpoints in the folder to resume from, intact or not: last.pt, best.pt, then step_*.pt, newest first."""
    numbered = (path for path in folder.glob("step_*.pt") if path.stem[5:].isdecimal())
    newest_first = sorted(numbered, key=lambda path: -int(path.stem[5:]))
    paths = (folder / "last.pt", folder / "best.pt", *newest_first)
    return [path for path in paths if path.is_file()]


def newest_whole(folder: Path) -> Found | None:
    """The checkpoint to resume from: last.pt or, if it is missing or damaged, the newest other intact one.

    None if there is no checkpoint. Raises CheckpointError when none is intact, or a file cannot be read now.
    """
    whole: list[Found] = []
    faults: list[str] = []
    for path in candidates(folder):
        try:
            whole.append(Found(path, load(path)))
        except CheckpointError as error:
            # If the disk fails now, the file may still be intact.
            if isinstance(error.__cause__, OSError):
                raise
            faults.append(str(error))
        else:
            if path.name != "best.pt":
                break  # the others are older
    if whole:
        newest = max(whole, key=lambda found: found.content["step"])
        last = folder / "last.pt"
        if newest.path == last:
            return newest
        fault = f"damaged ({faults[0]})" if last.is_file() else "missing"
        return newest._replace(
            note=f"the newest intact checkpoint is {newest.path.name} of step "
            f"{newest.content['step']}; {last} is {fault}"
        )
    if faults:
        raise CheckpointError(
            f"{folder} holds no intact checkpoint. {' '.join(faults[:2])} Put back a copy of last.pt or a step_*.pt, "
            f"or start again at step 0 with run.exists=replace."
        )
    return None


def common_fingerprint(
    config: Config, group: Group, loss: str
) -> tuple[dict[str, Any], list[str]]:
    """Environment fingerprint of rank 0, and a phrase for each value that differs on another rank.

    `loss`: what computes the loss on this rank. Raises ConfigError on every rank when ranks differ in it, or in the
    code of a plug-in.
    """
    own = own_fingerprint(config, loss)
    if config.compute.mode not in ("elastic", "audit"):
        own["world_size"] = group.world_size
    first, *others = group.gather(own)
    phrases = []
    for rank, other in enumerate(others, 1):
        if changed := flags.changed_plugins(first, other):
            raise ConfigError(
                f"{', '.join(changed[:4])} on rank {rank} differs from rank 0. Copy the plug-in code to all machines, "
                f"or start from a shared folder."
            )
        if config.compute.mode != "off" and first[flags.LOSS] != other[flags.LOSS]:
            raise ConfigError(
                f"loss.backend = {config.loss.backend} is {other[flags.LOSS]} on rank {rank} and {first[flags.LOSS]} "
                f"on rank 0, which gives different bits. Install a C compiler (CPU) or triton (CUDA) on all machines, "
                f"or set loss.backend=plain."
            )
        for name, (value, theirs) in flags.differences(first, other).items():
            phrases.append(f"rank {rank}: {name} {theirs}, rank 0: {value}")
    return first, phrases


def own_fingerprint(config: Config, loss: str) -> dict[str, Any]:
    """Fingerprint of this process: environment, plug-in code if there is any, and what computes the loss."""
    found = flags.fingerprint(gpu=config.compute.device != "cpu") | {flags.LOSS: loss}
    if code := plugins.sources(config.import_paths):
        found[flags.PLUGINS] = code
    return found


def agree_on_step(last: Path, step: int, group: Group) -> None:
    """Raises CheckpointError unless all ranks found the same checkpoint, or none did."""
    steps = group.gather(step)
    if set(steps) != {step}:
        raise CheckpointError(
            f"{last} is not the same file on every machine: ranks 0, 1, ... would start at steps {steps}. "
            f"Set run.root to a folder that all machines share."
        )


def state_of(
    config: Config, group: Group, classes: ClassTable, found: Found | None
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """The state, new or from the checkpoint; the fingerprint of rank 0; warnings."""
    apply = partial(flags.apply, config.compute.threads, config.compute.mode)
    apply()  # plug-in modules may have changed the switches on import
    state = build_state(
        config, classes, group.device, None if found else read_start(config)
    )
    if config.loss.teacher:
        state.teacher = read_teacher(config).model.to(group.device)
    apply()  # and so may the network
    fingerprint, rank_differences = common_fingerprint(
        config, group, backend(config.loss, group.device.type)
    )
    if found:
        restore(found, state, config, classes, fingerprint)
        if found.note and group.is_main:
            print(found.note, file=sys.stderr)  # also without train.progress
    warnings = []
    on_cpu, precision = group.device.type == "cpu", config.train.precision
    if precision == "fp32" and not on_cpu:
        warnings.append(
            "train.precision = fp32 runs without TF32, at an estimated third of the speed of train.precision=bf16. "
            "tf32 lies in between, with equal bits on GPUs of one kind."
        )
    chosen = config.loss.backend != "auto" or config.loss.name not in PIXEL_TERMS
    if on_cpu and fingerprint[flags.LOSS] == "plain" and not chosen:
        warnings.append(
            "torch computes the loss, which takes more time and memory than compiled code, and has other last bits: "
            "no C compiler was found, or no folder for what it makes. Install gcc, or set XDG_CACHE_HOME."
        )
    instructions = fingerprint["instructions"]  # None: nobody knows
    known = on_cpu and instructions is not None
    if known and precision == "bf16" and "bf16" not in instructions:
        warnings.append(
            "train.precision = bf16, but this CPU has no bf16 instructions: an update takes 8 to 16 times as long as "
            "with train.precision=fp32."
        )
    if rank_differences and config.compute.mode != "off":
        warnings.append(
            f"ranks differ, so another number of processes may give different bits: {'; '.join(rank_differences[:4])}"
        )
    return state, fingerprint, warnings


def restore(
    found: Found,
    state: TrainState,
    config: Config,
    classes: ClassTable,
    fingerprint: dict[str, Any],
) -> None:
    """Load a checkpoint into `state`.

    Raises CheckpointError, naming what differs, when recipe, classes or environment are not those of its training.
    """
    path, saved = found.path, found.content
    if changed := changed_course(recipe(from_mapping(saved["config"])), recipe(config)):
        raise CheckpointError(f"{path} {changed}")
    if not config.run.allow_fingerprint_change:
        _check_fingerprint(path, saved["fingerprint"], fingerprint, config.compute.mode)
    for part in ("names", "train_ids"):
        before, now = saved["classes"][part], getattr(classes, part)
        if before != now:
            raise CheckpointError(
                f"{path} was trained with the class {part} {before}, but the data set has {now}."
            )
    load_weights(state.model, saved["model"], path)
    load_weights(state.ema.model, saved["ema"], path)
    load_optimizer(state.optimizer, saved["optimizer"])
    state.scaler.load_state_dict(saved["scaler"])
    state.step, state.best_miou = int(saved["step"]), float(saved["best_miou"])
    if state.step > config.train.steps:
        raise CheckpointError(
            f"{path} is of step {state.step}, but train.steps = {config.train.steps}. Raise it."
        )
    state.stale = int(saved["stale"])


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore moments and learning rates; they may come from another device.

    Kernel choice, weight decay, momentum and the like stay as the settings say: from an altered file they would train
    something else than its configuration says, and an audit that starts from it would repeat that.
    """
    groups = optimizer.state_dict()["param_groups"]
    for group, before in zip(groups, saved["param_groups"], strict=True):
        group["lr"] = before["lr"]
    optimizer.load_state_dict({**saved, "param_groups": groups})


def _check_fingerprint(
    path: Path, before: dict[str, Any], now: dict[str, Any], mode: str
) -> None:
    """Raise CheckpointError if plug-in code changed, or if the environment changed and equal bits are promised."""
    give_up = (
        "set run.allow_fingerprint_change=true and give up the promise of equal bits"
    )
    if code := flags.changed_plugins(before, now):
        raise CheckpointError(
            f"{path} was trained with a different version of your code: {', '.join(code[:5])} changed since. Restore "
            f"it, start another run with another run.name, or {give_up}."
        )
    differences = {} if mode == "off" else flags.differences(before, now)
    if not differences:
        return
    pairs = differences.items()
    changed = [f"{name}: {there} -> {here}" for name, (there, here) in pairs]
    where = "where it was trained"
    if flags.LOSS in differences:
        where = f"with loss.backend={differences[flags.LOSS][0]}"
    raise CheckpointError(
        f"{path} was trained in another environment, which may give different bits ({'; '.join(changed)}). Resume "
        f"{where}, or {give_up}."
    )


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint with digests of its content, which `load` checks.

    Raises CheckpointError on failure, and leaves the old file at `path`.
    """
    state = {"format": FORMAT, "version": VERSION, **state}
    state["digests"] = _digests(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU.

    Raises CheckpointError, naming the file and what was expected, when it is missing, truncated, foreign or altered.
    """
    state = read_torch(path)
    expected = f"a checkpoint of format {FORMAT!r} version {VERSION}"
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        kind = type(state).__name__
        entries = sorted(map(str, state))[:5] if isinstance(state, dict) else kind
        raise CheckpointError(
            f"{path} is a torch file, but not {expected}: it holds {entries}."
        )
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {state.get('version')}, but {expected} was needed."
        )
    try:
        digests, recorded = _digests(state), state["digests"]
        altered = [part for part in digests if recorded.get(part) != digests[part]]
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not {expected}: an entry is missing or has the wrong type ({error!r})."
        ) from error
    if altered:
        raise CheckpointError(
            f"{path}: {' and '.join(altered)} were altered or lost after they were written. Restore the file."
        )
    return {"stale": 0, **state}  # older files lack it


def _digests(state: dict[str, Any]) -> dict[str, str]:
    """Digests of the weights, of their average, and of everything else (optimizer, step, configuration ...).

    torch does not check the checksums inside its files: 165 of 200 random bit flips were read back as momentum.
    """
    own = ("model", "ema", "digests")
    rest = {name: value for name, value in state.items() if name not in own}
    tensors = {}
    plain = []
    for name, leaf in leaves(rest):
        if isinstance(leaf, torch.Tensor):
            tensors[name] = leaf
        else:
            plain.append(f"{name}={leaf!r}")
    text = hashlib.blake2b("\n".join(sorted(plain)).encode(), digest_size=16)
    return {
        "model": state_digest(state["model"]),
        "ema": state_digest(state["ema"]),
        "rest": f"{state_digest(tensors)}-{text.hexdigest()}",
    }


def load_network(path: Path, which: str = "best") -> TrainedNetwork:
    """The averaged network of a run folder or checkpoint file, in eval mode on the CPU.

    `which` is "best" (highest validation mIoU) or "last"; a run without best.pt falls back to last.pt.
    """
    if path.is_dir():
        best = path / "best.pt"
        path = best if which == "best" and best.is_file() else path / "last.pt"
    state = load(path)
    config = from_mapping(state["config"])
    classes = ClassTable(**state["classes"])
    if plugins.is_path(config.model.name):
        recorded = state["fingerprint"].get(flags.PLUGINS, {})
        plugins.check_unchanged("model.name", config.model.name, recorded, path)
    model = build_model(config.model.name, classes.num_classes, config.model.args)
    load_weights(model, state["ema"], path)
    return TrainedNetwork(
        model=model.eval().requires_grad_(False),
        preprocess=Preprocess(standardize=config.model.standardize),
        config=config,
        classes=classes,
        ema_digest=state["digests"]["ema"],
        step=int(state["step"]),
        config_hash=config_hash(state["config"]),
        path=path,
    )


def read_start(config: Config) -> WeightsSource:
    """The weights for step 0. From a segpipe checkpoint, these are the averaged ones, with their digests checked.

    Raises CheckpointError when the file is missing, damaged, or was replaced meanwhile, and WeightsError when it holds
    no tensor.
    """
    if not config.model.weights:
        return WeightsSource()
    pin_weights(config)
    path = weights_file(config.model.weights)
    if not path.is_file():
        raise CheckpointError(
            f"{path} no longer exists, but a run without a checkpoint starts at step 0 and needs it. "
            f"Put it back, or set model.weights to its new place."
        )
    if path.suffix == ".safetensors":
        source = read_safetensors(path)
    else:
        saved = read_torch(path)
        if isinstance(saved, dict) and {"format", "ema", "digests"} <= saved.keys():
            saved = load(path)  # again, to check its digests
            source = WeightsSource(
                saved["ema"],
                part="ema",
                class_names=tuple(saved["classes"]["names"]),
                standardize=saved["config"]["model"].get("standardize", False),
            )
        else:
            source = state_dict_in(saved, path)
    if not source.tensors:
        raise WeightsError(
            f"{path} holds no tensor, so there is nothing to start from. Set model.weights to a weights file."
        )
    model = config.model
    return replace(source, path=model.weights, sha256=model.weights_sha256)


def read_teacher(config: Config) -> TrainedNetwork:
    """The averaged network of `loss.teacher`, in eval mode on the CPU.

    Raises ConfigError when the file is gone, and CheckpointError when it was replaced meanwhile.
    """
    return load_network(pinned_teacher(config.loss))


def check_teacher(config: Config, names: tuple[str, ...]) -> None:
    """Raise ConfigError unless the teacher has the data set's classes `names` and the run's model.standardize."""
    if not config.loss.teacher:
        return
    teacher = read_teacher(config)
    standardize = teacher.preprocess.standardize
    if standardize != config.model.standardize:
        raise ConfigError(
            f"loss.teacher = {config.loss.teacher} was trained with model.standardize={standardize}, and gets the "
            f"same input as the network. Set model.standardize={standardize}."
        )
    known = teacher.classes.names
    if known != names:
        raise ConfigError(
            f"loss.teacher = {config.loss.teacher} has the classes {', '.join(known)}, but the data set has "
            f"{', '.join(names)}. Use a run that was trained with those."
        )


def load_weights(
    model: nn.Module, weights: dict[str, torch.Tensor], path: Path
) -> None:
    """Copy weights into the network. Raises WeightsError, which names the keys and shapes that do not fit."""
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise WeightsError(
            f"{path} does not fit {type(model).__name__}: {error}"
        ) from error
