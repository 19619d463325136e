"""Disks that hesitate are tried again, within limits; what is appended is whole or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.ETIMEDOUT,
)  # Python itself tries EINTR again
PAUSES_S = (
    0.1,
    0.4,
    1.5,
    4.0,
    10.0,
)  # a file server that restarts answers again within seconds
CONTINUE = "or choose another run.root, then continue with run.exists=resume."
FULL = f"Free some space, {CONTINUE}"
READ_ONLY = f"Its file system is read-only, as after a fault of a disk: see dmesg and mount it writable, {CONTINUE}"
FAULTY = f"It was tried {len(PAUSES_S) + 1} times: see dmesg, check the disk or the file server, {CONTINUE}"
TOO_LARGE = f"This process may not write a file of this size: raise the limit (ulimit -f), {CONTINUE}"
FOLDER = f"A folder is in its place: move it away, {CONTINUE}"
ADVICE = {
    errno.EROFS: READ_ONLY,
    errno.EFBIG: TOO_LARGE,
    errno.EISDIR: FOLDER,
    **dict.fromkeys(PASSING, FAULTY),
}
DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EFBIG,
    *PASSING,
)  # wherever they come from


def patiently(path: Path | str, work: Callable[[], T]) -> T:
    """What `work` returns; an error that may pass (PASSING) is waited for, with one line on the console.

    `work` is called up to 6 times within 16 s, so it must start anew each time. Raises the last OSError.
    """
    for number, pause in enumerate(PAUSES_S):
        try:
            return work()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            if not number:
                print(
                    f"{path}: {error.strerror}. Trying again for {sum(PAUSES_S):.0f} s.",
                    file=sys.stderr,
                    flush=True,
                )
        time.sleep(pause)
    return work()


def append(path: Path, descriptor: int, content: bytes) -> None:
    """Append all of `content` to the file that is open at `path`, or nothing. Raises OSError."""
    before = os.lseek(descriptor, 0, os.SEEK_END)

    def attempt() -> None:
        if os.lseek(descriptor, 0, os.SEEK_END) != before:
            os.ftruncate(
                descriptor, before
            )  # a part of it would spoil all that follows
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]

    try:
        patiently(path, attempt)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
        raise
