"""Audits a run: checks its files against each other, and replays randomly chosen spans of it."""

import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from segpipe import plugins
from segpipe.audit import evidence
from segpipe.audit.evidence import (
    FAILED,
    PASSED,
    UNCHECKED,
    CheckedCheckpoint,
    Line,
    Verify,
)
from segpipe.audit.replay import first_difference, replay
from segpipe.data.samples import absent_root
from segpipe.determinism import flags
from segpipe.errors import CHECKED_IN_PART, CheckpointError, ConfigError, SegpipeError
from segpipe.ledger.divergence import compare
from segpipe.ledger.reader import RunLedger
from segpipe.ledger.rows import FOLDER, ledger_files
from segpipe.losses.total import backend
from segpipe.settings.compose import with_settings
from segpipe.settings.config import Config, check, saved_config
from segpipe.train.checkpoint import own_fingerprint

EXIT_CODES = {
    "passed": 0,
    "passed in part": CHECKED_IN_PART,
    "failed": 13,
    "cannot audit": 2,
}
# Called with the current activity, updates done, and updates in total.
Progress = Callable[[str, int, int], None]


class Span(NamedTuple):
    """Updates `first` to `last - 1`, from the checkpoint at `first`, or from the seed."""

    start: Path | None
    first: int
    last: int

    def __str__(self) -> str:
        source = self.start.name if self.start else "the seed"
        return f"updates {self.first} to {self.last - 1} from {source}"


@dataclass(frozen=True)
class Audit:
    """All lines, from the images to the exported files, and how the replayed spans were chosen."""

    run: str
    lines: tuple[Line, ...]
    obstacle: str  # why nothing could be replayed; empty if something was
    seed: int  # chose the spans
    replayed: int  # number of updates
    updates: int  # of the run
    seconds: float

    @property
    def _faults(self) -> list[str]:
        return [
            f"{line.part}: {line.text}" for line in self.lines if line.status == FAILED
        ]

    @property
    def verdict(self) -> str:
        """Passed, passed in part, failed or cannot audit.

        In part: nothing is wrong, but not everything was checked or not every update was replayed. Failed: the run is
        not repeatable, or something was altered.
        """
        if self._faults:
            return "failed"
        if self.obstacle:
            return "cannot audit"
        unchecked = any(line.status == UNCHECKED for line in self.lines)
        in_part = unchecked or self.replayed < self.updates
        return "passed in part" if in_part else "passed"

    @property
    def exit_code(self) -> int:
        """0 passed, 14 passed in part, 13 failed, 2 cannot audit."""
        return EXIT_CODES[self.verdict]

    @property
    def sentence(self) -> str:
        """The verdict with its reason."""
        share = f"{self.replayed / max(self.updates, 1):.0%}"
        told = f"{self.replayed} of {self.updates} updates ({share}) were replayed and gave the same bits"
        return f"{self.verdict}: {'; '.join(self._faults) or self.obstacle or told}"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        lines = [line._asdict() for line in self.lines]
        head = {"verdict": self.verdict, "sentence": self.sentence}
        return {**head, **asdict(self), "lines": lines}


def choose_spans(
    starts: Mapping[int, Path | None],
    end: int,
    *,
    count: int,
    longest: int,
    seed: int,
    always: Collection[int] = (),
) -> list[Span]:
    """`count` spans between neighbouring starts, chosen by `seed`, in step order; all if there are fewer.

    starts: updates done -> checkpoint. A span ends at the next start, at `end`, or after `longest` updates (0: no
    limit). Spans that end after a number of updates in `always` are added.
    """
    edges = [*sorted(step for step in starts if step < end), end]
    spans = [
        Span(starts[first], first, min(last, first + longest) if longest else last)
        for first, last in pairwise(edges)
    ]
    chosen = random.Random(seed).sample(spans, min(count, len(spans)))
    return [span for span in spans if span in chosen or span.last in always]


def examine(
    run: Path,
    progress: Progress,
    *,
    seed: int,
    spans: int,
    span_steps: int,
    any_environment: bool = False,
    settings: dict[str, Any],
    verify: Verify | None = None,
) -> Audit:
    """The audit of a run, which replays `spans` spans chosen by `seed`.

    span_steps: longest replay of a span; 0: up to the next checkpoint. any_environment: replay even if versions or
    hardware differ. settings: by dotted name; only those that do not affect the numbers; keys without a dot are
    ignored. Without `verify`, the exported files are not checked.

    Raises CheckpointError when there is no run at all, and ConfigError for a request that cannot be met.
    """
    started = time.monotonic()
    recorded = ledger_files(run)
    if not (run / "config.json").exists() and not recorded:
        text = f"{run} holds no run: it has neither config.json nor {FOLDER}."
        raise CheckpointError(f"{text} Set run=runs/NAME.")
    progress("checking the files", 0, 0)
    lines: list[Line] = []
    chosen: list[Span] = []
    updates = 0
    obstacle = f"{run} has no readable ledger and config.json"
    ledger, ledger_lines = evidence.check_ledger(run) if recorded else (None, [])
    try:
        original = saved_config(run)
        check(original, world_size=1)
    except ConfigError as error:
        ledger = None
        lines.append(Line("config", FAILED, str(error)))
    else:
        config = with_settings(original, settings)
        lines += evidence.check_inputs(run, config)
        lines += evidence.check_weights(config)
    lines += ledger_lines
    if ledger:
        updates = ledger.num_updates
        obstacle = _obstacle(config, ledger, any_environment=any_environment)
        line = evidence.check_config(original, ledger)
        checkpoints, checkpoint_lines = evidence.check_checkpoints(run, ledger)
        lines += [line, *checkpoint_lines]
        if line.status == FAILED:
            obstacle = obstacle or "config.json does not match the ledger"
        if not obstacle:
            starts: dict[int, Path | None] = {
                each.step: each.path for each in checkpoints
            }
            if all(line.status == PASSED for line in lines if line.part == "weights"):
                starts[0] = None
            chosen = choose_spans(
                starts,
                updates,
                count=spans,
                longest=span_steps,
                seed=seed,
                always=[
                    each.step
                    for each in checkpoints
                    if each.path.stem in ("last", "best")
                ],
            )
            lines += _replay(
                config,
                chosen,
                ledger,
                checkpoints,
                progress,
                any_environment=any_environment,
            )
            progress("verifying the exported files", 0, 0)
        lines.append(evidence.check_result(run, ledger, checkpoints))
        lines.append(evidence.check_export(run, config, None if obstacle else verify))
    if not chosen:
        obstacle = obstacle or "there is no checkpoint and no seed to replay from"
        lines.append(Line("replay", UNCHECKED, obstacle))
    return Audit(
        run=str(run),
        lines=tuple(lines),
        obstacle="" if chosen else obstacle,
        seed=seed,
        replayed=sum(span.last - span.first for span in chosen),
        updates=updates,
        seconds=round(time.monotonic() - started, 1),
    )


