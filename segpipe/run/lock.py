"""The lock of a folder, such as a run's: only one process at a time writes into it, also on a shared file system.

The lock is a file that its owner creates with O_EXCL, touches every BEAT_S, and deletes at the end. An owner on this
machine is alive while its process is; an owner elsewhere until it was silent for SILENT_S, or until a newer attempt of
its job takes over, since the scheduler has ended the earlier attempt. This does not rely on flock, which network file
systems may ignore, nor on machine clocks: ages are differences of the file system's own times. An owner that is still
alive on a machine that was cut off sees the other's lock at its next touch and ends without saving.
"""

import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from segpipe.distributed import environment
from segpipe.errors import ConfigError
from segpipe.files import not_written
from segpipe.processes import Watcher, before_end, end_process, process_start, this_host

LOCK = "run.lock"
BEAT_S = 15.0
SILENT_S = 60.0  # silence after which an owner on another machine counts as dead
REMOVAL_S = 60.0  # upper limit: removing a dead owner's lock takes milliseconds


def remove_dead(folder: Path) -> None:
    """Delete the lock of a dead owner, such as a child process that was killed."""
    with contextlib.suppress(ConfigError, OSError):
        if (dead := dead_lock(folder / LOCK)) is not None:
            _remove(folder / LOCK, dead)


def in_use(folder: Path) -> bool:
    """Whether a living process owns the folder; False as well if that cannot be told."""
    path = folder / LOCK
    with contextlib.suppress(OSError):
        return _lives(_owner(path.read_bytes()), path)
    return False


@contextlib.contextmanager
def held(folder: Path) -> Iterator[str]:
    """Context that owns the folder; yields a message about the dead previous owner, or "".

    Raises ConfigError while another process owns the folder, NotWritten when the lock cannot be written.
    """
    lock = _Lock(folder / LOCK)
    try:
        taken_over = lock.take()
    except OSError as error:
        raise not_written(lock.path, error) from error
    lock.watcher.start()
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
        self.watcher = Watcher(self.look, BEAT_S)
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
            if (dead := dead_lock(self.path)) is not None:
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
        """Touch the file; never in a hurry."""
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
            self.watcher.stop()
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


def _lives(owner: Owner, path: Path) -> bool:
    """Whether the owner of the lock at this path is alive; one on another machine, whether it touches the lock."""
    if owner.host == this_host():
        return process_start(owner.pid) in ("", owner.started)
    job, attempt = environment.job_attempt()
    newer = bool(job) and owner.job == job and list(owner.attempt) < attempt
    # Slurm has ended the earlier attempt; torchrun also restarts an attempt that was refused here.
    requeued = newer and owner.attempt[0] < attempt[0]
    return _silent_s(path) < (0 if requeued else 2 * BEAT_S if newer else SILENT_S)


def dead_lock(path: Path) -> bytes | None:
    """Content of a lock whose owner is dead; None without a lock.

    Raises ConfigError while the owner lives.
    """
    try:
        content = path.read_bytes()
        owner = _owner(content)
        if not _lives(owner, path):
            return content
        silent_s = _silent_s(path)
    except FileNotFoundError:
        return None
    advice = f"stop it (kill {owner.pid})"
    if owner.host != this_host():
        advice = f"stop it there (if that machine is down: its lock ends {SILENT_S:.0f} s after the last sign of life)"
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
