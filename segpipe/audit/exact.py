"""SHA-256 of every tensor of a training state: shows that a checkpoint is the very state in which a replay ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from segpipe.ledger.digest import leaves

if TYPE_CHECKING:
    from segpipe.train.state import TrainState

FILE = "state.json"  # in the folder of a replay


def state_hashes(content: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 over type, shape and bytes of every tensor, and other values as text, by path such as /'ema'/'net.bias'.

    content: "model", "ema", "optimizer" and "scaler", as a checkpoint has them. The optimizer's groups are left out: no
    update reads them from a file. The digests of the ledger do not do here: one chosen word restores them.
    """
    parts = {name: content[name] for name in ("model", "ema", "scaler")} | {
        "optimizer": content["optimizer"]["state"]
    }
    return {name: _hash(value) for name, value in leaves(parts)}


def _hash(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    plain = value.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write(folder: Path, state: TrainState) -> None:
    """Leave the hashes of `state` in the folder of its replay."""
    parts = {
        name: getattr(state, name).state_dict()
        for name in ("model", "optimizer", "scaler")
    }
    content = state_hashes({**parts, "ema": state.ema.model.state_dict()})
    (folder / FILE).write_text(json.dumps(content))


def read(folder: Path) -> dict[str, str]:
    """What `write` left."""
    return dict(json.loads((folder / FILE).read_bytes()))


def first_difference(content: Mapping[str, Any], wanted: Mapping[str, str]) -> str:
    """Name of the first tensor of a checkpoint that is not the one of a replay; empty when all are."""
    found = state_hashes(content)
    unlike = next(
        (name for name in {**wanted, **found} if found.get(name) != wanted.get(name)),
        "",
    )
    return unlike.replace("'", "").lstrip("/")
