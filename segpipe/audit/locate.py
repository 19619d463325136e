"""Where in the network two runs diverge: both are replayed up to that step, with hooks on every module."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from segpipe.audit.evidence import read_config
from segpipe.audit.task import RunTask, Task, in_folder
from segpipe.audit.trace import first_culprit, read_traces
from segpipe.errors import CheckpointError, ConfigError
from segpipe.ledger.divergence import RESULT, Comparison, compare
from segpipe.ledger.reader import RunLedger, read_run
from segpipe.settings.check import check
from segpipe.settings.config import Config
from segpipe.train import checkpoint

Progress = Callable[[int, int], None]  # updates done, updates in all
TRACED = ("forward", "backward")  # stages that happen inside modules


class CommonState(NamedTuple):
    """A state that both runs had, and its checkpoint in each; None for the state before step 0."""

    step: int
    files: tuple[Path | None, Path | None]


def last_common(a: Path, b: Path, step: int) -> CommonState:
    """The last checkpoint of both runs before update `step` with equal weights and averages.

    Raises CheckpointError for a checkpoint that is torn or altered.
    """
    found = [
        _digests(folder, step) if step else {} for folder in (a, b)
    ]  # skips slow reads that cannot help
    for done in sorted(found[0].keys() & found[1].keys(), reverse=True):
        for path, digests in found[0][done]:
            for other, others in found[1][done]:
                if digests == others:
                    return CommonState(done, (path, other))
    return CommonState(0, (None, None))


def _digests(folder: Path, step: int) -> dict[int, list[tuple[Path, tuple[str, str]]]]:
    """Checkpoints of at most `step` updates, by updates: file, and digests of weights and averages."""
    found: dict[int, list[tuple[Path, tuple[str, str]]]] = {}
    for path in sorted(folder.glob("*.pt")):
        saved = checkpoint.load(path)
        if saved["step"] <= step:
            digests = saved["digests"]["model"], saved["digests"]["ema"]
            found.setdefault(int(saved["step"]), []).append((path, digests))
    return found


def compare_again(
    a: Path, b: Path, *, nproc: int, progress: Progress, run_task: RunTask
) -> Comparison:
    """Where run `b` first differs from run `a`, by their ledgers and by a replay of both with `run_task`.

    Raises CheckpointError, ConfigError or DataError when the files of a run, or its data, cannot be read.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc = {nproc}, but at least 1 was needed.")
    runs = read_run(a), read_run(b)
    found = compare(*runs)
    if found.verdict != "diverged" or found.step is None:
        return found
    if found.stage == RESULT:
        return replace(
            found,
            replay="not replayed: every update is equal; see what validation read",
        )
    if found.step < 0:
        return replace(
            found, replay="not replayed: the runs differ before their first update"
        )
    common = last_common(a, b, found.step)
    start = f"step {common.step}" if common.step else "the seed"
    how = f"replayed from {start} to step {found.step}, each with its own settings, by {nproc} process"
    with tempfile.TemporaryDirectory(prefix="segpipe-replay-") as scratch:
        again = _replay_both(
            found.step, common, runs, Path(scratch), nproc, progress, run_task
        )
        return _conclude(found, runs, again, f"{how}{'es' * (nproc > 1)}: ")


def _replay_both(
    step: int,
    common: CommonState,
    runs: Sequence[RunLedger],
    scratch: Path,
    nproc: int,
    progress: Progress,
    run_task: RunTask,
) -> list[RunLedger]:
    updates = step + 1 - common.step
    configs = [_config(run.folder, nproc) for run in runs]
    for number, (name, config, file) in enumerate(
        zip("ab", configs, common.files, strict=True)
    ):
        copy = in_folder(config, scratch / name, mode="audit", any_environment=True)
        task = Task(copy, str(file or ""), common.step, step + 1, traced=step)

        def report(done: int, *, base: int = number * updates - common.step) -> None:
            progress(base + done, 2 * updates)

        run_task(task, nproc=nproc, report=report)
    return [read_run(scratch / name) for name in "ab"]


def _config(run: Path, nproc: int) -> Config:
    config = read_config(run)
    if config.compute.mode not in ("elastic", "audit"):
        raise CheckpointError(
            f"{run} was trained with compute.mode={config.compute.mode}, which promises the same bits for one number "
            f"of processes at most. Compare runs of compute.mode=elastic."
        )
    check(config, world_size=nproc)
    return config


def _conclude(
    found: Comparison, runs: Sequence[RunLedger], again: Sequence[RunLedger], how: str
) -> Comparison:
    """The conclusion from which recorded runs each replay agrees with."""
    agrees = [
        "".join(
            name
            for name, run in zip("AB", runs, strict=True)
            if compare(run, each).no_difference
        )
        for each in again
    ]
    if agrees == ["A", "B"]:
        return _name_layer(found, again, how)
    if agrees in (["A", "A"], ["B", "B"]):
        kept = agrees[0]
        odd = "AB".replace(kept, "")
        words = (
            f"both replays equal {kept}, so {odd} is the odd one: neither its settings nor the data and code here "
            f"explain why it differs. That leaves a hardware fault, a race, or another environment at the time"
        )
        return replace(found, replay=how + words, odd=odd)
    outcomes = [
        f"the replay of {name} equals {which or 'neither'}"
        for name, which in zip("AB", agrees, strict=True)
    ]
    words = (
        f"{'; '.join(outcomes)}. So data, code or environment are not those of the runs"
    )
    return replace(found, replay=how + words)


def _name_layer(found: Comparison, again: Sequence[RunLedger], how: str) -> Comparison:
    """Both replays reproduce their runs, so their traces show where these diverge."""
    one, two = again
    culprit = first_culprit(read_traces(one.folder), read_traces(two.folder))
    if culprit is not None and found.stage in TRACED:
        words = f"{culprit.words} ({culprit.step_of} of shard {culprit.shard})"
        return replace(
            found,
            layer=culprit.layer,
            advice="",
            replay=f"{how}both are reproduced. {words}",
        )
    closer = compare(
        one, two
    )  # with a digest of every tensor, which the runs may not have written
    words = f"no module of the network is the cause: {closer.sentence}"
    return replace(
        found,
        layer=closer.layer,
        advice="",
        replay=f"{how}both are reproduced; {words}",
    )
