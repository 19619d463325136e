"""Detects what a function reads or changes besides its arguments: clocks, entropy, generators, the process, files."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

import cv2
import numpy as np

CLOCKS = (
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
)
PYTHON = (
    "seed", "random", "uniform", "triangular", "randint", "randrange", "choice", "choices", "sample", "shuffle",
    "getrandbits", "randbytes", "gauss", "normalvariate", "betavariate", "expovariate",
)  # fmt: skip
NUMPY = (
    "seed", "set_state", "rand", "randn", "randint", "random", "random_sample", "choice", "shuffle", "permutation",
    "bytes", "uniform", "normal", "standard_normal", "beta", "binomial", "exponential", "gamma", "laplace", "poisson",
    "default_rng",
)  # fmt: skip
TORCH = (
    "seed", "manual_seed", "set_rng_state", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like",
    "randperm", "normal", "bernoulli", "multinomial", "poisson",
)  # fmt: skip
WIRES = {
    "os": ("urandom", "getrandom"),
    "secrets": ("token_bytes", "token_hex", "randbits", "randbelow", "choice"),
    "uuid": ("uuid1", "uuid4"),
    "time": CLOCKS,
    "random": PYTHON,
    "numpy.random": NUMPY,
    "torch": TORCH,
    "cv2": ("setRNGSeed", "randu", "randn", "randShuffle"),
}
# What differs between processes, machines and moments. Libraries may ask for it; a transform may not.
PLACES = {
    "posix": (
        "getpid", "getppid", "cpu_count", "sched_getaffinity", "stat", "lstat", "access", "listdir", "scandir", "open",
        "mkdir", "remove", "unlink", "rename", "replace", "utime", "uname", "times", "getloadavg", "getcwd", "readlink",
        "system", "read", "write", "lseek",
    ),
    "time": ("clock_gettime", "clock_gettime_ns", "localtime", "gmtime", "strftime", "ctime", "thread_time"),
    "_posixsubprocess": ("fork_exec",),
    "resource": ("getrusage",),
    "_thread": ("start_new_thread", "get_ident", "get_native_id"),
    "_socket": ("gethostname", "socket"),
    "gc": ("get_count", "get_objects"),
    "sys": ("getrefcount",),
    "cv2": ("imwrite", "getTickCount"),
}  # fmt: skip
CODES = {
    "torch.utils.data": ("get_worker_info",),
    "torch": ("initial_seed",),
    "multiprocessing.process": ("current_process", "parent_process"),
    "threading": ("current_thread",),
    "platform": ("uname",),  # which keeps its answer
}
SYSTEM = ("/proc/", "/sys/", "/dev/")  # of whose files no two readings need be equal
# Of these, only direct calls count: the standard library asks for them on its own account, in a repr say.
DIRECT = (
    "_thread.get_ident", "_thread.get_native_id", "threading.current_thread", "multiprocessing.process.current_process",
)  # fmt: skip
DATES = ("now", "utcnow", "today")  # of classes of datetime
UNSEEDED = "numpy.random.default_rng"
SEEDED = f"{UNSEEDED}(seed)"  # allowed: the seed may come from the key
OPENCV_SEED = 0x51F15EED  # a value that no transform uses
LIBRARIES = frozenset(  # may ask for more than a transform, but not draw
    (
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
    )
)
STANDARD = sys.stdlib_module_names
LIBRARY = os.path.dirname(os.__file__)  # where the standard library lies
SILENT = (
    "importlib", "_frozen_importlib", "_frozen_importlib_external", "logging", "warnings", "linecache", "inspect",
)  # fmt: skip
identity = id  # which `watching` replaces


class _Watch:
    """What the watched calls were, and where: `called` holds the name of each and its `file:line`, if known."""

    def __init__(self) -> None:
        self.called: dict[str, str] = {}
        self._thread = threading.get_ident()
        self._functions, self._codes = (
            _by_reference(WIRES) | _by_reference(PLACES),
            _by_code(CODES),
        )

    def note(self, name: str, frame: FrameType | None, *, own: bool = False) -> None:
        """A call was made in `frame`; with `own`, it counts only if the code of no library asked for it."""
        if threading.get_ident() != self._thread:
            return
        caller = frame if name in DIRECT else _caller(frame)
        if caller is None or (own and _top(caller) in LIBRARIES | STANDARD):
            return
        known = _top(caller) not in LIBRARIES | STANDARD
        self.called.setdefault(
            name,
            f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            if known
            else "",
        )

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Sees calls whatever name the function has at the caller: imported by name, a default, in a closure."""
        if event == "call":
            if name := self._codes.get(frame.f_code):
                self.note(name, frame.f_back, own=True)
        elif event == "c_call":
            if (
                name := self._functions.get(identity(argument))
            ) and not _is_default_seed(frame):
                self.note(name, frame, own=True)
            elif (
                argument.__name__ in DATES
                and getattr(argument.__self__, "__module__", "") == "datetime"
            ):
                self.note(f"datetime.{argument.__name__}", frame)


