"""Where in the network two runs diverge: both are replayed up to that step with a digest of every tensor."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from segpipe.audit.evidence import read_config
from segpipe.audit.replay import Task, in_folder, run_task
from segpipe.errors import ConfigError
from segpipe.ledger.divergence import RESULT, Comparison, compare
from segpipe.ledger.reader import read_run
from segpipe.settings.check import check
from segpipe.train import checkpoint

Progress = Callable[[int, int], None]  # updates done, updates in all


def compare_again(a: Path, b: Path, *, nproc: int, progress: Progress) -> Comparison:
    """Where run `b` first differs from run `a`, by their ledgers and by a replay of both.

    Raises CheckpointError, ConfigError or DataError when the files of a run, or its data, cannot be read.
    """
    runs = read_run(a), read_run(b)
    found = compare(*runs)
    if found.step is None or found.step < 0 or found.stage in (None, RESULT):
        return found
    start, files = last_common(a, b, found.step)
    updates = found.step + 1 - start
    again = []
    odd = ""
    with tempfile.TemporaryDirectory(prefix="segpipe-replay-") as scratch:
        for number, (run, file) in enumerate(zip(runs, files, strict=True)):
            config = read_config(run.folder)
            if config.compute.mode not in ("elastic", "audit"):
                text = f"compute.mode = {config.compute.mode} of {run.folder} cannot be replayed"
                raise ConfigError(f"{text}. Compare runs of compute.mode=elastic.")
            check(config, world_size=nproc)
            copy = in_folder(
                config, Path(scratch, "ab"[number]), mode="audit", any_environment=True
            )
            task = Task(copy, str(file or ""), start, found.step + 1)

            def report(done: int, *, base: int = number * updates - start) -> None:
                progress(base + done, 2 * updates)

            run_task(task, nproc=nproc, report=report)
            again.append(read_run(copy.run_dir))
            if not compare(run, again[-1]).no_difference:
                odd += "AB"[number]
    if odd:
        words = f"{' and '.join(odd)} did not come out again: not its settings, nor the data and code here"
        found = replace(found, odd=odd if len(odd) == 1 else None)
    else:
        closer = compare(*again)
        words = f"both came out again, which gives: {closer.sentence}"
        found = replace(found, layer=closer.layer, advice="")
    return replace(found, replay=f"replayed from step {start} to {found.step}: {words}")


def last_common(
    a: Path, b: Path, step: int
) -> tuple[int, tuple[Path | None, Path | None]]:
    """Updates and files of the last step_*.pt before update `step` with equal weights; without one, 0 for the seed.

    Raises CheckpointError for a checkpoint that is torn or altered.
    """
    for path in sorted(a.glob("step_*.pt"), reverse=True):
        other = b / path.name
        done = int(path.stem.removeprefix("step_"))
        if done <= step and other.is_file():
            one, two = (checkpoint.load(each)["digests"] for each in (path, other))
            if (one["model"], one["ema"]) == (two["model"], two["ema"]):
                return done, (path, other)
    return 0, (None, None)
