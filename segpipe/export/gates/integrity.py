"""G1: whether a file is whole, alone, loadable, of the trained weights, and what the manifest says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch

from segpipe.export.gates.sessions import open_session
from segpipe.export.graph.convert import MANIFEST_FILE, OPSET, Manifest, jit, manifest_text, quiet_torchscript
from segpipe.runtime.artifact import MANIFEST_KEY, exported_lengths, resolved

Tensors = Mapping[str, torch.Tensor]
_NUMPY_NAMES = {"tensor(uint8)": "uint8", "tensor(float)": "float32", "tensor(int32)": "int32"}


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
    session = open_session(path)
    described = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
    for kind, entries in described.items():
        got = [
            {"name": entry.name, "dtype": _NUMPY_NAMES.get(entry.type, entry.type), "shape": entry.shape}
            for entry in entries
        ]
        found += _unlike(kind, got, manifest["io"][kind])
    return found


def problems_of_torchscript(path: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the file as a file; empty when loader, manifest and number of values agree."""
    files = {MANIFEST_FILE: ""}
    with quiet_torchscript():
        module = jit.load(str(path), map_location="cpu", _extra_files=files)
    return _problems_of_torch(module, module.state_dict(), files, manifest)


def problems_of_pt2(path: Path, manifest: Manifest) -> list[str]:
    """As `problems_of_torchscript`, of a file of torch.export."""
    files = {MANIFEST_FILE: ""}
    program = torch.export.load(path, extra_files=files)
    return _problems_of_torch(program.module(), program.state_dict, files, manifest)


def tensors_of_torchscript(path: Path) -> Tensors:
    """Stored tensors by name."""
    with quiet_torchscript():
        return dict(jit.load(str(path), map_location="cpu").state_dict())


def tensors_of_pt2(path: Path) -> Tensors:
    """Stored tensors by name."""
    return dict(torch.export.load(path).state_dict)


def foreign_tensors(stored: Tensors, trained: Tensors) -> list[str]:
    """Names of tensors that are not, bit for bit, those of the trained network, or are in one of the two only."""
    return [
        name
        for name in sorted(stored.keys() | trained.keys())
        if name not in stored or name not in trained or not torch.equal(stored[name].cpu(), trained[name].cpu())
    ]


def _problems_of_torch(module: Any, stored: Tensors, files: Mapping[str, Any], manifest: Manifest) -> list[str]:
    found = []
    if _text(files[MANIFEST_FILE]) != manifest_text(manifest):
        found.append(f"{MANIFEST_FILE} inside the file is not the manifest")
    number = sum(tensor.numel() for tensor in stored.values())
    if number != manifest["stored_values"]:
        found.append(f"{number} stored values, needed {manifest['stored_values']}")
    lengths = exported_lengths(manifest["io"])  # such a file names no axes: what it does at others, G2 and G3 tell
    declared, *needed = (
        {**entry, "shape": list(resolved(entry["shape"], lengths))}
        for entry in (*manifest["io"]["inputs"], *manifest["io"]["outputs"])
    )
    with torch.no_grad():
        outputs = module(torch.zeros(declared["shape"], dtype=getattr(torch, declared["dtype"])))
    names = [entry["name"] for entry in needed]
    if len(outputs) != len(names):
        return [*found, f"{len(outputs)} outputs, needed {len(names)}"]
    got = [
        {"name": name, "dtype": str(output.dtype).removeprefix("torch."), "shape": list(output.shape)}
        for name, output in zip(names, outputs, strict=True)
    ]
    return found + _unlike("outputs", got, needed)


def _text(content: str | bytes) -> str:
    return content.decode() if isinstance(content, bytes) else content


def _unlike(kind: str, got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    needed = [{key: entry[key] for key in ("name", "dtype", "shape")} for entry in expected]
    return [] if got == needed else [f"{kind} {got}, needed {needed}"]
