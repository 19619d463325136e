"""C code, compiled for this processor at first use and kept in the user's cache.

OpenMP divides its loops among torch's own threads, since other threads would wait for cores on which torch's still
spin after a loop. Without OpenMP in the compiler, it uses one thread.

Without a compiler or a writable cache, the caller does the same in numpy or torch.
"""

import contextlib
import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch

# Without contraction and -ffast-math, the bits of floats do not depend on the instruction set: IEEE 754 defines every
# sum and product, and the compiler must not reorder them.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
COMPILE_S = 300
_PROCESS = os.getpid()


@lru_cache(maxsize=8)
def load(source: Path) -> ctypes.CDLL | None:
    """The C file as a library, whose calls release the GIL; None if it cannot be compiled or loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    for threads, folder in itertools.product(
        (["-fopenmp"], []), _folders() if compiler else ()
    ):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return ctypes.CDLL(
                str(_library(source, [str(compiler), *FLAGS, *threads], folder))
            )
    return None


def threads() -> int:
    """Number of threads that a call may use: torch's, whose OpenMP team it shares; 1 in a forked process.

    The team does not survive a fork: a call that used it there would wait forever.
    """
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one CPU thread, since the number of threads changes sums. For a block, or as a decorator."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _folders() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # no home folder
        yield (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segpipe"
        )
    yield Path(tempfile.gettempdir()) / f"segpipe-{os.getuid()}"


def _library(source: Path, command: Sequence[str], folder: Path) -> Path:
    """Path of the compiled file; several processes may compile it at once. Raises OSError and SubprocessError."""
    command = [
        *command,
        *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
    ]
    parts = [source.read_text(), *command, _processor()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):  # its code runs as this user
        raise PermissionError(f"others can write into {folder}")
    path = folder / f"{source.stem}-{key}.so"
    if not (path.exists() and _is_private(path)):
        temporary = folder / f"{source.stem}-{key}-{os.getpid()}.so"
        try:
            command = [*command, str(source), "-o", str(temporary)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            temporary.chmod(0o700)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _is_private(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _processor() -> str:
    """Features of this processor, since different machines with `-march=native` may share a home folder."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
