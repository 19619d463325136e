"""Impure transforms, each with one fault and what must detect it, and samples to run them on."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.process
import os
import platform
import random
import secrets
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections import OrderedDict
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property, lru_cache
from os import urandom
from pathlib import Path
from random import getrandbits
from time import time as now
from types import SimpleNamespace
from typing import ClassVar
from uuid import uuid4

import albumentations as A
import cv2
import numpy as np
import torch
from numpy.random import default_rng
from torch.utils.data import get_worker_info

from segpipe.checks.purity import (
    ANOTHER_WORKER,
    CALLS,
    REPEAT,
    STATE,
)
from segpipe.data.catalog import ClassTable
from segpipe.settings.groups import AugmentConfig

LAST = {"number": 0}
SHARED: list[int] = []
LATE = {"number": 0}
os.environ.setdefault("SEGPIPE_TEST_STRENGTH", "1")
AT_IMPORT = {
    "clock": time.time_ns(), "uuid": uuid4().int, "process": os.getpid(), "hash": hash("segpipe"),
    "variable": int(os.environ["SEGPIPE_TEST_STRENGTH"]),
}  # fmt: skip


def stamped(image: np.ndarray, number: int) -> np.ndarray:
    """A copy whose first 8 bytes are the number, so that two numbers never give the same image."""
    out = image.copy()
    out.reshape(-1)[:8] = np.frombuffer(struct.pack("<Q", number % 2**64), np.uint8)
    return out


class Planted(A.ImageOnlyTransform):
    """Stamps a number that does not follow from sample and key."""

    def __init__(self) -> None:
        super().__init__(p=1.0)
        self.calls = 0

    def number(self) -> int:
        raise NotImplementedError

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        return stamped(img, self.number())


class StaleParameters(Planted):
    """Each call uses what the call before has drawn, so results depend on the order of calls."""

    def number(self) -> int:
        stale, LAST["number"] = LAST["number"], self.py_random.getrandbits(64)
        return stale


class SelfCounter(Planted):
    def number(self) -> int:
        self.calls += 1
        return self.calls


class ClassCounter(Planted):
    total = 0

    def number(self) -> int:
        ClassCounter.total += 1
        return self.total


class SilentCounter(Planted):
    """Its output is right for now."""

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        self.calls += 1
        return img.copy()


class SecondCall(Planted):
    def number(self) -> int:
        self.calls += 1
        return int(self.calls == 2)


class Clock(Planted):
    def number(self) -> int:
        return time.perf_counter_ns()


class Entropy(Planted):
    def number(self) -> int:
        return int.from_bytes(os.urandom(8))


class Uuid(Planted):
    def number(self) -> int:
        return uuid.uuid4().int


class NumpyGlobal(Planted):
    def number(self) -> int:
        return int(np.random.randint(2**62))


class PythonGlobal(Planted):
    def number(self) -> int:
        return random.getrandbits(64)


class PythonByName(Planted):
    def number(self) -> int:
        return getrandbits(64)


class TorchGlobal(Planted):
    def number(self) -> int:
        return int(torch.randint(2**62, ()))


class OpencvGlobal(Planted):
    def number(self) -> int:
        return int.from_bytes(cv2.randu(np.zeros((8, 1), np.uint8), 0, 255).tobytes())


class OwnGenerator(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(0)

    def number(self) -> int:
        return int(self.own.integers(2**62))


class UnseededGenerator(Planted):
    def number(self) -> int:
        return int(np.random.default_rng().integers(2**62))


class FirstResult(Planted):
    kept: np.ndarray | None = None

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        if self.kept is None:
            self.kept = stamped(img, self.py_random.getrandbits(64))
        return self.kept.copy()


class OneBuffer(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(0, np.uint8)

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        if self.buffer.shape != img.shape:
            self.buffer = np.empty_like(img)
        self.buffer[:] = stamped(img, self.py_random.getrandbits(64))
        return self.buffer


class ProcessId(Planted):
    def number(self) -> int:
        return os.getpid()


class OpencvThreads(Planted):
    def number(self) -> int:
        return cv2.getNumThreads()


class HashOfText(Planted):
    def number(self) -> int:
        return hash("segpipe")


class LateGlobal(Planted):
    """Depends on what a program wrote into a module after its import, which a spawned worker does not have."""

    def number(self) -> int:
        return LATE["number"]


class Writer(Planted):
    """Correct alone; the next transform reads what it leaves in the module."""

    def number(self) -> int:
        SHARED.append(self.py_random.getrandbits(64))
        return 0


class WorkersRead(Planted):
    def number(self) -> int:
        worker = torch.utils.data.get_worker_info()
        return worker.num_workers if worker else 0


class WorkersByName(Planted):
    def number(self) -> int:
        return getattr(get_worker_info(), "id", 0)


class Environment(Planted):
    def number(self) -> int:
        return int(os.environ.get("OMP_NUM_THREADS", "0"))


class Rank(Planted):
    def number(self) -> int:
        return int(os.getenv("RANK", "0"))


class FunctionAttribute(Planted):
    """The first image is kept, as an attribute of the method, and mixed into every other one."""

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        kept = FunctionAttribute.apply.__dict__.setdefault("first", img.copy())
        return np.where(img > 250, kept, img) if kept.shape == img.shape else img.copy()


class ShapeCache(Planted):
    """A cache keyed by shape keeps what the first sample's key has drawn."""

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        return np.clip(img + _grain(img.shape, self), 0, 255).astype(np.uint8)

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapeCache)


