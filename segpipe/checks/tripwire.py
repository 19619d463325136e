"""Detects what a function asks of the world besides its arguments, and what it changes for the whole process."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import cv2
import numpy as np

# torch is imported inside functions: a spawned process imports this module before it has read its arguments, for which
# the other process waits.

# Functions that no transform may call, and no library for it: clocks and entropy.
CLOCKS_AND_ENTROPY = {
    "os": "urandom getrandom",
    "uuid": "_generate_time_safe",
    "time": "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time",
}
# What differs between processes, machines and moments. Libraries may ask for it; a transform may not.
SURROUNDINGS = {
    "posix": (
        "getpid getppid cpu_count sched_getaffinity stat lstat access listdir scandir open mkdir remove unlink rename "
        "replace utime uname times getloadavg getcwd readlink system read write lseek"
    ),
    "time": "clock_gettime clock_gettime_ns localtime gmtime strftime ctime thread_time",
    "_posixsubprocess": "fork_exec",
    "resource": "getrusage",
    "_thread": "start_new_thread get_ident get_native_id",
    "_socket": "gethostname socket",
    "gc": "get_count get_objects",
    "sys": "getrefcount",
    "builtins": "id",
    "cv2": "imwrite getTickCount getNumThreads",
    "torch": "initial_seed",
    "torch.utils.data": "get_worker_info",
    "multiprocessing.process": "current_process parent_process",
    "threading": "current_thread",
    "platform": "uname",  # which keeps its answer
}
# Of these, only direct calls count: the standard library asks for them on its own account, for a copy say.
DIRECT = (
    "builtins.id", "_thread.get_ident", "_thread.get_native_id", "threading.current_thread",
    "multiprocessing.process.current_process",
)  # fmt: skip
DATES = ("now", "utcnow", "today")  # of classes of datetime
SYSTEM = ("/proc/", "/sys/", "/dev/")  # of whose files no two readings need be equal
UNSEEDED = "numpy.random.default_rng()"
SEEDED = "numpy.random.default_rng(seed)"  # allowed: the seed may come from the key
LIBRARIES = frozenset(
    [
        "albumentations",
        "albucore",
        "numpy",
        "torch",
        "torchvision",
        "cv2",
        "scipy",
        "skimage",
        "PIL",
        "segpipe",
    ]
)
STANDARD = sys.stdlib_module_names
LIBRARY = os.path.dirname(os.__file__)  # where the standard library lies
WATCH_SEED = 20_003  # of the global generators while calls are watched
# Parts of the standard library that may ask for anything.
SILENT = frozenset(
    [
        "importlib",
        "_frozen_importlib",
        "_frozen_importlib_external",
        "logging",
        "warnings",
        "linecache",
        "inspect",
    ]
)


class _Watch:
    """What the watched calls were, and where: `called` holds the name of each and its `file:line`, if known."""

    def __init__(self) -> None:
        self.called: dict[str, str] = {}
        self._thread = threading.get_ident()
        self._never = _by_id(CLOCKS_AND_ENTROPY)
        self._not_by_users = _by_id(SURROUNDINGS)
        self._environment = type(os.environ).__getitem__.__code__

    def note(self, name: str, frame: FrameType | None, *, own: bool = False) -> None:
        """A call was made in `frame`; with `own`, it counts only if the code of no library asked for it."""
        caller = frame if name in DIRECT else _caller(frame)
        if caller is None or threading.get_ident() != self._thread:
            return
        is_own = _top(caller) not in LIBRARIES | STANDARD
        if is_own or not own:
            file = os.path.basename(caller.f_code.co_filename)
            self.called.setdefault(name, f"{file}:{caller.f_lineno}" if is_own else "")

    def profile(self, frame: FrameType, event: str, function: Any) -> None:
        """Sees calls whatever name the function has at the caller: imported by name, a default, in a closure."""
        if event == "call":
            code = frame.f_code
            if name := self._not_by_users.get(id(code)):
                self.note(name, frame.f_back, own=True)
            elif code is self._environment:
                key = frame.f_locals["key"]
                self.note(f"os.environ[{key!r}]", frame.f_back, own=True)
        elif event == "c_call":
            if name := self._never.get(id(function)):
                if not _is_default_seed(frame):
                    self.note(name, frame)
            elif name := self._not_by_users.get(id(function)):
                self.note(name, frame, own=True)
            elif function.__name__ in DATES and "datetime" in repr(function.__self__):
                self.note(f"datetime.{function.__name__}", frame)

    def hash(self, thing: Any, /) -> int:
        """In place of hash(), which each process salts for text."""
        frame = sys._getframe(1)
        is_direct = frame.f_code.co_name != "__hash__" and _caller(frame) is frame
        if is_direct and _is_salted(thing):
            self.note("hash() of text", frame, own=True)
        return _HASH(thing)

    def open(self, file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        """In place of open()."""
        if set(mode) & set("wax+"):
            self.note(f"open(..., {mode!r})", sys._getframe(1))
        elif str(file).startswith(SYSTEM):
            self.note(f"open({str(file)!r})", sys._getframe(1), own=True)
        return _OPEN(file, mode, *given, **named)

    def default_rng(self, seed: Any = None) -> np.random.Generator:
        """In place of numpy's function, which calls nothing that a profile shows."""
        self.note(UNSEEDED if seed is None else SEEDED, sys._getframe(1))
        return _DEFAULT_RNG(seed)


