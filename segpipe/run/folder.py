"""A run's folder: whether it may be used, when an earlier run in it is deleted, and its lock.

Only one process at a time trains into it, also on a shared file system.
The lock is a file that its owner creates with O_EXCL, touches every BEAT_S, and deletes at the end. An owner on this
machine is alive while its process is; an owner elsewhere until it was silent for SILENT_S, or until a newer attempt of
its job takes over, since the scheduler has ended the earlier attempt. This does not rely on flock, which network file
systems may ignore, nor on machine clocks: ages are differences of the file system's own times. An owner that is still
alive on a machine that was cut off sees the other's lock at its next touch and ends without saving.
"""

import contextlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from segpipe.distributed import environment
from segpipe.errors import CheckpointError, ConfigError, SegpipeError
from segpipe.files import read_json
from segpipe.processes import before_end, end_process, process_start, rounds, this_host
from segpipe.run.report import PAGE, is_live
from segpipe.run.tracking import FAILURE, FILE_NAME, failure, read_metrics
from segpipe.settings.config import Config, changed_course, recipe, saved_config

LOCK = "run.lock"
BEAT_S = 15.0
SILENT_S = 60.0  # silence after which an owner on another machine counts as dead
REMOVAL_S = 60.0  # upper limit: removing a dead owner's lock takes milliseconds
# A folder with one of these, or with a checkpoint, holds a run.
TRACES = ("config.json", "result.json", FILE_NAME)


def check_folder(config: Config) -> None:
    """Raise ConfigError if a living process trains into the run's folder, or `run.exists` forbids its contents."""
    with _usable(config):
        _dead_lock(config.run_dir / LOCK)
        _check_earlier_run(config)


def claim_folder(config: Config) -> None:
    """Create the run's folder if `run.exists` allows it; does not touch an earlier run yet.

    Raises ConfigError if a living process trains into it, `run.exists` forbids its contents, or it cannot be created.
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
    """Context that owns the run's folder, for the process that writes its files: rank 0.

    Raises ConfigError while another process owns the folder.
    """
    with held(config.run_dir) as taken_over:
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
    if config.run.exists != "resume":
        return
    if changed := _changed_recipe(config):
        raise ConfigError(f"{folder} {changed}")
    if lost := _lost_progress(config):
        raise ConfigError(
            f"run.exists = resume, but {folder} holds no checkpoint, although {lost}. Put a copy of last.pt or of "
            f"a step_*.pt back, or start again at step 0 with run.exists=replace."
        )


def _lost_progress(config: Config) -> str:
    """Evidence that a checkpoint existed and is lost; empty if the run may start at step 0.

    A run that was killed before its first checkpoint starts again, as the next attempt on a cluster must.
    """
    if _has_checkpoint(config.run_dir):
        return ""
    if (config.run_dir / "result.json").exists():
        return "it has a result.json"
    entries = read_metrics(config.run_dir / FILE_NAME)
    with contextlib.suppress(ConfigError):  # settings of the earlier session
        config = saved_config(config.run_dir)
    checkpoint, train = config.checkpoint, config.train
    every = (checkpoint.every, checkpoint.keep_every, train.validate_every, train.steps)
    reached = max((entry["step"] for entry in entries), default=0)
    is_lost = reached > min(step for step in every if step)
    return f"{FILE_NAME} reaches step {reached}" if is_lost else ""


def _changed_recipe(config: Config) -> str:
    """How the recipe differs from config.json; empty if it does not, or the file is missing or unreadable."""
    try:
        return changed_course(recipe(saved_config(config.run_dir)), recipe(config))
    except ConfigError:
        return ""


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
    manifest = Path(export.dir or folder / "export", "manifest.json")
    try:
        result = dict(read_json(folder / "result.json"))
        done = int(result.get("steps", 0)) >= config.train.steps
        whole = not is_live(folder / PAGE) and not failure(folder).exit_code
        if export.enabled:
            same = saved_config(folder).export == export
            whole = whole and same and manifest.is_file()
    except (ConfigError, OSError, ValueError, TypeError):
        return False
    done = done or bool(result.get("stopped_early"))
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


def remove_dead(folder: Path) -> None:
    """Delete the lock of a dead owner, such as a child process that was killed."""
    with contextlib.suppress(ConfigError, OSError):
        if (dead := _dead_lock(folder / LOCK)) is not None:
            _remove(folder / LOCK, dead)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[str]:
    """Context that owns the folder; yields a message about the dead previous owner, or "".

    Raises ConfigError while another process owns the folder, CheckpointError when the lock cannot be written.
    """
    lock = _Lock(folder / LOCK)
    try:
        taken_over = lock.take()
    except OSError as error:
        raise CheckpointError(
            f"{lock.path} could not be written: {error.strerror or error}."
        ) from error
    rounds.add(lock.look)
    before_end.append(lock.release)
    try:
        yield taken_over
    finally:
        before_end.remove(lock.release)
        lock.release()


class _Lock:
    """The lock, from its owner's side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        self._released = False
        self._next_beat = time.monotonic() + BEAT_S
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        owner = Owner(
            this_host(),
            self._pid,
            process_start(self._pid) or "",
            f"process {self._pid} on {this_host().rpartition('-')[0]} since {since}",
            uuid.uuid4().hex,
            *environment.job_attempt(),
        )
        self._content = json.dumps(owner._asdict()).encode()

    def take(self) -> str:
        """Create the file; returns a message if it was taken over. Raises ConfigError, OSError."""
        line = ""
        while True:
            if (dead := _dead_lock(self.path)) is not None:
                line = f"{self.path.parent}: taken over from {_owner(dead).name}, which is gone."
                _remove(self.path, dead)
            try:
                self._create()
                return line
            except FileExistsError:  # another job was faster: check again
                if self.path.is_symlink():
                    raise ConfigError(
                        f"{self.path} is a link, but a file was needed. Delete it."
                    ) from None

    def _create(self) -> None:
        with self.path.open("xb", buffering=0) as file:
            try:
                file.write(self._content)
                os.fsync(file)
            except OSError:
                self.path.unlink()
                raise

    def look(self) -> bool:
        """Touch the file when it is due."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            # The file system may be unavailable for a while; a later touch may succeed.
            with contextlib.suppress(OSError):
                self._touch()
        return False

    def _touch(self) -> None:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = None
        if self._released:  # while the file system blocked this thread
            return
        if content is None:  # deleted by hand
            self._create()
        elif content == self._content:
            os.utime(self.path)
        elif content:
            # This process was suspended so long that it counted as dead.
            lost = f"{self.path.parent} was taken over by {_owner(content).name}, so this run ends without saving."
            print(lost, file=sys.stderr, flush=True)
            end_process(ConfigError.exit_code)

    def release(self) -> None:
        """Delete the file, unless this is a forked child or another job has taken over."""
        if os.getpid() == self._pid:
            self._released = True
            rounds.remove(self.look)
            with contextlib.suppress(OSError):
                if self.path.read_bytes() == self._content:
                    self.path.unlink()


class Owner(NamedTuple):
    """The process that created a lock, as recorded in it."""

    host: str
    pid: int
    started: str
    name: str
    id: str  # of this lock
    job: str = ""  # of a scheduler or launcher; empty without one
    attempt: Sequence[int] = ()  # of the job; later attempts compare greater


def _owner(content: bytes) -> Owner:
    """Owner from a lock's content; an unknown one if the lock is damaged or still being written."""
    try:
        return Owner(**json.loads(content))
    except (ValueError, TypeError):
        return Owner("", 0, "", "an unknown process (its lock is not readable)", "")


