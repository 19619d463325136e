"""Report page of a run or an evaluation.

It also shows where the network errs: IoU by object size and by distance to borders, on up to MOST images spread over
the split, which are predicted again, and examples of weak classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data import Float64, Int64, Uint8
from segpipe.data.order import spaced
from segpipe.run.console import lowest_first
from segpipe.run.pages import Picture, chart, points_of, write_page
from segpipe.settings.compose import choices, compose
from segpipe.settings.config import Config, flat
from segpipe.settings.setting import Values

# Functions import torch: commands import this module before they set the environment of processes.
if TYPE_CHECKING:
    import torch

    from segpipe.data.data_set import Samples
    from segpipe.train.engine import Run
    from segpipe.train.metrics import Validation

MOST = 32
EXAMPLES = 6
# Pixels of a connected object, limits as in COCO.
SIZES = (32 * 32, 96 * 96)
SIZE_NAMES = ("below 32x32", "below 96x96", "larger")
# Distance in pixels to the nearest pixel of another class, to about half a pixel.
DISTANCES = (3, 6, 12, 24)
DISTANCE_NAMES = ("up to 2", "3 to 5", "6 to 11", "12 to 23", "24 and more")
Predict = Callable[[Uint8], Uint8]
PAGE = "report.html"
WORST = "Worst images"
LATEST = "Latest prediction"
WEAKEST = "Examples of weak classes"
NEIGHBORS = 10  # images that are this close in the order of names look alike
WEAK = 0.6  # IoU below which a class gets advice
RARE = 0.01  # share of the labelled pixels
MOST_ADVICE = 20  # classes
# Settings that helped rare classes, see docs/sampling.md.
REMEDIES = {
    "augment.rare_crop": "0.5",
    "data.balance": "0.5",
    "loss.class_weights": "sqrt",
}


@dataclass(frozen=True)
class ReportData:
    """Input of the page. Fields with defaults may be missing."""

    config: Config
    result: Values  # as in result.json or printed by evaluate, and `device`
    confusion: Int64  # (C, C), rows target, columns prediction
    names: Sequence[str]
    palette: Sequence[tuple[int, int, int]]
    history: Sequence[Values] = ()  # lines of metrics.jsonl
    pictures: Mapping[str, Sequence[Picture]] = field(default_factory=dict)  # by title
    live: bool = False  # the run is still training: the page reloads itself
    # As in `Validation`.
    calibration: Float64 = field(default_factory=partial(np.zeros, (0, 4)))
    detail: Values | None = None  # result of `detail`


def predictor(
    answer: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> Predict:
    """A function that maps an image uint8 (H, W, 3) to class ids uint8 (H, W).

    `answer`: maps a batch uint8 (1, H, W, 3) on `device` to its class ids.
    """
    import torch

    def ids(image: Uint8) -> Uint8:
        batch = torch.from_numpy(image.copy())[None].to(device)
        found: Uint8 = answer(batch)[0].numpy(force=True)
        return found

    return ids


def page_data(
    config: Config,
    samples: Samples,
    found: Validation,
    result: Values,
    predict: Predict,
) -> ReportData:
    """Input of the report page; predicts some images again."""
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
    """Function that predicts class ids with the current averaged network of a run."""
    from segpipe.models.preprocess import Preprocess
    from segpipe.predict.inference import Inference, segment

    device, how = run.group.device, Inference(precision=precision)
    preprocess = Preprocess(standardize=run.config.model.standardize).to(device)
    answer = partial(segment, run.state.ema.model, preprocess, how=how)
    return predictor(answer, device)


def live_pictures(run: Run, found: Validation) -> list[Picture]:
    """The first image of the split and the three worst ones, predicted again."""
    predict = run_predictor(run, run.config.train.precision)
    return _pictures([0, *worst_images(found, 3)], run.val_cache, found, predict)


def worst_images(found: Validation, count: int = 4) -> list[int]:
    """Indices of the images with the lowest mIoU, worst first; only the worst of neighboring frames.

    Indices follow the order of names. Skips images without a label; ties are broken by index.
    """
    from segpipe.train.metrics import miou

    scores = {index: miou(counts) for index, counts in sorted(found.per_image.items())}
    known = [index for index, score in scores.items() if not math.isnan(score)]
    reach = min(NEIGHBORS, len(known) // 8)
    chosen: list[int] = []
    for index in sorted(known, key=scores.__getitem__):
        if all(abs(index - other) > reach for other in chosen):
            chosen.append(index)
    return chosen[:count]


def _pictures(
    indices: Sequence[int], samples: Samples, found: Validation, predict: Predict
) -> list[Picture]:
    from segpipe.train.metrics import miou

    pictures = []
    for index in indices:
        image, target = samples.read(index)
        name, counts = samples.name(index), found.per_image[index]
        pictures.append(Picture(name, miou(counts), image, target, predict(image)))
    return pictures


def is_live(path: Path) -> bool:
    """Whether the run was still training when this page was written."""
    with path.open("rb") as file:
        return b"data-live" in file.read(200)


def write_report(path: Path, data: ReportData) -> Path:
    """Write the page to `path` and return it. Raises CheckpointError when the disk is full."""
    from segpipe.train.metrics import flattering, rates, summary  # torch

    counts, names, config = data.confusion, data.names, data.config
    figures = summary(counts, names) | rates(counts, names)
    # Best first; classes without a pixel last.
    iou = [-1.0 if value is None else value for value in figures["iou"].values()]
    sequences = data.result.get("sequences") or {}
    settings, default = flat(config), _defaults(config.model.name, config.data.name)
    changed = [key for key in settings if default[key] != settings[key]]
    told = advice(counts, names, changed)
    weakest = sorted(told, key=figures["iou"].__getitem__)[:MOST_ADVICE]
    return write_page(
        "report.html.j2",
        path,
        data=data,
        figures={**data.result, **figures},
        falling=sorted(range(len(names)), key=iou.__getitem__, reverse=True),
        labelled=counts.sum(1),
        predicted=counts.sum(0),
        sequences=lowest_first(sequences),
        note=data.result.get("note") or flattering(sequences),
        charts=_charts(data),
        size_names=SIZE_NAMES,
        distance_names=DISTANCE_NAMES,
        advice={name: told[name] for name in weakest},
        settings=settings,
        default=default,
        changed=changed,
    )


@cache
def _defaults(model: str, data: str) -> Values:
    """Default settings for this network and data set."""
    chosen = ("model", model), ("data", data)
    return flat(
        compose([f"{key}={name}" for key, name in chosen if name in choices(key)])
    )


def advice(
    counts: Int64, names: Sequence[str], changed: Sequence[str] = ()
) -> dict[str, str]:
    """Advice for each class with a low IoU: what goes wrong, by how much, and what to try.

    Does not propose settings that the run has `changed`.
    """
    untried = [f"{key}={REMEDIES[key]}" for key in REMEDIES if key not in changed]
    labelled, predicted = counts.sum(1), counts.sum(0)
    confused = counts - np.diag(counts.diagonal())
    sentences = {}
    for k, name in enumerate(names):
        hits, target, pred = counts[k, k], labelled[k], predicted[k]
        if not target or hits >= WEAK * (target + pred - hits):
            continue
        pixels = confused[k]
        if target >= pred:
            text = "{:.0%} of its pixels are missed, {:.0%} are predicted as {}"
        else:
            target, pixels = pred, confused[:, k]
            text = (
                "{:.0%} of the pixels predicted as this class are wrong, {:.0%} are {}"
            )
        wrong, most = 1 - hits / target, pixels.max() / target
        share = labelled[k] / labelled.sum()
        remedy = (
            "Train longer (train.epochs), or with larger crops (augment.crop_size)."
        )
        if share < min(RARE, 0.2 / len(names)) and untried:
            remedy = f"Try {' or '.join(untried)}."
        elif hits and most > 0.5 * wrong:
            remedy = (
                "Check in the images below that the labels separate the two classes."
            )
        evidence = text.format(wrong, most, names[int(pixels.argmax())])
        sentences[name] = (
            f"{evidence}; it is {share:.2%} of the labelled pixels. {remedy}"
        )
    return sentences


def _charts(data: ReportData) -> dict[str, str]:
    """Training curves by title, and the reliability diagram."""
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
    used = data.calibration[data.calibration[:, 0] > 0]
    if len(used):
        pixels, share, right, _ = used.T
        off = 100 * abs(share - right).sum() / pixels.sum()
        measured = zip(100 * share / pixels, 100 * right / pixels, strict=True)
        drawn[f"Accuracy by confidence, %: {off:.1f} off"] = {
            "measured": [*measured],
            "ideal": [(0, 0), (100, 100)],
        }
    return {
        title: picture
        for title, lines in drawn.items()
        if (picture := chart(title, lines, marked="%" in title))
    }


def detail(samples: Samples, num_classes: int, predict: Predict) -> Values:
    """IoU over some images; NaN without target pixels.

    `images`: number; `by_size` (C, 3): IoU of each class by SIZE_NAMES; `by_distance` (5): mIoU by DISTANCE_NAMES.
    """
    from segpipe.train.metrics import miou  # torch

    places = spaced(range(len(samples)), MOST)
    sizes = np.zeros((3, num_classes, len(SIZE_NAMES)), np.int64)
    bands = np.zeros((len(DISTANCE_NAMES), num_classes, num_classes), np.int64)
    for place in places:
        image, target = samples.read(place)
        pred = predict(image)
        sizes += by_size(pred, target, num_classes)
        bands += by_distance(pred, target, num_classes)
    with np.errstate(invalid="ignore"):
        by_class = np.where(sizes[2] > 0, sizes[0] / sizes[1], np.nan)
    return {
        "images": len(places),
        "by_size": by_class.tolist(),
        "by_distance": [miou(band) for band in bands],
    }


def by_size(pred: Uint8, target: Uint8, num_classes: int) -> Int64:
    """Pixels of intersection, union and target of each class, by object size.

    A false positive counts for the size of the predicted object that contains it.

    Shapes: uint8 (H, W) twice -> int64 (3, C, 3).
    """
    found = np.zeros((3, num_classes, len(SIZE_NAMES)), np.int64)
    for k in np.union1d(target, pred).tolist():
        if k >= num_classes:
            continue
        is_target, is_pred = target == k, (pred == k) & (target != IGNORE_INDEX)
        size = np.where(is_target, _sizes(is_target), _sizes(pred == k))
        counted = is_target & is_pred, is_target | is_pred, is_target
        found[:, k] = [np.bincount(size[pixels], minlength=3) for pixels in counted]
    return found


def _sizes(area: NDArray[np.bool_]) -> Int64:
    """For each pixel, the index in SIZE_NAMES of the connected object that contains it."""
    import cv2

    _, labels, stats, _ = cv2.connectedComponentsWithStats(area.astype(np.uint8))
    places: Int64 = np.digitize(stats[:, cv2.CC_STAT_AREA], SIZES)
    return np.asarray(places[labels])


def by_distance(pred: Uint8, target: Uint8, num_classes: int) -> Int64:
    """Confusion in bands along class borders. Contact with unlabelled pixels is not a border.

    Shapes: uint8 (H, W) twice -> int64 (5, C, C).
    """
    import cv2

    labelled = target != IGNORE_INDEX
    cross = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))
    highest = cv2.dilate(np.where(labelled, target, 0), cross)
    lowest = cv2.erode(target, cross)
    inside = ~labelled | (highest == lowest)
    far = cv2.distanceTransform(inside.astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_5)
    band = np.digitize(far + 1, DISTANCES)
    cells = (band * num_classes + target) * num_classes + pred
    size = len(DISTANCE_NAMES) * num_classes**2
    counts = np.bincount(cells[labelled], minlength=size)
    return counts.reshape(-1, num_classes, num_classes)


def examples(
    samples: Samples, found: Validation, weak: Sequence[str], predict: Predict
) -> list[Picture]:
    """For each weak class, the image part with most of its wrong pixels, and its IoU in the whole image."""
    pictures = []
    for name in weak[:EXAMPLES]:
        k = samples.classes.names.index(name)
        wrong = {
            index: int(counts[k].sum() + counts[:, k].sum() - 2 * counts[k, k])
            for index, counts in sorted(found.per_image.items())
        }
        index = max(wrong, key=wrong.__getitem__)
        image, target = samples.read(index)
        pred = predict(image)
        counts = found.per_image[index]
        iou = int(counts[k, k]) / max(wrong[index] + int(counts[k, k]), 1)
        part = densest(((target == k) != (pred == k)) & (target != IGNORE_INDEX))
        title = f"{name}: {samples.name(index)}"
        pictures.append(Picture(title, iou, image[part], target[part], pred[part]))
    return pictures


def densest(wrong: NDArray[np.bool_]) -> tuple[slice, slice]:
    """The window of half the height and width that contains the most true pixels."""
    import cv2

    height, width = (max(1, side // 2) for side in wrong.shape)
    sums = cv2.boxFilter(
        wrong.astype(np.float32), -1, (width, height), anchor=(0, 0), normalize=False
    )
    inside = sums[: wrong.shape[0] - height + 1, : wrong.shape[1] - width + 1]
    row, column = divmod(int(inside.argmax()), inside.shape[1])
    return np.s_[row : row + height, column : column + width]
