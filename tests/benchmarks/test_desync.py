"""How `benchmarks/run.py desync` judges what a run said: right words in time pass, and nothing else."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import desync
from benchmarks.desync import FAULTS, MISMATCH_S, RANKS, TIMEOUT_S, judge

BOTH = (
    "collective 18 is not the same on all ranks. ranks 0, 1, 2: all_reduce int64 [4] at agreement.py:72 sum; rank 3: "
    "barrier at desync.py:76 <lambda>. All ranks must make the same calls"
)
LATE = (
    "collective 18, {}, was not reached by rank 3, last seen after 17, all_gather float32 [8] at reduce.py:90 finish; "
    "ranks 0, 1, 2 waited. If it only needs more time, raise compute.timeout_s."
)
SILENT = LATE + (
    " No answer from rank 3: ended, stopped, or inside a call that holds the interpreter."
)
SAID = {
    **dict.fromkeys(("shape", "extra", "order", "skipped"), BOTH),
    "asleep": LATE.format("all_reduce int64 [4] at agreement.py:72 sum"),
    "forward": LATE.format("backward of DDP at gradients.py:255 __call__"),
    **dict.fromkeys(("killed", "stopped"), SILENT.format("barrier at group.py:9 x")),
    "raises": "rank 3: ValueError: a planted mistake",
    "config": "rank 3: configuration = 6e on rank 3 (host HOST, process 1), but c6 on rank 1 (host HOST, process 2).",
}
WRONG = [
    "  Signal 9 (SIGKILL) received by PID 7",
    "rank 2: a collective failed, because another rank ended: Connection closed by peer",
    "[rank3]: ValueError: a planted mistake",
    "Traceback (most recent call last):",
    "rank 0: ValueError: a planted mistake",
]


@pytest.mark.parametrize("name", FAULTS)
def test_the_right_words_in_time_pass_and_nothing_else(name: str) -> None:
    found = judge(
        name,
        [(10.0, "W1 torchrun\n"), (11.5, SAID[name] + "\n"), (12.0, SAID[name])],
        10.0,
        1,
    )
    assert (found["passed"], found["late"], found["seconds"], found["said"]) == (
        True,
        False,
        1.5,
        SAID[name],
    )
    assert found["limit_s"] in (MISMATCH_S, TIMEOUT_S + 4.0)
    assert judge(name, [(10 + found["limit_s"] + 0.1, SAID[name])], 10.0, 1)["late"]
    assert judge(name, [(11.0, SAID[name])], None, 1)["late"], (
        "when the fault began is not known"
    )
    assert not judge(name, [(11.0, SAID[name])], 10.0, 0)["passed"], "it went on"
    assert not judge(name, [(11.0, SAID[name])], 10.0, None)["passed"], "it hangs"
    others = [
        words
        for other, words in SAID.items()
        if words != SAID[name] and {other, name} != {"asleep", "forward"}
    ]
    for words in [*WRONG, *others, SAID[name].replace("ank 3", "ank 1")]:
        assert not judge(name, [(11.0, words)], 10.0, 1)["passed"], words


def test_names_choose_the_faults_and_the_rest_are_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def provoked(name: str, ranks: int, settings: Sequence[str]) -> dict[str, Any]:
        asked.append((name, ranks, *settings))
        return {"passed": True, "late": False}

    monkeypatch.setattr(desync, "provoke", provoked)
    monkeypatch.setattr(desync.measuring, "machine", dict)
    cuda = "compute.device=cuda"
    chosen = ["stopped", "ranks=2", cuda, "killed"]
    assert desync.measure(Namespace(settings=chosen))["passed"]
    assert asked == [("stopped", 2, cuda), ("killed", 2, cuda)]
    asked.clear()
    desync.measure(Namespace(settings=[]))
    assert asked == [(name, RANKS) for name in FAULTS]
