"""What the ledgers of two runs hold of one step, in the order in which an update computes it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from segpipe.ledger.rows import PART, SHARD, STEP, Rows, part_fields, slots


class Field(NamedTuple):
    """One thing that the ledger holds of a step, and what a sentence calls it."""

    stage: str
    kind: int
    name: str
    noun: str
    verb: str = "differs"


# Causal order: the first that differs is where two runs part.
FIELDS = (
    Field("order", SHARD, "order", "samples", "differ"),
    Field("decode", SHARD, "decoded_image", "decoded image"),
    Field("decode", SHARD, "decoded_target", "decoded mask"),
    Field("augment", SHARD, "image", "augmented image"),
    Field("augment", SHARD, "target", "mask"),
    Field("preprocess", SHARD, "batch", "preprocessed batch"),
    Field("forward", SHARD, "logits", "logits", "differ"),
    Field("forward", SHARD, "statistics", "BatchNorm statistics of the shard", "differ"),
    Field("loss", STEP, "valid", "number of valid pixels"),
    Field("loss", SHARD, "loss", "loss"),
    Field("backward", SHARD, "gradient", "local gradient"),
    Field("reduction", STEP, "gradient", "reduced gradient"),
    Field("optimizer", STEP, "lr", "learning rate"),
    Field("optimizer", STEP, "scale", "loss scale"),
    Field("optimizer", STEP, "optimizer", "optimizer state"),
    Field("weights", STEP, "weights", "weights", "differ"),
    Field("bn_ema", STEP, "statistics", "BatchNorm statistics", "differ"),
    Field("bn_ema", STEP, "ema", "averaged weights", "differ"),
)
STAGES = tuple(dict.fromkeys(entry.stage for entry in FIELDS))
SAMPLE_STAGES = ("order", "decode", "augment")  # samples are still apart there
DTYPES = {"valid": np.int64, "loss": np.float64, "lr": np.float64, "scale": np.float64}  # of fields that are no digests

Key: TypeAlias = tuple[int, str, int]  # kind, field, shard (-1: none)
Values: TypeAlias = dict[Key, tuple[NDArray[Any], NDArray[Any]]]  # in A and in B, along samples or tensors


class Evidence(NamedTuple):
    """What both runs give of one step."""

    whole: Values  # of shard and step rows
    parts: Values  # of part rows

    def shards(self, entry: Field) -> list[int] | None:
        """Where a field differs, ascending; -1 is the step as a whole. None when the runs do not both give it."""
        keys = {key for values in self for key in values if key[:2] == (entry.kind, entry.name)}
        return sorted(key[2] for key in keys if any(places(values, key) for values in self)) if keys else None

    def first_place(self, entry: Field, shard: int) -> int:
        """Number of the first sample or tensor that differs within a field that differs."""
        key = (entry.kind, entry.name, shard)
        return (places(self.parts, key) or places(self.whole, key))[0]

    def sample(self, shard: int, place: int, run: int) -> tuple[int, int] | None:
        """Epoch and index of a sample of a shard in A (run 0) or B (run 1), when both have the shard's row."""
        values = self.whole.get((SHARD, "order", shard))
        return (int(values[run][place, 0]), int(values[run][place, 1])) if values else None


def places(values: Values, key: Key) -> list[int]:
    """Numbers of the samples or tensors behind a field that differ."""
    if key not in values:
        return []
    unequal = np.not_equal(*values[key])
    return [int(place) for place in np.flatnonzero(unequal.any(axis=tuple(range(1, unequal.ndim))))]


def evidence(step: int, pairs: dict[int, tuple[Rows, Rows]]) -> Evidence:
    """What rows of equal keys give of `step`; `pairs` are those of both runs, by kind."""
    found = Evidence({}, {})
    for kind, pair in pairs.items():
        for one, two in zip(*(rows[pair[0]["step"] == step] for rows in pair), strict=True):
            if kind == PART:
                _add_part(found.parts, one, two)
            else:
                _add_whole(found.whole, kind, one, two)
    return found


def _add_whole(whole: Values, kind: int, one: Any, two: Any) -> None:
    shard = int(one["shard"])
    if kind == SHARD:
        order = (np.stack([row["epoch"], row["sample"]], axis=1) for row in (one, two))
        whole[kind, "order", shard] = (next(order), next(order))
    for number, (name, slot) in enumerate(slots(kind, len(one["sample"])).items()):
        if (one["present"] & two["present"]) >> number & 1:
            whole[kind, name, shard] = (one["digest"][slot], two["digest"][slot])


def _add_part(parts: Values, one: Any, two: Any) -> None:
    shard = int(one["shard"])
    key = (SHARD if shard >= 0 else STEP, part_fields(shard)[one["field"]], shard)
    before = parts.get(key, (np.zeros(0, np.uint64),) * 2)
    news = (row["digest"][: one["present"]] for row in (one, two))
    parts[key] = (np.append(before[0], next(news)), np.append(before[1], next(news)))
