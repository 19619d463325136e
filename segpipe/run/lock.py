"""The lock of a run's folder: one process at a time trains into it, also on a file system that machines share.

The lock is a file that its owner creates with O_EXCL, touches every BEAT_S, and deletes at the end. It does not rely on
flock, which network file systems may ignore, nor on the clocks of the machines: ages are differences of the file
system's own times. A copy of the folder has a copy of the lock, which binds nobody: it is told by the folder that the
lock names, not by device and inode numbers, which differ between machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from segpipe.errors import CheckpointError, ConfigError
from segpipe.processes import process_start, this_host
from segpipe.train.stop import stopping

NAME = "run.lock"
BEAT_S = 15.0
SILENT_S = (
    600.0  # without a touch, after which an owner on another machine counts as dead
)
REMOVAL_S = 60.0  # the removal of a dead owner's lock takes milliseconds


def check(folder: Path) -> None:
    """Raise ConfigError while a living process owns the folder. Raises OSError."""
    _stale(folder / NAME)


def remove_dead(folder: Path) -> None:
    """Delete the lock of an owner that is dead, such as a child process that was killed."""
    with contextlib.suppress(ConfigError, OSError):
        if (stale := _stale(folder / NAME)) is not None:
            _remove(folder / NAME, stale[0])


def remove_leftovers(folder: Path) -> None:
    """Delete old temporary files of a folder that is owned: those of processes that were killed on other machines."""
    with contextlib.suppress(OSError):
        for path in folder.glob(".*.tmp"):
            if _file_system_time(folder) - path.stat().st_mtime > SILENT_S:
                path.unlink()


@contextlib.contextmanager
def held(folder: Path, *, released_by_signals: bool) -> Iterator[str]:
    """Own the folder; gives a line about the dead owner from whom the lock was taken over, or "".

    Raises ConfigError while another process owns the folder, CheckpointError when the lock cannot be written.
    With `released_by_signals`, SIGTERM, SIGHUP and SIGUSR2 end the process as they do by default, but release the lock
    first.
    Without, they end it even inside a collective, and what started the process removes the lock.
    """
    lock = _Lock(folder / NAME)
    try:
        dead = lock.take()
    except OSError as error:
        raise CheckpointError(
            f"{lock.path} could not be written: {error.strerror or error}."
        ) from error
    try:
        with (
            lock.released_by_signals()
            if released_by_signals
            else contextlib.nullcontext()
        ):
            yield dead
    finally:
        lock.release()


class _Lock:
    def __init__(self, path: Path) -> None:
        self.path, self._pid, self._since, self._content = (
            path,
            os.getpid(),
            time.time(),
            b"",
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._touch_until_released, name="run-lock", daemon=True
        )

    def take(self) -> str:
        """Create the file; returns a line if it was taken over. Raises ConfigError, OSError."""
        dead = ""
        while True:
            if (stale := _stale(self.path)) is not None:
                content, reason = stale
                dead = f"{self.path.parent}: taken over from {_who(content)}, {reason}."
                _remove(self.path, content)
            with contextlib.suppress(
                FileExistsError
            ):  # another job was faster: look again
                self._create()
                self._thread.start()
                return dead

    def _create(self) -> None:
        """Raises OSError. Each file has its own id: a folder that was moved is no copy of one made in its place."""
        owner = {
            "id": uuid.uuid4().hex,
            "folder": os.path.realpath(self.path.parent),
            "host": this_host(),
            "pid": self._pid,
            "started": process_start(self._pid),
            "since": self._since,
        }
        self._content = json.dumps(owner).encode()
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(file, self._content)
            os.fsync(file)
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(file)

    def _touch_until_released(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(
                OSError
            ):  # of a file system that is away: the next touch may reach it
                self._touch()

    def _touch(self) -> None:
        try:
            found = self.path.read_bytes()
        except FileNotFoundError:  # deleted by hand
            self._create()
            return
        if found == self._content:
            os.utime(self.path)
        elif (
            found and not self._ended.is_set()
        ):  # this process was suspended for so long that it counted as dead
            lost = f"{self.path.parent} was taken over by {_who(found)}, so this run ends without saving."
            print(lost, file=sys.stderr, flush=True)
            os._exit(ConfigError.exit_code)

    def release(self) -> None:
        """Delete the file, unless this is a forked child or another job has taken over. A second call does nothing."""
        if os.getpid() != self._pid or self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(BEAT_S)
        with contextlib.suppress(OSError):
            if self.path.read_bytes() == self._content:
                self.path.unlink()

    @contextlib.contextmanager
    def released_by_signals(self) -> Iterator[None]:
        """Release before a signal ends the process, where nothing else handles it."""

        def end(number: int, _: object) -> None:
            self.release()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

        main = (
            threading.current_thread() is threading.main_thread()
        )  # only it may set handlers
        ours = [n for n in stopping() if main and signal.getsignal(n) == signal.SIG_DFL]
        for number in ours:
            signal.signal(number, end)
        try:
            yield
        finally:
            for number in ours:
                if signal.getsignal(number) == end:
                    signal.signal(number, signal.SIG_DFL)


def _stale(path: Path) -> tuple[bytes, str] | None:
    """Content of a lock whose owner is dead or owns another folder, and which of the two; None without a lock.

    Raises ConfigError while the owner lives.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(
                f"{path} is no file that a run wrote (a folder, link or pipe). Remove it."
            )
        content, touched = path.read_bytes(), path.stat().st_mtime
        silent_s = max(_file_system_time(path.parent) - touched, 0.0)
    except FileNotFoundError:
        return None
    owner = _parse(content)
    if owner.get("host") == this_host():
        started = process_start(owner["pid"])
        alive = started is not None and (not started or started == owner["started"])
        advice = f"stop it (kill {owner['pid']})"
    else:
        alive = silent_s < SILENT_S
        advice = f"stop it there (if that machine is down: its lock ends {SILENT_S:.0f} s after the last sign of life)"
    if alive:
        elsewhere = owner.get("folder", "")  # "": an older lock, or not readable
        if _is_copy(path, content, elsewhere):
            return (
                content,
                f"which trains into {elsewhere}: this folder is a copy of it",
            )
        moved = elsewhere not in ("", os.path.realpath(path.parent))
        copied = (
            f" If this folder is a copy of {elsewhere}, and not that folder moved, delete {path}."
            if moved
            else ""
        )
        raise ConfigError(
            f"{path.parent} is in use by {_who(content)}; last sign of life {silent_s:.0f} s ago. "
            f"Wait for its end or {advice}, or choose another run.name.{copied}"
        )
    return content, "which is gone"


