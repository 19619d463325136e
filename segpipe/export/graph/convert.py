"""The deploy model as files: ONNX, TorchScript and torch.export, each in the shipped form and as a probe.

A probe is the same graph with `logits` and `normalised` as further outputs; the gates compare it and it is thrown away.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from torch.fx.experimental import _config as fx_config

from segpipe.errors import ExportError
from segpipe.export.graph.archive import write_archive
from segpipe.export.graph.deploy import DeployModel
from segpipe.export.graph.probes import keep_outputs, write_probe
from segpipe.export.graph.profiles import INPUT
from segpipe.runtime.artifact import MANIFEST_KEY

OPSET = 18
MANIFEST_FILE = "manifest.json"  # extra file of TorchScript and torch.export
Manifest = dict[str, Any]
jit: Any = torch.jit  # has no annotations


def to_onnx(model: DeployModel, size: tuple[int, int], manifest: Manifest, shipped: Path, probe: Path) -> None:
    """Writes the ONNX files, weights and manifest inside; `size` = (height, width) of the example.

    Raises ExportError when torch cannot convert the network.
    """
    # One export for both: the shipped graph is the probe's less the outputs, node for node.
    with _conversion("onnx"), contextlib.redirect_stdout(None):
        torch.onnx.export(
            model.probe(),
            (model.profile.example(size),),
            probe,
            dynamic_shapes=_dynamic_shapes(model, manifest),
            dynamo=True,
            external_data=False,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=list(model.profile.probe_outputs),
            verbose=False,
        )
    graph_file = onnx.load(probe)
    _drop_debug_info(graph_file)
    _name_free_axes(graph_file.graph, manifest)
    onnx.helper.set_model_props(graph_file, {MANIFEST_KEY: manifest_text(manifest)})
    keep_outputs(graph_file, model.profile.outputs)
    onnx.save(graph_file, shipped)
    write_probe(shipped, probe)


def to_torchscript(model: DeployModel, size: tuple[int, int], manifest: Manifest, shipped: Path, probe: Path) -> None:
    """Writes the TorchScript files, manifest inside as extra file; `size` = (height, width) of the example.

    Not frozen: freezing folds BatchNorm into other weights than the trained ones. Raises ExportError as `to_onnx`.
    """
    extra = {MANIFEST_FILE: manifest_text(manifest)}
    with _conversion("torchscript"), torch.no_grad(), _fixed_switches():
        # The probe first: it takes the names of all classes, so those of the shipped file are numbered from the first
        # one on, whatever this process has traced before.
        for variant, path in ((model.probe(), probe), (model, shipped)):
            # check_trace would run the model again on the example; the gates do so on real images.
            traced = jit.trace(variant, (model.profile.example(size),), check_trace=False)
            write_archive(traced, path, extra)


def to_pt2(model: DeployModel, size: tuple[int, int], manifest: Manifest, shipped: Path, probe: Path) -> None:
    """Writes the torch.export files, manifest inside as extra file; `size` = (height, width) of the example.

    Raises ExportError as `to_onnx`.
    """
    extra = {MANIFEST_FILE: manifest_text(manifest)}
    with _conversion("pt2"), torch.no_grad(), _no_length_is_one():
        for variant, path in ((model.probe(), probe), (model, shipped)):
            program = torch.export.export(
                variant, (model.profile.example(size),), dynamic_shapes=_dynamic_shapes(model, manifest)
            )
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)  # paths of this machine
            torch.export.save(program, path, extra_files=dict(extra))


def manifest_text(manifest: Manifest) -> str:
    """The manifest as it stands in every file: one spelling per content."""
    return json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False)


@contextlib.contextmanager
def quiet_torchscript() -> Iterator[None]:
    """torch.jit works and robots use it; that it is deprecated is the reader's news, not the user's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is", FutureWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is", DeprecationWarning)
        # Sizes become constants of the trace, which is meant: height and width of a trace are never free.
        warnings.filterwarnings("ignore", category=jit.TracerWarning)
        yield


def _dynamic_shapes(model: DeployModel, manifest: Manifest) -> tuple[dict[int, Any]] | None:
    """Free axes of the input as torch.export wants them; None where there are none."""
    free = manifest["io"].get("free")
    if not free:
        return None
    dims = {axis: torch.export.Dim(axis, min=entry["min"]) for axis, entry in free.items()}
    return ({place: dims[axis] for place, axis in model.profile.free_axes.items()},)


@contextlib.contextmanager
def _no_length_is_one() -> Iterator[None]:
    """torch.export would tie a free length to whether it, or a map's that depends on it, is 1 in the example.

    Broadcasting alone needs to know, and nothing is broadcast here. torch.onnx.export sets the same by itself.
    """
    config: Any = fx_config
    with config.patch(backed_size_oblivious=True):
        yield


@contextlib.contextmanager
def _fixed_switches() -> Iterator[None]:
    """Every traced convolution records these switches of the process, and on a GPU obeys them for ever."""
    cudnn: Any = torch.backends.cudnn
    wanted = {"enabled": True, "benchmark": False, "deterministic": True, "allow_tf32": False}
    before = {name: getattr(cudnn, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(cudnn, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)


@contextlib.contextmanager
def _conversion(name: str) -> Iterator[None]:
    with warnings.catch_warnings(), quiet_torchscript():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|onnxscript|onnx_ir|copyreg)\b")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|onnxscript|onnx_ir|copyreg)\b")
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno:  # of the folder, not of the network
                raise
            raise ExportError(
                f"export.formats = {name}: torch {torch.__version__} could not convert the network "
                f"({type(error).__name__}: {error}). Leave {name} out of export.formats, or change the named operation."
            ) from error


def _name_free_axes(graph: onnx.GraphProto, manifest: Manifest) -> None:
    """Lengths that the converter left open, by the names of the manifest; one that it fixed stays and fails G1."""
    axes = {entry["name"]: entry["shape"] for kind in ("inputs", "outputs") for entry in manifest["io"][kind]}
    for value in (*graph.input, *graph.output):
        for length, axis in zip(value.type.tensor_type.shape.dim, axes.get(value.name, ()), strict=False):
            if length.HasField("dim_param") and isinstance(axis, str):
                length.dim_param = axis


def _drop_debug_info(model: onnx.ModelProto) -> None:
    """Without the exporter's stack traces: they hold the paths of this machine and outweigh small graphs."""
    graph = model.graph
    del model.metadata_props[:], graph.metadata_props[:]
    graph.doc_string = ""
    for entry in (*graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output):
        del entry.metadata_props[:]
        entry.doc_string = ""
