"""Terminal output of rank 0: a progress bar while a run trains, tables when it is done.

Names of runs and classes are shown as they are; rich would read brackets in them as markup.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_S = 15.0  # between progress lines in a log file


class TrainView:
    """Progress of a training run: a bar in a terminal, a line now and then in a log file."""

    def __init__(self, console: Console, *, name: str, done: int, total: int, enabled: bool) -> None:
        self._console, self._name, self._total, self._enabled = console, name, total, enabled
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
        )
        self._task = self._bar.add_task(name, total=total, completed=done, figures="")

    def __enter__(self) -> TrainView:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, done: int, figures: dict[str, str] | None = None) -> None:
        """Show that `done` updates are done; `figures` stay beside the bar until the next ones."""
        if figures is None:
            self._bar.update(self._task, completed=done)
            return
        text = "  ".join(f"{name} {value}" for name, value in figures.items())
        self._bar.update(self._task, completed=done, figures=text)
        now = time.monotonic()
        if self._enabled and not self._console.is_terminal and now - self._last_line > PLAIN_EVERY_S:
            self._last_line = now
            self.say(f"{self._name}  step {done}/{self._total}  {text}")

    def validating(self, done: int, total: int) -> None:
        """Show the progress of a validation in place of the figures."""
        self._bar.update(self._task, figures=f"validating {done}/{total}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def iou_table(summary: dict[str, Any], shares: Sequence[float]) -> Table:
    """Per-class IoU of a validation; `shares` are the classes' fractions of the labelled pixels."""
    table = Table(title="IoU per class", title_justify="left")
    for name in ("class", "IoU %", "", "pixels %"):
        table.add_column(name, justify="left" if name in ("class", "") else "right")
    for (name, iou), share in zip(summary["iou"].items(), shares, strict=True):
        if iou is None:
            table.add_row(Text(name), "absent", "not in the mean", f"{100 * share:.2f}")
        else:
            table.add_row(Text(name), f"{100 * iou:.1f}", "█" * round(20 * iou), f"{100 * share:.2f}")
    table.add_section()
    table.add_row("mean", f"{100 * summary['miou']:.2f}", "", "", style="bold")
    return table
