"""Audits a run: checks all its files against each other, and replays spans of it that are chosen at random."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from segpipe import plugins
from segpipe.audit import evidence, exact
from segpipe.audit.evidence import MALFORMED, CheckedCheckpoint, check_export
from segpipe.audit.outcomes import (
    Evaluate,
    Verify,
    check_best,
    check_gates,
    check_result,
    check_scores,
)
from segpipe.audit.task import RunTask, Task, in_folder
from segpipe.audit.verdict import FAILED, PASSED, UNCHECKED, Audit, Line
from segpipe.data.mix import absent_root
from segpipe.data.order import Order
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.distributed.watch.agreement import plugin_sources
from segpipe.errors import CheckpointError, CollectiveError, ConfigError, SegpipeError
from segpipe.files import sha256
from segpipe.keys import generator, sample_key
from segpipe.ledger.divergence import compare
from segpipe.ledger.inputs import combined
from segpipe.ledger.reader import RunLedger, read_run
from segpipe.ledger.rows import (
    FOLDER,
    INPUTS,
    SHARD,
    STEP,
    differing,
    lacking,
    row_keys,
    slots,
)
from segpipe.losses.total import backend
from segpipe.runtime.artifact import SUMS
from segpipe.settings.arguments import with_settings
from segpipe.settings.check import check
from segpipe.settings.config import Config
from segpipe.train.batches import counted, order_of
from segpipe.train.checkpoint import HASHES, load
from segpipe.train.optim import learning_rate
from segpipe.train.start import WEIGHTS, weights_summary

Progress = Callable[
    [str, int, int], None
]  # what is being done, updates done, updates in all
EVIDENCE = (
    "config.json",
    INPUTS,
    WEIGHTS,
    "result.json",
    HASHES,
    "*.pt",
    f"{FOLDER}/*",
    f"export/{SUMS}",
)


@dataclass(frozen=True)
class AuditRequest:
    """What the auditor asks for."""

    run: Path
    seed: int  # of the choice of the spans
    spans: int = 3
    span_steps: int = 100  # longest replay of a span; 0: up to the next checkpoint
    nproc: int = 1  # processes that replay
    any_environment: bool = False  # replay although versions or hardware differ
    settings: dict[str, str] = field(
        default_factory=dict
    )  # by dotted name: those that do not affect the numbers


class Span(NamedTuple):
    """Updates `first` to `last - 1`, from the checkpoint at `first`, or from the seed."""

    start: Path | None
    first: int
    last: int

    def __str__(self) -> str:
        many = (
            f"updates {self.first} to {self.last - 1}"
            if self.last - self.first > 1
            else f"update {self.first}"
        )
        return f"{many} from {self.start.name if self.start else 'the seed'}"


def choose_spans(
    starts: Mapping[int, Path | None],
    end: int,
    *,
    count: int,
    longest: int,
    seed: int,
    always: Collection[int] = (),
) -> list[Span]:
    """`count` of the spans between neighbouring starts (updates done -> checkpoint), by step; all when there are fewer.

    A span ends at the next start, or at `end`, or after `longest` updates (0: no limit). The choice is a function of
    the arguments; the auditor draws the seed, so that nobody knows it before. Spans that end after a number of updates
    in `always` are taken besides.
    """
    edges = sorted(step for step in starts if step < end)
    spans = [
        Span(
            starts[first],
            first,
            min(following, first + longest) if longest else following,
        )
        for first, following in pairwise([*edges, end])
    ]
    draws = (
        generator(sample_key(seed, 0, 0, "audit"))
        .bit_generator.random_raw(len(spans))
        .tolist()
    )
    chosen = sorted(range(len(spans)), key=lambda place: (draws[place], place))[:count]
    return [
        span
        for place, span in enumerate(spans)
        if place in chosen or span.last in always
    ]


def examine(
    request: AuditRequest,
    progress: Progress,
    run_task: RunTask,
    *,
    evaluate: Evaluate | None = None,
    verify: Verify | None = None,
) -> Audit:
    """All lines of the report; `run_task` replays. Without `evaluate` or `verify`, that part is not checked.

    Raises CheckpointError when there is no run at all, ConfigError for a request that cannot be met, and
    CollectiveError when the replaying processes failed to work together.
    """
    run, started = request.run, time.monotonic()
    if not (run / "config.json").exists() and not (run / FOLDER).is_dir():
        raise CheckpointError(
            f"{run} holds no run: neither config.json nor {FOLDER}. Set run=runs/NAME."
        )
    progress("checking the files", 0, 0)
    ledger, ledger_lines = evidence.check_ledger(run)
    original, config, lines = _settings(request, ledger)
    obstacle = _obstacle(config, ledger, request)
    replayable = config if ledger and _is_replayable(config, lines) else None
    spans: list[Span] = []
    with tempfile.TemporaryDirectory(prefix="segpipe-audit-") as scratch:
        replays = (
            _Replays(replayable, request, Path(scratch), progress, run_task)
            if replayable
            else None
        )
        checkpoints, checkpoint_lines = evidence.check_checkpoints(
            run, ledger, replays.state if replays else None
        )
        lines += ledger_lines + checkpoint_lines
        if replays and ledger:
            lines += _updates(replays, ledger, obstacle or _no_weights(lines))
            spans = (
                []
                if obstacle
                else _chosen(
                    request, ledger, checkpoints, from_seed=not _no_weights(lines)
                )
            )
            lines += replays.spans(spans, ledger, checkpoints)
    if not spans:
        obstacle = (
            obstacle
            or _no_weights(lines)
            or "config.json does not match the ledger, so nothing can be replayed"
        )
        lines.append(Line("replay", UNCHECKED, obstacle))
    progress("measuring the scores and comparing the exported files again", 0, 0)
    lines.append(
        check_result(
            run, original, checkpoints, ledger, replays.origin if replays else None
        )
    )
    lines.append(check_scores(run, evaluate, obstacle))
    lines += [
        check_best(run, original, checkpoints, evaluate, obstacle),
        check_export(run, original, checkpoints),
    ]
    if (
        evidence.holds_export(evidence.export_folder(run, original))
        and lines[-1].status != FAILED
    ):
        lines.append(
            check_gates(evidence.export_folder(run, original), verify, obstacle)
        )
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


def _settings(
    request: AuditRequest, ledger: RunLedger | None
) -> tuple[Config | None, Config | None, list[Line]]:
    """The configuration of the run, that with the auditor's settings, and what the files say of both."""
    try:
        original = evidence.read_config(request.run)
        config = with_settings(original, request.settings)
        lines = evidence.check_inputs(request.run, config, ledger)
        found = evidence.check_weights(config)
    except CheckpointError as error:
        return None, None, [Line("config", FAILED, str(error))]
    lines += [evidence.check_config(request.run, original, ledger)] if ledger else []
    return original, config, lines + found


