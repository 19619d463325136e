"""Checks that an augmentation is a pure function of (sample, key).

f(sample, key) -> bytes may depend on nothing else. Two fresh processes call every transform, with probability 1, and
the whole pipeline: in opposite orders, the second as if it were another loader worker. A third process is another start
of the program. If anything is kept from call to call, anywhere, the results differ. The first process also watches the
calls, so that a finding names the cause.
"""

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from segpipe import IGNORE_INDEX, plugins
from segpipe.checks import tripwire
from segpipe.checks.elsewhere import UnansweredError, elsewhere, other_environment
from segpipe.data import Sample
from segpipe.data.augment import Augmenter
from segpipe.data.data_set import Samples
from segpipe.errors import ConfigError, ImpureAugmentError, SegpipeError
from segpipe.native import one_thread
from segpipe.plugins import is_path
from segpipe.train.canary import another_worker, first_difference

MANY = 32  # images for each of the user's transforms: one may keep a bank of earlier images
KEYS = range(MANY)  # any numbers but those of training
QUICK_SIZE = 256  # maximum height and width at which `quick` probes single transforms
ANOTHER_SEED = 20_000  # seed of another worker's global generators

# The probes, and advice for their findings.
CALLS = "tripwires"
STATE = "own state"
REPEAT = "same key twice"
ANOTHER_WORKER = "another worker"
ANOTHER_START = "spawned process"
STATELESS = (
    "Compute parameters from the key, in get_params or from the rng of a call, and pass them on; keep nothing from one "
    "call to the next."
)
KEYED = "Draw only from self.py_random and self.random_generator, or from the rng of a call."
ADVICE = {  # by probe, the most informative first
    CALLS: f"{KEYED} Clocks and entropy differ in every process.",
    STATE: STATELESS,
    REPEAT: f"{KEYED} {STATELESS} Return a new array every time.",
    ANOTHER_WORKER: (
        "Keep nothing from one call to the next, and do not use the worker's id or the number of workers or "
        "threads. A cache may hold only values that depend on nothing but their keys."
    ),
    ANOTHER_START: (
        "It depends on how or when the program was started. Use no clock, uuid, process id, hash() of text, address, "
        "order of a set, environment variable, sys.argv, rank or torch.initial_seed(), not even at import or in "
        "__init__, and no module data that is set after the import."
    ),
}
WAITS_FOR_THREADS = "A transform may wait for threads, which do not survive a fork."
NOT_IMPORTABLE = "Define functions in TRANSFORMS at module level; otherwise only data.start_method=fork works."
COMBINED = "No single transform shows it: set augment.keyed=true, or look for data that two transforms share."
Place = tuple[int, int]  # indices of a sample and a key
Outputs = dict[Place, Sample]


@dataclass(frozen=True)
class Finding:
    """A failed probe. `str` gives a one-line message."""

    transform: str
    probe: str
    detail: str
    advice: str
    unanswered: bool = False  # another start of the program could not run the probe

    def __str__(self) -> str:
        return f"{self.transform}, probe '{self.probe}': {self.detail}. {self.advice}"


@dataclass(frozen=True)
class Probed:
    """A function, and the samples to call it with."""

    function: Augmenter
    frames: Sequence[Sample]

    def places(self) -> list[Place]:
        """Two samples with two keys each, and each further sample with its own key."""
        further = range(2, len(self.frames))
        return [(0, 0), (0, 1), (1, 0), (1, 1), *zip(further, further, strict=True)]

    def call(self, place: Place) -> Sample:
        """The output for a copy of the frame."""
        return self.function(*deepcopy(self.frames[place[0]]), KEYS[place[1]])

    def outputs(self, order: int = 1) -> Outputs:
        """All outputs; an order of -1 reverses the calls."""
        return {place: deepcopy(self.call(place)) for place in self.places()[::order]}


class Observation(NamedTuple):
    """Results of the calls in the first process."""

    outputs: Outputs
    problems: dict[str, str]  # by probe; empty if there is none


def quick(augmenter: Augmenter, samples: Samples) -> str:
    """Check before every training; returns a note if another start of the program could not be compared.

    Single transforms are probed at up to 256x256 pixels, the whole pipeline at its own size; another start is compared
    only for the user's transforms. Does nothing with `augment.check=false`.

    Raises ImpureAugmentError naming transform, probe, pixel and what to do.
    """
    if not augmenter.config.check:
        return ""

    is_users = any(map(is_path, augmenter.config.extra))
    findings = check(augmenter, samples, largest=QUICK_SIZE, spawns=is_users)
    refused = [finding for finding in findings if not finding.unanswered]
    if refused:
        more = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
        raise ImpureAugmentError(
            f"augmentation is not a pure function of sample and key. {refused[0]}{more} List all with "
            f"segpipe check-augment; augment.check=false trains anyway."
        )
    return " ".join(f"purity of the augmentation: {finding}" for finding in findings)


