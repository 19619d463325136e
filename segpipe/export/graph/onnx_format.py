"""ONNX files: conversion, the probe that outputs logits and the normalised image, loading, and integrity."""

import contextlib
from pathlib import Path

import onnx
import torch

from segpipe.export.graph.network import (
    INPUT,
    PROBES,
    ROBOT,
    DeployModel,
    Manifest,
    Profile,
    Run,
    answer_of,
    example_of,
    io_problems,
    manifest_text,
)
from segpipe.runtime.artifact import MANIFEST_KEY
from segpipe.runtime.engines import ENGINES, make_session

OPSET = 18
IR_VERSION = 8  # the lowest that opset 18 needs; torch writes 10, which onnxruntime reads from 1.18 on
OLDEST_ONNXRUNTIME = "1.15"  # reproduces golden frames in all precisions (docs/robots.md); 1.14 crashes on fp16
_NUMPY_NAMES = {
    "tensor(uint8)": "uint8",
    "tensor(float)": "float32",
    "tensor(int32)": "int32",
}


def to_onnx(model: DeployModel, manifest: Manifest, shipped: Path, probe: Path) -> None:
    """Writes the shipped file with embedded weights and manifest, and its probe."""
    # One conversion for both: the shipped graph equals the probe's node for node, minus the extra outputs.
    with contextlib.redirect_stdout(None):
        torch.onnx.export(
            model.probe(),
            (example_of(manifest),),
            probe,
            dynamo=True,
            external_data=False,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=list(model.profile.probe_outputs),
            verbose=False,
        )
    graph_file = onnx.load(probe)
    _drop_debug_info(graph_file)
    del graph_file.graph.output[len(model.profile.outputs) :]
    write_both(graph_file, manifest, shipped, probe)


def write_both(
    model: onnx.ModelProto, manifest: Manifest, shipped: Path, probe: Path
) -> None:
    """Writes the model with the lowest IR version and the manifest, and its probe."""
    model.ir_version = IR_VERSION
    onnx.helper.set_model_props(model, {MANIFEST_KEY: manifest_text(manifest)})
    onnx.save(model, shipped)
    write_probe(shipped, probe)


def write_probe(shipped: Path, probe: Path) -> None:
    """Writes the graph of `shipped` with its tensors `logits` and `normalised` as extra outputs."""
    model = onnx.load(shipped, load_external_data=False)
    # No type: onnxruntime infers it, and it differs in an fp16 file.
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in PROBES)
    onnx.save(model, probe)


def open_onnx(
    path: Path,
    profile: Profile = ROBOT,
    *,
    engine: str = "onnxruntime",
    **settings: bool,
) -> Run:
    """An ONNX file in an engine of the runtime, on one CPU thread. Raises EngineError when the engine is missing.

    settings: of the engine. onnxruntime with optimize=False runs the graph node by node as written.
    """
    graph = onnx.load(path, load_external_data=False).graph
    names = [output.name for output in graph.output]
    loaded = ENGINES[engine](path.read_bytes(), threads=1, providers=None, **settings)
    run, _ = loaded.prepare(names)
    return lambda image: answer_of(names, run(profile.encode(image)))


def problems_of_onnx(path: Path, manifest: Manifest) -> list[str]:
    """G1 findings; empty when checker, loader and manifest agree. Raises what the checker and the loader raise."""
    model = onnx.load(path, load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    found = []
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets != {"": OPSET}:
        found.append(
            f"opsets = {opsets}, but only opset {OPSET} of the standard domain is allowed"
        )
    if model.ir_version != IR_VERSION:
        found.append(
            f"IR version = {model.ir_version}, but {IR_VERSION} was needed: older readers reject later versions"
        )
    notes = {entry.key: entry.value for entry in model.metadata_props}
    if notes != {MANIFEST_KEY: manifest_text(manifest)}:
        found.append("metadata_props do not hold the manifest")
    if found:
        return found
    session = make_session(str(path))
    declared = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
    for kind, entries in declared.items():
        got = [
            (entry.name, _NUMPY_NAMES.get(entry.type, entry.type), entry.shape)
            for entry in entries
        ]
        found += io_problems(kind, got, manifest["io"][kind])
    return found


def _drop_debug_info(model: onnx.ModelProto) -> None:
    """Removes the exporter's stack traces: they hold paths of this machine and are larger than small graphs."""
    graph = model.graph
    del model.metadata_props[:], graph.metadata_props[:]
    graph.ClearField("doc_string")
    values = (*graph.initializer, *graph.value_info, *graph.input, *graph.output)
    for entry in (*graph.node, *values):
        del entry.metadata_props[:]
        entry.ClearField("doc_string")
