"""Files beside the model that people and other programs read; they say what the manifest says, in their words."""

from __future__ import annotations

import json
from pathlib import Path

from segpipe import __version__
from segpipe.export.artifact.card import model_card
from segpipe.export.graph.convert import Manifest
from segpipe.runtime import NO_ANSWER
from segpipe.runtime.artifact import MANIFEST

_TRITON_TYPES = {"uint8": "TYPE_UINT8", "int32": "TYPE_INT32", "float32": "TYPE_FP32"}


def write_sidecars(manifest: Manifest, files: Path) -> None:
    """Writes the files of `sidecars`."""
    for name, text in sidecars(manifest).items():
        path = files / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def unlike_sidecars(manifest: Manifest, files: Path) -> list[str]:
    """What is wrong with those files below `files`: each is the manifest in other words, byte by byte."""
    return [
        f"{name} is not what segpipe {__version__} writes for {MANIFEST}"
        for name, text in sidecars(manifest).items()
        if not (files / name).is_file() or (files / name).read_bytes() != text.encode()
    ]


def sidecars(manifest: Manifest) -> dict[str, str]:
    """By name: model_card.md, ros/labels.yaml, and for an ONNX file ros/isaac_params.yaml and triton/config.pbtxt."""
    texts = {"model_card.md": model_card(manifest), "ros/labels.yaml": label_info(manifest)}
    if "model.onnx" in manifest["files"]:
        texts["triton/config.pbtxt"] = triton_config(manifest)
        # Nothing of Isaac ROS reads logits, and its nodes take one shape.
        if manifest["profile"] != "logits" and "free" not in manifest["io"]:
            texts["ros/isaac_params.yaml"] = isaac_params(manifest)
    return texts


def label_info(manifest: Manifest) -> str:
    """YAML of a vision_msgs/msg/LabelInfo, for `ros2 topic pub` or a latched publisher.

    Source: vision_msgs 4 (ROS 2), msg/LabelInfo.msg and msg/VisionClass.msg.
    """
    classes = [(entry["id"], entry["name"]) for entry in manifest["classes"]]
    lines = [
        # A JSON string is a YAML string.
        f"  - {{class_id: {index}, class_name: {json.dumps(name, ensure_ascii=False)}}}"
        for index, name in [*classes, (NO_ANSWER, "no_answer")]
    ]
    head = [
        "# vision_msgs/msg/LabelInfo: ros2 topic pub --once --qos-durability transient_local /label_info \\",
        '#   vision_msgs/msg/LabelInfo "$(cat labels.yaml)"',
        'header: {stamp: {sec: 0, nanosec: 0}, frame_id: ""}',
        "class_map:",
    ]
    return "\n".join([*head, *lines, "threshold: 0.0", ""])


def isaac_params(manifest: Manifest) -> str:
    """YAML of ROS 2 parameters for a graph of Isaac ROS nodes; written from their documentation, not run.

    Source: isaac_ros_image_proc, isaac_ros_tensor_proc and isaac_ros_tensor_rt of Isaac ROS 3.2.
    """
    image, outputs = manifest["io"]["inputs"][0], manifest["io"]["outputs"]
    is_planar = image["layout"] == "NCHW"
    height, width = image["shape"][2:] if is_planar else image["shape"][1:3]
    names = json.dumps([entry["name"] for entry in outputs])
    nodes: dict[str, list[str]] = {
        "resize_node": [
            f"output_width: {width}", f"output_height: {height}", "keep_aspect_ratio: false",
            'encoding_desired: "rgb8"',
        ],
        "image_to_tensor_node": ["scale: false", f'tensor_name: "{image["name"]}"'],
        **({"interleaved_to_planar_node": [f"input_tensor_shape: [{height}, {width}, 3]"]} if is_planar else {}),
        "reshape_node": [
            f'input_tensor_name: "{image["name"]}"', f'output_tensor_name: "{image["name"]}"',
            f"input_tensor_shape: {json.dumps(image['shape'][1:])}",
            f"output_tensor_shape: {json.dumps(image['shape'])}",
        ],
        "tensor_rt_node": [
            'model_file_path: "model.onnx"', 'engine_file_path: "model.plan"',
            f'input_tensor_names: ["{image["name"]}"]', f'input_binding_names: ["{image["name"]}"]',
            f"output_tensor_names: {names}", f"output_binding_names: {names}", "force_engine_update: false",
        ],
    }  # fmt: skip
    lines = [
        "# Not run on Isaac ROS: compare the first answers with golden/ before you trust them.",
        f"# The graph takes {image['dtype']} {image['layout']} {image['color_order']} of exactly {height}x{width} and "
        "normalises inside: no mean, no std, no scale outside.",
    ]
    if is_planar:
        lines.append("# Levels stay 0 to 255 on the way to float32: a node that divides by 255 would be a fault.")
    for node, parameters in nodes.items():
        lines += [f"{node}:", "  ros__parameters:", *(f"    {parameter}" for parameter in parameters)]
    return "\n".join([*lines, ""])


def triton_config(manifest: Manifest) -> str:
    """Model configuration for Triton's onnxruntime backend; put model.onnx into NAME/1/ beside it.

    Source: triton-inference-server/common, protobuf/model_config.proto.
    """
    lines = [
        f'name: "{manifest["model"]}"',
        'backend: "onnxruntime"',
        'default_model_filename: "model.onnx"',
        "max_batch_size: 0  # the shapes below are whole",
    ]
    for kind in ("input", "output"):
        tensors = []
        for entry in manifest["io"][f"{kind}s"]:
            dims = [axis if isinstance(axis, int) else -1 for axis in entry["shape"]]  # -1: of any length
            tensors.append(f'  {{ name: "{entry["name"]}" data_type: {_TRITON_TYPES[entry["dtype"]]} dims: {dims} }}')
        lines += [f"{kind} [", ",\n".join(tensors), "]"]
    lines += ["instance_group [ { kind: KIND_AUTO count: 1 } ]", ""]
    return "\n".join(lines)