@one_thread()  # as in loaders; torch's other threads do not survive a fork
def check(
    augmenter: Augmenter,
    samples: Samples,
    *,
    largest: int | None = None,
    spawns: bool = True,
    progress: Callable[..., None] = lambda *_: None,
) -> list[Finding]:
    """The first finding of each transform, or of the whole pipeline if no transform has one.

    Other processes do the work, so this one is unchanged. `progress` gets done, total and the next task. Raises
    ConfigError if a transform makes an id of no class.
    """
    probed = _probed(augmenter, samples, largest)
    others: dict[str, list[Outputs | str]] = {}
    findings = []
    # One after the other, since all would write into memory that a transform shares between processes.
    try:
        progress(0, 3, f"{len(probed)} transforms, each key twice")
        observations = elsewhere("fork", lambda: [*map(observed, probed)])
        progress(1, 3, "backwards, as another worker")
        others[ANOTHER_WORKER] = elsewhere("fork", _outputs_of_another_worker, probed)
    except UnansweredError as error:
        return [Finding(augmenter.name, REPEAT, str(error), WAITS_FOR_THREADS)]

    if spawns:
        progress(2, 3, "in another start of the program")
        # A process without an answer does not prevent training; different results do.
        try:
            others[ANOTHER_START] = elsewhere("spawn", _outputs, probed)
        except SegpipeError as error:
            is_note = isinstance(error, UnansweredError)
            advice = NOT_IMPORTABLE if is_note else ADVICE[ANOTHER_START]
            detail = str(error).rstrip(".")
            findings.append(
                Finding(augmenter.name, ANOTHER_START, detail, advice, is_note)
            )
    num_classes = samples.classes.num_classes
    for one, (outputs, _) in zip(probed, observations, strict=True):
        for _, target in outputs.values():
            wrong = target[(target >= num_classes) & (target != IGNORE_INDEX)]
            if wrong.size:
                raise ConfigError(
                    f"{one.function.name} makes the id {wrong[0]}, but there are {num_classes} classes. "
                    f"Return ids below {num_classes}, or {IGNORE_INDEX} to ignore a pixel."
                )
    return [*_findings(probed, observations, others), *findings]


def _findings(
    probed: Sequence[Probed],
    observations: Sequence[Observation],
    others: dict[str, list[Outputs | str]],
) -> list[Finding]:
    """The most informative problem of each transform; the whole pipeline's, the last, only if there is no other."""
    findings: list[Finding] = []
    for number, observation in enumerate(observations):
        problems = observation.problems | {
            probe: _difference(observation, outputs[number])
            for probe, outputs in others.items()
        }
        failed = next((probe for probe in ADVICE if problems.get(probe)), None)
        is_whole = number == len(probed) - 1
        if failed is None or (is_whole and findings):
            continue
        advice = COMBINED if is_whole else ADVICE[failed]
        name = probed[number].function.name
        findings.append(Finding(name, failed, problems[failed], advice))
    return findings


def _difference(observation: Observation, outputs: Outputs | str) -> str:
    """The first difference to the outputs of another process, or its error; empty if they are equal."""
    if isinstance(outputs, str):
        return outputs if observation.outputs else ""
    for place, frame in observation.outputs.items():
        if difference := first_difference(frame, outputs[place]):
            return difference
    return ""


def _probed(
    augmenter: Augmenter, samples: Samples, largest: int | None
) -> list[Probed]:
    """The transforms, then the whole pipeline. Transforms after the first, which crops, get its output."""
    frames = samples.read(0), samples.read(len(samples) // 2)
    first, *parts = augmenter.parts()

    # Samples for each transform, cut to the largest size requested.
    cut = slice(largest)
    made = [copy(first)(*deepcopy(frame), KEYS[0]) for frame in frames]
    small = [(image[cut, cut], target[cut, cut]) for image, target in made]

    # Further images for the user's transforms, each with a different brightness.
    image, target = small[0]
    many = small + [(image // 2 + np.uint8(4 * i), target) for i in range(MANY - 2)]

    probed = [Probed(part, many if is_path(part.name) else small) for part in parts]
    return [Probed(first, frames), *probed, Probed(copy(augmenter), frames)]


def _outputs(probed: Sequence[Probed], order: int = 1) -> list[Outputs | str]:
    """Outputs of each function, in order, or the text of its error; an order of -1 reverses the calls."""
    made: list[Outputs | str] = []
    for one in probed[::order]:
        try:
            made.append(one.outputs(order))
        except Exception as error:
            made.append(_raises(error))
    return made[::order]


def _outputs_of_another_worker(probed: Sequence[Probed]) -> list[Outputs | str]:
    """`_outputs` with reversed calls, in what looks like a worker of a different layout."""
    other_environment()
    tripwire.seed_globals(ANOTHER_SEED)
    tripwire.set_opencv_threads(4 if cv2.getNumThreads() == 1 else 1)
    with another_worker():
        return _outputs(probed, order=-1)


def observed(probed: Probed) -> Observation:
    """Results of the probes that need only one process. Raises ConfigError if the first call raises an error."""
    function = probed.function
    try:
        probed.call((1, 2))  # may initialize what a function builds only once
    except SegpipeError:
        raise
    except Exception as error:
        where = plugins.located(error)
        raise ConfigError(f"{function.name} fails: {where}.") from error
    try:
        with tripwire.watching() as called:
            outputs = probed.outputs()

        # Two calls with the same key: the second changes only what depends on the number of calls.
        first = tripwire.object_state(function.ready())
        repeated = probed.call((0, 0))
        second = tripwire.object_state(function.ready())
        again = probed.call((0, 0))
        third = tripwire.object_state(function.ready())
        probed.call((1, 1))  # must not write into arrays returned before
    except Exception as error:
        return Observation({}, {REPEAT: f"a later call {_raises(error)}"})

    calls = [f"{name} at {where}" if where else name for name, where in called.items()]
    changes = tripwire.changed_by_call(first, second, third)
    before = outputs[0, 0]
    problems = {
        CALLS: f"calls {', '.join(calls)}" if calls else "",
        STATE: f"a call changes {', '.join(changes[:3])}" if changes else "",
        REPEAT: first_difference(before, repeated) or first_difference(before, again),
    }
    return Observation(outputs, problems)


def _raises(error: Exception) -> str:
    """An error on one line."""
    return f"raises {type(error).__name__}: {' '.join(str(error).split())}"
