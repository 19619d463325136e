"""`segpipe train`: composes the configuration and starts the run, or hands over to Hydra if there are flags."""

from __future__ import annotations

import sys
from functools import partial

import hydra
from omegaconf import DictConfig

from segpipe.distributed.environment import local_rank, under_launcher, wait_to_be_ended
from segpipe.errors import ConfigError, SegpipeError
from segpipe.run.finish import finish
from segpipe.run.launch import launch
from segpipe.run.sweep import Sweep
from segpipe.settings.compose import CONF, checked_overrides, compose, config_files, is_sweep


def main(arguments: list[str]) -> int:
    """Exit code."""
    try:
        files, overrides = config_files(arguments)
        overrides = checked_overrides(overrides, files)
        overrides = ["--multirun", *overrides] if is_sweep(overrides) else overrides
        if under_launcher() and any(argument in ("-m", "--multirun") for argument in overrides):
            raise ConfigError(
                "--multirun under torchrun would run the whole sweep once per rank. Use: segpipe train --multirun "
                "compute.nproc=N key=1,2,3"
            )
        if any(argument.startswith("-") for argument in overrides):
            return _run_hydra([*files.flags, *overrides])
        return launch(compose(arguments), finish=finish)
    except SegpipeError as error:
        if local_rank() == 0:  # the other ranks of this machine have the same command line
            raise
        wait_to_be_ended()
        return error.exit_code


def _run_hydra(arguments: list[str]) -> int:
    """Let Hydra act on its flags: --cfg, --multirun, --config-dir, --shell-completion and others."""
    sweep = Sweep(partial(launch, finish=finish, isolated=True))

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(composed: DictConfig) -> None:
        sweep.job(composed)

    flags_first = sorted(arguments, key=lambda text: "=" in text and not text.startswith("-"))  # as argparse needs
    before, sys.argv = sys.argv, [sys.argv[0], *flags_first]
    try:
        job()
    except SystemExit as end:  # Hydra has printed what is wrong, and uses its own exit code
        if end.code and not sweep.started:
            return ConfigError.exit_code
        raise
    finally:
        sys.argv = before
    return sweep.finish()
