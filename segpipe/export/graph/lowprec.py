"""Conversion of an ONNX file to fp16 and int8, with graph rewrites that keep the function but quantise well.

torch.onnx folds a BatchNorm into the convolution before it. One behind a ReLU stays in fp32: as a convolution it would
save ddrnet23_slim 7 % of its time and the other networks nothing.

Only the network leaves fp32: the part from the first to the last convolution. Preprocessing before it, and upsampling,
softmax and argmax after it stay: they are cheap, and their rounding errors go straight into the answer.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationMethod,
    QDQQuantizer,
    QuantType,
    TensorData,
    TensorsData,
)
from onnxruntime.quantization.calibrate import HistogramCollector
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.onnx_model import OnnxModel

from segpipe.errors import ConfigError, ExportError
from segpipe.export.graph.network import Array, Image
from segpipe.runtime.engines import make_session

CONV = "Conv"


def placed_nodes(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, bool]]:
    """Each node in topological order, and whether it is a convolution or lies on a path between two."""
    after, before = convolution_sides(graph)
    for node in graph.node:
        outside = after.isdisjoint(node.input) or before.isdisjoint(node.output)
        yield node, node.op_type == CONV or not outside


def convolution_sides(graph: onnx.GraphProto) -> tuple[set[str], set[str]]:
    """Names of the tensors that depend on a convolution, and of those that a convolution depends on."""
    after: set[str] = set()
    before: set[str] = set()
    for node in graph.node:
        if node.op_type == CONV or not after.isdisjoint(node.input):
            after.update(filter(None, node.output))
    for node in reversed(graph.node):
        if node.op_type == CONV or not before.isdisjoint(node.output):
            before.update(filter(None, node.input))
    return after, before


def _weights(graph: onnx.GraphProto) -> dict[str, Array]:
    """Stored tensors by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


_LARGEST = float(np.finfo(np.float16).max)


def to_fp16(source: Path, out: Path) -> None:
    """Writes `out`: the fp32 file `source` with the network in fp16.

    Inputs, outputs, opset and metadata stay the same. Raises ExportError for a weight beyond 65504, or without a
    convolution.
    """
    model = onnx.load(source)
    graph = model.graph

    # Cut the network out and convert it.
    inner = [node for node, is_inside in placed_nodes(graph) if is_inside]
    outer = [node for node, is_inside in placed_nodes(graph) if not is_inside]
    if not inner:
        raise ExportError(
            "the network has no convolution, so all of it would stay in fp32. Leave fp16 out of export.precision."
        )
    read = {name for node in outer for name in node.input}
    half = _in_half(_cut_out(model, inner, read))

    # Put it back between what comes before it and what comes after it.
    kept = [weight for weight in graph.initializer if weight.name in read]
    result = onnx.GraphProto(
        name=graph.name,
        node=[*outer, *half.node],
        initializer=[*kept, *half.initializer],
        input=graph.input,
        output=graph.output,
    )
    graph.CopyFrom(result)
    OnnxModel(model).topological_sort()
    onnx.save(model, out)


def _cut_out(
    model: onnx.ModelProto, inner: list[onnx.NodeProto], read: set[str]
) -> onnx.ModelProto:
    """The nodes `inner` as a separate model; `read`: names of the tensors that the other nodes read."""
    weights = _weights(model.graph).keys()
    needed = {name for node in inner for name in node.input if name}
    made = {name for node in inner for name in node.output}
    outputs = {entry.name for entry in model.graph.output}

    # The extractor needs the inferred types of inputs and outputs.
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    network: onnx.ModelProto = onnx.utils.Extractor(typed).extract_model(
        sorted(needed - made - weights), sorted(made & (read | outputs))
    )
    return network


def _in_half(network: onnx.ModelProto) -> onnx.GraphProto:
    """The graph in fp16, with fp32 inputs and outputs. Raises ExportError for a weight that fp16 cannot hold."""
    for name, values in _weights(network.graph).items():
        largest = float(np.abs(values).max(initial=0.0))
        if values.dtype == np.float32 and largest > _LARGEST:
            # The converter would clip it.
            raise ExportError(
                f"weight {name} reaches {largest:g}, but the largest fp16 value is {_LARGEST:g}. Leave fp16 out of "
                "export.precision, or train with weight decay."
            )
    half = OnnxModel(
        convert_float_to_float16(network, keep_io_types=True, op_block_list=[])
    )
    half.topological_sort()  # the converter appends its casts at the end
    # A constant that the rest of the graph reads too, such as 1, stays in fp32 there.
    half.add_prefix_to_names("half_")
    graph: onnx.GraphProto = half.model.graph
    return graph


# Of each activation; docs/log.md compares alternatives
_BINS, _PERCENTILE = 2048, 99.99
_FEW = 16  # channels
# These stay in int8 between two convolutions, to avoid conversions back and forth.
_ALONG = ("Relu", "Add", "Concat", "Resize")
# Number of inputs that are activations; all for other operators
_DATA_INPUTS = {CONV: 1, "Resize": 1}
_INFERRED = "onnx.infer"  # metadata key that tells onnxruntime.quantization that types were inferred


