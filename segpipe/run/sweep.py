"""`segpipe train --multirun`: jobs of Hydra's sweepers and launchers, named, checked before they start, and listed."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from segpipe.distributed.environment import under_launcher
from segpipe.errors import (
    CollectiveError,
    ConfigError,
    Interrupted,
    SegpipeError,
    first_line,
)
from segpipe.files import sha256_of
from segpipe.run.console import CONSOLE, ERRORS
from segpipe.run.folder import finished
from segpipe.run.overview import (
    Row,
    best_first,
    grouped,
    print_runs,
    read_row,
    run_table,
)
from segpipe.run.tracking import failure
from segpipe.settings.compose import (
    CONF,
    CommandLine,
    explained,
    quoted,
    resolve,
    unquoted,
)
from segpipe.settings.config import Config

# Runs that differ only in one of these repeat a recipe.
REPEATS = ("seed", "data.hold_out")
SHORT = 120  # characters of a suffix; a longer one is cut and ends with a hash


class JobFailedError(Exception):
    """Tells a search that a job has no result."""


@dataclass
class SweepJob:
    """One job of a sweep and its outcome."""

    config: Config
    swept: str  # its swept overrides, such as "optim.lr=0.1 seed=2"
    overrides: list[str]  # all overrides, including the run's name
    code: int | None = None  # exit code; None: not started, or not ended
    reason: str = ""  # why it failed or did not train

    def row(self) -> Row:
        """Its line in the table."""
        folder, name = self.config.run_dir, self.config.run.name
        row = Row(name, folder, state="not started")
        if (folder / "config.json").exists():
            row = read_row(folder, name)
        if not self.code:
            return replace(row, reason=self.reason or row.reason)
        reason = self.reason or failure(folder).reason or "see the messages above"
        state = f"failed, exit code {self.code}"
        return replace(row, miou=None, state=state, reason=reason)


@dataclass
class Jobs:
    """Wraps a Hydra launcher: names and checks the jobs of each batch, and returns their mIoU."""

    launcher: Launcher
    loader: ConfigLoader
    config: DictConfig
    check_job: Callable[[Config], Config]
    examine: Callable[[Config], object]
    jobs: dict[Path, SweepJob] = field(default_factory=dict)
    examined: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        # One name, or a list of them.
        if "minimize" in str(OmegaConf.select(self.config.hydra.sweeper, "direction")):
            raise ConfigError(
                "hydra.sweeper.direction = minimize, but jobs return mIoU, where higher is better. Set "
                "hydra.sweeper.direction=maximize."
            )
        if self.config.hydra.job.chdir:
            raise ConfigError(
                "hydra.job.chdir = true, but settings name folders relative to the current one. Set it to false."
            )

    @property
    def searched(self) -> bool:
        """Whether jobs are chosen batch by batch; a grid is one batch."""
        return not str(self.config.hydra.sweeper._target_).endswith(".BasicSweeper")

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """Launches a batch of jobs; returns the results that the sweeper reads. Repeated jobs are not trained again.

        Raises ConfigError before the first job starts if any job cannot run.
        """
        batch = self._composed(job_overrides, initial_job_idx)
        new: dict[Path, SweepJob] = {}
        for job in batch:
            folder = job.config.run_dir
            twin = self.jobs.get(folder) or new.setdefault(folder, job)
            if twin.config != job.config:
                raise ConfigError(
                    f"run.name = {job.config.run.name} is the name of two jobs, {twin.swept} and {job.swept}. Swept "
                    "settings are appended to run.name if it lacks them: choose one without their values."
                )
        for job in new.values():
            self._check(job)
        self.jobs |= new
        todo = [job for job in new.values() if job.code is None]
        try:
            with _all_gathered():
                overrides = [job.overrides for job in todo]
                returned = (
                    self.launcher.launch(overrides, initial_job_idx) if todo else ()
                )
        except Exception as error:
            raise ConfigError(
                f"hydra/launcher: {_brief(error)}. Jobs that it started may still run; when they have ended, the "
                f"same command with run.exists=resume trains the missing ones."
            ) from error
        for job, each in zip(todo, returned, strict=True):
            code = each._return_value
            if isinstance(code, Exception):
                job.reason = " ".join(str(code).split())
                code = getattr(code, "exit_code", 1)
            job.code = int(code)
        return list(map(self._returned, batch, job_overrides))

    def _check(self, job: SweepJob) -> None:
        """Check settings, folder and data of a job; with run.exists=resume, a finished job counts as done."""
        config = job.config
        # Jobs often share these, and reading a large data set takes minutes.
        parts = [
            config.data,
            config.model,
            config.loss,
            config.augment,
            config.track,
            config.export,
            config.optim.lr_scale,
            config.compute.mode,
        ]
        try:
            whole = self.check_job(config)
            if finished(whole):
                job.code, job.reason = 0, "was finished already"
            if parts not in self.examined:
                self.examine(whole)
                self.examined.append(parts)
        except SegpipeError as error:
            refusal = ConfigError(
                f"{job.swept or config.run.name}: {error}\nNo job was started."
            )
            refusal.exit_code = error.exit_code
            raise refusal from error

    def _composed(
        self, job_overrides: Sequence[Sequence[str]], first: int
    ) -> list[SweepJob]:
        """Jobs with distinct names."""
        typed = OverridesParser.create().parse_overrides(
            list(self.config.hydra.overrides.task)
        )
        varies = {each.key_or_group: each.is_sweep_override() for each in typed}
        composed, swept, names = [], [], []
        for place, overrides in enumerate(job_overrides, start=first):
            config = self.loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = place
            HydraConfig.instance().set_config(config)  # for ${hydra:job.num}
            composed.append(config)
            names.append(str(config.run.name))
            pairs = [text.lstrip("+").partition("=") for text in overrides]
            swept.append(
                {
                    key: unquoted(value)
                    for key, _, value in pairs
                    if varies.get(key, True)
                }
            )
        if self.searched or len(set(names)) < len(names):
            names = list(map(named, names, swept))
        jobs = []
        for place, config in enumerate(composed):
            HydraConfig.instance().set_config(config)
            with read_write(config), open_dict(config):
                config.run.name = names[place]
                del config["hydra"]
            changes = " ".join(f"{key}={text}" for key, text in swept[place].items())
            given = [*job_overrides[place], f"run.name={quoted(names[place])}"]
            jobs.append(SweepJob(resolve(config), changes, given))
        return jobs

    def _returned(self, job: SweepJob, overrides: Sequence[str]) -> JobReturn:
        """Result that the sweeper reads. A failed job must not end a grid, as it does in Hydra's own sweeper."""
        row = self.jobs[job.config.run_dir].row()
        value: Any = row.miou
        status = JobStatus.COMPLETED
        if self.searched and row.miou is None:
            value = JobFailedError(row.reason or "no labelled pixel")
            status = JobStatus.FAILED
        return JobReturn(overrides=list(overrides), status=status, _return_value=value)

    def summarize(self) -> int:
        """Print all jobs, best first, and means over seeds; returns the first nonzero exit code."""
        rows = best_first(job.row() for job in self.jobs.values())
        if rows:
            print_runs(rows)
        scored = [row for row in rows if row.miou is not None]
        for by in REPEATS:
            groups = [group for group in grouped(scored, by) if len(group.scores) > 1]
            if groups:
                CONSOLE.print(run_table(groups))
        return next((job.code for job in self.jobs.values() if job.code), 0)


