"""The promise of equal bits, on a device: whole runs by the command line, twice, beside ballast, and divided."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import measure as measuring
from benchmarks.gpu_bench import LEFT_OUT, NO_TIME, Bench
from segpipe.distributed.group import SEVERAL
from segpipe.errors import CHECKED_IN_PART

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
DIGESTS = ("weights_digest", "ema_digest", "miou")
PRECISIONS = ("fp32", "bf16", "fp16")
BALLAST_GIB = 30
RECIPE = (
    "model=pidnet_s", "data.num_train=64", "data.num_val=4", "compute.samples_per_shard=2", "compute.threads=1",
    "loss.name=ohem", "loss.class_weights=log", "optim.clip_norm=1", "data.workers=1", "export.enabled=false",
    "train.progress=false", "run.exists=replace", "compute.cuda_graph=off",
)  # fmt: skip
GRAPH = "compute.cuda_graph=on"
BALLAST = """
import sys, torch
held = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda").zero_()
print("held", flush=True)
sys.stdin.read()
"""


def repeats(bench: Bench) -> dict[str, Any]:
    """The same run twice in every precision; the second time another process holds much of a GPU's memory, and all
    precisions run at once there, so that kernels of several processes take turns."""
    steps = 5 * bench.updates
    figures: dict[str, Any] = {"steps": steps}

    def run(number: int, precision: str) -> dict[str, Any]:
        changes = (
            "compute.shards=1",
            f"compute.samples_per_shard={min(bench.batch, 8)}",
            f"train.steps={steps}",
            f"train.precision={precision}",
        )
        return digests(bench, f"{precision}{number}", 1, *changes)

    with as_time_allows(figures):
        first = at_once(bench, {name: partial(run, 1, name) for name in PRECISIONS})
        figures |= {name: found["weights_digest"] for name, found in first.items()}
        bench.keep({**figures, "so far": "one run of each precision"})
        with ballast(BALLAST_GIB if bench.cuda else 0):
            again = {name: partial(run, 2, name) for name in PRECISIONS}
            second = at_once(bench, again)
        for precision, found in first.items():
            assert found == second[precision], (
                f"{precision}: two equal runs of {steps} steps ended with {found} and {second[precision]}"
            )
        figures["beside_ballast_gib"] = BALLAST_GIB if bench.cuda else 0
    return figures


def processes(bench: Bench) -> dict[str, Any]:
    """G6: 16 shards on 1, 2, 4 and 3 processes of one device, with and without a CUDA graph; the control is DDP.

    Several processes of one GPU use NCCL where it takes them, else gloo.
    """
    changes = ("compute.shards=16", f"train.steps={max(bench.updates // 2, 2)}")
    figures: dict[str, Any] = {"processes": []}

    def run(name: str, number: int, *more: str) -> dict[str, Any]:
        return digests(bench, f"{name}{number}", number, *changes, *more)

    with as_time_allows(figures):
        first: dict[str, Callable[[], dict[str, Any]]] = {
            "1": partial(run, "elastic", 1),
            "2": partial(run, "elastic", 2),
            "ddp1": partial(run, "run", 1, "compute.mode=ddp"),
            "ddp2": partial(run, "run", 2, "compute.mode=ddp"),
        }
        if bench.cuda:
            for number in (1, 2):
                first[f"{number} graph"] = partial(run, "graph", number, GRAPH)
        done = at_once(bench, first)
        alone = done["1"]
        figures["weights_digest"] = alone["weights_digest"]

        def compare(name: str, found: dict[str, Any]) -> None:
            assert found == alone, f"elastic: {found} on {name} processes, {alone} on 1"
            figures["processes"] = [*figures["processes"], name]
            bench.keep(figures)

        for name in first:
            if not name.startswith("ddp"):
                compare(name, done[name])
        assert done["ddp1"] != done["ddp2"], (
            "the control, compute.mode=ddp, does not see the number of processes"
        )
        for number in (4, 3):
            compare(str(number), run("elastic", number))
        for number, more in ((2, ()), (4, ()), (2, (GRAPH,))):
            if not bench.cuda:
                break
            name = f"{number} nccl{' graph' if more else ''}"
            kind = "nccl_graph" if more else "nccl"
            folder = bench.folder / "gpu_bits" / f"{kind}{number}"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                with over_nccl():
                    # So that a hang is told here, in time for other checks.
                    found = run(kind, number, "compute.timeout_s=60", *more)
            except AssertionError as refused:  # by NCCL, which is no promise of ours
                if folder.exists():
                    raise  # the ranks had joined
                figures[name] = {"refused": str(refused)[-800:]}
                bench.keep(figures)
                break
            compare(name, found)
    return figures


def compiled(bench: Bench) -> dict[str, Any]:
    """Whole runs of a compiled and recorded network: again, and on 2 processes. A CPU compiles nothing here."""
    changes = ["compute.shards=2", f"train.steps={max(bench.updates // 2, 2)}"]
    changes += ["compute.compile=true", GRAPH] * bench.cuda
    figures: dict[str, Any] = {}
    with as_time_allows(figures):
        first = digests(bench, "compiled1", 1, *changes)  # the others find its kernels
        figures["weights_digest"] = first["weights_digest"]
        more = {
            "again": partial(digests, bench, "compiled_again", 1, *changes),
            "2 processes": partial(digests, bench, "compiled2", 2, *changes),
        }
        for name, found in at_once(bench, more).items():
            assert found == first, f"compiled, {name}: {found}, the first run: {first}"
    return figures


@contextmanager
def over_nccl() -> Iterator[None]:
    """Ranks that share a GPU talk over NCCL, if it takes them."""
    os.environ[SEVERAL] = "1"
    try:
        yield
    finally:
        del os.environ[SEVERAL]


def at_once(
    bench: Bench, calls: Mapping[str, Callable[[], dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Results of all calls by name: on a GPU at the same time, since most of each is its start."""
    if not bench.cuda:
        return {name: call() for name, call in calls.items()}
    with ThreadPoolExecutor(len(calls)) as pool:
        begun = {name: pool.submit(call) for name, call in calls.items()}
        return {name: each.result() for name, each in begun.items()}


