"""`segpipe check-augment`: whether augmentation is a pure function of sample and key."""

from __future__ import annotations

from segpipe.checks.data_contract import purity_clauses
from segpipe.cli import check_plugin
from segpipe.determinism import flags
from segpipe.errors import ImpureAugmentError
from segpipe.run.console import CONSOLE
from segpipe.settings.check import check
from segpipe.settings.compose import compose


def main(overrides: list[str]) -> int:
    """Exit code: that of an impure augmentation if a probe fails.

    Prints a table of the transforms and the pipeline, then what was found and what to do.
    """
    config = compose(overrides)
    check(config, world_size=1)
    flags.apply(config.compute.threads, config.compute.mode)
    with CONSOLE.status("checking the augmentation"):
        found = list(purity_clauses(config))
    return ImpureAugmentError.exit_code if check_plugin.show(found, "augment") else 0
