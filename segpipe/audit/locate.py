"""Where in the network two runs part: both are trained again up to that step, with hooks on every module."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from segpipe.audit.evidence import check_config
from segpipe.audit.task import Task, in_folder
from segpipe.audit.trace import first_culprit, read_traces
from segpipe.audit.worker import run_tasks
from segpipe.errors import CheckpointError, ConfigError
from segpipe.ledger.divergence import Comparison, compare
from segpipe.ledger.reader import RunLedger, read_run
from segpipe.settings.config import Config, check
from segpipe.train import checkpoint

Progress = Callable[[int, int], None]  # updates done, updates in all
TRACED = ("forward", "backward")  # stages that happen inside modules


class Common(NamedTuple):
    """A state that both runs held, and the files that have it; without files, the state before step 0."""

    step: int
    files: tuple[Path | None, Path | None]


def last_common(a: Path, b: Path, step: int) -> Common:
    """The last checkpoint of both runs, before update `step` is done, whose weights and averages are equal.

    Raises CheckpointError for a checkpoint that is torn or altered.
    """
    found = [_digests(folder, step) if step else {} for folder in (a, b)]  # reading a file takes a while
    for done in sorted(found[0].keys() & found[1].keys(), reverse=True):
        for path, digests in found[0][done]:
            for other, others in found[1][done]:
                if digests == others:
                    return Common(done, (path, other))
    return Common(0, (None, None))


def _digests(folder: Path, step: int) -> dict[int, list[tuple[Path, tuple[str, str]]]]:
    """Checkpoints that hold at most `step` updates: file, and digests of weights and average."""
    found: dict[int, list[tuple[Path, tuple[str, str]]]] = {}
    for path in sorted(folder.glob("*.pt")):
        saved = checkpoint.load(path)
        if saved["step"] <= step:
            digests = saved["digests"]["model"], saved["digests"]["ema"]
            found.setdefault(int(saved["step"]), []).append((path, digests))
    return found


def compare_again(a: Path, b: Path, *, nproc: int, progress: Progress) -> Comparison:
    """Where run `b` first differs from run `a`, by their ledgers and by training both again up to there.

    Raises CheckpointError, ConfigError or DataError when the files of a run, or its data, cannot be read.
    """
    if nproc < 1:
        raise ConfigError(f"--nproc = {nproc}, but 1 or more was needed.")
    runs = read_run(a), read_run(b)
    with tempfile.TemporaryDirectory(prefix="segpipe-replay-") as scratch:
        return locate(compare(*runs), *runs, Path(scratch), nproc=nproc, progress=progress)


def locate(
    found: Comparison, a: RunLedger, b: RunLedger, scratch: Path, *, nproc: int, progress: Progress
) -> Comparison:
    """The comparison with what training again added: the layer, or which of the runs does not come out again."""
    if found.verdict != "diverged" or found.step is None:
        return found
    if found.step < 0:
        return replace(found, replay="not replayed: the runs differ before their first update")
    common = last_common(a.folder, b.folder, found.step)
    again = _train_both(found.step, common, (a, b), scratch, nproc, progress)
    start = f"step {common.step}" if common.step else "the seed"
    how = f"trained again from {start} up to step {found.step}, each with its own settings, by {nproc} process"
    return _conclude(found, (a, b), again, f"{how}{'es' * (nproc > 1)}: ")


def _train_both(
    step: int, common: Common, runs: Sequence[RunLedger], scratch: Path, nproc: int, progress: Progress
) -> list[RunLedger]:
    updates = step + 1 - common.step
    configs = [_config(run.folder, nproc) for run in runs]
    for number, (name, config, file) in enumerate(zip("ab", configs, common.files, strict=True)):
        copy = in_folder(config, scratch / name, mode="audit", any_environment=True)
        task = Task(copy, str(file or ""), common.step, step + 1, traced=step)

        def report(_: int, done: int, *, base: int = number * updates - common.step) -> None:
            progress(base + done, 2 * updates)

        run_tasks([task], nproc=nproc, report=report)
    return [read_run(scratch / name) for name in "ab"]


def _config(run: Path, nproc: int) -> Config:
    config, faults = check_config(run)
    if config is None:
        raise CheckpointError(faults[0].text)
    if config.compute.mode not in ("elastic", "audit"):
        raise CheckpointError(
            f"{run} was trained with compute.mode={config.compute.mode}, which gives the same bits for one number of "
            f"processes at most. Compare runs of compute.mode=elastic."
        )
    check(config, world_size=nproc)
    return config


def _conclude(found: Comparison, runs: Sequence[RunLedger], again: Sequence[RunLedger], how: str) -> Comparison:
    """From which recorded run each replay agrees with."""
    agrees = ["".join(name for name, run in zip("AB", runs, strict=True) if _equal(run, each)) for each in again]
    if agrees == ["A", "B"]:
        return _name_layer(found, again, how)
    if agrees in (["A", "A"], ["B", "B"]):
        kept = agrees[0]
        odd = "AB".replace(kept, "")
        words = (
            f"both came out as {kept} has it. {odd} is the odd one: what made it differ is not in its settings, nor in "
            f"data and code as they are here. That leaves a fault of the hardware, a race, or another environment then"
        )
        return replace(found, replay=how + words, odd=odd)
    said = [f"{name} came out {_outcome(name, which)}" for name, which in zip("AB", agrees, strict=True)]
    words = (
        f"{'; '.join(said)}. So the divergence is not explained by what is here: data, code or environment are others"
    )
    return replace(found, replay=how + words)


def _outcome(name: str, agrees: str) -> str:
    if not agrees:
        return "as neither of them"
    return "as it was recorded" if agrees == name else f"as {agrees}"


def _equal(run: RunLedger, again: RunLedger) -> bool:
    return compare(run, again).verdict == "identical"


def _name_layer(found: Comparison, again: Sequence[RunLedger], how: str) -> Comparison:
    """Both replays are their runs, so their traces tell where these part."""
    one, two = again
    culprit = first_culprit(read_traces(one.folder), read_traces(two.folder))
    if culprit is not None and found.stage in TRACED:
        words = f"{culprit.words} ({culprit.step_of} of shard {culprit.shard})"
        return replace(found, layer=culprit.layer, advice="", replay=f"{how}both came out as recorded. {words}")
    closer = compare(one, two)  # with a digest of every tensor, which the runs may not have written
    words = f"no module of the network made the difference: {closer.sentence}"
    return replace(found, layer=closer.layer, advice="", replay=f"{how}both came out as recorded; {words}")
