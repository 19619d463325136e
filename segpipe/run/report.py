"""The results of a run or of an evaluation on one page. torch is imported inside the functions, as in finish.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe.run.console import lowest_first
from segpipe.run.pages import render_page, write_page
from segpipe.run.pictures import COLORS, blend, curve_svg, errors, points_of, shrink
from segpipe.run.trackers import Picture
from segpipe.settings.config import Config, to_mapping

if TYPE_CHECKING:
    import torch

    from segpipe.data.data_set import Samples
    from segpipe.train.validate import Validation

Predict = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
_PANEL_WIDTH = 480  # pixels of an overlay; 32 of them stay below 2 MB
_NEIGHBORS = 10  # places in its sequence within which images look much alike
# Keys of a result that the page shows in tables of their own.
_IN_TABLES = {
    *("versions", "iou", "precision", "recall", "f1"),
    *("boundary_iou", "sequences", "interval_95", "note"),
}
_FIGURES = (
    ("train", "loss", "Loss"),
    ("train", "lr", "Learning rate"),
    ("validation", "miou", "Validation mIoU, %"),
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
        batch = torch.from_numpy(image.copy())[None].to(device)
        return np.asarray(answer(batch)[0].cpu().numpy(), np.uint8)

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
        pred = predict(image)
        return Overlay(samples.name(index), scores[index], image, target, pred)

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

    def near(first: int, second: int) -> bool:
        if sequence_of[first] != sequence_of[second]:
            return False
        own = members[sequence_of[first]]
        reach = min(_NEIGHBORS, len(own) // 8)
        return abs(own.index(first) - own.index(second)) <= reach

    def spread(order: Sequence[int], most: int) -> list[int]:
        chosen: list[int] = []
        for index in order:
            if len(chosen) < most and not any(near(index, other) for other in chosen):
                chosen.append(index)
        return chosen

    known = [index for index in sorted(scores) if not math.isnan(scores[index])]
    rising = sorted(known, key=lambda index: scores[index])
    worst = spread(rising, min(count, (len(known) + 1) // 2))
    falling = sorted(known, key=lambda index: -scores[index])
    return worst, spread([index for index in falling if index not in worst], count)


def write_report(path: Path, data: ReportData) -> Path:
    """`path`, at which the page is then. Raises CheckpointError when the disk is full."""
    return write_page("report.html.j2", path, **_facts(data))


def render(data: ReportData) -> str:
    """The page as text."""
    return render_page("report.html.j2", **_facts(data))


def _facts(data: ReportData) -> dict[str, Any]:
    from segpipe.train.metrics import rates, summary  # torch
    from segpipe.train.scores import flattering

    counts = np.asarray(data.confusion)
    figures = summary(data.confusion, data.names) | rates(data.confusion, data.names)
    labelled = counts.sum(axis=1)
    iou = list(figures["iou"].values())
    sequences = data.result.get("sequences") or {}
    settings, default = flatten(data.config), flatten(to_mapping(Config()))
    record = {key: data.result[key] for key in data.result if key not in _IN_TABLES}
    return {
        "name": data.config.get("run", {}).get("name", "run"),
        "about": _about(data),
        "data": data,
        "result": data.result,
        "figures": {**data.result, **figures},
        "falling": sorted(
            range(len(iou)), key=lambda k: (iou[k] is None, -(iou[k] or 0.0))
        ),
        "shares": (labelled / max(int(labelled.sum()), 1)).tolist(),
        "predicted": counts.sum(axis=0).tolist(),
        "confusion": (counts / np.maximum(labelled, 1)[:, None]).tolist(),
        "sequences": lowest_first(sequences),
        "note": data.result.get("note") or flattering(sequences),
        "curves": _curves(data.history),
        "panels": panels,
        "settings": settings,
        "default": default,
        "changed": [key for key in settings if default.get(key) != settings[key]],
        "records": {
            "Result": flatten(record),
            "Versions": flatten(data.result.get("versions", {})),
        },
    }


def _about(data: ReportData) -> list[str]:
    """What was trained and where it was measured, in a few words each."""
    own, images = data.config.get("data", {}), data.result.get("images")
    kind, held_out = own.get("name", ""), own.get("hold_out")
    split = data.result.get("split", own.get("split", ""))
    source = kind
    if data.data_name not in ("", kind):
        source = f"{data.data_name} ({kind})"
    where = f"sequence {held_out}, held out" if held_out else f"split {split}"
    parts = [
        ("{}", data.config.get("model", {}).get("name")),
        ("data {}", source),
        (where, held_out or split),
        ("{} images", images),
        ("seed {}", data.config.get("seed")),
    ]
    return [text.format(part) for text, part in parts if part not in ("", None)]


def _curves(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    curves = []
    validations = [line["step"] for line in history if line.get("kind") == "validation"]
    for kind, key, title in _FIGURES:
        points = points_of(history, kind, key)
        if not points:
            continue
        values = [y for _, y in points]
        is_score = key == "miou"
        svg = curve_svg(
            [(COLORS[0], "solid", points)],
            label=f"{title} over steps",
            dots=is_score,
            ticks=() if is_score else validations,
        )
        caption = f"best {max(values):.3g}" if is_score else f"last {values[-1]:.3g}"
        curves.append({"title": title, "caption": caption, "svg": svg})
    return curves


def panels(
    overlay: Overlay, palette: Sequence[tuple[int, int, int]]
) -> dict[str, NDArray[np.uint8]]:
    """The pictures of an overlay by kind, as RGB."""
    image = shrink(overlay.image, _PANEL_WIDTH, smooth=True)
    target = shrink(overlay.target, _PANEL_WIDTH, smooth=False)
    pred = shrink(overlay.pred, _PANEL_WIDTH, smooth=False)
    return {
        "image": image,
        "target": blend(image, target, palette),
        "prediction": blend(image, pred, palette),
        "errors": errors(image, target, pred),
    }


def pictures(data: ReportData) -> list[Picture]:
    """The pictures of the page with captions, for a tracker."""
    return [
        (f"{overlay.name}: {kind}", picture)
        for overlay in (*data.worst, *data.best)
        for kind, picture in panels(overlay, data.palette).items()
    ]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with keys such as `optim.lr`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
