"""A run's folder: whether it may be used, and when an earlier run in it is deleted. Its owner holds the lock in it."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from segpipe.errors import ConfigError, SegpipeError
from segpipe.files import not_written, read_json
from segpipe.run.lock import LOCK, dead_lock, held
from segpipe.run.report import PAGE, is_live
from segpipe.run.tracking import FAILURE, FILE_NAME, failure, read_metrics
from segpipe.settings.config import Config, changed_course, recipe, saved_config

# A folder with one of these, or with a checkpoint, holds a run.
TRACES = ("config.json", "result.json", FILE_NAME)


def claim_folder(config: Config, *, create: bool = True) -> None:
    """Create the run's folder if `run.exists` allows it; does not touch an earlier run yet. `create=False` only checks.

    Raises ConfigError if a living process trains into it, `run.exists` forbids its contents, or it cannot be created.
    """
    folder = config.run_dir
    try:
        dead_lock(folder / LOCK)
        _check_earlier_run(config)
        if create:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.root = {config.run.root}: {folder} cannot be created or read: {error.strerror}. Set run.root "
            f"to a folder that you may write to."
        ) from error


@contextlib.contextmanager
def owned(config: Config) -> Iterator[None]:
    """Context that owns the run's folder, for the process that writes its files: rank 0.

    Raises ConfigError while another process owns the folder, and at the end NotWritten if it was deleted or moved.
    """
    folder = config.run_dir
    with held(folder) as taken_over:
        if taken_over:
            print(taken_over, file=sys.stderr)
        # Again: another job may have trained here since it was claimed.
        _check_earlier_run(config)
        (folder / FAILURE).unlink(missing_ok=True)
        yield
        try:
            (folder / "config.json").stat()
        except OSError as error:  # only a part of the run is there
            raise not_written(folder / "config.json", error) from error


def _check_earlier_run(config: Config) -> None:
    folder = config.run_dir
    if config.run.exists == "error" and _holds_run(folder):
        raise ConfigError(
            f"{folder} already holds {_progress(folder)}. Set run.exists=resume to continue it, run.exists=replace "
            f"to delete it, or choose another run.name."
        )
    if config.run.exists != "resume":
        return
    try:
        earlier = saved_config(folder)
    except ConfigError:  # missing or unreadable
        earlier = config
    if changed := changed_course(recipe(earlier), recipe(config)):
        raise ConfigError(f"{folder} {changed}")
    if lost := _lost_progress(folder):
        raise ConfigError(
            f"run.exists = resume, but {folder} holds no checkpoint, although {lost}. Put a copy of last.pt or of "
            f"a step_*.pt back, or start again at step 0 with run.exists=replace."
        )


def _lost_progress(folder: Path) -> str:
    """Evidence that a checkpoint existed and is lost; empty if the run may start at step 0.

    A run that was killed before its first checkpoint starts again, as the next attempt on a cluster must.
    """
    if _has_checkpoint(folder):
        return ""
    if (folder / "result.json").exists():
        return "it has a result.json"
    entries = read_metrics(folder / FILE_NAME)
    saved = max((entry.get("saved_step", 0) for entry in entries), default=0)
    return f"step {saved} was saved, says {FILE_NAME}" if saved else ""


def clear_folder(config: Config) -> None:
    """Delete the earlier run under `run.exists=replace`; call it when only training itself can still fail.

    Raises ConfigError if files cannot be deleted.
    """
    folder = config.run_dir
    if config.run.exists != "replace" or not _holds_run(folder):
        return
    try:
        for entry in folder.iterdir():
            if entry.name == LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise ConfigError(
            f"run.exists = replace, but {error.filename} cannot be deleted: {error.strerror}. Choose another run.name."
        ) from error


def finished(config: Config) -> bool:
    """Whether the run is complete, so that `run.exists=resume` has nothing left to do."""
    folder, export = config.run_dir, config.export
    try:
        result = dict(read_json(folder / "result.json"))
        done = (
            result.get("stopped_early")
            or int(result.get("steps", 0)) >= config.train.steps
        )
        # A resume that was killed leaves its lock, and perhaps a config.json with an export that it did not make.
        whole = not (
            is_live(folder / PAGE)
            or failure(folder).exit_code
            or dead_lock(folder / LOCK)
        )
        if whole and export.enabled:
            manifest = Path(export.dir or folder / "export", "manifest.json")
            whole = saved_config(folder).export == export and manifest.is_file()
    except (ConfigError, OSError, ValueError, TypeError):
        return False
    return config.run.exists == "resume" and done and whole


def _holds_run(folder: Path) -> bool:
    return _has_checkpoint(folder) or any((folder / name).exists() for name in TRACES)


def _has_checkpoint(folder: Path) -> bool:
    from segpipe.train.checkpoint import candidates

    return bool(candidates(folder))


def _progress(folder: Path) -> str:
    from segpipe.train.checkpoint import newest_whole

    with contextlib.suppress(SegpipeError):
        if found := newest_whole(folder):
            return f"step {found.content['step']}"
    return "a run without a readable checkpoint"