def _is_copy(path: Path, content: bytes, folder: str) -> bool:
    """Whether a lock was copied from `folder`, where its owner holds it still; if in doubt, False.

    A folder is the same under two names (links, mounts) if a new file in one is seen in the other.
    """
    original, probe = (
        Path(folder, NAME),
        path.with_name(f".copy.{uuid.uuid4().hex}.tmp"),
    )
    try:
        if original.read_bytes() != content or original.samefile(
            path
        ):  # the same: folders with links to one file
            return False
        probe.write_bytes(b"")
        return not original.with_name(probe.name).exists()
    except (OSError, ValueError):
        return False
    finally:
        probe.unlink(missing_ok=True)


def _parse(content: bytes) -> dict[str, Any]:
    """The owner; empty while the lock is being written, or when it is damaged."""
    try:
        owner = json.loads(content)
        known = (
            isinstance(owner["host"], str)
            and owner["started"] is not None
            and owner["since"] >= 0
        )
        owner["folder"] = str(owner.get("folder", ""))
        return owner if known and 0 < int(owner["pid"]) == owner["pid"] < 2**31 else {}
    except (ValueError, TypeError, KeyError):
        return {}


def _who(content: bytes) -> str:
    owner = _parse(content)
    if not owner:
        return "an unknown process (its lock is not readable)"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner["since"]))
    return f"process {owner['pid']} on {owner['host'].rpartition('-')[0] or owner['host']} since {since}"


def _file_system_time(folder: Path) -> float:
    """The time that the file system of `folder` gives to a file now."""
    probe = folder / f".clock.{this_host()}.{os.getpid()}.tmp"
    try:
        probe.write_bytes(b"")
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _remove(path: Path, stale: bytes) -> None:
    """Delete the lock with this content, but not one that another job put in its place meanwhile.

    One job at a time may delete: the one that created the file beside it.
    """
    beside = path.with_name(f".{NAME}.removal")
    try:
        os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):
            if (
                _file_system_time(path.parent) - beside.stat().st_mtime > REMOVAL_S
            ):  # its job was killed
                beside.unlink()
        time.sleep(0.02)
        return
    try:
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes() == stale:
                path.unlink()
    finally:
        beside.unlink(missing_ok=True)
