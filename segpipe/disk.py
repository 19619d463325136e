"""Disk access that retries transient errors: hashes of files, and appends that are complete or undone."""

import contextlib
import errno
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Transient errors; Python itself retries EINTR.
PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT)
# A restarting file server answers again within seconds.
PAUSES_S = (0.1, 0.4, 1.5, 4.0, 10.0)


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


def open_to_append(path: Path) -> int:
    """Descriptor for `append` of the file at `path`, which is created if missing. Raises OSError.

    Unbuffered, because a forked loader process would write a buffer's content a second time.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return patiently(path, lambda: os.open(path, flags, 0o666))


def append(path: Path, descriptor: int, content: bytes) -> None:
    """Append all of `content` to the open file at `path`, or nothing. Raises OSError."""
    before = os.lseek(descriptor, 0, os.SEEK_END)

    def attempt() -> None:
        # A partial record would corrupt everything after it.
        os.ftruncate(descriptor, before)
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]

    try:
        patiently(path, attempt)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise


def sha256(path: Path | str) -> str:
    """SHA-256 of a file, as hex digits. Raises OSError."""

    def digest() -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return patiently(path, digest)


def sha256_below(folder: Path, suffixes: Sequence[str]) -> dict[str, str]:
    """SHA-256 of the files below a folder whose names end so, by path relative to it. Raises OSError."""
    return {
        path.relative_to(folder).as_posix(): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in suffixes
    }
