"""A run's folder: whether it may be used, and when an earlier run in it is deleted."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from segpipe.errors import ConfigError, SegpipeError
from segpipe.run import lock
from segpipe.run.tracking import FILE_NAME, read_metrics
from segpipe.settings.config import Config

# A folder with one of these, or with any checkpoint, holds a run.
TRACES = ("config.json", "result.json", "checkpoints.sha256", FILE_NAME)


def claim_folder(config: Config) -> None:
    """Create the run's folder as `run.exists` allows; an earlier run in it is not touched yet.

    Raises ConfigError if a living process trains into it, if it already holds a run, or cannot be created.
    """
    folder = config.run_dir
    try:
        lock.check(folder)
        _check_earlier_run(config)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.root = {config.run.root}: {folder} cannot be created: {error.strerror}. Set run.root to a folder "
            f"that you may write to."
        ) from error


@contextlib.contextmanager
def owned(config: Config, *, alone: bool) -> Iterator[None]:
    """Own the run's folder until the end, in the process that writes its files: rank 0.

    `alone`: this process is the whole run. Raises ConfigError while another process owns the folder.
    """
    with lock.held(config.run_dir, released_by_signals=alone) as dead:
        if dead:
            print(dead, file=sys.stderr)
        _check_earlier_run(config)  # again: another job may have trained here since it was claimed
        lock.remove_leftovers(config.run_dir)
        yield


def _check_earlier_run(config: Config) -> None:
    folder = config.run_dir
    if config.run.exists == "error" and _holds_run(folder):
        raise ConfigError(
            f"{folder} already holds {_progress(folder)}. Set run.exists=resume to continue it, run.exists=replace "
            f"to delete it, or choose another run.name."
        )
    if config.run.exists == "resume" and not _has_checkpoint(folder) and (progress := _progress_without(folder)):
        raise ConfigError(
            f"run.exists = resume, but {folder} holds no checkpoint, although {progress}. Put a copy of last.pt or of "
            f"a step_*.pt back, or start again at step 0 with run.exists=replace."
        )


def clear_folder(config: Config) -> None:
    """Delete the earlier run under `run.exists=replace`; call it when only the training itself can still fail.

    Raises ConfigError if files cannot be deleted.
    """
    folder = config.run_dir
    if config.run.exists != "replace" or not _holds_run(folder):
        return
    try:
        for entry in folder.iterdir():
            if entry.name == lock.NAME:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise ConfigError(
            f"run.exists = replace, but {error.filename} cannot be deleted: {error.strerror}. Choose another run.name."
        ) from error


def _holds_run(folder: Path) -> bool:
    return _has_checkpoint(folder) or any((folder / name).exists() for name in TRACES)


def _has_checkpoint(folder: Path) -> bool:
    from segpipe.train.checkpoint import candidates

    return bool(candidates(folder))


def _progress(folder: Path) -> str:
    from segpipe.train.checkpoint import newest_whole

    try:
        found = newest_whole(folder)
    except SegpipeError:
        found = None
    return f"step {found.content['step']}" if found else "a run without a readable checkpoint"


def _progress_without(folder: Path) -> str:
    """What shows that updates were done, beside checkpoints; empty if nothing does."""
    steps = [entry["step"] for entry in read_metrics(folder / FILE_NAME) if isinstance(entry["step"], int)]
    if max(steps, default=0) > 0:
        return f"{FILE_NAME} reaches step {max(steps)}"
    left = [name for name in ("result.json", "checkpoints.sha256") if (folder / name).exists()]
    return f"it has a {left[0]}" if left else ""
