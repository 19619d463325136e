"""The promise of equal bits, on a device: whole runs by the command line, twice, beside ballast, and divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import measure as measuring
from benchmarks.gpu_bench import Bench

ROOT = Path(__file__).resolve().parents[1]
DIGESTS = ("weights_digest", "ema_digest", "miou")
PRECISIONS = ("fp32", "bf16", "fp16")
BALLAST_GIB = 30
NO_TIME = "no time"
RECIPE = (
    "model=pidnet_s", "data.num_train=64", "data.num_val=4", "compute.samples_per_shard=2", "compute.threads=1",
    "loss.name=ohem", "loss.class_weights=log", "optim.clip_norm=1", "data.workers=1", "export.enabled=false",
    "train.progress=false", "run.exists=replace",
)  # fmt: skip
BALLAST = """
import sys, torch
held = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda").zero_()
print("held", flush=True)
sys.stdin.read()
"""


def repeats(bench: Bench) -> dict[str, Any]:
    """The same run twice in every precision, and once more while another process holds much of the memory."""
    steps = 10 * bench.updates
    figures: dict[str, Any] = {"steps": steps}
    with as_time_allows(figures):
        for precision in PRECISIONS:
            changes = (
                "compute.shards=1",
                f"compute.samples_per_shard={min(bench.batch, 8)}",
                f"train.steps={steps}",
                f"train.precision={precision}",
            )
            first, second = (
                digests(bench, f"{precision}{number}", 1, *changes) for number in (1, 2)
            )
            assert first == second, (
                f"{precision}: two equal runs of {steps} steps ended with {first} and {second}"
            )
            figures[precision] = first["weights_digest"]
            if precision == "bf16" and bench.device.type == "cuda":
                with ballast(BALLAST_GIB):
                    crowded = digests(bench, "ballast", 1, *changes)
                assert crowded == first, (
                    f"beside {BALLAST_GIB} GiB of another process: {crowded} instead of {first}"
                )
                figures["beside_ballast_gib"] = BALLAST_GIB
    return figures


def processes(bench: Bench) -> dict[str, Any]:
    """16 shards on one process, and on two to four that share the device over gloo; the control is torch's DDP."""
    changes = ("compute.shards=16", f"train.steps={max(bench.updates // 2, 2)}")
    figures: dict[str, Any] = {"processes": []}
    with as_time_allows(figures):
        alone = None
        for number in (1, 2, 4, 3):
            found = digests(bench, f"elastic{number}", number, *changes)
            alone = alone or found
            assert found == alone, (
                f"elastic: {found} on {number} processes, {alone} on one"
            )
            figures |= {
                "processes": [*figures["processes"], number],
                "weights_digest": found["weights_digest"],
            }
        usual = [
            digests(bench, f"run{number}", number, *changes, "compute.mode=ddp")
            for number in (1, 2)
        ]
        assert usual[0] != usual[1], (
            "the control, compute.mode=ddp, does not see the number of processes"
        )
    return figures


