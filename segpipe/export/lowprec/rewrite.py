"""Rewrites of an ONNX graph before quantisation: the same function in a form that quantises well.

Only the network, the part between the first and the last convolution, leaves fp32. Preprocessing lies before it, and
upsampling, softmax and argmax after it: they are cheap, and there a rounding error goes straight into the answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

CONV, NORM = "Conv", "BatchNormalization"
_EPSILON = 1e-5  # default of BatchNormalization
_PIXELS, _OUTPUTS = 4, 2  # per position of the widened first convolution
_TO_LAST, _TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


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
            found.update(name for name in node.output if name)
    return found


def before_convolutions(graph: onnx.GraphProto) -> set[str]:
    """Names of the tensors on which a convolution depends, its own inputs included."""
    found: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type == CONV or not found.isdisjoint(node.output):
            found.update(name for name in node.input if name)
    return found


def fold_batchnorm(graph: onnx.GraphProto) -> int:
    """Number of BatchNormalizations folded into the convolution before them; changes `graph`.

    Computed in float64 and rounded once. A norm elsewhere, or behind a convolution with other readers, stays.
    """
    readers = _readers(graph)
    makers = {name: node for node in graph.node for name in node.output}
    outputs = {entry.name for entry in graph.output}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    folded = []
    for norm in graph.node:
        if norm.op_type != NORM or not all(name in weights for name in norm.input[1:]):
            continue
        conv = makers.get(norm.input[0])
        if (
            conv is None
            or conv.op_type != CONV
            or not all(name in weights for name in conv.input[1:])
        ):
            continue
        if len(readers[conv.output[0]]) > 1 or conv.output[0] in outputs:
            continue
        factor, shift = _scale_and_shift(norm, weights)
        kernel, *biases = (_float64(weights[name]) for name in conv.input[1:])
        bias = biases[0] if biases else np.zeros(len(kernel))
        names = _add_weights(
            graph,
            norm.output[0],
            kernel * factor[:, None, None, None],
            bias * factor + shift,
        )
        conv.input[:] = [conv.input[0], *names]
        conv.output[0] = norm.output[0]
        folded.append(norm)
    for norm in folded:
        graph.node.remove(norm)
    _drop_unread_weights(graph)
    return len(folded)


def norms_as_convolutions(graph: onnx.GraphProto) -> int:
    """Number of BatchNormalizations replaced by a depthwise 1x1 convolution; changes `graph`.

    For norms between convolutions that cannot be folded, since a ReLU is in between. As convolutions they quantise, and
    no fp32 node is left among the int8 ones. Their input is (B, C, H, W), as everywhere in a convolutional network.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    norms = [
        node
        for node, is_inside in zip(graph.node, between_convolutions(graph), strict=True)
        if is_inside
        and node.op_type == NORM
        and all(name in weights for name in node.input[1:])
    ]
    for norm in norms:
        factor, bias = _scale_and_shift(norm, weights)
        names = _add_weights(graph, norm.output[0], factor[:, None, None, None], bias)
        group = len(factor)
        conv = onnx.helper.make_node(
            CONV,
            [norm.input[0], *names],
            list(norm.output[:1]),
            name=norm.name,
            group=group,
        )
        norm.CopyFrom(conv)
    _drop_unread_weights(graph)
    return len(norms)


