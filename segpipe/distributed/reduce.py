"""The sum over the logical shards as one fixed balanced binary tree, for any number of processes.

Floating-point addition is not associative, so the bits of a sum depend on its order. Here neighboring shards are
added, then neighboring results, up to the root; a node whose right half lies beyond the last shard is its left half. A
rank holds consecutive shards, which form whole subtrees: one if the ranks divide a power-of-two number of shards,
otherwise a few. They are cut into chunks, one per rank, and exchanged by an all-to-all. The owner of a chunk completes
the tree, and an all-gather returns the root. With one subtree per rank, the traffic is that of a ring all-reduce. With
several machines there are then two levels, first within and then across machines: the same tree, with less traffic
between machines. Collectives only move bytes, so the backend's algorithm, protocol and topology cannot change a number.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from segpipe.distributed.group import Group

ALIGNMENT = 128  # elements between starts of tensors: 512 bytes, to which CUDA's allocator aligns every tensor

# torch 2.14 warns at each use of the old name; torch 2.11 has only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FlatLayout:
    """Layout of a list of tensors in one flat fp32 vector, in list order, each with its own strides.

    Views have the tensors' memory format, so that a channels_last gradient is copied and used without reordering.
    `buckets` are consecutive parts, each sent in one go: a bucket ends with the tensor that brings it to `bucket_size`
    elements.

    Alignment selects kernels: `_foreach_norm` on CUDA adds in another order if a tensor does not start at a multiple
    of 16 bytes. So every tensor, and with it every bucket, starts at a multiple of ALIGNMENT. The layout does not
    depend on the number of ranks.
    """

    def __init__(
        self, like: Sequence[Tensor], *, bucket_size: float = math.inf
    ) -> None:
        self._entries: list[tuple[torch.Size, tuple[int, ...], int]] = []
        self.buckets: list[slice] = []
        self.members: list[range] = []  # indices in `like` of each bucket's tensors
        self.bucket_of: list[int] = []  # bucket of each index in `like`
        start = offset = first = 0
        for place, tensor in enumerate(like):
            self._entries.append(
                (tensor.shape, torch.empty_like(tensor).stride(), offset)
            )
            self.bucket_of.append(len(self.buckets))

            offset += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
            if place == len(like) - 1 or offset - start >= bucket_size:
                self.buckets.append(slice(start, offset))
                self.members.append(range(first, place + 1))
                start = offset
                first = place + 1

        self.size = offset
        self.device = like[0].device

    def new(self) -> Tensor:
        """A new zero vector."""
        return torch.zeros(self.size, dtype=torch.float32, device=self.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors inside `flat`, without a copy."""
        start = flat.storage_offset()
        return [
            flat.as_strided(shape, stride, start + offset)
            for shape, stride, offset in self._entries
        ]


class Node(NamedTuple):
    """A subtree over the leaves `[place << height, (place + 1) << height)` that exist."""

    height: int
    place: int


