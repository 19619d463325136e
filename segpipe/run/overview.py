"""Reads runs from their folders and compares them: tables, groups that repeat a recipe, and a page with curves."""

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from glob import escape, glob
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import quote

from rich.table import Table

from segpipe.errors import CheckpointError, ConfigError, Interrupted, first_line
from segpipe.files import read_json
from segpipe.ledger.rows import INPUTS
from segpipe.run.console import CONSOLE, percent, table
from segpipe.run.lock import in_use
from segpipe.run.pages import COLORS, chart, points_of, write_page
from segpipe.run.tracking import FILE_NAME, failure, read_metrics
from segpipe.settings.config import deciding, flat, saved_config
from segpipe.settings.setting import Values, shown


@dataclass(frozen=True)
class Row:
    """One run; values are None if not known yet or not readable."""

    name: str  # folder below root
    folder: Path
    model: str | None = None
    data: str | None = None
    miou: float | None = None
    steps: int = 0
    digest: str = ""  # of the averaged weights
    date: str = ""  # last change, local time
    seconds: float | None = None  # of training
    iou: dict[str, float | None] = field(default_factory=dict)  # by class
    state: str = "finished"
    reason: str = ""  # why the last session failed or stopped, on one line
    # Of the recipe, by dotted key; empty if config.json is not readable.
    settings: Values = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeGroup:
    """Runs of one recipe, one for each value of the setting `by`."""

    settings: Values
    rows: list[Row]
    by: str = ""

    @property
    def scores(self) -> list[float]:
        """mIoU of the finished runs."""
        return [row.miou for row in self.rows if row.miou is not None]

    @property
    def range(self) -> tuple[float | None, float | None]:
        """Lowest and highest mIoU of the finished runs."""
        return min(self.scores, default=None), max(self.scores, default=None)

    @property
    def mean(self) -> float | None:
        """Mean mIoU of the finished runs; None without one."""
        return fmean(self.scores) if self.scores else None


def find_runs(root: Path, patterns: Sequence[str] = ()) -> list[Row]:
    """The runs below `root`, or with patterns the runs in or below the folders that match; best first.

    Raises ConfigError if there are none.
    """
    folders: dict[Path, str] = {}
    for pattern in patterns or [escape(str(root))]:
        tops = map(Path, glob(pattern))
        found = [file.parent for top in tops for file in top.rglob("config.json")]
        if not found:
            raise ConfigError(
                f"{'runs' if patterns else 'root'} = {pattern}: no runs found. Name the folder that contains runs with "
                f"root=FOLDER, or match run folders: 'runs=[runs/lr*]'."
            )
        for folder in sorted(found):
            folders[folder] = str(folder if patterns else folder.relative_to(root))
    return best_first(read_row(folder, name) for folder, name in folders.items())


def read_row(folder: Path, name: str) -> Row:
    """The run in `folder`; `state` names a file that cannot be read."""
    newest = max(path.stat().st_mtime for path in folder.glob("*.json*"))
    row = Row(name, folder, date=f"{datetime.fromtimestamp(newest):%Y-%m-%d %H:%M}")
    try:
        config = saved_config(folder)
    except ConfigError as error:  # or of a later version
        return replace(row, state="config.json is damaged", reason=first_line(error))
    root, data = config.data.root, ""
    with suppress(OSError, ValueError, TypeError, LookupError):
        recorded = read_json(folder / INPUTS)["data"]
        data = recorded["sha256"][:8] * recorded["hashed"]
    found: Values = {
        "model": config.model.name,
        "data": config.data.name,
        # Of the root only its name, if it has one: another machine may keep it elsewhere.
        "settings": {"data.root": Path(root).name or root, "data.sha256": data}
        | deciding(flat(config))
        | {"model.weights_sha256": config.model.weights_sha256[:12]},
    }
    try:
        result = read_json(folder / "result.json")
        score = result["miou"]
        if score is not None and not 0 <= score <= 1:  # NaN has no place in an order
            raise ValueError
        if result["steps"] < config.train.steps and not result.get("stopped_early"):
            raise FileNotFoundError  # result from before the run was extended
        found |= {
            "miou": score,
            "steps": int(result["steps"]),
            "digest": str(result["ema_digest"]),
            "seconds": result.get("train_seconds"),
            "iou": dict(result.get("iou", {})),
        }
    except FileNotFoundError:
        metrics = read_metrics(folder / FILE_NAME)
        steps = metrics[-1]["step"] if metrics else 0
        word = "running" if in_use(folder) else "unfinished"
        state = f"{word}, step {steps} of {config.train.steps}"
        found |= {"steps": steps, "state": state}
    except (OSError, ValueError, TypeError, LookupError):
        found["state"] = "result.json is damaged"
    code, reason, *_ = failure(folder)
    # A finished run stays finished when a resume is refused.
    if reason and not ("digest" in found and code == CheckpointError.exit_code):
        state = "interrupted" if code == Interrupted.exit_code else "failed"
        found |= {"state": state, "reason": reason}
    return replace(row, **found)