def widen_constants(graph: onnx.GraphProto) -> None:
    """Repeats the per-channel constants of the normalisation along the width; needs inferred shapes.

    onnxruntime runs the normalisation with the channels last, as the int8 convolutions want it. There a constant of 3
    values per pixel took 1.9 ms at 360x480, a row of them 0.1 ms.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for node, is_inside in zip(graph.node, between_convolutions(graph), strict=True):
        width = _shape(graph, node.output[0])[3]
        if is_inside or node.op_type not in ("Mul", "Add") or width == 0:
            continue
        for place, name in enumerate(node.input):
            if (
                name in weights
                and len(weights[name].dims) == 4
                and weights[name].dims[2:] == [1, 1]
            ):
                values = np.repeat(
                    onnx.numpy_helper.to_array(weights[name]), width, axis=3
                )
                node.input[place] = f"{node.name}_row"
                graph.initializer.append(
                    onnx.numpy_helper.from_array(values, node.input[place])
                )


def widen_stem(model: onnx.ModelProto) -> bool:
    """Whether the first convolution was rewritten to take four pixels at a time; needs inferred shapes.

    onnxruntime's fast int8 convolution wants a multiple of four channels, and an image has three. Four neighbouring
    pixels make twelve, and with the channels last no byte moves: (1, H, W, 3) is (1, H, W / 4, 12). Applies when the
    convolution reads three channels with stride 2 along a width divisible by four, and only a ReLU reads it.
    """
    graph = model.graph
    conv = next((node for node in graph.node if node.op_type == CONV), None)
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer
    }
    if conv is None or not all(name in weights for name in conv.input[1:]):
        return False
    after = _readers(graph).get(conv.output[0], [])
    if [node.op_type for node in after] != ["Relu"] or conv.output[0] in {
        entry.name for entry in graph.output
    }:
        return False
    settings = {entry.name: list(entry.ints) for entry in conv.attribute}
    strides, pads = settings.get("strides", [1, 1]), settings.get("pads", [0] * 4)
    _, channels, height, width = _shape(graph, conv.input[0])
    _, num_out, low_height, low_width = _shape(graph, conv.output[0])
    if (
        channels != 3
        or height * width == 0
        or width % _PIXELS
        or strides[1] != _OUTPUTS
    ):
        return False
    if (
        2 * low_width > width
        or not _is_plain(conv)
        or weights[conv.input[1]].shape[1] != channels
    ):
        return False
    kernel, left, right = _wide_kernel(weights[conv.input[1]], pads[1])
    made = _Chain(graph)
    inputs = [
        made.turned(conv.input[0], [1, height, width // _PIXELS, 3 * _PIXELS]),
        made.weight(kernel),
    ]
    inputs += [made.weight(np.tile(weights[name], _OUTPUTS)) for name in conv.input[2:]]
    x = made.add(
        CONV, inputs, strides=[strides[0], 1], pads=[pads[0], left, pads[2], right]
    )
    made.turned(
        made.add("Relu", [x]),
        [1, low_height, width // _OUTPUTS, num_out],
        cut=low_width,
    )
    made.nodes[-1].output[0] = after[0].output[0]
    made.replace(conv, after[0])
    return True


class _Chain:
    """New nodes in sequence, with the weights they need."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self.nodes: list[onnx.NodeProto] = []

    def weight(self, values: Any) -> str:
        """Name of a new weight; a list of integers becomes int64."""
        name = f"stem_weight_{len(self._graph.initializer)}"
        self._graph.initializer.append(
            onnx.numpy_helper.from_array(np.asarray(values), name)
        )
        return name

    def turned(self, x: str, shape: list[int], cut: int = 0) -> str:
        """`x` (1, C, H, W), read with the channels last, as `shape`; `cut`: number of columns to keep, 0 for all."""
        last = self.add("Transpose", [x], perm=_TO_LAST)
        last = self.add("Reshape", [last, self.weight(shape)])
        if cut and cut < shape[2]:
            last = self.add("Slice", [last, *map(self.weight, ([0], [cut], [2]))])
        return self.add("Transpose", [last], perm=_TO_FIRST)

    def add(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """Output of a new node."""
        output = f"stem_{len(self.nodes)}"
        self.nodes.append(
            onnx.helper.make_node(
                kind, inputs, [output], name=f"{output}_node", **attributes
            )
        )
        return output

    def replace(self, conv: onnx.NodeProto, relu: onnx.NodeProto) -> None:
        """Puts the new nodes in place of these two."""
        kept = list(self._graph.node)
        place = kept.index(conv)
        kept[place : place + 1] = self.nodes
        kept.remove(relu)
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
        del self._graph.node[:]
        self._graph.node.extend(nodes)


def _wide_kernel(
    kernel: NDArray[np.float32], pad: int
) -> tuple[NDArray[np.float32], int, int]:
    """Kernel (2 M, 12, h, w) that gives two neighbouring outputs from groups of four pixels, and its padding in groups.

    Output o of a pair uses, with its tap t, pixel 2 o + t - pad, counted from the first pixel of the group.
    """
    num_out, num_in, height, width = kernel.shape
    first, last = (
        -pad // _PIXELS,
        (_OUTPUTS * (_OUTPUTS - 1) + width - 1 - pad) // _PIXELS,
    )
    wide = np.zeros(
        (_OUTPUTS, num_out, _PIXELS, num_in, height, last - first + 1), dtype=np.float32
    )
    for output in range(_OUTPUTS):
        for tap in range(width):
            group, pixel = divmod(_OUTPUTS * output + tap - pad, _PIXELS)
            wide[output, :, pixel, :, :, group - first] = kernel[..., tap]
    shape = (_OUTPUTS * num_out, _PIXELS * num_in, height, last - first + 1)
    return wide.reshape(shape), -first, last


def _is_plain(conv: onnx.NodeProto) -> bool:
    """Whether the convolution has no dilation and explicit padding."""
    settings = {entry.name: entry for entry in conv.attribute}
    dilated = "dilations" in settings and set(settings["dilations"].ints) != {1}
    return not dilated and (
        "auto_pad" not in settings or settings["auto_pad"].s == b"NOTSET"
    )


def _shape(graph: onnx.GraphProto, name: str) -> list[int]:
    """Four lengths, 0 where one is unknown."""
    for entry in (*graph.value_info, *graph.input):
        if entry.name == name and len(entry.type.tensor_type.shape.dim) == 4:
            return [size.dim_value for size in entry.type.tensor_type.shape.dim]
    return [0, 0, 0, 0]


def _scale_and_shift(
    norm: onnx.NodeProto, weights: dict[str, onnx.TensorProto]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Factor and summand of a BatchNormalization, per channel."""
    scale, shift, mean, variance = (_float64(weights[name]) for name in norm.input[1:])
    epsilon = next(
        (entry.f for entry in norm.attribute if entry.name == "epsilon"), _EPSILON
    )
    factor = scale / np.sqrt(variance + epsilon)
    return factor, shift - mean * factor


def _add_weights(
    graph: onnx.GraphProto,
    name: str,
    kernel: NDArray[np.float64],
    bias: NDArray[np.float64],
) -> tuple[str, str]:
    """Names of a kernel and bias added to the graph in fp32."""
    names = (f"{name}_folded_kernel", f"{name}_folded_bias")
    for each, values in zip(names, (kernel, bias), strict=True):
        graph.initializer.append(
            onnx.numpy_helper.from_array(values.astype(np.float32), each)
        )
    return names


def _drop_unread_weights(graph: onnx.GraphProto) -> None:
    """Frees names: onnxruntime's quantizer calls the scale of a tensor what BatchNormalization calls its own."""
    read = _readers(graph)
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _readers(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    """Nodes that read a tensor, by its name."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            if name:
                found.setdefault(name, []).append(node)
    return found


def _float64(weight: onnx.TensorProto) -> NDArray[np.float64]:
    return np.asarray(onnx.numpy_helper.to_array(weight), dtype=np.float64)
