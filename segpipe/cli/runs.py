"""`segpipe runs`: compares runs in one table, on the terminal, as JSON or as a page with their curves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from segpipe.errors import ConfigError
from segpipe.run.overview import (
    RecipeGroup,
    Row,
    find_runs,
    group_table,
    grouped,
    ordered,
    run_table,
    write_overview,
)
from segpipe.settings.config import FREE_KEYS, SETTINGS
from segpipe.settings.setting import nearest


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
        return 0
    if given["json"]:
        print(json.dumps([_plain(item) for item in (groups if by else rows)]))
        return 0
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10**4  # a table is as wide as it needs
    if by:
        console.print(group_table(groups, console.width))
        return 0
    console.print(run_table(rows, console.width))
    for row in rows:
        if row.reason:
            console.print(f"{row.name} {row.state}: {row.reason}", soft_wrap=True)
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
