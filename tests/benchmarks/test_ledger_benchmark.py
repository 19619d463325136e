"""`benchmarks/run.py ledger` times each level as it would run alone."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from benchmarks import ledger


class Digesting:
    """A recorder whose call takes two seconds, and one where another has just read the same memory."""

    def __init__(self, clock: list[float], warm: list[bool], work: float) -> None:
        self.clock, self.warm, self.work = clock, warm, work

    def shard(self, *_: Any) -> None:
        self.clock[0] += self.work / (2 if self.warm[0] else 1)
        self.warm[0] = True


def test_each_level_is_timed_when_it_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, warm = [0.0], [False]
    monkeypatch.setattr(ledger.time, "perf_counter", lambda: clock[0])
    timed = ledger.Timed(
        {level: Digesting(clock, warm, work) for level, work in ((0, 2.0), (1, 6.0))}
    )  # type: ignore[misc]
    for number in range(4):
        timed.first, warm[0] = number % 2, False
        timed.shard()
    assert dict(timed.seconds) == {(0, "shard"): [2.0, 2.0], (1, "shard"): [6.0, 6.0]}
    assert timed.total == clock[0] == 2 * (2 + 3) + 2 * (6 + 1), (
        "all of it is no part of an update"
    )


def test_shares_are_of_an_update_without_the_ledger() -> None:
    calls = ("forward", "shard", "reduced", "applied", "flush")
    parts = {(level, name): 1.0 + level for level in (0, 1) for name in calls}
    base = {"shard": 100.0, "apply": 10.0}
    assert ledger.share(0, 1, parts, base) == round(5 / 110, 5)
    assert ledger.share(1, 4, parts, base) == round((4 * 4 + 6) / 410, 5)


def test_the_ledger_is_measured_in_real_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"SIZE": 64, "BATCH": 2, "THREADS": 1}.items():
        monkeypatch.setattr(ledger, name, value)
    found = ledger.measure(Namespace(repeats=2))
    for level in (0, 1):
        one, many = (found["share_by_shards"][level][shards] for shards in (1, 16))
        assert all(
            0 < share["low"] <= share["ratio"] <= share["high"] for share in (one, many)
        )
