"""The measurement of the op table: its cases call what they say, and it reports what it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import ops
from segpipe.determinism.opgate import RULES, check_ops

CPU = torch.device("cpu")
INPUTS = ops.make_inputs(CPU, 32, 2)
BY_INDEX = (
    "median",
    "kthvalue",
    "sort",
    "topk",
)  # of equal values these name any; the replacement is not compared
SUM = next(case for case in ops.CASES if case.op == "scatter_add")


def called(case: ops.Case, *, replaced: bool) -> set[str]:
    """Unsafe ops that the case calls."""
    call = case.replacement if replaced else case.plain
    assert call is not None
    found = check_ops(lambda: case.compute(call, INPUTS))
    return {violation.op.removeprefix("aten.").strip("_") for violation in found}


@pytest.mark.parametrize("case", ops.CASES, ids=lambda case: case.op)
def test_a_case_calls_its_op_and_its_replacement_no_unsafe_one(case: ops.Case) -> None:
    names = {op.strip("_") for op in case.rule.ops}
    assert called(case, replaced=False) & names
    if case.replacement is None:
        return
    assert not called(case, replaced=True)
    if case.op not in BY_INDEX:
        ours, theirs = (
            case.compute(case.replacement, INPUTS),
            case.compute(case.plain, INPUTS),
        )
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_every_rule_is_measured() -> None:
    measured = {case.op.split(",")[0] for case in ops.CASES}
    assert not [rule.ops for rule in RULES if measured.isdisjoint(rule.ops)]


def test_a_cpu_gives_a_row_per_case_and_says_that_it_is_one() -> None:
    rows = ops.measure(CPU, size=32, batch=2, runs=1)
    assert [row["op"] for row in rows] == [case.op for case in ops.CASES]
    assert {row["device"] for row in rows} == {"cpu"}
    assert all(
        row["bitwise_equal"] and row["replacement_equal"] is not False for row in rows
    )
    assert all(
        row["ms_plain"] > 0
        and (row["ms_replacement"] is None) == (row["replacement_equal"] is None)
        for row in rows
    )
    assert not torch.are_deterministic_algorithms_enabled()


def test_control_an_op_that_changes_is_reported() -> None:
    [row] = ops.measure(
        CPU, size=32, batch=1, cases=[replace(SUM, plain=lambda i: torch.rand(3))]
    )
    assert not row["bitwise_equal"]
    assert row["replacement_equal"]


def test_control_an_op_that_raises_is_reported_and_another_error_comes_through() -> (
    None
):
    def refuses(inputs: ops.Inputs) -> torch.Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                "x does not have a deterministic implementation, but you set ..."
            )
        return inputs.values

    def breaks(inputs: ops.Inputs) -> torch.Tensor:
        raise RuntimeError("out of memory")

    [row] = ops.measure(CPU, size=32, batch=1, cases=[replace(SUM, plain=refuses)])
    assert row["raises"]
    assert row["ms_deterministic"] is None
    with pytest.raises(RuntimeError, match="out of memory"):
        ops.measure(CPU, size=32, batch=1, cases=[replace(SUM, plain=breaks)])
