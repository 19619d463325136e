"""manifest.json: what it says about a network, and its JSON Schema. The same text is inside every exported file."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonschema import Draft202012Validator

from segpipe import __version__
from segpipe.export.artifact.outcome import NOT_EXPORTED, integrity_refusal
from segpipe.export.graph.onnx_format import OLDEST_ONNXRUNTIME
from segpipe.export.graph.profiles import (
    CONFIDENCE,
    INPUT,
    LOGITS,
    MASK,
    Manifest,
    Size,
    free_lengths,
)
from segpipe.files import plain
from segpipe.runtime.artifact import FORMAT
from segpipe.runtime.frames import NO_ANSWER
from segpipe.settings.config import config_hash

if TYPE_CHECKING:
    from segpipe.export.artifact.origin import Origin
    from segpipe.export.graph.network import DeployModel
    from segpipe.train.checkpoint import TrainedNetwork

SCHEMA = Path(__file__).with_name("manifest.schema.json")
# Entries that exist only once there are files.
FIGURES = (
    "status",
    "created",
    "check_images",
    "real_images",
    "sigma",
    "gates",
    "files",
    "latency",
)
_OF_THE_NETWORK = (
    "model", "class_table", "classes", "preprocess", "align_corners", "stored_values", "io", "requires", "unverified",
)  # fmt: skip
_OF_THE_WEIGHTS = ("config_hash", "weights_digest", "seed", "step")
_PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnxruntime")
_LONGEST = 200  # characters of a schema message, which may quote a whole entry


def describe(
    trained: TrainedNetwork,
    model: DeployModel,
    size: Size,
    origin: Origin,
    extra: Mapping[str, Any],
) -> Manifest:
    """The manifest without gate figures and time stamps, so that equal exports have equal files.

    extra: further entries (calibration, frames, golden answers, the caller's own); they must not replace any.
    """
    manifest = {
        "format": FORMAT,
        "model": trained.config.model.name,
        "profile": model.profile.name,
        "precision": "fp32",
        "class_table": trained.classes.name,
        "classes": [
            {"id": index, "name": name, "color": list(color)}
            for index, (name, color) in enumerate(
                zip(trained.classes.names, trained.classes.palette, strict=True)
            )
        ],
        "source": {
            "git": origin.git,
            "config_hash": trained.config_hash or config_hash(trained.config),
            "checkpoint": origin.checkpoint,
            "weights_digest": trained.weights_digest,
            "seed": trained.config.seed,
            "step": trained.step,
        },
        "metrics": plain(origin.metrics),
        **({"warnings": list(origin.warnings)} if origin.warnings else {}),
        "preprocess": {
            name: buffer.flatten().tolist()
            for name, buffer in model.preprocess.named_buffers()
        },
        "align_corners": model.align_corners,
        "stored_values": sum(tensor.numel() for tensor in model.state_dict().values()),
        "io": _io(model, size),
        "requires": {"onnxruntime": OLDEST_ONNXRUNTIME},
        "versions": {
            "segpipe": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
        },
        "unverified": ["tensorrt", "jetson", "isaac", "triton"],
    }
    assert not manifest.keys() & extra.keys(), sorted(manifest.keys() & extra.keys())
    return {**manifest, **extra}


def parse_manifest(text: str) -> Any:
    """The JSON value of `text`. Raises ValueError for invalid JSON, and for NaN and infinity.

    Python's parser accepts NaN, and a NaN limit would pass every comparison written as `value > limit`.
    """

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a JSON number")

    return json.loads(text, parse_constant=refuse)


def schema_problems(manifest: Any) -> list[str]:
    """Places where `manifest` breaks manifest.schema.json, each as `manifest.path: what was needed`."""
    errors = Draft202012Validator(json.loads(SCHEMA.read_text())).iter_errors(manifest)
    found = sorted(
        (error.json_path.replace("$", "manifest", 1), error.message) for error in errors
    )
    return [f"{path}: {message[:_LONGEST]}" for path, message in found]


def require_schema(manifest: Manifest) -> None:
    """Raises IntegrityError (G1) with the first places at which the manifest breaks its schema."""
    found = schema_problems(manifest)
    if found:
        raise integrity_refusal(NOT_EXPORTED, found, "docs/manifest.md")


def in_file(manifest: Manifest, precision: str) -> Manifest:
    """The part of manifest.json that is inside a file of this precision: all but the figures."""
    inside = {name: value for name, value in manifest.items() if name not in FIGURES}
    return {**inside, "precision": precision}


def checkpoint_differences(manifest: Manifest, described: Manifest) -> list[str]:
    """Entries of a manifest that differ from what `describe` says about the trained network."""
    found = [name for name in _OF_THE_NETWORK if manifest[name] != described[name]]
    source, needed = manifest["source"], described["source"]
    return found + [
        f"source.{name}" for name in _OF_THE_WEIGHTS if source[name] != needed[name]
    ]


def _io(model: DeployModel, size: Size) -> dict[str, Any]:
    profile = model.profile
    network: Any = model.network
    free = free_lengths(profile.dynamic, size, network.output_stride)
    meanings: dict[str, dict[str, Any]] = {
        MASK: {"meaning": "class id", "stride": 1, "invalid": NO_ANSWER},
        CONFIDENCE: {
            "meaning": "largest probability * 255",
            "stride": network.output_stride,
        },
        LOGITS: {"meaning": "logits of the classes at the image's size", "stride": 1},
    }
    with torch.no_grad():
        outputs = model(
            torch.zeros(
                profile.input_shape(size), dtype=getattr(torch, profile.input_dtype)
            )
        )
    image = {
        "name": INPUT,
        "dtype": profile.input_dtype,
        "shape": profile.input_axes(size),
        "layout": "NCHW" if profile.planar else "NHWC",
        "color_order": "RGB",
        "range": [0, 255],
        "normalised": "in the graph",
    }
    return {
        "inputs": [image],
        "outputs": [
            {
                "name": name,
                "dtype": str(output.dtype).removeprefix("torch."),
                "shape": profile.output_axes(
                    list(output.shape), meanings[name]["stride"]
                ),
                **meanings[name],
            }
            for name, output in zip(profile.outputs, outputs, strict=True)
        ],
        **({"free": free} if free else {}),
    }
