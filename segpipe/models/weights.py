"""Weights from files: read without running code, matched to a network by name and shape; every tensor is accounted for.

Used for files by the networks' authors, for those of other trainers, and for encoders only.
"""

import hashlib
import io
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from segpipe.errors import CheckpointError, WeightsError, first_line, listed
from segpipe.files import read
from segpipe.models.layers import Keys

# Entries of a file that hold the state dict, most likely first.
PARTS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights", "params", "model_ema",
         "state_dict_ema", "ema")  # fmt: skip
# Left by losses that hold class weights, by tools that count operations, and by torch's AveragedModel.
NOT_OF_A_NETWORK = r"(^|\.)(\w*loss|criterion)\.|(^|\.)(total_(ops|params)|n_averaged)$"
# Auxiliary heads are not always published, and BatchNorm had no counters before torch 0.4.1.
OPTIONAL = re.compile(r"^train_only\.|\.num_batches_tracked$")
FORMAT = "segpipe-weights"  # of safetensors files that segpipe writes
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PROBES = 8  # tensors by which the prefix of a file is found


@dataclass(frozen=True)
class WeightsSource:
    """Weights that a network starts from; without tensors, it keeps its initial ones."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # by name, on the CPU
    path: str = ""  # of the file, as the user wrote it
    part: str = ""  # entry of the file that holds the tensors; empty: the file itself
    others: tuple[str, ...] = ()  # entries that hold other tensors and were not read
    sha256: str = ""  # of the file
    class_names: tuple[str, ...] = ()  # if the file has them
    # model.standardize in its training, if the file says
    standardize: bool | None = None

    @property
    def where(self) -> str:
        """The file and the entry in it that was read."""
        others = f", not {', '.join(self.others)}" if self.others else ""
        return f"{self.path} (entry {self.part}{others})" if self.part else self.path


def read_safetensors(path: Path) -> WeightsSource:
    """The tensors of a .safetensors file, with class names if segpipe wrote it.

    Raises CheckpointError when it is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

            return WeightsSource(
                tensors,
                class_names=tuple(json.loads(about["classes"]))
                if about.get("format") == FORMAT
                else (),
                standardize=json.loads(about.get("standardize", "null")),
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}. Fetch or copy it again."
        ) from error


def read_torch(path: Path) -> Any:
    """Content of a file written by torch.save, on the CPU; no code in the file is run.

    Raises CheckpointError when it is missing, truncated or foreign, or holds Python objects. Its cause is an OSError if
    the disk failed: then the file may be intact.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist. A run writes last.pt and best.pt."
        )
    try:
        content = read(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read now: {error.strerror or error}. It may be intact: check the disk, then try again."
        ) from error
    try:  # from memory: for files torn between 4 and 70 kB, torch raises OSError, as if the disk had failed
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # RuntimeError, EOFError, UnpicklingError, BadZipFile ...
        damaged = isinstance(error, pickle.UnpicklingError)
        if damaged and (named := re.search(r"GLOBAL (\S+)", str(error))):
            # torch's own message explains how to run the code in the file.
            raise CheckpointError(
                f"{path} holds {named[1]}, a Python object, which could run code; none of it was run. Use a file "
                f"with tensors only: .safetensors, or from torch.save(net.state_dict(), ...). If you trust its source, "
                f"docs/weights.md has a command that converts it."
            ) from None
        reason = "its pickle is damaged" if damaged else first_line(error)
        raise CheckpointError(
            f"{path} ({len(content)} bytes) cannot be read as a torch file: {reason}. It is truncated or foreign. "
            f"Fetch it again, or use another file of the run (last.pt, best.pt). Of TorchScript, save the tensors: "
            f"torch.save(torch.jit.load(FILE).state_dict(), 'tensors.pth')."
        ) from error


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, as hex digits, of tensors without a file of their own: that of their safetensors form."""
    return hashlib.sha256(
        save({name: value.contiguous() for name, value in tensors.items()})
    ).hexdigest()


def state_dict_in(content: Any, path: Path) -> WeightsSource:
    """The state dict in the content of a torch file: the content itself, or the entry with the most likely name.

    Raises CheckpointError when there is none.
    """
    entries = dict(_state_dicts(content))
    if not entries:
        found = type(content).__name__
        if isinstance(content, Mapping):
            others = [
                str(key) for key in content if not isinstance(content[key], Tensor)
            ]
            found = listed(others) or f"an empty {found}"
        raise CheckpointError(
            f"{path} holds no state dict (tensors by name, nothing else), but {found}. Save net.state_dict()."
        )

    def rank(entry: str) -> int:
        last = entry.rpartition(".")[2]
        return (*PARTS, last).index(last)

    part, *others = sorted(entries, key=rank)

    return WeightsSource(dict(entries[part]), str(path), part, tuple(others))


