"""Every file format in one table: how it is written, opened, and looked over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray

from segpipe.export.convert import (
    MANIFEST_FILE,
    MANIFEST_KEY,
    OPSET,
    Manifest,
    jit,
    manifest_text,
    quiet_torchscript,
    to_onnx,
    to_torchscript,
)
from segpipe.export.deploy import INPUT, DeployModel

Image = NDArray[np.uint8]


class Answer(NamedTuple):
    """What one image gives: mask (H, W) and confidence (h, w) uint8, logits float32 (C, H, W) where asked for."""

    mask: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    logits: NDArray[np.float32] | None = None


Run = Callable[[Image], Answer]  # image uint8 (H, W, 3) RGB


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch on one CPU thread: the number of threads changes sums, and the reference must be one thing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_eager(model: DeployModel) -> Run:
    """The reference: torch's eager mode, fp32, with logits. Call it inside `one_thread`."""
    probe = model.probe()

    def run(image: Image) -> Answer:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return _answer(probe(_batch(image)))

    return run


def open_torchscript(path: Path) -> Run:
    """A TorchScript file on the CPU. Call it inside `one_thread`."""
    with quiet_torchscript():
        module = jit.load(str(path), map_location="cpu")

    def run(image: Image) -> Answer:
        with torch.no_grad():
            return _answer(module(_batch(image)))

    return run


def open_onnx(path: Path) -> Run:
    """An ONNX file in onnxruntime, one CPU thread, not spinning."""
    session = _session(path)

    def run(image: Image) -> Answer:
        return Answer(*(output[0] for output in session.run(None, {INPUT: image[None]})))

    return run


def problems_of_onnx(path: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the file as a file; empty when checker, loader and manifest agree."""
    model = onnx.load(path, load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    found = []
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets != {"": OPSET}:
        found.append(f"opsets {opsets}, needed {OPSET} of the standard domain alone")
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer):
        found.append("weights lie outside the file")
    if {entry.key: entry.value for entry in model.metadata_props} != {MANIFEST_KEY: manifest_text(manifest)}:
        found.append("metadata_props do not hold the manifest")
    session = _session(path)
    described = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
    for kind, expected in manifest["io"].items():
        got = [
            {"name": entry.name, "dtype": _numpy_name(entry.type), "shape": entry.shape} for entry in described[kind]
        ]
        found += _unlike(kind, got, expected)
    return found


def problems_of_torchscript(path: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the file as a file; empty when loader, manifest and stored tensors agree."""
    files = {MANIFEST_FILE: ""}
    with quiet_torchscript():
        module = jit.load(str(path), map_location="cpu", _extra_files=files)
    found = []
    if _text(files[MANIFEST_FILE]) != manifest_text(manifest):
        found.append(f"{MANIFEST_FILE} inside the file is not the manifest")
    stored = sum(tensor.numel() for tensor in module.state_dict().values())
    if stored != manifest["stored_values"]:
        found.append(f"{stored} stored values, needed {manifest['stored_values']}")
    declared = manifest["io"]["inputs"][0]
    with torch.no_grad():
        outputs = module(torch.zeros(declared["shape"], dtype=getattr(torch, declared["dtype"])))
    names = [entry["name"] for entry in manifest["io"]["outputs"]]
    if len(outputs) != len(names):
        return [*found, f"{len(outputs)} outputs, needed {len(names)}"]
    got = [
        {"name": name, "dtype": str(output.dtype).removeprefix("torch."), "shape": list(output.shape)}
        for name, output in zip(names, outputs, strict=True)
    ]
    return found + _unlike("outputs", got, manifest["io"]["outputs"])


@dataclass(frozen=True)
class Format:
    """One row: `convert` writes shipped file and probe, `open` runs either, `problems` looks the shipped one over."""

    file_name: str
    convert: Callable[[DeployModel, tuple[int, int], Manifest, Path, Path], None]
    open: Callable[[Path], Run]
    problems: Callable[[Path, Manifest], list[str]]


FORMATS: dict[str, Format] = {
    "onnx": Format("model.onnx", to_onnx, open_onnx, problems_of_onnx),
    "torchscript": Format("model.torchscript.pt", to_torchscript, open_torchscript, problems_of_torchscript),
}


def _session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _batch(image: Image) -> torch.Tensor:
    # A copy: torch warns about arrays that are read-only, as files mapped into memory are.
    return torch.from_numpy(image.copy())[None]


def _answer(outputs: tuple[torch.Tensor, ...]) -> Answer:
    return Answer(*(output[0].numpy() for output in outputs))


def _numpy_name(onnx_type: str) -> str:
    return {"tensor(uint8)": "uint8", "tensor(float)": "float32"}.get(onnx_type, onnx_type)


def _text(content: str | bytes) -> str:
    return content.decode() if isinstance(content, bytes) else content


def _unlike(kind: str, got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    needed = [{key: entry[key] for key in ("name", "dtype", "shape")} for entry in expected]
    return [] if got == needed else [f"{kind} {got}, needed {needed}"]
