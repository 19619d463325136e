"""Conversion between ROS messages and the runtime. Works on the fields of messages and needs no ROS."""

from __future__ import annotations

import math
from array import array
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from segpipe_runtime import NO_ANSWER, Result, Segmenter, Status

_ENCODINGS = {"rgb8": 1, "bgr8": -1}  # slice step over the channels that gives RGB


class Stamp(Protocol):
    """builtin_interfaces/msg/Time."""

    sec: int
    nanosec: int


class Header(Protocol):
    """std_msgs/msg/Header."""

    stamp: Stamp


class ImageMessage(Protocol):
    """sensor_msgs/msg/Image."""

    header: Header
    height: int
    width: int
    encoding: str
    is_bigendian: int
    step: int
    data: Any  # array.array in rclpy; here any object with the buffer protocol


class Frame(NamedTuple):
    """Image uint8 (H, W, 3) RGB, a view of the message; or None, with a status and a reason."""

    image: NDArray[np.uint8] | None
    status: Status
    reason: str


def read_frame(message: ImageMessage) -> Frame:
    """Pixels of an rgb8 or bgr8 image without row padding; refuses every other encoding.

    A misread frame looks like a bad network, so nothing is guessed: no bit depth, no Bayer pattern, no encoding without
    a color order such as 8UC3.
    """
    if message.encoding not in _ENCODINGS:
        return _refused(
            Status.BAD_DTYPE,
            f"encoding = {message.encoding!r}, but {' or '.join(_ENCODINGS)} was needed",
        )
    if message.is_bigendian:
        return _refused(
            Status.BAD_DTYPE,
            "is_bigendian is set, but single bytes have no byte order; set it to 0",
        )
    try:
        pixels = np.frombuffer(message.data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        return _refused(
            Status.BAD_DTYPE,
            f"data is {type(message.data).__name__}, but bytes were needed ({error})",
        )
    height, width, step = message.height, message.width, message.step
    if height < 1 or width < 1 or step < 3 * width or pixels.size != height * step:
        needed = f"step of {3 * width} or more and height * step bytes were needed"
        return _refused(
            Status.BAD_SHAPE,
            f"{height}x{width}, step = {step}, {pixels.size} bytes, but {needed}",
        )
    rows = pixels.reshape(height, step)[:, : 3 * width]
    return Frame(
        rows.reshape(height, width, 3)[..., :: _ENCODINGS[message.encoding]],
        Status.OK,
        "",
    )


def _refused(status: Status, reason: str) -> Frame:
    return Frame(None, status, reason)


def to_seconds(stamp: Stamp) -> float:
    """Time stamp in seconds; NaN for an invalid one, which makes the frame STALE."""
    return stamp.sec + stamp.nanosec * 1e-9 if 0 <= stamp.nanosec < 10**9 else math.nan


def answer(segmenter: Segmenter, message: ImageMessage) -> tuple[Result, str]:
    """Result for a message, and a reason for status BAD_DTYPE, BAD_SHAPE, ERROR; the mask is 255 unless that is OK."""
    frame = read_frame(message)
    if frame.image is None:
        return segmenter.refuse(frame.status), frame.reason
    result = segmenter.infer(frame.image, to_seconds(message.header.stamp))
    if result.status is Status.BAD_SHAPE:
        height, width, _ = segmenter.artifact.frame
        needed = f"{height}x{width}"
        return (
            result,
            f"{message.height}x{message.width}, but {needed} was needed: resize first",
        )
    return result, segmenter.last_error if result.status is Status.ERROR else ""


def mono8(values: NDArray[np.uint8]) -> dict[str, Any]:
    """Fields of a sensor_msgs/msg/Image for uint8 (H, W), without the header."""
    height, width = values.shape
    # rclpy copies an array at once, but checks a list byte by byte.
    data = array("B", values.tobytes())
    return {
        "height": height,
        "width": width,
        "encoding": "mono8",
        "is_bigendian": 0,
        "step": width,
        "data": data,
    }


def class_map(manifest: dict[str, Any]) -> list[tuple[int, str]]:
    """(class_id, class_name) for a vision_msgs/msg/LabelInfo, as in ros/labels.yaml of the export."""
    return [
        *((entry["id"], entry["name"]) for entry in manifest["classes"]),
        (NO_ANSWER, "no_answer"),
    ]
