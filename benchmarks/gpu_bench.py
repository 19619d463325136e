"""Where and how large the checks of a GPU are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch


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

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    def too_late(self, seconds: float) -> bool:
        """Whether less than `seconds` are left; a CPU, where the checks are only tried out, has all the time."""
        return self.device.type == "cuda" and self.seconds_left < seconds