def _dead_lock(path: Path) -> bytes | None:
    """Content of a lock whose owner is dead; None without a lock.

    Raises ConfigError while the owner lives.
    """
    try:
        content = path.read_bytes()
        silent_s = _silent_s(path)
    except FileNotFoundError:
        return None
    owner = _owner(content)
    if owner.host == this_host():
        alive = process_start(owner.pid) in ("", owner.started)
        advice = f"stop it (kill {owner.pid})"
    else:
        job, attempt = environment.job_attempt()
        newer = bool(job) and owner.job == job and list(owner.attempt) < attempt
        # Slurm has ended the earlier attempt; torchrun also restarts an attempt that was refused here.
        requeued = newer and owner.attempt[0] < attempt[0]
        alive = silent_s < (0 if requeued else 2 * BEAT_S if newer else SILENT_S)
        advice = f"stop it there (if that machine is down: its lock ends {SILENT_S:.0f} s after the last sign of life)"
    if not alive:
        return content
    raise ConfigError(
        f"{path.parent} is in use by {owner.name}; last sign of life {silent_s:.0f} s ago. "
        f"Wait until it ends, {advice}, or choose another run.name. If this folder is a copy, delete {path}."
    )


def _silent_s(path: Path) -> float:
    """Seconds since a file was touched, by the clock of its file system."""
    probe = path.with_name(f".clock.{this_host()}.{os.getpid()}.tmp")
    try:
        probe.write_bytes(b"")
        return max(probe.stat().st_mtime - path.stat().st_mtime, 0.0)
    finally:
        probe.unlink(missing_ok=True)


def _remove(path: Path, dead: bytes) -> None:
    """Delete the lock if it still has this content, but not a lock that another job has put in its place.

    Only one job at a time may delete: the one that created the file next to it.
    """
    beside = path.with_name(f".{LOCK}.removal")
    try:
        beside.touch(exist_ok=False)
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):
            if _silent_s(beside) > REMOVAL_S:  # its job was killed
                beside.unlink()
        time.sleep(0.02)
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == dead:
                path.unlink()
    finally:
        beside.unlink(missing_ok=True)
