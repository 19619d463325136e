"""C9: what determinism costs. Updates of PIDNet-S at 512x512 in every mode, on one batch, interleaved."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure as measuring
from segpipe.config import Config
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.losses import valid_pixels
from segpipe.recorder import Recorder
from segpipe.state import build_state
from segpipe.step import TrainStep

MODES = ("off", "run", "elastic", "elastic+ledger", "audit")  # elastic alone has compute.ledger=false
LIMIT = 1.03  # elastic over off
SIZE, BATCH, THREADS = 512, 2, 2


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Step time of every mode at one shard per process, ratios to `off`, peak memory, and where elastic's time goes."""
    rounds = given.repeats or 60
    with tempfile.TemporaryDirectory() as folder:
        updates = {mode: update(mode, Path(folder)) for mode in MODES}
        seconds = measuring.interleaved(
            {mode: run for mode, (run, _) in updates.items()},
            repeats=rounds,
            prepare=lambda mode: flags.apply(THREADS, mode.removesuffix("+ledger")),
        )
    ratios = {mode: measuring.ratio(seconds[mode], seconds["off"]) for mode in MODES[1:]}
    flags.apply(THREADS, "elastic")
    parts = where_it_goes(updates["elastic"][1])
    step_ms = measuring.summary(seconds["elastic"])["median_ms"]
    return {
        "what": f"pidnet_s, {SIZE}x{SIZE}, batch {BATCH}, fp32, 1 process, 1 shard, {THREADS} threads",
        "machine": measuring.machine(),
        "modes": {mode: measuring.summary(seconds[mode]) for mode in MODES},
        "over_off": ratios,
        "peak_memory_mib": {mode: peak_memory(mode) for mode in MODES},
        "elastic_parts_ms": parts,
        "elastic_parts_share": round(sum(parts.values()) / step_ms, 4),
        "limit": LIMIT,
        "passed": ratios["elastic"]["high"] <= LIMIT,
        "passed_with_ledger": ratios["elastic+ledger"]["high"] <= LIMIT,
    }


def update(mode: str, folder: Path) -> tuple[Callable[[], Any], TrainStep]:
    """A function that does one whole update, and the step it uses; a ledger is written below `folder`."""
    config = Config()
    config.model.name, config.compute.mode = "pidnet_s", mode.removesuffix("+ledger")
    config.compute.shards, config.compute.samples_per_shard, config.compute.threads = 1, BATCH, THREADS
    config.augment.crop_size = [SIZE, SIZE]
    config.loss.name, config.optim.clip_norm = "ohem", 5.0
    flags.apply(THREADS, config.compute.mode)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (BATCH, SIZE, SIZE, 3), generator=random).to(torch.uint8)
    target = torch.randint(0, STREET.num_classes, (BATCH, SIZE, SIZE), generator=random).to(torch.uint8)
    ids = torch.zeros(BATCH, dtype=torch.int64)
    config.run.root, group, state = str(folder / mode), Group(0, 0, 1, device), build_state(config, STREET, device)
    samples = open_samples(config.data, "train", 0)
    writes = mode in ("elastic+ledger", "audit")
    recorder = Recorder(config, group, state, samples, flags.fingerprint()) if writes else None
    step = TrainStep(state, config, group, None, recorder)
    valid = torch.tensor(valid_pixels(target), device=device)

    def run() -> None:
        step([ShardBatch(step.state.step, 0, image, target, ids, ids)], valid)
        step.apply()
        if recorder is not None and step.state.step % recorder.steps_held == 0:
            recorder.flush()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run, step


def where_it_goes(step: TrainStep) -> dict[str, float]:
    """Milliseconds of what elastic does and off does not, each alone: medians of 20."""
    from segpipe.distributed.reduce import FlatLayout

    tensors = [*step.statistics, *step.parameters]
    layout = FlatLayout(tensors, pad_to=1)
    flat, values = layout.new(), [value.detach().clone() for value in tensors]
    views = layout.views(flat)
    return {
        "new vector": _median_ms(layout.new),
        "gradients into the vector": _median_ms(lambda: torch._foreach_copy_(views, values)),
        "statistics kept and put back": _median_ms(lambda: [value.clone() for value in step.statistics]),
        "mean of statistics": _median_ms(lambda: torch._foreach_mul(views[: len(step.statistics)], 1.0)),
    }


def _median_ms(action: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(21):
        before = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - before)
    return float(measuring.summary(seconds[1:])["median_ms"])


def peak_memory(mode: str) -> int:
    """Peak memory in MiB of a fresh process that does three updates: of the GPU where there is one, else resident."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r}); "
        f"from benchmarks import modes; print(modes.three_updates({mode!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def three_updates(mode: str) -> int:
    """Peak memory in MiB of this process after three updates."""
    with tempfile.TemporaryDirectory() as folder:
        run, _ = update(mode, Path(folder))
        for _ in range(3):
            run()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
