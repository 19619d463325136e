"""The digest against integers in numpy, and what it must see."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from segpipe.determinism import digest as module
from segpipe.determinism.digest import digest, state_digest

pytestmark = pytest.mark.usefixtures("strict_torch")
DTYPES = (
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.int64,
)
U = np.uint64


def mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return x ^ (x >> U(31))


def each(bits: np.ndarray, offset: int = 0) -> np.ndarray:
    """The summands of H; bits int64, one row per tensor."""
    index = np.arange(offset, offset + bits.shape[-1], dtype=U) * U(0x9E3779B97F4A7C15)
    return mix64(bits.astype(np.int64).view(U) ^ mix64(index))


def reference(tensor: Tensor, offset: int = 0) -> int:
    kinds = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    bits = np.array(tensor.contiguous().view(views[size]).numpy().ravel().tolist(), kinds[size])
    return int(each(bits, offset).sum(dtype=U))


def number(tensor: Tensor, offset: int = 0) -> int:
    return int(digest(tensor, offset=offset)) % 2**64


def example(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 200, shape, generator=random).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_is_the_formula(dtype: torch.dtype) -> None:
    for shape in ((1,), (7,), (3, 5, 11), (0,), ()):
        tensor = example(dtype, *shape)
        assert number(tensor) == reference(tensor)
        assert number(tensor, 12345) == reference(tensor, 12345)


def test_known_values_stay() -> None:
    assert number(torch.arange(10, dtype=torch.float32)) == reference(torch.arange(10, dtype=torch.float32))
    assert [number(torch.tensor([value])) for value in (1, -1)] == [6238072747940578789, 13029008266876403067]


def test_chunks_add_up_by_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = example(torch.float32, 1000)
    whole = number(tensor)
    for cuts in ((500,), (1, 999), (100, 333, 334)):
        edges = (0, *cuts, 1000)
        parts = [number(tensor[a:b], a) for a, b in itertools.pairwise(edges)]
        assert sum(parts) % 2**64 == whole
    assert (number(tensor[:500]) + number(tensor[500:])) % 2**64 != whole  # the control: without the offset
    monkeypatch.setattr(module, "CHUNK", 7)
    assert number(tensor) == whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    tensor = example(dtype, 2, 3, 4, 5)
    assert number(tensor.to(memory_format=torch.channels_last)) == number(tensor)
    assert number(tensor.transpose(1, 3)) == number(tensor.transpose(1, 3).contiguous())
    assert number(tensor[:, ::2, 1:, ::3]) == number(tensor[:, ::2, 1:, ::3].contiguous())
    assert number(tensor.flatten()[5:]) == reference(tensor.flatten()[5:])
    assert number(tensor.transpose(1, 3)) != number(tensor)


def variants(x: Tensor, random: np.random.Generator) -> dict[str, Tensor]:
    """`x` after each kind of damage, all of one shape; `x` is float32 (n,), n >= 2."""
    i, j = (int(place) for place in random.choice(len(x), 2, replace=False))
    swapped, bit, sign, zero, doubled = (x.clone() for _ in range(5))
    swapped[i], swapped[j] = x[j], x[i]
    bit.view(torch.int32)[i] ^= -(2**31) if (place := int(random.integers(32))) == 31 else 1 << place
    sign[i] = -x[i]
    zero[j] = 0.0
    minus_zero = zero.clone()
    minus_zero[j] = -0.0
    doubled[i] = x[j]
    made = {"flip": x.flip(0), "swap": swapped, "one bit": bit, "sign": sign, "duplicate": doubled, "zero": zero}
    return {**made, "minus zero": minus_zero, "roll": x.roll(1), "double": torch.cat([x, x]), "same": x}


def test_every_damage_changes_the_digest() -> None:
    random = np.random.default_rng(0)
    for case in range(250):
        x = torch.from_numpy(random.standard_normal(int(random.integers(2, 40)), dtype=np.float32))
        made = variants(x, random)
        assert len({number(value) for value in made.values()}) >= len({v.numpy().tobytes() for v in made.values()}), (
            case
        )
        assert number(x.clone()) == number(x)


def test_twenty_thousand_random_pairs_never_collide() -> None:
    """The summands in numpy, so that many cases are cheap; numpy and torch agree by the tests above."""
    random = np.random.default_rng(1)
    x = random.standard_normal((20_000, 16), dtype=np.float32)
    bits = x.view(np.int32)
    rows, i = np.arange(len(x)), random.integers(0, 16, len(x))
    j = (i + random.integers(1, 16, len(x))) % 16
    swapped, flipped, doubled, one = bits.copy(), bits[:, ::-1], bits.copy(), bits.copy()
    swapped[rows, i], swapped[rows, j] = bits[rows, j], bits[rows, i]
    doubled[rows, i] = bits[rows, j]
    one[rows, i] ^= np.left_shift(np.int64(1), random.integers(0, 32, len(x))).astype(np.uint32).view(np.int32)
    found = np.stack(
        [each(v).sum(-1, dtype=U) for v in (bits, swapped, flipped, doubled, one, np.hstack([bits, bits]))]
    )
    assert np.unique(found).size == found.size
    assert number(torch.from_numpy(x[77])) == found[0, 77]


@pytest.mark.skipif(not hasattr(torch, "hash_tensor"), reason="this torch has no hash_tensor")
def test_the_control_torch_hash_tensor_sees_neither_swap_nor_double() -> None:
    x = example(torch.float32, 8)
    swapped = x[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert torch.hash_tensor(swapped) == torch.hash_tensor(x)
    assert torch.hash_tensor(torch.cat([x, x])) == 0
    assert number(swapped) != number(x)
    assert number(torch.cat([x, x])) not in (0, number(x))


def test_state_digest_sees_names_shapes_dtypes_and_bits_but_no_order() -> None:
    a, b = example(torch.float32, 2, 6), example(torch.float32, 4, seed=1)
    whole = state_digest({"a": a, "b": b})
    assert state_digest({"b": b.clone(), "a": a.clone()}) == whole
    others = [
        {"a": a, "c": b},
        {"a": a},
        {"a": b, "b": a},
        {"a": a.view(3, 4), "b": b},
        {"a": a.view(torch.int32), "b": b},
        {"a": a.double(), "b": b},
        {"a": -a, "b": b},
        {"a": a.nextafter(torch.tensor(9.0)), "b": b},
        {},
    ]
    found = [state_digest(state) for state in others]
    assert len({whole, *found}) == len(others) + 1
