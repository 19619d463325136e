"""Where and how large the checks of a GPU are, and the file of their rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LEFT_OUT = "left out"  # the figure of a check that was not made, or not to its end; it says why
NO_TIME = "no time"
UNFINISHED = "unfinished"  # verdict of a row that a later one of its check replaces, if the call lives to write it


class GoalMissed(AssertionError):
    """A figure is worse than its goal, which breaks no promise."""


@dataclass(frozen=True)
class Bench:
    """Where and how large a check of a GPU is: sizes in pixels, `deadline` in seconds of time.monotonic."""

    device: torch.device
    deadline: float
    size: int = 1024
    batch: int = 12
    updates: int = 20
    camvid: Path | None = None
    folder: Path = Path("runs")
    # Writes what a check has found so far: a call that is killed leaves it.
    keep: Callable[[dict[str, Any]], None] = lambda figures: None

    @property
    def cuda(self) -> bool:
        """Whether this is a GPU; a CPU is where the checks are only tried out."""
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    def too_late(self, seconds: float) -> bool:
        """Whether less than `seconds` are left; a CPU has all the time."""
        return self.cuda and self.seconds_left < seconds


def append(rows: Path, row: dict[str, Any]) -> None:
    """Add a row to the file, a line of JSON, and see it on the disk."""
    rows.parent.mkdir(parents=True, exist_ok=True)
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def latest(rows: Path) -> dict[str, dict[str, Any]]:
    """The last row of every check, by its name. A line that was cut short is passed over."""
    found: dict[str, dict[str, Any]] = {}
    for line in rows.read_text().splitlines() if rows.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["check"]] = row
    return found
