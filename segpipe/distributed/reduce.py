"""The sum over the logical shards as one fixed balanced binary tree, whatever the number of processes.

Floating-point addition is not associative, so a sum's bits are a function of its order. The order here is that of the
shards: neighbours are added, then neighbours of the results, up to the root. A rank holds a power-of-two run of
neighbouring shards, hence a whole subtree; the top of the tree is summed across ranks on chunks, after an all-to-all,
and an all-gather brings the root back: the traffic of a ring all-reduce. Collectives only move bytes here, so the
backend's algorithm, its protocol and its topology cannot reach the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from segpipe.distributed.group import Group

# torch 2.14 warns at each use of the old name; torch 2.11 has only that.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FlatLayout:
    """Places for a list of tensors in one flat fp32 vector, in list order, each with its own strides.

    Views share the tensors' memory format, so that a channels_last gradient is copied and used without a reorder.
    """

    def __init__(self, like: Sequence[Tensor], *, pad_to: int) -> None:
        self._entries: list[tuple[torch.Size, tuple[int, ...], int]] = []
        offset = 0
        for tensor in like:
            self._entries.append((tensor.shape, torch.empty_like(tensor).stride(), offset))
            offset += tensor.numel()
        self.size = -(-offset // pad_to) * pad_to
        self.device = like[0].device

    def new(self) -> Tensor:
        """A fresh vector; the padding is zero."""
        return torch.zeros(self.size, dtype=torch.float32, device=self.device)

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
        """Add the next shard's vector, which is consumed. Returns a vector that is free for reuse, if there is one."""
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


def tree_over_ranks(vector: Tensor, group: Group) -> Tensor:
    """The sum over ranks of equally long vectors, by the same tree continued above the ranks; equal on every rank.

    The length must be a multiple of the world size. Raises nothing of its own; a missing rank ends in the group's
    timeout.
    """
    ranks = group.world_size
    if ranks == 1:
        return vector
    received = torch.empty_like(vector)
    dist.all_to_all_single(received, vector)
    tree = TreeSum()
    for chunk in received.view(ranks, -1).unbind():
        tree.push(chunk)
    root = tree.take()
    _all_gather(vector, root.contiguous())
    return vector
