"""Updates of a run, trained again from a checkpoint into a folder of their own: the same step, the same ledger."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from segpipe.audit.evidence import read_config
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed import group as processes
from segpipe.distributed.agreement import common_fingerprint
from segpipe.distributed.group import Group
from segpipe.errors import ConfigError
from segpipe.ledger.digest import tensor_digests
from segpipe.ledger.divergence import RESULT, Comparison, compare
from segpipe.ledger.reader import read_run
from segpipe.losses.total import backend
from segpipe.settings.config import Config, from_mapping, to_mapping
from segpipe.train import checkpoint, state
from segpipe.train.batches import counted, loss_weights, shard_stream
from segpipe.train.recorder import Recorder
from segpipe.train.start import read_start
from segpipe.train.step import TrainStep, train_step
from segpipe.train.teacher import teacher_of

STATE = "state.json"  # in the folder of a replay: digests of all tensors at its end
PARTS = ("model", "ema", "optimizer")  # of a checkpoint, whose tensors are compared

Report = Callable[[int], None]  # updates done


def in_folder(
    config: Config, folder: Path, *, mode: str = "", any_environment: bool = False
) -> Config:
    """Configuration for a replay of a run into `folder`; settings that affect numbers are unchanged."""
    values = to_mapping(config)
    values["run"] |= {
        "root": str(folder.parent),
        "name": folder.name,
        "exists": "resume",
        "allow_fingerprint_change": any_environment,
    }
    values["compute"] |= {
        "ledger": True,
        "nproc": "auto",
        "mode": mode or config.compute.mode,
    }
    return from_mapping(values)


def replay(
    config: Config, start: Path | None, first: int, last: int, report: Report
) -> None:
    """Write the ledger of updates `first` to `last - 1`, and digests of the state after them.

    One process trains all shards, from a checkpoint or the seed. Nothing is validated, exported or saved.
    `report(done)` is called after each update. Raises CheckpointError when the checkpoint is truncated, altered, or of
    another recipe or environment, and DataError when a sample cannot be read.
    """
    compute = config.compute
    flags.set_environment(compute.threads, compute.mode)
    flags.apply(compute.threads, compute.mode)
    group = Group(0, 0, 1, processes.choose_device(compute.device, 0))
    samples = open_samples(config.data, "train", config.seed, packed=False)
    weights = None if start else read_start(config, checkpoint.load)
    current = state.build_state(config, samples.classes, group.device, weights)
    current.teacher = teacher_of(config, group.device)
    loss_backend = backend(config.loss, group.device.type)
    fingerprint, _ = common_fingerprint(config, group, loss_backend)
    if start:
        checkpoint.restore(start, current, config, samples.classes, fingerprint)
    assert current.step == first, (current.step, first)
    counts = counted(config, group, samples)
    updates, shards = range(first, last), range(compute.shards)
    recorder = Recorder(config, group, current, samples, fingerprint)
    stream = shard_stream(config, group, samples, updates, counts)
    with contextlib.closing(recorder), contextlib.closing(stream):
        step = TrainStep(config, recorder, loss_weights(config, samples, counts))
        for _ in updates:
            train_step(step, [next(stream) for _ in shards])
            report(current.step)
    content = {
        "model": current.model.state_dict(),
        "ema": current.ema.model.state_dict(),
        "optimizer": current.optimizer.state_dict(),
    }
    (config.run_dir / STATE).write_text(json.dumps(tensor_digests(content)))


def first_difference(path: Path, folder: Path) -> str:
    """Name of the first tensor of a checkpoint that differs from the end of the replay in `folder`; empty if none does.

    Raises CheckpointError when the file cannot be read.
    """
    saved = checkpoint.load(path)
    found = tensor_digests({part: saved[part] for part in PARTS})
    wanted = dict(json.loads((folder / STATE).read_bytes()))
    names = [
        name for name in {**wanted, **found} if found.get(name) != wanted.get(name)
    ]
    return names[0] if names else ""


def compare_again(a: Path, b: Path, progress: Callable[[int, int], None]) -> Comparison:
    """Where run `b` first differs from run `a`, by their ledgers and by a replay of both with a digest of every tensor.

    `progress` gets updates done, and updates in all. Raises CheckpointError, ConfigError or DataError when the files of
    a run, or its data, cannot be read.
    """
    runs = read_run(a), read_run(b)
    found = compare(*runs)
    if found.step is None or found.step < 0 or found.stage in (None, RESULT):
        return found
    first, starts = last_common(a, b, found.step)
    updates = found.step + 1 - first
    again = []
    odd = ""
    with tempfile.TemporaryDirectory(prefix="segpipe-replay-") as scratch:
        for number, (run, start) in enumerate(zip(runs, starts, strict=True)):
            config = read_config(run.folder)
            if config.compute.mode not in ("elastic", "audit"):
                text = f"compute.mode = {config.compute.mode} of {run.folder} cannot be replayed"
                raise ConfigError(f"{text}. Compare runs of compute.mode=elastic.")
            folder = Path(scratch, "ab"[number])
            copy = in_folder(config, folder, mode="audit", any_environment=True)

            def report(done: int, *, base: int = number * updates - first) -> None:
                progress(base + done, 2 * updates)

            replay(copy, start, first, found.step + 1, report)
            again.append(read_run(folder))
            if not compare(run, again[-1]).no_difference:
                odd += "AB"[number]
    if odd:
        words = f"{' and '.join(odd)} did not come out again: not its settings, nor the data and code here"
        found = replace(found, odd=odd if len(odd) == 1 else None)
    else:
        closer = compare(*again)
        words = f"both came out again, which gives: {closer.sentence}"
        found = replace(found, layer=closer.layer, advice="")
    return replace(found, replay=f"replayed from step {first} to {found.step}: {words}")


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
