"""Rewrites of an ONNX graph before quantisation: the same function in a form that quantises well.

torch.onnx folds a BatchNorm behind a convolution into it. Another one, behind a ReLU, stays in fp32: as a convolution
it would save ddrnet23_slim 7 % of its time and the other networks nothing.

Only the network, the part between the first and the last convolution, leaves fp32. Preprocessing lies before it, and
upsampling, softmax and argmax after it: they are cheap, and there a rounding error goes straight into the answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

CONV = "Conv"
Array = NDArray[Any]


def between_convolutions(graph: onnx.GraphProto) -> list[bool]:
    """For each node, whether it is a convolution or lies on a path between two. Nodes are in topological order."""
    after, before = after_convolutions(graph), before_convolutions(graph)
    return [
        node.op_type == CONV
        or not (after.isdisjoint(node.input) or before.isdisjoint(node.output))
        for node in graph.node
    ]


def after_convolutions(graph: onnx.GraphProto) -> set[str]:
    """Names of the tensors that depend on a convolution."""
    found: set[str] = set()
    for node in graph.node:
        if node.op_type == CONV or not found.isdisjoint(node.input):
            found.update(filter(None, node.output))
    return found


def before_convolutions(graph: onnx.GraphProto) -> set[str]:
    """Names of the tensors on which a convolution depends, its own inputs included."""
    found: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type == CONV or not found.isdisjoint(node.output):
            found.update(filter(None, node.input))
    return found


def widen_constants(graph: onnx.GraphProto) -> None:
    """Repeats the per-channel constants of the normalisation along the width; needs inferred shapes.

    onnxruntime runs the normalisation with the channels last, as the int8 convolutions want it. There a constant of 3
    values per pixel took 1.9 ms at 360x480, a row of them 0.1 ms.
    """
    weights = _weights(graph)
    for node, is_inside in zip(graph.node, between_convolutions(graph), strict=True):
        width = _shape(graph, node.output[0])[3]
        if is_inside or node.op_type not in ("Mul", "Add") or width == 0:
            continue
        for index, name in enumerate(node.input):
            if name in weights and weights[name].shape[2:] == (1, 1):
                row = np.repeat(weights[name], width, axis=3)
                node.input[index] = _add(graph, f"{node.name}_row", row)


def gather_stem(graph: onnx.GraphProto) -> bool:
    """Whether the first convolution was rewritten to read 2x2 blocks of pixels; needs inferred shapes.

    onnxruntime's fast int8 convolution wants a multiple of four channels, and an image has three. SpaceToDepth makes
    blocks of twelve, which a convolution with stride 1 reads. Processor time of int8 files at 360x480 without it: 12.7,
    23.6 and 26.7 ms instead of 10.8, 22.5 and 24.2 (fast_scnn, ddrnet23_slim, pidnet_s on a CPU with VNNI).

    Applies to a convolution of 3x3 with stride 2 and one row of padding that reads an image with even sides.
    """
    weights = _weights(graph)
    conv = next((node for node in graph.node if node.op_type == CONV), None)
    if conv is None or not weights.keys() >= set(conv.input[1:]):
        return False
    given = {entry.name: helper.get_attribute_value(entry) for entry in conv.attribute}
    plain = {"auto_pad": b"NOTSET", "dilations": [1, 1], "group": 1}
    wanted = {**plain, "strides": [2, 2], "pads": [1, 1, 1, 1]}
    kernel = weights[conv.input[1]]
    _, _, height, width = _shape(graph, conv.input[0])
    is_even = height > 0 and width > 0 and height % 2 == width % 2 == 0
    if {**plain, **given} != wanted or kernel.shape[1:] != (3, 3, 3) or not is_even:
        return False

    # Taps -1, 0 and 1 lie in the second half of the block before and in the block itself; a fourth one is zero.
    padded = np.pad(kernel, ((0, 0), (0, 0), (1, 0), (1, 0)))
    # (M, 3, 2 blocks, 2, 2 blocks, 2) -> (M, 2, 2, 3, 2 blocks, 2 blocks), the order of SpaceToDepth
    blocks = padded.reshape(-1, 3, 2, 2, 2, 2).transpose(0, 3, 5, 1, 2, 4)
    name = _add(graph, "stem_kernel", blocks.reshape(-1, 12, 2, 2))
    image, output = conv.input[0], list(conv.output)
    inputs = ["stem_blocks", name, *conv.input[2:]]
    gather = helper.make_node("SpaceToDepth", [image], ["stem_blocks"], blocksize=2)
    place = list(graph.node).index(conv)
    conv.CopyFrom(helper.make_node(CONV, inputs, output, pads=[1, 1, 0, 0]))
    graph.node.insert(place, gather)
    return True


def _shape(graph: onnx.GraphProto, name: str) -> list[int]:
    """Four lengths, 0 where one is unknown."""
    for entry in (*graph.value_info, *graph.input):
        lengths = entry.type.tensor_type.shape.dim
        if entry.name == name and len(lengths) == 4:
            return [length.dim_value for length in lengths]
    return [0, 0, 0, 0]


def _add(graph: onnx.GraphProto, name: str, values: Array) -> str:
    graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def _weights(graph: onnx.GraphProto) -> dict[str, Array]:
    """Stored tensors by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
