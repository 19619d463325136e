"""`segpipe runs`: compares runs in one table, on the terminal, as JSON or as a page with their curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from segpipe.errors import ConfigError
from segpipe.files import write_atomically
from segpipe.run.overview import RecipeGroup, Row, differing, find_runs, grouped, ordered
from segpipe.run.overview_page import render_overview
from segpipe.settings.config import FREE_KEYS, SETTINGS
from segpipe.settings.setting import nearest, shown

SETTINGS_SHOWN = 6  # columns; the page and --json have all
STATE_SHOWN = 60  # characters; the page and failure.json of the run have all
ALWAYS_SHOWN = ("model.name", "data.name")


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    by = given["group"]
    if by and (by not in SETTINGS or by in FREE_KEYS):
        recipe = [key for key in SETTINGS if key not in FREE_KEYS]
        raise ConfigError(f"group = {by} is not a setting that decides what is trained.{nearest(by, recipe)}")
    rows = ordered(find_runs(Path(given["root"]), given["runs"]), given["sort"])
    groups = grouped(rows, by) if by else []
    if given["out"]:
        write_atomically(Path(given["out"]), render_overview(rows, groups, by).encode())
        print(f"written: {given['out']}")
        return 0
    if given["json"]:
        print(json.dumps([_plain(group) for group in groups] if by else [_plain(row) for row in rows]))
        return 0
    table = _group_table(groups, by) if by else _run_table(rows)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10**4  # a table is as wide as it needs
    console.print(table)
    return 0


def _plain(item: Row | RecipeGroup) -> dict[str, Any]:
    """For JSON."""
    if isinstance(item, Row):
        values = asdict(item)
        del values["folder"]
        return values
    names = [row.name for row in item.rows]
    return {"mean": item.mean, "scores": item.scores, "runs": names, "settings": item.settings}


def _run_table(rows: Sequence[Row]) -> Table:
    """A line for each run, with the settings in which they differ."""
    keys = [key for key in differing([row.settings for row in rows]) if key not in ALWAYS_SHOWN]
    table = _table("name", "model", "data", "mIoU %", "steps", *keys[:SETTINGS_SHOWN], "digest", "date", "state")
    for row in rows:
        settings = [shown(row.settings[key]) if row.settings else None for key in keys[:SETTINGS_SHOWN]]
        digest = row.digest and row.digest[:12]
        state = row.state if len(row.state) <= STATE_SHOWN else f"{row.state[: STATE_SHOWN - 3]}..."
        cells = (row.name, row.model, row.data, _percent(row.miou), row.steps, *settings, digest, row.date, state)
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    if len(keys) > SETTINGS_SHOWN:
        table.caption = f"They also differ in {', '.join(keys[SETTINGS_SHOWN:])}."
    return table


def _group_table(groups: Sequence[RecipeGroup], by: str) -> Table:
    """A line for each recipe: mean and range over its runs."""
    keys = differing([group.settings for group in groups])
    table = _table(*keys, by, "finished", "mean mIoU %", "lowest", "highest", "range")
    for group in groups:
        settings = [shown(group.settings[key]) for key in keys]
        values = ",".join(shown(row.settings[by]) for row in group.rows)
        figures = ["-"] * 4
        if group.mean is not None:
            low, high = min(group.scores), max(group.scores)
            figures = [f"{100 * number:.2f}" for number in (group.mean, low, high, high - low)]
        table.add_row(*settings, values, f"{len(group.scores)} of {len(group.rows)}", *figures)
    return table


def _table(*titles: str) -> Table:
    table = Table(caption_justify="left")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


def _percent(score: float | None) -> str | None:
    return None if score is None else f"{100 * score:.2f}"
