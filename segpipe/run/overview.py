"""Finished and unfinished runs, read from their folders: in which settings they differ, and groups of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from segpipe.errors import ConfigError, Interrupted
from segpipe.run.tracking import FILE_NAME, failure, read_metrics
from segpipe.settings.config import FREE_KEYS, flat, saved_config

DESCENDING = ("date", "miou", "steps")


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
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # of the recipe, by dotted key; without a readable file none


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
                f"root = {root} is not a folder. Set root to the folder that holds the runs."
            )
        return [
            read_row(folder, str(folder.relative_to(root))) for folder in _folders(root)
        ]
    found: dict[Path, Row] = {}
    for pattern in patterns:
        path = Path(pattern)
        anchor = Path(path.anchor or ".")
        tops = (
            [path]
            if path.is_dir()
            else sorted(
                anchor.glob(str(path.relative_to(anchor) if path.anchor else path))
            )
        )
        folders = [folder for top in tops if top.is_dir() for folder in _folders(top)]
        if not folders:
            raise ConfigError(
                f"runs = {pattern}: no run is there. Name run folders, or match them: 'runs=[runs/lr*]'."
            )
        found |= {
            folder: read_row(folder, str(folder))
            for folder in folders
            if folder not in found
        }
    return list(found.values())


def _folders(top: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(top.rglob("config.json")))


def read_row(folder: Path, name: str) -> Row:
    """The run in `folder`; a file that cannot be read is named in `state`."""
    config, result, faults = None, None, []
    try:
        config = saved_config(folder)
    except ConfigError:
        faults.append("config.json is damaged")
    try:
        result = _result(folder / "result.json")
    except (OSError, ValueError, TypeError, LookupError):
        faults.append("result.json is damaged")
    metrics = read_metrics(folder / FILE_NAME)
    miou, steps, digest = result or (None, metrics[-1]["step"] if metrics else 0, None)
    state = (
        "finished"
        if result
        else f"unfinished, step {steps} of {config.train.steps if config else None}"
    )
    code, reason = failure(folder)
    if reason:
        state = "interrupted" if code == Interrupted.exit_code else "failed"
    return Row(
        name,
        folder,
        model=config.model.name if config else None,
        data=config.data.name if config else None,
        miou=miou,
        steps=steps,
        digest=digest,
        date=_date(folder),
        state=faults[0] if faults else state,
        reason=reason,
        settings={
            key: value for key, value in flat(config).items() if key not in FREE_KEYS
        }
        if config
        else {},
    )


def _result(path: Path) -> tuple[float | None, int, str] | None:
    """mIoU, updates and digest; None if the run has not finished. Raises ValueError and others for a damaged file."""
    if not path.exists():
        return None
    found = json.loads(path.read_bytes())
    miou = None if found["miou"] is None else float(found["miou"])
    return miou, int(found["steps"]), str(found["ema_digest"])


def _date(folder: Path) -> str:
    """When a file of the run's progress last changed."""
    times = [
        path.stat().st_mtime
        for name in ("result.json", FILE_NAME, "config.json")
        if (path := folder / name).exists()
    ]
    return datetime.fromtimestamp(times[0]).strftime("%Y-%m-%d %H:%M")


def ordered(rows: Sequence[Row], column: str) -> list[Row]:
    """Rows sorted by a column, the newest, best or longest first; rows without a value come last."""
    known = [row for row in rows if getattr(row, column) is not None]
    known.sort(key=lambda row: getattr(row, column), reverse=column in DESCENDING)
    return known + [row for row in rows if getattr(row, column) is None]


def differing(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings in which recipes differ, in the order of the settings page."""
    known = [recipe for recipe in recipes if recipe]
    return [
        key
        for key in (known[0] if known else {})
        if len({_text(recipe.get(key)) for recipe in known}) > 1
    ]


def grouped(rows: Sequence[Row], by: str) -> list[RecipeGroup]:
    """Groups of the runs that differ in setting `by` alone, the best mean first."""
    members: dict[str, list[Row]] = {}
    for row in rows:
        if row.settings:
            rest = {key: value for key, value in row.settings.items() if key != by}
            members.setdefault(_text(rest), []).append(row)
    groups = [
        RecipeGroup(
            {key: value for key, value in found[0].settings.items() if key != by},
            sorted(found, key=lambda row: _text(row.settings[by])),
            by,
        )
        for found in members.values()
    ]
    return sorted(groups, key=lambda group: (group.mean is None, -(group.mean or 0.0)))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
