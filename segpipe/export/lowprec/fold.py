"""BatchNorm of a graph in inference as part of a convolution, or as one: the same function with one rounding less."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray

from segpipe.export.lowprec.region import CONV, between_convolutions, consumers

NORM = "BatchNormalization"
_EPSILON = 1e-5  # what the operator takes when nothing is said


def fold_batchnorm(graph: onnx.GraphProto) -> int:
    """Number of BatchNormalizations that were folded into the convolution before them; `graph` is changed.

    Computed in float64 and rounded once. One that stands elsewhere, or whose convolution others read too, stays.
    """
    readers = consumers(graph)
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {entry.name for entry in graph.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    folded = []
    for norm in graph.node:
        if norm.op_type != NORM or not all(name in weights for name in norm.input[1:]):
            continue
        conv = makers.get(norm.input[0])
        if conv is None or conv.op_type != CONV or not all(name in weights for name in conv.input[1:]):
            continue
        if len(readers[conv.output[0]]) > 1 or conv.output[0] in outputs:
            continue
        values = {name: _wide(weights[name]) for name in (*conv.input[1:], *norm.input[1:])}
        kernel, bias = _folded(conv, norm, values)
        conv.input[:] = [conv.input[0], *_add_weights(graph, norm.output[0], kernel, bias)]
        conv.output[0] = norm.output[0]
        folded.append(norm)
    for norm in folded:
        graph.node.remove(norm)
    _drop_unread_weights(graph)
    return len(folded)


def norms_as_convolutions(graph: onnx.GraphProto) -> int:
    """Number of BatchNormalizations that became a depthwise 1x1 convolution; `graph` is changed.

    For those between convolutions that cannot be folded, since a ReLU follows: the quantised form of a network then has
    no island of fp32 there. Their input is (B, C, H, W), as everywhere in a network of convolutions.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    norms = [
        node
        for node, is_inside in zip(graph.node, between_convolutions(graph), strict=True)
        if is_inside and node.op_type == NORM and all(name in weights for name in node.input[1:])
    ]
    for norm in norms:
        factor, bias = _scale_and_shift(norm, {name: _wide(weights[name]) for name in norm.input[1:]})
        names = _add_weights(graph, norm.output[0], factor[:, None, None, None], bias)
        group = len(factor)
        conv = onnx.helper.make_node(CONV, [norm.input[0], *names], list(norm.output[:1]), name=norm.name, group=group)
        norm.CopyFrom(conv)
    _drop_unread_weights(graph)
    return len(norms)


def _folded(
    conv: onnx.NodeProto, norm: onnx.NodeProto, values: dict[str, NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Kernel and bias of the convolution that does the work of both."""
    factor, shift = _scale_and_shift(norm, values)
    kernel = values[conv.input[1]]
    bias = values[conv.input[2]] if len(conv.input) > 2 else np.zeros(len(kernel))
    return kernel * factor[:, None, None, None], bias * factor + shift


def _scale_and_shift(
    norm: onnx.NodeProto, values: dict[str, NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the operator multiplies by and then adds, per channel."""
    scale, shift, mean, variance = (values[name] for name in norm.input[1:])
    epsilon = next((entry.f for entry in norm.attribute if entry.name == "epsilon"), _EPSILON)
    factor = scale / np.sqrt(variance + epsilon)
    return factor, shift - mean * factor


def _add_weights(
    graph: onnx.GraphProto, name: str, kernel: NDArray[np.float64], bias: NDArray[np.float64]
) -> tuple[str, str]:
    """Names of kernel and bias of a convolution, in fp32, after they were added to the graph."""
    names = (f"{name}_folded_kernel", f"{name}_folded_bias")
    for each, values in zip(names, (kernel, bias), strict=True):
        graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), each))
    return names


def _drop_unread_weights(graph: onnx.GraphProto) -> None:
    """Their names are needed: onnxruntime's quantizer calls the scale of a tensor what BatchNorm calls its own."""
    read = consumers(graph)
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _wide(weight: onnx.TensorProto) -> NDArray[np.float64]:
    return np.asarray(onnx.numpy_helper.to_array(weight), dtype=np.float64)
