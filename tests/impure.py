"""Impure transforms, each with one fault and what must detect it, and samples to run them on."""

from __future__ import annotations

import os
import random
import struct
import time
import uuid
from random import getrandbits

import albumentations as A
import cv2
import numpy as np
import torch

from segpipe.data.augment import ScaleCrop
from segpipe.settings.groups import AugmentConfig

LAST = {"number": 0}
SHARED: list[int] = []
LATE = {"number": 0}


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


class OpencvSeed(Planted):
    """As GaussNoise does: the output is right, but the state of OpenCV's generator has changed, and 16 bits are few."""

    def number(self) -> int:
        cv2.setRNGSeed(self.py_random.getrandbits(16))
        return int.from_bytes(cv2.randu(np.zeros((8, 1), np.uint8), 0, 255).tobytes())


class LeavesSeed(Planted):
    def number(self) -> int:
        np.random.seed(0)
        return 1


class OwnGenerator(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(0)

    def number(self) -> int:
        return int(self.own.integers(2**62))


class UnseededGenerator(Planted):
    def number(self) -> int:
        return int(np.random.default_rng().integers(2**62))


class IgnoresKey(Planted):
    def number(self) -> int:
        return int(np.random.default_rng(0).integers(2**62))


class InPlace(Planted):
    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        img[0, 0] += 1
        return img


class InPlaceByOpencv(Planted):
    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        cv2.rectangle(img, (0, 0), (9, 9), (1, 2, 3), -1)
        return img


class LazyCrop(ScaleCrop):
    """Gives back views of the sample, which a cache may hold."""

    def _resample(self, array: np.ndarray, *_: object, **__: object) -> np.ndarray:
        return array[: self.crop_size[0], : self.crop_size[1]]


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


TWICE, ORDER, UNRELATED = "same key twice", "call order", "after unrelated calls"
GLOBALS, WIRES, INPUT, STATE = "globals untouched", "tripwires", "input untouched", "own state"
SEEDS, FRESH, KEY, THREADS = "hostile global seeds", "fresh pipeline", "key matters", "OpenCV threads"
CORPUS = {
    StaleParameters: {TWICE, ORDER, UNRELATED, STATE},
    SelfCounter: {TWICE, ORDER, STATE, FRESH},
    ClassCounter: {TWICE, ORDER, STATE, FRESH},
    SilentCounter: {STATE},
    SecondCall: {ORDER, STATE, FRESH},
    Clock: {TWICE, WIRES, FRESH},
    Entropy: {TWICE, WIRES, FRESH},
    Uuid: {TWICE, WIRES, FRESH},
    NumpyGlobal: {TWICE, GLOBALS, WIRES, SEEDS},
    PythonGlobal: {TWICE, GLOBALS, WIRES, SEEDS},
    PythonByName: {TWICE, GLOBALS, SEEDS},
    TorchGlobal: {TWICE, GLOBALS, WIRES, SEEDS},
    OpencvGlobal: {TWICE, GLOBALS, WIRES, SEEDS},
    OpencvSeed: {GLOBALS, WIRES},
    LeavesSeed: {GLOBALS, WIRES},
    OwnGenerator: {TWICE, STATE},
    UnseededGenerator: {TWICE, WIRES},
    IgnoresKey: {KEY},
    InPlace: {INPUT},
    InPlaceByOpencv: {INPUT},
    FirstResult: {FRESH, KEY},
    OneBuffer: {UNRELATED, STATE},
    ProcessId: {"forked process"},
    OpencvThreads: {THREADS},
    Writer: {STATE},
}


class Noise:
    """Frames of noise, larger than the crop."""

    classes = None

    def __init__(self, size: tuple[int, int] = (60, 80), num: int = 4) -> None:
        self.size, self.num = size, num

    def __len__(self) -> int:
        return self.num

    def name(self, index: int) -> str:
        return f"noise_{index}"

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        draws = np.random.Generator(np.random.Philox(index))
        return draws.integers(0, 256, (*self.size, 3), np.uint8), draws.integers(0, 11, self.size, np.uint8)


def config(**changes) -> AugmentConfig:
    return AugmentConfig(**{"crop_size": [48, 48], **changes})
