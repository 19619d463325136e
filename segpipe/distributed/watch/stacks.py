"""Stacks of all threads of this rank, written to a file: on SIGUSR1, and before the run is ended by a verdict."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import time
from pathlib import Path


class Stacks:
    """The file of this rank; removed at the end when nothing was written.

    `kill -USR1 PID` works without the interpreter, so also while a call blocks the main thread for good. A scheduler
    that sends SIGUSR1 as a warning does not end the run.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True)

    def dump(self, why: str) -> None:
        """Append a line with the time and `why`, then the stacks of all threads."""
        self._file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)

    def close(self) -> None:
        """Stop answering SIGUSR1."""
        if self._file.closed:
            return
        faulthandler.unregister(signal.SIGUSR1)
        self._file.close()
        with contextlib.suppress(OSError):  # deleted, or the folder has another file
            if self.path.stat().st_size == 0:
                self.path.unlink()
                self.path.parent.rmdir()
