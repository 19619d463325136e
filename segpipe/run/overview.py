"""Runs, read from their folders and compared: tables, groups that repeat a recipe, and a page with curves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from glob import glob
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from segpipe.errors import ConfigError, Interrupted
from segpipe.files import read_json
from segpipe.run.console import percent
from segpipe.run.pages import COLORS, chart, points_of, write_page
from segpipe.run.tracking import FILE_NAME, failure, read_metrics
from segpipe.settings.config import FREE_KEYS, flat, saved_config
from segpipe.settings.setting import shown

DESCENDING = ("date", "miou", "steps")
SETTINGS_SHOWN = 6  # columns of a table; the page and --json have all


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
    seconds: float | None = None  # of training
    iou: dict[str, float | None] = field(default_factory=dict)  # by class
    state: str = "finished"
    reason: str = ""  # why the last session failed or stopped, on one line
    # Of the recipe, by dotted key; empty without a readable file.
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeGroup:
    """Runs of one recipe, one for each value of the setting `by`."""

    settings: dict[str, Any]
    rows: list[Row]
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
    if not patterns and not root.is_dir():
        raise ConfigError(
            f"root = {root} is not a folder. Set root to the folder that holds the runs."
        )
    folders: dict[Path, str] = {}
    for pattern in patterns or [str(root)]:
        matches = [Path(match) for match in sorted(glob(pattern))]
        found = [file.parent for top in matches for file in top.rglob("config.json")]
        if patterns and not found:
            raise ConfigError(
                f"runs = {pattern}: no run is there. Name run folders, or match them: 'runs=[runs/lr*]'."
            )
        for folder in sorted(found):
            name = folder if patterns else folder.relative_to(root)
            folders[folder] = str(name)
    return [read_row(folder, name) for folder, name in folders.items()]


def read_row(folder: Path, name: str) -> Row:
    """The run in `folder`; a file that cannot be read is named in `state`."""
    row = Row(name, folder, date=_date(folder))
    try:
        config = saved_config(folder)
    except ConfigError:
        return replace(row, state="config.json is damaged")
    row = replace(
        row,
        model=config.model.name,
        data=config.data.name,
        settings={k: v for k, v in flat(config).items() if k not in FREE_KEYS},
    )
    try:
        result = read_json(folder / "result.json")
        score = result["miou"]
        row = replace(
            row,
            miou=None if score is None else float(score),
            steps=int(result["steps"]),
            digest=str(result["ema_digest"]),
            seconds=result.get("train_seconds"),
            iou=result.get("iou", {}),
        )
    except FileNotFoundError:
        metrics = read_metrics(folder / FILE_NAME)
        steps = metrics[-1]["step"] if metrics else 0
        state = f"unfinished, step {steps} of {config.train.steps}"
        row = replace(row, steps=steps, state=state)
    except (OSError, ValueError, TypeError, LookupError):
        row = replace(row, state="result.json is damaged")
    code, reason = failure(folder)
    if reason:
        state = "interrupted" if code == Interrupted.exit_code else "failed"
        row = replace(row, state=state, reason=reason)
    return row


def _date(folder: Path) -> str:
    """When a file of the run's progress last changed."""
    paths = (folder / name for name in ("config.json", "result.json", FILE_NAME))
    newest = max(path.stat().st_mtime for path in paths if path.exists())
    return datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M")


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
                group.rows.append(row)
    for group in groups.values():
        group.rows.sort(key=lambda row: _text(row.settings[by]))
    return sorted(groups.values(), key=lambda group: -(group.mean or -1.0))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def run_table(rows: Sequence[Row]) -> Table:
    """A line for each run, with settings in which they differ."""
    columns: dict[str, list[Any]] = {
        "name": [row.name for row in rows],
        "mIoU %": [_percent(row.miou) for row in rows],
        "steps": [row.steps for row in rows],
        "state": [row.state for row in rows],
    }
    more = {
        "date": [row.date for row in rows],
        "digest": [row.digest and row.digest[:12] for row in rows],
    }
    return _table(columns, [row.settings for row in rows], more)


def group_table(groups: Sequence[RecipeGroup]) -> Table:
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
    return _table(columns, [group.settings for group in groups], {})


def _percent(value: float | None) -> str | None:
    return None if value is None else percent(value, 2)


def _table(
    columns: Mapping[str, Sequence[Any]],
    recipes: Sequence[Mapping[str, Any]],
    more: Mapping[str, Sequence[Any]],
) -> Table:
    """A table of columns by their titles, with up to SETTINGS_SHOWN settings in which the recipes differ."""
    keys = differing(recipes)
    settings = {
        key: [shown(recipe[key]) if recipe else None for recipe in recipes]
        for key in keys[:SETTINGS_SHOWN]
    }
    table = Table(caption_justify="left")
    whole = {**columns, **settings, **more}
    for place, title in enumerate(whole):
        is_short = place > 0 and title not in settings
        table.add_column(title, overflow="fold", no_wrap=is_short)
    for cells in zip(*whole.values(), strict=True):
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in cells))
    if rest := keys[SETTINGS_SHOWN:]:
        table.caption = f"They also differ in: {', '.join(rest)}."
    return table


def _link(row: Row, page: Path) -> str:
    """The report of a run as a link from the page; empty if there is none."""
    report = row.folder / "report.html"
    here = page.resolve().parent
    return quote(os.path.relpath(report.resolve(), here)) if report.exists() else ""


def write_overview(
    path: Path, rows: Sequence[Row], groups: Sequence[RecipeGroup] = (), by: str = ""
) -> Path:
    """Write the page for runs, or for groups of runs that differ in setting `by` alone: a table, and their curves."""
    if not by:
        groups = [RecipeGroup(row.settings, [row]) for row in rows]
    recipes = [group.settings for group in groups if group.settings]
    keys = differing(recipes)
    shared = recipes[0] if recipes else {}
    drawn = groups[: len(COLORS)]
    histories = [
        [read_metrics(row.folder / FILE_NAME) for row in group.rows] for group in drawn
    ]
    charts = []
    for kind, key, title in (
        ("validation", "miou", "Validation mIoU, %"),
        ("train", "loss", "Training loss"),
    ):
        lines, colors = {}, []
        for color, group in zip(COLORS, histories, strict=False):
            for history in group:
                lines[f"_{len(lines)}"] = points_of(history, kind, key)
                colors.append(color)
        charts.append(chart(title, lines, marked=key == "miou", colors=colors))
    classes = dict.fromkeys(name for row in rows for name in row.iou)
    return write_page(
        "overview.html.j2",
        path,
        classes=list(classes),
        links={row.folder: _link(row, path) for row in rows},
        number=len(rows),
        by=by,
        keys=keys,
        groups=groups,
        colors=COLORS,
        charts=[picture for picture in charts if picture],
        same={key: value for key, value in shared.items() if key not in keys},
    )
