"""The ROS 2 node: its logic without ROS, and the node itself against stand-ins for the modules of ROS."""

from __future__ import annotations

import ast
import sys
import xml.etree.ElementTree as ElementTree
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from artifacts import SIZE, answer, frame, write_artifact

import segpipe.runtime
from segpipe.runtime import Result, Segmenter, Status

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).resolve().parents[2] / "examples" / "ros2" / "segpipe_ros"
NOW = 1000.0


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PACKAGE))
        patch.setitem(
            sys.modules, "segpipe_runtime", segpipe.runtime
        )  # the name in the wheel for robots
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("toy") / "export")


@pytest.fixture(scope="module")
def segmenter(folder: Path) -> Segmenter:
    return Segmenter.load(folder, clock=lambda: NOW, frozen_after=0)


# Fields of the messages in ROS 2 Humble and Jazzy, recorded from their definitions; vision_msgs of version 4.
RECORDED = {
    "Time": {"sec": "int32", "nanosec": "uint32"},
    "Header": {"stamp": "Time", "frame_id": "string"},
    "Image": {
        "header": "Header", "height": "uint32", "width": "uint32", "encoding": "string", "is_bigendian": "uint8",
        "step": "uint32", "data": "uint8[]",
    },
    "KeyValue": {"key": "string", "value": "string"},
    "DiagnosticStatus": {
        "level": "byte", "name": "string", "message": "string", "hardware_id": "string", "values": "KeyValue[]",
    },
    "DiagnosticArray": {"header": "Header", "status": "DiagnosticStatus[]"},
    "VisionClass": {"class_id": "uint16", "class_name": "string"},
    "LabelInfo": {"header": "Header", "class_map": "VisionClass[]", "threshold": "float32"},
}  # fmt: skip
WHOLE = {
    "int32": (-(2**31), 2**31),
    "uint8": (0, 2**8),
    "uint16": (0, 2**16),
    "uint32": (0, 2**32),
}


class Message:
    """A message as rclpy makes it: fields by keyword, defaults for the rest, other names and types refused."""

    def __init__(self, **fields: Any) -> None:
        kinds = RECORDED[type(self).__name__]
        assert fields.keys() <= kinds.keys(), (
            f"{type(self).__name__} has no {fields.keys() - kinds.keys()}"
        )
        for name, kind in kinds.items():
            setattr(self, name, fields[name] if name in fields else default(kind))

    def __setattr__(self, name: str, value: Any) -> None:
        kind = RECORDED[type(self).__name__][name]
        assert fits(kind, value), (
            f"{type(self).__name__}.{name} is {kind}, but {value!r:.60} was given"
        )
        super().__setattr__(name, value)


KINDS = {name: type(name, (Message,), {}) for name in RECORDED}


def default(kind: str) -> Any:
    if kind in KINDS:
        return KINDS[kind]()
    simple = {"string": "", "byte": b"\0", "float32": 0.0, "uint8[]": array("B")}
    return simple[kind] if kind in simple else [] if kind.endswith("[]") else 0


def fits(kind: str, value: Any) -> bool:
    if kind == "uint8[]":
        return isinstance(value, array) and value.typecode == "B"
    if kind.endswith("[]"):
        return isinstance(value, list) and all(
            fits(kind[:-2], entry) for entry in value
        )
    if kind in WHOLE:
        return isinstance(value, int) and WHOLE[kind][0] <= value < WHOLE[kind][1]
    if kind == "byte":
        return isinstance(value, bytes) and len(value) == 1
    simple: dict[str, type] = {"string": str, "float32": float}
    return isinstance(value, simple.get(kind) or KINDS[kind])


def test_recorded_messages_refuse_what_rclpy_refuses() -> None:
    image = KINDS["Image"]
    for wrong in (
        {"heigth": 3},
        {"height": -1},
        {"data": [1, 2]},
        {"step": 2.0},
        {"header": "now"},
        {"encoding": 8},
    ):
        with pytest.raises(AssertionError, match="Image"):
            image(**wrong)
    assert image(height=3, data=array("B", b"123")).encoding == ""


