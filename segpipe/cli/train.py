"""`segpipe train`: one training, or with --multirun a sweep."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from segpipe.cli.api import RunResult
from segpipe.distributed.environment import local_rank, rank, wait_to_be_ended
from segpipe.errors import Interrupted, SegpipeError
from segpipe.run.launch import check_job, examine, launch, launch_apart
from segpipe.run.tracking import failure
from segpipe.settings.compose import command_line, composed, resolve
from segpipe.settings.config import Config, to_mapping


def main(given: dict[str, Any]) -> int:
    """Exit code."""
    try:
        line = command_line(given["overrides"])
        if line.sweeps:
            from segpipe.run.sweep import sweep

            return sweep(line, train_job, check_job, examine)
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


def train_job(job: DictConfig) -> int:
    """Exit code of a job, in the process that its launcher started; its own processes do the training."""
    if multiprocessing.get_start_method(allow_none=True) == "loky":
        # Of joblib, which our processes would not know.
        multiprocessing.set_start_method("spawn", force=True)
    config = resolve(job)
    print(f"job {HydraConfig.get().job.num}: {config.run_dir}", flush=True)
    code = launch_apart(config)
    if code == Interrupted.exit_code:
        raise KeyboardInterrupt
    return code


def train(config: Config) -> RunResult:
    """Train and export, in this process or in compute.nproc others; what the run ended with.

    Raises the SegpipeError that the exit code stands for, which says whether its message was printed.
    """
    before = failure(config.run_dir)
    code = launch(config)
    if not code:
        result = {}
        if rank() == 0:  # which writes
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
