"""Files for people and other programs, rendered from the manifest by the templates in templates/."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from segpipe import __version__
from segpipe.export.artifact.outcome import caveat
from segpipe.export.graph.profiles import Manifest
from segpipe.runtime.artifact import MANIFEST, SUMS


def sidecars(manifest: Manifest) -> dict[str, str]:
    """Text by file name: model_card.md, ros/labels.yaml, for an ONNX file that for Triton, with profile isaac one more.

    Free of time stamps and latencies, so equal exports have equal files. Sources: vision_msgs 4, msg/LabelInfo.msg;
    isaac_ros_image_proc, isaac_ros_tensor_proc and isaac_ros_tensor_rt of Isaac ROS 3.2 (from their documentation, not
    run); triton-inference-server/common, protobuf/model_config.proto.
    """
    names = ["model_card.md", "ros/labels.yaml"]
    if "model.onnx" in manifest["files"]:
        names.append("triton/config.pbtxt")
        # Its nodes run TensorRT, which has uint8 at the edge of a network only; the other profiles transpose bytes.
        if manifest["profile"] == "isaac":
            names.append("ros/isaac_params.yaml")
    note = caveat(manifest["status"], manifest["real_images"])
    return {
        name: render(Path(name).name, {**manifest, "caveat": note}) for name in names
    }


def unlisted(manifest: Manifest, folder: Path) -> list[str]:
    """One finding for each file below `folder` that no export writes for this manifest."""
    known = {
        MANIFEST,
        SUMS,
        "verify_report.json",
        "verify_report.md",
        *manifest["files"],
        *sidecars(manifest),
    }
    there = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    }
    arrays = {
        name for name in there if name.startswith("golden/") and name.endswith(".npy")
    }
    return [
        f"{name} is no file that {MANIFEST} tells of"
        for name in sorted(there - known - arrays)
    ]


def write_sidecars(manifest: Manifest, folder: Path) -> None:
    """Writes the files of `sidecars` below `folder`."""
    for name, text in sidecars(manifest).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def sidecar_problems(manifest: Manifest, folder: Path) -> list[str]:
    """One finding for each file below `folder` that differs in any byte from what the manifest renders to."""
    return [
        f"{name} is not what segpipe {__version__} writes for {MANIFEST}"
        for name, text in sidecars(manifest).items()
        if not (folder / name).is_file()
        or (folder / name).read_bytes() != text.encode()
    ]


def render(name: str, values: dict[str, Any]) -> str:
    """Text of the template `name`. Raises UndefinedError for a missing value."""
    return _environment().get_template(f"{name}.j2").render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, YAML and protobuf text
    )
    environment.filters |= {
        "percent": _percent,
        "dims": _dims,
        "json": lambda value: json.dumps(value, ensure_ascii=False),
    }
    return environment


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _dims(shape: Sequence[int | str]) -> list[int]:
    return [axis if isinstance(axis, int) else -1 for axis in shape]  # -1: any length
