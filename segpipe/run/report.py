"""The results of a run or of an evaluation on one page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe.files import write_atomically
from segpipe.run.console import lowest_first
from segpipe.run.detail import (
    DISTANCE_NAMES,
    SIZE_NAMES,
    detail,
    examples,
)
from segpipe.run.pages import Picture, chart, points_of, render_page
from segpipe.settings.compose import choices, compose
from segpipe.settings.config import Config, flat

# torch is imported inside the functions: a command imports this module before it sets the environment of processes.
if TYPE_CHECKING:
    import torch

    from segpipe.data.data_set import Samples
    from segpipe.train.engine import Run
    from segpipe.train.metrics import Validation

Predict = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
PAGE = "report.html"
WORST = "Worst images"
LATEST = "Latest prediction"
WEAKEST = "Examples of weak classes"
LAST_LINES = 8  # of metrics.jsonl, on the live page
NEIGHBORS = 10  # places in the order of the names within which images look much alike
WEAK = 0.6  # IoU below which a class gets advice
RARE = 0.01  # share of the labelled pixels


@dataclass(frozen=True)
class ReportData:
    """Input of the page. The fields with defaults may be missing."""

    config: Config
    result: Mapping[str, Any]  # as in result.json or printed by evaluate, and `device`
    confusion: NDArray[np.int64]  # (C, C), rows target, columns prediction
    names: Sequence[str]
    palette: Sequence[tuple[int, int, int]]
    history: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    pictures: Mapping[str, Sequence[Picture]] = field(default_factory=dict)  # by title
    live: bool = False  # the run goes on: the page loads itself again
    # As of `Validation`.
    calibration: NDArray[np.float64] | None = None
    detail: Mapping[str, Any] | None = None  # as `detail` gives it
    links: Sequence[str] = ()  # files beside the page


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
    result: Mapping[str, Any],
    predict: Predict,
) -> ReportData:
    """Input of the report page; predicts some images once more."""
    names, counts = samples.classes.names, found.total.numpy()
    worst = _pictures(worst_images(found), samples, found, predict)
    weak = list(advice(counts, names))
    return ReportData(
        config=config,
        result=result,
        confusion=counts,
        names=names,
        palette=samples.classes.palette,
        pictures={WORST: worst, WEAKEST: examples(samples, found, weak, predict)},
        calibration=found.calibration.numpy(),
        detail=detail(samples, len(names), predict),
    )


def run_predictor(run: Run, precision: str = "fp32") -> Predict:
    """Class ids by the averaged network of a run, as it is now."""
    from segpipe.models.preprocess import Preprocess
    from segpipe.train.validate import predict

    device = run.group.device
    parts = run.state.ema.model, Preprocess().to(device)
    return predictor(partial(predict, *parts, precision=precision), device)


def latency_ms(predict: Predict, samples: Samples) -> float:
    """Median time of the first image, from pixels to class ids."""
    image, _ = samples.read(0)
    return 1000 * median(repeat(lambda: predict(image), number=1))


def live_pictures(run: Run, found: Validation) -> list[Picture]:
    """The first image of the split and the three worst ones, predicted once more."""
    predict = run_predictor(run, run.config.train.precision)
    shown = [0, *worst_images(found, 3)]
    return _pictures(shown, run.val_cache, found, predict)


def worst_images(found: Validation, count: int = 4) -> list[int]:
    """Indices of the images with the lowest mIoU, rising; of neighboring frames only the worst.

    Indices are in the order of the names. An image without a label is left out; ties go by index.
    """
    from segpipe.train.metrics import miou

    scores = {index: miou(counts) for index, counts in sorted(found.per_image.items())}
    known = [index for index, score in scores.items() if not math.isnan(score)]
    reach = min(NEIGHBORS, len(known) // 8)
    chosen: list[int] = []
    for index in sorted(known, key=lambda index: scores[index]):
        is_near = any(abs(index - other) <= reach for other in chosen)
        if len(chosen) < count and not is_near:
            chosen.append(index)
    return chosen


def _pictures(
    indices: Sequence[int], samples: Samples, found: Validation, predict: Predict
) -> list[Picture]:
    from segpipe.train.metrics import miou

    pictures = []
    for index in indices:
        image, target = samples.read(index)
        score = miou(found.per_image[index])
        name = samples.name(index)
        pictures.append(Picture(name, score, image, target, predict(image)))
    return pictures


def is_live(path: Path) -> bool:
    """Whether this is the page of a run that went on when it was written."""
    with path.open("rb") as file:
        return b"data-live" in file.read(200)


def write_report(path: Path, data: ReportData) -> Path:
    """`path`, at which the page is then. Raises CheckpointError when the disk is full."""
    write_atomically(path, render(data).encode())
    return path


def render(data: ReportData) -> str:
    """The page as text."""
    from segpipe.train.metrics import flattering, rates, summary  # torch

    counts, names, config = data.confusion, data.names, data.config
    figures = summary(counts, names) | rates(counts, names)
    # The best first; classes without a pixel last.
    iou = [-1.0 if value is None else value for value in figures["iou"].values()]
    sequences = data.result.get("sequences") or {}
    settings, default = flat(config), _defaults(config.model.name, config.data.name)
    return render_page(
        "report.html.j2",
        data=data,
        live=data.live,
        figures={**data.result, **figures},
        falling=sorted(range(len(names)), key=lambda place: -iou[place]),
        labelled=counts.sum(1),
        predicted=counts.sum(0),
        sequences=lowest_first(sequences),
        note=data.result.get("note") or flattering(sequences),
        charts=_charts(data),
        last_lines=LAST_LINES,
        size_names=SIZE_NAMES,
        distance_names=DISTANCE_NAMES,
        advice=advice(counts, names),
        settings=settings,
        default=default,
        changed=[key for key in settings if default[key] != settings[key]],
    )


@cache
def _defaults(model: str, data: str) -> dict[str, Any]:
    """All settings as they are where only network and data set are chosen."""
    chosen = {"model": model, "data": data}.items()
    return flat(
        compose([f"{key}={name}" for key, name in chosen if name in choices(key)])
    )


def advice(counts: NDArray[np.int64], names: Sequence[str]) -> dict[str, str]:
    """For each class with a low IoU one sentence: what goes wrong, by how much, and what to try."""
    labelled, predicted = counts.sum(1), counts.sum(0)
    sentences = {}
    for k, name in enumerate(names):
        hits, target, pred = int(counts[k, k]), int(labelled[k]), int(predicted[k])
        if not target or hits >= WEAK * (target + pred - hits):
            continue
        others = np.arange(len(names)) != k
        if target - hits >= pred - hits:
            pixels = np.where(others, counts[k], 0)
            text = "{:.0%} of its pixels are missed, {:.0%} become {}"
        else:
            target, pixels = pred, np.where(others, counts[:, k], 0)
            text = "{:.0%} of what is predicted as this class is not, {:.0%} is {}"
        wrong, most = 1 - hits / target, pixels.max() / target
        share = labelled[k] / labelled.sum()
        remedy = (
            "Train longer (train.epochs), or with larger crops (augment.crop_size)."
        )
        if share < RARE:
            remedy = "Try augment.rare_crop=0.5, data.balance=0.5 or loss.class_weights=sqrt."
        elif hits and most > 0.5 * wrong:
            remedy = "Check on the images below that the labels tell the two apart."
        evidence = text.format(wrong, most, names[int(pixels.argmax())])
        sentences[name] = (
            f"{evidence}; it is {share:.2%} of the labelled pixels. {remedy}"
        )
    return sentences


def _charts(data: ReportData) -> dict[str, str]:
    """Curves of the training by their titles, and the reliability diagram."""
    keys = {key for line in data.history for key in line if key.startswith("loss_")}
    parts = sorted(keys) if len(keys) > 1 else []
    curve = partial(points_of, data.history)
    drawn = {
        "Loss": {
            "loss": curve("train", "loss"),
            "validation cross-entropy": curve("validation", "loss"),
        },
        "Parts of the loss": {part: curve("train", part) for part in parts},
        "Learning rate": {"lr": curve("train", "lr")},
        "Validation mIoU, %": {"miou": curve("validation", "miou")},
    }
    if data.calibration is not None and data.calibration[:, 0].any():
        pixels, share, right, _ = data.calibration[data.calibration[:, 0] > 0].T
        off = 100 * abs(share - right).sum() / pixels.sum()
        measured = zip(100 * share / pixels, 100 * right / pixels, strict=True)
        drawn[f"Right pixels by confidence, %: {off:.1f} off"] = {
            "measured": [*measured],
            "ideal": [(0, 0), (100, 100)],
        }
    charts = {
        title: chart(title, lines, marked="%" in title)
        for title, lines in drawn.items()
    }
    return {title: picture for title, picture in charts.items() if picture}