_HASH, _OPEN, _DEFAULT_RNG = hash, open, np.random.default_rng


@contextmanager
def watching() -> Iterator[dict[str, str]]:
    """Names of the watched functions that this thread calls in the block, and where; the calls go through.

    Functions are seen under any name that they were imported by. Of SURROUNDINGS, only calls by the user's own code
    count: libraries may ask.
    """
    watch = _Watch()
    replaced: list[tuple[Any, str, Any]] = [
        (builtins, "hash", watch.hash),
        (builtins, "open", watch.open),
        (io, "open", watch.open),
        (np.random, "default_rng", watch.default_rng),
    ]
    for module in [*sys.modules.values()]:
        if module is None or is_foreign(module.__name__):
            continue
        for name, value in vars(module).items():
            if value is _DEFAULT_RNG:
                replaced.append((module, name, watch.default_rng))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    profile = sys.getprofile()
    try:
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
        sys.setprofile(watch.profile)
        yield watch.called
    finally:
        sys.setprofile(profile)
        for owner, name, original in before:
            setattr(owner, name, original)


def _by_id(table: Mapping[str, str]) -> dict[int, str]:
    """`module.name` of each function of the imported modules: by its id, or by that of its code if it is Python."""
    found = {}
    for module, names in table.items():
        for name in names.split():
            function = getattr(sys.modules.get(module), name, None)
            if function is not None:
                known = getattr(function, "__code__", function)
                found[id(known)] = f"{module}.{name}"
    return found


def _is_salted(thing: Any) -> bool:
    """Whether the hash of a thing is another in every process."""
    if isinstance(thing, tuple | frozenset):
        return any(map(_is_salted, thing))
    return isinstance(thing, str | bytes)


def _caller(frame: FrameType | None) -> FrameType | None:
    """The nearest frame outside the standard library; None for an import, and for a line of a log."""
    while frame is not None and (top := _top(frame)) in STANDARD:
        if top in SILENT:
            return None
        frame = frame.f_back
    return frame


def _is_default_seed(frame: FrameType) -> bool:
    """Whether numpy asks for the entropy of a bit generator, as it does for one with a key, too."""
    is_draw = frame.f_code is random.SystemRandom.getrandbits.__code__
    return is_draw and frame.f_locals["k"] == 128


def _top(frame: FrameType) -> str:
    """The package of a frame; empty for the user's own file with the name of a module of Python."""
    top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return "" if shadows(top) else top


def is_foreign(module: str | None) -> bool:
    """Whether a module is no code of the user: part of Python, a known library, or installed."""
    name = module or "builtins"
    if name.partition(".")[0] in LIBRARIES | STANDARD and not shadows(name):
        return name != "__main__"
    place = getattr(sys.modules.get(name), "__file__", None) or ""
    return not place or "site-packages" in place or "dist-packages" in place


def shadows(module: str) -> bool:
    """Whether the user's own file has the name of a module of Python, as `imp.py` or `code.py`."""
    top = module.partition(".")[0]
    place = getattr(sys.modules.get(top), "__file__", None) or LIBRARY
    return top in STANDARD and top != "__main__" and not place.startswith(LIBRARY)


def generators() -> dict[str, bytes]:
    """The global random generators by name; OpenCV's cannot be read: a draw, after which it starts again."""
    import torch

    draw = np.zeros((4, 1), np.int32)
    cv2.randu(draw, 0, 2**30)  # type: ignore[call-overload]
    cv2.setRNGSeed(WATCH_SEED)
    return {
        "the generator of random": pickle.dumps(random.getstate()),
        "the global generator of numpy": pickle.dumps(np.random.get_state()),
        "the global generator of torch": torch.get_rng_state().numpy().tobytes(),
        "the global generator of OpenCV": draw.tobytes(),
    }


def switches() -> dict[str, Any]:
    """What a transform could switch for everything else in this process, by name."""
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "OpenCV's number of threads": cv2.getNumThreads(),
        "OpenCV's choice of code (setUseOptimized)": cv2.useOptimized(),
        "numpy's handling of errors (seterr)": np.geterr(),
        "the working directory": os.stat(".").st_ino,
        "the environment variables": dict(os.environ),
        "the number of threads of this process": threading.active_count(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's default type": torch.get_default_dtype(),
        "torch's switches": (
            torch.get_deterministic_debug_mode(),
            torch.is_grad_enabled(),
            cudnn.benchmark,
            cudnn.deterministic,
            cudnn.allow_tf32,
            matmul.allow_tf32,
        ),
    }


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose values are not equal."""
    return [name for name, value in after.items() if value != before[name]]


def seed_globals(seed: int) -> None:
    """Seed every global generator except those of CUDA."""
    import torch

    random.seed(seed)
    np.random.seed(seed)
    cv2.setRNGSeed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved() -> Iterator[None]:
    """Restores the global generators after the block; OpenCV's restarts."""
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    torchs = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
        cv2.setRNGSeed(0)


def set_opencv_threads(number: int) -> None:
    """Set OpenCV's number of threads after ending its running ones.

    A forked process inherits OpenCV's pool without its threads, and can wait for them forever.
    """
    cv2.setNumThreads(1)  # only this number ends OpenCV's threads at once
    cv2.setNumThreads(number)
