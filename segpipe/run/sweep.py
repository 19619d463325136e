"""The jobs of a --multirun: named, checked together before the first starts, trained one after another, and listed."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from segpipe.errors import ConfigError, Interrupted, NumericsError, SegpipeError
from segpipe.files import sha256_of
from segpipe.run.folder import finished
from segpipe.run.overview import group_table, grouped, read_row
from segpipe.run.tracking import failure
from segpipe.settings.config import Config, to_mapping

REFUSALS_SHOWN = 8
# Characters in the name of a job; a longer text ends with a hash of the whole.
SHORT_VALUE = 24
SHORT_SUFFIX = 120

# Runs that differ in nothing else repeat one recipe.
REPEATS = ("seed", "data.hold_out")


@dataclass
class SweepJob:
    """One job of a sweep, and what came of it."""

    config: Config
    swept: str  # its swept overrides, such as "optim.lr=0.1 seed=2"
    code: int | None = None  # exit code; None: not started
    result: dict[str, Any] | None = None  # content of result.json
    reason: str = ""  # why it failed, or why it did not train

    @property
    def miou(self) -> float | None:
        """The objective, higher is better; None if the job failed or no pixel is labelled."""
        return None if self.result is None else self.result["miou"]


class Sweep:
    """Trains batches of jobs; a grid is one batch, a search such as Optuna's asks for one after another.

    train: trains one job in processes of its own, so that jobs share no state; returns the exit code, raises
    SegpipeError if it is refused. check: checks settings and folder of a job. examine: checks its data and all else.
    """

    def __init__(
        self,
        train: Callable[[Config], int],
        check: Callable[[Config], object],
        examine: Callable[[Config], object],
    ) -> None:
        self._train = train
        self._check = check
        self._examine = examine
        self._jobs: dict[Path, SweepJob] = {}
        self._examined: set[str] = set()
        self.interrupted = False

    def batch(self, jobs: Sequence[SweepJob], *, searched: bool) -> None:
        """Check all jobs, then train them. A failed job does not stop the following ones, but Ctrl-C does.

        `searched`: chosen by a search, which may propose a job twice; its first result then counts for both.
        Raises ConfigError before the first job starts, naming every job that could not.
        """
        new: dict[Path, SweepJob] = {}
        for job in jobs:
            twin = self._jobs.get(job.config.run_dir) or new.get(job.config.run_dir)
            if twin and not searched:
                raise ConfigError(
                    f"run.name = {job.config.run.name} is the name of two jobs. Give each value once, or include the "
                    f"swept settings: 'run.name=NAME-${{optim.lr}}'."
                )
            new.setdefault(job.config.run_dir, twin or job)
        self._check_all([job for job in new.values() if job.code is None])
        self._jobs |= new
        for job in new.values():
            if not self.interrupted:
                self._run(job)
        for job in jobs:
            twin = self._jobs[job.config.run_dir]
            job.code, job.result, job.reason = twin.code, twin.result, twin.reason

    def _check_all(self, jobs: Sequence[SweepJob]) -> None:
        refused: dict[str, list[str]] = {}
        codes = []
        for job in jobs:
            try:
                self._check(job.config)
                _recall(job)
                self._examine_once(job.config)
            except SegpipeError as error:
                named = refused.setdefault(str(error), [])
                named.append(job.swept or job.config.run.name)
                codes.append(error.exit_code)
        if refused:
            refusal = ConfigError(_refusals(refused, len(jobs)))
            refusal.exit_code = codes[0]
            raise refusal

    def _examine_once(self, config: Config) -> None:
        """Jobs often share data and augmentation, and reading a large data set takes minutes."""
        values = to_mapping(config)
        names = ("data", "model", "loss", "augment", "track", "export")
        parts = [*map(values.get, names), config.optim.lr_scale, config.compute.mode]
        key = json.dumps(parts, sort_keys=True)
        if key not in self._examined:
            self._examine(config)
            self._examined.add(key)

    def _run(self, job: SweepJob) -> None:
        if job.code is not None:
            return
        number = list(self._jobs.values()).index(job) + 1
        print(f"job {number} of {len(self._jobs)}: {job.config.run_dir}", flush=True)
        try:
            job.code = self._train(job.config)
        except SegpipeError as error:
            print(error, file=sys.stderr)
            job.code = error.exit_code
            job.reason = " ".join(str(error).split())
        except KeyboardInterrupt:
            job.code = Interrupted.exit_code
        if job.code == Interrupted.exit_code:
            self.interrupted = True
            job.reason = "interrupted"
        elif job.code:
            job.reason = (
                job.reason or failure(job.config.run_dir)[1] or "see the messages above"
            )
        else:
            job.result = json.loads((job.config.run_dir / "result.json").read_bytes())

    def finish(self) -> int:
        """Print a table of all jobs, the best one, and means over seeds; returns the first exit code that is not 0."""
        jobs = list(self._jobs.values())
        if not jobs:
            return 0
        console = Console(markup=False, highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = 10**4  # a table is as wide as it needs
        console.print(_table(jobs))
        for job in jobs:
            if job.reason:
                console.print(f"{job.config.run.name}: {job.reason}", soft_wrap=True)
        scored = [job for job in jobs if job.miou is not None]
        if len(scored) > 1:
            best = max(scored, key=lambda job: job.miou or 0.0)
            console.print(
                f"best: {best.config.run_dir}  mIoU {100 * (best.miou or 0.0):.2f} %  {best.swept}"
            )
        rows = [read_row(job.config.run_dir, job.config.run.name) for job in scored]
        for by in REPEATS:
            groups = [group for group in grouped(rows, by) if len(group.scores) > 1]
            if groups:
                console.print(group_table(groups, console.width))
        if self.interrupted:
            print(
                "the sweep was interrupted. The same command with run.exists=resume continues it.",
                file=sys.stderr,
            )
        return next((job.code for job in jobs if job.code), 0)


def _recall(job: SweepJob) -> None:
    """Take over what an earlier sweep left under run.exists=resume: a result, or a loss that was not finite.

    The same job would compute the same loss again; run.exists=replace trains it all the same.
    """
    code, reason = failure(job.config.run_dir)
    if (result := finished(job.config)) is not None:
        job.code = 0
        job.result = result
        job.reason = "was finished already"
    elif job.config.run.exists == "resume" and code == NumericsError.exit_code:
        job.code = code
        job.reason = f"failed before: {reason}"


def _refusals(refused: dict[str, list[str]], number: int) -> str:
    """One line for each message, with the jobs that it is about."""
    if number == 1:
        return next(iter(refused))
    lines = []
    for message, jobs in list(refused.items())[:REFUSALS_SHOWN]:
        about = "; ".join(jobs[:4]) + (" ..." if len(jobs) > 4 else "")
        lines.append(f"{'all jobs' if len(jobs) == number else about}: {message}")
    if len(refused) > REFUSALS_SHOWN:
        lines.append(f"and {len(refused) - REFUSALS_SHOWN} messages more")
    return "\n".join([*lines, "No job was started."])


def _table(jobs: Sequence[SweepJob]) -> Table:
    table = Table(title=f"sweep in {jobs[0].config.run.root}", title_justify="left")
    for title in ("run", "overrides"):
        table.add_column(title, overflow="fold")
    for title in ("mIoU %", "exit code"):
        table.add_column(title, no_wrap=True)
    for job in jobs:
        score = "-" if job.miou is None else f"{100 * job.miou:.2f}"
        code = "not started" if job.code is None else str(job.code)
        table.add_row(job.config.run.name, job.swept, score, code)
    return table


def distinct(
    names: Sequence[str],
    templates: Sequence[str],
    swept: Sequence[Mapping[str, str]],
    *,
    always: bool,
) -> list[str]:
    """The run names of all jobs: as they are if they differ, else each with the swept settings that it does not show.

    names: run.name of each job. templates: the same before `${...}` is resolved. swept: its swept overrides, by key.
    `always` is for sweepers that choose jobs batch by batch: a name must not depend on which jobs share a batch.
    """
    if not always and len(set(names)) == len(names):
        return list(names)
    keys = {key for overrides in swept for key in overrides}
    named = []
    for name, template, overrides in zip(names, templates, swept, strict=True):
        hidden = {
            key: text for key, text in overrides.items() if not _shows(template, key)
        }
        named.append(f"{name}-{_suffix(hidden, keys)}" if hidden else name)
    return named


def _shows(template: str, key: str) -> bool:
    """Whether a run name contains a setting, or the name of the file that a group such as `model` was set to."""
    shown = ("${hydra:job", f"${{{key}}}", f"${{{key}.name}}")
    return key == "run.name" or any(part in template for part in shown)


def _suffix(overrides: Mapping[str, str], keys: Collection[str]) -> str:
    """`lr0.1-schedule_cosine`: short keys, and characters that every file system and shell takes."""
    leaves = Counter(key.rpartition(".")[2] for key in keys)
    parts = []
    for key, text in overrides.items():
        leaf = key.rpartition(".")[2]
        shown = _in_a_name(leaf if leaves[leaf] == 1 else key)
        value = _shortened(_in_a_name(text), text, SHORT_VALUE)
        parts.append(f"{shown}{'' if value[:1].isdigit() else '_'}{value}")
    suffix = "-".join(parts)
    return _shortened(suffix, suffix, SHORT_SUFFIX)


def _in_a_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_") or "empty"


def _shortened(shown: str, text: str, length: int) -> str:
    if len(shown) <= length:
        return shown
    return f"{shown[: length - 9]}_{sha256_of(text.encode())[:8]}"