def digest(bench: Bench) -> dict[str, Any]:
    """The digests of the ledger: as on the CPU, without a wait for the device; milliseconds of those of one update."""
    import torch

    from segpipe.ledger import digest as digests_of

    random = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (3, bench.size, bench.size, 3), generator=random).to(
        torch.uint8
    )
    maps = torch.randn(2, 19, 65, 33, generator=random)
    tensors = [
        maps,
        maps.to(memory_format=torch.channels_last),
        maps.bfloat16(),
        maps.half(),
        torch.randn(7, 5),
    ]
    there = [tensor.to(bench.device) for tensor in tensors]
    batch = frames.to(bench.device)
    by_triton = (
        bench.device.type == "cuda" and digests_of.gpu_kernels(bench.device) is not None
    )  # waits, but once
    before = torch.cuda.get_sync_debug_mode() if bench.device.type == "cuda" else 0
    if bench.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        many = digests_of.digest_many(there, channels_last=True)
        each = digests_of.digest_groups([[image] for image in batch])
        single = [digests_of.digest(tensor) for tensor in there]
    finally:
        if bench.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(before)
    assert int(many) == int(digests_of.digest_many(tensors, channels_last=True)), (
        "digest_many differs from the CPU's"
    )
    assert (
        each.tolist()
        == digests_of.digest_groups([[image] for image in frames]).tolist()
    ), "digest_groups differs from the CPU's"
    assert [int(value) for value in single] == [
        int(digests_of.digest(x)) for x in tensors
    ], "digest differs"
    weights = torch.randn(7_720_000, device=bench.device)  # as many as pidnet_s has
    times = []
    for _ in range(10):
        started = time.perf_counter()
        int(digests_of.digest_many([weights]))
        times.append(time.perf_counter() - started)
    return {
        "by_triton": by_triton,
        "ms_of_7.72M_weights": round(1000 * sorted(times)[len(times) // 2], 3),
    }


def ops(bench: Bench) -> dict[str, Any]:
    """Every op of the gate's table on the device: whether it repeats its bits, and whether torch refuses it.

    A replacement that does not repeat its bits breaks the promise. What else the table says wrongly is listed.
    """
    from benchmarks.ops import measure, misjudged

    if bench.too_late(30):
        return {"left out": NO_TIME}
    rows = measure(bench.device, size=min(bench.size, 256), batch=min(bench.batch, 8))
    unsound = [row["op"] for row in rows if row["replacement_equal"] is False]
    assert not unsound, (
        f"replacements that do not repeat their bits: {', '.join(unsound)}"
    )
    return {**{row["op"]: row for row in rows}, "table_wrong": misjudged(rows)}


def cost(bench: Bench) -> dict[str, Any]:
    """What every mode costs, as `benchmarks/run.py C9` reports it."""
    from benchmarks import modes

    if bench.too_late(150):  # six arms, each once more in a process of its own
        return {"left out": NO_TIME}
    found = modes.measure(Namespace(repeats=bench.updates))
    over = {
        name: found[name]["elastic"]
        for name in ("over_off", "over_off_without_tf32")
        if name in found
    }
    assert found["passed"] or bench.device.type == "cpu", (
        f"elastic costs more than {found['limit']} of off: {over}"
    )
    return found


@contextmanager
def as_time_allows(figures: dict[str, Any]) -> Iterator[None]:
    """Leaves the block when a run would end after the bench's time, and says so in `figures`: it broke no promise."""
    try:
        yield
    except subprocess.TimeoutExpired:
        figures["left out"] = NO_TIME


def digests(
    bench: Bench, name: str, num_processes: int, *changes: str
) -> dict[str, Any]:
    """What result.json says of the recipe with `changes`, in a fresh process or several.

    Raises subprocess.TimeoutExpired when the bench's time is over before that.
    """
    side = min(bench.size, 256)
    folder = bench.folder / "gpu_bits" / name
    settings = [
        *RECIPE,
        f"augment.crop_size=[{side},{side}]",
        f"data.size=[{side},{2 * side}]",
        *changes,
    ]
    settings += [
        f"compute.device={bench.device.type}",
        f"run.root={folder.parent}",
        f"run.name={folder.name}",
    ]
    latest = list(dict(part.split("=", 1) for part in settings).items())
    start = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
    ]
    command = [
        sys.executable,
        *start,
        str(ROOT / "train.py"),
        *(f"{key}={value}" for key, value in latest),
    ]
    done = finished(command, bench.seconds_left)
    assert done.returncode == 0, (
        f"{name} ended with {done.returncode}: {done.stderr[-2000:]}"
    )
    result = json.loads((folder / "result.json").read_text())
    return {key: result[key] for key in DIGESTS}


def finished(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """The command's end; after `seconds` it is killed with all that it started, and TimeoutExpired raised."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, told = process.communicate(timeout=max(seconds, 0))
    except subprocess.TimeoutExpired:
        measuring.kill_with_children(process)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, told)


@contextmanager
def ballast(gib: int) -> Iterator[None]:
    """Another process that holds `gib` GiB of the GPU's memory."""
    holder = subprocess.Popen(
        [sys.executable, "-c", BALLAST, str(gib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n", f"{gib} GiB could not be held"
        yield
    finally:
        holder.kill()
        holder.wait()
