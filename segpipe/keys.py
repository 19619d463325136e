"""Randomness as a function of names: no generator is passed around, so none can be shared or lost."""

import hashlib
import struct

import numpy as np


def sample_key(seed: int, epoch: int, index: int, stream: str) -> int:
    """128-bit key for one purpose (`stream`) of one sample in one epoch; numbers from 0 to 2**63 - 1.

    Different arguments give unrelated keys. Nothing else affects the value: not process, machine or library version.
    """
    packed = struct.pack("<qqq", seed, epoch, index) + stream.encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=16).digest(), "little")


def torch_seed(seed: int, epoch: int, index: int, stream: str) -> int:
    """`sample_key` cut to the 63 bits that torch's generators take."""
    return sample_key(seed, epoch, index, stream) & (2**63 - 1)


def generator(key: int) -> np.random.Generator:
    """Counter-based generator that starts at `key`; making one costs about 15 us."""
    return np.random.Generator(np.random.Philox(key=key))
