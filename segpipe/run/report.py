"""The results of a run or of an evaluation on one page, which needs no network, no server and no script.

Everything is inside the file, and a content security policy in its head forbids the browser to load anything else, so
the page can be mailed or archived as it is. torch is imported inside the functions, as in finish.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from segpipe.files import write_atomically
from segpipe.run.console import lowest_first, percent, percent_range
from segpipe.run.pictures import blend, curve_svg, errors, jpeg_url, shrink
from segpipe.settings.config import Config, to_mapping

if TYPE_CHECKING:
    import torch

    from segpipe.data.data_set import Samples
    from segpipe.train.validate import Validation

Predict = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
_PANEL_WIDTH = 480  # pixels of an overlay; 32 of them stay below 2 MB
_NEIGHBORS = (
    10  # places in its sequence within which an image looks much like another one
)
_NUMBERED_CLASSES = (
    20  # with more classes, a cell of the confusion matrix is too small for its number
)


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
    result: Mapping[str, Any]  # as in result.json or printed by evaluate, and `device`
    confusion: NDArray[np.int64]  # (C, C), rows target, columns prediction
    names: Sequence[str]
    palette: Sequence[tuple[int, int, int]]
    data_name: str = ""  # of the class table
    history: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    worst: Sequence[Overlay] = ()
    best: Sequence[Overlay] = ()


def predictor(
    answer: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> Predict:
    """A function from an image uint8 (H, W, 3) to its class ids uint8 (H, W).

    `answer` has it for images uint8 (1, H, W, 3) on `device`.
    """
    import torch

    def ids(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.asarray(
            answer(torch.from_numpy(image.copy())[None].to(device))[0].cpu().numpy(),
            np.uint8,
        )

    return ids


def page_data(
    config: Config,
    samples: Samples,
    found: Validation,
    result: dict[str, Any],
    predict: Predict,
    history: Sequence[Mapping[str, Any]] = (),
) -> ReportData:
    """Input of the report page; predicts the worst and the best images once more."""
    from segpipe.data.samples import sequences
    from segpipe.train.metrics import miou

    scores = {index: miou(counts) for index, counts in found.per_image.items()}

    def overlay(index: int) -> Overlay:
        image, target = samples.read(index)
        return Overlay(
            samples.name(index), scores[index], image, target, predict(image)
        )

    worst, best = pick_extremes(scores, sequences(samples, config.data.sequence))
    return ReportData(
        config=to_mapping(config),
        result=result,
        confusion=found.total.numpy(),
        names=samples.classes.names,
        palette=samples.classes.palette,
        data_name=samples.classes.name,
        history=history,
        worst=[overlay(index) for index in worst],
        best=[overlay(index) for index in best],
    )


def pick_extremes(
    scores: Mapping[int, float], sequence_of: Sequence[str], count: int = 4
) -> tuple[list[int], list[int]]:
    """Indices of the worst and of the best images, most extreme first; none is in both lists.

    Of neighbors in a sequence only the most extreme one is in a list. `scores` is the mIoU by index, in the order of
    the names. NaN (nothing labelled) is left out; ties go by index.
    """
    members: dict[str, list[int]] = {}
    for index in sorted(scores):
        members.setdefault(sequence_of[index], []).append(index)
    place = {
        index: (name, at)
        for name, found in members.items()
        for at, index in enumerate(found)
    }
    reach = {name: min(_NEIGHBORS, len(found) // 8) for name, found in members.items()}

    def spread(order: Sequence[int], most: int) -> list[int]:
        chosen: list[int] = []
        for index in order:
            name, at = place[index]
            if all(
                place[other][0] != name or abs(place[other][1] - at) > reach[name]
                for other in chosen
            ):
                chosen.append(index)
        return chosen[:most]

    known = [index for index in sorted(scores) if not math.isnan(scores[index])]
    worst = spread(
        sorted(known, key=lambda index: scores[index]),
        min(count, (len(known) + 1) // 2),
    )
    rest = [
        index
        for index in sorted(known, key=lambda index: -scores[index])
        if index not in worst
    ]
    return worst, spread(rest, count)


def write_report(path: Path, data: ReportData) -> Path:
    """`path`, at which the page is then. Raises CheckpointError when the disk is full."""
    write_atomically(path, render(data).encode())
    return path


def render(data: ReportData) -> str:
    """The page. The template escapes all text; the same data gives the same bytes."""
    from segpipe.train.metrics import rates, summary  # torch
    from segpipe.train.scores import flattering

    figures = {
        **data.result,
        **summary(data.confusion, data.names),
        **rates(data.confusion, data.names),
    }
    default, settings = _flat(to_mapping(Config())), _flat(data.config)
    versions, sequences = (
        _flat(data.result.get("versions", {})),
        data.result.get("sequences") or {},
    )
    result = {key: value for key, value in data.result.items() if key not in _IN_TABLES}
    return template("report.html.j2").render(
        name=str(data.config.get("run", {}).get("name", "run")),
        about=_about(data),
        miou=figures["miou"],
        present=len(data.names) - len(figures["absent"]),
        interval=percent_range((data.result.get("interval_95") or {}).get("miou")),
        tiles=_tiles(figures["pixel_accuracy"], data.result),
        curves=_curves(data.history),
        classes=_classes(data, figures),
        columns={key: title for key, title in _COLUMNS.items() if key in figures},
        sequences=lowest_first(sequences),
        note=data.result.get("note") or flattering(sequences),
        confusion=_confusion(data),
        numbered=len(data.names) <= _NUMBERED_CLASSES,
        best=[_panels(overlay, data.palette) for overlay in data.best],
        worst=[_panels(overlay, data.palette) for overlay in data.worst],
        settings=settings,
        changed={
            key: default.get(key)
            for key, value in settings.items()
            if default.get(key) != value
        },
        records={"Result": _flat(result), "Versions": versions},
    )


def template(name: str) -> jinja2.Template:
    """A page of this folder; it escapes all text, and has the filters `percent` and `text`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "text": _text}
    return environment.get_template(name)