def message(image: np.ndarray, *, padding: int = 0, **fields: Any) -> SimpleNamespace:
    """sensor_msgs/Image of `image` with `padding` bytes of noise after each row; of any types, as drivers send them."""
    height, width = image.shape[:2]
    rows = np.hstack(
        [image.reshape(height, -1), np.full((height, padding), 99, np.uint8)]
    )
    entries = {
        "header": KINDS["Header"](
            stamp=KINDS["Time"](sec=int(NOW), nanosec=250_000_000), frame_id="camera"
        ),
        "height": height,
        "width": width,
        "encoding": "rgb8",
        "is_bigendian": 0,
        "step": rows.shape[1],
        "data": array("B", rows.tobytes()),
    }
    return SimpleNamespace(**{**entries, **fields})


# Frames


@pytest.mark.parametrize("padding", [0, 1, 16])
@pytest.mark.parametrize("encoding", ["rgb8", "bgr8"])
def test_pixels_are_read_as_they_were_sent(padding: int, encoding: str) -> None:
    from segpipe_ros.messages import read_frame

    image = frame(3)
    sent = image if encoding == "rgb8" else image[..., ::-1].copy()
    found = read_frame(message(sent, padding=padding, encoding=encoding))
    assert (found.status, found.reason) == (Status.OK, "")
    assert found.image is not None
    assert np.array_equal(found.image, image)
    other = "bgr8" if encoding == "rgb8" else "rgb8"
    assert not np.array_equal(read_frame(message(sent, encoding=other)).image, image), (
        "the control: order of colors"
    )


