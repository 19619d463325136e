"""int8 ONNX files: static post-training quantisation in onnxruntime's QDQ form.

Weights are signed with a scale per output channel; each activation has one scale, calibrated on real frames.
Preprocessing, the convolution that makes the logits and all that follows stay in fp32: logits in eight bits would tie
classes, and that convolution is a hundredth of the work.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationMethod,
    QDQQuantizer,
    QuantType,
    TensorData,
    TensorsData,
)
from onnxruntime.quantization.calibrate import HistogramCollector

from segpipe.errors import ConfigError, ExportError
from segpipe.export.graph.onnx_format import open_session
from segpipe.export.graph.profiles import Image, answer_of
from segpipe.export.lowprec.rewrite import (
    CONV,
    before_convolutions,
    between_convolutions,
    gather_stem,
    widen_constants,
)

# Name: whether weights have 7 bits. Activations are unsigned: signed ones took as long as fp32 on a CPU with VNNI. A
# CPU with AVX2 only adds products in 16 bits, where 8-bit weights overflow: a small network kept 90 % of its mask
# there, and 99 % with weights of 7 bits.
SCHEMES = {"U8S8": False, "U8S7": True}

_BINS, _PERCENTILE = 2048, 99.99  # of each activation; docs/log.md compares others
# Between two convolutions these stay in int8, so that nothing is converted back and forth.
_ALONG = ("Relu", "Add", "Concat", "Resize", "SpaceToDepth")
# Number of inputs that are activations; others: all
_DATA_INPUTS = {CONV: 1, "Resize": 1}
_INFERRED = "onnx.infer"  # metadata key by which onnxruntime.quantization knows that types were inferred
_FRAMES = 8  # calibration frames on which the schemes are compared with fp32


def to_int8(
    source: Path, out: Path, images: Sequence[Image], *, scheme: str = ""
) -> str:
    """Name of the scheme in which `out`, the int8 form of the fp32 file `source`, was written.

    images: real frames uint8 (H, W, 3) RGB of the size of the graph. scheme: one of SCHEMES; "" keeps the one whose
    masks agree best with those of `source` on this machine. Inputs, outputs, opset and metadata are those of `source`;
    the same scheme gives the same bytes. Raises ConfigError without images, ExportError when an activation is not
    finite.
    """
    if not images:
        raise ConfigError(
            "int8 needs calibration frames, but there are none. Set data.root to the training images."
        )
    original = onnx.load(source)
    model = _prepared(original)
    nodes = _quantized_nodes(model.graph)
    ranges = activation_ranges(model, _activations(model.graph, nodes), images)
    made = {
        name: _quantized(model, original, nodes, ranges, SCHEMES[name])
        for name in ([scheme] if scheme else SCHEMES)
    }
    chosen = scheme
    if not scheme:
        agreement = _agreement(made, original, images[:_FRAMES])
        chosen = max(agreement, key=agreement.__getitem__)
    onnx.save(made[chosen], out)
    return chosen


def activation_ranges(
    model: onnx.ModelProto, names: Sequence[str], images: Sequence[Image]
) -> dict[str, tuple[float, float]]:
    """Bounds of each tensor in `names` over all images, by onnxruntime, without the outermost 0.01 % of its values.

    One frame at a time on one thread, so the result does not depend on the machine's cores, nor the memory on the
    number of frames. Raises ExportError for a tensor that is not finite.
    """
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_session(watched)
    collector = HistogramCollector(
        "percentile", False, _BINS, _BINS, _PERCENTILE, "same"
    )
    with contextlib.redirect_stdout(None):  # it prints
        for image in images:
            values = dict(
                zip(names, session.run(None, _feed(model, image)), strict=True)
            )
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
    """Names of the nodes that run in int8."""
    needed = before_convolutions(graph)
    weights = {tensor.name for tensor in graph.initializer}
    found = []
    for node, is_inside in zip(graph.node, between_convolutions(graph), strict=True):
        if node.op_type == CONV:
            makes_logits = needed.isdisjoint(node.output)
            fits = not makes_logits and all(name in weights for name in node.input[1:])
        else:
            fits = (
                is_inside and node.op_type in _ALONG and weights.isdisjoint(_data(node))
            )
        if fits:
            found.append(node.name)
    return found


def _prepared(original: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that computes the same in a form that quantises well, with names and types."""
    model = onnx.ModelProto()
    model.CopyFrom(original)
    model = _named(model)
    widen_constants(model.graph)
    if gather_stem(model.graph):
        model = _named(model)
    # Otherwise the quantizer would infer types again, through temporary files.
    onnx.helper.set_model_props(model, {_INFERRED: "onnxruntime.quant"})
    return model


def _named(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for every node and the type of every tensor."""
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def _activations(graph: onnx.GraphProto, nodes: Sequence[str]) -> list[str]:
    """Names of the tensors that need a scale."""
    wanted = set(nodes)
    names: dict[str, None] = {}
    for node in graph.node:
        if node.name in wanted:
            names |= dict.fromkeys((*_data(node), *node.output))
    return list(names)


def _data(node: onnx.NodeProto) -> list[str]:
    """The inputs that are activations."""
    return list(node.input[: _DATA_INPUTS.get(node.op_type)])


def _quantized(
    model: onnx.ModelProto,
    original: onnx.ModelProto,
    nodes: Sequence[str],
    ranges: dict[str, tuple[float, float]],
    is_reduced: bool,
) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    data = {
        name: TensorData(lowest=np.float32(low), highest=np.float32(high))
        for name, (low, high) in ranges.items()
    }
    with _silent_logging():
        quantizer = QDQQuantizer(
            copied,
            per_channel=True,
            reduce_range=is_reduced,
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
    result.metadata_props.extend(original.metadata_props)
    result.producer_name, result.producer_version = (
        original.producer_name,
        original.producer_version,
    )
    return result


def _agreement(
    made: dict[str, onnx.ModelProto], original: onnx.ModelProto, images: Sequence[Image]
) -> dict[str, float]:
    """Share of the pixels of all images whose class is that of `original`, by name."""
    expected = _masks(original, images)
    return {
        name: float((_masks(model, images) == expected).mean())
        for name, model in made.items()
    }


def _masks(model: onnx.ModelProto, images: Sequence[Image]) -> NDArray[Any]:
    session = open_session(model)
    names = [entry.name for entry in model.graph.output]
    found = []
    for image in images:
        outputs = session.run(None, _feed(model, image))
        found.append(answer_of(names, outputs).mask)
    return np.stack(found)


def _feed(model: onnx.ModelProto, image: Image) -> dict[str, NDArray[Any]]:
    return {model.graph.input[0].name: image[None]}


@contextlib.contextmanager
def _silent_logging() -> Iterator[None]:
    """The quantizer logs through the root logger, which would install a handler and print."""
    root = logging.getLogger()
    handlers, before = list(root.handlers), root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        root.handlers[:] = handlers