def _updates(replays: _Replays, ledger: RunLedger, obstacle: str) -> list[Line]:
    """Checks of every update that need no training."""
    config, recorded = replays.config, ledger.sample_names
    try:
        samples = open_samples(config.data, "train", config.seed, packed=False)
        names = [samples.name(index) for index in range(len(samples))]
        if recorded and names != recorded:
            unlike = next(
                (
                    pair
                    for pair in zip(recorded, names, strict=False)
                    if pair[0] != pair[1]
                ),
                None,
            )
            text = (
                f"{unlike[0]} is now {unlike[1]}"
                if unlike
                else f"{len(recorded)} samples are now {len(names)}"
            )
            return [
                Line(
                    "updates",
                    FAILED,
                    f"the training set is not that of the run: {text}",
                )
            ]
        order = order_of(
            config,
            samples,
            counted(config, Group(0, 0, 1, torch.device("cpu")), samples),
        )
    except SegpipeError as error:
        return [
            Line("updates", FAILED, f"the training samples cannot be read: {error}")
        ]
    return [
        *check_updates(config, ledger, order, None if obstacle else replays.start())
    ]


def check_updates(
    config: Config, ledger: RunLedger, order: Order, start: RunLedger | None
) -> Iterator[Line]:
    """Findings on all updates in the ledger.

    order: the samples of each update. start: the ledger of a fresh state of this configuration; None if unknown.
    """
    steps = int((ledger.rows[STEP]["step"] >= 0).sum())
    faults = [
        *_start_faults(ledger, start),
        *_order_faults(order, ledger),
        *_rate_faults(config, ledger),
    ]
    yield from (Line("updates", FAILED, fault) for fault in faults)
    if not faults:
        text = f"all {steps} took the samples and the learning rate that seed and settings give"
        yield Line("updates", PASSED, text)
    if start is None:
        yield Line(
            "updates", UNCHECKED, "whether the run started from the weights of its seed"
        )


def _start_faults(ledger: RunLedger, start: RunLedger | None) -> list[str]:
    if start is None:
        return []
    one, two = (
        rows[rows["step"] == -1] for rows in (ledger.rows[STEP], start.rows[STEP])
    )
    if not len(one):
        return ["the ledger lacks the state before the first update"]
    if fields := lacking(one, two, STEP):
        return [
            f"the ledger lacks {', '.join(fields)} of the state before the first update"
        ]
    names = [
        name for name, unequal in differing(one, two, STEP).items() if unequal.any()
    ]
    return (
        [
            f"the run did not start from the state that its settings give: {', '.join(names)} differ"
        ]
        if names
        else []
    )


