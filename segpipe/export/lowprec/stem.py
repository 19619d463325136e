"""The first convolution on four pixels at a time: the same sums in a shape that int8 kernels are made for.

onnxruntime's fast int8 convolution wants channels in fours, and an image has three. Four pixels side by side are
twelve, and with the channels last no byte has to move for it: (1, H, W, 3) is (1, H, W / 4, 12).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from segpipe.export.lowprec.region import CONV, consumers

_PIXELS, _OUTPUTS = 4, 2  # that a convolution of stride 2 takes and gives at a time
_TO_LAST, _TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def widen_stem(model: onnx.ModelProto) -> bool:
    """Whether the first convolution was widened; `model` has inferred shapes and is changed.

    It is when it reads three channels with a stride of 2 along a width that four divides, and only a ReLU reads it.
    """
    graph = model.graph
    conv = next((node for node in graph.node if node.op_type == CONV), None)
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    if conv is None or not all(name in weights for name in conv.input[1:]):
        return False
    after = consumers(graph).get(conv.output[0], [])
    if [node.op_type for node in after] != ["Relu"] or conv.output[0] in {entry.name for entry in graph.output}:
        return False
    settings = {entry.name: list(entry.ints) for entry in conv.attribute}
    strides, pads = settings.get("strides", [1, 1]), settings.get("pads", [0] * 4)
    (_, channels, height, width), (_, num_out, low_height, low_width) = (
        _shape(graph, name) for name in (conv.input[0], conv.output[0])
    )
    if channels != 3 or height * width == 0 or width % _PIXELS or strides[1] != _OUTPUTS:
        return False
    if 2 * low_width > width or not _is_plain(conv) or weights[conv.input[1]].shape[1] != channels:
        return False
    kernel, left, right = _wide_kernel(weights[conv.input[1]], pads[1])
    made = _Chain(graph)
    inputs = [made.turned(conv.input[0], [1, height, width // _PIXELS, 3 * _PIXELS]), made.weight(kernel)]
    inputs += [made.weight(np.tile(weights[name], _OUTPUTS)) for name in conv.input[2:]]
    x = made.add(CONV, inputs, strides=[strides[0], 1], pads=[pads[0], left, pads[2], right])
    made.turned(made.add("Relu", [x]), [1, low_height, width // _OUTPUTS, num_out], cut=low_width)
    made.nodes[-1].output[0] = after[0].output[0]
    made.put_in_place_of(conv, after[0])
    return True


def _is_plain(conv: onnx.NodeProto) -> bool:
    """Whether the convolution has no dilation and says its padding in numbers."""
    settings = {entry.name: entry for entry in conv.attribute}
    dilated = "dilations" in settings and set(settings["dilations"].ints) != {1}
    return not dilated and ("auto_pad" not in settings or settings["auto_pad"].s == b"NOTSET")


def _shape(graph: onnx.GraphProto, name: str) -> list[int]:
    """Four sizes, 0 where one is not known."""
    for entry in (*graph.value_info, *graph.input):
        if entry.name == name and len(entry.type.tensor_type.shape.dim) == 4:
            return [size.dim_value for size in entry.type.tensor_type.shape.dim]
    return [0, 0, 0, 0]


def _wide_kernel(kernel: NDArray[np.float32], pad: int) -> tuple[NDArray[np.float32], int, int]:
    """Kernel (2 M, 12, h, w) that gives two outputs side by side from groups of four pixels, and its padding in groups.

    Output o of a pair takes, with its tap t, the pixel 2 o + t - pad, counted from the first of the group.
    """
    num_out, num_in, height, width = kernel.shape
    first, last = -pad // _PIXELS, (_OUTPUTS * (_OUTPUTS - 1) + width - 1 - pad) // _PIXELS
    wide = np.zeros((_OUTPUTS, num_out, _PIXELS, num_in, height, last - first + 1), dtype=np.float32)
    for output in range(_OUTPUTS):
        for tap in range(width):
            group, pixel = divmod(_OUTPUTS * output + tap - pad, _PIXELS)
            wide[output, :, pixel, :, :, group - first] = kernel[..., tap]
    shape = (_OUTPUTS * num_out, _PIXELS * num_in, height, last - first + 1)
    return wide.reshape(shape), -first, last


class _Chain:
    """Nodes one after the other, with the weights they need."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self.nodes: list[onnx.NodeProto] = []

    def weight(self, values: Any) -> str:
        """Name of a new weight; lists of whole numbers are int64."""
        name = f"stem_weight_{len(self._graph.initializer)}"
        self._graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(values), name))
        return name

    def turned(self, x: str, shape: list[int], cut: int = 0) -> str:
        """`x` (1, C, H, W) in the given shape, read with the channels last; `cut` columns of it, or 0 for all."""
        last = self.add("Transpose", [x], perm=_TO_LAST)
        last = self.add("Reshape", [last, self.weight(shape)])
        if cut and cut < shape[2]:
            last = self.add("Slice", [last, *map(self.weight, ([0], [cut], [2]))])
        return self.add("Transpose", [last], perm=_TO_FIRST)

    def add(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """Output of a new node."""
        output = f"stem_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, inputs, [output], name=f"{output}_node", **attributes))
        return output

    def put_in_place_of(self, conv: onnx.NodeProto, relu: onnx.NodeProto) -> None:
        """The nodes in place of two others."""
        kept = list(self._graph.node)
        place = kept.index(conv)
        kept[place : place + 1] = self.nodes
        kept.remove(relu)
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
        del self._graph.node[:]
        self._graph.node.extend(nodes)
