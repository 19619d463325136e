"""Every collective that segpipe uses, on one device: NCCL with one rank, with several where it agrees, else gloo.

`python -m benchmarks.gpu_nccl cuda FILE` is one rank under torchrun. It writes a line of JSON per part before and after
it, so that a hang leaves the name of the call. Several ranks on one GPU are a switch of NCCL (2.30 and later).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import gpu_bits
from benchmarks.gpu_bench import LEFT_OUT, NO_TIME, Bench
from segpipe.distributed import group as groups
from segpipe.distributed.contract import MARGIN_S
from segpipe.distributed.group import Group, Level, choose_device, join, leave
from segpipe.distributed.reduce import FlatLayout, RankSum, TreeSum, tree_over_ranks
from segpipe.settings.groups import ComputeConfig

TIMEOUT_S = 40.0  # compute.timeout_s of the ranks
ENDED_S = 20.0  # for the last rank to destroy its group
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


def one_rank(bench: Bench) -> dict[str, Any]:
    """NCCL with one rank: every collective, from a hook too; subgroups with their timeouts; flight recorder; end."""
    return _started(bench, 1, "nccl" if bench.cuda else "gloo")


def several_ranks(bench: Bench) -> dict[str, Any]:
    """The same on 2 and 4 ranks of one device, 4 as two machines; sums against those of one process, bit for bit."""
    figures: dict[str, Any] = {}
    for number in (2, 4):
        if bench.too_late(40):
            return {**figures, LEFT_OUT: NO_TIME}
        if bench.cuda:
            try:
                figures[f"{number} ranks"] = _started(bench, number, "nccl")
                continue
            except Refused as refused:  # which is no broken promise of ours
                figures[f"{number} ranks, nccl"] = {"refused": str(refused)}
                bench.keep(figures)
        figures[f"{number} ranks"] = _started(bench, number, "gloo")
        bench.keep(figures)
    return figures


class Refused(Exception):
    """NCCL does not take several ranks on one GPU: none got beyond joining."""


def _started(bench: Bench, number: int, backend: str) -> dict[str, Any]:
    """What the ranks wrote. Raises AssertionError, with where each rank stood, if one fails or none answers."""
    folder = bench.folder / "gpu_nccl" / f"{backend}{number}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*"):
        old.unlink()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={number}", "-m", "benchmarks.gpu_nccl"]
    several = "1" if backend == "nccl" else "0"
    limit = min(TIMEOUT_S + 60, bench.seconds_left)
    try:
        done = gpu_bits.finished(
            [*command, bench.device.type, str(folder)],
            limit,
            {**RECORDER, groups.SEVERAL: several, "PYTHONPATH": str(gpu_bits.ROOT)},
        )
        ended = f"ended with {done.returncode}: {done.stderr}"
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        ended, failed = f"did not end within {limit:.0f} s", True
    by_rank = {path.stem: _lines(path) for path in sorted(folder.glob("rank*.jsonl"))}
    at = {rank: list(parts)[-1:] for rank, parts in by_rank.items()}
    joined = any(last != ["joining"] for last in at.values())
    if failed and number > 1 and backend == "nccl" and not joined:
        said = [line for line in ended.splitlines() if re.search("NCCL|nccl|GPU", line)]
        raise Refused(" ".join(said[:8])[:1500] or ended[-500:])
    assert not failed, f"{number} ranks over {backend}: {ended[-1500:]} Last: {at}"
    first = by_rank["rank0"]
    for rank, parts in by_rank.items():
        for name in ("sums", "hook", "two levels"):
            same = parts.get(name) == first.get(name)
            assert same, f"{name}: rank 0 found {first.get(name)}, {rank} {parts[name]}"
    assert first["backend"] == backend, f"the backend is {first['backend']}"
    return first


def _lines(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        found |= json.loads(line)
    return found


def main(device: str, folder: Path) -> None:
    """A rank: every part of PARTS in turn."""
    from segpipe.determinism import flags

    flags.set_environment()
    flags.apply(1)
    world = int(os.environ["WORLD_SIZE"])
    if world == 4:
        os.environ["LOCAL_WORLD_SIZE"] = "2"  # two machines, as far as segpipe knows
    path = folder / f"rank{os.environ['RANK']}.jsonl"

    def note(name: str, value: Any) -> None:
        with path.open("a") as file:
            print(json.dumps({name: value}), file=file, flush=True)

    note("joining", "begun")
    group = _alone(device) if world == 1 else _joined(device)
    note("backend", dist.get_backend())
    for name, part in PARTS.items():
        note(name, "begun")
        note(name, part(group))
    note("destroyed_after_s", "begun")
    started = time.monotonic()
    leave(group)
    note("destroyed_after_s", round(time.monotonic() - started, 2))


def _joined(device: str) -> Group:
    return join(ComputeConfig(device=device, timeout_s=TIMEOUT_S), {})


def _alone(device: str) -> Group:
    """One rank with a process group, which segpipe itself would not make."""
    where = choose_device(device, 0)
    cuda = where.type == "cuda"
    if cuda:
        torch.cuda.set_device(where)
    timeout = timedelta(seconds=TIMEOUT_S + MARGIN_S)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timeout,
        device_id=where if cuda else None,
    )
    made, _ = dist.new_subgroups_by_enumeration([[0]], timeout=timeout)
    assert isinstance(made, dist.ProcessGroup)
    return Group(0, 1, where, subgroups=(Level(1, made),))


def integers(group: Group) -> int:
    """all_reduce of int64, as counts of pixels are summed."""
    counts = torch.tensor([group.rank + 1, 1 << 40], device=group.device)
    if group.world_size > 1:
        counts = group.sum_tensor(counts)
    else:
        dist.all_reduce(counts)
    size = group.world_size
    assert counts.tolist() == [size * (size + 1) // 2, size << 40], counts
    return int(counts[0])


def objects(group: Group) -> list[str]:
    """all_gather_object, and a barrier."""
    found: list[Any] = [None] * group.world_size
    dist.all_gather_object(found, {"rank": group.rank, "text": "a" * 100})
    dist.barrier()
    assert [each["rank"] for each in found] == list(range(group.world_size))
    return [each["text"][:1] for each in found]


def sums(group: Group) -> dict[str, str]:
    """Sums over 16 shards, over one more than ranks, and over the ranks, against those that one process makes."""
    flat = replace(group, subgroups=())
    size = group.world_size
    found = {f"{leaves} shards": _sum(flat, leaves) for leaves in (16, size + 1)}
    vector = _leaf(group, group.rank)
    tree = TreeSum(size)
    for leaf in range(size):
        tree.push(_leaf(group, leaf))
    expected = tree.take()
    if size > 1:
        vector = tree_over_ranks(vector, flat)
    else:
        dist.all_reduce(vector)
    assert torch.equal(vector, expected), "the sum over the ranks has other bits"
    return found


def two_levels(group: Group) -> str:
    """The sum over 16 shards within machines, then across them; has the bits of one level."""
    return _sum(group, 16) if group.subgroups else "one machine"


def _leaf(group: Group, leaf: int) -> Tensor:
    """The vector of a shard, of a size that is no multiple of the number of ranks; the same on every rank."""
    random = torch.Generator().manual_seed(leaf)
    return torch.randn(100_003, generator=random).to(group.device)


def _sum(group: Group, leaves: int) -> str:
    alone = TreeSum(leaves)
    for leaf in range(leaves):
        alone.push(_leaf(group, leaf))
    expected = alone.take()
    run = group.own_shards(leaves)
    tree = TreeSum(leaves, run[0])
    for leaf in run[:-1]:
        tree.push(_leaf(group, leaf))
    across = RankSum(group, leaves)
    parts = tree.close(_leaf(group, run[-1]), slice(None))
    found = torch.empty_like(expected)
    across.start(parts, found)
    across.finish()
    assert torch.equal(found, expected), f"the sum over {leaves} shards has other bits"
    return f"{float(found.double().sum()):.17g}"


def hook(group: Group) -> str:
    """Sums that start in hooks of the backward, as gradients are sent, against sums that start after it."""
    found = [_backward(group, in_hooks=given) for given in (False, True, True)]
    assert all(torch.equal(found[0], each) for each in found), "bits differ"
    return f"{float(found[0].double().sum()):.17g}"


def _backward(group: Group, *, in_hooks: bool) -> Tensor:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)]
    net = nn.Sequential(*layers).to(group.device)
    parameters = list(net.parameters())
    layout = FlatLayout(parameters, bucket_size=600)
    flat, total = layout.new(), layout.new()
    views, across = layout.views(flat), RankSum(group, group.world_size)
    missing = [len(members) for members in layout.members]

    def ready(place: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        views[place].copy_(parameter.grad)
        bucket = layout.bucket_of[place]
        missing[bucket] -= 1
        if not missing[bucket] and in_hooks:
            across.start([flat[layout.buckets[bucket]]], total[layout.buckets[bucket]])

    for place, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(
            lambda given, place=place: ready(place, given)
        )
    image = _leaf(group, group.rank)[: 2 * 8 * 64 * 64].view(2, 8, 64, 64)
    net(image).square().mean().backward()
    if not in_hooks:
        for bucket in reversed(layout.buckets):
            across.start([flat[bucket]], total[bucket])
    across.finish()
    return total


def ddp(group: Group) -> bool:
    """torch's DistributedDataParallel, which compute.mode=ddp uses: two backwards."""
    net = nn.Conv2d(8, 8, 3).to(group.device)
    cuda = group.device.type == "cuda"
    wrapped = nn.parallel.DistributedDataParallel(
        net, device_ids=[group.device.index] if cuda else None
    )
    for _ in range(2):
        image = _leaf(group, group.rank)[: 8 * 64].view(1, 8, 8, 8)
        wrapped(image).square().mean().backward()
    assert net.weight.grad is not None
    return bool(torch.isfinite(net.weight.grad).all())


