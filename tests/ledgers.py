"""Ledgers of made-up runs: every number is a function of its place, so that runs agree where nothing was changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segpipe.ledger.digest import float_bits
from segpipe.ledger.rows import (
    AUDIT_FIELDS,
    SAMPLE_FIELDS,
    SHARD_FIELDS,
    STEP_FIELDS,
    LedgerWriter,
    SessionHeader,
    ledger_path,
)

NUM_SAMPLES = 50
NAMES = [f"scene_{index:03d}" for index in range(NUM_SAMPLES)]
LAYERS = [f"block{number}.weight" for number in range(30)]
AUDITED = dict.fromkeys(("gradient", "statistics", "weights", "ema"), LAYERS)
NUMBERS = ("loss", "lr", "scale")
Place = tuple[
    int, int | None, str, int
]  # step, shard (None: the step), field, number of the sample or tensor


def header(
    *,
    session: int = 0,
    first_step: int = 0,
    rank: int = 0,
    world_size: int = 1,
    **changes: Any,
) -> SessionHeader:
    """Header of a synthetic run; `changes` are settings by name with a double underscore for the dot, or its fields."""
    fields = {
        name: changes.pop(name)
        for name in ("fingerprint", "parts", "sample_names", "level")
        if name in changes
    }
    settings = {
        "seed": 0,
        "compute.shards": 4,
        "compute.samples_per_shard": 2,
        "data.name": "synthetic",
        "optim.lr": 1,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    fields = {
        "fingerprint": {"torch": "2.11", "threads": 1},
        "sample_names": NAMES,
        **fields,
    }
    return SessionHeader(
        session, first_step, rank, world_size, settings, "hash", **fields
    )


def number(*place: object) -> int:
    """A digest that no other place has."""
    return int.from_bytes(
        hashlib.blake2b(repr(place).encode(), digest_size=8).digest(),
        "little",
        signed=True,
    )


def order(
    step: int, shard: int, shards: int, samples: int
) -> tuple[list[int], list[int]]:
    """Epochs and indices of a shard."""
    first = (step * shards + shard) * samples
    return tuple(
        list(part)
        for part in zip(
            *(divmod(first + j, NUM_SAMPLES) for j in range(samples)), strict=True
        )
    )  # type: ignore[return-value]


class Content:
    """What a made-up run computes; `changed` adds to the number at a place."""

    def __init__(
        self, changed: Mapping[Place, int], salt: str, without: Sequence[str]
    ) -> None:
        self.changed, self.salt, self.without = changed, salt, without

    def of(self, step: int, shard: int | None, name: str, num: int = 0) -> torch.Tensor:
        """Digest 0-d, or (num,) when num is not 0."""
        values = []
        for place in range(max(num, 1)):
            extra = self.changed.get((step, shard, name, place), 0)
            if name in NUMBERS and not num:
                values.append(int(float_bits(step + 0.5 + extra)))
            elif name == "valid":
                values.append(1000 * step + extra)
            else:
                values.append(
                    int(np.int64(number(self.salt, step, shard, name, place)) ^ extra)
                )
        return torch.tensor(values) if num else torch.tensor(values[0])


def write_session(
    folder: Path,
    first: SessionHeader,
    steps: Sequence[int],
    *,
    ranks: int = 1,
    changed: Mapping[Place, int] | None = None,
    salt: str = "",
    flush_every: int = 2,
    start: bool = False,
    without: Sequence[str] = (),
) -> Path:
    """Write what `ranks` processes write in one session; returns the folder of the run.

    `start` writes the state before the first step too, fields `without` are left out; level 1 has part rows.
    """
    content, shards, samples = (
        Content(changed or {}, salt, without),
        first.shards,
        first.samples_per_shard,
    )
    for rank in range(ranks):
        own = header(**{**_settings(first), "rank": rank, "world_size": ranks})
        with closing(LedgerWriter(ledger_path(folder, rank), own)) as writer:
            if start:
                before = steps[0] - 1
                writer.step_row(
                    before,
                    {
                        name: content.of(before, None, name)
                        for name in ("weights", "ema")
                    },
                )
            for step in steps:
                for shard in range(
                    rank * shards // ranks, (rank + 1) * shards // ranks
                ):
                    _write_shard(
                        writer,
                        content,
                        step,
                        shard,
                        shards,
                        samples,
                        audit=first.level > 0,
                    )
                names = [name for name in STEP_FIELDS if name not in without]
                writer.step_row(
                    step, {name: content.of(step, None, name) for name in names}
                )
                if first.level:
                    writer.part_rows(
                        step,
                        -1,
                        "weights",
                        content.of(step, None, "weights", len(LAYERS)),
                    )
                if step % flush_every == 0:
                    writer.flush()
    return folder


def _write_shard(
    writer: LedgerWriter,
    content: Content,
    step: int,
    shard: int,
    shards: int,
    samples: int,
    *,
    audit: bool,
) -> None:
    planned = order(step, shard, shards, samples)
    epochs, indices = (
        [
            number + content.changed.get((step, shard, what, j), 0)
            for j, number in enumerate(numbers)
        ]
        for what, numbers in zip(("epoch", "order"), planned, strict=True)
    )
    widths = {
        name: samples if name in SAMPLE_FIELDS else 0
        for name in SHARD_FIELDS
        if name not in content.without
    }
    digests = {
        name: content.of(step, shard, name, width) for name, width in widths.items()
    }
    writer.shard_row(step, shard, torch.tensor(epochs), torch.tensor(indices), digests)
    if audit:
        for name in AUDIT_FIELDS:
            writer.part_rows(step, shard, name, content.of(step, shard, name, samples))
        for name in ("statistics", "gradient"):
            writer.part_rows(
                step, shard, name, content.of(step, shard, name, len(LAYERS))
            )


def _settings(first: SessionHeader) -> dict[str, Any]:
    fields = ("session", "first_step", "fingerprint", "parts", "sample_names", "level")
    settings = {name.replace(".", "__"): value for name, value in first.recipe.items()}
    return {**settings, **{name: getattr(first, name) for name in fields}}
