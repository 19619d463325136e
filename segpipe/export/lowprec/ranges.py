"""The range that 8 bits have to cover in every activation, from real frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from segpipe.errors import ExportError

Range = tuple[float, float]
BINS = 2048
STEPS = 255  # of an 8-bit scale
_CUT = np.linspace(1.0, 0.2, 33)  # shares of the largest value at which to cut


@dataclass(frozen=True)
class Histogram:
    """Counts of one activation's values in equal bins from `low` to `high`, which include 0."""

    low: float
    high: float
    counts: NDArray[np.int64]

    @property
    def centers(self) -> NDArray[np.float64]:
        """Middle of every bin."""
        width = (self.high - self.low) / len(self.counts)
        return np.asarray(self.low + width * (np.arange(len(self.counts)) + 0.5), dtype=np.float64)


def minmax(found: Histogram) -> Range:
    """Everything that was seen."""
    return found.low, found.high


def least_squares(found: Histogram) -> Range:
    """The range with the least squared error: rounding within it (step**2 / 12), cutting beyond it."""
    best, least = minmax(found), np.inf
    for low in np.unique(found.low * _CUT):
        for high in np.unique(found.high * _CUT):
            step = (high - low) / STEPS
            beyond = found.centers - np.clip(found.centers, low, high)
            error = float((found.counts * (beyond**2 + step**2 / 12)).sum())
            if error < least:
                best, least = (float(low), float(high)), error
    return best


def activation_ranges(
    model: onnx.ModelProto,
    names: Sequence[str],
    images: Sequence[NDArray[np.uint8]],
    method: Callable[[Histogram], Range],
) -> dict[str, Range]:
    """Range of each tensor in `names` over all images, 0 included; `method` makes it from a histogram.

    Every image is run twice, for the extremes and for the histograms, on one thread. Raises ExportError for a tensor
    that is not finite.
    """
    run = observed(model, names)
    extremes = dict.fromkeys(names, (0.0, 0.0))
    for values in run(images):
        for name, value in values.items():
            low, high = float(value.min()), float(value.max())
            if not np.isfinite([low, high]).all():
                raise ExportError(
                    f"activation {name} reaches from {low} to {high} on a calibration frame; int8 needs finite ones."
                )
            extremes[name] = (min(extremes[name][0], low), max(extremes[name][1], high))
    counts = {name: np.zeros(BINS, np.int64) for name in names}
    for values in run(images):
        for name, value in values.items():
            if extremes[name] != (0.0, 0.0):
                counts[name] += np.histogram(value, BINS, extremes[name])[0]
    return {name: method(Histogram(*extremes[name], counts[name])) for name in names}


def observed(
    model: onnx.ModelProto, names: Sequence[str]
) -> Callable[[Sequence[NDArray[np.uint8]]], Iterator[dict[str, NDArray[np.float32]]]]:
    """The model as a function of images that yields the tensors in `names`, image by image, on one thread."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = one_thread_session(watched)

    def run(images: Sequence[NDArray[np.uint8]]) -> Iterator[dict[str, NDArray[np.float32]]]:
        for image in images:
            yield dict(zip(names, session.run(None, as_input(model, image)), strict=True))

    return run


def as_input(model: onnx.ModelProto, image: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """What to feed for an image (H, W, 3): as it is, or planar and float32 where the graph takes that."""
    entry = model.graph.input[0]
    if entry.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
        return {entry.name: image.transpose(2, 0, 1)[None].astype(np.float32)}
    return {entry.name: image[None]}


def one_thread_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """An onnxruntime session on one CPU thread, errors alone in its log."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