def _order_faults(order: Order, ledger: RunLedger) -> list[str]:
    rows = ledger.rows[SHARD][ledger.rows[SHARD]["step"] >= 0]
    wanted, shards = ledger.num_updates * ledger.first.shards, ledger.first.shards
    if not np.array_equal(rows["step"] * shards + rows["shard"], np.arange(wanted)):
        return [
            f"the ledger has the samples of {len(rows)} shards, but {ledger.num_updates} updates have {wanted}"
        ]
    for row in rows:
        expected = order.shard(int(row["step"]), int(row["shard"]))
        found = list(zip(row["epoch"].tolist(), row["sample"].tolist(), strict=True))
        if found != expected:
            place = next(
                number for number, pair in enumerate(found) if pair != expected[number]
            )
            return [
                f"step {row['step']}, shard {row['shard']}, place {place}: sample {found[place][1]} of epoch "
                f"{found[place][0]} instead of sample {expected[place][1]} of epoch {expected[place][0]}, which the "
                f"seed gives for {order.num_samples} training samples"
            ]
    return []


def _rate_faults(config: Config, ledger: RunLedger) -> list[str]:
    rows = ledger.rows[STEP][ledger.rows[STEP]["step"] >= 0]
    optim, steps = config.optim, config.optim.schedule_steps or config.train.steps
    expected = np.array(
        [learning_rate(int(step), steps, optim) for step in rows["step"]]
    )
    column = slots(STEP, 0)["lr"].start
    wrong = np.flatnonzero(rows["digest"][:, column] != expected.view(np.uint64))
    if not len(wrong):
        return []
    row = rows[wrong[0]]
    rate = row["digest"][column : column + 1].view(np.float64)[0]
    return [
        f"step {row['step']}: learning rate {rate!r} instead of {expected[wrong[0]]!r} ({len(wrong)} such updates)"
    ]


def _chosen(
    request: AuditRequest,
    ledger: RunLedger,
    checkpoints: Sequence[CheckedCheckpoint],
    *,
    from_seed: bool,
) -> list[Span]:
    starts: dict[int, Path | None] = {0: None} if from_seed else {}
    starts |= {each.step: each.path for each in checkpoints if each.step}
    always = {
        each.step for each in checkpoints if each.path.name in ("last.pt", "best.pt")
    }
    return choose_spans(
        starts,
        ledger.num_updates,
        count=request.spans,
        longest=request.span_steps,
        seed=request.seed,
        always=always,
    )


def check_states(
    checkpoints: Sequence[CheckedCheckpoint], ends: Mapping[int, Mapping[str, str]]
) -> Iterator[Line]:
    """Checkpoints against the states in which replayed spans ended: updates done -> hashes by tensor."""
    equal, unknown = [], []
    for each in checkpoints:
        if each.step not in ends:
            unknown.append(each.path.name)
            continue
        try:
            fault = exact.first_difference(load(each.path), ends[each.step])
        except (SegpipeError, *MALFORMED) as error:
            yield Line(
                each.path.name,
                FAILED,
                f"its tensors cannot be compared with the replay: {error}",
            )
            continue
        if fault:
            text = f"{fault} is not what the replayed updates give, though its digest fits the ledger: it was altered"
            yield Line(each.path.name, FAILED, text)
        else:
            equal.append(each.path.name)
    if equal:
        yield Line(
            "states",
            PASSED,
            f"every tensor is bitwise that of the replay: {', '.join(equal)}",
        )
    if unknown:
        text = f"only by digest, which can be forged, since no replayed span ends there: {', '.join(unknown)}"
        yield Line(
            "states",
            UNCHECKED,
            f"{text}. Set spans=N and span_steps=0 to replay up to them",
        )


def _no_weights(lines: Sequence[Line]) -> str:
    """Why step 0 cannot be replayed, for a run that started from a file of weights; empty when it can."""
    return next(
        (
            line.text
            for line in lines
            if line.part == "weights" and line.status != PASSED
        ),
        "",
    )


def _is_replayable(config: Config | None, lines: Sequence[Line]) -> bool:
    """Also when data or sources changed: a replay shows where that mattered."""
    consistent = not any(
        line.part == "config" and line.status == FAILED for line in lines
    )
    return (
        config is not None
        and not absent_root(config.data)
        and not _unusable_plugins(config)
        and consistent
    )


def _unusable_plugins(config: Config) -> str:
    """Why the code that the run names cannot be imported; empty when it can."""
    try:
        for key, path in config.import_paths:
            plugins.load(key, path)
    except ConfigError as error:
        return str(error).rstrip(".")
    return ""


