"""State dicts of the published networks, as the reference outputs in tests/data/parity were made with them."""

import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segpipe.models import SegmentationNet, build_model
from segpipe.models.fast_scnn import FastSCNN
from segpipe.models.weights import WeightsSource, fit

PARITY = Path(__file__).parent / "data" / "parity"
PUBLISHED = ("ddrnet23_slim", "fast_scnn", "pidnet_s")


def synthetic(key: str, shape: list[int]) -> Tensor:
    count = int(np.prod(shape))
    c, i = zlib.crc32(key.encode()) % 10007, np.arange(count, dtype=np.float64)
    u = np.sin(0.73 * i + c) * np.cos(0.0137 * ((c % 7) + 1) * i + 0.5 * c)
    if key.endswith("num_batches_tracked"):
        return torch.tensor(0)
    if key.endswith("running_mean"):
        u = 0.1 * u
    elif key.endswith("running_var"):
        u = 1 + 0.5 * u
    elif len(shape) == 1:
        u = 1 + 0.1 * u if key.endswith("weight") else 0.05 * u
    else:
        u = 1.4 * u * np.sqrt(2 * shape[0] / count)
    return torch.from_numpy(u.astype(np.float32).reshape(shape))


@cache
def description(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((PARITY / f"{name}.json").read_text())
    return loaded


def state_dict(name: str) -> dict[str, Tensor]:
    return {
        key: synthetic(key, shape) for key, shape in description(name)["state_dict"]
    }


def published_network(
    name: str, weights: dict[str, Tensor] | None = None
) -> SegmentationNet:
    """The network in its published form, with the published weights or others."""
    net = FastSCNN(19, aux=False) if name == "fast_scnn" else build_model(name, 19)
    fit(
        net, WeightsSource(weights or state_dict(name), "published.pth"), num_classes=19
    )
    return net
