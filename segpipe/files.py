"""Files on disk: written atomically, appended completely or not at all; transient errors are retried."""

import contextlib
import errno
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

from segpipe.errors import NotWritten
from segpipe.processes import process_start, this_host

T = TypeVar("T")

# Transient errors; Python itself retries EINTR.
PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT)
# A restarting file server answers again within seconds.
PAUSES_S = (0.1, 0.4, 1.5, 4.0, 10.0)
ROOT = Path(__file__).resolve().parents[1]  # of the checkout, if it is one
FULL = "Free some space"
FAULTY = f"All {len(PAUSES_S) + 1} attempts failed: see dmesg, and check the disk or the file server"
# What to do about a disk error.
ADVICE = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: "Its file system is read-only, perhaps after a disk fault: see dmesg and mount it writable",
    errno.EACCES: "This user may not write it: check its owner and permissions (ls -l)",
    errno.EFBIG: "This process may not write a file of this size: raise the limit (ulimit -f)",
    **dict.fromkeys(PASSING, FAULTY),
}
# Not in ADVICE: files that are read may also be missing or a folder.
OF_OUTPUTS = {
    errno.EISDIR: "A folder is in its place: move it away",
    errno.ENOENT: "It or its folder was deleted or moved during the run: move it back",
}


def patiently(path: Path | str, work: Callable[[], T]) -> T:
    """The result of `work`, retried after a transient error (PASSING), with one line on the console.

    `work` is called up to 6 times within 16 s, so it must start over each time. Raises the last OSError.
    """
    for number, pause in enumerate(PAUSES_S):
        try:
            return work()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            if not number:
                again = f"Trying again for {sum(PAUSES_S):.0f} s."
                print(f"{path}: {error.strerror}. {again}", file=sys.stderr, flush=True)
        time.sleep(pause)
    return work()


def read(path: Path | str, head: int = 0, tail: int = 0) -> bytes:
    """Content of a file, or only its first `head` and last `tail` bytes. Raises OSError."""

    def attempt() -> bytes:
        with open(path, "rb", buffering=0) as file:
            if not head:
                return file.read()
            first = file.read(head)
            file.seek(-tail, os.SEEK_END)
            return first + file.read()

    return patiently(path, attempt)


def open_to_append(path: Path) -> int:
    """Descriptor for `append` of the file at `path`, which is created if missing. Raises OSError.

    Unbuffered, because a forked loader process would write a buffer's content a second time.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return patiently(path, lambda: os.open(path, flags, 0o666))


def append(path: Path, descriptor: int, content: bytes) -> None:
    """Append all of `content` to the open file at `path`, or nothing.

    Raises NotWritten, also if the file was deleted or moved.
    """
    before = -1

    def attempt() -> None:
        path.stat()
        # A partial record would corrupt everything after it.
        os.ftruncate(descriptor, before)
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]

    try:
        before = os.lseek(descriptor, 0, os.SEEK_END)
        patiently(path, attempt)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise not_written(path, error) from error


def file_sha256(path: Path | str) -> str:
    """SHA-256 of a file, as hex digits. Raises OSError."""

    def digest() -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return patiently(path, digest)


def sha256_below(folder: Path, suffixes: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the files below a folder whose names end so, by path relative to it. Raises OSError."""
    return {
        path.relative_to(folder).as_posix(): file_sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in suffixes
    }


def sha256_of(content: bytes | memoryview) -> str:
    """SHA-256 of the bytes, as hex digits."""
    return hashlib.sha256(content).hexdigest()


def files_below(folder: Path | str) -> list[str]:
    """Paths of all files below a folder, except in hidden folders; follows links to folders.

    Visits each real folder once, so that circular links end; files reachable without links come first.
    """
    found: list[str] = []
    seen: set[str] = set()
    waiting = [str(folder)]
    for start in waiting:
        for place, folders, files in os.walk(start):
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [os.path.join(place, name) for name in files]
            paths = [os.path.join(place, name) for name in folders]
            waiting += filter(os.path.islink, paths)
    return found


def not_written(path: Path, error: OSError, kept: str = "") -> NotWritten:
    """The error for a file that could not be written, with what to do; `kept` says what still exists."""
    advice = (ADVICE | OF_OUTPUTS).get(error.errno or 0, FULL)
    return NotWritten(
        f"{path} could not be written: {error.strerror or error}{kept and f'; {kept}'}. {advice}, or choose another "
        # The suffixes are those of files that only a training writes.
        "place (out, or run.root), then repeat the command"
        f"{' with run.exists=resume' * (path.suffix in ('.pt', '.bin', '.jsonl'))}."
    )


def write_atomically(path: Path, content: bytes) -> None:
    """As `put`, but survives a power cut and retries transient disk errors.

    Raises NotWritten if it cannot be written, for example to a full disk; the old file is then still at `path`.
    """
    try:
        patiently(path, lambda: put(path, content, durable=True))
    except OSError as error:
        kept = (
            "the file that was there before is unharmed"
            if path.exists()
            else "no file was there before"
        )
        raise not_written(
            path, error, f"{len(content) / 2**20:.1f} MiB, {kept}"
        ) from error


def put(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write `content` to `path` so that a crash leaves either the old file or the new one, never a partial one.

    With `durable`, it is on the disk afterwards, and temporary files of killed processes are removed. Raises OSError.
    """
    if path.exists() and not path.is_file():
        # A rename would replace /dev/null by a file, for all processes of the machine.
        path.write_bytes(content)
        return
    aside = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    if durable:
        own = f".{path.name}.{this_host()}."
        aside = path.with_name(f"{own}{os.getpid()}.tmp")
        for left in path.parent.glob(f"{escape(own)}*.tmp"):
            pid = left.name.split(".")[-2]
            if pid.isdecimal() and process_start(int(pid)) is None:
                left.unlink(missing_ok=True)
    try:
        aside.write_bytes(content)
        if durable:
            sync(aside)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    if durable:
        sync(path.parent)  # the rename itself must survive a power cut


def sync(path: Path) -> None:
    """Flush a file or folder to disk: a power cut could keep the new name and lose the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """The JSON value in a file. Raises OSError, and ValueError for invalid or too deeply nested JSON."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def plain(value: Any) -> Any:
    """`value` as JSON types; arrays and tensors become lists, NaN and infinities become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(content: Mapping[str, Any]) -> bytes:
    """`plain(content)` as indented JSON with a newline at the end."""
    return (json.dumps(plain(content), indent=2, allow_nan=False) + "\n").encode()


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit of the checkout at `root`, and whether tracked files differ; None without a checkout or git."""
    if not (root / ".git").exists():
        return None
    # The commit, or with changed files COMMIT-dirty; --exclude=* names no tag instead.
    arguments = ["--always", "--abbrev=40", "--exclude=*", "--dirty"]
    command = ["git", "-C", str(root), "describe", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    commit, _, mark = done.stdout.strip().partition("-")
    return {"commit": commit, "dirty": bool(mark), "known_at": "export"}
