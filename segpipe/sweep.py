"""Several runs from one command, each in processes of its own, and what they came to."""

from __future__ import annotations

import json
from statistics import fmean

from rich.console import Console
from rich.table import Table

from segpipe.config import Config
from segpipe.launch import launch


class Sweep:
    """Trains the jobs of a --multirun one after another and keeps their results."""

    def __init__(self) -> None:
        self._outcomes: list[tuple[str, int, float | None]] = []

    def job(self, config: Config) -> None:
        """Train one job; a failure is kept for the end, so that one bad job does not lose the others."""
        code = launch(config, isolated=True)
        path = config.run_dir / "result.json"
        score = json.loads(path.read_text())["miou"] if code == 0 and path.is_file() else None
        self._outcomes.append((str(config.run_dir), code, score))

    def finish(self) -> int:
        """Print a table of all runs with mean and range; returns the first exit code that is not 0."""
        if not self._outcomes:
            return 0
        table = Table("run", "exit code", "mIoU %", title="sweep", title_justify="left")
        for name, code, score in self._outcomes:
            table.add_row(name, str(code), f"{100 * score:.2f}" if score is not None else "-")
        scores = [100 * score for _, _, score in self._outcomes if score is not None]
        if len(scores) > 1:
            table.add_section()
            table.add_row("mean, range", "", f"{fmean(scores):.2f}, {min(scores):.2f} to {max(scores):.2f}")
        Console().print(table)
        return next((code for _, code, _ in self._outcomes if code), 0)
