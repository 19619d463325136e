"""fp16 ONNX files: the network in half precision by onnxruntime's converter; what surrounds it stays in fp32.

The converter rounds every tensor between two fp32 nodes to fp16, so it must not see preprocessing and decision: they
would lose the precision that G4 and the ties of G3 need. The network is cut out, converted, and put back.

onnxruntime on a CPU without half-precision arithmetic computes in fp32 with the rounded weights. There the file shows
whether the weights survive fp16, but neither whether activations overflow nor how fast it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel

from segpipe.errors import ExportError
from segpipe.export.lowprec.rewrite import after_convolutions, between_convolutions

_LARGEST = float(np.finfo(np.float16).max)


def to_fp16(source: Path, out: Path) -> None:
    """Writes `out`: the fp32 file `source` with the network in fp16.

    Inputs, outputs, opset and metadata are those of `source`. Raises ExportError for a weight beyond 65504.
    """
    model = onnx.load(source)
    graph = model.graph

    # Cut the network out and convert it.
    pairs = list(zip(graph.node, between_convolutions(graph), strict=True))
    inner = [node for node, is_inside in pairs if is_inside]
    outer = [node for node, is_inside in pairs if not is_inside]
    read = {name for node in outer for name in node.input}
    half = _converted(_cut_out(model, inner, read)).graph

    # Put it back between what comes before it and what comes after it.
    after = after_convolutions(graph)
    early = [node for node in outer if after.isdisjoint(node.input)]
    late = [node for node in outer if not after.isdisjoint(node.input)]
    kept = [weight for weight in graph.initializer if weight.name in read]
    # What both read stays in fp32 as well.
    rounded = [weight for weight in half.initializer if weight.name not in read]
    result = onnx.GraphProto(
        name=graph.name,
        node=[*early, *half.node, *late],
        initializer=[*kept, *rounded],
        input=graph.input,
        output=graph.output,
    )
    graph.CopyFrom(result)
    onnx.save(model, out)


def _cut_out(
    model: onnx.ModelProto, inner: list[onnx.NodeProto], read: set[str]
) -> onnx.ModelProto:
    """The nodes `inner` as a model of their own; `read`: what the other nodes read."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    needed = {name for node in inner for name in node.input if name}
    made = {name for node in inner for name in node.output}
    outputs = {entry.name for entry in graph.output}
    wanted = made & (read | outputs)

    # The extractor takes types of inputs and outputs from the graph.
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    network: onnx.ModelProto = onnx.utils.Extractor(typed).extract_model(
        sorted(needed - made - weights), sorted(wanted)
    )
    return network


def _converted(network: onnx.ModelProto) -> onnx.ModelProto:
    """`network` in fp16, with fp32 inputs and outputs. Raises ExportError for a weight that fp16 cannot hold."""
    for weight in network.graph.initializer:
        values = onnx.numpy_helper.to_array(weight)
        largest = float(np.abs(values).max(initial=0.0))
        if values.dtype == np.float32 and largest > _LARGEST:
            # The converter would clip it.
            raise ExportError(
                f"weight {weight.name} reaches {largest:g}, but the largest fp16 value is {_LARGEST:g}. Leave fp16 "
                "out of export.precision, or train with weight decay."
            )
    converted = convert_float_to_float16(network, keep_io_types=True, op_block_list=[])
    half = OnnxModel(converted)
    half.topological_sort()  # the converter appends its casts at the end
    sorted_model: onnx.ModelProto = half.model
    return sorted_model
