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
    is_inside = between_convolutions(graph)
    outer = [
        node for node, inside in zip(graph.node, is_inside, strict=True) if not inside
    ]
    inner = [node for node, inside in zip(graph.node, is_inside, strict=True) if inside]
    half = _converted(_cut_out(model, inner, outer)).graph
    after = after_convolutions(graph)
    early = [node for node in outer if after.isdisjoint(node.input)]
    late = [node for node in outer if not after.isdisjoint(node.input)]
    read = {name for node in outer for name in node.input}
    kept = [weight for weight in graph.initializer if weight.name in read]
    result = onnx.GraphProto(
        name=graph.name,
        node=[*early, *half.node, *late],
        initializer=[
            *kept,
            *(weight for weight in half.initializer if weight.name not in read),
        ],
        input=graph.input,
        output=graph.output,
    )
    graph.CopyFrom(result)
    onnx.save(model, out)


def _cut_out(
    model: onnx.ModelProto, inner: list[onnx.NodeProto], outer: list[onnx.NodeProto]
) -> onnx.ModelProto:
    """The nodes `inner` as a model of their own."""
    weights = {tensor.name for tensor in model.graph.initializer}
    made = {name for node in inner for name in node.output}
    read = {name for node in outer for name in node.input} | {
        entry.name for entry in model.graph.output
    }
    inputs = sorted(
        {name for node in inner for name in node.input if name} - made - weights
    )
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    network: onnx.ModelProto = onnx.utils.Extractor(typed).extract_model(
        inputs, sorted(made & read)
    )
    return network


def _converted(network: onnx.ModelProto) -> onnx.ModelProto:
    for weight in network.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            largest = float(np.abs(onnx.numpy_helper.to_array(weight)).max(initial=0.0))
            if largest > _LARGEST:  # the converter would clip it
                raise ExportError(
                    f"weight {weight.name} reaches {largest:g}, but the largest fp16 value is {_LARGEST:g}. Leave fp16 "
                    "out of export.precision, or train with weight decay."
                )
    half = OnnxModel(
        convert_float_to_float16(network, keep_io_types=True, op_block_list=[])
    )
    half.topological_sort()  # the converter appends its casts at the end
    converted: onnx.ModelProto = half.model
    return converted
