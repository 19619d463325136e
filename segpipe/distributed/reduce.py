"""The sum over the logical shards as one fixed balanced binary tree, whatever the number of processes.

Floating-point addition is not associative, so the bits of a sum depend on its order. Here neighbouring shards are
added, then neighbouring results, up to the root. A rank holds a power-of-two run of shards, hence a whole subtree. The
top of the tree is summed across ranks on chunks, after an all-to-all, and an all-gather returns the root: the traffic
of a ring all-reduce. Several machines take two levels, within each and then across them: the same tree, with less
traffic between machines. Collectives only move bytes, so algorithm, protocol and topology of the backend cannot change
a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from segpipe.distributed.group import Group, Level
    from segpipe.distributed.watch.contract import Contract

ALIGNMENT = 128  # elements between starts of tensors: 512 bytes, to which CUDA's allocator aligns every tensor
BASE_ALIGNMENT = 64  # bytes: what torch's allocators guarantee on a CPU

# torch 2.14 warns at each use of the old name; torch 2.11 has only that.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FlatLayout:
    """Places for a list of tensors in one flat fp32 vector, in list order, each with its own strides.

    Views have the tensors' memory format, so that a channels_last gradient is copied and used without a reorder.
    `buckets` are the consecutive parts that are sent at once: each ends with the tensor that brings it to
    `bucket_size` elements.

    Alignment selects kernels: `_foreach_norm` on CUDA adds in another order where a tensor does not start at a multiple
    of 16 bytes. So every tensor, and with it every bucket, starts at a multiple of ALIGNMENT. The layout does not
    depend on the number of ranks.
    """

    def __init__(self, like: Sequence[Tensor], *, bucket_size: int | None = None) -> None:
        self._entries: list[tuple[torch.Size, tuple[int, ...], int]] = []
        self.buckets: list[slice] = []
        self.members: list[range] = []  # of each bucket: its places in `like`
        self.bucket_of: list[int] = []  # of each place
        start = offset = first = 0
        for place, tensor in enumerate(like):
            self._entries.append((tensor.shape, torch.empty_like(tensor).stride(), offset))
            self.bucket_of.append(len(self.buckets))
            offset += -(-tensor.numel() // ALIGNMENT) * ALIGNMENT
            if place == len(like) - 1 or (bucket_size is not None and offset - start >= bucket_size):
                self.buckets.append(slice(start, offset))
                self.members.append(range(first, place + 1))
                start, first = offset, place + 1
        self.size = offset
        self.device = like[0].device

    def new(self) -> Tensor:
        """A fresh vector; the padding is zero."""
        flat = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        assert flat.data_ptr() % BASE_ALIGNMENT == 0, "another allocator than torch's aligns memory otherwise"
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors inside `flat`, without a copy."""
        start = flat.storage_offset()
        return [flat.as_strided(shape, stride, start + offset) for shape, stride, offset in self._entries]


class TreeSum:
    """Balanced binary tree sum of vectors pushed in shard order, holding at most log2(n) + 1 of them at a time.

    Works like a binary counter: level k holds the sum of 2^k neighbours, and two of one level make one of the next.
    """

    def __init__(self) -> None:
        self._levels: list[Tensor | None] = []

    def push(self, vector: Tensor) -> Tensor | None:
        """Add the next shard's vector, which is consumed. Returns a vector that may be reused, if there is one."""
        free: Tensor | None = None
        level = 0
        while level < len(self._levels) and (left := self._levels[level]) is not None:
            left.add_(vector)
            vector, free = left, vector
            self._levels[level] = None
            level += 1
        if level == len(self._levels):
            self._levels.append(None)
        self._levels[level] = vector
        return free

    def take(self) -> Tensor:
        """The sum; the number of pushed vectors must have been a power of two."""
        held = [vector for vector in self._levels if vector is not None]
        assert len(held) == 1, "the number of shards of a rank is a power of two"
        self._levels.clear()
        return held[0]

    def close(self, last: Tensor, part: slice) -> Tensor:
        """`part` of the sum of all pushed vectors and `last`, which is not pushed: its parts become known one by one.

        With `last` the number of vectors must be a power of two. Every part is closed once."""
        for left in self._levels:
            assert left is not None, "the number of shards of a rank is a power of two"
            left[part].add_(last[part])
            last = left
        return last[part]

    def root(self, last: Tensor) -> Tensor:
        """The vector whose parts `close` returned; leaves the tree empty."""
        held = self._levels[-1] if self._levels else last
        assert held is not None
        self._levels.clear()
        return held


class RankSum:
    """Sums parts of a vector over the ranks, in place, by the tree continued above the ranks.

    A started part is sent while the next is computed. Every rank must start parts of the same lengths in the same
    order. A part whose length is no multiple of the world size travels as a copy with zeros at its end; buckets of a
    FlatLayout are multiples of 128, so no power of two up to 128 ranks needs one.
    """

    def __init__(self, group: Group) -> None:
        self._levels, self._contract = group.levels, group.contract
        self._world_size = math.prod(level.size for level in self._levels)
        self._started: list[tuple[Tensor, Tensor, Tensor, dist.Work]] = []

    def start(self, part: Tensor) -> None:
        """Send the chunks of a contiguous `part`, which must not be touched until `finish`."""
        missing = -part.numel() % self._world_size
        sent = F.pad(part, (0, missing)) if missing else part
        received = torch.empty_like(sent)
        self._contract.enter("all_to_all", sent)
        work = dist.all_to_all_single(received, sent, group=self._levels[0].ranks, async_op=True)
        assert work is not None
        self._started.append((part, sent, received, work))

    def finish(self) -> None:
        """Leave the sums in all parts that were started; equal on every rank."""
        for part, sent, received, work in self._started:
            work.wait()
            _climb(sent, received, self._levels, self._contract)
            if sent is not part:
                part.copy_(sent[: part.numel()])
        self._started.clear()


def _climb(vector: Tensor, received: Tensor, levels: Sequence[Level], contract: Contract, level: int = 0) -> None:
    """Sum the chunks received from the ranks of the lowest level, continue on the level above, and gather."""
    tree = TreeSum()
    for chunk in received.view(levels[0].size, -1).unbind():
        tree.push(chunk)
    root = tree.take()
    if len(levels) > 1:
        above = torch.empty_like(root)
        contract.enter("all_to_all", root, level=level + 1)
        dist.all_to_all_single(above, root, group=levels[1].ranks)
        _climb(root, above, levels[1:], contract, level + 1)
    contract.enter("all_gather", vector, level=level)
    _all_gather(vector, root.contiguous(), group=levels[0].ranks)


def tree_over_ranks(vector: Tensor, group: Group) -> Tensor:
    """`vector`, overwritten by the sum of every rank's vector of this length; equal on every rank."""
    if group.world_size > 1:
        across = RankSum(group)
        across.start(vector)
        across.finish()
    return vector
