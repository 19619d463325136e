"""Compiles small C files for this CPU at first use and keeps them in the user's cache; tells whether Triton works.

OpenMP divides their loops among torch's threads: other threads would wait for cores on which torch's still spin after
its own loops. If the compiler has no OpenMP, they use one thread.

Without a compiler or a writable cache, the callers fall back to numpy or torch.
"""

import contextlib
import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch

# Without contraction and -ffast-math, float bits do not depend on the instruction set: IEEE 754 defines every sum and
# product, and the compiler may not reorder them. Nobody asks which exceptions they raised: without AVX512's masks, GCC
# computes a loop with a choice in vectors only then.
FLAGS = (
    "-O3", "-march=native", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC"
)  # fmt: skip
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


@cache
def triton_builds() -> bool:
    """Whether Triton can build and start kernels here; warns if not.

    Loss, resizing and digests on a GPU all depend on it. It does not check results: `segpipe gpu-check` compares them
    with those of a CPU.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    fault, advice = "", ""
    if not find_spec("triton"):
        fault, advice = "triton is not installed", "Install it: pip install triton."
    elif not (compiler and header.is_file()):
        fault = "gcc (or clang, or CC) or Python.h is missing"
        advice = "Install gcc and python3-dev."
    elif torch.cuda.is_available():
        try:
            start_a_kernel(torch.device("cuda"))
        except Exception as error:
            fault = f"Triton failed to start a kernel ({error!r})"
            advice = "Run segpipe gpu-check to see what works."
    if fault:
        warnings.warn(
            f"{fault}: on a GPU, torch computes the loss, resizing and digests instead, which takes more time and "
            f"memory. {advice}",
            stacklevel=2,
        )
    return not fault


def start_a_kernel(device: torch.device) -> None:
    """Build and start an empty Triton kernel. Passes on any error of Triton, the compiler or the driver."""
    import triton  # takes seconds, and is not installed everywhere

    def nothing(given):  # type: ignore[no-untyped-def] # Triton reads annotations
        return

    triton.jit(nothing)[(1,)](torch.zeros(1, device=device))


def threads() -> int:
    """Number of threads that a call may use: as many as torch, whose OpenMP team it shares; one in a forked process.

    The team does not survive a fork, and a call that needs it there would wait forever.
    """
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one CPU thread, because the number of threads changes sums. A context manager or decorator."""
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
    """Path of the compiled file; several processes may compile at once. Raises OSError or SubprocessError."""
    if platform.machine() == "x86_64":
        command = [*command, "-mprefer-vector-width=512"]
    parts = [source.read_text(), *command, _processor()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):  # code loaded from there runs as this user
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
    """What `-march=native` means here; part of the cache key, because different machines may share a home folder."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