@contextmanager
def _all_gathered() -> Iterator[None]:
    """A job that a cluster killed fails by itself; Hydra's launcher would raise and drop the results of the others."""
    try:
        from submitit import Job
    except ImportError:
        yield
        return
    results: Callable[[Any], list[Any]] = Job.results

    def gathered(job: Any) -> list[Any]:
        try:
            return results(job)
        except Exception as error:
            killed = CollectiveError(
                f"{type(error).__name__}: its process left no result and was perhaps killed. Its output is in "
                f"{job.paths.stdout} and {job.paths.stderr}."
            )
            return [JobReturn(_return_value=killed)]

    with patch.object(Job, "results", gathered):
        yield


def named(name: str, swept: Mapping[str, str]) -> str:
    """A run's name plus the swept settings that it lacks: `NAME-lr0.1-schedule_cosine`.

    Uses only characters that every file system and shell accepts.
    """
    parts = [name]
    for key, text in swept.items():
        leaf = key.rpartition(".")[2]
        value = re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_") or "empty"
        is_number = value[0].isdigit()
        part = f"{leaf}{'' if is_number else '_'}{value}"
        spelled = re.search(rf"{re.escape(part)}(?!\.?[A-Za-z0-9])", name)
        is_there = spelled or (not is_number and len(value) > 3 and value in name)
        if key != "run.name" and not is_there:
            parts.append(part)
    whole = "-".join(parts)
    if len(whole) > len(name) + SHORT:
        digest = sha256_of(whole.encode())[:8]
        whole = f"{whole[: len(name) + SHORT - 9]}_{digest}"
    return whole


def sweep(
    line: CommandLine,
    train: Callable[[DictConfig], int],
    check: Callable[[Config], Config],
    examine: Callable[[Config], object],
) -> int:
    """Train all jobs of a sweep; returns the first nonzero exit code.

    train: trains one job in its own processes and returns its exit code; Hydra's launcher calls it. check: checks
    settings and folder of a job. examine: checks its data and everything else. Both raise SegpipeError.
    """
    if under_launcher():
        raise ConfigError(
            "--multirun under torchrun would run the whole sweep once per rank. "
            "Use: segpipe train --multirun compute.nproc=N key=1,2,3"
        )
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    app = Hydra.create_main_hydra2("segpipe", create_config_search_path(str(CONF)))
    started: list[Jobs] = []
    plugins = Plugins.instance()
    instantiate = plugins.instantiate_launcher

    def instantiate_jobs(**given: Any) -> Jobs:
        loader, config = given["hydra_context"].config_loader, given["config"]
        # A search may keep its storage there and opens it before the first job.
        Path(str(config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        started.append(Jobs(instantiate(**given), loader, config, check, examine))
        return started[-1]

    try:
        with (
            explained(line.added),
            patch.object(plugins, "instantiate_launcher", instantiate_jobs),
        ):
            app.multirun("config", train, line.overrides)
    except OSError as error:
        if not error.filename:
            raise
        raise ConfigError(
            f"{error.filename}: {error.strerror}. A sweep writes into hydra.sweep.dir, "
            f"which is run.root unless it is set."
        ) from error
    except KeyboardInterrupt:
        code = started[0].summarize() if started else 0
        ERRORS.print(
            "the sweep was interrupted. Jobs that submitit started go on: wait for them, or cancel them. Then the "
            "same command with run.exists=resume continues it."
        )
        return code or Interrupted.exit_code
    except JobFailedError:
        pass  # the search gave up: the table shows it
    except SegpipeError:  # a later batch was refused
        for jobs in started:
            jobs.summarize()
        raise
    except ValueError as error:  # a sweeper's
        raise ConfigError(
            f"hydra/sweeper: {_brief(error)}. Correct the ranges or the settings of hydra.sweeper."
        ) from error
    if not started[0].jobs:
        raise ConfigError("The sweep has no jobs: one of its lists is empty.")
    return started[0].summarize()


def _brief(error: Exception) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {first_line(error)}"