@contextmanager
def watching() -> Iterator[dict[str, str]]:
    """Names of the watched functions that this thread calls in the block, and where; the calls go through.

    Functions are seen under any name that they were imported by. Of PLACES and CODES, only calls by the user's own code
    count: libraries may ask.
    """
    watch = _Watch()
    before: list[tuple[Any, str, Any]] = []
    wires: dict[int, Callable[..., Any]] = {}
    profile = sys.getprofile()
    try:
        for module_name, names in WIRES.items():
            module = sys.modules.get(
                module_name
            )  # a module that is not imported cannot be called
            for name in (name for name in names if hasattr(module, name)):
                original = getattr(module, name)
                wires[identity(original)] = wire = _wire(
                    original, f"{module_name}.{name}", watch
                )
                before.append((module, name, original))
                setattr(module, name, wire)
        for module in own_modules():
            for name, value in [*vars(module).items()]:
                if (by_name := wires.get(identity(value))) is not None:
                    before.append((module, name, value))
                    setattr(module, name, by_name)
        for owner, name, make in ((builtins, "hash", _hash), (builtins, "id", _id), (builtins, "open", _open),
                                  (io, "open", _open), (type(os.environ), "__getitem__", _environ)):  # fmt: skip
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, make(before[-1][2], watch))
        sys.setprofile(watch.profile)
        yield watch.called
    finally:
        sys.setprofile(profile)
        for module, name, original in before:
            setattr(module, name, original)


def _wire(
    original: Callable[..., Any], label: str, watch: _Watch
) -> Callable[..., Any]:
    def wired(*arguments: Any, **keywords: Any) -> Any:
        name = label
        if label == UNSEEDED:
            name = (
                SEEDED
                if any(value is not None for value in (*arguments, *keywords.values()))
                else f"{label}()"
            )
        watch.note(name, sys._getframe(1))
        return original(*arguments, **keywords)

    return wired


def _hash(original: Callable[[Any], int], watch: _Watch) -> Callable[[Any], int]:
    def wired(thing: Any, /) -> int:
        frame = sys._getframe(1)
        if (
            _salted(thing)
            and frame.f_code.co_name != "__hash__"
            and _caller(frame) is frame
        ):
            watch.note("hash() of text", frame, own=True)
        return original(thing)

    return wired


def _id(original: Callable[[Any], int], watch: _Watch) -> Callable[[Any], int]:
    def wired(thing: Any, /) -> int:
        frame = sys._getframe(1)
        if _caller(frame) is frame:  # copy.deepcopy asks for ids, too
            watch.note("id()", frame, own=True)
        return original(thing)

    return wired


def _open(original: Callable[..., Any], watch: _Watch) -> Callable[..., Any]:
    def wired(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if set(mode) & set("wax+"):
            watch.note(f"open(..., {mode!r})", sys._getframe(1))
        elif str(file).startswith(SYSTEM):
            watch.note(f"open({str(file)!r})", sys._getframe(1), own=True)
        return original(file, mode, *arguments, **keywords)

    return wired


def _environ(
    original: Callable[[Any, str], str], watch: _Watch
) -> Callable[[Any, str], str]:
    def wired(variables: Any, key: str) -> str:
        watch.note(f"os.environ[{key!r}]", sys._getframe(1), own=True)
        return original(variables, key)

    return wired


def _salted(thing: Any) -> bool:
    """Whether the hash of a thing is another in every process."""
    return isinstance(thing, str | bytes) or (
        isinstance(thing, tuple | frozenset) and any(map(_salted, thing))
    )


def _functions(table: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Any]]:
    """`module.name` and the function, of those modules of a table that are imported."""
    for module, names in table.items():
        for name in names:
            if (function := getattr(sys.modules.get(module), name, None)) is not None:
                yield f"{module}.{name}", function


def _by_reference(table: dict[str, tuple[str, ...]]) -> dict[int, str]:
    """Names by the id of each function that is written in C."""
    return {
        id(function): name
        for name, function in _functions(table)
        if not hasattr(function, "__code__")
    }


def _by_code(table: dict[str, tuple[str, ...]]) -> dict[CodeType, str]:
    """Names by the code of each function that is written in Python."""
    return {
        function.__code__: name
        for name, function in _functions(table)
        if hasattr(function, "__code__")
    }


def _caller(frame: FrameType | None) -> FrameType | None:
    """The nearest frame outside the standard library; None for an import, and for a line of a log."""
    while frame is not None and _top(frame) in STANDARD:
        if _top(frame) in SILENT:
            return None
        frame = frame.f_back
    return frame


