"""Every error a user can meet, on one page.

A message says where and what was found, what was needed, and what to do. Each class carries the exit code with which
the command line ends, so that a cluster script can tell a typing mistake from a diverged run.
"""

from collections.abc import Sequence
from typing import Any


class SegpipeError(Exception):
    """Root of all errors that segpipe raises on purpose; they are printed without a traceback."""

    exit_code = 1
    told = False  # whether another rank reports it


class ConfigError(SegpipeError):
    """A setting is misspelled, out of range, or contradicts another."""

    exit_code = 2


class DataError(SegpipeError):
    """A file of the data set is missing, torn, or does not fit the class table."""

    exit_code = 2


class CheckpointError(SegpipeError):
    """A checkpoint is missing, torn, foreign, or could not be written."""

    exit_code = 2


class WeightsError(CheckpointError):
    """The weights of a checkpoint are not those of its network: one is missing, of another shape, or of no use."""


class NumericsError(SegpipeError):
    """The loss or a gradient is not finite; the message says where the state was kept."""

    exit_code = 6


class DivergenceError(SegpipeError):
    """Two ranks, or two runs, that must hold the same bits do not."""

    exit_code = 5


class CollectiveError(SegpipeError):
    """Ranks called different collectives, or one did not come, or they could not meet; the message names both sides."""

    exit_code = 9


class OutOfMemory(SegpipeError):
    """The memory of a device or of the machine ran out; names the rank, the step, the shapes and what holds most."""

    exit_code = 10


class UnsafeOpError(SegpipeError):
    """A network or a loss calls an op that CUDA does not compute the same way twice; each is named with its line."""


class ExportError(SegpipeError):
    """The network could not be converted."""

    exit_code = 3


class ExportMismatch(ExportError):
    """An exported file does not compute what the trained network computes; no file is left behind.

    failed: (file name, GateResult) of every gate that failed, with its figures.
    """

    exit_code = 4

    def __init__(self, message: str, *, failed: Sequence[tuple[str, Any]] = ()) -> None:
        super().__init__(message)
        self.failed = tuple(failed)


class QualityError(ExportMismatch):
    """An exported file segments labelled images worse than the trained network; no file is left behind."""

    exit_code = 11


class LatencyError(ExportMismatch):
    """An exported file exceeds a latency limit; no file is left behind."""

    exit_code = 12


class IntegrityError(ExportMismatch):
    """An exported file is not whole, not loadable, or not what the manifest says; no file is left behind."""

    exit_code = 7


class ImpureAugmentError(SegpipeError):
    """An augmentation depends on more than its sample and its key, or changes more than its output."""

    exit_code = 8


class Interrupted(SegpipeError):
    """Ctrl-C or SIGTERM; the state was written before this was raised."""

    exit_code = 130
