"""The questions that the purity checker asks of a function f(image, target, key), and what an answer looks like.

A probe asks one thing: it gives the first pixel that differs, or a sentence, or None.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.keys import sample_key
from segpipe.purity import tripwire

if TYPE_CHECKING:
    from segpipe.data.augment import Augmenter

Frame = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # image (H, W, 3), target (H, W)
KEYS = tuple(sample_key(0, 0, index, "purity") for index in range(4))
HOSTILE_SEEDS = (1, 20_000)


class Pixel(NamedTuple):
    """The first place in row-major order at which two outputs differ."""

    array: str  # image | target
    y: int
    x: int
    channel: int
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"{self.array} (y, x, channel) = ({self.y}, {self.x}, {self.channel}) is {self.expected}, then {self.found}"
        )


Difference = Pixel | str | None  # a place, or a sentence, or none


@dataclass(frozen=True)
class Finding:
    """A probe that failed. `str` gives one line for a person."""

    transform: str
    probe: str
    detail: str
    advice: str
    pixel: Pixel | None = None

    def __str__(self) -> str:
        return f"{self.transform}, probe '{self.probe}': {self.detail}. {self.advice}"


@dataclass
class Case:
    """A function under test, with two samples and what it gave for the first one under each key when it was new."""

    function: Augmenter
    frames: tuple[Frame, Frame]
    expected: list[Frame]
    takes_samples: bool = False  # its input may be a sample that a cache holds, not an array of another transform
    varies: bool = False  # its output must depend on the key

    @property
    def name(self) -> str:
        return self.function.name

    def call(self, number: int, *, frame: int = 0) -> Frame:
        """What the function gives now under key `number`."""
        return run(self.function, self.frames[frame], KEYS[number])

    def differs(self, function: Augmenter | None = None) -> Difference:
        """First difference from what is expected; keys are asked in the other order."""
        for number in reversed(range(len(self.expected))):
            found = first_difference(
                self.expected[number], run(function or self.function, self.frames[0], KEYS[number])
            )
            if found is not None:
                return found
        return None

    @cached_property
    def observation(self) -> Observation:
        return _observe(self)


@dataclass(frozen=True)
class Observation:
    """What one call under observation did besides computing its output."""

    globals_changed: list[str]
    called: list[str]
    state_changed: bool
    input_changed: str


@dataclass(frozen=True)
class Probe:
    """A question to a function; `run` gives what is wrong."""

    name: str
    run: Callable[[Case], Difference]
    advice: str


def first_difference(expected: Frame, found: Frame) -> Difference:
    """Where two outputs differ first: image before target."""
    for name, before, now in zip(("image", "target"), expected, found, strict=True):
        if before.shape != now.shape or before.dtype != now.dtype:
            return f"the {name} is {before.dtype} {before.shape}, then {now.dtype} {now.shape}"
        differing = before != now
        if differing.any():
            place = np.unravel_index(int(differing.argmax()), before.shape)
            y, x, channel = (*(int(axis) for axis in place), 0)[:3]
            return Pixel(name, y, x, channel, before[place].item(), now[place].item())
    return None


def run(function: Augmenter, frame: Frame, key: int) -> Frame:
    """Output in memory of its own; the function gets a copy of the frame."""
    image, target = function(frame[0].copy(), frame[1].copy(), key)
    return image.copy(), target.copy()


def describe(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _same_key_twice(case: Case) -> Difference:
    return first_difference(case.call(0), case.call(0))


def _after_unrelated_calls(case: Case) -> Difference:
    image, target = case.frames[0]
    held = case.function(image.copy(), target.copy(), KEYS[0])
    case.call(-1, frame=1)  # must neither change what was given before nor what comes after
    return first_difference(case.expected[0], held) or first_difference(case.expected[0], case.call(0))


def _call_order(case: Case) -> Difference:
    return case.differs()


def _fresh(case: Case) -> Difference:
    for number, expected in enumerate(case.expected):
        found = first_difference(expected, run(case.function.fresh(), case.frames[0], KEYS[number]))
        if found is not None:
            return found
    return None


def _pickled(case: Case) -> Difference:
    return case.differs(pickle.loads(pickle.dumps(case.function)))


def _hostile_seeds(case: Case) -> Difference:
    for seed in HOSTILE_SEEDS:
        tripwire.seed_globals(seed)
        found = first_difference(case.expected[0], case.call(0))
        if found is not None:
            return found
    return None


def _opencv_threads(case: Case, numbers: Sequence[int] = range(9)) -> Difference:
    for number in numbers:
        tripwire.set_opencv_threads(number)
        found = first_difference(case.expected[0], case.call(0))
        if found is not None:
            return found
    return None


def two_thread_counts(case: Case) -> Difference:
    """The probe of OpenCV's threads at a fifth of its cost."""
    return _opencv_threads(case, (1, 4))