def trained(bench: Bench) -> dict[str, Any]:
    """A run trained on the device: its export through all gates, and the audit of its steps."""
    changes = ("compute.shards=2", f"train.steps={max(bench.updates, 2)}")
    more = ("model=fast_scnn", "export.enabled=true", "train.precision=bf16", GRAPH)
    figures: dict[str, Any] = {}
    with as_time_allows(figures):
        figures |= digests(bench, "trained", 1, *changes, *more)
        folder = bench.folder / "gpu_bits" / "trained"
        made = sorted(path.name for path in (folder / "export").iterdir())
        assert "manifest.json" in made, f"the export has {made}"
        figures["export"] = made
        bench.keep(figures)
        audit = ["-m", "segpipe", "audit", f"run={folder}", "spans=1", "verify=false"]
        done = finished([PYTHON, *audit], bench.seconds_left)
        figures["audit_exit_code"] = done.returncode
        told = (done.stdout + done.stderr)[-1500:]
        sound = done.returncode in (0, CHECKED_IN_PART)
        assert sound, f"the audit ended with {done.returncode}: {told}"
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
        many = digests_of.digest_many(there)
        each = digests_of.digest_groups([[image] for image in batch])
    finally:
        if bench.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(before)
    single = [digests_of.digest(tensor) for tensor in there]  # on the host: it waits
    assert int(many) == int(digests_of.digest_many(tensors)), (
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

    if bench.too_late(5):
        return {LEFT_OUT: NO_TIME}
    rows = measure(bench.device, size=min(bench.size, 256), batch=min(bench.batch, 8))
    unsound = [row["op"] for row in rows if row["replacement_equal"] is False]
    assert not unsound, (
        f"replacements that do not repeat their bits: {', '.join(unsound)}"
    )
    return {**{row["op"]: row for row in rows}, "table_wrong": misjudged(rows)}


@contextmanager
def as_time_allows(figures: dict[str, Any]) -> Iterator[None]:
    """Leaves the block when a run would end after the bench's time, and says so in `figures`: it broke no promise."""
    try:
        yield
    except subprocess.TimeoutExpired:
        figures[LEFT_OUT] = NO_TIME


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
    assert "gave different bits, so its kernels" not in done.stderr, (
        f"{name}: a replay gave other bits, so eager ran in its place"
    )
    result = json.loads((folder / "result.json").read_text())
    return {key: result[key] for key in DIGESTS}


def finished(
    command: list[str],
    seconds: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    """The command's end; after `seconds` it is killed with all that it started, and TimeoutExpired raised."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
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
    """Another process that holds `gib` GiB of the GPU's memory; none for 0."""
    if not gib:
        yield
        return
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
