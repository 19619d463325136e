"""What the ledger costs: its digests within real updates of PIDNet-S at 512x512, as a share of these."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import measure as measuring
from segpipe.data.catalog import STREET
from segpipe.data.loader import ShardBatch
from segpipe.determinism import flags
from segpipe.distributed.group import Group
from segpipe.losses.total import valid_pixels
from segpipe.settings.config import Config
from segpipe.train.recorder import Recorder
from segpipe.train.state import build_state
from segpipe.train.step import TrainStep

LIMITS = {0: 0.01, 1: 0.03}  # share of an update, by level of the ledger
SIZE, BATCH, THREADS = 512, 4, 2
SMOKE = {"SIZE": 64}
SHOWN = (1, 4, 16)  # shards in one process; 4 is the default configuration


class Frames:
    """A training split that is in memory: what reading files twice costs in an audit is not counted."""

    classes = STREET

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.image = random.integers(0, 256, (SIZE, SIZE, 3), np.uint8)
        self.target = random.integers(0, STREET.num_classes, (SIZE, SIZE), np.uint8)

    def __len__(self) -> int:
        return BATCH

    def name(self, index: int) -> str:
        return f"frame_{index}"

    def read(self, index: int) -> tuple[Any, Any]:
        return self.image, self.target


class Timed:
    """Recorders of both levels in place of one, and the seconds that each spent in every call in which it was first.

    They take turns at it: the second finds in the caches what the first has read.
    """

    def __init__(self, recorders: dict[int, Recorder]) -> None:
        self.recorders, self.first = recorders, 0
        self.seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.total = 0.0

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Not timed."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> None:
            for level in sorted(self.recorders, key=lambda level: level != self.first):
                before = time.perf_counter()
                getattr(self.recorders[level], name)(*given)
                spent = time.perf_counter() - before
                if level == self.first:
                    self.seconds[level, name].append(spent)
                self.total += spent

        return call


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Shares of an update at 1, 4 and 16 shards in one process; passed when all are within the limits."""
    rounds = given.repeats or 20  # of each level
    with tempfile.TemporaryDirectory() as folder:
        step, batch, timed = _set_up(Path(folder))
        valid = torch.tensor(valid_pixels(batch.target))
        spent: dict[str, list[float]] = {"shard": [], "apply": []}
        for number in range(2 * rounds + 1):
            timed.first = number % 2
            for name, action in (
                ("shard", lambda: step([batch], valid)),
                ("apply", step.apply),
            ):
                before, inside = time.perf_counter(), timed.total
                action()
                spent[name].append(
                    time.perf_counter() - before - (timed.total - inside)
                )
            timed.flush()
            if number == 0:  # to warm up
                timed.seconds.clear()
                spent = {"shard": [], "apply": []}
    parts, base = medians(timed.seconds), medians(spent)
    shares = {
        level: {
            shards: interval(level, shards, timed.seconds, spent) for shards in SHOWN
        }
        for level in LIMITS
    }
    return {
        "what": f"pidnet_s, {SIZE}x{SIZE}, {BATCH} per shard, fp32, 1 process, {THREADS} threads, {2 * rounds} updates",
        "machine": measuring.machine(),
        "update_ms": {name: round(1000 * value, 2) for name, value in base.items()},
        "ledger_ms": {
            f"level {level}, {name}": round(1000 * value, 2)
            for (level, name), value in parts.items()
        },
        "share_by_shards": shares,
        "limits": LIMITS,
        "passed": all(
            measuring.holds(shares[level][shards], at_most=limit)
            for level, limit in LIMITS.items()
            for shards in SHOWN
        ),
    }


def medians(seconds: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    """Median of each list."""
    return {name: float(np.median(values)) for name, values in seconds.items()}


def interval(
    level: int,
    shards: int,
    parts: Mapping[tuple[int, str], Sequence[float]],
    base: Mapping[str, Sequence[float]],
) -> dict[str, float]:
    """The share of the medians, and its 95 % interval by bootstrap over the updates."""
    random, found = np.random.default_rng(0), []
    for _ in range(400):
        drawn, under = (
            {k: random.choice(v, len(v)) for k, v in seconds.items()}
            for seconds in (parts, base)
        )
        found.append(share(level, shards, medians(drawn), medians(under)))
    low, high = np.percentile(found, [2.5, 97.5])
    return {
        "ratio": share(level, shards, medians(parts), medians(base)),
        "low": float(low),
        "high": float(high),
    }


def share(
    level: int, shards: int, parts: dict[tuple[int, str], float], base: dict[str, float]
) -> float:
    """Time of a ledger's calls over that of an update of `shards` shards in one process, the ledger not counted."""
    own = {name: seconds for (its, name), seconds in parts.items() if its == level}
    by_shard = own["forward"] + own["shard"]
    by_step = own["reduced"] + own["applied"] + own["flush"]
    return round(
        (shards * by_shard + by_step) / (shards * base["shard"] + base["apply"]), 5
    )


def _set_up(folder: Path) -> tuple[TrainStep, ShardBatch, Timed]:
    config = Config()
    config.model.name, config.loss.name, config.optim.clip_norm = (
        "pidnet_s",
        "ohem",
        5.0,
    )
    config.compute.shards, config.compute.samples_per_shard, config.compute.threads = (
        1,
        BATCH,
        THREADS,
    )
    config.augment.crop_size = [SIZE, SIZE]
    flags.apply(THREADS, "elastic")
    group, samples = Group(0, 1, torch.device("cpu")), Frames()
    state = build_state(config, STREET, group.device)
    recorders = {}
    for level, mode in enumerate(("elastic", "audit")):
        config.compute.mode, config.run.root = mode, str(folder / mode)
        recorders[level] = Recorder(config, group, state, samples, flags.fingerprint())  # type: ignore[arg-type]
    config.compute.mode = "elastic"
    timed = Timed(recorders)
    timed.group, timed.state = group, state  # type: ignore[attr-defined]
    step = TrainStep(config, timed)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (BATCH, SIZE, SIZE, 3), generator=random).to(
        torch.uint8
    )
    target = torch.randint(
        0, STREET.num_classes, (BATCH, SIZE, SIZE), generator=random
    ).to(torch.uint8)
    return (
        step,
        ShardBatch(
            0,
            0,
            image,
            target,
            torch.zeros(BATCH, dtype=torch.int64),
            torch.arange(BATCH),
        ),
        timed,
    )
