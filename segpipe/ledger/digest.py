"""Exact, order-free digests of tensors: equal bits give equal digests on any device and under any split.

    H = sum over i of mix64(bits_i xor mix64(i * phi)) mod 2^64

Integer addition wraps and commutes, so chunks, ranks and parallel reductions cannot change the sum. The index makes it
sensitive to position; the raw bits make it sensitive to sign, -0.0 and one ulp. mix64 is the finalizer of SplitMix64.
Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

`digest` is H of a tensor's elements. The other functions run in every training step: they read words of 8 bytes, take
H of each block of BLOCK words, then H of these block sums.
"""

import ctypes
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segpipe import native

SOURCE = Path(__file__).with_name("digest.c")
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift, factor
_PHI = 0x9E3779B97F4A7C15
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Words; part of the definition. On a CPU, three buffers of 256 KiB fit into the L2 cache.
BLOCK = 1 << 15
THREAD_BLOCKS = 4  # least work of a thread, in blocks: 1 MiB
_CPU = torch.device("cpu")
_ARRAY, _NUMBER = ctypes.c_void_p, ctypes.c_int64
Words = NDArray[np.uint64]


def kernels() -> Any:
    """digest.c as a ctypes library, 15 times as fast as numpy; None if it cannot be compiled."""
    library = native.load(SOURCE)
    if library:
        tables, sizes = [_ARRAY] * 3, [_NUMBER] * 3
        rest = _ARRAY, _NUMBER, _ARRAY
        library.segpipe_digests.argtypes = [*tables, *sizes, *rest]
        library.segpipe_digest.argtypes = [_ARRAY, _NUMBER, _NUMBER]
        library.segpipe_digest.restype = ctypes.c_uint64
    return library


def gpu_kernels(device: torch.device) -> Any:
    """The module triton_digest, whose two launches replace about 30 and a copy of all words; None without Triton."""
    if device.type != "cuda" or not native.triton_builds():
        return None
    from segpipe.ledger import triton_digest  # takes seconds, not available everywhere

    return triton_digest


def _mix64(words: Words) -> Words:
    """mix64 of every word, by numpy, which has unsigned shifts and multiplies three times as fast as torch."""
    for places, factor in _ROUNDS:
        words = (words ^ (words >> np.uint64(places))) * np.uint64(factor)
    return words


def _mixed_indices(num: int) -> Words:
    """mix64(i * phi) for `num` indices i."""
    return _mix64(np.arange(num, dtype=np.uint64) * np.uint64(_PHI))


@lru_cache(maxsize=1)
def _block_indices() -> Words:
    return _mixed_indices(BLOCK)


def _sum(words: Words, indices: Words) -> np.uint64:
    """H of the words by numpy."""
    total: np.uint64 = _mix64(words ^ indices).sum()
    return total


