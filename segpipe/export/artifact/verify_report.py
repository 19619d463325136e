"""The verification report: verify_report.json and .md, the terminal table, and pictures of the worst images."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from segpipe.export.artifact.outcome import EAGER, REJECTED, ExportReport, caveat
from segpipe.export.artifact.sidecars import render
from segpipe.export.gates.limits import FP32
from segpipe.runtime.bench import processor

if TYPE_CHECKING:
    from segpipe.export.gates.comparison import ImageComparison
    from segpipe.export.graph.profiles import Image

MARKDOWN = "verify_report.md"
JSON = "verify_report.json"
CLEARLY = 0.9  # a file is faster only if it takes at most this share of another's time
_WORST = 3
_MARK = (255, 0, 255)


def to_mapping(report: ExportReport, created: str) -> dict[str, Any]:
    """All figures as plain values; of two equal exports, only `created` and `latency` differ."""
    return {
        "status": report.status,
        "created": created,
        "check_images": report.images,
        "real_images": report.real_images,
        "sigma": {
            name: value if np.isfinite(value) else None
            for name, value in asdict(report.sigma).items()
        },
        "gates": {
            name: {
                gate.name: {
                    "passed": gate.passed,
                    "message": gate.message,
                    **gate.figures,
                }
                for gate in gates
            }
            for name, gates in report.gates.items()
        },
        "files": report.files,
        "latency": {
            "device": "cpu",
            "processor": processor(),
            "threads": 1,
            "files": report.latency,
        },
    }


def write(report: ExportReport, folder: Path, created: str) -> None:
    """Writes verify_report.json and verify_report.md into `folder`."""
    (folder / JSON).write_text(
        json.dumps(to_mapping(report, created), indent=1, allow_nan=False) + "\n"
    )
    is_rejected = report.status == REJECTED
    tried = [
        f"{axis} {', '.join(map(str, entry['tried']))}"
        for axis, entry in report.free.items()
    ]
    values = {
        "model": report.manifest["model"],
        "weights": report.manifest["source"]["weights_digest"],
        "status": report.status,
        "caveat": "no model file was published"
        if is_rejected
        else caveat(report.status, report.real_images),
        "num_images": len(report.images),
        "shapes": f" Run with {' and '.join(tried)}, in this order." if tried else "",
        "created": created,
        "warnings": report.manifest.get("warnings", []),
        "rows": _rows(report),
        "latency": report.latency,
        "preference": preference(report.latency, report.files)
        if report.latency and not is_rejected
        else "",
    }
    (folder / MARKDOWN).write_text(render(MARKDOWN, values))


def preference(
    measured: Mapping[str, Mapping[str, float]], files: Mapping[str, Mapping[str, Any]]
) -> str:
    """Recommends a file and says why, and names the fastest file of lower precision.

    measured: as `latency.measure` returns it, with the reference; files: `files` of the manifest.
    """
    p50_ms = {name: found["p50_ms"] for name, found in measured.items()}
    fp32 = [name for name, file in files.items() if file["precision"] == "fp32"]
    best, why = (
        min(fp32, key=lambda name: p50_ms[name]),
        "it is clearly the fastest fp32 file",
    )
    for name in fp32:
        if files[name]["format"] == "onnx" and p50_ms[best] > CLEARLY * p50_ms[name]:
            best, why = (
                name,
                "the gates compared tensors inside this very graph, and no fp32 file is clearly faster",
            )
    text = f"Prefer {best}: {why}; {p50_ms[EAGER] / p50_ms[best]:.2f} times as fast as eager."
    lower = [
        name
        for name in files
        if name not in fp32 and p50_ms[name] <= CLEARLY * p50_ms[best]
    ]
    if lower:
        name = min(lower, key=lambda name: p50_ms[name])
        text += f" {name} takes {p50_ms[name] / p50_ms[best]:.2f} of its time, within the wider limits of its gates."
    return text


def table(report: ExportReport) -> Table:
    """Gates, sizes and latencies for the terminal."""
    shown = Table(
        "file",
        "gate",
        "verdict",
        "finding",
        title=f"Export in {report.folder}: {report.status}",
    )
    for row in _rows(report):
        shown.add_row(*row)
    for name, found in report.latency.items():
        size = (
            f", {report.files[name]['bytes'] / 2**20:.1f} MiB"
            if name in report.files
            else ""
        )
        shown.add_row(
            name, "latency", "", f"{found['p50_ms']:.1f} ms, 1 CPU thread{size}"
        )
    return shown


def write_triptychs(
    report: ExportReport,
    folder: Path,
    comparisons: list[ImageComparison],
    images: dict[str, Image],
) -> None:
    """Writes a PNG of each of the three worst images: image | reference mask | exported mask, differences marked."""

    def badness(entry: ImageComparison) -> tuple[float, ...]:
        unexplained = entry.unexplained(report.sigma, FP32.margin_sigma or 0.0)
        return unexplained, entry.margins.size, entry.relative(report.sigma)

    palette = np.array(
        [entry["color"] for entry in report.manifest["classes"]], dtype=np.uint8
    )
    for rank, entry in enumerate(
        sorted(comparisons, key=badness, reverse=True)[:_WORST], start=1
    ):
        picture = triptych(images[entry.name], entry, palette)
        stem = "".join(
            letter if letter.isalnum() or letter in "-_." else "_"
            for letter in entry.name
        )
        cv2.imwrite(str(folder / f"worst_{rank}_{stem}.png"), picture[..., ::-1])


def triptych(image: Image, entry: ImageComparison, palette: NDArray[np.uint8]) -> Image:
    """uint8 (H, 3 W, 3) RGB; in the last third equal pixels are dark and differing ones magenta."""
    colors = np.zeros((256, 3), dtype=np.uint8)
    colors[: len(palette)] = palette
    exported = colors[np.clip(entry.mask, 0, 255)] // 3
    exported[entry.mask != entry.reference_mask] = _MARK
    return np.concatenate([image, colors[entry.reference_mask], exported], axis=1)


def _rows(report: ExportReport) -> list[tuple[str, str, str, str]]:
    return [
        (name, gate.name, "passed" if gate.passed else "FAILED", gate.message)
        for name, gates in report.gates.items()
        for gate in gates
    ]
