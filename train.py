"""Train a segmentation network: `python train.py key=value ...`, or the same under torchrun."""

import sys

import hydra
from omegaconf import DictConfig

from segpipe.compose import check_overrides, compose, resolve
from segpipe.distributed.environment import under_launcher
from segpipe.errors import ConfigError, SegpipeError
from segpipe.launch import launch
from segpipe.sweep import Sweep

SWEEP = Sweep()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def _hydra(composed: DictConfig) -> None:
    """Called by Hydra for --help, --cfg and each job of a --multirun."""
    SWEEP.job(resolve(composed))


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
            _hydra()
            return SWEEP.finish()
        config = compose(arguments)
        return launch(config)
    except SegpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
