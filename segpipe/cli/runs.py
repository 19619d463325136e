"""`segpipe runs`: compares runs in one table, on the terminal, as JSON or as a page with their curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from segpipe.errors import ConfigError
from segpipe.files import write_atomically
from segpipe.run.overview import (
    RecipeGroup,
    Row,
    differing,
    find_runs,
    grouped,
    ordered,
    render_overview,
)
from segpipe.settings.config import FREE_KEYS, SETTINGS
from segpipe.settings.setting import nearest, shown

SETTINGS_SHOWN = 6  # columns; the page and --json have all
NEEDED = ("name", "mIoU %", "steps", "state")  # at every width
ALWAYS_SHOWN = ("model.name", "data.name")
FIGURES = ("mean mIoU %", "lowest", "highest", "range")


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    by = given["group"]
    if by and (by not in SETTINGS or by in FREE_KEYS):
        recipe = [key for key in SETTINGS if key not in FREE_KEYS]
        raise ConfigError(
            f"group = {by} is not a setting that decides what is trained.{nearest(by, recipe)}"
        )
    rows = ordered(find_runs(Path(given["root"]), given["runs"]), given["sort"])
    groups = grouped(rows, by) if by else []
    if given["out"]:
        write_atomically(Path(given["out"]), render_overview(rows, groups, by).encode())
        print(f"written: {given['out']}")
        return 0
    if given["json"]:
        print(
            json.dumps(
                [_plain(group) for group in groups]
                if by
                else [_plain(row) for row in rows]
            )
        )
        return 0
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10**4  # a table is as wide as it needs
    console.print(
        _group_table(groups, by, console.width)
        if by
        else _run_table(rows, console.width)
    )
    for row in () if by else rows:
        if row.reason:
            console.print(f"{row.name} {row.state}: {row.reason}", soft_wrap=True)
    return 0


def _plain(item: Row | RecipeGroup) -> dict[str, Any]:
    """For JSON."""
    if isinstance(item, Row):
        values = asdict(item)
        del values["folder"]
        return values
    names = [row.name for row in item.rows]
    return {
        "mean": item.mean,
        "scores": item.scores,
        "runs": names,
        "settings": item.settings,
    }


def _run_table(rows: Sequence[Row], width: int) -> Table:
    """A line for each run, with the settings in which they differ as far as `width` characters reach."""
    keys = differing([row.settings for row in rows])
    settings = {
        key: [shown(row.settings[key]) if row.settings else None for row in rows]
        for key in keys
    }
    columns: dict[str, list[Any]] = {
        "name": [row.name for row in rows],
        "model": [row.model for row in rows],
        "data": [row.data for row in rows],
        "mIoU %": [_percent(row.miou) for row in rows],
        "steps": [row.steps for row in rows],
        **{key: values for key, values in settings.items() if key not in ALWAYS_SHOWN},
        "digest": [row.digest and row.digest[:12] for row in rows],
        "date": [row.date for row in rows],
        "state": [row.state for row in rows],
    }
    own = [key if key not in ALWAYS_SHOWN else key.partition(".")[0] for key in keys]
    return _table(
        columns, NEEDED, [*own, "model", "data", "date", "digest"], own, width
    )


def _group_table(groups: Sequence[RecipeGroup], by: str, width: int) -> Table:
    """A line for each recipe: mean and range over its runs."""
    keys = differing([group.settings for group in groups])
    figures = [_figures(group.scores) for group in groups]
    columns: dict[str, list[Any]] = {
        **{key: [shown(group.settings[key]) for group in groups] for key in keys},
        by: [
            ",".join(shown(row.settings[by]) for row in group.distinct)
            for group in groups
        ],
        "finished": [
            f"{len(group.scores)} of {len(group.distinct)}" for group in groups
        ],
        **{
            title: [found[place] for found in figures]
            for place, title in enumerate(FIGURES)
        },
    }
    return _table(columns, (by, "finished", *FIGURES), keys, keys, width)


def _figures(scores: Sequence[float]) -> list[str]:
    if not scores:
        return ["-"] * len(FIGURES)
    low, high = min(scores), max(scores)
    return [f"{100 * number:.2f}" for number in (fmean(scores), low, high, high - low)]


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
    chosen, left = set(needed), width - 1 - sum(widths[title] for title in needed)
    for title in wanted:
        fits = widths[title] <= left and (
            title not in settings or len(chosen & {*settings}) < SETTINGS_SHOWN
        )
        if title not in chosen and fits:
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


def _percent(score: float | None) -> str | None:
    return None if score is None else f"{100 * score:.2f}"