def _observe(case: Case) -> Observation:
    """One call, after one that has warmed up what a function may build once."""
    image, target = (part.copy() for part in case.frames[0])
    case.call(0)
    own = tripwire.object_state(case.function)
    image.flags.writeable = target.flags.writeable = False
    with tripwire.preserved(), tripwire.opencv_generator() as opencv_used:
        tripwire.seed_globals(HOSTILE_SEEDS[0], opencv=False)  # else a second call to seed(0) would change nothing
        before = tripwire.global_state()
        problem = ""
        with tripwire.watching() as called:
            try:
                output = case.function(image, target, KEYS[1])
            except Exception as error:
                output, problem = (image, target), f"on read-only input it raises {describe(error)}"
        changed = [name for name, value in tripwire.global_state().items() if value != before[name]]
        changed += ["the global generator of OpenCV"] if opencv_used() else []
    return Observation(
        changed,
        called,
        tripwire.object_state(case.function) != own,
        problem or _input_changed(case, image, target, output),
    )


def _input_changed(case: Case, image: NDArray[np.uint8], target: NDArray[np.uint8], output: Frame) -> str:
    """What is wrong with the input after a call. Transforms may hand arrays on to each other, but never a sample's."""
    change = first_difference(case.frames[0], (image, target))
    if change is not None:
        return f"the input changes: {change}"
    for name, part in zip(("image", "target"), output, strict=True):
        if case.takes_samples and any(np.may_share_memory(part, source) for source in (image, target)):
            return f"the {name} that is given back is memory of the input"
    return ""


def _globals_untouched(case: Case) -> Difference:
    changed = case.observation.globals_changed
    return f"changes {', '.join(changed)}" if changed else None


def _tripwires(case: Case) -> Difference:
    called = [name for name in case.observation.called if name != tripwire.SEEDED]
    return f"calls {', '.join(called)}" if called else None


def _own_state(case: Case) -> Difference:
    return (
        "the transform, its class or its module holds other data after a call"
        if case.observation.state_changed
        else None
    )


def _input_untouched(case: Case) -> Difference:
    return case.observation.input_changed or None


def _key_matters(case: Case) -> Difference:
    """Nothing needs to be random, but what is must come from the key; and an output must depend on its input."""
    images = [image for image, _ in case.expected]
    if all(np.array_equal(images[0], image) for image in images[1:]):
        if case.varies:
            return "the same output for different keys, though a transform in it draws from the key"
        if tripwire.SEEDED in case.observation.called:
            return "the same output for different keys, though it makes a random generator in the call"
    inputs_differ = not np.array_equal(case.frames[0][0], case.frames[1][0])
    if inputs_differ and np.array_equal(images[0], case.call(0, frame=1)[0]):
        return "the same output for different images"
    return None


STATELESS = "Compute parameters from the key in get_params and pass them on; keep nothing from one call to the next."
KEYED = "Draw from self.py_random and self.random_generator alone."
REBUILT = "Let the arguments of the constructor decide everything, not what happened since."
PROBES = (
    Probe("same key twice", _same_key_twice, f"{KEYED} {STATELESS}"),
    Probe("call order", _call_order, STATELESS),
    Probe("after unrelated calls", _after_unrelated_calls, f"{STATELESS} Give back a new array every time."),
    Probe("globals untouched", _globals_untouched, KEYED),
    Probe("tripwires", _tripwires, f"{KEYED} Clocks and entropy differ in every process."),
    Probe("input untouched", _input_untouched, "Work on a copy: img = img.copy()."),
    Probe("own state", _own_state, STATELESS),
    Probe("hostile global seeds", _hostile_seeds, KEYED),
    Probe("fresh pipeline", _fresh, REBUILT),
    Probe("pickled pipeline", _pickled, f"{REBUILT} The function that builds it stands at the top of a module."),
    Probe("key matters", _key_matters, f"Compute the output from the input. {KEYED}"),
    Probe("OpenCV threads", _opencv_threads, "Do not ask for the number of threads, and leave it alone."),
)
