"""The tree sum: the same bits for any number of processes, and the control that is not."""

import os
import socket
import weakref
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from segpipe.distributed.group import Group
from segpipe.distributed.reduce import FlatLayout, TreeSum, tree_over_ranks

CPU = torch.device("cpu")
RANKS, SHARDS, LENGTH = 8, 16, 24
Job = tuple[int, int, int]  # ranks, length, seed
JOBS: list[Job] = [(ranks, length, seed) for ranks in (1, 2, 4, 8) for length, seed in ((LENGTH, 0), (8, 1), (4000, 2))]


def vectors(count: int, length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    """Numbers of very different size, so that nearly every order of additions has its own bits."""
    random = torch.Generator().manual_seed(seed)
    scale = 10 ** torch.empty(count, length).uniform_(-4, 4, generator=random)
    return list((torch.randn(count, length, generator=random) * scale).unbind())


def by_recursion(parts: list[Tensor]) -> Tensor:
    half = len(parts) // 2
    return parts[0] if not half else by_recursion(parts[:half]) + by_recursion(parts[half:])


def tree_sum(parts: list[Tensor]) -> Tensor:
    tree = TreeSum()
    for part in parts:
        tree.push(part.clone())
    return tree.take()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32, 64])
def test_tree_is_the_recursive_one(count: int) -> None:
    parts = vectors(count, length=200, seed=count)
    assert same_bits(tree_sum(parts), by_recursion(parts))
    if count > 2:  # the control: one after the other is another sum
        assert not same_bits(tree_sum(parts), torch.stack(parts).cumsum(0)[-1])


@pytest.mark.parametrize("count", [0, 3, 5, 6, 7])
def test_other_counts_are_refused(count: int) -> None:
    with pytest.raises(AssertionError, match="power of two"):
        tree_sum(vectors(count))


def test_vectors_that_push_returns_are_free() -> None:
    parts = vectors(64, length=50)
    tree, spare, made, most = TreeSum(), None, list[weakref.ref[Tensor]](), 0
    for part in parts:
        flat = spare if spare is not None else torch.empty(50)
        made += [weakref.ref(flat)] if spare is None else []
        most = max(most, sum(known() is not None for known in made))
        spare = tree.push(flat.copy_(part))
        if spare is not None:
            spare.fill_(torch.nan)  # whoever still needed it would show it
    assert same_bits(tree.take(), by_recursion(parts))
    assert most <= 7  # log2(64) + 1


def test_a_tree_can_be_used_again() -> None:
    tree = TreeSum()
    for seed in (0, 1):
        parts = vectors(4, seed=seed)
        for part in parts:
            tree.push(part.clone())
        assert same_bits(tree.take(), by_recursion(parts))


def test_layout_keeps_values_strides_and_padding() -> None:
    tensors = [
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(7),
        torch.randn(()),
        torch.randn(2, 3).t(),
        torch.randn(2, 3, 2, 2),
    ]
    layout = FlatLayout(tensors, pad_to=16)
    assert layout.size == 400  # 360 + 7 + 1 + 6 + 24 = 398, up to a multiple of 16
    flat = layout.new()
    views = layout.views(flat)
    for view, tensor in zip(views, tensors, strict=True):
        assert view.stride() == tensor.stride()
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert flat.dtype == torch.float32
    assert torch.equal(flat[:398].sort().values, torch.cat([t.flatten() for t in tensors]).sort().values)  # no overlap
    assert not flat[398:].any()
    part = torch.cat([torch.full((5,), 9.0), flat])[5:]  # a vector that does not start where its memory does
    assert all(torch.equal(view, tensor) for view, tensor in zip(layout.views(part), tensors, strict=True))


# --- across processes


def _serve(rank: int, port: int, jobs: list[Job], pipe: Connection) -> None:
    """A rank: sends its answers to all jobs."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    groups = {size: dist.new_group(list(range(size))) for size in {size for size, _, _ in jobs}}
    pipe.send([_sums(rank, groups, job) if rank < job[0] else None for job in jobs])
    dist.destroy_process_group()


def _sums(rank: int, groups: dict[int, Any], job: Job) -> tuple[list[int], list[int]]:
    """Bits of the tree's and of the usual sum over SHARDS shards on the first ranks."""
    world_size, length, seed = job
    group = Group(rank, rank, world_size, CPU)
    own = [vectors(SHARDS, length, seed)[shard] for shard in group.own_shards(SHARDS)]
    everyone, dist.group.WORLD = dist.group.WORLD, groups[world_size]
    try:
        found = tree_over_ranks(tree_sum(own), group)
        usual = own[0].clone()
        for part in own[1:]:
            usual += part
        dist.all_reduce(usual)
    finally:
        dist.group.WORLD = everyone
    return found.view(torch.int32).tolist(), usual.view(torch.int32).tolist()


def _drive(jobs: list[Job], pipe: Connection) -> None:
    """Forks the ranks from one fresh process: torch is imported once, not once per rank."""
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")
    pairs = [context.Pipe() for _ in range(RANKS)]
    ranks = [context.Process(target=_serve, args=(rank, port, jobs, pairs[rank][1])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    answers = [mine.recv() if mine.poll(60) else None for mine, _ in pairs]
    for process in ranks:
        process.join(10)
        process.kill()
    pipe.send(answers)


@pytest.fixture(scope="module")
def answers() -> dict[Job, list[Any]]:
    """Of every job, what each of its ranks found; all jobs by one pool of gloo processes."""
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    driver = context.Process(target=_drive, args=(JOBS, theirs))
    driver.start()
    assert mine.poll(120), "the ranks do not answer"
    by_rank = mine.recv()
    driver.join()
    assert all(by_rank), "a rank failed"
    return {job: [by_rank[rank][place] for rank in range(job[0])] for place, job in enumerate(JOBS)}


@pytest.mark.parametrize("job", JOBS)
def test_ranks_give_the_bits_of_one_process(answers: dict[Job, list[Any]], job: Job) -> None:
    expected = by_recursion(vectors(SHARDS, *job[1:])).view(torch.int32).tolist()
    assert [found == expected for found, _ in answers[job]] == [True] * job[0]


def test_the_control_sequential_sum_and_all_reduce_depends_on_the_ranks(answers: dict[Job, list[Any]]) -> None:
    usual = [answers[world_size, 4000, 2][0][1] for world_size in (1, 2, 4, 8)]
    assert all(usual[0] != other for other in usual[1:])
