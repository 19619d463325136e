"""The deploy model as files: ONNX and TorchScript, each in the shipped form and as a probe with logits.

A probe is the same graph with `logits` as third output; the gates compare it and it is thrown away.
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

from segpipe.errors import ExportError
from segpipe.export.deploy import INPUT, LOGITS, OUTPUTS, DeployModel

OPSET = 18
MANIFEST_KEY = "segpipe"  # of ONNX metadata_props
MANIFEST_FILE = "manifest.json"  # TorchScript extra file
Manifest = dict[str, Any]
jit: Any = torch.jit  # has no annotations


def to_onnx(model: DeployModel, size: tuple[int, int], manifest: Manifest, shipped: Path, probe: Path) -> None:
    """Writes the ONNX files, weights and manifest inside; `size` = (height, width) of every image to come.

    Raises ExportError when torch cannot convert the network.
    """
    # One export for both: the shipped graph is the probe's less an output, node for node.
    with _conversion("onnx"), contextlib.redirect_stdout(None):
        torch.onnx.export(
            model.probe(),
            (_example(size),),
            probe,
            dynamo=True,
            external_data=False,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[*OUTPUTS, LOGITS],
            verbose=False,
        )
    graph_file = onnx.load(probe)
    _drop_debug_info(graph_file)
    onnx.helper.set_model_props(graph_file, {MANIFEST_KEY: manifest_text(manifest)})
    onnx.save(graph_file, probe)
    kept = [output for output in graph_file.graph.output if output.name != LOGITS]
    del graph_file.graph.output[:]
    graph_file.graph.output.extend(kept)
    onnx.save(graph_file, shipped)


def to_torchscript(model: DeployModel, size: tuple[int, int], manifest: Manifest, shipped: Path, probe: Path) -> None:
    """Writes the TorchScript files, manifest inside as extra file; `size` = (height, width) of every image to come.

    Not frozen: freezing folds BatchNorm into other weights than the trained ones. Raises ExportError as `to_onnx`.
    """
    extra = {MANIFEST_FILE: manifest_text(manifest)}
    with _conversion("torchscript"), torch.no_grad():
        for variant, path in ((model, shipped), (model.probe(), probe)):
            # check_trace would run the model again on the example; the gates do so on real images.
            traced = jit.trace(variant, (_example(size),), check_trace=False)
            jit.save(traced, str(path), _extra_files=extra)


def manifest_text(manifest: Manifest) -> str:
    """The manifest as it stands in every file: one spelling per content."""
    return json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False)


@contextlib.contextmanager
def quiet_torchscript() -> Iterator[None]:
    """torch.jit works and robots use it; that it is deprecated is the reader's news, not the user's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is", FutureWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is", DeprecationWarning)
        # Sizes become constants of the trace, which is meant: the exported shapes are static.
        warnings.filterwarnings("ignore", category=jit.TracerWarning)
        yield


@contextlib.contextmanager
def _conversion(name: str) -> Iterator[None]:
    with warnings.catch_warnings(), quiet_torchscript():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|onnxscript|onnx_ir|copyreg)\b")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(torch|onnxscript|onnx_ir|copyreg)\b")
        try:
            yield
        except Exception as error:
            raise ExportError(
                f"export.formats = {name}: torch {torch.__version__} could not convert the network "
                f"({type(error).__name__}: {error}). Leave {name} out of export.formats, or change the named operation."
            ) from error


def _example(size: tuple[int, int]) -> torch.Tensor:
    return torch.zeros((1, *size, 3), dtype=torch.uint8)


def _drop_debug_info(model: onnx.ModelProto) -> None:
    """Without the exporter's stack traces: they hold the paths of this machine and outweigh small graphs."""
    graph = model.graph
    del model.metadata_props[:], graph.metadata_props[:]
    graph.doc_string = ""
    for entry in (*graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output):
        del entry.metadata_props[:]
        entry.doc_string = ""
