"""Which part of an exported graph is the network: the only part that may leave fp32.

Before the first convolution lies the preprocessing, after the last one what decides: upsampling of logits, softmax,
argmax. Both are cheap, and in both a rounding error counts in full.
"""

from __future__ import annotations

import onnx

CONV = "Conv"


def between_convolutions(graph: onnx.GraphProto) -> list[bool]:
    """For each node whether it is a convolution or lies on a way from one to another; nodes in topological order."""
    after, before = after_convolutions(graph), before_convolutions(graph)
    return [
        node.op_type == CONV or not (after.isdisjoint(node.input) or before.isdisjoint(node.output))
        for node in graph.node
    ]


def after_convolutions(graph: onnx.GraphProto) -> set[str]:
    """Names of all tensors that a convolution has a part in."""
    found: set[str] = set()
    for node in graph.node:
        if node.op_type == CONV or not found.isdisjoint(node.input):
            found.update(name for name in node.output if name)
    return found


def before_convolutions(graph: onnx.GraphProto) -> set[str]:
    """Names of all tensors that have a part in a convolution, its own inputs included."""
    found: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type == CONV or not found.isdisjoint(node.output):
            found.update(name for name in node.input if name)
    return found


def float_tensors(model: onnx.ModelProto) -> set[str]:
    """Names of all fp32 tensors, weights included. Raises onnx's InferenceError for a graph that is none."""
    graph = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    values = (*graph.value_info, *graph.input, *graph.output)
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in values}
    kinds |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT}


def consumers(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """Nodes that read a tensor, by its name; an output of the graph that no node reads is not in it."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            if name:
                found.setdefault(name, []).append(node)
    return found
