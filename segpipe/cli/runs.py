"""`segpipe runs`: a table of the runs in a folder, read from their config.json, result.json and metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from segpipe.errors import ConfigError
from segpipe.run.tracking import FILE_NAME, read_metrics

DESCENDING = ("date", "miou", "steps")
PIPE_WIDTH = 200  # characters, so that nothing is cut off in a file or for grep


@dataclass(frozen=True)
class Row:
    """One run; None if it is not known yet or cannot be read."""

    name: str  # folder below root
    model: str | None = None
    data: str | None = None
    miou: float | None = None
    steps: int | None = None
    digest: str | None = None  # of the averaged weights
    date: str | None = None  # last change, local time
    state: str = "finished"


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    rows = ordered(list(find_runs(Path(given["root"]))), given["sort"])
    if given["json"]:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    table = Table()
    for title in ("name", "model", "data", "mIoU %", "steps", "digest", "date", "state"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        miou = None if row.miou is None else f"{100 * row.miou:.2f}"
        cells = (row.name, row.model, row.data, miou, row.steps, row.digest and row.digest[:12], row.date, row.state)
        table.add_row(*("-" if cell is None else str(cell) for cell in cells))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)
    return 0


def find_runs(root: Path) -> Iterator[Row]:
    """All runs below `root`. Raises ConfigError if it is not a folder."""
    if not root.is_dir():
        raise ConfigError(f"root = {root} is not a folder. Set root to the folder that holds the runs.")
    for path in sorted(root.rglob("config.json")):
        yield read_row(path.parent, str(path.parent.relative_to(root)))


def read_row(folder: Path, name: str) -> Row:
    """The run in `folder`; a file that cannot be read is named in `state`."""
    config, config_fault = _read(folder / "config.json", {"model.name": str, "data.name": str, "train.steps": int})
    result, result_fault = _read(folder / "result.json", {"miou": float | None, "steps": int, "ema_digest": str})
    metrics = read_metrics(folder / FILE_NAME)
    steps = result.get("steps", metrics[-1]["step"] if metrics else 0)
    state = "finished" if result else f"unfinished, step {steps} of {config.get('train.steps')}"
    return Row(
        name,
        model=config.get("model.name"),
        data=config.get("data.name"),
        miou=result.get("miou"),
        steps=steps,
        digest=result.get("ema_digest"),
        date=_date(folder),
        state=config_fault or result_fault or state,
    )


def _read(path: Path, kinds: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Values of a JSON file by dotted key, and what is wrong with it; no values if it is damaged or does not exist."""
    if not path.exists():
        return {}, ""
    try:
        content = json.loads(path.read_bytes())
        found = {key: reduce(getitem, key.split("."), content) for key in kinds}
    except (OSError, ValueError, TypeError, LookupError):
        return {}, f"{path.name} is damaged"
    fits = all(isinstance(found[key], kind) for key, kind in kinds.items())
    return (found, "") if fits else ({}, f"{path.name} is damaged")


def _date(folder: Path) -> str:
    """When a file of the run's progress last changed."""
    times = [
        path.stat().st_mtime for name in ("result.json", FILE_NAME, "config.json") if (path := folder / name).exists()
    ]
    return datetime.fromtimestamp(times[0]).strftime("%Y-%m-%d %H:%M")


def ordered(rows: list[Row], column: str) -> list[Row]:
    """Rows sorted by a column, the newest, best or longest first; rows without a value come last."""
    known = [row for row in rows if getattr(row, column) is not None]
    known.sort(key=lambda row: getattr(row, column), reverse=column in DESCENDING)
    return known + [row for row in rows if getattr(row, column) is None]
