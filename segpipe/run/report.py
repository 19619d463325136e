"""The results of a run or of an evaluation on one page, and the same page while the run lives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe.run.console import lowest_first
from segpipe.run.pages import Chart, Curve, PlotAxis, points_of, render_page, write_page
from segpipe.run.pictures import Picture
from segpipe.run.tracking import FILE_NAME, read_metrics
from segpipe.settings.config import Config, flat, to_mapping

# torch is imported inside the functions: a command imports this module before it sets the environment of processes.
if TYPE_CHECKING:
    import torch

    from segpipe.data.catalog import ClassTable
    from segpipe.data.data_set import Samples
    from segpipe.train.training import Run
    from segpipe.train.validate import Validation

Predict = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
PAGE = "report.html"
WORST, BEST = "Worst images", "Best images"
LATEST = "Latest prediction"
_NEIGHBORS = 10  # places in its sequence within which images look much alike
_WEAK = 0.6  # IoU below which a class gets advice
_RARE = 0.01  # share of the labelled pixels
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
class ReportData:
    """Input of the page. The fields with defaults may be missing."""

    config: Mapping[str, Any]  # nested, as in config.json
    result: Mapping[str, Any]  # as in result.json or printed by evaluate, and `device`
    confusion: NDArray[np.int64]  # (C, C), rows target, columns prediction
    names: Sequence[str]
    palette: Sequence[tuple[int, int, int]]
    data_name: str = ""  # of the class table
    history: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    pictures: Mapping[str, Sequence[Picture]] = field(default_factory=dict)  # by title
    live: bool = False  # the run goes on: the page loads itself again


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
    worst, best = _extremes(config, samples, found)
    chosen = {WORST: worst, BEST: best}
    return ReportData(
        config=to_mapping(config),
        result=result,
        confusion=found.total.numpy(),
        names=samples.classes.names,
        palette=samples.classes.palette,
        data_name=samples.classes.name,
        history=history,
        pictures={
            title: _pictures(indices, samples, found, predict)
            for title, indices in chosen.items()
        },
    )


def run_predictor(run: Run, precision: str = "fp32") -> Predict:
    """Class ids by the averaged network of a run, as it is now."""
    from segpipe.models.preprocess import Preprocess
    from segpipe.train.validate import predict

    device = run.group.device
    parts = run.state.ema.model, Preprocess().to(device)
    return predictor(partial(predict, *parts, precision=precision), device)


def live_pictures(run: Run, found: Validation) -> list[Picture]:
    """The first image of the split and the three worst ones, predicted once more."""
    worst, _ = _extremes(run.config, run.val_samples, found)
    predict = run_predictor(run, run.config.train.precision)
    return _pictures([0, *worst[:3]], run.val_cache, found, predict)


def _extremes(
    config: Config, samples: Samples, found: Validation
) -> tuple[list[int], list[int]]:
    from segpipe.data.samples import sequences
    from segpipe.train.metrics import miou

    scores = {index: miou(counts) for index, counts in found.per_image.items()}
    return pick_extremes(scores, sequences(samples, config.data.sequence))


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


def pick_extremes(
    scores: Mapping[int, float], sequence_of: Sequence[str], count: int = 4
) -> tuple[list[int], list[int]]:
    """Indices of the worst and of the best images, most extreme first; none is in both lists.

    Of neighbors in a sequence only the most extreme one is in a list. `scores` is the mIoU by index; indices are in the
    order of the names. NaN (nothing labelled) is left out; ties go by index.
    """
    lengths = Counter(sequence_of)

    def near(first: int, second: int) -> bool:
        reach = min(_NEIGHBORS, lengths[sequence_of[first]] // 8)
        is_same = sequence_of[first] == sequence_of[second]
        return is_same and abs(first - second) <= reach

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


def scores_of(found: Validation, classes: ClassTable) -> dict[str, Any]:
    """Figures of a validation for a callback: those of `metrics.summary`, `confusion`, `names` and `palette`."""
    from segpipe.train.metrics import summary

    return {
        **summary(found.total, classes.names),
        "confusion": found.total.numpy(),
        "names": classes.names,
        "palette": classes.palette,
    }


class LivePage:
    """report.html of a run that goes on, written whole after each validation."""

    def on_start(self, config: Config, step: int) -> None:
        """Keep the configuration."""
        self._config = config
        self._data: ReportData | None = None

    def on_validation(
        self, step: int, scores: dict[str, Any], pictures: Sequence[Picture]
    ) -> None:
        """Write the page."""
        own = ("confusion", "names", "palette")
        self._data = ReportData(
            config=to_mapping(self._config),
            result={"steps": step},
            **{key: scores[key] for key in own},
            history=read_metrics(self._config.run_dir / FILE_NAME),
            pictures={LATEST: pictures[:1], WORST: pictures[1:]},
            live=True,
        )
        self._write()

    def on_end(self, result: dict[str, Any]) -> None:
        """Stop the page of a run that did not finish; a finished one has its report."""
        if self._data and "miou" not in result:
            self._data = replace(self._data, live=False)
            self._write()

    def _write(self) -> None:
        assert self._data is not None
        write_report(self._config.run_dir / PAGE, self._data)


def is_live(path: Path) -> bool:
    """Whether this is the page of a run that went on when it was written."""
    with path.open("rb") as file:
        return b"data-live" in file.read(200)


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
    settings, default = flatten(data.config), flat(Config())
    record = {key: data.result[key] for key in data.result if key not in _IN_TABLES}
    return {
        "name": data.config.get("run", {}).get("name", "run"),
        "about": _about(data),
        "data": data,
        "result": data.result,
        "progress": _progress(data) if data.live else {},
        "figures": {**data.result, **figures},
        "falling": sorted(
            range(len(iou)), key=lambda k: (iou[k] is None, -(iou[k] or 0.0))
        ),
        "advice": advice(counts, data.names),
        "trends": _trends(data),
        "shares": (labelled / max(int(labelled.sum()), 1)).tolist(),
        "predicted": counts.sum(axis=0).tolist(),
        "confusion": (counts / np.maximum(labelled, 1)[:, None]).tolist(),
        "sequences": lowest_first(sequences),
        "note": data.result.get("note") or flattering(sequences),
        "charts": _charts(data.history),
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
    config, result = data.config, data.result
    own = config.get("data", {})
    source, held_out = own.get("name", ""), own.get("hold_out")
    if data.data_name not in ("", source):
        source = f"{data.data_name} ({source})"
    split = result.get("split", own.get("split", ""))
    where = f"sequence {held_out}, held out" if held_out else f"split {split}"
    images = f"{result['images']} images" if "images" in result else ""
    model = config.get("model", {}).get("name", "")
    parts = [model, f"data {source}", where, images, f"seed {config.get('seed')}"]
    return [part for part in parts if part]


def _progress(data: ReportData) -> dict[str, Any]:
    """How far a living run is: step, steps, and what the last lines of its metrics say of speed, memory and time."""
    last = {line["kind"]: line for line in data.history}
    train, memory = last.get("train", {}), last.get("memory", {})
    steps, step = data.config["train"]["steps"], data.result["steps"]
    seconds, first = train.get("time_s", 0.0), data.history[0]
    updates = train.get("step", 0) - first["step"]
    left_s = None
    if updates > 0:
        left_s = (steps - step) * (seconds - first["time_s"]) / updates
    return {
        "step": step,
        "steps": steps,
        "left_s": left_s,
        "images_per_second": train.get("images_per_second"),
        "memory_mib": max(memory.get("peak_mib") or memory.get("rss_mib") or [None]),
    }


def advice(counts: NDArray[np.int64], names: Sequence[str]) -> dict[str, str]:
    """For each class with a low IoU one sentence: what goes wrong, by how much, and what to try."""
    labelled, predicted = counts.sum(1), counts.sum(0)
    sentences = {}
    for k, name in enumerate(names):
        hits, target, pred = int(counts[k, k]), int(labelled[k]), int(predicted[k])
        if not target or hits >= _WEAK * (target + pred - hits):
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
        if share < _RARE:
            remedy = "Try augment.rare_crop=0.5, data.balance=0.5 or loss.class_weights=sqrt."
        elif hits and most > 0.5 * wrong:
            remedy = "Check on the images below that the labels tell the two apart."
        evidence = text.format(wrong, most, names[int(pixels.argmax())])
        sentences[name] = (
            f"{evidence}; it is {share:.2%} of the labelled pixels. {remedy}"
        )
    return sentences


def _charts(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, Chart]]:
    """Curves of the training, each with a caption."""
    charts = []
    validations = [line["step"] for line in history if line.get("kind") == "validation"]
    for kind, key, title in _FIGURES:
        points = points_of(history, kind, key)
        if not points:
            continue
        values = [y for _, y in points]
        is_score = key == "miou"
        marks = () if is_score else validations
        caption = f"best {max(values):.3g}" if is_score else f"last {values[-1]:.3g}"
        charts.append((caption, Chart(title, [Curve(points)], is_score, marks)))
    return charts


def _trends(data: ReportData) -> dict[str, str]:
    """IoU of each class over the validations, as points of a polyline in a box of 100 x 20."""
    known = [line for line in data.history if isinstance(line.get("iou"), Mapping)]
    if len(known) < 2:
        return {}
    x = PlotAxis(known[0]["step"], known[-1]["step"], 0, 100)
    y = PlotAxis(0.0, 1.0, 19, 1)
    return {
        name: " ".join(
            f"{x.at(line['step'])},{y.at(line['iou'].get(name) or 0.0)}"
            for line in known
        )
        for name in data.names
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with keys such as `optim.lr`."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flatten(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened
