"""The checks of equal bits on a GPU, tried out on a CPU: sound runs pass, broken promises fail, time may run out."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import runs
from benchmarks import gpu, gpu_bits, gpu_claims, gpu_nccl, gpu_speed, modes, ops
from benchmarks.gpu_bench import Bench
from segpipe.cli.main import main as segpipe
from segpipe.determinism import flags
from segpipe.determinism.opgate import RAISES, SILENT, SLOW
from segpipe.train.forward import GraphedHeads

CPU = torch.device("cpu")
SMALL = (
    "model=fast_scnn",
    "data.num_train=16",
    "data.num_val=2",
    "data.workers=0",
    "augment.check=false",
)


def ran(bench: Bench, name: str) -> tuple[bool, dict[str, Any]]:
    """Whether a check passed, and its figures."""
    [row] = gpu.run(bench, [name])
    return row["verdict"] == gpu.PASSED, row["figures"]


Digests = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Tiny runs; switches are put back."""
    monkeypatch.setattr(gpu_bits, "RECIPE", (*gpu_bits.RECIPE, *SMALL))
    tf32 = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [where.allow_tf32 for where in tf32]
    with runs.torch_restored():
        yield Bench(
            CPU, time.monotonic() + 300, size=64, batch=2, updates=1, folder=tmp_path
        )
    for where, value in zip(tf32, before, strict=True):
        where.allow_tf32 = value


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be started; it happens in this process instead, which saves the seconds of a start."""
    seen = []

    def finished(
        command: list[str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        place = command.index(str(gpu_bits.ROOT / "train.py"))
        seen.append(command[:place])
        with runs.torch_restored():
            return subprocess.CompletedProcess(
                command, segpipe(["train", *command[place + 1 :]]), "", ""
            )

    monkeypatch.setattr(gpu_bits, "finished", finished)
    return seen


def counted(like: Callable[[int, tuple[str, ...]], Any]) -> Digests:
    """Digests that are what `like` makes of the number of the call and its changes."""
    calls = itertools.count()

    def digests(
        bench: Bench, name: str, num_processes: int, *changes: str
    ) -> dict[str, Any]:
        return dict.fromkeys(
            gpu_bits.DIGESTS, like(next(calls), (f"{num_processes}", *changes))
        )

    return digests


def test_equal_runs_repeat_their_bits(
    bench: Bench, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu_bits, "PRECISIONS", ("fp32",)
    )  # the others are slow on a CPU
    passed, figures = ran(bench, "repeats")
    assert passed, figures
    assert figures.keys() == {"steps", "fp32", "beside_ballast_gib"}
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
    ]
    assert commands == [start, start]


def test_every_precision_is_run_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def digests(
        bench: Bench, name: str, num_processes: int, *changes: str
    ) -> dict[str, Any]:
        calls.append(changes[-1])
        return dict.fromkeys(gpu_bits.DIGESTS, changes[-1])

    monkeypatch.setattr(gpu_bits, "digests", digests)
    figures = gpu_bits.repeats(bench)
    assert figures == {
        "steps": 5,
        **{name: f"train.precision={name}" for name in ("fp32", "bf16", "fp16")},
        "beside_ballast_gib": 0,
    }
    assert calls == 2 * [f"train.precision={name}" for name in ("fp32", "bf16", "fp16")]


def test_the_judgement_on_processes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sound(call: int, changes: tuple[str, ...]) -> str:
        return changes[0] if "compute.mode=ddp" in changes else "same"

    monkeypatch.setattr(gpu_bits, "digests", counted(sound))
    assert gpu_bits.processes(bench) == {
        "processes": ["1", "2", "4", "3"],
        "weights_digest": "same",
    }


def test_as_many_processes_are_started_as_are_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def finished(
        command: list[str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        seen.append(command[4])
        return subprocess.CompletedProcess(command, 1, "", "no more")

    monkeypatch.setattr(gpu_bits, "finished", finished)
    for number in (1, 4):
        with pytest.raises(AssertionError, match="ended with 1: no more"):
            gpu_bits.digests(bench, "x", number)
    assert seen == ["--nproc-per-node=1", "--nproc-per-node=4"]


@pytest.mark.parametrize(
    ("check", "message"), [("repeats", "two equal runs"), ("processes", "elastic: ")]
)
def test_control_digests_that_change_fail(
    check: str, message: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bits, "digests", counted(lambda call, changes: call))
    passed, figures = ran(bench, check)
    assert not passed
    assert message in figures["error"]


def test_control_a_blind_control_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bits, "digests", counted(lambda call, changes: "same"))
    passed, figures = ran(bench, "processes")
    assert not passed
    assert "does not see the number of processes" in figures["error"]


def test_control_a_replay_with_other_bits_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run falls back to eager, whose weights are right; but nothing was recorded."""
    number = itertools.count()
    monkeypatch.setattr(GraphedHeads, "_trial", lambda *_: next(number))
    monkeypatch.setattr(gpu_speed, "RECORDED", ("fast_scnn",))
    with pytest.warns(UserWarning, match="a replay of this network gave different"):
        passed, figures = ran(bench, "graphs")
    assert not passed
    assert "eager ran in its place" in figures["error"]
    said = "UserWarning: compute.cuda_graph: a replay of this network gave different bits, so its kernels are"
    ended = subprocess.CompletedProcess("train.py", 0, "", said)
    monkeypatch.setattr(gpu_bits, "finished", lambda *_: ended)
    with pytest.raises(AssertionError, match="eager ran in its place"):
        gpu_bits.digests(bench, "graph", 1)


