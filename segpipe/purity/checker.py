"""Checks that an augmentation is a pure function of (sample, key).

f(sample, key) -> bytes may depend on nothing else and change nothing else. Every probe of probes.py runs on each
transform alone, always applied, and on the whole pipeline, so a finding names the transform, the probe and the first
differing pixel. layouts.py checks the pipeline inside real loader workers.
"""

from __future__ import annotations

import math
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2

from segpipe.errors import ImpureAugmentError
from segpipe.purity import tripwire
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
    from segpipe.data.samples import Samples

QUICK_SIZE = 256  # largest height and width at which `quick` probes single transforms
PATIENCE_S = 120.0  # for another process
UNANSWERED = {  # advice, by start method
    "fork": "A transform may wait for threads, which do not survive a fork.",
    "spawn": "Define functions in TRANSFORMS at the top of a module; otherwise only data.start_method=fork works.",
}
COMBINED = (
    "No transform alone shows it: set augment.keyed=true, or look for data in a module that two transforms share."
)
FORKED = Probe("forked process", Case.differs, "Do not use the process id, or state set up per process.")
SPAWNED = Probe(
    "spawned process", Case.differs, "Do not use hash() of text, addresses, or module data set after the import."
)
# Most telling first. Without the pickling probe: only workers that are not forked need it, and they report it.
QUICK = (
    PROBES[0],
    FORKED,
    *(
        replace(probe, run=two_thread_counts) if probe.name == "OpenCV threads" else probe
        for probe in PROBES[1:]
        if probe.name != "pickled pipeline"
    ),
)
ALWAYS = 2  # first probes of QUICK, two calls each, that run on every transform however slow the machine is
METHODS = {"fork": FORKED, "spawn": SPAWNED}
NAMES = tuple(probe.name for probe in (*PROBES, *METHODS.values()))
Report = Callable[[str, str, Finding | None], None]
Question = tuple[Case, Probe]


class _Answers(NamedTuple):
    findings: list[Finding]
    asked: int  # number of questions


def check(
    augmenter: Augmenter,
    samples: Samples,
    *,
    budget_s: float = math.inf,
    report: Report = lambda transform, probe, finding: None,
) -> list[Finding]:
    """All findings, transform by transform; empty for a pure pipeline.

    `report(transform, probe, finding or None)` is called after each probe. No probe starts after `budget_s` seconds.
    Starts a forked and a spawned process; costs about 40 calls of each transform. Global generators and thread counts
    are restored, except that OpenCV's generator restarts.
    """
    deadline = time.monotonic() + budget_s
    cases = _cases(augmenter, samples, len(KEYS))
    findings = _ask([(case, probe) for case in cases for probe in PROBES], deadline, report=report).findings
    for method, probe in METHODS.items():
        if time.monotonic() < deadline:
            found = _in_process(method, [(case, probe) for case in cases], deadline).findings
            findings += found
            for case in cases:
                report(case.name, probe.name, next((one for one in found if one.transform == case.name), None))
    return _drop_explained(findings, augmenter.name)


def quick(augmenter: Augmenter, samples: Samples, *, budget_s: float = 2.0) -> str:
    """The check before every training; returns how many probes the time did not allow, empty when all ran.

    A forked process does the work, so this one stays untouched. Single transforms are probed at up to 256x256 pixels,
    the whole pipeline at its own size. The first `ALWAYS` probes run on every transform and the whole; then, probe by
    probe, the others, none of which starts after `budget_s` seconds. Does nothing with `augment.check=false`.

    Raises ImpureAugmentError naming transform, probe, pixel and what to do.
    """
    if not augmenter.config.check:
        return ""
    deadline = time.monotonic() + budget_s
    cases = _cases(augmenter, samples, 2, largest=QUICK_SIZE)
    questions = [(case, probe) for probe in QUICK for case in cases]
    answers = _in_process("fork", questions, deadline, always=ALWAYS * len(cases))
    findings = _drop_explained(answers.findings, augmenter.name)
    if findings:
        others = f" ({len(findings) - 1} more)" if len(findings) > 1 else ""
        raise ImpureAugmentError(
            f"augmentation is not a pure function of sample and key. {findings[0]}{others} List all with "
            f"segpipe check-augment; augment.check=false trains anyway."
        )
    if answers.asked == len(questions):
        return ""
    return (
        f"purity of the augmentation: {answers.asked} of {len(questions)} probes ran in {budget_s:g} s; "
        f"segpipe check-augment runs all."
    )


def _cases(augmenter: Augmenter, samples: Samples, num_keys: int, *, largest: int | None = None) -> list[Case]:
    """The parts, then the whole, each called once per key. Parts after the first get the output of the first."""
    frames = _two_frames(samples)
    parts = augmenter.parts()
    with tripwire.preserved():
        cropped = [run(parts[0].fresh(), frame, KEYS[0]) for frame in frames]
        small = [(image[:largest, :largest].copy(), target[:largest, :largest].copy()) for image, target in cropped]
        cases = [_case(parts[0], frames, num_keys), *(_case(part, small, num_keys) for part in parts[1:])]
        whole = _case(augmenter.fresh(), frames, num_keys)
    cases[0].takes_samples = whole.takes_samples = True
    whole.varies = any(_varies(case, part) for case, part in zip(cases, parts, strict=True))
    return [*cases, whole]


def _case(function: Augmenter, frames: Sequence[Frame], num_keys: int) -> Case:
    return Case(function, (frames[0], frames[1]), [run(function, frames[0], key) for key in KEYS[:num_keys]])


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
    deadline: float,
    *,
    always: int = 0,
    report: Report = lambda transform, probe, finding: None,
    clock: Callable[[], float] = time.monotonic,
) -> _Answers:
    """Answers to the first `always` questions, and to more until the deadline."""
    findings: list[Finding] = []
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
    return Finding(case.name, probe.name, str(found), probe.advice, found if isinstance(found, Pixel) else None)


def _drop_explained(findings: list[Finding], whole: str) -> list[Finding]:
    """Drops findings of the whole pipeline that one transform explains."""
    parts = [finding for finding in findings if finding.transform != whole]
    explained = {finding.probe for finding in parts}
    own = [finding for finding in findings if finding.transform == whole and finding.probe not in explained]
    if not parts:
        own = [one if one.unanswered else replace(one, advice=COMBINED) for one in own]
    return [*parts, *own]


def _in_process(method: str, questions: Sequence[Question], deadline: float, *, always: int = 0) -> _Answers:
    """The answers of `_ask` in another process."""
    tripwire.set_opencv_threads(cv2.getNumThreads())
    context = get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, questions, deadline, always), daemon=True)  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn of any thread; this code takes no lock that a thread could hold.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            process.start()
        sender.close()
        if receiver.poll(PATIENCE_S):
            return _Answers(*receiver.recv())
        problem = f"no answer in {PATIENCE_S:.0f} s"
    except EOFError:
        problem = "the process ended without an answer"
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        problem = f"cannot be sent to another process: {error}"
    finally:
        receiver.close()
        sender.close()
        if process.pid is not None:
            process.kill()
            process.join()
    case, probe = questions[-1][0], questions[0][1]
    return _Answers([Finding(case.name, probe.name, problem, UNANSWERED[method], unanswered=True)], len(questions))


def _send(sender: Any, questions: Sequence[Question], deadline: float, always: int) -> None:
    sender.send(tuple(_ask(questions, deadline, always=always)))
    sender.close()
