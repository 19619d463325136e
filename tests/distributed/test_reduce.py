"""The tree sum gives the same bits for any number of processes; as a control, another sum does not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import Loopback, gloo
from segpipe.distributed import reduce
from segpipe.distributed.contract import Contract
from segpipe.distributed.group import Group, Level
from segpipe.distributed.reduce import (
    FlatLayout,
    RankSum,
    TreeSum,
    subtrees,
    tree_over_ranks,
)

CPU = torch.device("cpu")
RANKS, SHARDS, LENGTH = 8, 16, 24
Job = tuple[int, int, int, int]  # ranks, shards, length, seed
MACHINES = 3  # seed of the jobs whose ranks sit on several machines
JOBS: list[Job] = [
    (ranks, SHARDS, length, seed)
    for ranks in (1, 2, 4, 8)
    for length, seed in ((LENGTH, 0), (8, 1), (4000, 2), (13, 4))
]
JOBS += [(ranks, SHARDS, 300, 5) for ranks in (3, 5, 6, 7)] + [
    (ranks, 6, 300, 6) for ranks in range(1, 7)
]
JOBS += [(RANKS, SHARDS, 4000, MACHINES), (RANKS, 12, 4000, MACHINES)]


def vectors(count: int, length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    """Numbers of very different size, so that nearly every order of additions has its own bits."""
    random = torch.Generator().manual_seed(seed)
    scale = 10 ** torch.empty(count, length).uniform_(-4, 4, generator=random)
    return list((torch.randn(count, length, generator=random) * scale).unbind())


def by_recursion(parts: list[Tensor]) -> Tensor:
    half = (
        1 << (len(parts) - 1).bit_length() >> 1
    )  # the largest power of two below the number
    return (
        parts[0]
        if not half
        else by_recursion(parts[:half]) + by_recursion(parts[half:])
    )


def tree_sum(parts: list[Tensor]) -> Tensor:
    tree = TreeSum(len(parts))
    for part in parts:
        tree.push(part.clone())
    return tree.take()


def sums_of_run(parts: list[Tensor], run: range) -> list[Tensor]:
    """What a rank with this run of shards sends: the sums of its subtrees."""
    tree, last = TreeSum(len(parts), run.start), parts[run[-1]].clone()
    for shard in run[:-1]:
        tree.push(parts[shard].clone())
    return tree.close(last, slice(None))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 48, 63, 64])
def test_tree_is_the_recursive_one(count: int) -> None:
    parts = vectors(count, length=200, seed=count)
    assert same_bits(tree_sum(parts), by_recursion(parts))
    if count > 2:  # the control: one after the other is another sum
        assert not same_bits(tree_sum(parts), torch.stack(parts).cumsum(0)[-1])


def test_a_tree_without_all_leaves_has_no_sum() -> None:
    for count in (0, 3, 4):
        tree = TreeSum(5)
        for part in vectors(count):
            tree.push(part)
        with pytest.raises((AssertionError, ValueError)):
            tree.take()


@pytest.mark.parametrize("leaves", [1, 2, 6, 7, 12, 16, 21, 48])
def test_any_run_of_leaves_is_a_few_subtrees_from_which_the_one_tree_is_completed(
    leaves: int,
) -> None:
    """For every number of ranks: what all of them send adds up to the bits of one process."""
    parts = vectors(leaves, seed=leaves)
    for ranks in range(1, leaves + 1):
        runs, tree = Group(0, ranks, CPU).runs(leaves), TreeSum(leaves)
        assert [shard for run in runs for shard in run] == list(range(leaves))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
        for run in runs:
            nodes = subtrees(leaves, run)
            assert len(nodes) <= 2 * max(1, (leaves - 1).bit_length())
            for node, part in zip(nodes, sums_of_run(parts, run), strict=True):
                tree.push(part, node.height)
        assert same_bits(tree.take(), by_recursion(parts))
    halves = [len(subtrees(16, run)) for run in Group(0, 4, CPU).runs(16)]
    assert halves == [
        1,
        1,
        1,
        1,
    ]  # no more traffic than a ring where the ranks divide a power of two


def test_vectors_that_push_returns_are_free() -> None:
    parts = vectors(64, length=50)
    tree, free, made = TreeSum(64), list[Tensor](), 0
    for part in parts:
        made += not free
        flat = free.pop() if free else torch.empty(50)
        free += tree.push(flat.copy_(part))
        for spare in free:
            spare.fill_(torch.nan)  # whoever still needed it would show it
    assert same_bits(tree.take(), by_recursion(parts))
    assert made == 7  # log2(64) + 1


def test_layout_keeps_values_strides_and_padding() -> None:
    tensors = [
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(7),
        torch.randn(()),
        torch.randn(2, 3).t(),
        torch.randn(2, 3, 2, 2),
    ]
    layout = FlatLayout(tensors)
    assert (
        layout.size == 384 + 4 * 128
    )  # 360, 7, 1, 6 and 24 elements, each up to a multiple of 128
    flat = layout.new()
    views = layout.views(flat)
    for view, tensor in zip(views, tensors, strict=True):
        assert view.stride() == tensor.stride()
        view.copy_(tensor)
    assert all(
        torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True)
    )
    assert flat.dtype == torch.float32
    starts, ends = [0, 384, 512, 640, 768], [360, 391, 513, 646, 792]
    assert [view.storage_offset() for view in views] == starts
    filled = torch.cat(
        [flat[start:end] for start, end in zip(starts, ends, strict=True)]
    )
    assert torch.equal(
        filled.sort().values, torch.cat([t.flatten() for t in tensors]).sort().values
    )  # no overlap
    assert flat.count_nonzero() == filled.count_nonzero()
    part = torch.cat([torch.full((5,), 9.0), flat])[
        5:
    ]  # a vector that does not start where its memory does
    assert all(
        torch.equal(view, tensor)
        for view, tensor in zip(layout.views(part), tensors, strict=True)
    )


def test_buckets_end_with_the_tensor_that_fills_them_and_are_padded() -> None:
    sizes = (3, 130, 128, 200, 2)
    layout = FlatLayout([torch.zeros(n) for n in sizes], bucket_size=300)
    assert layout.buckets == [slice(0, 384), slice(384, 768), slice(768, 896)]
    assert layout.members == [range(0, 2), range(2, 4), range(4, 5)]
    assert layout.bucket_of == [0, 0, 1, 1, 2]
    flat = layout.new()
    for place, view in enumerate(layout.views(flat)):
        view.fill_(place + 1)
    expected = [[place] * n + [0] * (-n % 128) for place, n in enumerate(sizes, 1)]
    assert flat.tolist() == [value for each in expected for value in each]


def test_a_tensor_that_fills_a_bucket_exactly_ends_it_and_one_tensor_is_a_layout() -> (
    None
):
    layout = FlatLayout([torch.zeros(n) for n in (3, 4, 1)], bucket_size=256)
    assert layout.buckets == [slice(0, 256), slice(256, 384)]
    alone = FlatLayout([torch.zeros(3)])
    assert (alone.size, alone.device, alone.buckets) == (128, CPU, [slice(0, 128)])


@pytest.mark.parametrize("count", [1, 2, 6, 7, 8])
def test_a_tree_closed_part_by_part_is_the_tree(count: int) -> None:
    parts = vectors(count, length=30)
    tree, last = TreeSum(count), parts[-1].clone()
    for part in parts[:-1]:
        tree.push(part.clone())
    for part in (slice(20, 30), slice(7, 20), slice(0, 7)):
        (closed,) = tree.close(last, part)
        assert same_bits(closed, by_recursion(parts)[part])


# --- across threads, which stand for processes


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> Loopback:
    ranks = Loopback(4)
    monkeypatch.setattr(reduce, "dist", ranks)
    monkeypatch.setattr(reduce, "_all_gather", ranks.all_gather)
    return ranks


def levels_of(rank: int, machines: bool) -> tuple[Level, ...]:
    """All four ranks at once, or as two machines of two ranks each."""
    if not machines:
        return (Level(4, None),)
    within, across = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    return (Level(2, within), Level(2, across))  # type: ignore[arg-type]


class Announced(Contract):
    """What a rank announces to the contract, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def enter(self, op: str, tensor: Tensor | None = None, *, level: int = 0) -> None:
        assert tensor is not None
        self.calls.append((op, tensor.numel(), level))