BYTES = frame(3).tobytes()
REFUSED: dict[str, tuple[dict[str, Any], Status, str]] = {
    "16 bit": ({"encoding": "rgb16"}, Status.BAD_DTYPE, "encoding = 'rgb16'"),
    "16 bit of one channel": ({"encoding": "16UC1"}, Status.BAD_DTYPE, "16UC1"),
    "mono": ({"encoding": "mono8"}, Status.BAD_DTYPE, "mono8"),
    "no order of colors": ({"encoding": "8UC3"}, Status.BAD_DTYPE, "8UC3"),
    "alpha": ({"encoding": "rgba8"}, Status.BAD_DTYPE, "rgba8"),
    "bayer": ({"encoding": "bayer_rggb8"}, Status.BAD_DTYPE, "bayer"),
    "compressed": ({"encoding": "jpeg"}, Status.BAD_DTYPE, "jpeg"),
    "no encoding": ({"encoding": ""}, Status.BAD_DTYPE, "encoding = ''"),
    "big-endian": ({"is_bigendian": 1}, Status.BAD_DTYPE, "is_bigendian"),
    "data of text": ({"data": "pixels"}, Status.BAD_DTYPE, "data is str"),
    "data of numbers": ({"data": list(BYTES)}, Status.BAD_DTYPE, "data is list"),
    "no data": ({"data": array("B")}, Status.BAD_SHAPE, "0 bytes"),
    "data too short": ({"data": BYTES[:-1]}, Status.BAD_SHAPE, "4607 bytes"),
    "data too long": ({"data": BYTES + b"x"}, Status.BAD_SHAPE, "4609 bytes"),
    "step too short": (
        {"step": 3 * SIZE[1] - 1, "data": BYTES[: -SIZE[0]]},
        Status.BAD_SHAPE,
        "step = 143",
    ),
    "no step": ({"step": 0}, Status.BAD_SHAPE, "step = 0"),
    "no rows": ({"height": 0, "data": b""}, Status.BAD_SHAPE, "0x48"),
    "no columns": ({"width": 0}, Status.BAD_SHAPE, "32x0"),
    "other size": (
        {"height": 16, "data": BYTES[: len(BYTES) // 2]},
        Status.BAD_SHAPE,
        "resize first",
    ),
    "rows for columns": (
        {"height": 48, "width": 32, "step": 96},
        Status.BAD_SHAPE,
        "48x32, but 32x48 was needed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_for_certain_is_refused(
    name: str, segmenter: Segmenter
) -> None:
    from segpipe_ros.messages import answer as answer_of

    fields, status, told = REFUSED[name]
    result, reason = answer_of(segmenter, message(frame(3), **fields))
    assert result.status is status
    assert result.mask.shape == SIZE
    assert (result.mask == 255).all()
    assert not result.confidence.any()
    assert told in reason
    result, reason = answer_of(segmenter, message(frame(3), padding=5))
    assert (result.status, reason) == (Status.OK, "")
    assert np.array_equal(result.mask, answer(frame(3))[0])


def test_every_status_but_ok_has_a_mask_of_no_answer(segmenter: Segmenter) -> None:
    from segpipe_ros.messages import answer as answer_of

    old = SimpleNamespace(stamp=SimpleNamespace(sec=int(NOW) - 1, nanosec=0))
    unset = SimpleNamespace(stamp=SimpleNamespace(sec=0, nanosec=0))
    for sent, status in (
        (message(np.zeros((*SIZE, 3), np.uint8)), Status.TOO_DARK),
        (message(np.full((*SIZE, 3), 255, np.uint8)), Status.SATURATED),
        (message(frame(3), header=old), Status.STALE),
        (message(frame(3), header=unset), Status.STALE),
        (message(frame(3, green=255)), Status.ERROR),
    ):
        result, reason = answer_of(segmenter, sent)
        assert result.status is status
        assert (result.mask == 255).all()
        assert bool(reason) == (status is Status.ERROR)


def test_seconds_of_a_stamp() -> None:
    from segpipe_ros.messages import to_seconds

    assert to_seconds(SimpleNamespace(sec=12, nanosec=500_000_000)) == 12.5
    late = to_seconds(SimpleNamespace(sec=1_800_000_000, nanosec=123_456_789))
    assert abs(late - 1_800_000_000.123456789) < 1e-6
    for wrong in (-1, 10**9):
        assert np.isnan(to_seconds(SimpleNamespace(sec=12, nanosec=wrong)))


def test_masks_as_messages() -> None:
    from segpipe_ros.messages import mono8

    mask = np.arange(12, dtype=np.uint8).reshape(3, 4)
    fields = mono8(mask[:, ::2])
    assert (fields["height"], fields["width"], fields["step"], fields["encoding"]) == (
        3,
        2,
        2,
        "mono8",
    )
    assert fields["is_bigendian"] == 0
    assert fields["data"] == array("B", [0, 2, 4, 6, 8, 10])


# Diagnostics


def result_of(status: Status, latency_ms: float = 5.0) -> Result:
    return Result(
        status, np.zeros(SIZE, np.uint8), np.zeros((8, 12), np.uint8), latency_ms, "toy"
    )


def test_every_status_has_a_level() -> None:
    from segpipe_ros.health import ERROR, LEVELS, OK, STALE, WARN

    assert LEVELS.keys() == set(Status)
    assert [status for status in Status if LEVELS[status] == OK] == [Status.OK]
    assert (OK, WARN, ERROR, STALE) == (0, 1, 2, 3), (
        "numbers of diagnostic_msgs/DiagnosticStatus"
    )


def test_diagnostics_tell_the_worst_since_the_last_report() -> None:
    from segpipe_ros.health import ERROR, OK, STALE, WARN, Health

    health = Health("toy-fp32", 0.0, silent_after_s=2.0)
    assert health.report(1.0)[:2] == (OK, "waiting for a frame")
    for latency_ms in (4.0, 6.0, 20.0):
        health.note(result_of(Status.OK, latency_ms), "", 1.5)
    level, told, values = health.report(2.0)
    assert (level, told) == (OK, "OK")
    assert dict(values) == {
        "model_id": "toy-fp32",
        **{str(status): "3" if status is Status.OK else "0" for status in Status},
        "p50_ms": "6.0",
        "max_ms": "20.0",
    }
    health.note(result_of(Status.TOO_DARK), "", 2.5)
    health.note(result_of(Status.OK), "", 2.6)
    assert health.report(3.0)[:2] == (WARN, "1 of 2 frames TOO_DARK")
    health.note(result_of(Status.BAD_DTYPE), "encoding = 'mono8'", 3.1)
    health.note(result_of(Status.TOO_DARK), "", 3.2)
    assert health.report(4.0)[:2] == (
        ERROR,
        "1 of 2 frames BAD_DTYPE (BAD_DTYPE: encoding = 'mono8')",
    )
    assert health.report(4.5)[:2] == (OK, "waiting for a frame")
    assert health.report(6.0)[:2] == (STALE, "no frame for 2.8 s")
    assert dict(health.report(6.0).values)["TOO_DARK"] == "2", "counts go on"
    assert health.report(-600.0).level == STALE, "after the clock was set back, too"


def test_results_that_wait_for_a_report_hold_no_masks() -> None:
    from segpipe_ros.health import Health

    health = Health("toy", 0.0)
    for _ in range(3):
        health.note(result_of(Status.OK), "", 1.0)
    assert (
        sum(result.mask.size + result.confidence.size for result in health._recent) == 0
    )


# The node


class Clock:
    """An rclpy clock that stands still."""

    nanoseconds = int(NOW * 1e9)

    def now(self) -> Clock:
        return self

    def to_msg(self) -> Any:
        return KINDS["Time"](sec=int(NOW))


class Node:
    """An rclpy node that remembers what was asked of it."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.sent: dict[str, list[Any]] = {}
        self.qualities: dict[str, Any] = {}
        self.told: list[str] = []
        self.ended = False

    def declare_parameter(self, name: str, default: Any) -> Any:
        return SimpleNamespace(value=self.given.get(name, default))

    def create_publisher(self, _kind: Any, topic: str, quality: Any) -> Any:
        self.qualities[topic] = quality
        return SimpleNamespace(publish=self.sent.setdefault(topic, []).append)

    def create_subscription(
        self, _kind: Any, topic: str, callback: Any, quality: Any
    ) -> None:
        self.qualities[topic] = quality
        self.receive = callback

    def create_timer(self, seconds: float, callback: Any) -> None:
        assert seconds == 1.0
        self.tick = callback

    def get_clock(self) -> Clock:
        return Clock()

    def get_name(self) -> str:
        return "segmenter"

    def get_logger(self) -> Any:
        return SimpleNamespace(fatal=self.told.append)

    def destroy_node(self) -> None:
        self.ended = True


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def ros(node: Node, spin: Any) -> dict[str, ModuleType]:
    """Stand-ins for the modules that the node imports."""

    class ExternalShutdownException(Exception):
        pass

    quality = {
        "QoSProfile": lambda **fields: fields,
        "DurabilityPolicy": SimpleNamespace(TRANSIENT_LOCAL="latched"),
        "ReliabilityPolicy": SimpleNamespace(BEST_EFFORT="best effort"),
    }
    executors = module(
        "rclpy.executors", ExternalShutdownException=ExternalShutdownException
    )
    rclpy = module(
        "rclpy",
        init=lambda: None,
        create_node=lambda _name: node,
        spin=spin,
        try_shutdown=lambda: None,
        executors=executors,
    )
    kinds = {
        "diagnostic_msgs": ("DiagnosticArray", "DiagnosticStatus", "KeyValue"),
        "sensor_msgs": ("Image",),
        "vision_msgs": ("LabelInfo", "VisionClass"),
    }
    found = {
        "rclpy": rclpy,
        "rclpy.executors": executors,
        "rclpy.qos": module("rclpy.qos", **quality),
    }
    for name, members in kinds.items():
        found[name] = module(name)
        found[f"{name}.msg"] = module(
            f"{name}.msg", **{member: KINDS[member] for member in members}
        )
    return found


def start(monkeypatch: pytest.MonkeyPatch, node: Node, spin: Any) -> int:
    from segpipe_ros.node import main

    for name, made in ros(node, spin).items():
        monkeypatch.setitem(sys.modules, name, made)
    return main()


def test_the_node_answers_and_tells_how_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node({"folder": str(folder), "deadline_ms": 60_000.0})

    def spin(_node: Node) -> None:
        node.receive(message(frame(3), encoding="rgb8"))
        node.receive(message(frame(3), encoding="mono8"))
        node.tick()
        raise KeyboardInterrupt

    assert start(monkeypatch, node, spin) == 0
    assert node.ended
    masks, confidences = node.sent["~/mask"], node.sent["~/confidence"]
    assert np.array_equal(
        np.frombuffer(masks[0].data, np.uint8).reshape(SIZE), answer(frame(3))[0]
    )
    assert np.array_equal(
        np.frombuffer(confidences[0].data, np.uint8).reshape(8, 12), answer(frame(3))[1]
    )
    assert masks[0].header.frame_id == "camera"
    assert set(masks[1].data) == {255}
    assert set(confidences[1].data) == {0}
    labels = node.sent["~/label_info"][0].class_map
    assert [(entry.class_id, entry.class_name) for entry in labels] == [
        (0, "low"),
        (1, "high"),
        (255, "no_answer"),
    ]
    assert node.qualities["~/label_info"] == {"depth": 1, "durability": "latched"}
    assert node.qualities["image"] == {"depth": 1, "reliability": "best effort"}
    (status,) = node.sent["/diagnostics"][0].status
    assert status.level == b"\x02"
    assert status.message.startswith(
        "1 of 2 frames BAD_DTYPE (BAD_DTYPE: encoding = 'mono8'"
    )
    assert {entry.key: entry.value for entry in status.values}["OK"] == "1"


def test_the_node_does_not_start_with_an_altered_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered = write_artifact(tmp_path / "export")
    (altered / "model.onnx").write_bytes(b"")
    for given, code in (
        ({"folder": str(altered)}, 7),
        ({"folder": str(tmp_path)}, 2),
        ({"folder": str(folder), "threads": 0}, 2),
    ):
        node = Node(given)
        assert start(monkeypatch, node, lambda _node: pytest.fail("it started")) == code
        assert len(node.told) == 1
        assert node.ended
        assert "~/mask" not in node.sent


def test_ros_is_imported_only_inside() -> None:
    """Nothing at the top of a file needs ROS; the launch file is ROS's own."""
    for path in (PACKAGE / "segpipe_ros").glob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            names = (
                [alias.name for alias in statement.names]
                if isinstance(statement, ast.Import)
                else []
            )
            names += (
                [str(statement.module)] if isinstance(statement, ast.ImportFrom) else []
            )
            for name in names:
                root = name.partition(".")[0]
                allowed = {
                    "numpy",
                    "segpipe_ros",
                    "segpipe_runtime",
                    *sys.stdlib_module_names,
                }
                assert root in allowed, f"{path.name}: {name}"


def test_the_package_lists_what_it_imports() -> None:
    listed = {
        entry.text
        for entry in ElementTree.parse(PACKAGE / "package.xml")
        .getroot()
        .iter("exec_depend")
    }
    for path in [
        *(PACKAGE / "segpipe_ros").glob("*.py"),
        *(PACKAGE / "launch").glob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                root = str(node.module).partition(".")[0]
                if root in {"rclpy", "launch_ros"} or root.endswith("_msgs"):
                    assert root in listed, f"{path.name} imports {root}"
    assert len(listed) > 4
    assert (PACKAGE / "resource" / PACKAGE.name).exists()
