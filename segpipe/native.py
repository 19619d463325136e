"""Pages of C, compiled for this processor at first use and kept in the user's cache; and whether Triton works here.

Their loops are divided by OpenMP, among the threads that torch has: others would wait for a core where torch's still
spin after its own loops. Where the compiler has no OpenMP they take one thread.

Without a compiler, or a cache that can be written, the caller does the same in numpy or torch.
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

# Without contraction, and without -ffast-math, the bits of floats do not depend on the instruction set: IEEE 754 gives
# those of every sum and product, and the compiler may not change their order.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
COMPILE_S = 300
_PROCESS = os.getpid()


@lru_cache(maxsize=8)
def load(source: Path) -> ctypes.CDLL | None:
    """The C file as a library, whose calls release the GIL; None where it cannot be compiled or loaded."""
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
    """Whether Triton builds and starts kernels here; warns where it does not.

    Loss, resizing and digests of a GPU all ask this. It does not say whether the results are right: gpu-check compares
    them with those of a CPU.
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
            advice = "segpipe gpu-check says what works."
    if fault:
        warnings.warn(
            f"{fault}: on a GPU the loss, resizing and digests are computed by torch, which takes more time and "
            f"memory. {advice}",
            stacklevel=2,
        )
    return not fault


def start_a_kernel(device: torch.device) -> None:
    """Has Triton build and start a kernel that does nothing. Raises whatever Triton, the compiler or the driver do."""
    import triton  # takes seconds, and is not installed everywhere

    def nothing(given):  # type: ignore[no-untyped-def] # Triton reads annotations
        return

    triton.jit(nothing)[(1,)](torch.zeros(1, device=device))


def threads() -> int:
    """How many threads a call may take: those of torch, whose team of OpenMP it shares; one in a forked process.

    The team does not survive a fork, and a call that needed it there would wait for ever.
    """
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one CPU thread: their number changes sums. Around a block, or as the decorator of a function."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _folders() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # no home
        yield (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segpipe"
        )
    yield Path(tempfile.gettempdir()) / f"segpipe-{os.getuid()}"


def _library(source: Path, command: Sequence[str], folder: Path) -> Path:
    """The compiled file; several processes may compile it at once. Raises OSError and SubprocessError."""
    command = [
        *command,
        *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
    ]
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
    """What `-march=native` means here: machines of several kinds may share a home folder."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