def digest(tensor: Tensor) -> int:
    """H of a tensor's elements in row-major order, 0 to 2^64 - 1."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    size = flat.element_size()
    bits = flat.view(_BITS[size])
    if library := kernels():
        return int(library.segpipe_digest(bits.data_ptr(), size, len(bits)))
    words = bits.long().numpy().view(np.uint64)
    return int(_sum(words, _mixed_indices(len(words))))


def _words(tensor: Tensor) -> Tensor:
    """Bytes of a tensor as int64 (n,), padded with zero bytes; a view if the memory layout allows it."""
    tensor = tensor.detach()
    if tensor.ndim == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        octets = torch.constant_pad_nd(octets, (0, -octets.numel() % 8))
    return octets.view(torch.int64)


def digest_many(tensors: Sequence[Tensor]) -> Tensor:
    """One digest of several tensors in their order, 0-d int64 on their device; never synchronizes.

    Each tensor starts a new word, and its last word is padded with zero bytes. 4-D tensors are read in the order N, H,
    W, C, which saves a copy of channels_last tensors. CPU tensors among GPU tensors (AdamW's step counters) are copied
    to the GPU.
    """
    return digest_groups([tensors])[0]


@torch.no_grad()
def digest_groups(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """`digest_many` of every group of tensors, int64 (n,), on their device."""
    tensors = [tensor for group in groups for tensor in group]
    devices = {tensor.device for tensor in tensors} - {_CPU}
    assert len(devices) <= 1, "tensors of one device"
    device = devices.pop() if devices else _CPU

    compiled = kernels() if device == _CPU else gpu_kernels(device)
    if compiled is None:
        found = [_by_numpy(group) for group in groups]
        return torch.tensor(found, dtype=torch.int64, device=device)

    parts = [_in_words(tensor, device) for tensor in tensors]
    lengths = tuple(-(-tensor.nbytes // 8) for tensor in tensors)
    ends = tuple(itertools.accumulate(len(group) for group in groups))
    if device == _CPU:
        return _by_c(parts, lengths, ends)
    return _by_triton(parts, lengths, ends, device)


def as_tensors(*arrays: NDArray[Any]) -> list[Tensor]:
    """The arrays as tensors; read-only ones (cached frames) are copied, because torch would warn."""
    owned = (np.require(array, requirements=("C", "W")) for array in arrays)
    return [*map(torch.from_numpy, owned)]


def _in_words(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor, or a copy of it, whose memory holds whole words in digest order."""
    order = torch.channels_last if tensor.ndim == 4 else torch.contiguous_format
    whole = (
        tensor.device == device
        and tensor.nbytes % 8 == 0
        and tensor.data_ptr() % 8 == 0
        and tensor.is_contiguous(memory_format=order)
    )
    return tensor if whole else _words(tensor)


def _by_numpy(tensors: Iterable[Tensor]) -> int:
    """The digest of one group of tensors."""
    parts = [_words(each).cpu().numpy() for each in tensors]
    words = np.concatenate([np.zeros(0, np.int64), *parts]).view(np.uint64)
    blocks = np.split(words, range(BLOCK, len(words), BLOCK))
    sums = [_sum(block, _block_indices()[: len(block)]) for block in blocks]
    total = _sum(np.array(sums), _mixed_indices(len(sums)))
    return int(total.view(np.int64))


def _by_c(
    parts: Sequence[Tensor], lengths: tuple[int, ...], ends: tuple[int, ...]
) -> Tensor:
    """Digests of groups of CPU tensors by digest.c, with at most as many threads as torch has."""
    words, until = np.array(lengths, np.int64), np.array(ends, np.int64)
    addresses = np.array([part.data_ptr() for part in parts], np.uint64)

    before = np.append(0, words.cumsum())  # words before each tensor
    longest = int(np.diff(before[until], prepend=0).max(initial=0))
    most = longest // (THREAD_BLOCKS * BLOCK) + 1
    threads = min(native.threads(), most) if most > 1 else 1
    width = -(-longest // (threads * BLOCK)) * BLOCK  # words of a thread's share
    shares = torch.empty(threads, len(ends), dtype=torch.int64)
    kernels().segpipe_digests(
        addresses.ctypes.data,
        words.ctypes.data,
        until.ctypes.data,
        len(ends),
        width,
        threads,
        _block_indices().ctypes.data,
        BLOCK,
        shares.data_ptr(),
    )
    return shares.sum(0) if threads > 1 else shares[0]


def _by_triton(
    parts: list[Tensor],
    lengths: tuple[int, ...],
    ends: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Digests of groups of tensors; those on the CPU are copied to the GPU together."""
    away = [index for index, part in enumerate(parts) if part.is_cpu]
    if away:
        moved = torch.cat([parts[index] for index in away])
        moved = moved.to(device, non_blocking=True)
        pieces = torch.split(moved, [lengths[index] for index in away])
        for index, piece in zip(away, pieces, strict=True):
            parts[index] = piece
    found: Tensor = gpu_kernels(device).digests(parts, lengths, ends, BLOCK)
    return found


def float_bits(value: float | Tensor) -> Tensor:
    """Bits of a number or 0-d tensor as float64 (exact for every narrower type); int64, on its device."""
    return torch.as_tensor(value, dtype=torch.float64).detach().view(torch.int64)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Hex digest of the names, dtypes, shapes and bits of a state dict, in name order."""
    lines = []
    for name, value in sorted(state.items()):
        shape = tuple(value.shape)
        lines.append(f"{name}|{value.dtype}|{shape}|{digest(value):016x}\n")

    content = "".join(lines).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def tensor_digests(content: Mapping[str, Any]) -> dict[str, str]:
    """`state_digest` of each single tensor in nested dictionaries and lists, by path such as ema/net.bias."""
    found = {}
    for path, value in leaves(content):
        if isinstance(value, Tensor):
            name = path.replace("'", "").lstrip("/")
            found[name] = state_digest({"": value})
    return found


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries, lists and tuples, by path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}/{key!r}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from leaves(item, f"{name}/{place}")
    else:
        yield name, value
