"""Checks that an augmentation is a pure function of (sample, key).

f(sample, key) -> bytes may depend on nothing else and change nothing else. Every probe of probes.py runs on each
transform alone, always applied, and on the whole pipeline, so a finding names the transform, the probe and the first
differing pixel. Before any of them, two processes that have called nothing yet call everything in opposite orders, the
second as if it were another loader worker: whatever is kept from call to call, and wherever, their results differ.
layouts.py checks the pipeline inside real loader workers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from segpipe.errors import ImpureAugmentError, SegpipeError
from segpipe.native import one_thread
from segpipe.plugins import is_path
from segpipe.purity import tripwire
from segpipe.purity.elsewhere import elsewhere, started
from segpipe.purity.held import object_state, written
from segpipe.purity.probes import (
    KEYS,
    PROBES,
    Case,
    Finding,
    Frame,
    Pixel,
    Probe,
    first_difference,
    one_line,
    run,
    two_thread_counts,
)

if TYPE_CHECKING:
    from segpipe.data.augment import Augmenter, Part
    from segpipe.data.data_set import Samples

QUICK_SIZE = 256  # largest height and width at which `quick` probes single transforms
BUDGET_S = 20.0  # processor time of `quick`; all its probes of all shipped transforms take less than 2
UNANSWERED = {  # advice, by start method
    "fork": "A transform may wait for threads, which do not survive a fork.",
    "spawn": "Define functions in TRANSFORMS at the top of a module; otherwise only data.start_method=fork works.",
}
COMBINED = (
    "No transform alone shows it: set augment.keyed=true, "
    "or look for data in a module that two transforms share."
)
FORKED = Probe(
    "forked process",
    Case.differs,
    "Do not use the process id, or state set up per process.",
)
SPAWNED = Probe(
    "spawned process",
    Case.differs,
    "It depends on how or when the program was started. Use no clock, uuid, process id, hash() of text, address, order "
    "of a set, environment variable, sys.argv, rank or torch.initial_seed(), not even at import or in __init__, nor "
    "module data set after the import.",
)
# Most telling first. Without the pickling probe: only workers that are not forked need it, and they report it. That of
# a forked process is part of ORDER.
QUICK = tuple(
    replace(probe, run=two_thread_counts) if probe.name == "OpenCV threads" else probe
    for probe in PROBES
    if probe.name != "pickled pipeline"
)
CAUSES = (
    "tripwires",
    "own state",
)  # probes that name a line or an attribute, where others tell what differs
MANY = 32  # images for each transform of the user, whose calls in two orders must agree
ALWAYS = 2  # first probes of QUICK, two calls each, that run on every transform however slow the machine is
METHODS = {"fork": FORKED, "spawn": SPAWNED}
ORDER = "another worker"
ORDER_ADVICE = (
    "Keep nothing from one call to the next, and do not ask which worker this is, or how many there are. A cache may "
    "hold what follows from its keys alone."
)
NAMES = (*(probe.name for probe in (*PROBES, *METHODS.values())), ORDER)
Report = Callable[[str, str, Finding | None], None]
Question = tuple[Case, Probe]


class _Answers(NamedTuple):
    findings: list[Finding]
    asked: int  # number of questions


@dataclass(frozen=True)
class _Outputs:
    """What one process made, and what its calls have written into."""

    frames: dict[tuple[int, int], Frame]  # by numbers of sample and key
    written: tuple[str, ...]


@one_thread()  # as loaders give to torch; more do not survive a fork
def check(
    augmenter: Augmenter,
    samples: Samples,
    *,
    report: Report = lambda transform, probe, finding: None,
) -> list[Finding]:
    """All findings, transform by transform; empty for a pure pipeline.

    `report(transform, probe, finding or None)` is called after each probe. Starts three forked processes and a spawned
    one; costs about 50 calls of each transform. Global generators and thread counts are restored, except that OpenCV's
    generator restarts.
    """
    ordered = _in_two_orders(augmenter, _two_frames(samples))
    cases = _cases(augmenter, samples, len(KEYS))
    findings = _ask(
        [(case, probe) for case in cases for probe in PROBES], report=report
    ).findings

    def tell(name: str, found: list[Finding]) -> None:
        findings.extend(found)
        for case in cases:
            report(
                case.name,
                name,
                next((one for one in found if one.transform == case.name), None),
            )

    for method, probe in METHODS.items():
        tell(probe.name, _answers(method, [(case, probe) for case in cases]).findings)
    tell(ORDER, ordered)
    return _drop_explained(findings, augmenter.name)


@one_thread()
def quick(augmenter: Augmenter, samples: Samples, *, budget_s: float = BUDGET_S) -> str:
    """The check before every training; returns how many probes were left out, empty when all ran.

    Forked processes do the work, so this one stays untouched. Single transforms are probed at up to 256x256 pixels,
    the whole pipeline at its own size. The first `ALWAYS` probes run on every transform and the whole; then, probe by
    probe, the others, none of which starts after `budget_s` seconds of processor time: a busy machine loses none. Does
    nothing with `augment.check=false`.

    Raises ImpureAugmentError naming transform, probe, pixel and what to do.
    """
    if not augmenter.config.check:
        return ""
    frames = _two_frames(samples)
    mine = any(map(is_path, augmenter.config.extra))
    with (
        started("spawn", _outputs, augmenter, frames, False)
        if mine
        else nullcontext(dict) as afresh
    ):
        found = elsewhere("fork", _probe, augmenter, samples, budget_s)
        ordered = _in_two_orders(augmenter, frames, afresh)
    answers, asked_for = (
        found
        if not isinstance(found, str)
        else (_unanswered("fork", augmenter.name, QUICK[0], found), 0)
    )
    findings = _drop_explained([*answers.findings, *ordered], augmenter.name)
    told = [
        one for one in findings if one.unanswered and one.probe == SPAWNED.name
    ]  # no reason not to train
    if findings != told:
        others = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
        telling = min(
            findings, key=lambda finding: (finding in told, finding.probe not in CAUSES)
        )
        raise ImpureAugmentError(
            f"augmentation is not a pure function of sample and key. {telling}{others} List all with "
            f"segpipe check-augment; augment.check=false trains anyway."
        )
    notes = [f"purity of the augmentation: {finding}" for finding in told]
    if answers.asked < asked_for:
        notes.append(
            f"purity of the augmentation: {answers.asked} of {asked_for} probes ran in {budget_s:g} s of processor "
            f"time; segpipe check-augment runs all."
        )
    return " ".join(notes)


def _probe(
    augmenter: Augmenter, samples: Samples, budget_s: float
) -> tuple[_Answers, int]:
    """The answers of `quick`, and how many there could be."""
    cases = _cases(augmenter, samples, 2, largest=QUICK_SIZE)
    questions = [(case, probe) for probe in QUICK for case in cases]
    return _ask(questions, budget_s, ALWAYS * len(cases)), len(questions)


def _in_two_orders(
    augmenter: Augmenter, frames: Sequence[Frame], afresh: Callable[[], Any] = dict
) -> list[Finding]:
    """A finding for each transform whose outputs differ between two forked processes, or from those `afresh`, of a
    spawned one; empty if a forked one fails, which the probes then explain."""
    try:
        found = [
            elsewhere("fork", _outputs, augmenter, frames, backwards)
            for backwards in (False, True)
        ]
    except Exception:
        return []
    if any(isinstance(each, str) for each in found):
        return []
    try:
        spawned = afresh()
    except SegpipeError as error:
        return [
            Finding(
                augmenter.name, SPAWNED.name, str(error).rstrip("."), SPAWNED.advice
            )
        ]
    if isinstance(spawned, str):
        return [
            Finding(
                augmenter.name,
                SPAWNED.name,
                spawned,
                UNANSWERED["spawn"],
                unanswered=True,
            )
        ]
    return [
        *_compared(found[0], found[1], ORDER, ORDER_ADVICE),
        *_compared(found[0], spawned, SPAWNED.name, SPAWNED.advice),
    ]


def _compared(
    ones: Mapping[str, _Outputs],
    others: Mapping[str, _Outputs],
    probe: str,
    advice: str,
) -> list[Finding]:
    findings = []
    for name, other in others.items():
        one = ones[name]
        pixel = next(
            (
                d
                for place in one.frames
                if (d := first_difference(one.frames[place], other.frames[place]))
            ),
            None,
        )
        if pixel is not None:
            left = (
                [*dict.fromkeys((*one.written, *other.written))][:3]
                if probe == ORDER
                else []
            )
            kept = f"; its calls write into {', '.join(left)}" if left else ""
            findings.append(
                Finding(
                    name,
                    probe,
                    f"{pixel}{kept}",
                    advice,
                    pixel if isinstance(pixel, Pixel) else None,
                )
            )
    return findings


def _outputs(
    augmenter: Augmenter, frames: Sequence[Frame], backwards: bool
) -> dict[str, _Outputs]:
    """Of each transform and the whole, by name, what it makes of two samples under two keys; the same backwards, and
    as another worker.

    A transform of the user is called with MANY images: a bank of earlier samples needs some before it is used.
    """
    parts = augmenter.parts()
    order = slice(None, None, -1) if backwards else slice(None)
    with tripwire.another_worker(environment=True) if backwards else nullcontext():
        cropped = [run(parts[0].fresh(), frame, KEYS[0]) for frame in frames]
        small = [
            (image[:QUICK_SIZE, :QUICK_SIZE], target[:QUICK_SIZE, :QUICK_SIZE])
            for image, target in cropped
        ]
        many = [
            *small,
            *(
                (small[0][0] // 2 + np.uint8(4 * number), small[0][1])
                for number in range(MANY - 2)
            ),
        ]
        made = {}
        for function in [*parts, augmenter][order]:
            given = (
                frames
                if function not in parts[1:]
                else many
                if is_path(function.name)
                else small
            )
            places = [
                (0, 0),
                (0, 1),
                (1, 0),
                (1, 1),
                *((place, place % len(KEYS)) for place in range(2, len(given))),
            ]
            made[function.name] = _called(function.fresh(), given, places[order])
    return made


def _called(
    function: Augmenter, frames: Sequence[Frame], places: Sequence[tuple[int, int]]
) -> _Outputs:
    function.ready()
    before = object_state(function)
    made = {
        (sample, key): run(function, frames[sample], KEYS[key])
        for sample, key in places
    }
    return _Outputs(made, tuple(written(before, object_state(function))))


def _cases(
    augmenter: Augmenter, samples: Samples, num_keys: int, *, largest: int | None = None
) -> list[Case]:
    """The parts, then the whole, each called once per key. Parts after the first get the output of the first."""
    frames = _two_frames(samples)
    parts = augmenter.parts()
    with tripwire.preserved():
        cropped = [run(parts[0].fresh(), frame, KEYS[0]) for frame in frames]
        small = [
            (image[:largest, :largest].copy(), target[:largest, :largest].copy())
            for image, target in cropped
        ]
        cases = [
            _case(parts[0], frames, num_keys),
            *(_case(part, small, num_keys) for part in parts[1:]),
        ]
        whole = _case(augmenter.fresh(), frames, num_keys)
    cases[0].takes_samples = whole.takes_samples = True
    whole.varies = any(
        _varies(case, part) for case, part in zip(cases, parts, strict=True)
    )
    return [*cases, whole]


def _case(function: Augmenter, frames: Sequence[Frame], num_keys: int) -> Case:
    before, threads = tripwire.switches(), threading.active_count()
    expected = [run(function, frames[0], key) for key in KEYS[:num_keys]]
    switched = [
        name for name, value in tripwire.switches().items() if value != before[name]
    ]
    switched += (
        ["the number of threads of this process"]
        if threading.active_count() > threads
        else []
    )
    return Case(function, (frames[0], frames[1]), expected, switched=switched)


def _varies(case: Case, part: Part) -> bool:
    """Whether the key decides what this part does to every sample."""
    return part.certain and first_difference(*case.expected[:2]) is not None


def _two_frames(samples: Samples) -> tuple[Frame, Frame]:
    """Two samples of a split; of a split with one sample, that and its mirror image."""
    first = samples.read(0)
    if len(samples) > 1:
        return first, samples.read(len(samples) // 2)
    return first, (first[0][:, ::-1].copy(), first[1][:, ::-1].copy())


def _ask(
    questions: Sequence[Question],
    budget_s: float = math.inf,
    always: int = 0,
    *,
    report: Report = lambda transform, probe, finding: None,
    clock: Callable[[], float] = time.process_time,
) -> _Answers:
    """Answers to the first `always` questions, and to more until the budget of processor time is spent."""
    findings: list[Finding] = []
    deadline = clock() + budget_s
    for number, (case, probe) in enumerate(questions):
        if number >= always and clock() >= deadline:
            return _Answers(findings, number)
        with tripwire.preserved():
            finding = _answer(case, probe)
        report(case.name, probe.name, finding)
        findings += [finding] if finding is not None else []
    return _Answers(findings, len(questions))


def _answer(case: Case, probe: Probe) -> Finding | None:
    try:
        found = probe.run(case)
    except Exception as error:  # the first call worked
        found = f"raises {one_line(error)}"
    if found is None:
        return None
    return Finding(
        case.name,
        probe.name,
        str(found),
        probe.advice,
        found if isinstance(found, Pixel) else None,
    )


def _drop_explained(findings: list[Finding], whole: str) -> list[Finding]:
    """Drops findings of the whole pipeline that one transform explains."""
    parts = [finding for finding in findings if finding.transform != whole]
    explained = {finding.probe for finding in parts}
    own = [
        finding
        for finding in findings
        if finding.transform == whole and finding.probe not in explained
    ]
    if not parts:
        own = [one if one.unanswered else replace(one, advice=COMBINED) for one in own]
    return [*parts, *own]


def _answers(
    method: str,
    questions: Sequence[Question],
    budget_s: float = math.inf,
    always: int = 0,
) -> _Answers:
    """The answers of `_ask` in another process."""
    found = elsewhere(method, _ask, questions, budget_s, always)
    if isinstance(found, _Answers):
        return found
    return _unanswered(method, questions[-1][0].name, questions[0][1], str(found))


def _unanswered(method: str, name: str, probe: Probe, problem: str) -> _Answers:
    return _Answers(
        [Finding(name, probe.name, problem, UNANSWERED[method], unanswered=True)], 0
    )
