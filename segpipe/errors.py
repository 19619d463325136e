"""All errors that segpipe raises on purpose, with their exit codes.

A message says where and what was found, what was needed, and what to do. Code never parses a message: what code needs
is an attribute. Each exit code has one meaning, see docs/exit-codes.md.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

CHECKED_IN_PART = 14  # exit code: found nothing wrong, but could not check everything


class SegpipeError(Exception):
    """Base class of all errors below. Commands print them without a traceback."""

    exit_code = 1
    told = False  # whether another rank has already printed it
    common = False  # whether all ranks raise it at once; then rank 0 reports it
    kind = ""  # class of the error of another rank that this one repeats


class ConfigError(SegpipeError):
    """A setting is misspelled, out of range, or contradicts another."""

    exit_code = 2


class DataError(SegpipeError):
    """A file of the data set is missing, damaged, or does not match the class table.

    cause: what is wrong, the same for all files that one fix corrects. where: the file. Both are empty if not given.
    """

    exit_code = 2

    def __init__(self, message: str, *, cause: str = "", where: str = "") -> None:
        super().__init__(message)
        self.cause, self.where = cause, where


class CheckpointError(SegpipeError):
    """A checkpoint is missing, damaged, from another network, or could not be written."""

    exit_code = 2


class NotWritten(CheckpointError):
    """A file could not be written by one process, for example to a full disk."""


class WeightsError(CheckpointError):
    """The weights of a checkpoint do not fit its network: missing, of a different shape, or not finite."""


class ExportError(SegpipeError):
    """The network could not be converted."""

    exit_code = 3


class ExportMismatch(ExportError):
    """An exported file computes something else than the trained network; no file is published.

    failed: (file name, GateResult) of every failed gate, with its figures.
    """

    exit_code = 4

    def __init__(self, message: str, *, failed: Sequence[tuple[str, Any]] = ()) -> None:
        super().__init__(message)
        self.failed = tuple(failed)


class DivergenceError(SegpipeError):
    """Two ranks or two runs that must hold the same bits differ."""

    exit_code = 5
    common = True


class NumericsError(SegpipeError):
    """The loss or a gradient is not finite; the message says where the state was saved."""

    exit_code = 6
    common = True


class IntegrityError(ExportMismatch):
    """An exported file is incomplete, not loadable, or does not match the manifest; no file is published."""

    exit_code = 7


class ImpureAugmentError(SegpipeError):
    """An augmentation depends on more than its sample and its key, or has side effects."""

    exit_code = 8


class CollectiveError(SegpipeError):
    """Ranks called different collectives, lost a rank, or could not connect; the message names both sides."""

    exit_code = 9


class OutOfMemory(SegpipeError):
    """A GPU or the machine ran out of memory; names the rank, the step, the shapes and the largest consumers."""

    exit_code = 10


class QualityError(ExportMismatch):
    """An exported file segments labelled images worse than the trained network; no file is published."""

    exit_code = 11


class LatencyError(ExportMismatch):
    """An exported file is slower than export.latency_budget_ms allows; no file is published."""

    exit_code = 12


class Interrupted(SegpipeError):
    """Ctrl-C or SIGTERM; the state was saved before this was raised."""

    exit_code = 130
    common = True


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError with a line for each non-empty problem, if there is one."""
    if lines := list(dict.fromkeys(filter(None, problems))):
        raise ConfigError("\n".join(lines))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A sentence that names the choice most similar to `word`, with a leading space; empty if none is similar."""
    best = get_close_matches(word, choices, 1)
    return f" Did you mean {best[0]}?" if best else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters, without its full stop; its type if it is empty."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".")


def listed(names: Sequence[str], most: int = 5, joint: str = ", ") -> str:
    """The first `most` names, and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return joint.join(names[:most]) + more