def _append(node: Node, held: list[Node], leaves: int) -> int:
    """Append the largest subtree that `node` completes with the last nodes of `held`; how many of those it absorbs."""
    taken = 0
    while True:
        height, place = node
        if place % 2 and held and held[-1] == (height, place - 1):
            held.pop()
            taken += 1
        elif place % 2 or place == 0 or (place + 1) << height < leaves:
            held.append(node)
            return taken
        node = Node(height + 1, place // 2)


def subtrees(leaves: int, run: Iterable[int]) -> list[Node]:
    """The fewest subtrees of the tree over `leaves` that cover a run of leaves: at most 2 log2(leaves)."""
    held: list[Node] = []
    for leaf in run:
        _append(Node(0, leaf), held, leaves)
    return held


class TreeSum:
    """Sum of vectors over the balanced binary tree of `leaves`, pushed from left to right, starting at leaf `first`.

    Holds only the sums of the largest complete subtrees, like a binary counter.
    """

    def __init__(self, leaves: int, first: int = 0) -> None:
        self._leaves = leaves
        self._next = first
        self._nodes: list[Node] = []
        self._sums: list[Tensor] = []

    def push(self, vector: Tensor, height: int = 0) -> list[Tensor]:
        """Add the next leaf, or the sum of the next subtree of this height. Consumes the vector.

        Returns the vectors that may be reused.
        """
        free = []
        leaf = Node(height, self._next >> height)
        for _ in range(_append(leaf, self._nodes, self._leaves)):
            left = self._sums.pop()
            left.add_(vector)
            free.append(vector)
            vector = left

        self._sums.append(vector)
        self._next = min(self._next + (1 << height), self._leaves)
        return free

    def take(self) -> Tensor:
        """The sum over all leaves, all of which must have been pushed."""
        (root,) = self._sums
        assert self._next == self._leaves
        return root

    def close(self, last: Tensor, part: slice) -> list[Tensor]:
        """`part` of the sum of every subtree, including the leaf `last`, which is not pushed.

        Its parts become known one by one; call this once for each.
        """
        taken = _append(Node(0, self._next), [*self._nodes], self._leaves)
        kept = len(self._sums) - taken
        for left in reversed(self._sums[kept:]):
            left[part].add_(last[part])
            last = left
        return [held[part] for held in (*self._sums[:kept], last)]


class RankSum:
    """Sums parts of vectors over the ranks: the part of the tree over `leaves` that lies above the ranks.

    A part takes an all-to-all, which gives each rank its chunk of all subtrees, and an all-gather of the sums; with
    several machines, two more between them. Starting a part advances each earlier one by one collective, so data
    travels both ways while the next part is computed. This order depends only on the number of parts, not on arrival:
    every rank must start parts of the same lengths in the same order. A rank with several subtrees sends a copy of
    them. So does one whose part's length is not a multiple of the world size; buckets of a FlatLayout are multiples
    of 128.
    """

    def __init__(self, group: Group, leaves: int) -> None:
        self._levels = group.levels(leaves)
        self._contract = group.contract
        self._world_size = group.world_size

        held = [subtrees(leaves, run) for run in group.runs(leaves)]
        self._counts = [len(nodes) for nodes in held]  # subtrees of each rank
        self._own = self._counts[group.rank]

        self._leaves = leaves
        self._heights = [node.height for nodes in held for node in nodes]

        if len(self._levels) > 1:  # every rank holds one subtree, all equally high
            self._leaves = self._levels[0].size
            self._heights = [0] * self._leaves
        # Of each part: its running collective (a dist.Work), and the remaining ones.
        self._under_way: list[tuple[Any, Iterator[Any]]] = []

    def start(self, parts: Sequence[Tensor], into: Tensor | None = None) -> None:
        """Start summing a contiguous part of every own subtree. Do not change the tensors until `finish`.

        Then the sum is in `into`, by default the last of `parts`.
        """
        assert len(parts) == self._own
        collectives = self._sum(parts, parts[-1] if into is None else into)
        first = next(collectives)
        self._go_on()
        self._under_way.append((first, collectives))

    def finish(self) -> None:
        """Wait until the sums of all started parts are in place; equal on every rank."""
        while self._under_way:
            self._go_on()

    def _go_on(self) -> None:
        """Wait for the running collective of every part, and start its next one."""
        going, self._under_way = self._under_way, []
        for work, collectives in going:
            with self._contract.waiting():
                work.wait()
            if (following := next(collectives, None)) is not None:
                self._under_way.append((following, collectives))

    def _sum(self, parts: Sequence[Tensor], into: Tensor) -> Iterator[Any]:
        """Yields one collective after the other, started; each must be complete before the next is requested."""
        ranks = self._levels[0].size

        missing = -parts[0].numel() % self._world_size
        if missing:
            parts = [F.pad(part, (0, missing)) for part in parts]
            root = parts[-1]
        else:
            root = into

        chunk = parts[0].numel() // ranks
        sent = parts[0]
        if len(parts) > 1:
            chunks = [part.view(ranks, chunk) for part in parts]
            sent = torch.stack(chunks, dim=1).flatten()

        splits: tuple[Any, Any] = (None, None)
        if max(self._counts) > 1:
            arriving = [count * chunk for count in self._counts]
            splits = arriving, [len(parts) * chunk] * ranks
        yield from self._climb(root, sent, self._heights, self._leaves, splits)
        if missing:
            into.copy_(root[: into.numel()])

    def _climb(
        self,
        vector: Tensor,
        sent: Tensor,
        heights: Sequence[int],
        leaves: int,
        splits: tuple[Any, Any] = (None, None),
        level: int = 0,
    ) -> Iterator[Any]:
        """Exchange chunks on this level, of subtrees of these heights; sum them; continue above; gather the roots."""
        size, ranks = self._levels[level]
        received = sent.new_empty(len(heights), vector.numel() // size)
        # `sent` may differ in size between ranks.
        self._contract.enter("all_to_all", received.view(-1), level=level)
        yield dist.all_to_all_single(
            received.view(-1), sent, *splits, group=ranks, async_op=True
        )
        tree = TreeSum(leaves)
        for chunk, height in zip(received, heights, strict=True):
            tree.push(chunk, height)

        root = tree.take()
        if level + 1 < len(self._levels):
            above = self._levels[level + 1].size
            yield from self._climb(root, root, [0] * above, above, level=level + 1)
        self._contract.enter("all_gather", vector, level=level)
        yield _all_gather(vector, root.contiguous(), group=ranks, async_op=True)


def tree_over_ranks(vector: Tensor, group: Group) -> Tensor:
    """`vector`, overwritten by the sum of all ranks' vectors of this length; equal on every rank."""
    if group.world_size > 1:
        across = RankSum(group, group.world_size)
        across.start([vector])
        across.finish()
    return vector
