"""What a file says about itself; the same text is inside every exported file."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from segpipe import __version__
from segpipe.errors import IntegrityError
from segpipe.export.artifact.origin import Origin
from segpipe.export.artifact.schema import violations
from segpipe.export.graph.deploy import DeployModel
from segpipe.export.graph.profiles import CONFIDENCE, INPUT, LOGITS, MASK
from segpipe.export.graph.shapes import free_lengths
from segpipe.runtime import NO_ANSWER
from segpipe.runtime.artifact import FORMAT
from segpipe.settings.config import config_hash

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

# Known once there are files.
FIGURES = ("status", "created", "check_images", "real_images", "sigma", "gates", "files", "latency")
_OF_THE_NETWORK = ("model", "class_table", "classes", "preprocess", "align_corners", "stored_values", "io")
_OF_THE_WEIGHTS = ("config_hash", "weights_digest", "seed", "step")
_PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnxruntime")


def describe(
    trained: TrainedNetwork,
    model: DeployModel,
    size: tuple[int, int],
    origin: Origin,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest without figures of the gates and without time stamps, so that equal exports have equal files.

    `extra` adds entries: those of calibration, frames and golden answers, and any of the caller; it may replace none.
    """
    manifest = {
        "format": FORMAT,
        "model": trained.config.model.name,
        "profile": model.profile.name,
        "precision": "fp32",
        "class_table": trained.classes.name,
        "classes": [
            {"id": index, "name": name, "color": list(color)}
            for index, (name, color) in enumerate(zip(trained.classes.names, trained.classes.palette, strict=True))
        ],
        "source": _source(trained, origin),
        "metrics": _finite(origin.metrics),
        "preprocess": {name: buffer.flatten().tolist() for name, buffer in model.preprocess.named_buffers()},
        "align_corners": model.align_corners,
        "stored_values": sum(tensor.numel() for tensor in model.state_dict().values()),
        "io": _io(model, size),
        "versions": {
            "segpipe": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
        },
        "unverified": ["tensorrt", "jetson", "isaac", "triton"],
    }
    assert not manifest.keys() & extra.keys(), sorted(manifest.keys() & extra.keys())
    return {**manifest, **extra}


def require_schema(manifest: Mapping[str, Any]) -> None:
    """Raises IntegrityError that names the first places at which the manifest breaks its own contract."""
    found = violations(dict(manifest))
    if found:
        raise IntegrityError(f"EXPORT REJECTED: G1 integrity: {'; '.join(found[:3])} - see docs/manifest.md")


def in_file(manifest: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The part of manifest.json that stands in a file of this precision: all but what is known once files are there."""
    inside = {name: value for name, value in manifest.items() if name not in FIGURES}
    return {**inside, "precision": precision}


def strangers(manifest: Mapping[str, Any], described: Mapping[str, Any]) -> list[str]:
    """Entries in which a manifest says something else than the trained network, as `describe` has it, does."""
    found = [name for name in _OF_THE_NETWORK if manifest[name] != described[name]]
    source, needed = manifest["source"], described["source"]
    return found + [f"source.{name}" for name in _OF_THE_WEIGHTS if source[name] != needed[name]]


def _source(trained: TrainedNetwork, origin: Origin) -> dict[str, Any]:
    return {
        "git": origin.git,
        "config_hash": config_hash(trained.config),
        "checkpoint": origin.checkpoint,
        "weights_digest": trained.weights_digest,
        "seed": trained.config.seed,
        "step": trained.step,
    }


def _io(model: DeployModel, size: tuple[int, int]) -> dict[str, Any]:
    profile = model.profile
    network: Any = model.network
    free = free_lengths(profile.dynamic, size, network.output_stride)
    image = {"name": INPUT, "dtype": profile.input_dtype, "shape": profile.input_axes(size)}
    layout = {"layout": "NCHW" if profile.planar else "NHWC", "color_order": "RGB", "range": [0, 255]}
    meanings: dict[str, dict[str, Any]] = {
        MASK: {"meaning": "class id", "stride": 1, "invalid": NO_ANSWER},
        CONFIDENCE: {"meaning": "largest probability * 255", "stride": network.output_stride},
        LOGITS: {"meaning": "logits of the classes at the image's size", "stride": 1},
    }
    with torch.no_grad():
        outputs = model(torch.zeros(profile.input_shape(size), dtype=getattr(torch, profile.input_dtype)))
    return {
        "inputs": [{**image, **layout, "normalised": "in the graph"}],
        "outputs": [
            {
                "name": name,
                "dtype": str(output.dtype).removeprefix("torch."),
                "shape": profile.output_axes(list(output.shape), meanings[name]["stride"]),
                **meanings[name],
            }
            for name, output in zip(profile.outputs, outputs, strict=True)
        ],
        **({"free": free} if free else {}),
    }


def _finite(value: Any) -> Any:
    """`value` with None for NaN, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
