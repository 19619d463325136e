"""What a function reaches for and leaves changed is seen, by name, and put back."""

import copy
import itertools
import logging
import multiprocessing
import os
import random
import secrets
import sys
import threading
import time
import uuid
from functools import lru_cache
from importlib import import_module
from typing import ClassVar

import cv2
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import get_worker_info

from segpipe.checks import tripwire
from segpipe.checks.tripwire import (
    changed,
    changed_by_call,
    object_state,
    preserved,
    watching,
)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: time.time(), "time.time"),
        (lambda: os.urandom(1), "os.urandom"),
        (lambda: uuid.uuid1(), "uuid._generate_time_safe"),
        (lambda: secrets.token_bytes(1), "os.urandom"),
    ],
)
def test_calls_are_named_and_go_through(call, name):
    with preserved():
        with watching() as called:
            call()
            call()
        assert list(called) == [name]
        assert called[name].startswith("test_tripwire.py:")
        call()
        assert list(called) == [name], "the wire is gone"


def test_wires_are_taken_down_after_an_error():
    before = sys.getprofile()
    with pytest.raises(ZeroDivisionError), watching():
        raise ZeroDivisionError
    assert sys.getprofile() is before


def test_other_threads_may_look_at_the_clock():
    go, done = threading.Event(), threading.Event()

    def look() -> None:
        go.wait()
        time.time()
        done.set()

    thread = threading.Thread(target=look)
    thread.start()
    with watching() as called:
        go.set()
        done.wait()
    thread.join()
    assert called == {}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda clock=time.time: clock(), "time.time"),
        (lambda: os.environ.get("HOME"), "os.environ['HOME']"),
        (lambda: os.getpid(), "posix.getpid"),
        (lambda: cv2.getTickCount(), "cv2.getTickCount"),
        (lambda: get_worker_info(), "torch.utils.data.get_worker_info"),
        (lambda: threading.current_thread(), "threading.current_thread"),
        (lambda: os.listdir("/"), "posix.listdir"),
    ],
)
def test_calls_are_seen_by_any_name(call, name):
    with watching() as called:
        call()
    assert list(called) == [name]


def test_what_a_pure_function_needs_is_no_call():
    """Hashes of numbers, ids that copies ask for, a generator with a key, files that are read, a line of a log."""
    with watching() as called:
        copy.deepcopy([{"a": [hash(3)]}])
        np.random.Generator(np.random.Philox(key=3)).random()
        torch.rand((), generator=torch.Generator().manual_seed(3))
        with open(__file__) as file:
            file.read(1)
        logging.getLogger("segpipe.tests").debug("none")
        repr(Slots())
    assert called == {}


def test_every_wire_exists():
    """A name that no release has would watch nothing."""
    for table in (tripwire.CLOCKS_AND_ENTROPY, tripwire.SURROUNDINGS):
        for module, names in table.items():
            for name in names.split():
                assert callable(getattr(import_module(module), name)), (module, name)


def test_generators_are_put_back() -> None:
    def drawn() -> tuple[float, ...]:
        return random.random(), np.random.rand(), float(torch.rand(()))

    with preserved():
        before = drawn()
    assert drawn() == before


class Slots:
    __slots__ = ("number",)
    total = 0

    def __init__(self) -> None:
        self.number = 1


class Bank(dict[str, int]):
    """A container with data of its own."""

    used = 0

    def __init__(self) -> None:
        super().__init__(rain=0)
        self.number = 1


class Holder:
    shared: ClassVar = [0]

    def __init__(self) -> None:
        self.numbers, self.nested, self.count = (
            np.zeros(3),
            {"a": [1, {2, 3}]},
            itertools.count(),
        )
        self.own, self.params, self.py_random = (
            np.random.default_rng(0),
            {},
            random.Random(0),
        )
        self.owns = [np.random.default_rng(number) for number in range(4)]
        self.itself, self.tensor = self, torch.zeros(2, dtype=torch.int64)
        self.slots, self.bank = Slots(), Bank()
        self.objects = np.array([[1], [2]], object).reshape(-1)
        self.objects[0] = []
        self.buffer = bytearray(3)
        self.shared_number = multiprocessing.Value("d", 0.0)
        self.generator = torch.Generator()

    def __call__(self) -> None:
        """Functions are not followed."""


MODULE = {"number": 0}


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda holder: holder.numbers.__setitem__(1, -0.0), True),
        (lambda holder: holder.nested["a"][1].add(4), True),
        (lambda holder: next(holder.count), True),
        (lambda holder: holder.own.random(), True),
        (
            lambda holder: holder.owns[3].random(),
            True,
        ),  # no object hides behind the id of one that is gone
        (lambda holder: setattr(holder, "new", None), True),
        (lambda holder: holder.tensor.add_(1), True),
        (lambda holder: Holder.shared.append(1), True),
        (lambda holder: MODULE.update(number=MODULE["number"] + 1), True),
        (lambda holder: setattr(holder.slots, "number", 2), True),
        (lambda holder: holder.objects[0].append(1), True),
        (lambda holder: holder.buffer.__setitem__(0, 1), True),
        (lambda holder: setattr(holder.shared_number, "value", 1), True),
        (lambda holder: holder.generator.manual_seed(1), True),
        (lambda holder: setattr(Slots, "total", 1), True),
        (lambda holder: holder.bank.update(rain=1), True),
        (lambda holder: setattr(holder.bank, "number", 2), True),
        (lambda holder: setattr(Bank, "used", 1), True),
        (lambda holder: holder(), False),
    ],
)
def test_object_state_sees_what_is_held(change, seen):
    holder = Holder()
    before = object_state(holder)
    assert object_state(holder) == before
    change(holder)
    assert bool(changed(before, object_state(holder))) == seen


def test_what_albumentations_sets_in_a_call_may_follow_the_key() -> None:
    """But not change between two calls with one key."""
    holder = Holder()
    states = [object_state(holder)]
    for number in (1, 1, 2):
        holder.params["drawn"] = number
        holder.py_random.seed(number)
        states.append(object_state(holder))
    assert changed_by_call(*states[:3]) == []
    assert changed_by_call(*states[1:]) == [
        "Holder.params['drawn']",
        "Holder.py_random",
    ]


def test_what_does_not_show_its_content_is_left_out():
    """Such as a configuration with a missing value in the module of a loss; the rest is still seen."""
    holder = Holder()
    holder.nested = OmegaConf.create({"width": 1, "root": "???"})
    holder.params["drawn"] = 0
    before = object_state(holder)
    holder.params["drawn"] = 1
    assert changed(before, object_state(holder)) == ["Holder.params['drawn']"]


def test_a_memo_is_no_fault():
    holder = Holder()
    before = object_state(holder)
    holder.nested["b"] = 1
    holder.nested["c"] = Bank()  # beside another one
    _squared(3)
    now = object_state(holder)
    assert changed(before, now) == []
    holder.nested["b"] = 2
    assert changed(now, object_state(holder)) == ["Holder.nested['b']"]


@lru_cache
def _squared(number: int) -> int:
    return number**2
