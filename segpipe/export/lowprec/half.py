"""The network of an ONNX file in half precision; preprocessing and what decides stay in fp32.

The conversion is of types alone: no node is added, removed or merged but for the casts where the network begins and
ends. onnxruntime on a CPU without half-precision arithmetic drops the casts inside as well and computes in fp32 with
the rounded weights: there the file tells whether the weights survive fp16, not whether activations do, nor how fast it
is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from segpipe.errors import ExportError
from segpipe.export.lowprec.region import between_convolutions, float_tensors

_FLOAT, _HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
_LARGEST = float(np.finfo(np.float16).max)
_ALWAYS_FLOAT = {"Resize": (2,)}  # inputs that the operator takes in fp32 only: the scales


def to_fp16(source: Path, out: Path) -> None:
    """Writes `out`: the fp32 file `source` with the network in fp16.

    Inputs, outputs, opset and metadata are those of `source`. Raises ExportError for a weight beyond 65504.
    """
    model = onnx.load(source)
    graph = model.graph
    conversion = _Conversion(graph, float_tensors(model))
    nodes = conversion.nodes(between_convolutions(graph))
    del graph.node[:], graph.value_info[:]  # the value_info tells the types of before
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in (*graph.initializer, *conversion.weights) if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(weights)
    onnx.save(model, out)


class _Conversion:
    """A walk over the nodes; `weights` are the fp16 ones it has made."""

    def __init__(self, graph: onnx.GraphProto, floats: set[str]) -> None:
        self._graph = graph
        self._floats = floats
        self._fp32_weights = {tensor.name: tensor for tensor in graph.initializer}
        self._halves: set[str] = set()  # tensors that exist in fp16 too
        self._nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def nodes(self, inside: list[bool]) -> list[onnx.NodeProto]:
        """All nodes, those of the network in fp16, with casts where fp32 and fp16 meet."""
        outside = [node for node, is_inside in zip(self._graph.node, inside, strict=True) if not is_inside]
        wanted = {name for node in outside for name in node.input} | {entry.name for entry in self._graph.output}
        for node, is_inside in zip(self._graph.node, inside, strict=True):
            copied = onnx.NodeProto()
            copied.CopyFrom(node)
            if is_inside:
                self._convert(copied, wanted)
            else:
                self._nodes.append(copied)
        return self._nodes

    def _convert(self, node: onnx.NodeProto, wanted: set[str]) -> None:
        for place, name in enumerate(node.input):
            if name in self._floats and place not in _ALWAYS_FLOAT.get(node.op_type, ()):
                node.input[place] = self._half(name)
        outputs = [name for name in node.output if name in self._floats]
        for place, name in enumerate(node.output):
            if name in outputs:
                node.output[place] = _half_name(name)
        if node.op_type == "Cast" and outputs:
            next(entry for entry in node.attribute if entry.name == "to").i = _HALF
        self._nodes.append(node)
        self._halves.update(outputs)
        for name in outputs:
            if name in wanted:
                self._nodes.append(_cast(_half_name(name), name, _FLOAT))

    def _half(self, name: str) -> str:
        if name not in self._halves:
            self._halves.add(name)
            if name in self._fp32_weights:
                self.weights.append(_rounded(self._fp32_weights[name]))
            else:
                self._nodes.append(_cast(name, _half_name(name), _HALF))
        return _half_name(name)


def _half_name(name: str) -> str:
    return f"{name}_half"


def _cast(name: str, result: str, kind: int) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [name], [result], name=f"cast_to_{result}", to=kind)


def _rounded(weight: onnx.TensorProto) -> onnx.TensorProto:
    values = onnx.numpy_helper.to_array(weight)
    largest = float(np.abs(values).max(initial=0.0))
    if largest > _LARGEST:
        raise ExportError(
            f"weight {weight.name} reaches {largest:g}, but fp16 ends at {_LARGEST:g}. Leave fp16 out of "
            "export.precision, or train with weight decay."
        )
    return onnx.numpy_helper.from_array(values.astype(np.float16), _half_name(weight.name))
