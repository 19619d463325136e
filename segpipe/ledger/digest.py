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
# Argument types of digest.c.
ARGUMENTS: list[Any] = [*[_ARRAY] * 3, *[_NUMBER] * 3, _ARRAY, _NUMBER, _ARRAY]


def kernels() -> Any:
    """digest.c as a ctypes library, 15 times as fast as numpy; None if it cannot be compiled."""
    library = native.load(SOURCE)
    if library:
        library.segpipe_digests.argtypes = ARGUMENTS
        library.segpipe_digest.argtypes = [_ARRAY, _NUMBER, _NUMBER]
        library.segpipe_digest.restype = _NUMBER
    return library


def gpu_kernels(device: torch.device) -> Any:
    """The module triton_digest, whose two launches replace about 30 and a copy of all words; None without Triton."""
    if device.type != "cuda" or not native.triton_builds():
        return None
    from segpipe.ledger import triton_digest  # takes seconds, not available everywhere

    return triton_digest


def _mix64_(x: Tensor) -> Tensor:
    """mix64 in place, on the CPU; by numpy, which has unsigned shifts and multiplies three times as fast as torch."""
    words = x.numpy().view(np.uint64)
    shifted = np.empty_like(words)
    for places, factor in _ROUNDS:
        np.right_shift(words, np.uint64(places), out=shifted)
        np.bitwise_xor(words, shifted, out=words)
        np.multiply(words, np.uint64(factor), out=words)
    return x


def digest(tensor: Tensor) -> Tensor:
    """H of a tensor's elements in row-major order, 0-d int64 on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    size = flat.element_size()
    bits = flat.view(_BITS[size])
    if library := kernels():
        return torch.tensor(library.segpipe_digest(bits.data_ptr(), size, len(bits)))
    return _mix64_(bits ^ _mixed_indices(len(bits))).sum()


def _mixed_indices(num: int) -> Tensor:
    """mix64(i * phi) for `num` indices i, int64."""
    indices = np.arange(num, dtype=np.uint64) * np.uint64(_PHI)
    return _mix64_(torch.from_numpy(indices.view(np.int64)))


@lru_cache(maxsize=1)
def _block_indices() -> Tensor:
    return _mixed_indices(BLOCK)


def _words(tensor: Tensor) -> Tensor:
    """Bytes of a tensor as int64 (n,), padded with zero bytes; a view if the memory layout allows it."""
    tensor = tensor.detach()
    if tensor.ndim == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        padded = octets.new_zeros(octets.numel() + -octets.numel() % 8)
        padded[: octets.numel()] = octets
        octets = padded
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
        found = [int(_digest_words(_joined(group))) for group in groups]
        return torch.tensor(found, dtype=torch.int64, device=device)

    parts = _in_words(tensors, device)
    lengths = tuple(-(-tensor.nbytes // 8) for tensor in tensors)
    ends = tuple(itertools.accumulate(len(group) for group in groups))
    if device == _CPU:
        return _by_c(parts, lengths, ends)
    return _by_triton(parts, lengths, ends, device)


def as_tensors(*arrays: NDArray[Any]) -> list[Tensor]:
    """The arrays as tensors; read-only ones (cached frames) are copied, because torch would warn."""
    owned = (np.require(array, requirements=("C", "W")) for array in arrays)
    return [*map(torch.from_numpy, owned)]


def _in_words(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Each tensor, or a copy of it, whose memory holds whole words in digest order."""
    parts = []
    for tensor in tensors:
        order = torch.contiguous_format
        if tensor.ndim == 4:
            order = torch.channels_last

        whole = (
            tensor.device == device
            and tensor.nbytes % 8 == 0
            and tensor.data_ptr() % 8 == 0
            and tensor.is_contiguous(memory_format=order)
        )
        parts.append(tensor if whole else _words(tensor))
    return parts


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """The words of all tensors, int64 (n,), on the CPU."""
    words = [_words(each).cpu() for each in tensors]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *words])


def _by_c(
    parts: Sequence[Tensor], lengths: tuple[int, ...], ends: tuple[int, ...]
) -> Tensor:
    """Digests of groups of CPU tensors by digest.c, with at most as many threads as torch has."""
    words, until, longest = _tables(lengths, ends)
    addresses = np.array([part.data_ptr() for part in parts], np.uint64)

    threads = min(native.threads(), longest // (THREAD_BLOCKS * BLOCK) + 1)
    width = -(-longest // (threads * BLOCK)) * BLOCK  # words of a thread's share
    shares = torch.empty(threads, len(ends), dtype=torch.int64)
    kernels().segpipe_digests(
        addresses.ctypes.data,
        words.ctypes.data,
        until.ctypes.data,
        len(ends),
        width,
        threads,
        _block_indices().data_ptr(),
        BLOCK,
        shares.data_ptr(),
    )
    return shares.sum(0) if threads > 1 else shares[0]


@lru_cache(maxsize=64)
def _tables(
    lengths: tuple[int, ...], ends: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Both as arrays, and the number of words of the longest group."""
    words, until = np.array(lengths, np.int64), np.array(ends, np.int64)
    before = np.append(0, np.cumsum(words))  # words before each tensor
    of_groups = np.diff(before[until], prepend=0)
    return words, until, int(of_groups.max(initial=0))


def _by_triton(
    parts: list[Tensor],
    lengths: tuple[int, ...],
    ends: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Digests of groups of tensors; those on the CPU are copied to the GPU together."""
    away = [index for index, part in enumerate(parts) if part.is_cpu]
    if away:
        words = [parts[index].view(-1).view(torch.int64) for index in away]
        moved = torch.cat(words).to(device, non_blocking=True)
        pieces = torch.split(moved, [len(each) for each in words])
        for index, piece in zip(away, pieces, strict=True):
            parts[index] = piece
    found: Tensor = gpu_kernels(device).digests(parts, lengths, ends, BLOCK)
    return found


def _digest_words(words: Tensor) -> Tensor:
    """The digest of words (n,) on the CPU, 0-d int64, by numpy."""
    of_blocks = [
        _mix64_(part ^ _block_indices()[: len(part)]).sum()
        for part in torch.split(words, BLOCK)
    ]
    return digest(torch.stack(of_blocks))


def float_bits(value: float | Tensor) -> Tensor:
    """Bits of a number or 0-d tensor as float64 (exact for every narrower type); int64, on its device."""
    return torch.as_tensor(value, dtype=torch.float64).detach().view(torch.int64)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Hex digest of the names, dtypes, shapes and bits of a state dict, in name order."""
    lines = []
    for name, value in sorted(state.items()):
        number = int(digest(value)) % 2**64
        lines.append(f"{name}|{value.dtype}|{tuple(value.shape)}|{number:016x}\n")

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