def _obstacle(config: Config, ledger: RunLedger, *, any_environment: bool) -> str:
    """Why nothing can be replayed; empty if it can, and then torch's switches are set as in the run."""
    if absent := absent_root(config.data):
        key = "data.mix" if config.data.mix else "data.root=FOLDER"
        return f"data.root = {absent} does not exist here. Set {key}"
    mode, threads = config.compute.mode, config.compute.threads
    if mode not in ("elastic", "audit"):
        return f"compute.mode = {mode} does not promise the same bits for any number of processes; elastic does"
    if not ledger.num_updates:
        return "the ledger holds no update"
    flags.set_environment(threads, mode)
    flags.apply(threads, mode)
    on_gpu = torch.cuda.is_available() and config.compute.device != "cpu"
    try:
        now = own_fingerprint(config, backend(config.loss, "cuda" if on_gpu else "cpu"))
        for header in [] if any_environment else ledger.headers:
            if changed := flags.differences(header.fingerprint, now):
                named = evidence.differences(changed, "the ledger", "this environment")
                return (
                    f"equal bits are only promised within one environment: {named}. Audit where the run was trained, "
                    f"or set any_environment=true to try"
                )
        for key, path in config.import_paths:  # only after its code was compared
            plugins.load(key, path)
    except ConfigError as error:
        return str(error).rstrip(".")
    return ""


def _replay(
    config: Config,
    spans: Sequence[Span],
    ledger: RunLedger,
    checkpoints: Sequence[CheckedCheckpoint],
    progress: Progress,
    *,
    any_environment: bool,
) -> Iterator[Line]:
    """Compares the ledger of each replayed span with the run's, and its final state with the checkpoints."""
    total = sum(span.last - span.first for span in spans)
    before = 0
    ends: dict[int, dict[str, str]] = {}  # number of updates -> digests after them
    for span in spans:

        def report(
            done: int, *, base: int = before - span.first, span: Span = span
        ) -> None:
            progress(f"replaying {span}", base + done, total)

        report(span.first)
        status = FAILED
        try:
            again, tensors = replay(
                config,
                span.start,
                range(span.first, span.last),
                report,
                any_environment=any_environment,
            )
            found = compare(ledger, again)
            if not found.no_difference:
                text = f"{found.sentence} (A: the ledger, B: the replay)"
            elif found.steps < span.last - span.first:
                text = f"the ledger has only {found.steps} of these updates"
            else:
                status, text = PASSED, f"{len(again.rows)} rows are bitwise equal"
                ends[span.last] = tensors
        except SegpipeError as error:
            text = str(error)
        yield Line("replay", status, f"{span}: {text}")
        before += span.last - span.first
    yield from _check_states(checkpoints, ends)


def _check_states(
    checkpoints: Sequence[CheckedCheckpoint], ends: Mapping[int, Mapping[str, str]]
) -> Iterator[Line]:
    """Compares checkpoints with the final states of replayed spans. `ends`: updates done -> digests of the tensors."""
    equal, unknown = [], []
    for each in checkpoints:
        name = each.path.name
        if each.step not in ends:
            unknown.append(name)
        elif fault := first_difference(each.path, ends[each.step]):
            text = f"{fault} differs from what the replayed updates give"
            yield Line(name, FAILED, text)
        else:
            equal.append(name)
    if equal:
        text = f"every tensor is bitwise equal to the replay: {', '.join(equal)}"
        yield Line("states", PASSED, text)
    if unknown:
        text = f"no replayed span ends at {', '.join(unknown)}. Set spans=N and span_steps=0 to replay up to them"
        yield Line("states", UNCHECKED, text)


def check_folder(folder: Path) -> None:
    """Raises ConfigError if no report can be written to `folder`, before minutes are spent on the audit."""
    existing = next(
        each for each in (folder, *folder.absolute().parents) if each.exists()
    )
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"out = {folder}, but {existing} is not a writable folder. Set out=FOLDER for the report."
        )