def test_control_a_recipe_that_crashes_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished(command: list[str], *_: Any) -> subprocess.CompletedProcess[str]:
        ours = command[3] == gpu_speed.OURS
        out = json.dumps([[0.1, 0.1], {}])
        return subprocess.CompletedProcess(command, not ours, out * ours, "a bug")

    monkeypatch.setattr(gpu_bits, "finished", finished)
    passed, figures = ran(bench, "recipes")
    assert not passed
    assert "ended with an error: PIDNet-style bf16" in figures["error"]


@pytest.mark.parametrize("joined", [False, True])
def test_only_what_nccl_says_before_ranks_have_joined_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    """Another failure over NCCL is ours, and fails the check."""
    device = torch.device("cuda")
    bench = Bench(device, time.monotonic() + 300, 64, 2, 1, folder=tmp_path)

    def finished(command: list[str], *_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[-1])
        over_nccl = folder.name.startswith("nccl")
        parts = {"joining": "begun"}
        if joined or not over_nccl:
            parts |= {"sums": "1", "backend": folder.name.rstrip("24")}
        (folder / "rank0.jsonl").write_text(json.dumps(parts))
        said = "NCCL WARN Duplicate GPU detected"
        return subprocess.CompletedProcess(command, int(over_nccl), "", said)

    def digests(bench: Bench, name: str, number: int, *changes: str) -> dict[str, str]:
        if "nccl" in name:
            assert "compute.timeout_s=60" in changes, "a hang takes the call's time"
            if joined:
                (tmp_path / "gpu_bits" / name).mkdir(parents=True)
            raise AssertionError("ended with 9: Duplicate GPU")
        return {"weights_digest": name if "ddp" in changes[-1] else "same"}

    monkeypatch.setattr(gpu_bits, "finished", finished)
    monkeypatch.setattr(gpu_bits, "digests", digests)
    if joined:
        for check in (gpu_nccl.several_ranks, gpu_bits.processes):
            with pytest.raises(AssertionError, match="Duplicate GPU"):
                check(bench)
    else:
        found = gpu_nccl.several_ranks(bench)
        assert "Duplicate GPU" in found["2 ranks, nccl"]["refused"]
        assert found["2 ranks"]["backend"] == "gloo"
        assert "Duplicate GPU" in gpu_bits.processes(bench)["2 nccl"]["refused"]


def test_the_judgement_on_compiled_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bits, "digests", counted(lambda call, changes: "same"))
    assert ran(bench, "compiled") == (True, {"weights_digest": "same"})
    monkeypatch.setattr(gpu_bits, "digests", counted(lambda call, changes: call))
    passed, figures = ran(bench, "compiled")
    assert not passed
    assert "compiled, again" in figures["error"]


@pytest.mark.parametrize("check", ["repeats", "processes", "compiled", "ops"])
def test_a_check_without_time_is_left_out_and_has_not_failed(
    check: str, tmp_path: Path
) -> None:
    late = Bench(
        torch.device("cuda"),
        time.monotonic(),
        size=64,
        batch=2,
        updates=1,
        folder=tmp_path,
    )
    figures = getattr(gpu_bits, check)(late)
    assert figures["left out"] == "no time"
    assert not figures.keys() & {"fp32", "weights_digest"}