def best_first(rows: Iterable[Row]) -> list[Row]:
    """Rows by falling mIoU; those without a score last."""
    return sorted(rows, key=lambda row: (row.miou is None, -(row.miou or 0.0)))


def differing(recipes: Sequence[Values]) -> list[str]:
    """Settings in which recipes differ, in the order of the settings page."""
    known = [recipe for recipe in recipes if recipe] or [{}]
    return [
        key for key in known[0] if len({_text(each.get(key)) for each in known}) > 1
    ]


def grouped(rows: Sequence[Row], by: str = "") -> list[RecipeGroup]:
    """Groups of runs that differ only in setting `by`, best mean first; without `by`, one group for each run.

    Runs are given best first. Of several with the same value of `by`, the first counts: a repeated run is not a second
    sample.
    """
    if not by:
        return [RecipeGroup(row.settings, [row]) for row in rows]
    groups: dict[str, RecipeGroup] = {}
    for row in rows:
        if row.settings:
            rest = {key: value for key, value in row.settings.items() if key != by}
            # One data set may have several paths; what is held out decides which of its files are read.
            unknown = "data.sha256" if by == "data.hold_out" else "data.root"
            same = rest | {unknown: ""} if rest["data.sha256"] else rest
            group = groups.setdefault(_text(same), RecipeGroup(rest, [], by))
            if all(row.settings[by] != other.settings[by] for other in group.rows):
                group.rows.append(row)
    for group in groups.values():
        group.rows.sort(key=lambda row: _text(row.settings[by]))
    return sorted(groups.values(), key=lambda group: -(group.mean or -1.0))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def print_runs(rows: Sequence[Row]) -> None:
    """Print a line for each run, and why runs ended early."""
    CONSOLE.print(run_table(grouped(rows)))
    for row in rows:
        if row.reason:
            CONSOLE.print(f"{row.name} {row.state}: {row.reason}")


def run_table(groups: Sequence[RecipeGroup]) -> Table:
    """Table of runs, or of recipes with mean and range over their runs, and the settings in which they differ."""
    keys = differing([group.settings for group in groups])
    # As many as the terminal has room for; the page and --json show all.
    fitting = max(0, min(6, CONSOLE.width // 15 - 4))
    settings, rest = keys[:fitting], keys[fitting:]
    by = groups[0].by if groups else ""
    columns = ["name", "mIoU %", "steps", "state", *settings, "date", "digest"]
    if by:
        columns = [by, "mean mIoU %", "lowest", "highest", "finished", *settings]
    lines = []
    for group in groups:
        known, row = group.settings, group.rows[0]
        cells = [shown(known[key]) if known else "-" for key in settings]
        score = percent(group.mean, 2)
        line = [
            row.name,
            score,
            row.steps,
            row.state,
            *cells,
            row.date,
            row.digest[:12],
        ]
        if by:
            values = ",".join(shown(each.settings[by]) for each in group.rows)
            ends = [percent(value, 2) for value in group.range]
            done = f"{len(group.scores)} of {len(group.rows)}"
            line = [values, score, *ends, done, *cells]
        lines.append(line)
    made = table(columns, lines)
    for column in made.columns:
        column.no_wrap = column.header in columns[1:3]
    if rest:
        made.caption = f"They also differ in: {', '.join(rest)}."
    return made


def write_overview(path: Path, groups: Sequence[RecipeGroup]) -> Path:
    """Write the page for runs, or for groups of runs that differ in only one setting: a table and their curves."""
    rows = [row for group in groups for row in group.rows]
    recipes = [group.settings for group in groups]
    keys = differing(recipes)
    shared = next(filter(None, recipes), {})
    histories = [
        (read_metrics(row.folder / FILE_NAME), color)
        for group, color in zip(groups, COLORS, strict=False)
        for row in group.rows
    ]
    charts = [
        chart(
            title,
            {
                f"_{place}": points_of(history, kind, key)
                for place, (history, _) in enumerate(histories)
            },
            marked=key == "miou",
            colors=[color for _, color in histories],
        )
        for kind, key, title in (
            ("validation", "miou", "Validation mIoU, %"),
            ("train", "loss", "Training loss"),
        )
    ]
    classes = dict.fromkeys(name for row in rows for name in row.iou)
    links = {}
    for row in rows:
        report = row.folder / "report.html"
        if report.exists():
            link = os.path.relpath(report.resolve(), path.resolve().parent)
            links[row.folder] = quote(link)
    return write_page(
        "overview.html.j2",
        path,
        classes=list(classes),
        links=links,
        number=len(rows),
        by=groups[0].by if groups else "",
        keys=keys,
        groups=groups,
        colors=COLORS,
        charts=list(filter(None, charts)),
        same={key: value for key, value in shared.items() if key not in keys},
    )