def _is_default_seed(frame: FrameType) -> bool:
    """Whether numpy asks for the entropy of a bit generator, as it does for one with a key, too."""
    return (
        frame.f_code is random.SystemRandom.getrandbits.__code__
        and frame.f_locals.get("k") == 128
    )


def own_modules() -> list[ModuleType]:
    """The imported modules of the user: neither libraries nor installed."""
    return [
        module
        for name, module in [*sys.modules.items()]
        if module is not None and not foreign(name)
    ]


def foreign(module: str | None) -> bool:
    """Whether a module is no code of the user."""
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


def _top(frame: FrameType) -> str:
    top = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return "" if shadows(top) else top


def global_state() -> dict[str, bytes]:
    """State that transforms share in this process, by name, without OpenCV's generator, which cannot be read."""
    torch = sys.modules.get("torch")
    found = {
        "the generator of random": random.getstate(),
        "the global generator of numpy": np.random.get_state(),
        "OpenCV's number of threads": cv2.getNumThreads(),
    }
    if torch is not None:
        found["the global generator of torch"] = torch.get_rng_state().numpy().tobytes()
        found["torch's number of threads"] = torch.get_num_threads()
    return {name: pickle.dumps(value) for name, value in found.items()}


def switches() -> dict[str, bytes]:
    """What a transform could switch for everything else in this process, by name."""
    torch = sys.modules.get("torch")
    found = {
        "OpenCV's choice of code (setUseOptimized)": cv2.useOptimized(),
        "numpy's handling of errors (seterr)": np.geterr(),
        "the working directory": os.stat(".").st_ino,
        "the environment variables": dict(os.environ),
    }
    if torch is not None:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        kernels = (
            cudnn.benchmark,
            cudnn.deterministic,
            cudnn.allow_tf32,
            matmul.allow_tf32,
        )
        found["torch's default type"] = str(torch.get_default_dtype())
        found["torch's switches"] = (
            torch.get_deterministic_debug_mode(),
            torch.is_grad_enabled(),
            *kernels,
        )
    return {name: pickle.dumps(value) for name, value in found.items()}


def seed_globals(seed: int, *, opencv: bool = True) -> None:
    """Seed every global generator except those of CUDA."""
    random.seed(seed)
    np.random.seed(seed)
    if opencv:
        cv2.setRNGSeed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)


@contextmanager
def opencv_generator() -> Iterator[Callable[[], bool]]:
    """A function that returns whether OpenCV's generator was used or seeded in the block; call it once."""

    def draw() -> bytes:
        drawn = np.zeros((4, 1), np.int32)
        cv2.randu(drawn, 0, 2**30)  # type: ignore[call-overload]
        return drawn.tobytes()

    cv2.setRNGSeed(OPENCV_SEED)
    untouched = draw()
    cv2.setRNGSeed(OPENCV_SEED)
    yield lambda: draw() != untouched


@contextmanager
def preserved() -> Iterator[None]:
    """Restores global generators and thread counts after the block; OpenCV's generator restarts."""
    torch = sys.modules.get("torch")
    python, numpy, opencv_threads = (
        random.getstate(),
        np.random.get_state(),
        cv2.getNumThreads(),
    )
    torchs = (
        (torch.get_rng_state(), torch.get_num_threads()) if torch is not None else None
    )
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        cv2.setRNGSeed(0)
        set_opencv_threads(opencv_threads)
        if torch is not None and torchs is not None:
            torch.set_rng_state(torchs[0])
            if torch.get_num_threads() != torchs[1]:
                torch.set_num_threads(torchs[1])


def set_opencv_threads(number: int) -> None:
    """Set OpenCV's number of threads after ending its running ones.

    A forked process inherits OpenCV's pool without its threads, and can wait for them forever.
    """
    cv2.setNumThreads(1)  # only this number ends OpenCV's threads at once
    cv2.setNumThreads(number)


@contextmanager
def another_worker(*, environment: bool = False) -> Iterator[None]:
    """In the block, this process looks to a transform like a loader worker of another layout: other number, other seed.

    With `environment`, in a process of its own, also like one that was started with other numbers in its variables, and
    its threads take turns more often.
    """
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    if worker is None:  # then nothing can ask
        yield
        return
    own, interval = worker._worker_info, sys.getswitchinterval()
    place, number = (own.id, own.num_workers) if own is not None else (0, 0)
    if environment:
        os.environ.update(
            {
                name: str(int(value) + 3)
                for name, value in os.environ.items()
                if value.isdecimal()
            }
        )
        sys.setswitchinterval(1e-5)
    worker._worker_info = worker.WorkerInfo(
        id=place + 7, num_workers=number + 11, seed=OPENCV_SEED, dataset=None
    )
    try:
        yield
    finally:
        worker._worker_info = own
        sys.setswitchinterval(interval)
