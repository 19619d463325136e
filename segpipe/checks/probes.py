"""The probes of the purity checker: each asks one question about a function f(image, target, key).

A probe returns the first pixel that differs, or a phrase, or None when the function passes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segpipe.keys import sample_key
from segpipe.checks import held, tripwire

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
        place = f"({self.y}, {self.x}, {self.channel})"
        return f"{self.array} (y, x, channel) = {place} is {self.expected}, then {self.found}"


Difference = Pixel | str | None


@dataclass(frozen=True)
class Finding:
    """A failed probe. `str` gives one line for a person."""

    transform: str
    probe: str
    detail: str
    advice: str
    pixel: Pixel | None = None
    unanswered: bool = False  # another process could not run the probe

    def __str__(self) -> str:
        return f"{self.transform}, probe '{self.probe}': {self.detail}. {self.advice}"


@dataclass
class Case:
    """A function under test, two samples, and its first output for the first sample under each key."""

    function: Augmenter
    frames: tuple[Frame, Frame]
    expected: list[Frame]
    takes_samples: bool = (
        False  # its input may be a cached sample, not the output of another transform
    )
    varies: bool = False  # its output must depend on the key
    switched: list[str] = field(
        default_factory=list
    )  # by its first calls, for the whole process

    @property
    def name(self) -> str:
        return self.function.name

    def call(self, number: int, *, frame: int = 0) -> Frame:
        """The output under key `number`."""
        return run(self.function, self.frames[frame], KEYS[number])

    def again(self) -> Difference:
        """First difference of another call from the expected output."""
        return first_difference(self.expected[0], self.call(0))

    def differs(self, function: Augmenter | None = None) -> Difference:
        """First difference of `function` from what is expected, for all keys in reverse order."""
        function = function or self.function
        pairs = reversed([*zip(self.expected, KEYS, strict=False)])
        return _first(
            first_difference(expected, run(function, self.frames[0], key))
            for expected, key in pairs
        )

    @cached_property
    def observation(self) -> Observation:
        return _observe(self)


class Observation(NamedTuple):
    """Side effects of one call."""

    problems: dict[str, str]  # by probe; empty where there is none
    called: list[str]  # watched functions


@dataclass(frozen=True)
class Probe:
    """A question to a function; `run` returns what is wrong."""

    name: str
    run: Callable[[Case], Difference]
    advice: str


def first_difference(expected: Frame, found: Frame) -> Difference:
    """Where two outputs first differ: image before target."""
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
    """A copy of the output; the function gets a copy of the frame."""
    image, target = function(frame[0].copy(), frame[1].copy(), key)
    return image.copy(), target.copy()


def one_line(error: Exception) -> str:
    """Type and message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _first(found: Iterable[Difference]) -> Difference:
    return next((difference for difference in found if difference is not None), None)


def _same_key_twice(case: Case) -> Difference:
    return first_difference(case.call(0), case.call(0))


def _after_unrelated_calls(case: Case) -> Difference:
    image, target = case.frames[0]
    held = case.function(image.copy(), target.copy(), KEYS[0])
    case.call(
        -1, frame=1
    )  # must change neither the output before it nor the one after it
    return first_difference(case.expected[0], held) or case.again()


def _fresh(case: Case) -> Difference:
    pairs = zip(case.expected, KEYS, strict=False)
    return _first(
        first_difference(expected, run(case.function.fresh(), case.frames[0], key))
        for expected, key in pairs
    )


def _pickled(case: Case) -> Difference:
    return case.differs(pickle.loads(pickle.dumps(case.function)))


def _after(
    setting: Callable[[int], None], values: Iterable[int], case: Case
) -> Difference:
    for value in values:
        setting(value)
        if (found := case.again()) is not None:
            return found
    return None


def _hostile_seeds(case: Case) -> Difference:
    return _after(tripwire.seed_globals, HOSTILE_SEEDS, case)