def _obstacle(
    config: Config | None, ledger: RunLedger | None, request: AuditRequest
) -> str:
    """Why nothing can be replayed; empty when it can."""
    if config is None or ledger is None:
        return "without config.json and a ledger there is nothing to replay and compare with"
    if absent := absent_root(config.data):
        return f"data.root = {absent} does not exist here. Set {'data.mix' if config.data.mix else 'data.root=FOLDER'}"
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
    device_type = (
        "cuda"
        if torch.cuda.is_available() and config.compute.device != "cpu"
        else "cpu"
    )
    now = {
        **flags.fingerprint(),
        **plugin_sources(config),
        flags.LOSS: backend(config.loss, device_type),
    }
    changed = next(
        (
            found
            for each in ledger.headers
            if (found := flags.differences(each.fingerprint, now))
        ),
        {},
    )
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
        self,
        config: Config,
        request: AuditRequest,
        scratch: Path,
        progress: Progress,
        run_task: RunTask,
    ) -> None:
        self.config, self._request, self._scratch, self._progress = (
            config,
            request,
            scratch,
            progress,
        )
        self._run_task = run_task
        self.origin: dict[str, Any] | None = (
            None  # what a fresh start took from a file of weights, once it was made
        )

    def state(self, path: Path, step: int) -> RunLedger:
        """A ledger with the state of a checkpoint."""
        return self._state(self._scratch / f"state-{path.stem}", str(path), step)

    def start(self) -> RunLedger:
        """A ledger with the state of a run of these settings before its first update."""
        folder = self._scratch / "start"
        ledger = self._state(folder, "", 0)
        self.origin = weights_summary(in_folder(self.config, folder)).get("weights", {})
        return ledger

    def _state(self, folder: Path, checkpoint: str, step: int) -> RunLedger:
        self._run_task(
            Task(
                in_folder(self.config, folder, any_environment=True),
                checkpoint,
                step,
                step,
            ),
            nproc=1,
        )
        return read_run(folder)

    def spans(
        self,
        spans: Sequence[Span],
        ledger: RunLedger,
        checkpoints: Sequence[CheckedCheckpoint],
    ) -> Iterator[Line]:
        """The ledger of each replayed span against that of the run, and its last state against the checkpoints."""
        total, before, ends = sum(span.last - span.first for span in spans), 0, {}
        for number, span in enumerate(spans):
            self._progress(f"replaying {span}", before, total)
            folder = self._scratch / f"span{number}"
            copy = in_folder(
                self.config, folder, any_environment=self._request.any_environment
            )
            task = Task(copy, str(span.start or ""), span.first, span.last)

            def report(
                done: int, *, base: int = before - span.first, span: Span = span
            ) -> None:
                self._progress(f"replaying {span}", base + done, total)

            try:
                self._run_task(task, nproc=self._request.nproc, report=report)
                line = _judge(span, ledger, read_run(folder))
                if line.status == PASSED:
                    ends[span.last] = exact.read(folder)
            except (
                CollectiveError
            ):  # the replaying processes failed, which says nothing about the run
                raise
            except SegpipeError as error:
                line = Line("replay", FAILED, f"{span}: {error}")
            yield line
            before += span.last - span.first
        yield from check_states(checkpoints, ends) if spans else ()


def _judge(span: Span, ledger: RunLedger, again: RunLedger) -> Line:
    found = compare(ledger, again)
    if not found.no_difference:
        return Line(
            "replay", FAILED, f"{span}: {found.sentence} (A: the ledger, B: the replay)"
        )
    rows = 0
    for kind in (SHARD, STEP):
        wanted, own = row_keys(again.rows[kind]), row_keys(ledger.rows[kind])
        missing = int(np.isin(wanted, own, invert=True).sum())
        if missing:
            return Line(
                "replay",
                FAILED,
                f"{span}: the ledger lacks {missing} of its {len(wanted)} rows",
            )
        if fields := lacking(
            ledger.rows[kind][np.isin(own, wanted)], again.rows[kind], kind
        ):
            return Line(
                "replay",
                FAILED,
                f"{span}: in some rows the ledger lacks {', '.join(fields)}",
            )
        rows += len(wanted)
    return Line("replay", PASSED, f"{span}: {rows} rows are bitwise equal")


def _file_hashes(run: Path) -> dict[str, str]:
    """SHA-256 of all files that an audit checks, by name."""
    paths = [
        path for pattern in EVIDENCE for path in run.glob(pattern) if path.is_file()
    ]
    return {path.relative_to(run).as_posix(): sha256(path) for path in paths}
