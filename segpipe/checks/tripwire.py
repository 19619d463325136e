"""Detects inputs of a function besides its arguments, and state that it keeps between calls.

State is all data in its objects, classes, modules and closures.
"""

import functools
import hashlib
import os
import pickle
import random
import re
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from mmap import mmap
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import cv2
import numpy as np
import torch

# Functions that a transform must not call, not even through a library: clocks and entropy.
CLOCKS_AND_ENTROPY = {
    "os": "urandom getrandom",
    "uuid": "_generate_time_safe",
    "time": "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time",
}
# Functions whose results differ between processes, machines and times. Libraries may call them; transforms may not.
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
    "platform": "uname",  # which caches its result
}
# Of these, only direct calls count, since the standard library calls them for its own purposes, such as a copy.
DIRECT = (
    "builtins.id", "_thread.get_ident", "_thread.get_native_id", "threading.current_thread",
    "multiprocessing.process.current_process",
)  # fmt: skip
DATES = ("now", "utcnow", "today")  # methods of datetime's classes
LIBRARIES = {
    "albumentations", "albucore", "numpy", "torch", "torchvision", "cv2", "scipy", "skimage", "PIL", "segpipe",
}  # fmt: skip
STANDARD = sys.stdlib_module_names
# Parts of the standard library that may call anything.
SILENT = (
    "importlib", "_frozen_importlib", "_frozen_importlib_external", "logging", "warnings", "linecache", "inspect",
)  # fmt: skip


State = dict[str, str]  # data as text, by path, such as `Blur.apply.cache`
Parts = Iterator[tuple[str, Any]]  # path and object
# Immutable types, fully described by their text.
ATOMS = (type(None), int, float, complex, str, bytes)
# Types that lead to a function or an object through an attribute in WRAPPED.
WRAPPERS = (
    staticmethod,
    classmethod,
    property,
    MethodType,
    functools.partial,
    functools._lru_cache_wrapper,
)
WRAPPED = ("__self__", "__func__", "__wrapped__", "fget", "func", "args", "keywords")
# Attributes that albumentations sets in every call: equal after two calls with the same key. A generator that a
# transform keeps is not one of them: if used before it is seeded, its output depends on the call before.
SET_BY_CALL = re.compile(r"\.(random_generator|py_random|params)\b")


