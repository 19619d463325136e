"""`segpipe train`: composes the configuration and starts the run, or hands over to Hydra if there are flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from segpipe.distributed.environment import local_rank, under_launcher, wait_to_be_ended
from segpipe.errors import ConfigError, Interrupted, SegpipeError
from segpipe.run.finish import finish
from segpipe.run.launch import check_job, examine, launch, launch_apart
from segpipe.run.sweep import Sweep, SweepJob, distinct
from segpipe.settings.compose import (
    CONF,
    MULTIRUN,
    ConfigFiles,
    checked_overrides,
    compose,
    config_files,
    explained,
    is_sweep,
    resolve,
)
from segpipe.settings.config import Config

# Hydra starts plug-ins of its own packages only, so ours takes the place of the launcher that it uses by default.
BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
# Sweepers with a direction: its setting, what it must be, and how to set that. A job returns its mIoU.
DIRECTIONS = (
    ("hydra.sweeper.direction", "maximize", "hydra.sweeper.direction=maximize"),
    ("hydra.sweeper.optim.maximize", True, "hydra.sweeper.optim.maximize=true"),
    (
        "hydra.sweeper.ax_config.experiment.minimize",
        False,
        "hydra.sweeper.ax_config.experiment.minimize=false",
    ),
)


def main(arguments: list[str]) -> int:
    """Exit code."""
    try:
        files, overrides = config_files(arguments)
        overrides = checked_overrides(overrides, files)
        if is_sweep(overrides):
            overrides.insert(0, "--multirun")
        sweeps = bool(set(MULTIRUN) & set(overrides))
        if under_launcher() and sweeps:
            raise ConfigError(
                "--multirun under torchrun would run the whole sweep once per rank. "
                "Use: segpipe train --multirun compute.nproc=N key=1,2,3"
            )
        if any(argument.startswith("-") for argument in overrides):
            return _run_hydra(files, overrides, sweeps=sweeps)
        return launch(compose(arguments), finish=finish)
    except SegpipeError as error:
        # The other ranks of this machine have the same command line.
        if local_rank() == 0:
            raise
        wait_to_be_ended()
        return error.exit_code


def _run_hydra(files: ConfigFiles, overrides: list[str], *, sweeps: bool) -> int:
    """Let Hydra act on its flags: --cfg, --multirun, --config-dir, --shell-completion and others."""
    single: list[Config] = []

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(composed: DictConfig) -> None:
        single.append(resolve(composed))

    sweep = Sweep(partial(launch_apart, finish=finish), check_job, examine)
    SweepLauncher.sweep = sweep
    arguments = [*files.flags, *overrides]
    if sweeps:
        if any(argument.startswith("hydra/launcher") for argument in arguments):
            raise ConfigError(
                "hydra/launcher cannot be set: segpipe trains the jobs of a sweep one "
                "after another, each on all processes of compute.nproc. For several "
                "machines, start a sweep on each: docs/sweeps.md."
            )
        Plugins.instance().class_name_to_class[BASIC_LAUNCHER] = SweepLauncher
    # argparse needs the flags first.
    arguments.sort(key=lambda text: "=" in text and not text.startswith("-"))
    try:
        with explained(files), _hydra_raises(arguments):
            job()
    except SystemExit as end:  # Hydra has printed what is wrong
        if end.code:
            return ConfigError.exit_code
        raise
    except OSError as error:
        if f"hydra.sweep.dir={error.filename}" not in arguments:
            raise
        raise ConfigError(
            f"hydra.sweep.dir = {error.filename} cannot be created: {error.strerror}."
        ) from error
    except (Interrupted, JobFailedError):
        pass  # Ctrl-C, or the search gave up: the table says so
    except SegpipeError:  # a later batch was refused
        sweep.finish()
        raise
    if single:
        return launch(single[0], finish=finish)
    return sweep.finish()


@contextmanager
def _hydra_raises(arguments: Sequence[str]) -> Iterator[None]:
    """Give Hydra its arguments, and let its errors pass instead of printing them with a traceback."""
    before, variable = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [before[0], *arguments], "1"
    try:
        yield
    finally:
        sys.argv = before
        del os.environ["HYDRA_FULL_ERROR"]
        if variable is not None:
            os.environ["HYDRA_FULL_ERROR"] = variable


class JobFailedError(Exception):
    """Tells a search that a job has no result."""


class SweepLauncher(Launcher):
    """Passes each batch of jobs, which a sweeper of Hydra chose, to `sweep`, and returns their mIoU."""

    sweep: Sweep  # of the class, since Hydra makes the instance

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        self._loader, self._config = hydra_context.config_loader, config
        sweeper = str(config.hydra.sweeper._target_)
        self._searched = not sweeper.endswith(".BasicSweeper")
        for key, needed, fix in DIRECTIONS:
            found = OmegaConf.select(config, key)
            direction = getattr(found, "name", found)  # of an enumeration
            if found is not None and direction != needed:
                raise ConfigError(
                    f"{key} = {direction}, but jobs return their mIoU, higher is "
                    f"better. Set {fix}."
                )

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        setup_globals()
        jobs = self._jobs(job_overrides, initial_job_idx)
        self.sweep.batch(jobs, searched=self._searched)
        if self.sweep.interrupted:
            raise Interrupted("the sweep was interrupted.")
        pairs = zip(jobs, job_overrides, strict=True)
        return [self._returned(job, overrides) for job, overrides in pairs]

    def _jobs(
        self, job_overrides: Sequence[Sequence[str]], first: int
    ) -> list[SweepJob]:
        """Jobs with names that differ."""
        parser = OverridesParser.create()
        given = parser.parse_overrides(list(self._config.hydra.overrides.task))
        fixed = {each.key_or_group for each in given if not each.is_sweep_override()}
        composed, swept, names, templates = [], [], [], []
        for place, overrides in enumerate(job_overrides, start=first):
            config = self._loader.load_sweep_config(self._config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = place
            HydraConfig.instance().set_config(config)  # for ${hydra:job.num}
            pairs = [text.lstrip("+").partition("=") for text in overrides]
            swept.append({key: value for key, _, value in pairs if key not in fixed})
            names.append(str(config.run.name))
            run = OmegaConf.to_container(config.run, resolve=False)
            templates.append(str(run["name"]))  # type: ignore[call-overload,index]
            composed.append(config)
        jobs = []
        names = distinct(names, templates, swept, always=self._searched)
        for config, name, own in zip(composed, names, swept, strict=True):
            HydraConfig.instance().set_config(config)
            with read_write(config), open_dict(config):
                config.run.name = name
                del config["hydra"]
            changes = " ".join(f"{key}={value}" for key, value in own.items())
            jobs.append(SweepJob(resolve(config), changes))
        return jobs

    def _returned(self, job: SweepJob, overrides: Sequence[str]) -> JobReturn:
        """What a sweeper reads. A grid must not end at a failed job, which Hydra's own sweeper would."""
        value: Any = job.miou
        status = JobStatus.COMPLETED
        if self._searched and (job.code != 0 or job.miou is None):
            value = JobFailedError(job.reason or "no labelled pixel")
            status = JobStatus.FAILED
        return JobReturn(overrides=list(overrides), status=status, _return_value=value)
