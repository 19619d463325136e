"""Several runs from one command, each in processes of its own, and what they came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from segpipe.compose import resolve
from segpipe.config import Config
from segpipe.errors import ConfigError, Interrupted, SegpipeError
from segpipe.launch import launch


class Sweep:
    """Trains the jobs of a --multirun one after another and keeps their results."""

    def __init__(self) -> None:
        self._outcomes: list[tuple[str, int, float | None]] = []
        self._folders: set[Path] = set()
        self._interrupted = False

    @property
    def started(self) -> bool:
        """Whether there was a job to train."""
        return bool(self._outcomes)

    def job(self, composed: DictConfig) -> None:
        """Train one job; a failure is kept for the end, so that one bad job does not lose the others.

        After Ctrl-C no further job starts.
        """
        if self._interrupted:
            return
        try:
            config = resolve(composed)
            self._check_own_folder(config)
        except SegpipeError as error:
            print(error, file=sys.stderr)
            self._outcomes.append((str(OmegaConf.select(composed, "run.name")), error.exit_code, None))
            return
        code = launch(config, isolated=True)
        self._interrupted = code == Interrupted.exit_code
        path = config.run_dir / "result.json"
        score = json.loads(path.read_text())["miou"] if code == 0 and path.is_file() else None
        self._outcomes.append((str(config.run_dir), code, score))

    def _check_own_folder(self, config: Config) -> None:
        """Two jobs of one folder: the second would replace or resume the first."""
        if config.run_dir in self._folders:
            raise ConfigError(
                f"run.name = {config.run.name} is that of another job of this sweep too. Put what is swept into it: "
                f"'run.name=NAME-${{optim.lr}}'."
            )
        self._folders.add(config.run_dir)

    def finish(self) -> int:
        """Print a table of all runs with mean and range; returns the first exit code that is not 0."""
        if not self._outcomes:
            return 0
        if self._interrupted:
            print("the sweep was interrupted; jobs that are not in the table did not start.", file=sys.stderr)
        table = Table("run", "exit code", "mIoU %", title="sweep", title_justify="left")
        for name, code, score in self._outcomes:
            table.add_row(name, str(code), f"{100 * score:.2f}" if score is not None else "-")
        scores = [100 * score for _, _, score in self._outcomes if score is not None]
        if len(scores) > 1:
            table.add_section()
            table.add_row("mean, range", "", f"{fmean(scores):.2f}, {min(scores):.2f} to {max(scores):.2f}")
        Console().print(table)
        return next((code for _, code, _ in self._outcomes if code), 0)
