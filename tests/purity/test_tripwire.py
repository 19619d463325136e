"""What a function reaches for and leaves changed is seen, by name, and put back."""

import itertools
import os
import random
import threading
import time
from typing import ClassVar

import cv2
import numpy as np
import pytest
import torch

from segpipe.purity import tripwire
from segpipe.purity.tripwire import global_state, object_state, opencv_generator, preserved, watching


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: time.time(), "time.time"),
        (lambda: os.urandom(1), "os.urandom"),
        (lambda: random.random(), "random.random"),
        (lambda: np.random.rand(), "numpy.random.rand"),
        (lambda: np.random.default_rng(), "numpy.random.default_rng()"),
        (lambda: np.random.default_rng(None), "numpy.random.default_rng()"),
        (lambda: np.random.default_rng(3), tripwire.SEEDED),
        (lambda: torch.rand(()), "torch.rand"),
        (lambda: cv2.setRNGSeed(1), "cv2.setRNGSeed"),
    ],
)
def test_calls_are_named_and_go_through(call, name):
    with preserved():
        with watching() as called:
            call()
            call()
        assert called == [name]
        call()
        assert called == [name], "the wire is gone"


def test_wires_are_taken_down_after_an_error():
    before = time.time, random.random, np.random.default_rng
    with pytest.raises(ZeroDivisionError), watching():
        raise ZeroDivisionError
    assert (time.time, random.random, np.random.default_rng) == before


def test_other_threads_may_look_at_the_clock():
    with watching() as called:
        thread = threading.Thread(target=lambda: time.time())
        thread.start()
        thread.join()
    assert called == []


def test_every_wire_exists():
    """A name that no release has would watch nothing."""
    modules = {"numpy.random": np.random, "torch": torch, "cv2": cv2, "random": random, "time": time}
    for module, names in tripwire.WIRES.items():
        for name in names if module in modules else ():
            assert callable(getattr(modules[module], name)), (module, name)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda: random.random(), "the generator of random"),
        (lambda: np.random.rand(), "the global generator of numpy"),
        (lambda: torch.rand(()), "the global generator of torch"),
        (lambda: cv2.setNumThreads(cv2.getNumThreads() % 4 + 1), "OpenCV's number of threads"),
        (lambda: torch.set_num_threads(torch.get_num_threads() % 2 + 1), "torch's number of threads"),
    ],
)
def test_global_state_shows_changes_and_is_put_back(change, name):
    before = global_state()
    with preserved():
        change()
        now = global_state()
        assert [key for key in before if before[key] != now[key]] == [name]
    assert global_state() == before


@pytest.mark.parametrize(
    ("change", "used"),
    [(lambda: cv2.randu(np.zeros(1), 0, 1), True), (lambda: cv2.setRNGSeed(3), True), (lambda: None, False)],
)
def test_opencvs_generator(change, used):
    with preserved(), opencv_generator() as moved:
        change()
        assert moved() == used


class Holder:
    shared: ClassVar = [0]

    def __init__(self) -> None:
        self.numbers, self.nested, self.count = np.zeros(3), {"a": [1, {2, 3}]}, itertools.count()
        self.own, self.params, self.py_random = np.random.default_rng(0), {}, random.Random(0)
        self.owns = [np.random.default_rng(number) for number in range(4)]
        self.itself, self.tensor = self, torch.zeros(2)

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
        (lambda holder: holder.owns[3].random(), True),  # no object hides behind the id of one that is gone
        (lambda holder: setattr(holder, "new", None), True),
        (lambda holder: holder.tensor.add_(1), True),
        (lambda holder: Holder.shared.append(1), True),
        (lambda holder: MODULE.update(number=MODULE["number"] + 1), True),
        (lambda holder: holder.params.update(a=1), False),
        (lambda holder: holder.py_random.random(), False),
        (lambda holder: holder(), False),
    ],
)
def test_object_state_sees_what_is_held(change, seen):
    holder = Holder()
    before = object_state(holder)
    assert object_state(holder) == before
    change(holder)
    assert (object_state(holder) != before) == seen
