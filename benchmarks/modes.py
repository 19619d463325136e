"""C9: what determinism costs. Updates of PIDNet-S at 512x512 in every mode, on one batch, interleaved."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure as measuring
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.data.samples import open_samples
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.settings.config import Config
from segpipe.train.recorder import Recorder, Watch
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep, train_step

MODES = (
    "off",
    "ddp",
    "elastic",
    "elastic+ledger",
    "audit",
)  # elastic alone has compute.ledger=false
NO_TF32 = "off, no TF32"  # measured on GPUs: elastic forbids TF32, which is a matter of precision and not of order
LIMIT = 1.03  # elastic over off
NETWORK, SIZE, BATCH, THREADS = "pidnet_s", 512, 2, 2
MEASURED = MODES  # arms whose peak memory is measured, each in a process of its own
SMOKE = {
    "NETWORK": "fast_scnn", "SIZE": 64, "THREADS": 1, "MODES": ("off", "elastic", "elastic+ledger"),
    "MEASURED": ("elastic",),
}  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Step time of every mode at one shard per process, ratios to `off`, peak memory, and where elastic's time goes."""
    rounds, cuda = given.repeats or 60, torch.cuda.is_available()
    arms = (*MODES, NO_TF32) if cuda else MODES
    flags.set_environment()  # cuBLAS reads it once: all arms have the same
    with tempfile.TemporaryDirectory() as folder:
        updates = {arm: update(arm, Path(folder)) for arm in arms}
        seconds = measuring.interleaved(
            {arm: run for arm, (run, _) in updates.items()},
            repeats=rounds,
            prepare=switch,
        )
    ratios = {arm: measuring.ratio(seconds[arm], seconds["off"]) for arm in arms[1:]}
    flags.apply(THREADS, "elastic")
    parts = where_it_goes(updates["elastic"][1])
    step_ms = measuring.summary(seconds["elastic"])["median_ms"]
    return {
        "what": f"{NETWORK}, {SIZE}x{SIZE}, batch {BATCH}, fp32, 1 process, 1 shard, {THREADS} threads",
        "machine": measuring.machine(),
        "modes": {arm: measuring.summary(seconds[arm]) for arm in arms},
        "over_off": ratios,
        **({"over_off_without_tf32": over_no_tf32(seconds)} if cuda else {}),
        "peak_memory_mib": {
            arm: peak_memory(arm) for arm in arms if arm in (*MEASURED, NO_TF32)
        },
        "elastic_parts_ms": parts,
        "elastic_parts_share": round(sum(parts.values()) / step_ms, 4),
        "limit": LIMIT,
        "passed": measuring.holds(ratios["elastic"], at_most=LIMIT),
        "passed_with_ledger": measuring.holds(ratios["elastic+ledger"], at_most=LIMIT),
    }


def over_no_tf32(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Ratios of the modes that forbid TF32 to `off` where it is forbidden too: what equal bits cost alone."""
    return {
        mode: measuring.ratio(seconds[mode], seconds[NO_TF32]) for mode in MODES[1:]
    }


def mode_of(arm: str) -> str:
    """The arm's compute.mode."""
    return "off" if arm == NO_TF32 else arm.removesuffix("+ledger")


def switch(arm: str) -> None:
    """Set torch's switches as the arm has them."""
    flags.apply(THREADS, mode_of(arm))
    if arm == NO_TF32:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def update(arm: str, folder: Path) -> tuple[Callable[[], Any], TrainStep]:
    """A function that does one whole update, and the step it uses; a ledger is written below `folder`."""
    config = Config()
    config.model.name, config.compute.mode = NETWORK, mode_of(arm)
    config.compute.shards, config.compute.samples_per_shard, config.compute.threads = (
        1,
        BATCH,
        THREADS,
    )
    config.augment.crop_size = [SIZE, SIZE]
    config.loss.name, config.optim.clip_norm = "ohem", 5.0
    switch(arm)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (BATCH, SIZE, SIZE, 3), generator=random).to(
        torch.uint8
    )
    target = torch.randint(
        0, STREET.num_classes, (BATCH, SIZE, SIZE), generator=random
    ).to(torch.uint8)
    ids = torch.zeros(BATCH, dtype=torch.int64)
    config.run.root, group, state = (
        str(folder / arm),
        Group(0, 1, device),
        build_state(config, STREET, device),
    )
    samples = open_samples(config.data, "train", 0)
    writes = arm in ("elastic+ledger", "audit")
    watch = (
        Recorder(config, group, state, samples, flags.fingerprint())
        if writes
        else Watch(group, state)
    )
    step = TrainStep(config, watch)

    def run() -> None:
        train_step(
            step, [ShardBatch(step.state.step, 0, image, target, ids, ids)], wait=False
        )
        _wait(device)

    return run, step


def where_it_goes(step: TrainStep) -> dict[str, float]:
    """Milliseconds of what elastic does and off does not, each alone: medians of 20."""
    from segpipe.distributed.reduce import FlatLayout

    tensors = [*step.loss.norms.statistics, *step.parameters]
    layout = FlatLayout(tensors)
    flat, values = layout.new(), [value.detach().clone() for value in tensors]
    views, statistics = layout.views(flat), step.loss.norms.statistics
    actions: dict[str, Callable[[], Any]] = {
        "new vector": layout.new,
        "gradients into the vector": lambda: torch._foreach_copy_(views, values),
        "statistics kept and put back": lambda: [value.clone() for value in statistics],
        "mean of statistics": lambda: torch._foreach_mul(views[: len(statistics)], 1.0),
    }
    return {
        name: _median_ms(action, step.group.device) for name, action in actions.items()
    }


def _median_ms(action: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(21):
        _wait(device)
        before = time.perf_counter()
        action()
        _wait(device)
        seconds.append(time.perf_counter() - before)
    return float(measuring.summary(seconds[1:])["median_ms"])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(arm: str) -> int:
    """Peak memory in MiB of a fresh process that does three updates: of the GPU where there is one, else resident."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r}); "
        f"from benchmarks import modes; modes.SIZE = {SIZE}; "
        f"print(modes.three_updates({arm!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1])


def three_updates(arm: str) -> int:
    """Peak memory in MiB of this process after three updates."""
    with tempfile.TemporaryDirectory() as folder:
        run, _ = update(arm, Path(folder))
        for _ in range(3):
            run()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() >> 20
    return measuring.peak_resident_mib()
