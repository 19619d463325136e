"""`segpipe runs`: compares runs in one table, on the terminal, as JSON or as a page with their curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from segpipe.errors import ConfigError
from segpipe.run.console import percent
from segpipe.run.overview import (
    RecipeGroup,
    Row,
    differing,
    find_runs,
    grouped,
    ordered,
    write_overview,
)
from segpipe.settings.config import FREE_KEYS, SETTINGS
from segpipe.settings.setting import nearest, shown

SETTINGS_SHOWN = 6  # columns; the page and --json have all
NEEDED = ("name", "mIoU %", "steps", "state")  # at every width
ALWAYS_SHOWN = {"model.name": "model", "data.name": "data"}


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    by = given["group"]
    recipe = [key for key in SETTINGS if key not in FREE_KEYS]
    if by and by not in recipe:
        raise ConfigError(
            f"group = {by} is not a setting that decides what is trained."
            f"{nearest(by, recipe)}"
        )
    rows = ordered(find_runs(Path(given["root"]), given["runs"]), given["sort"])
    groups = grouped(rows, by) if by else []
    if given["out"]:
        write_overview(Path(given["out"]), rows, groups, by)
        print(f"written: {given['out']}")
    elif given["json"]:
        print(json.dumps([_plain(item) for item in (groups if by else rows)]))
    else:
        _show(rows, groups, by)
    return 0


def _plain(item: Row | RecipeGroup) -> dict[str, Any]:
    """For JSON."""
    if isinstance(item, Row):
        values = asdict(item)
        del values["folder"]
        return values
    return {
        "mean": item.mean,
        "scores": item.scores,
        "runs": [row.name for row in item.rows],
        "settings": item.settings,
    }


def _show(rows: Sequence[Row], groups: Sequence[RecipeGroup], by: str) -> None:
    """Print the table, and why runs have ended."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10**4  # a table is as wide as it needs
    if by:
        console.print(_group_table(groups, by, console.width))
        return
    console.print(_run_table(rows, console.width))
    for row in rows:
        if row.reason:
            console.print(f"{row.name} {row.state}: {row.reason}", soft_wrap=True)


def _run_table(rows: Sequence[Row], width: int) -> Table:
    """A line for each run, with the settings in which they differ as far as `width` characters reach."""
    keys = differing([row.settings for row in rows])
    columns: dict[str, list[Any]] = {
        "name": [row.name for row in rows],
        "model": [row.model for row in rows],
        "data": [row.data for row in rows],
        "mIoU %": [None if row.miou is None else percent(row.miou, 2) for row in rows],
        "steps": [row.steps for row in rows],
    }
    for key in keys:
        if key not in ALWAYS_SHOWN:
            columns[key] = [
                shown(row.settings[key]) if row.settings else None for row in rows
            ]
    columns["digest"] = [row.digest and row.digest[:12] for row in rows]
    columns["date"] = [row.date for row in rows]
    columns["state"] = [row.state for row in rows]
    own = [ALWAYS_SHOWN.get(key, key) for key in keys]
    wanted = [*own, "model", "data", "date", "digest"]
    return _table(columns, NEEDED, wanted, own, width)


def _group_table(groups: Sequence[RecipeGroup], by: str, width: int) -> Table:
    """A line for each recipe: mean and range over its runs."""
    keys = differing([group.settings for group in groups])
    columns: dict[str, list[Any]] = {
        key: [shown(group.settings[key]) for group in groups] for key in keys
    }
    figures = ("finished", "mean mIoU %", "lowest", "highest", "range")
    for title in (by, *figures):
        columns[title] = []
    for group in groups:
        scores, runs = group.scores, group.distinct
        columns[by].append(",".join(shown(row.settings[by]) for row in runs))
        columns["finished"].append(f"{len(scores)} of {len(runs)}")
        values: list[float | None] = [None] * 4
        if scores:
            low, high = min(scores), max(scores)
            values = [group.mean, low, high, high - low]
        for title, value in zip(figures[1:], values, strict=True):
            columns[title].append(value if value is None else percent(value, 2))
    return _table(columns, (by, *figures), keys, keys, width)


def _table(
    columns: dict[str, list[Any]],
    needed: Sequence[str],
    wanted: Sequence[str],
    settings: Sequence[str],
    width: int,
) -> Table:
    """A table of the needed columns and of those wanted, the first of them first, that fit; the first column folds."""
    texts = {
        title: ["-" if cell is None else str(cell) for cell in cells]
        for title, cells in columns.items()
    }
    widths = {
        title: 3 + max(map(cell_len, [title, *cells])) for title, cells in texts.items()
    }
    first = next(iter(texts))
    widths[first] = min(widths[first], max(24, width // 3))  # the rest folds
    chosen = set(needed)
    left = width - 1 - sum(widths[title] for title in needed)
    for title in wanted:
        is_full = len(chosen & {*settings}) >= SETTINGS_SHOWN and title in settings
        if title not in chosen and widths[title] <= left and not is_full:
            chosen.add(title)
            left -= widths[title]
    table = Table(caption_justify="left")
    titles = [title for title in texts if title in chosen]
    for title in titles:
        table.add_column(title, no_wrap=title != titles[0], overflow="fold")
    for cells in zip(*(texts[title] for title in titles), strict=True):
        table.add_row(*cells)
    if rest := [title for title in settings if title not in chosen]:
        table.caption = f"They also differ in: {', '.join(rest)}."
    return table
