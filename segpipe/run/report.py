"""runs/NAME/report.html: the results of a run on one page, which needs no network, no server and no script.

Everything is inside the file, and a content security policy in its head forbids the browser to load anything else, so
the page can be mailed or archived as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from segpipe.files import write_atomically
from segpipe.run.pictures import blend, curve_svg, jpeg_url, shrink
from segpipe.settings.config import Config, to_mapping

_PANEL_WIDTH = 480  # pixels of an overlay; 24 of them stay below 2 MB
_NUMBERED_CLASSES = 20  # with more classes, a cell of the confusion matrix is too small for its number


@dataclass(frozen=True)
class Overlay:
    """One validation image with its target and prediction."""

    name: str
    miou: float
    image: NDArray[np.uint8]  # (H, W, 3) RGB
    target: NDArray[np.uint8]  # (H, W), 255 ignored
    pred: NDArray[np.uint8]  # (H, W)


@dataclass(frozen=True)
class ReportData:
    """Input of the page. The fields with defaults may be missing."""

    config: Mapping[str, Any]  # nested, as in config.json
    result: Mapping[str, Any]  # as in result.json, and `device`
    confusion: NDArray[np.int64]  # (C, C), rows target, columns prediction
    names: Sequence[str]
    palette: Sequence[tuple[int, int, int]]
    history: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    best: Sequence[Overlay] = ()
    worst: Sequence[Overlay] = ()


def pick_extremes(per_image: Sequence[tuple[int, float]], count: int = 4) -> tuple[list[int], list[int]]:
    """Indices of the best and of the worst images, most extreme first; none is in both lists.

    `per_image` holds (index, mIoU). NaN (nothing labelled) is left out; ties go by index.
    """
    scored = [(index, score) for index, score in per_image if not math.isnan(score)]
    falling = [index for index, _ in sorted(scored, key=lambda pair: (-pair[1], pair[0]))]
    rising = [index for index, _ in sorted(scored, key=lambda pair: (pair[1], pair[0]))]
    best = falling[: min(count, (len(scored) + 1) // 2)]
    return best, [index for index in rising if index not in best][:count]


def write_report(run_dir: Path, data: ReportData) -> Path:
    """Path of the written RUN_DIR/report.html. Raises CheckpointError when the disk is full."""
    path = run_dir / "report.html"
    write_atomically(path, render(data).encode())
    return path


def render(data: ReportData) -> str:
    """The page. The template escapes all text; the same data gives the same bytes."""
    from segpipe.train.metrics import iou_per_class, summary  # torch

    figures = summary(data.confusion, data.names)
    default, settings = _flat(to_mapping(Config())), _flat(data.config)
    result, versions = dict(data.result), _flat(data.result.get("versions", {}))
    result.pop("versions", None)
    return _template().render(
        name=str(data.config.get("run", {}).get("name", "run")),
        about=_about(data.config),
        miou=figures["miou"],
        present=len(data.names) - len(figures["absent"]),
        tiles=_tiles(figures["pixel_accuracy"], data.result),
        curves=_curves(data.history),
        classes=_classes(data, iou_per_class(data.confusion)),
        confusion=_confusion(data),
        numbered=len(data.names) <= _NUMBERED_CLASSES,
        best=[_panels(overlay, data.palette) for overlay in data.best],
        worst=[_panels(overlay, data.palette) for overlay in data.worst],
        settings=settings,
        changed={key: default.get(key) for key, value in settings.items() if default.get(key) != value},
        records={"Result": _flat(result), "Versions": versions},
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": _percent, "text": _text}
    return environment.get_template("report.html.j2")


def _about(config: Mapping[str, Any]) -> list[str]:
    model, data = (config.get(group, {}).get("name", "") for group in ("model", "data"))
    parts = [str(model), f"on {data}" if data else "", f"seed {config['seed']}" if "seed" in config else ""]
    return [part for part in parts if part]


_TILES = (
    ("steps", "steps", "{:,}".format),
    ("train_seconds", "training", lambda seconds: _duration(seconds)),
    ("images_per_second", "images / s", "{:,.1f}".format),
    ("device", "device", str),
    ("world_size", "processes", str),
)


def _tiles(pixel_accuracy: float, result: Mapping[str, Any]) -> list[tuple[str, str]]:
    tiles = [("pixel accuracy", f"{_percent(pixel_accuracy)} %")]
    for key, label, form in _TILES:
        value = result.get(key)
        if isinstance(value, str):
            tiles.append((label, value))
        elif isinstance(value, int | float) and math.isfinite(value):
            tiles.append((label, form(value)))
    return tiles


def _percent(value: float | None, digits: int = 1) -> str:
    return "n/a" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}"


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes} min" if hours < 2 else f"{hours:.1f} h"


def _curves(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    curves = []
    for kind, key, title in (
        ("train", "loss", "Loss"),
        ("train", "lr", "Learning rate"),
        ("validation", "miou", "Validation mIoU, %"),
    ):
        scale = 100 if key == "miou" else 1
        lines = [line for line in history if line.get("kind") == kind and isinstance(line.get(key), int | float)]
        points = [(line["step"], scale * line[key]) for line in lines if math.isfinite(line[key])]
        if points:
            best, last = max(y for _, y in points), points[-1][1]
            svg = Markup(curve_svg(points, label=f"{title} over steps", dots=key == "miou"))
            caption = f"best {best:.3g}" if key == "miou" else f"last {last:.3g}"
            curves.append({"title": title, "caption": caption, "svg": svg})
    return curves


def _classes(data: ReportData, iou: Sequence[float | None]) -> list[dict[str, Any]]:
    """Rows of the class table: falling IoU, then the classes without one."""
    counts = np.asarray(data.confusion)
    shares, predicted = counts.sum(axis=1) / max(int(counts.sum()), 1), counts.sum(axis=0)
    rows = [
        {
            "id": k,
            "name": name,
            "color": f"rgb{tuple(int(part) for part in data.palette[k])}",
            "iou": iou[k],
            "share": float(shares[k]),
            "predicted": int(predicted[k]),
        }
        for k, name in enumerate(data.names)
    ]
    return sorted(rows, key=lambda row: (row["iou"] is None, -(row["iou"] or 0.0)))


def _confusion(data: ReportData) -> list[dict[str, Any]]:
    """Rows of the confusion matrix, each normalized by its number of target pixels."""
    counts = np.asarray(data.confusion, np.float64)
    rates = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return [
        {"id": k, "name": name, "present": bool(counts[k].any()), "rates": rates[k].tolist()}
        for k, name in enumerate(data.names)
    ]


def _panels(overlay: Overlay, palette: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    image = shrink(overlay.image, _PANEL_WIDTH, smooth=True)
    target, pred = (shrink(ids, _PANEL_WIDTH, smooth=False) for ids in (overlay.target, overlay.pred))
    panels = (("image", image), ("target", blend(image, target, palette)), ("prediction", blend(image, pred, palette)))
    return {
        "name": overlay.name,
        "miou": overlay.miou,
        "panels": [(kind, jpeg_url(picture)) for kind, picture in panels],
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with keys such as `optim.lr`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "n/a"
    return "none" if value in ("", None) else str(value)
