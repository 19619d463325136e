"""Runs, read from their folders and compared: in which settings they differ, groups of them, and a page with curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from segpipe.errors import ConfigError, Interrupted
from segpipe.run.pages import COLORS, Chart, Line, points_of, write_page
from segpipe.run.tracking import FILE_NAME, failure, read_metrics
from segpipe.settings.config import FREE_KEYS, flat, saved_config

DESCENDING = ("date", "miou", "steps")
_FIGURES = (
    ("validation", "miou", "Validation mIoU, %"),
    ("train", "loss", "Training loss"),
)


@dataclass(frozen=True)
class Row:
    """One run; None if it is not known yet or cannot be read."""

    name: str  # folder below root
    folder: Path
    model: str | None = None
    data: str | None = None
    miou: float | None = None
    steps: int | None = None
    digest: str | None = None  # of the averaged weights
    date: str | None = None  # last change, local time
    state: str = "finished"
    reason: str = ""  # why the last session failed or stopped, on one line
    # Of the recipe, by dotted key; empty without a readable file.
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeGroup:
    """Runs of one recipe, up to the setting by which they are grouped."""

    settings: dict[str, Any]
    rows: Sequence[Row]
    by: str = ""  # the setting in which the runs differ

    @property
    def distinct(self) -> list[Row]:
        """One run for each value of `by`, a finished one if there is one: a repeated run is no second sample."""
        found: dict[str, Row] = {}
        for row in self.rows:
            value = _text(row.settings.get(self.by))
            if value not in found or found[value].miou is None:
                found[value] = row
        return list(found.values())

    @property
    def scores(self) -> list[float]:
        """mIoU of the finished runs, one for each value of `by`."""
        return [row.miou for row in self.distinct if row.miou is not None]

    @property
    def mean(self) -> float | None:
        """Mean mIoU of the finished runs; None without one."""
        return fmean(self.scores) if self.scores else None


def find_runs(root: Path, patterns: Sequence[str] = ()) -> list[Row]:
    """The runs below `root`; with patterns, the run folders that they name or match, and the runs below those.

    Raises ConfigError if root is not a folder, or a pattern matches nothing.
    """
    if not patterns:
        if not root.is_dir():
            raise ConfigError(
                f"root = {root} is not a folder. Set root to the folder that holds the "
                f"runs."
            )
        return [
            read_row(folder, str(folder.relative_to(root))) for folder in _folders(root)
        ]
    found: dict[Path, Row] = {}
    for pattern in patterns:
        path = Path(pattern)
        anchor = Path(path.anchor or ".")
        matches = [path]
        if not path.is_dir():
            matches = sorted(anchor.glob(str(path.relative_to(path.anchor))))
        folders = [folder for match in matches for folder in _folders(match)]
        if not folders:
            raise ConfigError(
                f"runs = {pattern}: no run is there. Name run folders, or match them: "
                f"'runs=[runs/lr*]'."
            )
        for folder in folders:
            found.setdefault(folder, read_row(folder, str(folder)))
    return list(found.values())


def _folders(top: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(top.rglob("config.json")))


def read_row(folder: Path, name: str) -> Row:
    """The run in `folder`; a file that cannot be read is named in `state`."""
    config = None
    known: dict[str, Any] = {}
    metrics = read_metrics(folder / FILE_NAME)
    steps = metrics[-1]["step"] if metrics else 0
    fault = ""
    try:
        known = _result(folder / "result.json")
    except (OSError, ValueError, TypeError, LookupError):
        fault = "result.json is damaged"
    try:
        config = saved_config(folder)
        recipe = flat(config).items()
        known["model"], known["data"] = config.model.name, config.data.name
        known["settings"] = {
            key: value for key, value in recipe if key not in FREE_KEYS
        }
    except ConfigError:
        fault = "config.json is damaged"
    if not known.get("digest"):
        total = config.train.steps if config else None
        known |= {"steps": steps, "state": f"unfinished, step {steps} of {total}"}
    code, reason = failure(folder)
    if reason:
        was_stopped = code == Interrupted.exit_code
        known["state"] = "interrupted" if was_stopped else "failed"
    if fault:
        known["state"] = fault
    return Row(name, folder, date=_date(folder), reason=reason, **known)


def _result(path: Path) -> dict[str, Any]:
    """mIoU, updates and digest; empty if the run has not finished. Raises ValueError and others for a damaged file."""
    if not path.exists():
        return {}
    found = json.loads(path.read_bytes())
    return {
        "miou": None if found["miou"] is None else float(found["miou"]),
        "steps": int(found["steps"]),
        "digest": str(found["ema_digest"]),
    }


def _date(folder: Path) -> str:
    """When a file of the run's progress last changed."""
    paths = [folder / name for name in ("result.json", FILE_NAME, "config.json")]
    newest = next(path for path in paths if path.exists())
    changed = datetime.fromtimestamp(newest.stat().st_mtime)
    return changed.strftime("%Y-%m-%d %H:%M")


def ordered(rows: Sequence[Row], column: str) -> list[Row]:
    """Rows sorted by a column, the newest, best or longest first; rows without a value come last."""
    known = [row for row in rows if getattr(row, column) is not None]
    known.sort(key=lambda row: getattr(row, column), reverse=column in DESCENDING)
    return known + [row for row in rows if getattr(row, column) is None]


def differing(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings in which recipes differ, in the order of the settings page."""
    known = [recipe for recipe in recipes if recipe]
    keys = known[0] if known else {}
    return [
        key for key in keys if len({_text(recipe.get(key)) for recipe in known}) > 1
    ]


def grouped(rows: Sequence[Row], by: str) -> list[RecipeGroup]:
    """Groups of the runs that differ in setting `by` alone, the best mean first."""
    members: dict[str, list[Row]] = {}
    recipes: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.settings:
            rest = {key: value for key, value in row.settings.items() if key != by}
            recipes[_text(rest)] = rest
            members.setdefault(_text(rest), []).append(row)
    groups = []
    for text, found in members.items():
        found.sort(key=lambda row: _text(row.settings[by]))
        groups.append(RecipeGroup(recipes[text], found, by))
    return sorted(groups, key=lambda group: (group.mean is None, -(group.mean or 0.0)))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def write_overview(
    path: Path,
    rows: Sequence[Row],
    groups: Sequence[RecipeGroup] = (),
    by: str = "",
) -> Path:
    """Write the page for runs, or for groups of runs that differ in setting `by` alone: a table, and their curves."""
    if not by:
        groups = [RecipeGroup(row.settings, [row]) for row in rows]
    recipes = [group.settings for group in groups if group.settings]
    keys = differing(recipes)
    styles = [(color, dashed) for dashed in (False, True) for color in COLORS]
    styles = styles[: len(groups)]
    shared = recipes[0] if recipes else {}
    return write_page(
        "overview.html.j2",
        path,
        number=len(rows),
        by=by,
        keys=keys,
        groups=groups,
        styles=styles,
        charts=_charts(groups, styles),
        same={key: value for key, value in shared.items() if key not in keys},
    )


def _charts(
    groups: Sequence[RecipeGroup], styles: Sequence[tuple[str, bool]]
) -> list[Chart]:
    """Charts with a line for each run."""
    histories = [
        (style, read_metrics(row.folder / FILE_NAME))
        for group, style in zip(groups, styles, strict=False)
        for row in group.rows
    ]
    charts = []
    for kind, key, title in _FIGURES:
        lines = [
            Line(points, *style)
            for style, history in histories
            if (points := points_of(history, kind, key))
        ]
        if lines:
            charts.append(Chart(title, lines, key == "miou", width=540, height=300))
    return charts
