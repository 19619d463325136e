"""What people read: verification report, model card, labels for ROS, terminal table, pictures of the worst images."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from numpy.typing import NDArray
from rich.table import Table

from segpipe.export.gates.limits import FP32
from segpipe.export.gates.outcome import EAGER, REJECTED, ExportReport, caveat
from segpipe.export.graph.profiles import Manifest
from segpipe.runtime.bench import processor

if TYPE_CHECKING:
    from segpipe.export.gates.comparison import ImageComparison
    from segpipe.export.graph.profiles import Image

# Names of the files
MARKDOWN = "verify_report.md"
JSON = "verify_report.json"
SIDECARS = ("model_card.md", "ros/labels.yaml")
CLEARLY = 0.9  # a file is faster only if it takes at most this share of another's time
_WORST = 3  # images of which pictures are written
_MARK = (255, 0, 255)  # of differing pixels


def sidecars(manifest: Manifest) -> dict[str, str]:
    """Text of the model card and of ros/labels.yaml, which depend on the manifest alone.

    Free of time stamps and latencies, so equal exports have equal files. Source: vision_msgs 4, msg/LabelInfo.msg.
    """
    note = caveat(manifest["status"], manifest["real_images"])
    values = {**manifest, "caveat": note}
    return {name: render(Path(name).name, values) for name in SIDECARS}


def write_sidecars(manifest: Manifest, folder: Path) -> None:
    """Writes the files of `sidecars` below `folder`."""
    for name, text in sidecars(manifest).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def sidecar_problems(manifest: Manifest, folder: Path) -> Iterator[str]:
    """One finding for each file below `folder` that is not what the manifest renders to."""
    for name, text in sidecars(manifest).items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            yield f"{name} is not what segpipe writes for manifest.json"


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
        autoescape=False,  # Markdown and YAML
    )
    environment.filters["percent"] = _percent
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


def to_mapping(report: ExportReport, created: str) -> dict[str, Any]:
    """All figures as plain values; of two equal exports, only `created` and `latency` differ."""
    # By file and gate
    gates = {
        name: {
            gate.name: {"passed": gate.passed, "message": gate.message, **gate.figures}
            for gate in results
        }
        for name, results in report.gates.items()
    }
    # JSON has no NaN, which it is before the gates.
    sigma = {
        name: value if np.isfinite(value) else None
        for name, value in asdict(report.sigma).items()
    }
    dropped = {"dropped": report.dropped} if report.dropped else {}
    return {
        "status": report.status,
        "created": created,
        "check_images": report.images,
        "real_images": report.real_images,
        "sigma": sigma,
        "gates": gates,
        "files": report.files,
        **dropped,
        "latency": {
            "device": "cpu",
            "processor": processor(),
            "threads": 1,
            "files": report.latency,
        },
    }


def write(report: ExportReport, folder: Path, created: str) -> None:
    """Writes verify_report.json and verify_report.md into `folder`."""
    text = json.dumps(to_mapping(report, created), indent=1, allow_nan=False)
    (folder / JSON).write_text(text + "\n")

    note = caveat(report.status, report.real_images)
    advice = ""
    if report.status == REJECTED:
        note = "no model file was published"
    elif report.latency:
        advice = preference(report.latency, report.files)

    tried = [
        f"{axis} {', '.join(map(str, entry['tried']))}"
        for axis, entry in report.free.items()
    ]
    shapes = f" Run with {' and '.join(tried)}, in this order." if tried else ""
    values = {
        "model": report.manifest["model"],
        "weights": report.manifest["source"]["ema_digest"],
        "status": report.status,
        "caveat": note,
        "num_images": len(report.images),
        "shapes": shapes,
        "created": created,
        "warnings": report.manifest.get("warnings", []),
        "rows": _rows(report),
        "latency": report.latency,
        "preference": advice,
    }
    (folder / MARKDOWN).write_text(render(MARKDOWN, values))


def preference(
    measured: Mapping[str, Mapping[str, float]], files: Mapping[str, Mapping[str, Any]]
) -> str:
    """Recommends a file and says why, and names the fastest file of lower precision.

    measured: as `latency.measure` returns it, with the reference; files: `files` of the manifest.
    """
    p50_ms = {name: figures["p50_ms"] for name, figures in measured.items()}
    fp32 = [name for name in files if files[name]["precision"] == "fp32"]
    best = min(fp32, key=p50_ms.__getitem__)
    why = "it is clearly the fastest fp32 file"
    for name in fp32:
        if files[name]["format"] == "onnx" and p50_ms[best] > CLEARLY * p50_ms[name]:
            best = name
            why = "the gates compared tensors inside this very graph, and no fp32 file is clearly faster"

    gain = p50_ms[EAGER] / p50_ms[best]
    text = f"Prefer {best}: {why}; {gain:.2f} times as fast as eager."

    # The fastest of fp16 and int8, if one is clearly faster
    lower = min(files.keys() - set(fp32), key=p50_ms.__getitem__, default=best)
    share = p50_ms[lower] / p50_ms[best]
    if share <= CLEARLY:
        text += f" {lower} takes {share:.2f} of its time, within the wider limits of its gates."
    return text


def table(report: ExportReport) -> Table:
    """Gates, sizes and latencies for the terminal."""
    title = f"Export in {report.folder}: {report.status}"
    shown = Table("file", "gate", "verdict", "finding", title=title)
    for row in _rows(report):
        shown.add_row(*row)
    for name, figures in report.latency.items():
        finding = f"{figures['p50_ms']:.1f} ms, 1 CPU thread"
        if name in report.files:
            finding += f", {report.files[name]['bytes'] / 2**20:.1f} MiB"
        shown.add_row(name, "latency", "", finding)
    return shown


def write_triptychs(
    report: ExportReport,
    folder: Path,
    comparisons: list[ImageComparison],
    images: dict[str, Image],
) -> None:
    """Writes a PNG of each of the three worst images: image | reference mask | exported mask, differences marked."""

    def badness(entry: ImageComparison) -> tuple[float, ...]:
        unexplained = entry.unexplained(report.sigma, FP32.margin_sigma)
        return unexplained, entry.margins.size, entry.relative(report.sigma)

    colors = [entry["color"] for entry in report.manifest["classes"]]
    worst = sorted(comparisons, key=badness, reverse=True)[:_WORST]
    for rank, entry in enumerate(worst, start=1):
        picture = triptych(images[entry.name], entry, np.array(colors, dtype=np.uint8))
        letters = (
            letter if letter.isalnum() or letter in "-_." else "_"
            for letter in entry.name
        )
        path = folder / f"worst_{rank}_{''.join(letters)}.png"
        cv2.imwrite(str(path), picture[..., ::-1])


def triptych(image: Image, entry: ImageComparison, palette: NDArray[np.uint8]) -> Image:
    """uint8 (H, 3 W, 3) RGB; in the last third equal pixels are dark and differing ones magenta."""
    colors = np.zeros((256, 3), dtype=np.uint8)
    colors[: len(palette)] = palette
    exported = colors[np.clip(entry.mask, 0, 255)] // 3
    exported[entry.mask != entry.reference_mask] = _MARK
    return np.concatenate([image, colors[entry.reference_mask], exported], axis=1)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _rows(report: ExportReport) -> Sequence[tuple[str, str, str, str]]:
    """File, gate, verdict and finding, for the report and the terminal."""
    rows = [
        (name, gate.name, "passed" if gate.passed else "FAILED", gate.message)
        for name, gates in report.gates.items()
        for gate in gates
    ]
    dropped = report.dropped.items()
    return rows + [(name, "", "not published", reason) for name, reason in dropped]