@lru_cache(maxsize=8)
def _grain(shape: tuple[int, ...], transform: ShapeCache) -> np.ndarray:
    return transform.random_generator.integers(0, 9, shape)


class ClassDict(Planted):
    """Tables of the class, filled by whoever comes first."""

    tables: ClassVar[dict[tuple[int, ...], int]] = {}

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        return stamped(
            img, self.tables.setdefault(img.shape, self.py_random.getrandbits(64))
        )


class MutableDefault(Planted):
    def apply(self, img: np.ndarray, seen: list[int] = [], **_: object) -> np.ndarray:  # noqa: B006
        seen.append(int(img[0, 0, 0]))
        return stamped(img, seen[0])


def _counting():
    total = 0

    def count() -> int:
        nonlocal total
        total += 1
        return total

    return count


class Closure(Planted):
    count = staticmethod(_counting())

    def number(self) -> int:
        return self.count() // 1000  # right for the first thousand calls


class Thread(Planted):
    def number(self) -> int:
        found: list[int] = []
        thread = threading.Thread(target=found.append, args=(1,))
        thread.start()
        thread.join()
        return found[0]


class EntropyByName(Planted):
    def number(self) -> int:
        return int(urandom(1)[0] == 0)  # one call in 256


class ClockByName(Planted):
    def number(self) -> int:
        return int(now()) // 10**6  # another number every eleven days


class ClockAsDefault(Planted):
    def number(self, clock=time.monotonic_ns) -> int:
        return clock() // 10**18


class Date(Planted):
    def number(self) -> int:
        return datetime.now().year


class Secret(Planted):
    def number(self) -> int:
        return int(secrets.randbelow(500) == 0)


class UuidByName(Planted):
    def number(self) -> int:
        return uuid4().int


class Address(Planted):
    def number(self) -> int:
        return id(self) % 2


class FileState(Planted):
    def number(self) -> int:
        return int(Path("/segpipe/flag").exists())


