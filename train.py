"""Train a segmentation network: `python train.py key=value ...`, or the same under torchrun."""

import sys
from functools import partial

import hydra
from omegaconf import DictConfig

from segpipe.distributed.environment import local_rank, under_launcher, wait_to_be_ended
from segpipe.errors import ConfigError, SegpipeError
from segpipe.run.finish import finish
from segpipe.run.launch import launch
from segpipe.run.sweep import Sweep
from segpipe.settings.compose import CONF, check_overrides, compose

SWEEP = Sweep(partial(launch, finish=finish, isolated=True))


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def _hydra(composed: DictConfig) -> None:
    """Called by Hydra for --help, --cfg and each job of a --multirun."""
    SWEEP.job(composed)


def _run_hydra() -> int:
    try:
        _hydra()
    except SystemExit as end:  # Hydra has told what is wrong, by a code of its own
        if end.code and not SWEEP.started:
            return ConfigError.exit_code
        raise
    return SWEEP.finish()


def main(arguments: list[str]) -> int:
    """Exit code of the command line; see README.md."""
    try:
        check_overrides(arguments)
        multirun = any(argument in ("-m", "--multirun") for argument in arguments)
        if multirun and under_launcher():
            raise ConfigError(
                "--multirun under torchrun would run the whole sweep once per rank. Use: python train.py --multirun "
                "compute.nproc=N key=1,2,3"
            )
        if any(argument.startswith("-") for argument in arguments):
            return _run_hydra()
        config = compose(arguments)
        return launch(config, finish=finish)
    except SegpipeError as error:
        if local_rank() == 0:  # the others of this machine have the same command
            print(error, file=sys.stderr)
        else:
            wait_to_be_ended()
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
