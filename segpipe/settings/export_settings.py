"""What an export is asked for: the settings `export.*`, and the checks that concern them alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

ENOUGH_IMAGES = 16  # real ones that a file was compared on, for it to be called verified


@dataclass
class ExportConfig:
    enabled: bool = True  # export after training
    formats: list[str] = field(default_factory=lambda: ["onnx", "torchscript"])  # onnx | torchscript | pt2
    profile: str = "robot"  # robot | isaac | logits: what goes in and comes out; see docs/export.md
    precision: list[str] = field(default_factory=lambda: ["fp32"])  # fp32 | fp16 | int8: of the ONNX files
    dynamic: str = "none"  # none | batch | hw: lengths that a file leaves open; see docs/export.md
    images: int = ENOUGH_IMAGES  # validation images on which the gates compare
    quality_images: int = 100  # validation images on which mIoU is compared, and the temperature fitted
    critical_classes: list[str] = field(default_factory=list)  # whose IoU an int8 file may not lower by 2 points
    latency_budget_ms: float = 0.0  # that a file may take per image on one CPU thread of this machine; 0: any
    allow_unverified: bool = False  # publish without the data set, marked UNVERIFIED_REAL_DATA
    height: int = 0  # of the images, where there is no data set to tell; 0: that of the validation images
    width: int = 0
    dir: str = ""  # folder of the exported files; empty means <run folder>/export


# None of them reaches the training.
EXPORT_KEYS = tuple(f"export.{entry.name}" for entry in fields(ExportConfig))


def export_choices(export: ExportConfig) -> list[tuple[str, str, tuple[str, ...]]]:
    """Name, value and valid values of each setting that names one of several things."""
    return [
        ("export.profile", export.profile, ("robot", "isaac", "logits")),
        ("export.dynamic", export.dynamic, ("none", "batch", "hw")),
        *(("export.formats", name, ("onnx", "torchscript", "pt2")) for name in export.formats),
        *(("export.precision", name, ("fp32", "fp16", "int8")) for name in export.precision),
    ]


def export_ranges(export: ExportConfig) -> list[tuple[str, float, float, float]]:
    """Name, value, smallest and largest value of each setting that is a number."""
    return [
        ("export.images", export.images, 1, math.inf),
        ("export.quality_images", export.quality_images, 1, math.inf),
        ("export.latency_budget_ms", export.latency_budget_ms, 0, math.inf),
        ("export.height", export.height, 0, 65536),
        ("export.width", export.width, 0, 65536),
    ]


def export_problems(export: ExportConfig) -> list[str]:
    """Sentences about settings that contradict each other."""
    found = [
        f"{name} = {given} names one twice; each may be given once."
        for name, given in (("export.formats", export.formats), ("export.precision", export.precision))
        if len(set(given)) < len(given)
    ]
    if "fp32" not in export.precision:
        found.append(f"export.precision = {export.precision} lacks fp32, from which the others are made. Add it.")
    reduced = [name for name in export.precision if name != "fp32"]
    if reduced and "onnx" not in export.formats:
        found.append(
            f"export.precision = {export.precision}, but only ONNX files come in {reduced[0]} and export.formats = "
            f"{export.formats}. Add onnx, or leave {reduced[0]} out."
        )
    if "int8" in reduced and export.profile == "isaac":
        found.append(
            "export.profile = isaac, but int8 is calibrated on a graph that takes bytes. Set export.profile=robot, or "
            "leave int8 out of export.precision: TensorRT makes its own."
        )
    if export.dynamic != "none":
        found += _dynamic_problems(export)
    if bool(export.height) != bool(export.width):
        found.append(
            f"export.height = {export.height} and export.width = {export.width}, but both were needed, or neither."
        )
    return found


def _dynamic_problems(export: ExportConfig) -> list[str]:
    wanted = f"export.dynamic = {export.dynamic}"
    found: list[str] = []
    if export.dynamic == "hw" and "torchscript" in export.formats:
        found.append(
            f"{wanted}, but export.formats = {export.formats} has torchscript, whose trace keeps the size of its "
            "example. Leave torchscript out."
        )
    if "int8" in export.precision:
        found.append(
            f"{wanted}, but int8 is arranged for the shape on which it was calibrated. Leave int8 out of "
            "export.precision, or set export.dynamic=none."
        )
    if export.profile == "isaac":
        found.append(
            f"{wanted}, but export.profile = isaac: the nodes of Isaac ROS take one shape. Set export.dynamic=none, or "
            "export.profile=robot."
        )
    return found