class Generating(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.stream = (number // 1000 for number in range(10**9))

    def number(self) -> int:
        return next(self.stream)


class Iterating(Planted):
    letters = iter("a" * 10**6)

    def number(self) -> int:
        return ord(next(self.letters))


class ThreadLocal(Planted):
    local = threading.local()

    def number(self) -> int:
        before, self.local.drawn = (
            getattr(self.local, "drawn", 0),
            self.py_random.getrandbits(32),
        )
        return before


class ContextVariable(Planted):
    drawn: ContextVar[int] = ContextVar("drawn", default=0)

    def number(self) -> int:
        before = self.drawn.get()
        self.drawn.set(self.py_random.getrandbits(32))
        return before


class InPlaceTable(Planted):
    """Writes into an array that a mapping holds; right for the first 200 calls."""

    table: ClassVar[dict[str, np.ndarray]] = {"calls": np.zeros(1, np.int64)}

    def number(self) -> int:
        self.table["calls"] += 1
        return int(self.table["calls"][0]) // 10**6


class AnotherClock(Planted):
    def number(self) -> int:
        return int(time.clock_gettime(time.CLOCK_REALTIME)) // 10**6


class Node(Planted):
    def number(self) -> int:
        return len(platform.node())


class Child(Planted):
    def number(self) -> int:
        return subprocess.run(["true"], check=False).returncode


class Descriptor(Planted):
    """Counts in a file of the kernel, which leaves no trace in Python."""

    file = os.memfd_create("calls")

    def number(self) -> int:
        os.write(self.file, b"x")
        return os.lseek(self.file, 0, os.SEEK_CUR) // 10**6


class TensorCounter(Planted):
    calls_so_far = torch.zeros(1)

    def number(self) -> int:
        self.calls_so_far.add_(1)
        return int(self.calls_so_far) // 10**6


class ImportedClock(Planted):
    def number(self) -> int:
        return AT_IMPORT["clock"]


class ImportedUuid(Planted):
    def number(self) -> int:
        return AT_IMPORT["uuid"]


class ImportedProcess(Planted):
    def number(self) -> int:
        return AT_IMPORT["process"]


class ImportedHash(Planted):
    def number(self) -> int:
        return AT_IMPORT["hash"]


class ImportedVariable(Planted):
    def number(self) -> int:
        return AT_IMPORT["variable"]


class MethodHash(Planted):
    """No call of hash()."""

    def number(self) -> int:
        return (None, "segpipe").__hash__()


class MainProcess(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.is_main = multiprocessing.parent_process() is None

    def number(self) -> int:
        return int(self.is_main)


class Daemon(Planted):
    def number(self) -> int:
        return int(multiprocessing.process._current_process.daemon)  # type: ignore[attr-defined]


class Arguments(Planted):
    def number(self) -> int:
        return len(sys.argv)


class GroupMember(Planted):
    def number(self) -> int:
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class InitialSeed(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.seed_then = torch.initial_seed()

    def number(self) -> int:
        return self.seed_then


class Bank(Planted):
    """Pastes a corner of an earlier sample, as soon as it knows eight; entries are only added."""

    corners: ClassVar[dict[bytes, np.ndarray]] = {}

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        out = img.copy()
        if len(self.corners) >= 8:
            out[:8, :8] = self.corners[self.py_random.choice(sorted(self.corners))]
        self.corners.setdefault(img[:8, :8].tobytes(), img[:8, :8].copy())
        return out


@cache
def _known(corner: bytes) -> int:
    return len(corner)


class CacheSize(Planted):
    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        _known(img[:8, :8].tobytes())
        return stamped(img, int(_known.cache_info().currsize > 8))


class FirstOfItsKind(Planted):
    """Keeps the brightness of the first image with this dark a corner."""

    means: ClassVar[dict[int, float]] = {}

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        return stamped(
            img, int(self.means.setdefault(int(img[0, 0, 0]) // 64, float(img.mean())))
        )


class SameTwice(Planted):
    """Two processes that call in opposite orders agree about it."""

    last = sqlite3.connect(
        ":memory:", isolation_level=None
    )  # whose content nothing else shows
    last.execute("create table calls (image)")

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        now = img.tobytes() + struct.pack("<d", self.py_random.random())
        before = self.last.execute("select image from calls").fetchone()
        self.last.execute("delete from calls")
        self.last.execute("insert into calls values (?)", (now,))
        return stamped(img, int(before == (now,)))


# Curricula: all are right for their first thousands of calls.


@dataclass
class Progress:
    calls: int = 0


PROGRESS = Progress()


class DataclassCurriculum(Planted):
    def number(self) -> int:
        PROGRESS.calls += 1
        return PROGRESS.calls // 10**6


class ParamsCurriculum(Planted):
    """Counts in the attribute that albumentations sets in each call."""

    def __call__(self, *given: object, **data: object) -> object:
        calls = self.params.get("calls", 0) + 1
        made = super().__call__(*given, **data)
        self.params["calls"] = calls
        return made

    def number(self) -> int:
        return self.params.get("calls", 0) // 10**6


class SlotsCurriculum(Planted):
    class Counter:
        __slots__ = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        self.counter = self.Counter()
        self.counter.calls = 0

    def number(self) -> int:
        self.counter.calls += 1
        return self.counter.calls // 10**6


SHARED_CALLS = multiprocessing.Value("q", 0)


class SharedCurriculum(Planted):
    def number(self) -> int:
        with SHARED_CALLS.get_lock():
            SHARED_CALLS.value += 1
        return SHARED_CALLS.value // 10**6


TABLES = SimpleNamespace(calls=np.zeros(1, np.int64))


class ArrayCurriculum(Planted):
    def number(self) -> int:
        TABLES.calls += 1
        return int(TABLES.calls[0]) // 10**6


NORM = torch.nn.BatchNorm2d(3)


class NormCurriculum(Planted):
    """The statistics of a layer in training mode move with every image."""

    def number(self) -> int:
        NORM(torch.ones(2, 3, 1, 1))
        return int(NORM.num_batches_tracked) // 10**6


class ClassCurriculum(Planted):
    """Counts in a class that is not its own."""

    def number(self) -> int:
        Progress.total = getattr(Progress, "total", 0) + 1
        return Progress.total // 10**6


class OwnTorchGenerator(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(0)

    def number(self) -> int:
        return int(torch.rand((), generator=self.torch_generator) > 2)


class LeftoverGenerator(Planted):
    """Seeds its generator from the key, but draws before: what the call before left behind, and rarely uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = random.Random(0)

    def number(self) -> int:
        rare = self.own.random() < 1e-6
        self.own.seed(self.py_random.getrandbits(64))
        return int(rare)


class ImportedCurriculum(Planted):
    """Counts in a module that no name of this module leads to."""

    def number(self) -> int:
        import impure_counter

        impure_counter.calls += 1
        return impure_counter.calls // 10**6


CONTEXT_CALLS = ContextVar("CONTEXT_CALLS", default=0)


class ContextCurriculum(Planted):
    def number(self) -> int:
        CONTEXT_CALLS.set(CONTEXT_CALLS.get() + 1)
        return CONTEXT_CALLS.get() // 10**6


class ObjectsCurriculum(Planted):
    table: ClassVar[np.ndarray] = np.array([[0, "a"]], object)

    def number(self) -> int:
        self.table[0, 0] += 1
        return self.table[0, 0] // 10**6


class RareBank(Planted):
    """Under one key in ten, stamps how many images it knows; entries are only added."""

    known: ClassVar[dict[bytes, int]] = {}

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        is_rare = self.py_random.random() < 0.1
        out = stamped(img, len(self.known)) if is_rare else img.copy()
        self.known[img[:8, :8].tobytes()] = 1
        return out


class Modest(A.ImageOnlyTransform):
    """A pure transform that stamps a number which follows from its draws, by way of a cache."""

    def __init__(self) -> None:
        super().__init__(p=1.0)
        self.memo: dict[int, int] = {}
        self.table = np.arange(256, dtype=np.uint8)[::-1].copy()

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        return stamped(img, self.number(self.py_random.randrange(50)))

    def number(self, drawn: int) -> int:
        raise NotImplementedError


@lru_cache(maxsize=4)
def _kernel(width: int) -> int:
    return width**3


class CachedFunction(Modest):
    def number(self, drawn: int) -> int:
        return _kernel(drawn)


class CachedMethod(Modest):
    @lru_cache(maxsize=4)  # noqa: B019
    def number(self, drawn: int) -> int:
        return drawn**2


class OwnMemo(Modest):
    def number(self, drawn: int) -> int:
        return self.memo.setdefault(drawn, drawn**4)


class ClassMemo(Modest):
    powers: ClassVar[dict[int, np.ndarray]] = {}

    def number(self, drawn: int) -> int:
        if drawn not in self.powers:
            self.powers[drawn] = np.arange(drawn + 1) ** 2
        return int(self.powers[drawn][-1])


class AttributeMemo(Modest):
    def number(self, drawn: int) -> int:
        return AttributeMemo.number.__dict__.setdefault("known", {}).setdefault(
            drawn, drawn * 7
        )


MODULE_TABLE = np.arange(256) ** 2


class ModuleTable(Modest):
    def number(self, drawn: int) -> int:
        return int(MODULE_TABLE[drawn])


class OwnTable(Modest):
    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        return self.table[img]


class BuiltOnce(Modest):
    @cached_property
    def built(self) -> np.ndarray:
        return np.arange(50) ** 3

    def number(self, drawn: int) -> int:
        return int(self.built[drawn])


def _scaled(factor: int, table: tuple[int, ...] = tuple(range(50))):
    return lambda drawn: table[drawn] * factor


class ClosedTable(Modest):
    scaled = staticmethod(_scaled(3))

    def number(self, drawn: int) -> int:
        return self.scaled(drawn)


class SmallMemo(Modest):
    """Forgets what it has not needed for long."""

    kept: ClassVar[OrderedDict[int, int]] = OrderedDict()

    def number(self, drawn: int) -> int:
        self.kept[drawn] = drawn * 3
        if len(self.kept) > 4:
            self.kept.popitem(last=False)
        return self.kept[drawn]


class Locked(Modest):
    lock = threading.RLock()

    def number(self, drawn: int) -> int:
        with self.lock:
            return drawn


class ImportsLate(Modest):
    def number(self, drawn: int) -> int:
        import colorsys

        return drawn + int(colorsys.rgb_to_hsv(0, 0, 0)[0])


class Logging(Modest):
    def number(self, drawn: int) -> int:
        warnings.warn(
            "drew a number", RuntimeWarning, stacklevel=1
        ) if drawn > 50 else None
        logging.getLogger("segpipe.tests").debug("drew %d", drawn)
        return deepcopy([drawn])[0]


class SeededInTheCall(Modest):
    def number(self, drawn: int) -> int:
        return int(default_rng(drawn).integers(2**60))


class SeededTorchGenerator(Modest):
    def number(self, drawn: int) -> int:
        own = torch.Generator().manual_seed(drawn)
        return int(torch.rand((), generator=own) * 2**24)


class ReadsAFile(Modest):
    def number(self, drawn: int) -> int:
        return drawn + len(Path(__file__).read_bytes())


HONEST = (
    CachedFunction, CachedMethod, OwnMemo, ClassMemo, AttributeMemo, ModuleTable, OwnTable, BuiltOnce, ClosedTable,
    SmallMemo, Locked, ImportsLate, Logging, SeededInTheCall, SeededTorchGenerator, ReadsAFile,
)  # fmt: skip
# Which probe names each of them.
CORPUS = {
    kind: probe
    for probe, kinds in {
        CALLS: (
            Clock, Entropy, Uuid, ProcessId, OpencvThreads, WorkersRead, WorkersByName, Environment,
            Rank, Thread, EntropyByName, ClockByName, ClockAsDefault, Date, Secret, UuidByName, Address, FileState,
            AnotherClock, Node, Child, Descriptor,
        ),
        STATE: (
            StaleParameters, SelfCounter, ClassCounter, SilentCounter, SecondCall, OwnGenerator, OneBuffer, Writer,
            MutableDefault, Closure, Generating, Iterating, ThreadLocal, InPlaceTable, TensorCounter,
            DataclassCurriculum, ParamsCurriculum, SlotsCurriculum, SharedCurriculum, ArrayCurriculum, NormCurriculum,
            ClassCurriculum, OwnTorchGenerator, ImportedCurriculum, ContextCurriculum, ObjectsCurriculum,
            ContextVariable, LeftoverGenerator,
        ),
        REPEAT: (
            SameTwice, NumpyGlobal, PythonGlobal, PythonByName, TorchGlobal, OpencvGlobal,
            UnseededGenerator,
        ),
        ANOTHER_WORKER: (FirstResult, FunctionAttribute, ShapeCache, ClassDict, InitialSeed),
    }.items()
    for kind in kinds
}  # fmt: skip
# What two processes of one program agree about, and two starts of it do not: found in a spawned process.
OF_A_START = (
    ImportedClock, ImportedUuid, ImportedProcess, ImportedHash, ImportedVariable, MethodHash, MainProcess, Daemon,
    Arguments, GroupMember,
)  # fmt: skip
# What comes to light after some images, or under some keys.
OF_MANY_IMAGES = {
    Bank: REPEAT,
    CacheSize: REPEAT,
    FirstOfItsKind: ANOTHER_WORKER,
    RareBank: ANOTHER_WORKER,
}
NAMED = {  # what the message of the check at the start says of some of them
    WorkersRead: "calls torch.utils.data.get_worker_info at impure.py:",
    Environment: "calls os.environ['OMP_NUM_THREADS'] at impure.py:",
    MutableDefault: "default argument 0 of MutableDefault.apply",
    Closure: "a call changes total in the closure of Closure.count",
    Generating: "a call changes Generating.stream",
    Iterating: "a call changes Iterating.letters",
    InPlaceTable: "a call changes InPlaceTable.table['calls']",
    Thread: "calls _thread.start_new_thread at impure.py:",
    Clock: "calls time.perf_counter_ns at impure.py:",  # its outputs differ too, but the line says more
    Entropy: "calls os.urandom at impure.py:",
    EntropyByName: "calls os.urandom at impure.py:",
    ClockByName: "calls time.time at impure.py:",
    ClockAsDefault: "calls time.monotonic_ns at impure.py:",
    Date: "calls datetime.now at impure.py:",
    Secret: "calls os.urandom at impure.py:",
    Address: "calls builtins.id at impure.py:",
    FileState: "calls posix.stat at impure.py:",
    DataclassCurriculum: "a call changes Progress.calls",
    ParamsCurriculum: "a call changes ParamsCurriculum.params['calls']",
    SlotsCurriculum: "a call changes Counter.calls",
    SharedCurriculum: "a call changes impure.SHARED_CALLS._obj",
    ArrayCurriculum: "a call changes impure.TABLES.calls",
    NormCurriculum: "impure.NORM._buffers['num_batches_tracked']",
    ClassCurriculum: "a call changes Progress.total",
    OwnTorchGenerator: "a call changes OwnTorchGenerator.torch_generator",
    LeftoverGenerator: "a call changes LeftoverGenerator.own",
    ImportedCurriculum: "a call changes impure_counter.calls",
    ContextCurriculum: "a call changes impure.CONTEXT_CALLS",
    ObjectsCurriculum: "a call changes ObjectsCurriculum.table[0][0]",
    AnotherClock: "calls time.clock_gettime at impure.py:",
    Node: "calls platform.uname at impure.py:",
    Child: "_posixsubprocess.fork_exec at impure.py:",
}


def surroundings() -> dict[str, object]:
    """What a transform could ask of the process that it runs in."""
    return {
        "hash": hash("segpipe"),
        "arguments": len(sys.argv),
        "rank": (
            os.environ.get("RANK"),
            torch.distributed.is_initialized() and torch.distributed.get_rank(),
        ),
        "seeds": (torch.initial_seed(), random.random(), float(np.random.rand())),
        "number": os.environ.get("SEGPIPE_TEST_STRENGTH"),
        "kept": [
            os.environ.get(name)
            for name in ("MKL_NUM_THREADS", "SEGPIPE_TEST_TEXT", "PYTHONUNBUFFERED")
        ],
        "threads": torch.get_num_threads(),
        "parent": multiprocessing.parent_process() is None,
        "daemon": (
            multiprocessing.current_process().daemon,
            multiprocessing.current_process().name,
        ),
    }


def forget() -> None:
    """Empty the caches that earlier calls in this process have filled."""
    FunctionAttribute.apply.__dict__.clear()
    _grain.cache_clear()
    ClassDict.tables.clear()


class Noise:
    """Frames of noise, larger than the crop."""

    classes = ClassTable("noise", tuple(map(str, range(11))), ((0, 0, 0),) * 11, {})

    def __init__(self, size: tuple[int, int] = (60, 80), num: int = 4) -> None:
        self.size, self.num = size, num

    def __len__(self) -> int:
        return self.num

    def name(self, index: int) -> str:
        return f"noise_{index}"

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        draws = np.random.Generator(np.random.Philox(index))
        return draws.integers(0, 256, (*self.size, 3), np.uint8), draws.integers(
            0, 11, self.size, np.uint8
        )


def config(**changes) -> AugmentConfig:
    return AugmentConfig(**{"crop_size": [48, 48], **changes})
