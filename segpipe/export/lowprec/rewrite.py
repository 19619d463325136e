"""Rewrites of an ONNX graph before quantisation: the same function in a form that quantises well.

Only the network, the part between the first and the last convolution, leaves fp32. Preprocessing lies before it, and
upsampling, softmax and argmax after it: they are cheap, and there a rounding error goes straight into the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

CONV, NORM = "Conv", "BatchNormalization"
_EPSILON = 1e-5  # default of BatchNormalization
_CHANNELS_LAST, _CHANNELS_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
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


def fold_batchnorm(graph: onnx.GraphProto) -> int:
    """Number of BatchNormalizations folded into the convolution before them; changes `graph`.

    Computed in float64 and rounded once. A norm elsewhere, or behind a convolution with other readers, stays.
    """
    weights, readers = _weights(graph), _readers(graph)
    convolutions = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == CONV and weights.keys() >= set(node.input[1:])
    }
    folded = []
    for norm in graph.node:
        if not _is_norm(norm, weights):
            continue
        conv = convolutions.get(norm.input[0])
        if conv is None or readers[conv.output[0]] != [norm]:
            continue
        # norm(conv(x)) = factor * (kernel * x + bias) + shift
        factor, shift = _scale_and_shift(norm, weights)
        kernel, *biases = (weights[name] for name in conv.input[1:])
        bias = biases[0] if biases else np.zeros(len(kernel))
        kernel = kernel * factor[:, None, None, None]
        names = _add_weights(graph, norm.output[0], kernel, bias * factor + shift)
        conv.input[1:] = names
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
    weights = _weights(graph)
    inside = zip(graph.node, between_convolutions(graph), strict=True)
    norms = [
        node for node, is_inside in inside if is_inside and _is_norm(node, weights)
    ]
    for norm in norms:
        factor, bias = _scale_and_shift(norm, weights)
        kernel = factor[:, None, None, None]
        names = _add_weights(graph, norm.output[0], kernel, bias)
        conv = helper.make_node(
            CONV,
            [norm.input[0], *names],
            norm.output[:1],
            name=norm.name,
            group=len(factor),
        )
        norm.CopyFrom(conv)
    _drop_unread_weights(graph)
    return len(norms)


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


@dataclass(frozen=True)
class _Stem:
    """A first convolution with stride 2 along the width, and the ReLU that alone reads it."""

    conv: onnx.NodeProto
    relu: onnx.NodeProto
    kernel: Array
    bias: Array | None
    stride: int  # along the height
    pads: list[int]  # top, left, bottom, right
    size: tuple[int, int]  # of the image
    out_size: tuple[int, int]


def widen_stem(model: onnx.ModelProto) -> bool:
    """Whether the first convolution was rewritten to take four pixels at a time; needs inferred shapes.

    onnxruntime's fast int8 convolution wants a multiple of four channels, and an image has three. Four neighbouring
    pixels make twelve, and with the channels last no byte moves: (1, H, W, 3) is (1, H, W / 4, 12). The convolution
    then gives two neighbouring outputs at once, 2 M channels, which become two columns of M channels again. Without
    this, int8 files of fast_scnn took 9.9 ms instead of 9.2 at 360x480.

    Applies when the convolution reads three channels with stride 2 along a width divisible by four, and only a ReLU
    reads it.
    """
    graph = model.graph
    stem = _stem(graph)
    if stem is None:
        return False
    image, output = stem.conv.input[0], stem.relu.output[0]
    height, width = stem.size
    out_height, out_width = stem.out_size
    kernel, left, right = _wide_kernel(stem.kernel, stem.pads[1])
    top, _, bottom, _ = stem.pads
    weights = {
        "wide_kernel": kernel,
        "wide_fours": np.array([1, height, width // 4, 12]),
        "wide_ones": np.array([1, out_height, width // 2, len(stem.kernel)]),
    }
    conv_inputs = ["wide_grouped", "wide_kernel"]
    if stem.bias is not None:
        weights["wide_bias"] = np.tile(stem.bias, 2)
        conv_inputs.append("wide_bias")

    make = helper.make_node
    nodes = [
        # (1, H, W, 3)
        make("Transpose", [image], ["wide_last"], perm=_CHANNELS_LAST),
        # (1, H, W / 4, 12)
        make("Reshape", ["wide_last", "wide_fours"], ["wide_four"]),
        # (1, 12, H, W / 4)
        make("Transpose", ["wide_four"], ["wide_grouped"], perm=_CHANNELS_FIRST),
        # (1, 2 M, h, W / 4)
        make(
            CONV,
            conv_inputs,
            ["wide_pairs"],
            strides=[stem.stride, 1],
            pads=[top, left, bottom, right],
        ),
        make("Relu", ["wide_pairs"], ["wide_relu"]),
        # (1, h, W / 4, 2 M)
        make("Transpose", ["wide_relu"], ["wide_relu_last"], perm=_CHANNELS_LAST),
        # (1, h, W / 2, M)
        make("Reshape", ["wide_relu_last", "wide_ones"], ["wide_columns"]),
    ]
    if out_width < width // 2:
        # Pairs gave a column more than the convolution did: (1, h, w, M).
        weights["wide_start"] = np.array([0])
        weights["wide_end"] = np.array([out_width])
        weights["wide_axis"] = np.array([2])
        cut = ["wide_columns", "wide_start", "wide_end", "wide_axis"]
        nodes.append(make("Slice", cut, ["wide_kept"]))
    # (1, M, h, w)
    columns = nodes[-1].output[0]
    nodes.append(make("Transpose", [columns], [output], perm=_CHANNELS_FIRST))

    for name, values in weights.items():
        _add(graph, name, values)
    _replace(graph, stem, nodes)
    return True


def _replace(graph: onnx.GraphProto, stem: _Stem, nodes: list[onnx.NodeProto]) -> None:
    """Puts `nodes` in place of the convolution and its ReLU."""
    kept = [node for node in graph.node if node != stem.relu]
    place = kept.index(stem.conv)
    # A message of its own: the old nodes do not outlive their graph.
    changed = onnx.GraphProto(node=[*kept[:place], *nodes, *kept[place + 1 :]])
    del graph.node[:]
    graph.node.extend(changed.node)


def _stem(graph: onnx.GraphProto) -> _Stem | None:
    """The first convolution, if it can be widened."""
    weights = _weights(graph)
    conv = next((node for node in graph.node if node.op_type == CONV), None)
    if conv is None or not weights.keys() >= set(conv.input[1:]):
        return None
    readers = _readers(graph).get(conv.output[0], [])
    if [getattr(reader, "op_type", "") for reader in readers] != ["Relu"]:
        return None
    attributes = {
        entry.name: helper.get_attribute_value(entry) for entry in conv.attribute
    }
    stride, stride_along_width = attributes.get("strides", [1, 1])
    _, channels, height, width = _shape(graph, conv.input[0])
    _, _, out_height, out_width = _shape(graph, conv.output[0])
    kernel, *biases = (weights[name] for name in conv.input[1:])
    fits = (
        channels == kernel.shape[1] == 3
        and height > 0
        and width > 0
        and width % 4 == 0
        and stride_along_width == 2
        and 2 * out_width <= width
        and set(attributes.get("dilations", [1])) == {1}
        and attributes.get("auto_pad", b"NOTSET") == b"NOTSET"
    )
    if not fits:
        return None
    return _Stem(
        conv=conv,
        relu=readers[0],
        kernel=kernel,
        bias=biases[0] if biases else None,
        stride=stride,
        pads=attributes.get("pads", [0, 0, 0, 0]),
        size=(height, width),
        out_size=(out_height, out_width),
    )


def _wide_kernel(kernel: Array, pad: int) -> tuple[Array, int, int]:
    """Kernel (2 M, 12, h, w) that gives two neighbouring outputs from groups of four pixels, and its padding in groups.

    Output o of a pair uses, with its tap t, pixel 2 o + t - pad, counted from the first pixel of the group.
    """
    num_out, num_in, height, width = kernel.shape
    # Groups that hold the first tap of the first output, and the last tap of the second
    first = -pad // 4
    last = (2 + width - 1 - pad) // 4
    num_groups = last - first + 1
    wide = np.zeros((2, num_out, 4, num_in, height, num_groups), dtype=np.float32)
    for output in range(2):
        for tap in range(width):
            group, pixel = divmod(2 * output + tap - pad, 4)
            wide[output, :, pixel, :, :, group - first] = kernel[..., tap]
    shape = (2 * num_out, 4 * num_in, height, num_groups)
    return wide.reshape(shape), -first, last


def _shape(graph: onnx.GraphProto, name: str) -> list[int]:
    """Four lengths, 0 where one is unknown."""
    for entry in (*graph.value_info, *graph.input):
        lengths = entry.type.tensor_type.shape.dim
        if entry.name == name and len(lengths) == 4:
            return [length.dim_value for length in lengths]
    return [0, 0, 0, 0]


def _is_norm(node: onnx.NodeProto, weights: dict[str, Array]) -> bool:
    """Whether it is a BatchNormalization with stored statistics."""
    return node.op_type == NORM and weights.keys() >= set(node.input[1:])


def _scale_and_shift(
    norm: onnx.NodeProto, weights: dict[str, Array]
) -> tuple[Array, Array]:
    """Factor and summand of a BatchNormalization, per channel, in float64."""
    scale, shift, mean, variance = (
        weights[name].astype(np.float64) for name in norm.input[1:]
    )
    given = (entry.f for entry in norm.attribute if entry.name == "epsilon")
    factor = scale / np.sqrt(variance + next(given, _EPSILON))
    return factor, shift - mean * factor


def _add_weights(
    graph: onnx.GraphProto, name: str, kernel: Array, bias: Array
) -> list[str]:
    """Names of a kernel and bias added to the graph in fp32."""
    return [
        _add(graph, f"{name}_folded_kernel", kernel.astype(np.float32)),
        _add(graph, f"{name}_folded_bias", bias.astype(np.float32)),
    ]


def _add(graph: onnx.GraphProto, name: str, values: Array) -> str:
    graph.initializer.append(numpy_helper.from_array(values, name))
    return name


def _weights(graph: onnx.GraphProto) -> dict[str, Array]:
    """Stored tensors by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def _drop_unread_weights(graph: onnx.GraphProto) -> None:
    """Frees names: onnxruntime's quantizer calls the scale of a tensor what BatchNormalization calls its own."""
    read = _readers(graph)
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _readers(graph: onnx.GraphProto) -> dict[str, list[Any]]:
    """What reads a tensor, by its name: nodes, and the graph itself its outputs."""
    found: dict[str, list[Any]] = {entry.name: [entry] for entry in graph.output}
    for node in graph.node:
        for name in dict.fromkeys(filter(None, node.input)):
            found.setdefault(name, []).append(node)
    return found