def test_what_was_done_before_the_time_was_over_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests(*arguments: object) -> dict[str, str]:
        if "train.precision=bf16" in arguments:
            raise subprocess.TimeoutExpired("train.py", 1)
        return {"weights_digest": "a"}

    monkeypatch.setattr(gpu_bits, "digests", digests)
    assert gpu_bits.repeats(bench) == {"steps": 5, "left out": "no time"}


@pytest.mark.slow
def test_a_command_that_takes_too_long_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun's ranks do, the child has a session of its own."""
    note = tmp_path / "pid"
    child = (
        "[sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True"
    )
    code = f"import subprocess, sys, time; p = subprocess.Popen({child}); print(p.pid, file=open({str(note)!r}, 'w'))"
    communicate = subprocess.Popen.communicate

    def until_started(
        process: Any, input: Any = None, timeout: float | None = None
    ) -> Any:
        if timeout is None:
            return communicate(process)
        runs.wait_for(lambda: note.exists() and bool(note.read_text()), process)
        raise subprocess.TimeoutExpired("code", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", until_started)
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_bits.finished([sys.executable, "-c", f"{code}; time.sleep(600)"], 1)
    deadline = time.monotonic() + 60
    while _lives(int(note.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def row(**changes: Any) -> dict[str, Any]:
    sound = {
        "op": "sort",
        "device": "H",
        "raises": False,
        "deterministic_equal": True,
        "replacement_equal": True,
    }
    return {**sound, "table": SLOW, **changes}


def test_control_a_replacement_that_changes_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(), row(op="put", replacement_equal=None)]
    monkeypatch.setattr(ops, "measure", lambda *args, **kwargs: rows)
    passed, figures = ran(bench, "ops")
    assert passed, figures
    assert figures["table_wrong"] == []
    rows[0]["replacement_equal"] = False
    passed, figures = ran(bench, "ops")
    assert not passed
    assert "replacements that do not repeat their bits: sort" in figures["error"]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, False),
        ({"table": RAISES}, True),
        ({"raises": True, "deterministic_equal": None}, True),
        ({"table": RAISES, "raises": True, "deterministic_equal": None}, False),
        ({"deterministic_equal": False}, True),
        ({"table": SILENT, "deterministic_equal": False}, False),
        ({"table": SILENT}, False),
        ({"op": "sort, direct", "raises": True}, False),
        ({"device": "cpu", "table": RAISES}, False),
    ],
)
def test_what_the_table_says_wrongly_is_listed(
    changes: dict[str, Any], wrong: bool
) -> None:
    assert bool(ops.misjudged([row(**changes)])) is wrong


def test_waits_alone_are_counted() -> None:
    """The first warning of a process is about the mode itself."""

    def action() -> None:
        about = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
        warnings.warn(about, stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert gpu_speed._waits(torch.device("cpu"), action) == 1


def test_a_claim_sets_the_environment_before_anything_may_start_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def bench_of(*given: Any) -> Bench:
        calls.append("bench")
        raise StopIteration

    monkeypatch.setattr(gpu_claims.gpu, "needs_gpu", lambda: None)
    monkeypatch.setattr(gpu_claims.gpu, "bench_of", bench_of)
    monkeypatch.setattr(
        gpu_claims.flags, "set_environment", lambda: calls.append("environment")
    )
    with pytest.raises(StopIteration):
        gpu_claims.measure(Namespace(repeats=1, claim="G2"))
    assert calls == ["environment", "bench"]


def test_the_cost_of_the_modes_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "SIZE", 64)
    monkeypatch.setattr(modes, "MODES", ("off", "elastic", "elastic+ledger"))
    monkeypatch.setattr(modes, "THREADS", 1)
    monkeypatch.setattr(modes, "peak_memory", lambda arm: 1)
    figures = modes.measure(Namespace(repeats=1))
    assert (
        figures["modes"].keys() == figures["peak_memory_mib"].keys() == set(modes.MODES)
    )
    assert figures["over_off"].keys() == set(modes.MODES[1:])


def test_off_without_tf32_is_off_in_all_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "THREADS", 1)
    modes.switch("off")
    usual = flags.switches()
    modes.switch(modes.NO_TF32)
    assert flags.switches() == usual | {"matmul_tf32": False, "cudnn_tf32": False}
    assert usual["matmul_tf32"]


def test_times_on_a_gpu_are_taken_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    modes._median_ms(lambda: calls.append("act"), torch.device("cuda"))
    assert calls == ["wait", "act", "wait"] * 21