def _opencv_threads(case: Case, numbers: Sequence[int] = range(9)) -> Difference:
    return _after(tripwire.set_opencv_threads, numbers, case)


def two_thread_counts(case: Case) -> Difference:
    """The probe of OpenCV's threads at a fifth of its cost."""
    return _opencv_threads(case, (1, 4))


def _observe(case: Case) -> Observation:
    """One observed call, after one that builds what a function builds once."""
    image, target = (part.copy() for part in case.frames[0])
    case.call(0)
    own = held.object_state(case.function)
    image.flags.writeable = target.flags.writeable = False
    with tripwire.preserved(), tripwire.opencv_generator() as opencv_used:
        tripwire.seed_globals(
            HOSTILE_SEEDS[0], opencv=False
        )  # otherwise a second seed(0) would change nothing
        before = tripwire.global_state()
        problem = ""
        with tripwire.watching() as called:
            try:
                output = case.function(image, target, KEYS[1])
            except Exception as error:
                output, problem = (
                    (image, target),
                    f"on read-only input it raises {one_line(error)}",
                )
        changed = [
            name
            for name, value in tripwire.global_state().items()
            if value != before[name]
        ]
        changed += ["the global generator of OpenCV"] if opencv_used() else []
    changed += case.switched
    impure = [
        f"{name} at {where}" if where else name
        for name, where in called.items()
        if name != tripwire.SEEDED
    ]
    problems = {
        "globals untouched": f"changes {', '.join(changed)}" if changed else "",
        "tripwires": f"calls {', '.join(impure)}" if impure else "",
        "input untouched": problem or _input_changed(case, image, target, output),
        "own state": "",
    }
    if names := held.changed(own, held.object_state(case.function)):
        problems["own state"] = f"a call changes {', '.join(names[:3])}"
    return Observation(problems, list(called))


def _observed(name: str) -> Callable[[Case], Difference]:
    return lambda case: case.observation.problems[name] or None


def _input_changed(
    case: Case, image: NDArray[np.uint8], target: NDArray[np.uint8], output: Frame
) -> str:
    """What is wrong with the input after a call. Transforms may pass on arrays of each other, but never of a sample."""
    change = first_difference(case.frames[0], (image, target))
    if change is not None:
        return f"the input changes: {change}"
    for name, part in zip(("image", "target"), output, strict=True):
        if case.takes_samples and any(
            np.may_share_memory(part, source) for source in (image, target)
        ):
            return f"the {name} that it returns shares memory with the input"
    return ""


def _key_matters(case: Case) -> Difference:
    """A transform need not be random, but its randomness must come from the key, and its output from the input."""
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
KEYED = "Draw only from self.py_random and self.random_generator."
REBUILT = (
    "Let the constructor's arguments alone decide the output, not what happened since."
)
PROBES = (
    Probe("same key twice", _same_key_twice, f"{KEYED} {STATELESS}"),
    Probe("call order", Case.differs, STATELESS),
    Probe(
        "after unrelated calls",
        _after_unrelated_calls,
        f"{STATELESS} Return a new array every time.",
    ),
    Probe(
        "globals untouched",
        _observed("globals untouched"),
        f"{KEYED} Switch nothing for the whole process.",
    ),
    Probe(
        "tripwires",
        _observed("tripwires"),
        f"{KEYED} Clocks and entropy differ in every process.",
    ),
    Probe(
        "input untouched",
        _observed("input untouched"),
        "Work on a copy: img = img.copy().",
    ),
    Probe("own state", _observed("own state"), STATELESS),
    Probe("hostile global seeds", _hostile_seeds, KEYED),
    Probe("fresh pipeline", _fresh, REBUILT),
    Probe(
        "pickled pipeline",
        _pickled,
        f"{REBUILT} The function that builds it must be at the top of a module.",
    ),
    Probe("key matters", _key_matters, f"Compute the output from the input. {KEYED}"),
    Probe(
        "OpenCV threads", _opencv_threads, "Neither read nor set the number of threads."
    ),
)
