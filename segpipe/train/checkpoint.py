"""Checkpoints that are whole or not there: written aside, synced, renamed; checked when they are read."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from segpipe.data.catalog import ClassTable
from segpipe.errors import CheckpointError, WeightsError
from segpipe.files import write_atomically
from segpipe.ledger.digest import state_digest
from segpipe.models import build_model
from segpipe.models.layers import SegmentationNet
from segpipe.models.preprocess import Preprocess
from segpipe.settings.config import Config, from_mapping

FORMAT = "segpipe-checkpoint"
VERSION = 2
HASHES = "checkpoints.sha256"  # SHA-256, name and step of every checkpoint that was written to a folder
KEYS = (
    "format", "version", "step", "config", "classes", "fingerprint", "model", "ema", "optimizer", "scaler", "digests",
    "best_miou",
)  # fmt: skip


@dataclass(frozen=True)
class TrainedNetwork:
    """A network as it was trained, with all that is needed to use it: nothing is asked for a second time."""

    model: SegmentationNet  # the averaged weights, in eval mode, on the CPU
    preprocess: Preprocess
    config: Config
    classes: ClassTable
    weights_digest: str
    step: int


def save(path: Path, state: dict[str, Any], *, listed: bool = False) -> None:
    """Write a checkpoint with digests of its content, which `load` compares.

    When `listed`, its SHA-256 is appended to the list beside it. Raises CheckpointError, and what was at `path` is then
    still there.
    """
    state = {"format": FORMAT, "version": VERSION, **state}
    state["digests"] = _digests(state)
    assert set(state) == set(KEYS), sorted(set(state) ^ set(KEYS))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    if listed:  # the line first: whatever ends the process, a file that is there is listed
        _list_hash(path, hashlib.sha256(content).hexdigest(), state["step"])
    write_atomically(path, content)


def _list_hash(path: Path, digest: str, step: int) -> None:
    try:
        with (path.parent / HASHES).open("a", encoding="utf-8") as file:
            file.write(f"{digest}  {path.name}  {step}\n")
    except OSError as error:
        raise CheckpointError(
            f"{path.parent / HASHES} could not be written: {error.strerror or error}; {path.name} is as it was. "
            f"Free some space, or choose another run.root, then continue with run.exists=resume."
        ) from error


def load(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, on the CPU.

    Raises CheckpointError, naming the file and what was expected, when it is missing, torn, foreign or altered.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. A run writes last.pt and best.pt; check run=.")
    expected = f"a checkpoint of format {FORMAT!r} version {VERSION}"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises RuntimeError, EOFError, UnpicklingError, BadZipFile ...
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as {expected}: {reason}. "
            f"It is torn or foreign; take another file of the run (last.pt, best.pt)."
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = sorted(map(str, state))[:5] if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} is a torch file, but not {expected}: it holds {found}.")
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {state.get('version')}, but {expected} was needed.")
    missing = sorted(set(KEYS) - set(state))
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)} of {expected}.")
    try:
        digests = _digests(state)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is not {expected}: its weights are no tensors ({error}).") from error
    altered = [part for part, digest in digests.items() if state["digests"].get(part) != digest]
    if altered:
        raise CheckpointError(
            f"{path}: {' and '.join(altered)} were altered after they were written. Restore the file."
        )
    return state


def _digests(state: dict[str, Any]) -> dict[str, str]:
    """Digests of the weights, of their average, and of all the rest (optimizer, step, configuration ...).

    torch does not compare the checksums inside its files: 165 of 200 random bit flips were read back as momentum.
    """
    rest = {name: value for name, value in state.items() if name not in ("model", "ema", "digests")}
    tensors = {name: leaf for name, leaf in _leaves(rest) if isinstance(leaf, torch.Tensor)}
    plain = sorted(f"{name}={leaf!r}" for name, leaf in _leaves(rest) if not isinstance(leaf, torch.Tensor))
    text = hashlib.blake2b("\n".join(plain).encode(), digest_size=16).hexdigest()
    return {
        "model": state_digest(state["model"]),
        "ema": state_digest(state["ema"]),
        "rest": f"{state_digest(tensors)}-{text}",
    }


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What nested dictionaries, lists and tuples hold, by path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}/{key!r}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{name}/{place}")
    else:
        yield name, value


def load_network(run: Path, which: str = "best") -> TrainedNetwork:
    """The averaged network of a run folder (or of one checkpoint file), in eval mode on the CPU.

    `which` is "best" (highest validation mIoU) or "last"; a run without best.pt falls back to last.pt.
    """
    path = Path(run)
    if path.is_dir():
        best = path / "best.pt"
        path = best if which == "best" and best.is_file() else path / "last.pt"
    state = load(path)
    config = from_mapping(state["config"])
    classes = _class_table(state["classes"])
    model = build_model(config.model.name, classes.num_classes)
    load_weights(model, state["ema"], path)
    return TrainedNetwork(
        model=model.eval().requires_grad_(False),
        preprocess=Preprocess(),
        config=config,
        classes=classes,
        weights_digest=state["digests"]["ema"],
        step=int(state["step"]),
    )


def _class_table(values: dict[str, Any]) -> ClassTable:
    """The table as it was saved; lists and keys come back in the types of the dataclass."""
    return ClassTable(
        name=str(values["name"]),
        names=tuple(values["names"]),
        palette=tuple((red, green, blue) for red, green, blue in values["palette"]),
        train_ids={int(raw): int(train) for raw, train in values["train_ids"].items()},
    )


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Copy weights into the network; raise WeightsError naming the keys and shapes that do not fit."""
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise WeightsError(f"{path} does not fit {type(model).__name__}: {error}") from error
