"""`segpipe weights`: the averaged weights of a run as a safetensors file, for another run or another program."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from segpipe import __version__
from segpipe.errors import ConfigError
from segpipe.files import sha256, write_atomically
from segpipe.models.weights import FORMAT, published_key
from segpipe.train.checkpoint import TrainedNetwork, load_network


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    out = Path(given["out"])
    if out.exists():
        raise ConfigError(
            f"out = {out} exists already. Choose another name, or delete it."
        )
    trained = load_network(Path(given["run"]), given["which"])
    tensors = _tensors(trained, original=given["names"] == "original")
    write_atomically(out, save(tensors, metadata=_metadata(trained, given)))
    print(
        f"{out}: {len(tensors)} tensors of {trained.config.model.name} after {trained.step} updates"
    )
    print(f"{sha256(out)}  {out}")
    return 0


def _tensors(trained: TrainedNetwork, *, original: bool) -> dict[str, Tensor]:
    """The averaged weights, each in memory of its own, as safetensors wants them."""
    own = {
        name: value.clone().contiguous()
        for name, value in trained.model.state_dict().items()
    }
    if not original:
        return own
    keys = trained.model.published_keys
    if not keys:
        raise ConfigError(
            f"names = original, but {trained.config.model.name} has no other names. Leave names out."
        )
    return {published_key(name, keys): value for name, value in own.items()}


def _metadata(trained: TrainedNetwork, given: dict[str, Any]) -> dict[str, str]:
    """What a reader needs to know, as text, the only type in the header of the format."""
    model = trained.config.model
    return {
        "format": FORMAT,
        "segpipe": __version__,
        "run": trained.config.run.name,
        "which": given["which"],
        "step": str(trained.step),
        "ema_digest": trained.ema_digest,
        "model": model.name,
        "args": json.dumps(model.args),
        "num_classes": str(trained.classes.num_classes),
        "classes": json.dumps(trained.classes.names),
        "palette": json.dumps(asdict(trained.classes)["palette"]),
        "input": "float RGB (B, 3, H, W), (x / 255 - mean) / std, mean 0.485 0.456 0.406, std 0.229 0.224 0.225",
        "output_stride": str(trained.model.output_stride),
        "align_corners": json.dumps(trained.model.align_corners),
    }
