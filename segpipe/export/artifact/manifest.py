"""The manifest: origin of a trained network, inputs and outputs of its files, and a schema that checks it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jsonschema import Draft202012Validator

from segpipe import __version__
from segpipe.errors import DataError
from segpipe.export.artifact.frame_statistics import frames_of
from segpipe.export.artifact.golden import golden_entry
from segpipe.export.gates.quality import calibration_entry
from segpipe.export.graph.network import (
    CONFIDENCE,
    INPUT,
    MASK,
    DeployModel,
    Image,
    Manifest,
    Size,
)
from segpipe.export.graph.onnx_format import OLDEST_ONNXRUNTIME
from segpipe.export.verify_report import NOT_EXPORTED, integrity_refusal
from segpipe.files import ROOT, file_sha256, git_state, plain, read_json
from segpipe.runtime.artifact import FORMAT
from segpipe.runtime.frames import NO_ANSWER
from segpipe.settings.config import config_hash

if TYPE_CHECKING:
    from segpipe.export.dataset import GateInputs
    from segpipe.train.checkpoint import TrainedNetwork

_METRICS = ("miou", "pixel_accuracy", "iou", "absent", "pixels")


def origin_of(trained: TrainedNetwork) -> Manifest:
    """Manifest entries that do not follow from the weights: git, checkpoint, metrics, and warnings on the scores.

    All are empty for a network that was not read from a file. Metrics come from result.json if it describes the same
    weights. Raises DataError when that file is not valid JSON.
    """
    path = trained.path
    if path is None:
        return {"git": None, "checkpoint": None, "metrics": None, "warnings": []}
    result_path = path.with_name("result.json")
    try:
        result = dict(read_json(result_path))
    except OSError:
        result = {}
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{result_path} is not valid JSON ({error}). Run segpipe evaluate, or remove the file."
        ) from None
    git = result.get("git")
    metrics = None
    if result.get("ema_digest") == trained.ema_digest:
        metrics = {name: result.get(name) for name in _METRICS}
        metrics["split"] = trained.config.data.split
    planned = trained.config.train.steps
    done = max(trained.step, int(result.get("steps") or 0))
    warning = f"trained for {trained.step} of {planned} steps: the run was interrupted, or goes on"
    is_whole = done >= planned or result.get("stopped_early")
    return {
        # of the run's last validation, in fp32
        "metrics": plain(metrics),
        "git": {**git, "known_at": "train"}
        if isinstance(git, dict)
        else git_state(ROOT),
        "checkpoint": {"file": path.name, "sha256": file_sha256(path)},
        "warnings": [] if is_whole else [warning],
    }


SCHEMA = Path(__file__).with_name("manifest.schema.json")
# Entries that are not compared: they describe the time and place of the export. The weights have a digest.
_NOT_REPEATED = (
    "format",
    "precision",
    "versions",
    "warnings",
    "allow_unverified",
    "source.git",
    "source.checkpoint",
)
# Tolerance of values recomputed with another processor or image decoder, relative to max(1, value)
_TOLERANCE = {"calibration": 1e-3, "frame_statistics": 1e-2, "frame_limits": 1e-2}
_PACKAGES = ("torch", "numpy", "onnx", "onnxscript", "onnxruntime")
_QUOTED = 60  # characters of a value in a message
_LONGEST = 200  # characters of a schema message, which may quote a whole entry


def described(
    trained: TrainedNetwork,
    model: DeployModel,
    inputs: GateInputs,
    train_images: Iterable[Image] | None,
) -> tuple[Manifest, list[Image]]:
    """The manifest without figures, and frames to calibrate int8 on; sets the fitted temperature of `model`.

    Call inside `one_thread`.
    """
    size = inputs.size
    manifest = describe(trained, model, size)
    frame_entries, frames = frames_of(inputs.real_images, train_images, (*size, 3))
    labelled = inputs.labelled if CONFIDENCE in model.profile.outputs else None
    calibration = calibration_entry(trained, labelled)
    model.temperature = calibration["temperature"]
    golden = golden_entry(inputs.checks)
    manifest |= {"calibration": calibration, "golden": golden, **frame_entries}
    return manifest, frames


def describe(trained: TrainedNetwork, model: DeployModel, size: Size) -> Manifest:
    """The manifest's entries on the network and its files.

    Without figures and time stamps, so that equal exports have equal files.
    """
    origin = origin_of(trained)
    named = zip(trained.classes.names, trained.classes.palette, strict=True)
    classes = [
        {"id": index, "name": name, "color": list(color)}
        for index, (name, color) in enumerate(named)
    ]
    return {
        "format": FORMAT,
        "model": trained.config.model.name,
        "profile": model.profile.name,
        "precision": "fp32",
        "class_table": trained.classes.name,
        "classes": classes,
        "source": {
            "git": origin["git"],
            "config_hash": trained.config_hash or config_hash(trained.config),
            "checkpoint": origin["checkpoint"],
            "ema_digest": trained.ema_digest,
            "seed": trained.config.seed,
            "step": trained.step,
        },
        "metrics": origin["metrics"],
        **({"warnings": origin["warnings"]} if origin["warnings"] else {}),
        "preprocess": {
            "standardize": trained.preprocess.standardize,
            **{
                name: buffer.flatten().tolist()
                for name, buffer in model.preprocess.named_buffers()
            },
        },
        "align_corners": model.align_corners,
        "io": _io(model, size),
        "requires": {"onnxruntime": OLDEST_ONNXRUNTIME},
        "versions": {"python": platform.python_version(), **converters()},
        "unverified": ["tensorrt", "jetson", "isaac", "triton"],
    }


def converters() -> dict[str, str]:
    """Versions of the packages that determine the bytes of a model file."""
    return {"segpipe": __version__, **{name: version(name) for name in _PACKAGES}}


def schema_problems(manifest: Any) -> list[str]:
    """Violations of manifest.schema.json, each as `manifest.path: what was needed`."""
    errors = Draft202012Validator(read_json(SCHEMA)).iter_errors(manifest)
    found = sorted(
        (error.json_path.replace("$", "manifest", 1), error.message) for error in errors
    )
    return [f"{path}: {message[:_LONGEST]}" for path, message in found]


def require_schema(manifest: Manifest) -> None:
    """Raises IntegrityError (G1) with the first violations of the schema."""
    found = schema_problems(manifest)
    if found:
        raise integrity_refusal(NOT_EXPORTED, found, "docs/manifest.md")


def differences(claimed: Any, computed: Any, where: str = "") -> Iterator[str]:
    """Manifest entries that differ from recomputed ones by more than another machine explains.

    where: name of the entry, such as `classes[1].color`; empty for the whole manifest.
    """
    if where in _NOT_REPEATED:
        return
    if isinstance(claimed, dict) and isinstance(computed, dict):
        for name in sorted(claimed.keys() | computed.keys()):
            inner = f"{where}.{name}".lstrip(".")
            yield from differences(claimed.get(name), computed.get(name), inner)
        return
    both = (claimed, computed)
    if all(isinstance(each, list) for each in both) and len(claimed) == len(computed):
        for index, pair in enumerate(zip(*both, strict=True)):
            yield from differences(*pair, f"{where}[{index}]")
    elif not _agree(claimed, computed, where):
        found, needed = (json.dumps(value)[:_QUOTED] for value in both)
        yield f"manifest.json has {where} = {found}, but the checkpoint and the data give {needed}"


def _agree(claimed: Any, computed: Any, where: str) -> bool:
    tolerance = _TOLERANCE.get(where.partition(".")[0])
    are_numbers = isinstance(claimed, int | float) and isinstance(computed, float)
    if tolerance is None or not are_numbers:
        return bool(claimed == computed)
    return bool(abs(claimed - computed) <= tolerance * max(1.0, abs(computed)))


def _io(model: DeployModel, size: Size) -> dict[str, Any]:
    profile = model.profile
    meanings: dict[str, dict[str, Any]] = {
        MASK: {"meaning": "class id", "invalid": NO_ANSWER},
        CONFIDENCE: {"meaning": "largest probability * 255"},
    }
    example = torch.from_numpy(profile.encode(np.zeros((*size, 3), np.uint8)))
    stride = model.network.output_stride
    with torch.no_grad():
        outputs = zip(profile.outputs, model(example), strict=True)
    image = {
        "name": INPUT,
        "dtype": example.numpy().dtype.name,
        "shape": list(example.shape),
        "layout": "NCHW" if profile.planar else "NHWC",
        "color_order": "RGB",
        "range": [0, 255],
        "normalised": "in the graph",
    }
    found = [
        {
            "name": name,
            "dtype": output.numpy().dtype.name,
            "shape": list(output.shape),
            # Sizes are rounded up, so their ratio may differ from the stride.
            "stride": 1 if output.shape[-2] == size[0] else stride,
            **meanings[name],
        }
        for name, output in outputs
    ]
    return {"inputs": [image], "outputs": found}
