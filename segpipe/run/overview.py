"""Runs, read from their folders and compared: tables, groups that repeat a recipe, and a page with curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.cells import cell_len
from rich.table import Table

from segpipe.errors import ConfigError, Interrupted
from segpipe.run.console import percent
from segpipe.run.pages import COLORS, Chart, Curve, points_of, write_page
from segpipe.run.tracking import FILE_NAME, failure, read_metrics
from segpipe.settings.config import FREE_KEYS, flat, saved_config
from segpipe.settings.setting import shown

DESCENDING = ("date", "miou", "steps")
SETTINGS_SHOWN = 6  # columns of a table; the page and --json have all
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
    """Runs of one recipe, one for each value of the setting `by`."""

    settings: dict[str, Any]
    rows: Sequence[Row]
    by: str = ""

    @property
    def scores(self) -> list[float]:
        """mIoU of the finished runs."""
        return [row.miou for row in self.rows if row.miou is not None]

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
                f"root = {root} is not a folder. Set root to the folder that holds the runs."
            )
        return [read_row(each, str(each.relative_to(root))) for each in _folders(root)]
    rows: dict[Path, Row] = {}
    for pattern in patterns:
        path = Path(pattern)
        anchor = Path(path.anchor or ".")
        matches = [path]
        if not path.is_dir():
            matches = sorted(anchor.glob(str(path.relative_to(path.anchor))))
        folders = [folder for match in matches for folder in _folders(match)]
        if not folders:
            raise ConfigError(
                f"runs = {pattern}: no run is there. Name run folders, or match them: 'runs=[runs/lr*]'."
            )
        rows |= {folder: read_row(folder, str(folder)) for folder in folders}
    return list(rows.values())


def _folders(top: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(top.rglob("config.json")))


def read_row(folder: Path, name: str) -> Row:
    """The run in `folder`; a file that cannot be read is named in `state`."""
    known: dict[str, Any] = {}
    total: Any = None
    damaged = ""
    try:
        config = saved_config(folder)
        settings = {k: v for k, v in flat(config).items() if k not in FREE_KEYS}
        known |= {"model": config.model.name, "data": config.data.name}
        known["settings"] = settings
        total = config.train.steps
    except ConfigError:
        damaged = "config.json is damaged"
    try:
        result = json.loads((folder / "result.json").read_bytes())
        score = result["miou"]
        known |= {
            "miou": None if score is None else float(score),
            "steps": int(result["steps"]),
            "digest": str(result["ema_digest"]),
        }
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, LookupError):
        damaged = damaged or "result.json is damaged"
    if "digest" not in known:
        metrics = read_metrics(folder / FILE_NAME)
        known["steps"] = metrics[-1]["step"] if metrics else 0
        known["state"] = f"unfinished, step {known['steps']} of {total}"
    code, reason = failure(folder)
    if reason:
        stopped = code == Interrupted.exit_code
        known["state"] = "interrupted" if stopped else "failed"
    if damaged:
        known["state"] = damaged
    return Row(name, folder, date=_date(folder), reason=reason, **known)


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
    return [key for key in keys if len({_text(each.get(key)) for each in known}) > 1]


def grouped(rows: Sequence[Row], by: str) -> list[RecipeGroup]:
    """Groups of the runs that differ in setting `by` alone, the best mean first.

    Of runs with one value of `by`, a finished one counts: a repeated run is no second sample.
    """
    groups: dict[str, RecipeGroup] = {}
    for row in sorted(rows, key=lambda row: row.miou is None):
        if row.settings:
            rest = {key: value for key, value in row.settings.items() if key != by}
            group = groups.setdefault(_text(rest), RecipeGroup(rest, [], by))
            if all(row.settings[by] != other.settings[by] for other in group.rows):
                members = sorted(
                    [*group.rows, row], key=lambda row: _text(row.settings[by])
                )
                groups[_text(rest)] = RecipeGroup(rest, members, by)
    return sorted(groups.values(), key=lambda group: -(group.mean or -1.0))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def run_table(rows: Sequence[Row], width: int) -> Table:
    """A line for each run, with the settings in which they differ as far as `width` characters reach."""
    columns: dict[str, list[Any]] = {
        "name": [row.name for row in rows],
        "mIoU %": [_percent(row.miou) for row in rows],
        "steps": [row.steps for row in rows],
        "state": [row.state for row in rows],
    }
    keys = differing([row.settings for row in rows])
    for key in keys:
        columns[key] = [
            shown(row.settings[key]) if row.settings else None for row in rows
        ]
    columns["date"] = [row.date for row in rows]
    columns["digest"] = [row.digest and row.digest[:12] for row in rows]
    return _table(columns, 4, keys, width)


def group_table(groups: Sequence[RecipeGroup], width: int) -> Table:
    """A line for each recipe: mean and range over its runs."""
    columns: dict[str, list[Any]] = {
        groups[0].by if groups else "": [
            ",".join(shown(row.settings[group.by]) for row in group.rows)
            for group in groups
        ],
        "finished": [f"{len(each.scores)} of {len(each.rows)}" for each in groups],
        "mean mIoU %": [_percent(group.mean) for group in groups],
        "lowest": [_percent(min(group.scores, default=None)) for group in groups],
        "highest": [_percent(max(group.scores, default=None)) for group in groups],
    }
    keys = differing([group.settings for group in groups])
    for key in keys:
        columns[key] = [shown(group.settings[key]) for group in groups]
    return _table(columns, 5, keys, width)


def _percent(value: float | None) -> str | None:
    return None if value is None else percent(value, 2)


def _table(
    columns: Mapping[str, Sequence[Any]], needed: int, keys: Sequence[str], width: int
) -> Table:
    """A table of the first `needed` columns and of the others that fit; the first one folds."""
    table = Table(caption_justify="left")
    chosen: list[list[str]] = []
    left = width - 1
    settings = 0
    for title, values in columns.items():
        cells = ["-" if value is None else str(value) for value in values]
        room = 3 + max(map(cell_len, [title, *cells]))
        if not chosen:
            room = min(room, max(24, width // 3))
        is_many = title in keys and settings >= SETTINGS_SHOWN
        if len(chosen) < needed or (room <= left and not is_many):
            table.add_column(title, no_wrap=bool(chosen), overflow="fold")
            chosen.append(cells)
            settings += title in keys
            left -= room
    for row in zip(*chosen, strict=True):
        table.add_row(*row)
    titles = [column.header for column in table.columns]
    if rest := [key for key in keys if key not in titles]:
        table.caption = f"They also differ in: {', '.join(rest)}."
    return table


def write_overview(
    path: Path, rows: Sequence[Row], groups: Sequence[RecipeGroup] = (), by: str = ""
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
            Curve(points, *style)
            for style, history in histories
            if (points := points_of(history, kind, key))
        ]
        if lines:
            charts.append(Chart(title, lines, key == "miou", width=540, height=300))
    return charts
