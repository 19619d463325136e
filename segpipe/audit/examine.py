"""An audit: all evidence of a run compared, and spans of it trained again."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from segpipe.audit import evidence, files
from segpipe.audit.report import FAILED, PASSED, UNCHECKED, Audit, Line
from segpipe.audit.spans import Span, choose_spans
from segpipe.audit.task import Task, in_folder
from segpipe.audit.worker import run_tasks
from segpipe.determinism import flags
from segpipe.errors import CheckpointError, CollectiveError, SegpipeError
from segpipe.files import sha256
from segpipe.ledger.divergence import compare
from segpipe.ledger.files import FOLDER, INPUTS
from segpipe.ledger.inputs import combined
from segpipe.ledger.reader import RunLedger, mapping_differences, read_run
from segpipe.ledger.rows import SHARD, STEP, row_keys
from segpipe.runtime.artifact import SUMS
from segpipe.settings.arguments import with_settings
from segpipe.settings.config import Config, check
from segpipe.train.checkpoint import HASHES

Progress = Callable[[str, int, int], None]  # what is done now, updates done, updates in all
EVIDENCE = ("config.json", INPUTS, "result.json", HASHES, "*.pt", f"{FOLDER}/*", f"export/{SUMS}")


@dataclass(frozen=True)
class Request:
    """What the auditor asks for."""

    run: Path
    seed: int  # of the choice of the spans
    spans: int = 3
    span_steps: int = 100  # most updates of a span; 0: up to the next checkpoint
    nproc: int = 1  # processes that train the spans
    any_environment: bool = False  # train them although versions or hardware are others
    settings: dict[str, str] = field(default_factory=dict)  # by dotted name: those that reach no number


def examine(request: Request, progress: Progress) -> Audit:
    """All lines of the report.

    Raises CheckpointError when there is no run at all, ConfigError for wishes that cannot be met, and CollectiveError
    when the processes that should train the spans could not work together.
    """
    run, started = request.run, time.monotonic()
    if not (run / "config.json").exists() and not (run / FOLDER).is_dir():
        raise CheckpointError(f"{run} holds no run: neither config.json nor {FOLDER}. Set run=runs/NAME.")
    progress("reading the evidence", 0, 0)
    original, lines = evidence.check_config(run)
    ledger, ledger_lines = evidence.check_ledger(run)
    config = with_settings(original, request.settings) if original else None
    if original and ledger:
        lines += evidence.compare_config(run, original, ledger)
    if config:
        lines = [*evidence.check_inputs(run, config, ledger), *lines]
    obstacle = _obstacle(config, ledger, request)
    with tempfile.TemporaryDirectory(prefix="segpipe-audit-") as scratch:
        sound = config if config and ledger and _data_is_here(config) and not _broken(lines) else None
        kept, kept_lines = files.check_checkpoints(run, sound, ledger, Path(scratch))
        lines += ledger_lines + kept_lines
        spans: list[Span] = []
        if sound and ledger and not obstacle:
            starts: dict[int, Path | None] = {0: None, **{each.step: each.path for each in kept if each.step > 0}}
            spans = choose_spans(
                starts, evidence.updates(ledger), count=request.spans, longest=request.span_steps, seed=request.seed
            )
            lines += _replay_all(spans, sound, ledger, request, Path(scratch), progress)
    if not spans:
        obstacle = obstacle or "the configuration and the ledger do not fit each other, so nothing can be trained again"
        lines.append(Line("replay", UNCHECKED, obstacle))
    lines += files.check_result(run, kept, ledger) + files.check_export(run, original, kept)
    return Audit(
        run=str(run),
        lines=tuple(lines),
        obstacle=obstacle if not spans else "",
        seed=request.seed,
        replayed=sum(span.last - span.first for span in spans),
        updates=evidence.updates(ledger) if ledger else 0,
        processes=request.nproc,
        evidence=combined(_evidence(run)),
        seconds=round(time.monotonic() - started, 1),
    )


def _broken(lines: list[Line]) -> bool:
    """Whether the configuration is not that of the ledger.

    With data or sources that differ spans are trained again all the same: it tells where they mattered.
    """
    return any(line.part == "config" and line.status == FAILED for line in lines)


def _data_is_here(config: Config) -> bool:
    return config.data.name == "synthetic" or Path(config.data.root).is_dir()


def _obstacle(config: Config | None, ledger: RunLedger | None, request: Request) -> str:
    """Why nothing can be trained again; empty when it can."""
    if config is None or ledger is None:
        return "without config.json and a ledger there is nothing to train again and compare with"
    if not _data_is_here(config):
        return f"data.root = {config.data.root} does not exist here. Set data.root=FOLDER"
    mode = config.compute.mode
    if mode not in ("elastic", "audit"):
        return f"compute.mode = {mode} does not promise the same bits for any number of processes; elastic does"
    if not evidence.updates(ledger):
        return "the ledger holds no update"
    check(config, world_size=request.nproc)
    flags.set_environment(config.compute.threads * request.nproc, mode)
    flags.apply(config.compute.threads, mode)
    before = [header.fingerprint for header in ledger.headers]
    changed = next((found for each in before if (found := mapping_differences(each, flags.fingerprint()))), {})
    if changed and not request.any_environment:
        listed = evidence.differences(changed, "the ledger", "this environment")
        return (
            f"the same bits are promised within one environment only: {listed}. Audit where the run was trained, or "
            f"set any_environment=true to try"
        )
    return ""


def _replay_all(
    spans: list[Span], config: Config, ledger: RunLedger, request: Request, scratch: Path, progress: Progress
) -> list[Line]:
    in_all, before, lines = sum(span.last - span.first for span in spans), 0, []
    for number, span in enumerate(spans):
        progress(f"training again: {span}", before, in_all)
        folder = scratch / f"span{number}"
        copy = in_folder(config, folder, any_environment=request.any_environment)
        task = Task(copy, str(span.start or ""), span.first, span.last)

        def report(_: int, done: int, *, base: int = before - span.first, span: Span = span) -> None:
            progress(f"training again: {span}", base + done, in_all)

        try:
            run_tasks([task], nproc=request.nproc, report=report)
            lines.append(_judge(span, ledger, read_run(folder)))
        except CollectiveError:  # the processes that should train it could not, which says nothing about the run
            raise
        except SegpipeError as error:
            lines.append(Line("replay", FAILED, f"{span}: {error}"))
        before += span.last - span.first
    return lines


def _judge(span: Span, ledger: RunLedger, again: RunLedger) -> Line:
    """The ledger of a span trained again against that of the run."""
    found = compare(ledger, again)
    if found.verdict != "identical":
        return Line("replay", FAILED, f"{span}: {found.sentence} (A: the ledger, B: trained again)")
    rows = 0
    for kind in (SHARD, STEP):
        wanted = row_keys(again.rows[kind])
        missing = wanted[~np.isin(wanted, row_keys(ledger.rows[kind]))]
        if len(missing):
            return Line("replay", FAILED, f"{span}: the ledger lacks {len(missing)} of its {len(wanted)} rows")
        rows += len(wanted)
    return Line("replay", PASSED, f"{span}: {rows} rows came out the same, bit by bit")


def _evidence(run: Path) -> dict[str, str]:
    """SHA-256 of all files that an audit looks at, by name."""
    paths = [path for pattern in EVIDENCE for path in run.glob(pattern) if path.is_file()]
    return {path.relative_to(run).as_posix(): sha256(path) for path in paths}
