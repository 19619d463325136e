"""Published networks: their state dicts, and the outputs of their authors' code for them, in tests/data/parity.

SEGPIPE_PARITY names another folder of such references. The README there says how they are made.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from segpipe.models import SegmentationNet, build_model
from segpipe.models.fast_scnn import FastSCNN
from segpipe.models.resize import bilinear
from segpipe.models.weights import WeightsSource, fit, published_key

PARITY = Path(
    os.environ.get("SEGPIPE_PARITY", Path(__file__).parent / "data" / "parity")
)
PUBLISHED = sorted(path.stem for path in PARITY.glob("*.json"))


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


def reference_image(phase: float = 0.0) -> Tensor:
    """Shapes: (1, 3, 128, 256)."""
    k, y, x = np.ogrid[:3, :128, :256]
    waves = 1.5 * np.sin(0.05 * x + 0.03 * y + k + phase)
    image = waves + 0.3 * np.cos(0.4 * x - 0.2 * y * (k + 1))
    return torch.from_numpy(image.astype(np.float32))[None]


def published_heads(
    name: str, net: SegmentationNet, image: Tensor
) -> dict[str, Tensor]:
    """All heads, with the names and sizes of the reference outputs.

    Those of DDRNet have their names swapped: "aux" is the output of `final_layer`, which reads 128 channels.
    """
    renamed = {}
    if name.startswith("ddrnet"):
        renamed = {"main": "aux", "aux": "main"}
    if name.startswith("stdc"):
        renamed = {"boundary": "detail"}
    heads = {}
    for head, logits in net.logits(image, aux=True).items():
        head = renamed.get(head, head)
        height, width = description(name)["heads"][head]["shape"][-2:]
        if logits.shape[-2:] != (height, width):
            logits = bilinear(logits, (height, width), align_corners=net.align_corners)
        heads[head] = logits
    return heads


def deviations(
    heads: Mapping[str, Tensor], reference: Mapping[str, Any], prefix: str = ""
) -> dict[str, float]:
    """Largest |ours - reference| / std(reference) of each head."""
    found = {}
    for head, ours in heads.items():
        expected = torch.from_numpy(reference[prefix + head])
        step = ours.shape[-1] // expected.shape[-1]
        worst = (ours.detach()[..., ::step, ::step] - expected).abs().max()
        found[head] = float(worst / expected.std())
    return found


class TrainingPass:
    """One forward and backward in training mode, as the references of training were made; fp64 with `double`."""

    def __init__(
        self, name: str, net: SegmentationNet, *, double: bool = False
    ) -> None:
        for module in net.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        images = torch.cat([reference_image(), reference_image(0.5)])
        if double:
            net, images = net.double(), images.double()
        self.heads = published_heads(name, net.train(), images)
        loss = torch.zeros(())
        for logits in self.heads.values():
            weights = torch.sin(0.1 * torch.arange(logits.numel()))
            loss = loss + (logits.flatten() * weights).mean()
        loss.backward()

        def key(ours: str) -> str:
            """The name in the references, where shared tensors of STDC go by their first name."""
            return re.sub(
                r"\.x\d+\.0\.", ".features.", published_key(ours, net.published_keys)
            )

        self.gradients = {
            f"grad/{key(ours)}": float(parameter.grad.norm())
            for ours, parameter in net.named_parameters()
            if parameter.grad is not None
        }
        self.statistics = {
            f"stat/{key(ours)}": float(buffer.norm())
            for ours, buffer in net.named_buffers()
            if ours.endswith(("running_mean", "running_var"))
        }


def worst_ratio(
    ours: Mapping[str, float],
    reference: Mapping[str, Any],
    keys: list[str] | None = None,
) -> float:
    """Largest relative difference of the norms."""
    chosen = list(ours) if keys is None else keys
    return max(abs(ours[key] / float(reference[key]) - 1) for key in chosen)
