"""Stacks of all threads of this rank, written to a file: on SIGUSR1, and before the run is ended by a verdict."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
import time
from pathlib import Path

RECORDER_S = 2.0  # for torch to dump its recorder; on a hung GPU it may never return


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

    def dump_recorder(self) -> None:
        """Write torch's record of its last collectives, DDP's included, beside the file, for `torchfrtrace`."""
        path = self.path.with_name(f"recorder_{self.path.stem}.pickle")
        recorder = threading.Thread(target=_dump_recorder, args=(path,), daemon=True)
        recorder.start()
        recorder.join(RECORDER_S)

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


def _dump_recorder(path: Path) -> None:
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    if dist.is_initialized():
        name = "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace"
        if dump := getattr(_distributed_c10d, name, None):  # not in every torch
            # Looking up the lines of its stacks takes seconds, and ours are there.
            path.write_bytes(dump(includeStackTraces=False))