@pytest.mark.parametrize("machines", [False, True])
def test_ranks_continue_the_tree_and_announce_every_collective(
    loopback: Loopback, machines: bool
) -> None:
    parts, contracts = vectors(8, length=32, seed=5), [Announced() for _ in range(4)]

    def work(rank: int) -> Tensor:
        group = Group(rank, 4, CPU, levels_of(rank, machines), contract=contracts[rank])  # type: ignore[arg-type]
        (own,) = sums_of_run(parts, group.own_shards(8))
        across = RankSum(group, 8)
        across.start([own])
        across.finish()
        return own

    assert all(same_bits(found, by_recursion(parts)) for found in loopback.run(work))
    flat = [("all_to_all", 32, 0), ("all_gather", 32, 0)]
    climbed = [
        ("all_to_all", 32, 0),
        ("all_to_all", 16, 1),
        ("all_gather", 16, 1),
        ("all_gather", 32, 0),
    ]
    assert all(
        contract.calls == (climbed if machines else flat) for contract in contracts
    )


@pytest.mark.parametrize("machines", [False, True])
def test_parts_travel_together_and_a_sum_can_be_used_again(
    loopback: Loopback, machines: bool
) -> None:
    """Parts of several lengths are started before the first is finished, twice with one RankSum."""
    parts, contracts = vectors(4, length=28, seed=6), [Announced() for _ in range(4)]

    def work(rank: int) -> list[Tensor]:
        group = Group(rank, 4, CPU, levels_of(rank, machines), contract=contracts[rank])  # type: ignore[arg-type]
        across, found = RankSum(group, 4), []
        for _ in range(2):
            flat = parts[rank].clone()
            for part in (slice(20, 28), slice(4, 20), slice(0, 4)):
                across.start([flat[part]])
            across.finish()
            found.append(flat)
        return found

    assert all(
        same_bits(flat, by_recursion(parts))
        for found in loopback.run(work)
        for flat in found
    )
    assert [len(contract.calls) for contract in contracts] == [
        2 * 3 * (4 if machines else 2)
    ] * 4


