"""What a file says about itself; the same text is inside every exported file."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from segpipe.config import config_hash
from segpipe.export.deploy import INPUT, OUTPUTS, DeployModel

if TYPE_CHECKING:
    from segpipe.checkpoint import TrainedNetwork

FORMAT = "segpipe-export/1"
_PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnxruntime")


def describe(
    trained: TrainedNetwork, model: DeployModel, size: tuple[int, int], extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest without figures of the gates and without time stamps, so that equal exports have equal files.

    `extra` adds entries of the caller, such as the commit; it may not replace one of these.
    """
    config = trained.config
    manifest = {
        "format": FORMAT,
        "model": config.model.name,
        "profile": "robot",
        "precision": "fp32",
        "classes": [
            {"id": index, "name": name, "color": list(color)}
            for index, (name, color) in enumerate(zip(trained.classes.names, trained.classes.palette, strict=True))
        ],
        "source": {
            "config_hash": config_hash(config),
            "weights_digest": trained.weights_digest,
            "seed": config.seed,
            "step": trained.step,
        },
        "preprocess": {name: buffer.flatten().tolist() for name, buffer in model.preprocess.named_buffers()},
        "align_corners": model.align_corners,
        "stored_values": sum(tensor.numel() for tensor in model.state_dict().values()),
        "io": _io(model, size),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "unverified": ["tensorrt", "jetson", "isaac"],
    }
    assert not manifest.keys() & extra.keys(), sorted(manifest.keys() & extra.keys())
    return {**manifest, **extra}


def _io(model: DeployModel, size: tuple[int, int]) -> dict[str, list[dict[str, Any]]]:
    height, width = size
    with torch.no_grad():
        confidence = model(torch.zeros((1, height, width, 3), dtype=torch.uint8))[1]
    mask_name, confidence_name = OUTPUTS
    image = {"name": INPUT, "dtype": "uint8", "shape": [1, height, width, 3]}
    mask = {"name": mask_name, "dtype": "uint8", "shape": [1, height, width]}
    levels = {"name": confidence_name, "dtype": "uint8", "shape": list(confidence.shape)}
    return {
        "inputs": [{**image, "layout": "NHWC", "color_order": "RGB", "range": [0, 255], "normalised": "in the graph"}],
        "outputs": [
            {**mask, "meaning": "class id", "stride": 1, "invalid": 255},
            {**levels, "meaning": "largest probability * 255", "stride": model.network.output_stride},
        ],
    }
