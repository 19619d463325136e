"""`segpipe train`: one training, or with --multirun a sweep, by sweepers and launchers of Hydra."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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

from segpipe import plugins
from segpipe.cli.api import RunResult
from segpipe.distributed.environment import (
    local_rank,
    rank,
    under_launcher,
    wait_to_be_ended,
)
from segpipe.errors import ConfigError, Interrupted, SegpipeError
from segpipe.run.finish import finish
from segpipe.run.launch import check_job, examine, launch, launch_apart
from segpipe.run.sweep import Sweep, SweepJob, distinct
from segpipe.run.tracking import failure
from segpipe.settings.arguments import CONF, CommandLine, command_line, quoted
from segpipe.settings.compose import composed, explained, resolve
from segpipe.settings.config import Config, to_mapping
from segpipe.settings.setting import shown

# Of sweepers with a direction, what it must be: a job returns its mIoU.
DIRECTIONS = {
    "direction": "maximize",
    "optim.maximize": True,
    "ax_config.experiment.minimize": False,
}


def main(arguments: list[str]) -> int:
    """Exit code."""
    try:
        line = command_line(arguments)
        if line.sweeps:
            return sweep(line)
        config = composed(line)
        if line.shows:
            print(OmegaConf.to_yaml(OmegaConf.create(to_mapping(config))), end="")
            return 0
        train(config)
    except SegpipeError as error:
        # The other ranks of this machine have the same command line.
        if error.told or local_rank() == 0:
            raise
        wait_to_be_ended()
        return error.exit_code
    return 0


def train(config: Config) -> RunResult:
    """Train and export, in this process or in compute.nproc others; what the run ended with.

    Raises the SegpipeError that the exit code stands for, which says whether its message was printed.
    """
    before = failure(config.run_dir)
    code = launch(config, finish=finish)
    if not code and rank() > 0:  # rank 0 writes
        return RunResult(config.run_dir, {})
    if not code:
        result = json.loads((config.run_dir / "result.json").read_bytes())
        return RunResult(config.run_dir, result)
    kinds = {kind.exit_code: kind for kind in _kinds(SegpipeError)}
    now = failure(config.run_dir)
    error = kinds.get(code, SegpipeError)("" if now == before else now[1])
    error.exit_code, error.told = code, True
    raise error


def _kinds(root: type[SegpipeError]) -> Iterator[type[SegpipeError]]:
    for kind in root.__subclasses__():
        yield from _kinds(kind)
        yield kind


def sweep(line: CommandLine) -> int:
    """Train all jobs of a sweep; returns the first exit code that is not 0."""
    if under_launcher():
        raise ConfigError(
            "--multirun under torchrun would run the whole sweep once per rank. "
            "Use: segpipe train --multirun compute.nproc=N key=1,2,3"
        )
    version.setbase("1.3")
    GlobalHydra.instance().clear()
    app = Hydra.create_main_hydra2("segpipe", create_config_search_path(str(CONF)))
    started: list[Jobs] = []
    hydra_plugins = Plugins.instance()
    instantiate = hydra_plugins.instantiate_launcher

    def instantiate_jobs(**given: Any) -> Jobs:
        loader = given["hydra_context"].config_loader
        started.append(Jobs(instantiate(**given), loader, given["config"]))
        return started[-1]

    hydra_plugins.instantiate_launcher = instantiate_jobs  # type: ignore[assignment,method-assign]
    try:
        with explained(line.added):
            app.multirun("config", train_job, line.overrides + line.search_path)
    except OSError as error:
        if not error.filename:
            raise
        raise ConfigError(
            f"{error.filename}: {error.strerror}. A sweep writes into hydra.sweep.dir, "
            f"which is run.root unless it is set."
        ) from error
    except (Interrupted, JobFailedError):
        pass  # Ctrl-C, or the search gave up: the table says so
    except SegpipeError:  # a later batch was refused
        for jobs in started:
            jobs.sweep.finish()
        raise
    finally:
        hydra_plugins.instantiate_launcher = instantiate  # type: ignore[method-assign]
    return started[0].sweep.finish()


def train_job(composed: DictConfig) -> int:
    """Exit code of a job, in the process that its launcher started; its own processes do the training."""
    if multiprocessing.get_start_method(allow_none=True) == "loky":
        # Of joblib, which our processes would not know.
        multiprocessing.set_start_method("spawn", force=True)
    return launch_apart(resolve(composed), finish=finish)


class JobFailedError(Exception):
    """Tells a search that a job has no result."""


class Jobs:
    """Stands before a launcher of Hydra: checks and names the jobs of each batch, and returns their mIoU.

    Hydra's default launcher gets them one after another, any other one a whole batch.
    """

    def __init__(
        self, launcher: Launcher, loader: ConfigLoader, config: DictConfig
    ) -> None:
        self.sweep = Sweep(self._train, check_job, examine)
        self._launcher = launcher
        self._loader = loader
        self._config = config
        sweeper = config.hydra.sweeper
        self._searched = not str(sweeper._target_).endswith(".BasicSweeper")
        target = str(config.hydra.launcher._target_)
        self._one_by_one = target.endswith(".BasicLauncher")
        # Jobs and their overrides, by folder of the run.
        self._batch: dict[Path, tuple[SweepJob, list[str]]] = {}
        # Exit code of each job, or what it raised.
        self._ended: dict[Path, int | Exception] = {}
        for key, needed in DIRECTIONS.items():
            found = OmegaConf.select(sweeper, key)
            direction = getattr(found, "name", found)  # of an enumeration
            if found is not None and direction != needed:
                raise ConfigError(
                    f"hydra.sweeper.{key} = {direction}, but jobs return their mIoU, "
                    f"higher is better. Set hydra.sweeper.{key}={shown(needed)}."
                )

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> list[JobReturn]:
        """What a sweeper reads of each job."""
        jobs = self._jobs(job_overrides, initial_job_idx)
        for job, overrides in zip(jobs, job_overrides, strict=True):
            name = quoted(job.config.run.name)
            self._batch[job.config.run_dir] = job, [*overrides, f"run.name={name}"]
        self.sweep.batch(jobs, searched=self._searched)
        if self.sweep.interrupted:
            raise Interrupted("the sweep was interrupted.")
        pairs = zip(jobs, job_overrides, strict=True)
        return [self._returned(job, overrides) for job, overrides in pairs]

    def _train(self, config: Config) -> int:
        """Exit code of a job. Raises what the job raised."""
        if config.run_dir not in self._ended:
            folders = [config.run_dir]
            if not self._one_by_one:
                folders = [
                    folder
                    for folder, (job, _) in self._batch.items()
                    if job.code is None and folder not in self._ended
                ]
            overrides = [self._batch[folder][1] for folder in folders]
            try:
                returned = self._launcher.launch(overrides, len(self._ended))
            except Exception as error:
                refusal = ConfigError(f"hydra/launcher: {plugins.located(error)}.")
                self._ended |= dict.fromkeys(folders, refusal)
            else:
                ends = [each._return_value for each in returned]
                self._ended |= zip(folders, ends, strict=True)
        end = self._ended[config.run_dir]
        if isinstance(end, Exception):
            raise end
        return end

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
