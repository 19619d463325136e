"""Audits a run: checks all its files against each other, and replays spans of it that are chosen at random."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segpipe import plugins
from segpipe.audit import evidence
from segpipe.audit.task import RunTasks, Task, in_folder
from segpipe.audit.verdict import FAILED, PASSED, UNCHECKED, Audit, Line
from segpipe.determinism import flags
from segpipe.distributed.watch.agreement import plugin_sources
from segpipe.errors import CheckpointError, CollectiveError, ConfigError, SegpipeError
from segpipe.files import sha256
from segpipe.keys import generator, sample_key
from segpipe.ledger.divergence import compare
from segpipe.ledger.inputs import combined
from segpipe.ledger.reader import RunLedger, read_run
from segpipe.ledger.rows import FOLDER, INPUTS, SHARD, STEP, row_keys
from segpipe.runtime.artifact import SUMS
from segpipe.settings.arguments import with_settings
from segpipe.settings.check import check
from segpipe.settings.config import Config
from segpipe.train.checkpoint import HASHES

Progress = Callable[[str, int, int], None]  # what is being done, updates done, updates in all
EVIDENCE = ("config.json", INPUTS, "result.json", HASHES, "*.pt", f"{FOLDER}/*", f"export/{SUMS}")


@dataclass(frozen=True)
class AuditRequest:
    """What the auditor asks for."""

    run: Path
    seed: int  # of the choice of the spans
    spans: int = 3
    span_steps: int = 100  # longest replay of a span; 0: up to the next checkpoint
    nproc: int = 1  # processes that replay
    any_environment: bool = False  # replay although versions or hardware differ
    settings: dict[str, str] = field(default_factory=dict)  # by dotted name: those that do not affect the numbers


class Span(NamedTuple):
    """Updates `first` to `last - 1`, from the checkpoint at `first`, or from the seed."""

    start: Path | None
    first: int
    last: int

    def __str__(self) -> str:
        many = f"updates {self.first} to {self.last - 1}" if self.last - self.first > 1 else f"update {self.first}"
        return f"{many} from {self.start.name if self.start else 'the seed'}"


def choose_spans(starts: Mapping[int, Path | None], end: int, *, count: int, longest: int, seed: int) -> list[Span]:
    """`count` of the spans between neighbouring starts (updates done -> checkpoint), by step; all when there are fewer.

    A span ends at the next start, or at `end`, or after `longest` updates (0: no limit). The choice is a function of
    the arguments; the auditor draws the seed, so that nobody knows it before.
    """
    edges = sorted(step for step in starts if step < end)
    spans = [
        Span(starts[first], first, min(following, first + longest) if longest else following)
        for first, following in pairwise([*edges, end])
    ]
    draws = generator(sample_key(seed, 0, 0, "audit")).bit_generator.random_raw(len(spans)).tolist()
    chosen = sorted(range(len(spans)), key=lambda place: (draws[place], place))[:count]
    return [spans[place] for place in sorted(chosen)]


def examine(request: AuditRequest, progress: Progress, run_tasks: RunTasks) -> Audit:
    """All lines of the report; `run_tasks` replays.

    Raises CheckpointError when there is no run at all, ConfigError for a request that cannot be met, and
    CollectiveError when the replaying processes failed to work together.
    """
    run, started = request.run, time.monotonic()
    if not (run / "config.json").exists() and not (run / FOLDER).is_dir():
        raise CheckpointError(f"{run} holds no run: neither config.json nor {FOLDER}. Set run=runs/NAME.")
    progress("checking the files", 0, 0)
    ledger, ledger_lines = evidence.check_ledger(run)
    original, config, lines = None, None, []
    try:
        original = evidence.read_config(run)
        config = with_settings(original, request.settings)
        lines += evidence.check_inputs(run, config, ledger)
        lines += [evidence.check_config(run, original, ledger)] if ledger else []
    except CheckpointError as error:
        lines.append(Line("config", FAILED, str(error)))
    obstacle = _obstacle(config, ledger, request)
    # Spans are replayed although data or sources changed: it shows where that mattered.
    consistent = not any(line.part == "config" and line.status == FAILED for line in lines)
    usable = config and _data_is_here(config) and not _unusable_plugins(config)
    replayable = config if ledger and usable and consistent else None
    spans: list[Span] = []
    with tempfile.TemporaryDirectory(prefix="segpipe-audit-") as scratch:
        replays = _Replays(replayable, request, Path(scratch), progress, run_tasks) if replayable else None
        checkpoints, checkpoint_lines = evidence.check_checkpoints(run, ledger, replays.state if replays else None)
        lines += ledger_lines + checkpoint_lines
        if replays and ledger and not obstacle:
            starts: dict[int, Path | None] = {0: None, **{each.step: each.path for each in checkpoints if each.step}}
            spans = choose_spans(
                starts, ledger.num_updates, count=request.spans, longest=request.span_steps, seed=request.seed
            )
            lines += replays.spans(spans, ledger)
    if not spans:
        obstacle = obstacle or "the configuration does not match the ledger, so nothing can be replayed"
        lines.append(Line("replay", UNCHECKED, obstacle))
    lines += [evidence.check_result(run, checkpoints, ledger), evidence.check_export(run, original, checkpoints)]
    return Audit(
        run=str(run),
        lines=tuple(lines),
        obstacle=obstacle if not spans else "",
        seed=request.seed,
        replayed=sum(span.last - span.first for span in spans),
        updates=ledger.num_updates if ledger else 0,
        processes=request.nproc,
        evidence=combined(_file_hashes(run)),
        seconds=round(time.monotonic() - started, 1),
    )


def _data_is_here(config: Config) -> bool:
    return config.data.name == "synthetic" or Path(config.data.root).is_dir()  # also without a root: "." is one


def _unusable_plugins(config: Config) -> str:
    """Why the code that the run names cannot be imported; empty when it can."""
    try:
        for key, path in config.import_paths:
            plugins.load(key, path)
    except ConfigError as error:
        return str(error).rstrip(".")
    return ""


def _obstacle(config: Config | None, ledger: RunLedger | None, request: AuditRequest) -> str:
    """Why nothing can be replayed; empty when it can."""
    if config is None or ledger is None:
        return "without config.json and a ledger there is nothing to replay and compare with"
    if not _data_is_here(config):
        return f"data.root = {config.data.root} does not exist here. Set data.root=FOLDER"
    if unusable := _unusable_plugins(config):
        return unusable
    mode = config.compute.mode
    if mode not in ("elastic", "audit"):
        return f"compute.mode = {mode} does not promise the same bits for any number of processes; elastic does"
    if not ledger.num_updates:
        return "the ledger holds no update"
    check(config, world_size=request.nproc)
    flags.set_environment(config.compute.threads * request.nproc, mode)
    flags.apply(config.compute.threads, mode)
    now = {**flags.fingerprint(), **plugin_sources(config)}
    changed = next((found for each in ledger.headers if (found := flags.differences(each.fingerprint, now))), {})
    if changed and not request.any_environment:
        listed = evidence.differences(changed, "the ledger", "this environment")
        return (
            f"equal bits are promised within one environment only: {listed}. Audit where the run was trained, or "
            f"set any_environment=true to try"
        )
    return ""


class _Replays:
    """Replays of a run into folders of their own."""

    def __init__(
        self, config: Config, request: AuditRequest, scratch: Path, progress: Progress, run_tasks: RunTasks
    ) -> None:
        self._config, self._request, self._scratch, self._progress = config, request, scratch, progress
        self._run_tasks = run_tasks

    def state(self, path: Path, step: int) -> RunLedger:
        """A ledger with the state of a checkpoint."""
        folder = self._scratch / f"state-{path.stem}"
        self._run_tasks([Task(in_folder(self._config, folder, any_environment=True), str(path), step, step)], nproc=1)
        return read_run(folder)

    def spans(self, spans: Sequence[Span], ledger: RunLedger) -> list[Line]:
        """The ledger of each replayed span against that of the run."""
        total, before, lines = sum(span.last - span.first for span in spans), 0, []
        for number, span in enumerate(spans):
            self._progress(f"replaying {span}", before, total)
            folder = self._scratch / f"span{number}"
            copy = in_folder(self._config, folder, any_environment=self._request.any_environment)
            task = Task(copy, str(span.start or ""), span.first, span.last)

            def report(_: int, done: int, *, base: int = before - span.first, span: Span = span) -> None:
                self._progress(f"replaying {span}", base + done, total)

            try:
                self._run_tasks([task], nproc=self._request.nproc, report=report)
                lines.append(_judge(span, ledger, read_run(folder)))
            except CollectiveError:  # the replaying processes failed, which says nothing about the run
                raise
            except SegpipeError as error:
                lines.append(Line("replay", FAILED, f"{span}: {error}"))
            before += span.last - span.first
        return lines


def _judge(span: Span, ledger: RunLedger, again: RunLedger) -> Line:
    found = compare(ledger, again)
    if not found.no_difference:
        return Line("replay", FAILED, f"{span}: {found.sentence} (A: the ledger, B: the replay)")
    rows = 0
    for kind in (SHARD, STEP):
        wanted = row_keys(again.rows[kind])
        missing = int(np.isin(wanted, row_keys(ledger.rows[kind]), invert=True).sum())
        if missing:
            return Line("replay", FAILED, f"{span}: the ledger lacks {missing} of its {len(wanted)} rows")
        rows += len(wanted)
    return Line("replay", PASSED, f"{span}: {rows} rows are bitwise equal")


def _file_hashes(run: Path) -> dict[str, str]:
    """SHA-256 of all files that an audit checks, by name."""
    paths = [path for pattern in EVIDENCE for path in run.glob(pattern) if path.is_file()]
    return {path.relative_to(run).as_posix(): sha256(path) for path in paths}
