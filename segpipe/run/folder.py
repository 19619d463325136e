"""A run's folder: whether it may be used, and when an earlier run in it is deleted."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from segpipe.errors import ConfigError, SegpipeError
from segpipe.files import read_json
from segpipe.run import lock
from segpipe.run.report import PAGE, is_live
from segpipe.run.tracking import FAILURE, FILE_NAME, failure, read_metrics
from segpipe.settings.config import Config, changed_course, recipe, saved_config

# A folder with one of these, or with any checkpoint, holds a run.
TRACES = ("config.json", "result.json", FILE_NAME)


def check_folder(config: Config) -> None:
    """Raise ConfigError if a living process trains into the run's folder, or `run.exists` forbids what it holds."""
    with _usable(config):
        lock.check(config.run_dir)
        _check_earlier_run(config)


def claim_folder(config: Config) -> None:
    """Create the run's folder as `run.exists` allows; an earlier run in it is not touched yet.

    Raises ConfigError if a living process trains into it, if it already holds a run, or cannot be created.
    """
    check_folder(config)
    with _usable(config):
        config.run_dir.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _usable(config: Config) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run.root = {config.run.root}: {config.run_dir} cannot be created or read: {error.strerror}. Set run.root "
            f"to a folder that you may write to."
        ) from error


@contextlib.contextmanager
def owned(config: Config) -> Iterator[None]:
    """Own the run's folder until the end, in the process that writes its files: rank 0.

    Raises ConfigError while another process owns the folder.
    """
    with lock.held(config.run_dir) as taken_over:
        if taken_over:
            print(taken_over, file=sys.stderr)
        # Again: another job may have trained here since it was claimed.
        _check_earlier_run(config)
        (config.run_dir / FAILURE).unlink(missing_ok=True)
        yield


def _check_earlier_run(config: Config) -> None:
    folder = config.run_dir
    if config.run.exists == "error" and _holds_run(folder):
        raise ConfigError(
            f"{folder} already holds {_progress(folder)}. Set run.exists=resume to continue it, run.exists=replace "
            f"to delete it, or choose another run.name."
        )
    if config.run.exists == "resume" and (changed := _changed_recipe(config)):
        raise ConfigError(f"{folder} {changed}")
    if config.run.exists == "resume" and (lost := _lost_progress(config)):
        raise ConfigError(
            f"run.exists = resume, but {folder} holds no checkpoint, although {lost}. Put a copy of last.pt or of "
            f"a step_*.pt back, or start again at step 0 with run.exists=replace."
        )


def _lost_progress(config: Config) -> str:
    """What shows that a checkpoint was there and is lost; empty if the run may as well start at step 0.

    A run that was killed before its first checkpoint starts again, as a cluster's next attempt must.
    """
    if _has_checkpoint(config.run_dir):
        return ""
    if (config.run_dir / "result.json").exists():
        return "it has a result.json"
    checkpoint, train = config.checkpoint, config.train
    every = (checkpoint.every, checkpoint.keep_every, train.validate_every, train.steps)
    entries = read_metrics(config.run_dir / FILE_NAME)
    reached = max((entry["step"] for entry in entries), default=0)
    is_lost = reached > min(step for step in every if step)
    return f"{FILE_NAME} reaches step {reached}" if is_lost else ""


def _changed_recipe(config: Config) -> str:
    """What is trained differently than config.json says; empty if there is none, or it is not readable."""
    try:
        return changed_course(recipe(saved_config(config.run_dir)), recipe(config))
    except ConfigError:
        return ""


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


def finished(config: Config) -> dict[str, Any] | None:
    """result.json of a run that `run.exists=resume` has nothing left to do for; None if there is work left."""
    folder = config.run_dir
    made = [folder / PAGE]
    if config.export.enabled:
        made.append(Path(config.export.dir or folder / "export") / "manifest.json")
    whole = all(path.is_file() for path in made) and not failure(folder)[0]
    whole = whole and not is_live(made[0])
    if config.run.exists != "resume" or not whole:
        return None
    try:
        result = dict(read_json(folder / "result.json"))
        done = int(result.get("steps", 0)) >= config.train.steps
    except (OSError, ValueError, TypeError):
        return None
    return result if done or result.get("stopped_early") else None


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
    return (
        f"step {found.content['step']}"
        if found
        else "a run without a readable checkpoint"
    )
