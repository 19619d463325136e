"""Terminal output: progress bars, and tables of results.

Names of runs and classes are printed verbatim: rich would read brackets in them as markup.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from segpipe.settings.setting import Values

if TYPE_CHECKING:
    from segpipe.data.catalog import ClassTable

WIDE = 10_000  # outside a terminal, tables take the width that they need
LOOKS: dict[str, Any] = {
    "highlight": False,
    "soft_wrap": True,
    "emoji": False,
    "markup": False,
}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader of the output, such as `| head`, is gone: training continues silently."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


CONSOLE = _Console(width=None if sys.stdout.isatty() else WIDE, **LOOKS)
ERRORS = _Console(stderr=True, width=None if sys.stderr.isatty() else WIDE, **LOOKS)
PLAIN_EVERY_S = 15.0  # between progress lines in a log file
COLUMNS = {"precision": "precision", "recall": "recall", "f1": "F1"}
MOST_ROWS = 20  # in a table of sequences
VERDICTS = {
    "passed": "green",
    "equal": "green",
    "failed": "bold red",
    "differs": "red",
    "noted": "yellow",
    "not checked": "dim",
    "not recorded": "dim",
}


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A function that shows `done`, `total` and `what` in a progress bar, if stderr is a terminal."""
    with Progress(
        console=ERRORS, transient=True, disable=not ERRORS.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)

        def show(done: int, total: int | None = None, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


def print_problems(found: Sequence[str], lines: int) -> None:
    """Print the first `lines` problems (0: all) and the number of the others."""
    for problem in found[: lines or None]:
        CONSOLE.print(problem)
    if len(found) > lines > 0:
        CONSOLE.print(f"... and {len(found) - lines} more; lines=0 prints all")


class TrainView:
    """Progress of a training run: a bar in a terminal, a line every 15 s in a log file."""

    def __init__(
        self, console: Console, *, name: str, done: int, total: int, enabled: bool
    ) -> None:
        self._console, self._enabled = console, enabled
        self._name, self._total = name, total
        self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not enabled or not console.is_terminal,
            speed_estimate_period=3600,  # an update may take longer than rich's 30 s
        )
        self._task = self._bar.add_task(name, total=total, completed=done, figures="")

    def __enter__(self) -> TrainView:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, done: int, figures: dict[str, str] | None = None) -> None:
        """Show that `done` updates are done; `figures` stay next to the bar until the next ones."""
        self._bar.update(self._task, completed=done)
        if figures is None:
            return
        text = "  ".join(f"{name} {value}" for name, value in figures.items())
        self._bar.update(self._task, figures=text)
        now = time.monotonic()
        if self._console.is_terminal or now - self._last_line <= PLAIN_EVERY_S:
            return
        self._last_line = now
        self.say(f"{self._name}  step {done}/{self._total}  {text}")

    def validating(self, done: int, total: int) -> None:
        """Show the progress of a validation in place of the figures."""
        self._bar.update(self._task, figures=f"validating {done}/{total}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._console.print(text)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    title: str | None = None,
    *,
    numbers: bool = False,
) -> Table:
    """A table of verbatim text; with `numbers`, all columns but the first are right-aligned."""
    made = Table(title=title, title_justify="left", caption_justify="left")
    for place, column in enumerate(columns):
        justify: Any = "right" if numbers and place else "left"
        made.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*(x if isinstance(x, Text) else Text(str(x)) for x in row))
    return made


def verdict(word: str) -> Text:
    """A verdict in its color."""
    return Text(word, VERDICTS[word])


def iou_table(summary: Values, pixels: Sequence[float]) -> Table:
    """Table of the IoU per class; `pixels`: labelled pixels of each class.

    Adds a column for each key of `COLUMNS` and for `interval_95` if `summary` has it.
    """
    interval = summary.get("interval_95") or {}
    keys = [key for key in COLUMNS if key in summary]
    ranges = ["95 % range"] if interval.get("miou") else []  # a single image has none
    columns = ["class", "IoU", *ranges, *(COLUMNS[key] for key in keys), "pixels"]
    rows = [
        [
            name,
            "absent" if iou is None else percent(iou),
            *(percent_range(interval["iou"][name]) for _ in ranges),
            *(percent(summary[key][name]) for key in keys),
            percent(number / max(sum(pixels), 1), 2),
        ]
        for (name, iou), number in zip(summary["iou"].items(), pixels, strict=True)
    ]
    made = table(columns, rows, "IoU per class, in %", numbers=True)
    made.add_section()
    mean = [percent(summary["mean"][key]) for key in keys]
    spread = [percent_range(interval["miou"]) for _ in ranges]
    made.add_row("mean", percent(summary["miou"], 2), *spread, *mean)
    return made


def share_table(classes: ClassTable, pixels: Values) -> Table:
    """Table of class shares in the labelled pixels; `pixels` by split, in class order."""
    rows = []
    for train, name in enumerate(classes.names):
        color = "rgb({},{},{})".format(*classes.palette[train])
        label = Text.assemble(("■", color), f" {name}")
        shares = [
            percent(count[train] / count.sum(), 2)
            if count[train]
            else Text("absent", "red")
            for count in pixels.values()
        ]
        rows.append([train, label, *shares])
    titles = [f"{split}, % of pixels" for split in pixels]
    return table(["id", "class", *titles], rows, f"classes of {classes.name}")


def sequence_table(sequences: Mapping[str, Values]) -> Table:
    """Table of the mIoU by sequence, lowest first, at most 20 sequences."""
    seen = {None: "unknown", True: "yes", False: "no"}
    rows = [
        [name, found["images"], percent(found["miou"]), seen[found["in_training"]]]
        for name, found in lowest_first(sequences)
    ]
    made = table(
        ("sequence", "images", "mIoU", "in training"),
        rows[:MOST_ROWS],
        "mIoU by sequence, in %",
        numbers=True,
    )
    if len(rows) > MOST_ROWS:
        made.caption = f"and {len(rows) - MOST_ROWS} more with a higher mIoU"
    return made


def lowest_first(sequences: Mapping[str, Values]) -> list[tuple[str, Values]]:
    """Sequences by rising mIoU; those without labelled pixels come last."""

    def place(item: tuple[str, Values]) -> tuple[float, str]:
        score = item[1]["miou"]
        return math.inf if score is None or math.isnan(score) else score, item[0]

    return sorted(sequences.items(), key=place)


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage without a sign; n/a for None or NaN."""
    if value is None or math.isnan(value):
        return "n/a"
    return f"{100 * value:.{digits}f}"


def percent_range(pair: Sequence[float] | None) -> str:
    """An interval of fractions in percent, such as 61.2-64.0; empty if there is none."""
    return f"{percent(pair[0])}-{percent(pair[1])}" if pair else ""