def to_int8(source: Path, out: Path, images: Sequence[Image]) -> None:
    """Writes `out`, the int8 form of the fp32 file `source`.

    images: real frames uint8 (H, W, 3) RGB of the graph's input size. Inputs, outputs and opset stay the same; the same
    images give the same bytes. Raises ConfigError without images, ExportError when an activation is not finite or
    nothing can be int8.
    """
    if not images:
        raise ConfigError(
            "int8 needs calibration frames of the exported size, but there are none. Set data.root to training "
            "images, and export.height and export.width to their size."
        )
    model = _named(onnx.load(source))
    nodes = _quantized_nodes(model.graph)
    if not nodes:
        raise ExportError(
            "no convolution comes before the one that makes the logits, so all of the network would stay in fp32. "
            "Leave int8 out of export.precision."
        )
    need_scale = (
        name
        for node in model.graph.node
        if node.name in nodes
        for name in (*_data(node), *node.output)
    )
    ranges = activation_ranges(model, list(dict.fromkeys(need_scale)), images)
    onnx.save(_quantized(model, nodes, ranges), out)


def activation_ranges(
    model: onnx.ModelProto, names: Sequence[str], images: Sequence[Image]
) -> dict[str, tuple[float, float]]:
    """Bounds of each tensor in `names` over all images in onnxruntime, without the outermost 0.01 % of its values.

    Runs one frame at a time on one thread, so the result does not depend on the number of cores, and memory does not
    grow with the number of frames. Raises ExportError for a tensor that is not finite.
    """
    watched = copy.deepcopy(model)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = make_session(watched.SerializeToString())
    collector = HistogramCollector(
        "percentile", False, _BINS, _BINS, _PERCENTILE, "same"
    )
    with contextlib.redirect_stdout(None):  # it prints
        for image in images:
            outputs = session.run(None, {model.graph.input[0].name: image[None]})
            values = dict(zip(names, outputs, strict=True))
            for name, value in values.items():
                if not np.isfinite(value).all():
                    raise ExportError(
                        f"activation {name} is NaN or infinite on a calibration frame; int8 needs finite ones. Leave "
                        "int8 out of export.precision."
                    )
            collector.collect(values)
        found = collector.compute_collection_result()
    return {
        name: (min(float(low), 0.0), max(float(high), 0.0))
        for name, (low, high, *_) in found.items()
    }


def _quantized_nodes(graph: onnx.GraphProto) -> list[str]:
    """Names of the nodes that run in int8.

    The first layers, up to one that reads more than 16 channels, stay in fp32: int8 makes them hardly faster, and all
    later layers read what is rounded there. With them in int8, efficientvit_seg_b0 kept 93 % of the mask at dusk
    instead of 99 % and took 15 % longer. If no layer reads more, all are int8.
    """
    _, needed = convolution_sides(graph)
    weights = _weights(graph).keys()
    narrow = {
        entry.name
        for entry in (*graph.value_info, *graph.output)
        for channels in entry.type.tensor_type.shape.dim[1:2]
        if 1 <= channels.dim_value <= _FEW
    }
    late: set[str] = set()  # tensors that depend on a wider layer
    found: tuple[list[str], list[str]] = [], []  # early, late
    for node, is_inside in placed_nodes(graph):
        is_late = not late.isdisjoint(node.input)
        if node.op_type == CONV:
            is_late |= node.input[0] not in narrow
            makes_logits = needed.isdisjoint(node.output)
            fits = not makes_logits and weights >= set(node.input[1:])
        else:
            along = is_inside and node.op_type in _ALONG
            fits = along and weights.isdisjoint(_data(node))
        if is_late:
            late.update(node.output)
        if fits:
            found[is_late].append(node.name)
    return found[1] or found[0]


def _named(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for every node and the type of every tensor."""
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def _data(node: onnx.NodeProto) -> list[str]:
    """Inputs of the node that are activations."""
    return list(node.input[: _DATA_INPUTS.get(node.op_type)])


def _quantized(
    model: onnx.ModelProto, nodes: Sequence[str], ranges: dict[str, tuple[float, float]]
) -> onnx.ModelProto:
    """The model with these nodes in int8, without metadata. Modifies `model`."""
    # Otherwise the quantizer infers types again, through temporary files.
    helper.set_model_props(model, {_INFERRED: "onnxruntime.quant"})
    data = {
        name: TensorData(lowest=np.float32(low), highest=np.float32(high))
        for name, (low, high) in ranges.items()
    }
    with _silent_logging():
        quantizer = QDQQuantizer(
            model,
            per_channel=True,
            # 7 bits: a CPU with only AVX2 adds products in 16 bits, where 8-bit weights overflow: a small network kept
            # 90 % of its mask. On other CPUs 7 bits cost fast_scnn 0.1 % of the pixels.
            reduce_range=True,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=TensorsData(CalibrationMethod.MinMax, data),
            nodes_to_quantize=list(nodes),
            nodes_to_exclude=[],
            op_types_to_quantize=[CONV, *_ALONG],
            extra_options={},
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
    result: onnx.ModelProto = quantizer.model.model
    del result.graph.value_info[:], result.metadata_props[:]
    return result


@contextlib.contextmanager
def _silent_logging() -> Iterator[None]:
    """Silences the quantizer, which logs through the root logger; that would install a handler and print."""
    root = logging.getLogger()
    handlers, before = list(root.handlers), root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        root.handlers[:] = handlers