def test_two_ranks_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, parts = Loopback(2), vectors(2, length=8)
    monkeypatch.setattr(reduce, "dist", ranks)
    monkeypatch.setattr(reduce, "_all_gather", ranks.all_gather)
    found = ranks.run(
        lambda rank: tree_over_ranks(parts[rank].clone(), Group(rank, 2, CPU))
    )
    assert all(same_bits(vector, by_recursion(parts)) for vector in found)


@pytest.mark.parametrize("machines", [False, True])
@pytest.mark.parametrize("length", [1, 3, 30, 33])
def test_a_length_that_does_not_divide_among_the_ranks_is_padded_for_the_transport(
    loopback: Loopback, machines: bool, length: int
) -> None:
    parts, contracts = (
        vectors(4, length=length + 2, seed=7),
        [Announced() for _ in range(4)],
    )

    def work(rank: int) -> Tensor:
        group = Group(rank, 4, CPU, levels_of(rank, machines), contract=contracts[rank])  # type: ignore[arg-type]
        flat = parts[rank].clone()
        tree_over_ranks(flat[1:-1], group)
        return flat

    for rank, found in enumerate(loopback.run(work)):
        assert same_bits(found[1:-1], by_recursion(parts)[1:-1])
        assert same_bits(
            found[[0, -1]], parts[rank][[0, -1]]
        )  # what lies beside the part stays
    assert contracts[0].calls[0] == ("all_to_all", -(-length // 4) * 4, 0)


@pytest.mark.parametrize(
    ("world_size", "shards", "per_machine"),
    [(3, 8, 0), (5, 16, 0), (7, 16, 0), (4, 6, 0), (8, 16, 2), (8, 12, 2)],
)
def test_ranks_with_several_subtrees_give_the_one_tree(
    monkeypatch: pytest.MonkeyPatch, world_size: int, shards: int, per_machine: int
) -> None:
    """Also on four machines of two ranks each: 16 shards on two levels, 12 on one, since 8 does not divide them."""
    parts, ranks = vectors(shards, length=33, seed=9), Loopback(world_size)
    monkeypatch.setattr(reduce, "dist", ranks)
    monkeypatch.setattr(reduce, "_all_gather", ranks.all_gather)

    def subgroups(rank: int) -> tuple[Level, ...]:
        if not per_machine:
            return ()
        within = tuple(
            range(
                rank // per_machine * per_machine,
                (rank // per_machine + 1) * per_machine,
            )
        )
        across = tuple(range(rank % per_machine, world_size, per_machine))
        return (Level(per_machine, within), Level(world_size // per_machine, across))  # type: ignore[arg-type]

    def work(rank: int) -> Tensor:
        group = Group(rank, world_size, CPU, subgroups(rank))
        sums = sums_of_run(parts, group.own_shards(shards))
        across = RankSum(group, shards)
        across.start(sums)
        across.finish()
        return sums[-1]

    assert all(same_bits(found, by_recursion(parts)) for found in ranks.run(work))


def test_one_process_communicates_nothing(loopback: Loopback) -> None:
    vector = vectors(1)[0]
    assert tree_over_ranks(vector, Group(0, 1, CPU)) is vector


# --- across processes


def _serve(rank: int, jobs: list[Job]) -> list[Any]:
    """A rank's answers to all jobs."""
    sizes = sorted({size for size, *_ in jobs})
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    machines = [dist.new_subgroups_by_enumeration([[0, 1], [2, 3], [4, 5], [6, 7]])[0]]
    machines.append(dist.new_subgroups_by_enumeration([[0, 2, 4, 6], [1, 3, 5, 7]])[0])
    levels = (Level(2, machines[0]), Level(4, machines[1]))
    return [_sums(rank, groups, levels, job) if rank < job[0] else None for job in jobs]


def _sums(
    rank: int, groups: dict[int, Any], levels: tuple[Level, ...], job: Job
) -> tuple[list[int], list[int]]:
    """Bits of the tree's and of the usual sum over the shards on the first ranks."""
    world_size, shards, length, seed = job
    group = Group(
        rank,
        world_size,
        CPU,
        levels if seed == MACHINES else (Level(world_size, groups[world_size]),),
    )
    parts, run = vectors(shards, length, seed), group.own_shards(shards)
    sums = sums_of_run(parts, run)
    if world_size > 1:
        across = RankSum(group, shards)
        across.start(sums)
        across.finish()
    found, own = sums[-1], [parts[shard] for shard in run]
    usual = own[0].clone()
    for part in own[1:]:
        usual += part
    dist.all_reduce(usual, group=groups[world_size])
    return found.view(torch.int32).tolist(), usual.view(torch.int32).tolist()


@pytest.fixture(scope="module")
def answers() -> dict[Job, list[Any]]:
    """Of every job, what each of its ranks found; all jobs by one pool of gloo processes."""
    by_rank = gloo(RANKS, _serve, JOBS)
    return {
        job: [by_rank[rank][place] for rank in range(job[0])]
        for place, job in enumerate(JOBS)
    }


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_ranks_give_the_bits_of_one_process(
    answers: dict[Job, list[Any]], job: Job
) -> None:
    """The last jobs are of four machines with two ranks each; with 16 shards they climb the tree in two levels."""
    expected = by_recursion(vectors(*job[1:])).view(torch.int32).tolist()
    assert [found == expected for found, _ in answers[job]] == [True] * job[0]


@pytest.mark.slow
def test_the_control_sequential_sum_and_all_reduce_depends_on_the_ranks(
    answers: dict[Job, list[Any]],
) -> None:
    usual = [answers[world_size, SHARDS, 4000, 2][0][1] for world_size in (1, 2, 4, 8)]
    assert all(usual[0] != other for other in usual[1:])