def _about(data: ReportData) -> list[str]:
    config, images = data.config, data.result.get("images")
    settings = config.get("data", {})
    kind, held_out = settings.get("name", ""), settings.get("hold_out")
    split = data.result.get("split", settings.get("split", ""))
    name = (
        data.data_name if data.data_name in ("", kind) else f"{data.data_name} ({kind})"
    )
    parts = [
        str(config.get("model", {}).get("name", "")),
        f"data {name or kind}" if name or kind else "",
        f"sequence {held_out}, held out"
        if held_out
        else f"split {split}"
        if split
        else "",
        f"{images} images" if images else "",
        f"seed {config['seed']}" if "seed" in config else "",
    ]
    return [part for part in parts if part]


_IN_TABLES = (
    "versions",
    "iou",
    "precision",
    "recall",
    "f1",
    "boundary_iou",
    "sequences",
    "interval_95",
    "note",
)
_COLUMNS = {
    "boundary_iou": "boundary IoU, %",
    "precision": "precision, %",
    "recall": "recall, %",
}
_TILES = (
    ("steps", "steps", "{:,}".format),
    ("train_seconds", "training", lambda seconds: _duration(seconds)),
    ("images_per_second", "images / s", "{:,.1f}".format),
    ("device", "device", str),
    ("world_size", "processes", str),
)


def _tiles(pixel_accuracy: float, result: Mapping[str, Any]) -> list[tuple[str, str]]:
    tiles = [("pixel accuracy", f"{percent(pixel_accuracy)} %")]
    for key, label, form in _TILES:
        value = result.get(key)
        if isinstance(value, str):
            tiles.append((label, value))
        elif isinstance(value, int | float) and math.isfinite(value):
            tiles.append((label, form(value)))
    return tiles


def _duration(seconds: float) -> str:
    minutes, hours = round(seconds / 60), seconds / 3600
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{minutes} min"
        if hours < 2
        else f"{hours:.1f} h"
    )


def _curves(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    curves = []
    validations = [line["step"] for line in history if line.get("kind") == "validation"]
    for kind, key, title in (
        ("train", "loss", "Loss"),
        ("train", "lr", "Learning rate"),
        ("validation", "miou", "Validation mIoU, %"),
    ):
        scale = 100 if key == "miou" else 1
        lines = [
            line
            for line in history
            if line.get("kind") == kind and isinstance(line.get(key), int | float)
        ]
        points = [
            (line["step"], scale * line[key])
            for line in lines
            if math.isfinite(line[key])
        ]
        if points:
            best, last = max(y for _, y in points), points[-1][1]
            ticks = validations if kind == "train" else ()
            svg = Markup(
                curve_svg(
                    points, label=f"{title} over steps", dots=key == "miou", ticks=ticks
                )
            )
            caption = f"best {best:.3g}" if key == "miou" else f"last {last:.3g}"
            curves.append({"title": title, "caption": caption, "svg": svg})
    return curves


def _classes(data: ReportData, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the class table: falling IoU, then the classes without one."""
    intervals = (data.result.get("interval_95") or {}).get("iou", {})
    counts = np.asarray(data.confusion)
    shares, predicted = (
        counts.sum(axis=1) / max(int(counts.sum()), 1),
        counts.sum(axis=0),
    )
    rows = [
        {
            "id": k,
            "name": name,
            "color": f"rgb{tuple(int(part) for part in data.palette[k])}",
            "iou": figures["iou"][name],
            "interval": percent_range(intervals.get(name)),
            "cells": [figures[key].get(name) for key in _COLUMNS if key in figures],
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
        {
            "id": k,
            "name": name,
            "present": bool(counts[k].any()),
            "rates": rates[k].tolist(),
        }
        for k, name in enumerate(data.names)
    ]


def _panels(
    overlay: Overlay, palette: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    image = shrink(overlay.image, _PANEL_WIDTH, smooth=True)
    target, pred = (
        shrink(ids, _PANEL_WIDTH, smooth=False)
        for ids in (overlay.target, overlay.pred)
    )
    panels = (
        ("image", image),
        ("target", blend(image, target, palette)),
        ("prediction", blend(image, pred, palette)),
        ("errors", errors(image, target, pred)),
    )
    return {
        "name": overlay.name,
        "miou": overlay.miou,
        "panels": [(kind, jpeg_url(picture)) for kind, picture in panels],
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with keys such as `optim.lr`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping) and value
            else {f"{prefix}{key}": value}
        )
    return flat


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else "n/a"
    return "none" if value in ("", None) else str(value)