def _state_dicts(
    content: Any, name: str = "", depth: int = 2
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """State dicts by name: `content` itself under an empty name, or those in its entries and their entries."""
    if not isinstance(content, Mapping) or not content:
        return
    values = content.values()
    if all(isinstance(value, Tensor) for value in values):
        yield name, content
    elif depth:
        for key, value in content.items():
            yield from _state_dicts(value, f"{name}.{key}".lstrip("."), depth - 1)


@dataclass(frozen=True)
class Fit:
    """What became of every tensor of a network and of a file. Names are the network's, except in `left_over`."""

    kept: tuple[str, ...]  # taken from the file
    # class layers: the file has another number of classes, so they are initialized
    adapted: tuple[str, ...]
    fresh: tuple[str, ...]  # initialized: not in the file, or of another shape there
    left_over: tuple[str, ...]  # in the file, without a place in the network
    # number of classes in the file and in the network, if they differ
    classes: tuple[int, int] | None
    share: float  # fraction of the network's parameters that come from the file, 0 to 1

    @property
    def summary(self) -> str:
        """One sentence with all four counts and names."""
        classes = ""
        if self.classes:
            classes = f" ({self.classes[0]} -> {self.classes[1]} classes, initialized)"

        return (
            f"kept {len(self.kept)} tensors, {math.floor(1000 * self.share) / 10} % of the parameters; "
            f"adapted {_counted(self.adapted)}{classes}; fresh {_counted(self.fresh)}; "
            f"left over {_counted(self.left_over)}"
        )

    def record(self, source: WeightsSource) -> dict[str, Any]:
        """Content of weights.json: all of this, and the file."""
        names = ("kept", "adapted", "fresh", "left_over")
        return {
            "file": source.path,
            "entry": source.part,
            "sha256": source.sha256,
            "classes": self.classes
            and dict(zip(("file", "network"), self.classes, strict=True)),
            "share_of_parameters": round(self.share, 6),
            **{name: list(getattr(self, name)) for name in names},
        }


def fit(
    model: nn.Module, source: WeightsSource, *, num_classes: int, partial: bool = False
) -> Fit:
    """Copy the tensors into the network; returns what became of each.

    Names may be the network's or those of its authors' code, with a prefix such as `module.`, or relative to one of the
    network's modules. Tensors with `num_classes` rows in the network and another number in the file are class layers
    and keep their initial weights. `partial` takes what fits; otherwise WeightsError names what is missing, left over
    or of another shape. Training-only heads may be missing, and class weights of a loss may be left over.
    """
    own, tensors, where = model.state_dict(), source.tensors, source.where
    names = _names(model, own, tensors)
    found = {name: tensors[key] for name, key in names.items() if key in tensors}

    kept = [name for name, value in found.items() if _fits(value, own[name])]
    if not any(own[name].ndim for name in kept):
        raise WeightsError(
            f"no tensor of {where} fits {type(model).__name__}: it has {listed(list(tensors), 3)}, the network "
            f"{listed(list(own), 3)}. Check that model.name is the network that was trained."
        )

    rows = {
        name: classes
        for name, value in found.items()
        if (
            classes := _other_classes(
                value,
                own[name],
                model.get_submodule(name.rpartition(".")[0]),
                num_classes,
            )
        )
    }
    adapted = list(rows) if len(set(rows.values())) == 1 else []
    misshapen = [name for name in found if name not in {*kept, *adapted}]
    missing = [name for name in own if name not in found]
    used = {names[name] for name in found}
    left_over = [key for key in tensors if key not in used]
    if not partial:
        unused = [NOT_OF_A_NETWORK, getattr(model, "unused_keys", "")]
        pattern = "|".join(filter(None, unused))
        problems = {
            "missing": [names[name] for name in missing if not OPTIONAL.search(name)],
            "left over": [key for key in left_over if not re.search(pattern, key)],
            "of another shape or dtype": [
                f"{names[name]} {found[name].dtype} {tuple(found[name].shape)}, needed {own[name].dtype} "
                f"{tuple(own[name].shape)}"
                for name in misshapen
                if not name.endswith("num_batches_tracked")  # in half precision
            ],
        }
        faults = [
            f"{len(keys)} {what} ({listed(keys)})"
            for what, keys in problems.items()
            if keys
        ]
        if faults:
            raise WeightsError(
                f"{where} does not fit {type(model).__name__} with {num_classes} classes: {'; '.join(faults)}. Check "
                f"that model.name is the network that was trained, or set model.weights_partial=true to take what "
                f"fits, such as only an encoder."
            )

    checked = {name: _checked(name, found[name], own[name], where) for name in kept}
    with torch.no_grad():
        for name, value in checked.items():
            own[name].copy_(value)

    sizes = {name: value.numel() for name, value in model.named_parameters()}
    taken = sum(sizes.get(name, 0) for name in kept)

    return Fit(
        kept=tuple(kept),
        adapted=tuple(adapted),
        fresh=(*missing, *misshapen),
        left_over=(*left_over, *(names[name] for name in misshapen)),
        classes=(rows[adapted[0]], num_classes) if adapted else None,
        share=taken / max(sum(sizes.values()), 1),
    )


def _checked(name: str, value: Tensor, own: Tensor, where: str) -> Tensor:
    """`value` in the network's dtype, dense. Raises WeightsError for values that no sound training produces."""
    try:
        found = value.to(own.dtype).to_dense()
        sound = bool(torch.isfinite(found).all())
        if name.endswith("running_var"):
            sound = sound and not bool((found < 0).any())
    except (RuntimeError, NotImplementedError):  # on device meta, without values
        sound = False
    if not sound:
        raise WeightsError(
            f"{where}: {name} is not finite in {own.dtype}, a negative variance, or without values: the training that "
            f"wrote it diverged, or the file is damaged. Use another file."
        )
    return found


def _fits(value: Tensor, own: Tensor) -> bool:
    same_kind = value.is_floating_point() == own.is_floating_point()
    # float8 needs scales that are not in the tensor.
    plain = value.dtype in FLOATS or not value.is_floating_point()
    return same_kind and plain and value.shape == own.shape


def _other_classes(
    value: Tensor, own: Tensor, layer: nn.Module, num_classes: int
) -> int:
    """Number of classes of a class layer in the file, if only that differs; 0 for any other tensor.

    Classes are the first axis or, but in a convolution, the second, as in a transposed one.
    """
    for axis in range(1 if isinstance(layer, nn.Conv2d) else min(own.ndim, 2)):
        shape = list(own.shape)
        if value.ndim == own.ndim and shape[axis] == num_classes:
            shape[axis] = value.shape[axis]
            if list(value.shape) == shape != list(own.shape):
                return shape[axis]
    return 0


def _names(
    model: nn.Module, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, str]:
    """Name in the file of every tensor of the network, by the renaming that finds and fits the most."""
    best, most = {name: name for name in own}, (0, 0)
    whole = min(len(own), len(tensors))
    for renamed, outer in _renamings(model, own):
        for prefix in _prefixes(renamed, own, tensors):
            names = {name: prefix + key for name, key in renamed.items()}
            names |= {name: name for name in outer if names[name] not in tensors}
            there = [name for name, key in names.items() if key in tensors]
            fit = sum(_fits(tensors[names[name]], own[name]) for name in there)
            if (len(there), fit) > most:
                best, most = names, (len(there), fit)

            # Layers with other classes need not fit, but a file of a single module must fit completely.
            if len(there) == whole and (fit == whole or not outer):
                return names  # the rest would take seconds
    return best


def _renamings(
    model: nn.Module, own: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The network's names unchanged, as in its authors' code, and without the name of one of its modules.

    Each with the names of the tensors outside that module, which a file of only the module does not have.
    """
    yield {name: name for name in own}, []
    if keys := getattr(model, "published_keys", None):
        yield {name: published_key(name, keys) for name in own}, []

    modules = dict.fromkeys(
        ".".join(name.split(".")[:depth]) for depth in (1, 2) for name in own
    )
    for module in modules:
        inner = {
            name: name.removeprefix(f"{module}.")
            for name in own
            if name.startswith(f"{module}.")
        }
        outer = {name: name for name in own if name not in inner}
        if inner and not outer.keys() & set(inner.values()):
            yield inner | outer, list(outer)


def _prefixes(
    renamed: Mapping[str, str], own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, None]:
    """Prefixes of names in the file, such as `module.`; the empty one first."""
    probes = [key for name, key in renamed.items() if own[name].ndim > 1][:PROBES]
    prefixes = {"": None}
    for key in tensors:
        for probe in probes:
            if key.endswith(f".{probe}"):
                prefixes[key.removesuffix(probe)] = None

    return prefixes


def published_key(key: str, patterns: Keys) -> str:
    """Published name of our `key`, from `SegmentationNet.published_keys`."""
    for pattern, replacement in patterns:
        key = re.sub(pattern, replacement, key)
    return key


def _counted(names: tuple[str, ...]) -> str:
    return f"{len(names)} ({listed(names)})" if names else "0"
