"""The node: image in; mask, confidence, labels and diagnostics out. Imports ROS only when it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from segpipe_runtime import ArtifactError, Segmenter

from segpipe_ros.health import Health
from segpipe_ros.messages import answer, class_map, mono8

PARAMETERS = {
    "folder": "",  # exported folder, with SHA256SUMS
    "precision": "fp32",
    "engine": "onnxruntime",
    "threads": 1,
    "deadline_ms": 0.0,  # 0: none
    "max_age_s": 0.5,
    "frozen_after": 5,  # 0 for a simulator, which may repeat frames
    "silent_after_s": 1.0,
}


class SegmenterNode:
    """Publishers, subscription and timer of an rclpy node.

    Raises ArtifactError for a bad exported folder and ValueError for a bad parameter.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self._ros = _ros()
        given = {
            name: node.declare_parameter(name, default).value
            for name, default in PARAMETERS.items()
        }
        self._segmenter = Segmenter.load(
            Path(given["folder"]),
            precision=given["precision"],
            engine=given["engine"],
            threads=given["threads"],
            deadline_ms=given["deadline_ms"] or None,
            max_age_s=given["max_age_s"],
            frozen_after=given["frozen_after"],
            clock=self._now_s,
        )
        manifest = self._segmenter.artifact.manifest
        self._health = Health(
            self._segmenter.artifact.model_id, self._now_s(), given["silent_after_s"]
        )
        self._mask = node.create_publisher(self._ros.Image, "~/mask", 1)
        self._confidence = node.create_publisher(self._ros.Image, "~/confidence", 1)
        self._labels = node.create_publisher(
            self._ros.LabelInfo, "~/label_info", self._ros.latched
        )
        self._labels.publish(self._label_info(class_map(manifest)))
        self._diagnostics = node.create_publisher(
            self._ros.DiagnosticArray, "/diagnostics", 1
        )
        node.create_timer(1.0, self.diagnose)
        node.create_subscription(
            self._ros.Image, "image", self.segment, self._ros.newest
        )

    def segment(self, message: Any) -> None:
        """Publish the answer to an image, or 255 everywhere if there is none."""
        result, reason = answer(self._segmenter, message)
        self._health.note(result, reason, self._now_s())
        for publisher, values in (
            (self._mask, result.mask),
            (self._confidence, result.confidence),
        ):
            publisher.publish(self._ros.Image(header=message.header, **mono8(values)))

    def diagnose(self) -> None:
        """Publish the diagnostics since the last call."""
        found = self._health.report(self._now_s())
        status = self._ros.DiagnosticStatus(
            level=bytes([found.level]),
            name=f"{self._node.get_name()}: segmentation",
            message=found.message,
            values=[
                self._ros.KeyValue(key=key, value=value) for key, value in found.values
            ],
        )
        array = self._ros.DiagnosticArray(status=[status])
        array.header.stamp = self._node.get_clock().now().to_msg()
        self._diagnostics.publish(array)

    def _label_info(self, classes: list[tuple[int, str]]) -> Any:
        message = self._ros.LabelInfo(
            class_map=[
                self._ros.VisionClass(class_id=index, class_name=name)
                for index, name in classes
            ]
        )
        message.header.stamp = self._node.get_clock().now().to_msg()
        return message

    def _now_s(self) -> float:
        """Seconds of the node's clock, to compare stamps with; it follows /clock under use_sim_time."""
        return float(self._node.get_clock().now().nanoseconds * 1e-9)


def main() -> int:
    """Run the node. Exit code: 0 when the user ends it, else that of the error that prevented the start."""
    import rclpy
    from rclpy.executors import ExternalShutdownException

    rclpy.init()
    node = rclpy.create_node("segmenter")
    try:
        SegmenterNode(node)
        rclpy.spin(node)
    except (KeyboardInterrupt, ExternalShutdownException):
        return 0
    except (ArtifactError, ValueError) as error:
        node.get_logger().fatal(str(error))
        return getattr(error, "exit_code", 2)
    finally:
        node.destroy_node()
        rclpy.try_shutdown()
    return 0


def _ros() -> SimpleNamespace:
    """Message types, and the two QoS profiles that are not plain queues."""
    from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
    from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import Image
    from vision_msgs.msg import LabelInfo, VisionClass

    return SimpleNamespace(
        DiagnosticArray=DiagnosticArray,
        DiagnosticStatus=DiagnosticStatus,
        KeyValue=KeyValue,
        Image=Image,
        LabelInfo=LabelInfo,
        VisionClass=VisionClass,
        # A late subscriber still gets the labels.
        latched=QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL),
        # At most one frame waits: a new one is worth more than an old one.
        newest=QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT),
    )


if __name__ == "__main__":
    sys.exit(main())