@contextmanager
def watching() -> Iterator[dict[str, str]]:
    """Yields the watched functions that this thread calls in the block, and the `file:line` of each, empty if unknown.

    Finds functions under any name: imported by name, as a default argument, in a closure. For SURROUNDINGS, only calls
    by the user's own code count, since libraries may call them. Does not block the calls.
    """
    called: dict[str, str] = {}
    thread = threading.get_ident()
    environment = type(os.environ).__getitem__.__code__
    # Name of each function, and whether only calls by the user's own code count.
    watched = {
        key: (name, own)
        for own, table in enumerate((CLOCKS_AND_ENTROPY, SURROUNDINGS))
        for key, name in _by_id(table)
    }

    def note(name: str, frame: FrameType | None, own: int) -> None:
        """Record a call made in `frame`; with `own`, only if the user's own code made it."""
        caller = frame if name in DIRECT else _caller(frame)
        if caller is None or threading.get_ident() != thread:
            return
        is_own = _top(caller) not in LIBRARIES | STANDARD
        if is_own or not own:
            file = os.path.basename(caller.f_code.co_filename)
            called.setdefault(name, f"{file}:{caller.f_lineno}" if is_own else "")

    def profile(frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_call"):
            return
        caller: FrameType | None = frame
        if event == "call":
            function, caller = frame.f_code, frame.f_back
        name, own = watched.get(id(function), ("", 1))
        if function is environment:
            name = f"os.environ[{frame.f_locals['key']!r}]"
        elif (
            event == "c_call"
            and function.__name__ in DATES
            and "datetime" in repr(function.__self__)
        ):
            name, own = f"datetime.{function.__name__}", 0
        if name and not _is_default_seed(frame):
            note(name, caller, own)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(before)


def _by_id(table: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """(id, `module.name`) of each function of imported modules; for a Python function, the id of its code."""
    for module, names in table.items():
        for name in names.split():
            function = getattr(sys.modules.get(module), name, None)
            if function is not None:
                yield id(getattr(function, "__code__", function)), f"{module}.{name}"


def _caller(frame: FrameType | None) -> FrameType | None:
    """The nearest frame outside the standard library; None for imports, logging and other SILENT modules."""
    while frame is not None and (top := _top(frame)) in STANDARD:
        if top in SILENT:
            return None
        frame = frame.f_back
    return frame


def _is_default_seed(frame: FrameType) -> bool:
    """Whether numpy draws entropy for a bit generator, which it does even if the generator has a key."""
    is_draw = frame.f_code is random.SystemRandom.getrandbits.__code__
    return is_draw and frame.f_locals["k"] == 128


def _top(frame: FrameType) -> str:
    """Top-level package of a frame."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_foreign(module: str | None) -> bool:
    """Whether a module is not the user's code: part of Python, a known library, or installed."""
    name = module or "builtins"
    if name.partition(".")[0] in LIBRARIES | STANDARD:
        return name != "__main__"
    place = getattr(sys.modules.get(name), "__file__", None) or ""
    return not place or "site-packages" in place or "dist-packages" in place


def seed_globals(seed: int) -> None:
    """Seed every global generator except CUDA's."""
    random.seed(seed)
    np.random.seed(seed)
    cv2.setRNGSeed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserved() -> Iterator[None]:
    """Restores the global generators after the block; reseeds OpenCV's, which cannot be restored."""
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
    """Set OpenCV's number of threads after ending its running threads.

    A forked process inherits OpenCV's pool without its threads, and can wait for them forever.
    """
    cv2.setNumThreads(1)  # only 1 ends OpenCV's threads at once
    cv2.setNumThreads(number)


def object_state(thing: object) -> State:
    """Data of an object, its class and functions, and of all objects, modules and closures reachable from these.

    Skips modules and classes of libraries, files mapped read-only, and what raises. Visits everything once, breadth
    first.
    """
    state: State = {}
    seen: dict[int, Any] = {}  # keeps references, so that no id is reused
    waiting: deque[tuple[str, Any]] = deque([("", thing)])
    while waiting:
        path, found = waiting.popleft()
        if isinstance(found, ATOMS):
            # A class and its object may have attributes with the same name.
            state[path] = state.get(path, "") + repr(found)
        elif id(found) not in seen:
            seen[id(found)] = found
            with suppress(Exception):  # some refuse, such as an OmegaConf with ???
                waiting.extend(_parts(path, found))

    return state


def changed(before: State, after: State) -> list[str]:
    """Paths whose data differ; new entries of a mapping or a cache do not count.

    A memo of a pure function is allowed; an impure one shows in the results.
    """
    return sorted(
        path
        for path, value in after.items()
        if path in before and value != before[path]
    )


def changed_by_call(first: State, other_key: State, same_key: State) -> list[str]:
    """Paths that calls change, from the states after three calls, the last two with the same sample and key.

    Attributes that albumentations sets in each call change with the key, but must not change in the last call.
    """
    paths = [path for path in changed(first, other_key) if not SET_BY_CALL.search(path)]
    again = changed(other_key, same_key)
    return [*dict.fromkeys(paths + again)]


def _parts(path: str, thing: Any) -> Parts:
    """An object's own data, as an atom, and the objects it refers to."""
    yield from _added(path, thing)
    content = _memory(thing)
    if content is not None:
        yield path, content
    elif isinstance(thing, Mapping):
        # Added entries are a memo; a changed value is not.
        for key, value in [*thing.items()]:
            yield f"{path}[{key!r}]", value
    elif isinstance(thing, set | frozenset):
        yield path, repr(sorted(map(repr, thing)))
    elif isinstance(thing, list | tuple | deque | np.ndarray):
        yield path, len(thing)
        for number, item in enumerate(thing):
            yield f"{path}[{number}]", item
    elif isinstance(thing, type | ModuleType):
        yield from _scope(thing)
    elif isinstance(thing, FunctionType):
        yield from _function(path, thing)
    elif isinstance(thing, WRAPPERS):
        for name in WRAPPED:
            yield path, getattr(thing, name, ())
    elif not isinstance(thing, BuiltinFunctionType | MemberDescriptorType):
        yield from _object(path, thing)


def _added(path: str, thing: Any) -> Parts:
    """What the user's class of a collection adds to its entries."""
    kind = type(thing)
    if isinstance(thing, Collection) and not is_foreign(kind.__module__):
        for owner in kind.__mro__:
            yield owner.__name__, owner
        yield from _members(path, _attributes(thing))


def _members(path: str, values: Mapping[str, Any]) -> Parts:
    """Attributes except Python's own (dunder names)."""
    for name, value in values.items():
        if not name.startswith("__"):
            yield f"{path}.{name}", value


def _scope(scope: type | ModuleType) -> Parts:
    """Members of the user's class and its module, or of the user's module."""
    module = scope.__module__ if isinstance(scope, type) else scope.__name__
    if not is_foreign(module):
        yield from _members(scope.__name__, vars(scope))
        yield module, sys.modules.get(module)


def _function(path: str, function: FunctionType) -> Parts:
    """Attributes, default arguments, closure and module of the user's function."""
    module = function.__module__
    if is_foreign(module):
        return
    yield f"the attributes of {path}", vars(function)

    keyword_defaults = function.__kwdefaults__ or {}
    defaults = (*(function.__defaults__ or ()), *keyword_defaults.values())
    # All calls share a list that is a default argument.
    for number, value in enumerate(defaults):
        yield f"default argument {number} of {path}", value

    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        with suppress(ValueError):  # not set yet
            yield f"{name} in the closure of {path}", cell.cell_contents
    yield module, sys.modules.get(module)

    for name in function.__code__.co_names:  # also of modules that a call imports
        if name in sys.modules:
            yield name, sys.modules[name]


def _object(path: str, thing: Any) -> Parts:
    """Any other object: its classes, and its attributes or a snapshot."""
    kind = type(thing)
    if kind.__module__ == "logging":
        return  # a logger caches its lookups

    # Classes first, so that a method is named by its class, not by the object.
    for owner in kind.__mro__:
        yield owner.__name__, owner

    attributes = _attributes(thing)
    if not attributes or isinstance(thing, random.Random):
        yield path, _snapshot(thing)
        return

    # The user's objects are named by their class.
    name = path if is_foreign(kind.__module__) else kind.__name__
    yield f"attributes of {name}", repr(sorted(attributes))
    yield from _members(name, attributes)


def _memory(thing: Any) -> str | None:
    """Digest of an array, a tensor, or any other object with a buffer; None for other objects."""
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu().double().numpy()
    if isinstance(thing, np.ndarray) and thing.dtype.hasobject:
        return None
    try:
        view = memoryview(thing)
    except (TypeError, ValueError):  # the latter for an array of dates
        return None

    kind = f"{view.format}{view.shape}"
    # A file mapped read-only cannot change, and may be larger than memory.
    if view.readonly and isinstance(thing, np.memmap | mmap):
        return kind
    return kind + hashlib.blake2b(view.tobytes(), digest_size=16).hexdigest()


def _attributes(thing: Any) -> dict[str, Any]:
    """Attributes of an object, from its `__slots__` and its `__dict__`."""
    state = object.__getstate__(thing)
    slots = state[1] if isinstance(state, tuple) else {}
    return slots | getattr(thing, "__dict__", {})


def _snapshot(thing: Any) -> str:
    """Content of an object without attributes, such as a random generator or the position of an iterator."""
    if isinstance(thing, GeneratorType):
        frame = thing.gi_frame
        return repr((frame.f_lasti, frame.f_locals)) if frame else ""
    if isinstance(thing, torch.Generator):
        thing = thing.get_state().numpy()
    if isinstance(thing, ContextVar):
        thing = thing.get(None)
    try:
        return pickle.dumps(thing).hex()
    except Exception:
        # Leave out text with an address; a different object in its place shows under its path.
        text = repr(thing)
        return "" if " at 0x" in text else text
