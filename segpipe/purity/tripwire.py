"""Detects what a function reads or changes besides its arguments: clocks, entropy, generators, its own state."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cv2
import numpy as np

CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")
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
SEEDED = "numpy.random.default_rng(seed)"  # allowed: the seed may come from the key
OPENCV_SEED = 0x51F15EED  # a value that no transform uses
# Attributes that carry nothing from call to call: the caller sets the random state before every call, and
# albumentations clears the last parameters at the start of one.
TRANSIENT = ("random_generator", "py_random", "params")
LIBRARIES = ("builtins", "albumentations", "numpy", "torch", "cv2")
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
DATA = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, deque, itertools.count, np.ndarray)


@contextmanager
def watching() -> Iterator[list[str]]:
    """Names of the watched functions that this thread calls in the block, each once; the calls go through.

    Sees functions looked up in their module at the call, not those imported by name before.
    """
    called: list[str] = []
    thread = threading.get_ident()
    before: list[tuple[Any, str, Any]] = []
    try:
        for module_name, names in WIRES.items():
            module = sys.modules.get(module_name)  # a module that is not imported cannot be called
            for name in (name for name in names if hasattr(module, name)):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, _wire(before[-1][2], f"{module_name}.{name}", called, thread))
        yield called
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def _wire(original: Callable[..., Any], label: str, called: list[str], thread: int) -> Callable[..., Any]:
    def wired(*arguments: Any, **keywords: Any) -> Any:
        name = label
        if label == "numpy.random.default_rng":
            name = SEEDED if any(value is not None for value in (*arguments, *keywords.values())) else f"{label}()"
        if threading.get_ident() == thread and name not in called:
            called.append(name)
        return original(*arguments, **keywords)

    return wired


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
    python, numpy, opencv_threads = random.getstate(), np.random.get_state(), cv2.getNumThreads()
    torchs = (torch.get_rng_state(), torch.get_num_threads()) if torch is not None else None
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


def object_state(thing: object) -> str:
    """Digest of the data of an object, of its class, and of the module that defines it.

    Follows containers and attributes, not functions, and skips TRANSIENT attributes.
    """
    whole = hashlib.blake2b(digest_size=16)
    for part in _walk(thing, {}):
        whole.update(part)
    return whole.hexdigest()


def _walk(thing: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    if isinstance(thing, np.ndarray):
        yield f"{thing.dtype}{thing.shape}".encode()
        yield thing.tobytes()
        return
    if thing is None or isinstance(thing, int | float | complex | str | bytes):
        yield repr(thing).encode()
        return
    if id(thing) in seen:
        return
    seen[id(thing)] = thing  # a reference, so that no other object gets its id
    if isinstance(thing, np.random.Generator):
        yield from _walk(thing.bit_generator.state, seen)
    elif isinstance(thing, np.random.RandomState):
        yield from _walk(thing.get_state(legacy=False), seen)
    elif isinstance(thing, random.Random):
        yield repr(thing.getstate()).encode()
    elif isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield repr(key).encode()
            yield from _walk(value, seen)
    elif isinstance(thing, set | frozenset):
        yield repr(sorted(map(repr, thing))).encode()
    elif isinstance(thing, list | tuple | deque):
        yield f"{type(thing).__name__}{len(thing)}".encode()
        for item in list(thing):
            yield from _walk(item, seen)
    else:
        yield from _object(thing, seen)


def _object(thing: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    kind = type(thing)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if hasattr(thing, "detach"):  # a tensor
        yield from _walk(thing.detach().cpu().numpy(), seen)
    elif not hasattr(thing, "__dict__"):
        yield (b"" if " at 0x" in repr(thing) else repr(thing).encode())  # itertools.count shows its position
    elif not isinstance(thing, type) and kind.__name__ not in ("function", "method", "module"):
        yield from _members(vars(thing), seen)
        for owner in kind.__mro__:
            if owner.__module__.partition(".")[0] not in LIBRARIES:
                yield from _members(_data(vars(owner)), seen)
                yield from _members(_data(vars(sys.modules.get(owner.__module__, owner))), seen)


def _members(values: Mapping[str, Any], seen: dict[int, Any]) -> Iterator[bytes]:
    for name in sorted(name for name in values if name not in TRANSIENT):
        yield name.encode()
        yield from _walk(values[name], seen)


def _data(values: Mapping[str, Any]) -> dict[str, Any]:
    """Data attributes of a class or module: no functions, classes or modules."""
    return {
        name: value
        for name, value in dict(values).items()
        if not name.startswith("__") and (value is None or isinstance(value, DATA + GENERATORS))
    }