def timeouts(group: Group) -> dict[str, Any]:
    """Seconds after which the backend of every group gives up, read back; ours must come before."""
    ranks = {"all": dist.group.WORLD} | {
        f"level {number}": level.ranks for number, level in enumerate(group.subgroups)
    }
    found = {}
    for name, members in ranks.items():
        assert members is not None
        options = members._get_backend(group.device).options
        found[name] = options._timeout.total_seconds()
    wrong = {name: value for name, value in found.items() if value != TIMEOUT_S + 15}
    assert not wrong, f"timeouts: {wrong}, but {TIMEOUT_S + MARGIN_S} s was set"
    return found


def flight_recorder(group: Group) -> Any:
    """Calls that NCCL's flight recorder has kept: what a hang would be explained by."""
    if dist.get_backend() != "nccl":
        return "of NCCL alone"
    dump = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())
    kept = [entry["profiling_name"] for entry in dump.get("entries", [])]
    assert kept, "nothing was recorded"
    return {"entries": len(kept), "kinds": sorted(set(kept))}


@contextlib.contextmanager
def _multithreaded() -> Iterator[None]:
    torch.autograd.set_multithreading_enabled(True)
    try:
        yield
    finally:
        torch.autograd.set_multithreading_enabled(False)


def hook_in_another_thread(group: Group) -> str:
    """As `hook`, in autograd's own thread of the device, which segpipe turns off."""
    with _multithreaded():
        return hook(group)


PARTS: dict[str, Callable[[Group], Any]] = {
    "integers": integers,
    "objects": objects,
    "sums": sums,
    "two levels": two_levels,
    "hook": hook,
    "hook in autograd's thread": hook_in_another_thread,
    "ddp": ddp,
    "timeouts_s": timeouts,
    "flight recorder": flight_recorder,
}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
