"""digest.c, compiled for this processor at first use and kept in the user's cache; 15 times as fast as numpy.

Without a compiler, or a cache that can be written, digest.py computes the same numbers with numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("digest.c")
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
COMPILE_S = 300


@lru_cache(maxsize=1)
def kernels() -> Any:
    """digest.c as a ctypes library, whose calls release the GIL; None where it cannot be compiled or loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    for folder in _folders() if compiler else ():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            library = ctypes.CDLL(str(_library(str(compiler), folder)))
            pointer, number = ctypes.c_void_p, ctypes.c_int64
            library.segpipe_digests.argtypes = [*[pointer] * 3, *[number] * 3, pointer, number, pointer]
            library.segpipe_digests.restype = None
            return library
    return None


def _folders() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segpipe"
    yield Path(tempfile.gettempdir()) / f"segpipe-{os.getuid()}"


def _library(compiler: str, folder: Path) -> Path:
    """The compiled file; several processes may compile it at once. Raises OSError and SubprocessError."""
    flags = [*FLAGS, *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else [])]
    key = hashlib.sha256("\n".join([SOURCE.read_text(), compiler, *flags, _processor()]).encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # code loaded from there runs as this user
        raise PermissionError(f"{folder} belongs to another user")
    path = folder / f"digest-{key}.so"
    if not path.exists():
        temporary = folder / f"digest-{key}-{os.getpid()}.so"
        try:
            command = [compiler, *flags, str(SOURCE), "-o", str(temporary)]
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _processor() -> str:
    """What `-march=native` means here: machines of several kinds may share a home folder."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return platform.processor()
