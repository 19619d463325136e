# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""digest.c in Triton: digests of the words of many tensors on a GPU, in two launches for any number of tensors."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048  # words that a program reads
# Constants and formula are those of digest.py; `segpipe gpu-check` compares the results.


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mixed_indices(indices):
    return _mix64(indices.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _add_to_blocks(addresses, pieces, sums, chunk: tl.constexpr):
    """Adds the mixed words of one piece to the sum of their block; integers, so the order does not matter.

    addresses: of each tensor, int64. pieces: the table of `_pieces`, one row per program. sums: of each block.
    """
    at = pieces + tl.program_id(0).to(tl.int64) * 5
    part = tl.load(at)
    start = tl.load(at + 1)
    count = tl.load(at + 2)
    index = tl.load(at + 3)
    block = tl.load(at + 4)
    lane = tl.arange(0, chunk)
    words = tl.load(addresses + part).to(tl.pointer_type(tl.uint64)) + start + lane
    bits = tl.load(words, mask=lane < count, other=0)
    mixed = _mix64(bits ^ _mixed_indices(index + lane))
    total = tl.sum(tl.where(lane < count, mixed, tl.zeros_like(mixed)), 0)
    tl.atomic_add(sums + block, total.to(tl.int64, bitcast=True))


@triton.jit
def _join_blocks(sums, edges, digests, chunk: tl.constexpr):
    """The digest of one group: H of its block sums, taken as words with indices from 0.

    edges: first block of each group, and the end of the last.
    """
    group = tl.program_id(0)
    first = tl.load(edges + group)
    end = tl.load(edges + group + 1)
    total = tl.zeros((chunk,), tl.uint64)
    for place in range(first, end, chunk):
        block = place + tl.arange(0, chunk)
        found = tl.load(sums + block, mask=block < end, other=0)
        bits = found.to(tl.uint64, bitcast=True)
        mixed = _mix64(bits ^ _mixed_indices(block - first))
        total += tl.where(block < end, mixed, tl.zeros_like(mixed))
    tl.store(digests + group, tl.sum(total, 0).to(tl.int64, bitcast=True))


def digests(
    parts: Sequence[Tensor], lengths: tuple[int, ...], ends: tuple[int, ...], block: int
) -> Tensor:
    """Digest of each group of consecutive `parts`, int64 (n,), on their device; the host does not wait.

    Every part holds `lengths` words, contiguous in memory and aligned to 8 bytes. Group g ends before part ends[g].
    Each block of `block` words has its own sum.
    """
    device = parts[0].device
    pieces, edges, num_blocks = _pieces(lengths, ends, block, device)
    sums = torch.zeros(num_blocks, dtype=torch.int64, device=device)
    if len(pieces):
        places = np.array([part.data_ptr() for part in parts], np.int64)
        addresses = _uploaded(places, device)
        _add_to_blocks[(len(pieces),)](addresses, pieces, sums, chunk=CHUNK)
    found = torch.empty(len(ends), dtype=torch.int64, device=device)
    _join_blocks[(len(ends),)](sums, edges, found, chunk=64)
    return found


@lru_cache(maxsize=64)
def _pieces(
    lengths: tuple[int, ...], ends: tuple[int, ...], block: int, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """The work of each program, int64 (n, 5): part, its first word, number of words, position in the block, block. Then
    the first block of each group and the end of the last, int64; and the number of blocks."""
    rows = []
    edges = [0]
    start = 0
    for end in ends:
        place = 0  # in the words of the group
        for part in range(start, end):
            done = 0
            while done < lengths[part]:
                inside = place % block
                count = min(CHUNK, lengths[part] - done, block - inside)
                number = edges[-1] + place // block
                rows.append((part, done, count, inside, number))
                done += count
                place += count
        edges.append(edges[-1] - (-place // block))
        start = end
    pieces = _uploaded(np.array(rows, np.int64).reshape(-1, 5), device)
    return pieces, _uploaded(np.array(edges, np.int64), device), edges[-1]


def _uploaded(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device, from page-locked memory, so that the host need not wait."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    with suppress(RuntimeError):  # if pages cannot be locked, the host waits
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
