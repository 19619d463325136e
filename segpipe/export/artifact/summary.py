"""The verification report as JSON, Markdown, terminal table, and pictures of the worst images."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from segpipe.export.artifact.outcome import EAGER, REJECTED, ExportReport, caveat
from segpipe.export.gates import latency
from segpipe.export.gates.comparison import Comparison
from segpipe.export.gates.limits import FP32
from segpipe.export.graph.profiles import Image

MARKDOWN = "verify_report.md"
JSON = "verify_report.json"
_WORST = 3
_MARK = (255, 0, 255)


def to_mapping(report: ExportReport, created: str) -> dict[str, Any]:
    """Everything that was measured, as plain values; only `created` and `latency` change from time to time."""
    return {
        "status": report.status,
        "created": created,
        "check_images": report.images,
        "real_images": report.real_images,
        "sigma": {name: value if np.isfinite(value) else None for name, value in asdict(report.sigma).items()},
        "gates": {
            name: {gate.name: {"passed": gate.passed, "message": gate.message, **gate.figures} for gate in gates}
            for name, gates in report.gates.items()
        },
        "files": report.files,
        "latency": latency.entry(report.latency),
    }


def write(report: ExportReport, folder: Path, created: str) -> None:
    """Writes verify_report.json and verify_report.md into `folder`."""
    (folder / JSON).write_text(json.dumps(to_mapping(report, created), indent=1, allow_nan=False) + "\n")
    rows = [f"| {' | '.join(row)} |" for row in _rows(report)]
    head = ["| file | gate | verdict | finding |", "|---|---|---|---|"]
    few = "no model file was published" if report.status == REJECTED else caveat(report.status, report.real_images)
    status = report.status + (f", {few}" if few else "")
    model = f"{report.manifest['model']}, weights {report.manifest['source']['weights_digest']}"
    count = f"{len(report.images)} check images, the made ones included.{_shapes(report)}"
    text = [f"# Export of {model}: {status}", "", count, f"Created {created}.", "", *head, *rows, *_latencies(report)]
    (folder / MARKDOWN).write_text("\n".join(text) + "\n")


def _latencies(report: ExportReport) -> list[str]:
    """The last section: files side by side, and which to prefer; nothing where none was timed."""
    if not report.latency:
        return []
    eager_ms = report.latency[EAGER]["p50_ms"]
    rows = [
        f"| {name} | {found['p50_ms']:.1f} | {found['p90_ms']:.1f} | {found['p99_ms']:.1f} | "
        f"{eager_ms / found['p50_ms']:.2f} |"
        for name, found in report.latency.items()
    ]
    head = ["| file | p50, ms | p90, ms | p99, ms | times eager |", "|---|---|---|---|---|"]
    told = [latency.preference(report.latency, report.files)] if report.passed else []
    return ["", "## Latency", "", "On one CPU thread of this machine, in turns.", *told, "", *head, *rows]


def table(report: ExportReport) -> Table:
    """Gates, sizes and latencies for the terminal."""
    shown = Table("file", "gate", "verdict", "finding", title=f"Export in {report.folder}: {report.status}")
    for row in _rows(report):
        shown.add_row(*row)
    for name, found in report.latency.items():
        size = f", {report.files[name]['bytes'] / 2**20:.1f} MiB" if name in report.files else ""
        shown.add_row(name, "latency", "", f"{found['p50_ms']:.1f} ms, 1 CPU thread{size}")
    return shown


def write_triptychs(
    report: ExportReport, folder: Path, comparisons: list[Comparison], images: dict[str, Image]
) -> None:
    """Writes a PNG of each of the worst three images: image | reference mask | exported mask, differences marked."""

    def badness(entry: Comparison) -> tuple[float, ...]:
        return (
            entry.unexplained(report.sigma, FP32.margin_sigma or 0.0),
            entry.margins.size,
            entry.relative(report.sigma),
        )

    palette = np.array([entry["color"] for entry in report.manifest["classes"]], dtype=np.uint8)
    for rank, entry in enumerate(sorted(comparisons, key=badness, reverse=True)[:_WORST], start=1):
        picture = triptych(images[entry.name], entry, palette)
        stem = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in entry.name)
        cv2.imwrite(str(folder / f"worst_{rank}_{stem}.png"), picture[..., ::-1])


def triptych(image: Image, entry: Comparison, palette: NDArray[np.uint8]) -> Image:
    """uint8 (H, 3 W, 3) RGB; in the last third equal pixels are dark and differing ones magenta."""
    colors = np.zeros((256, 3), dtype=np.uint8)
    colors[: len(palette)] = palette
    exported = colors[np.clip(entry.mask, 0, 255)] // 3
    exported[entry.mask != entry.reference_mask] = _MARK
    return np.concatenate([image, colors[entry.reference_mask], exported], axis=1)


def _shapes(report: ExportReport) -> str:
    """Sentence about the shapes in which files were run, where lengths are free."""
    tried = [f"{axis} {', '.join(map(str, entry['tried']))}" for axis, entry in report.free.items()]
    return f" Run with {' and '.join(tried)}, in this order." if tried else ""


def _rows(report: ExportReport) -> list[tuple[str, str, str, str]]:
    return [
        (name, gate.name, "passed" if gate.passed else "FAILED", gate.message)
        for name, gates in report.gates.items()
        for gate in gates
    ]
