"""The digest against integers in numpy, and what it must see."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from segpipe.ledger import digest as module
from segpipe.ledger.digest import (
    digest,
    digest_groups,
    digest_many,
    float_bits,
    leaves,
    state_digest,
    tensor_digests,
)

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


def each(bits: np.ndarray) -> np.ndarray:
    """The summands of H; bits int64, one row per tensor."""
    index = np.arange(bits.shape[-1], dtype=U) * U(0x9E3779B97F4A7C15)
    return mix64(bits.astype(np.int64).view(U) ^ mix64(index))


def reference(tensor: Tensor) -> int:
    kinds = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    bits = np.array(
        tensor.contiguous().view(views[size]).numpy().ravel().tolist(), kinds[size]
    )
    return int(each(bits).sum(dtype=U))


def number(tensor: Tensor) -> int:
    return int(digest(tensor)) % 2**64


def example(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
    return torch.randint(
        0, 2 if dtype == torch.bool else 200, shape, generator=random
    ).to(dtype)


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes a digest: C, or numpy where it cannot be compiled."""
    if request.param == "numpy":
        monkeypatch.setattr(module, "kernels", lambda: None)
    elif module.kernels() is None:
        pytest.skip("no C compiler here")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_is_the_formula(dtype: torch.dtype) -> None:
    for shape in ((1,), (7,), (3, 5, 11), (0,), ()):
        tensor = example(dtype, *shape)
        assert number(tensor) == reference(tensor)


@pytest.mark.usefixtures("way")
def test_no_element_of_another_size_has_a_digest() -> None:
    with pytest.raises(KeyError):
        number(torch.zeros(3, dtype=torch.complex128))


@pytest.mark.usefixtures("way")
def test_known_values_stay() -> None:
    assert number(torch.arange(10, dtype=torch.float32)) == reference(
        torch.arange(10, dtype=torch.float32)
    )
    assert [number(torch.tensor([value])) for value in (1, -1)] == [
        6238072747940578789,
        13029008266876403067,
    ]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype: torch.dtype) -> None:
    tensor = example(dtype, 2, 3, 4, 5)
    assert number(tensor.to(memory_format=torch.channels_last)) == number(tensor)
    assert number(tensor.transpose(1, 3)) == number(tensor.transpose(1, 3).contiguous())
    assert number(tensor[:, ::2, 1:, ::3]) == number(
        tensor[:, ::2, 1:, ::3].contiguous()
    )
    assert number(tensor.flatten()[5:]) == reference(tensor.flatten()[5:])
    assert number(tensor.transpose(1, 3)) != number(tensor)


def test_words_are_mixed_by_the_formula() -> None:
    x = example(torch.int64, 1000) * 0x0123456789ABCDEF - 2**61
    words = x.numpy().view(U)
    assert (module._mix64(words) == mix64(words)).all()


def words(*tensors: Tensor) -> int:
    """H over H of every block of the bytes of tensors, each filled up to whole words."""
    octets = [
        bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        for tensor in tensors
    ]
    whole = np.frombuffer(
        b"".join(part + bytes(-len(part) % 8) for part in octets), np.int64
    )
    starts = range(0, len(whole), module.BLOCK)
    sums = [each(whole[start : start + module.BLOCK]).sum(dtype=U) for start in starts]
    return int(each(np.array(sums, U).view(np.int64)).sum(dtype=U))


@pytest.fixture(params=[1 << 15, 3, 10])
def block(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """Block sizes, so that small tensors fill several."""
    monkeypatch.setattr(module, "BLOCK", request.param)
    module._block_indices.cache_clear()
    yield request.param
    module._block_indices.cache_clear()


def by_torch(tensor: Tensor) -> int:
    """What is computed without a compiler."""
    return module._by_numpy([tensor]) % 2**64


def many(*tensors: Tensor) -> int:
    return int(digest_many(tensors)) % 2**64


def test_words_of_many_tensors_are_the_formula(block: int) -> None:
    shapes = itertools.cycle(((3,), (2, 4), (5, 7), (1, 9, 2)))
    tensors = [
        example(dtype, *shape) for dtype, shape in zip(DTYPES, shapes, strict=False)
    ]
    tensors += [
        example(torch.float32, 9)[1:],
        example(torch.float32, 4, 6).t(),
        example(torch.float32, 0),
    ]
    assert many(*tensors) == words(*tensors)
    starts_between = [
        tensors[-3],
        example(torch.float32, 29)[9:],
        example(torch.uint8, 25)[9:],
    ]  # two words of memory
    for tensor in (*starts_between, example(torch.uint8, 9)):
        assert by_torch(tensor) == words(tensor)
    for length in (1, 2, block - 1, block, block + 1, 2 * block, 9 * block + 2):
        tensor = example(torch.float64, length)
        assert many(tensor) == words(tensor) == many(tensor[:1], tensor[1:])
        assert by_torch(tensor) == words(tensor)


def test_known_values_of_many_tensors_and_of_a_state_stay() -> None:
    """They are in every ledger and checkpoint. The tests above follow BLOCK, which is part of the definition."""
    x = torch.arange(3 * 2**15 + 5)
    assert many(x) == 17065823432701038774
    assert many(x[:7].float(), x.to(torch.uint8)) == 15667322718796810617
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(4)}
    assert state_digest(state) == "addf2f0120495c7ea23161eb92e4e3e7"
    assert (
        state_digest({"a": torch.ones(3)}) == "3cc04671c63dc9030d0b96e9f3f425c9"
    )  # an odd number


def test_words_see_the_order_of_tensors() -> None:
    one, two = example(torch.float32, 3), example(torch.float32, 4, seed=1)
    assert (
        len(
            {
                many(one, two),
                many(two, one),
                many(torch.cat([one, two])),
                many(one, -two),
                many(one),
            }
        )
        == 5
    )
    assert many() == many(one[:0]) == by_torch(one[:0]) == 0


def test_swapped_words_and_blocks_are_seen(block: int) -> None:
    x = example(torch.float64, 6 * block).unflatten(0, (6, block))
    swaps = [
        x[[1, 0, 2, 3, 4, 5]],
        x[[0, 1, 2, 3, 5, 4]],
        x.roll(1, 1),
        x.flip(1),
        x.flip(0),
        -x,
    ]
    assert len({many(x), *map(many, swaps)}) == 7


def test_words_see_a_change_in_any_byte() -> None:
    x = example(torch.float32, 5)
    found = {many(x)}
    for place in range(20):
        y = x.clone()
        y.view(torch.uint8)[place] ^= 1 << place % 8
        found.add(many(y))
    assert len(found) == 21


def test_channels_come_last_in_any_memory_format() -> None:
    x = example(torch.float32, 2, 3, 4, 5)
    other = x.to(memory_format=torch.channels_last)
    assert many(x) == many(other) == words(x.permute(0, 2, 3, 1)) != words(x)


@pytest.mark.usefixtures("block")
def test_each_of_a_batch_is_digested_as_if_alone() -> None:
    for batch in (
        example(torch.uint8, 3, 4, 5, 3),
        example(torch.uint8, 4, 7, 9),
        example(torch.float32, 2, 6),
    ):
        alone = digest_groups([[sample] for sample in batch])
        expected = [words(sample) for sample in batch]
        assert [int(value) % 2**64 for value in alone] == expected
        assert [by_torch(sample) for sample in batch] == expected


def test_numbers_are_kept_with_all_their_bits() -> None:
    for value in (0.1, -0.0, 1e300, float("inf")):
        assert float_bits(value).view(torch.float64).item().hex() == value.hex()
    loss = torch.tensor(0.1, requires_grad=True)
    assert float_bits(loss).view(torch.float64).item() == loss.item()
    assert int(float_bits(0.0)) != int(float_bits(-0.0))


def variants(x: Tensor, random: np.random.Generator) -> dict[str, Tensor]:
    """`x` after each kind of damage, all of one shape; `x` is float32 (n,), n >= 2."""
    i, j = (int(place) for place in random.choice(len(x), 2, replace=False))
    swapped, bit, sign, zero, doubled = (x.clone() for _ in range(5))
    swapped[i], swapped[j] = x[j], x[i]
    bit.view(torch.int32)[i] ^= (
        -(2**31) if (place := int(random.integers(32))) == 31 else 1 << place
    )
    sign[i] = -x[i]
    zero[j] = 0.0
    minus_zero = zero.clone()
    minus_zero[j] = -0.0
    doubled[i] = x[j]
    made = {
        "flip": x.flip(0),
        "swap": swapped,
        "one bit": bit,
        "sign": sign,
        "duplicate": doubled,
        "zero": zero,
    }
    return {
        **made,
        "minus zero": minus_zero,
        "roll": x.roll(1),
        "double": torch.cat([x, x]),
        "same": x,
    }


def test_every_damage_changes_the_digest() -> None:
    random = np.random.default_rng(0)
    for case in range(250):
        x = torch.from_numpy(
            random.standard_normal(int(random.integers(2, 40)), dtype=np.float32)
        )
        made = variants(x, random)
        assert len({number(value) for value in made.values()}) >= len(
            {v.numpy().tobytes() for v in made.values()}
        ), case
        assert number(x.clone()) == number(x)


@pytest.mark.slow
def test_a_million_damages_never_collide() -> None:
    """In numpy, whose summands agree with the product's by the tests above, and by the product."""
    random = np.random.default_rng(1)
    x = random.standard_normal((125_000, 16), dtype=np.float32)
    bits = x.view(np.int32)
    rows, i = np.arange(len(x)), random.integers(0, 16, len(x))
    j = (i + random.integers(1, 16, len(x))) % 16
    swapped, flipped, doubled, one = (
        bits.copy(),
        bits[:, ::-1],
        bits.copy(),
        bits.copy(),
    )
    swapped[rows, i], swapped[rows, j] = bits[rows, j], bits[rows, i]
    doubled[rows, i] = bits[rows, j]
    one[rows, i] ^= (
        np.left_shift(np.int64(1), random.integers(0, 32, len(x)))
        .astype(np.uint32)
        .view(np.int32)
    )
    sign, zero, minus = bits.copy(), bits.copy(), bits.copy()
    sign[rows, i] ^= np.int32(-(2**31))
    zero[rows, i], minus[rows, i] = 0, np.int32(-(2**31))
    made = (
        bits,
        swapped,
        flipped,
        doubled,
        one,
        sign,
        zero,
        minus,
        np.hstack([bits, bits]),
    )
    # One bit may be that of the sign: then both are the same damage, and one of them is enough.
    different = np.ones((len(made), len(x)), bool)
    different[4] = (one != sign).any(-1)
    found = np.stack([each(value).sum(-1, dtype=U) for value in made])
    assert different.sum() > 1_000_000
    assert np.unique(found).size == different.sum()
    assert number(torch.from_numpy(x[77])) == found[0, 77]
    # The product itself on a part of them, which are copied tensor by tensor.
    tensors = [torch.from_numpy(row.copy()) for value in made for row in value[:500]]
    product = digest_groups([[row] for row in tensors]).numpy().reshape(len(made), -1)
    assert np.unique(product).size == different[:, :500].sum()
    assert by_torch(torch.from_numpy(x[77])) == int(product[0, 77]) % 2**64


@pytest.mark.skipif(
    not hasattr(torch, "hash_tensor"), reason="this torch has no hash_tensor"
)
def test_the_control_torch_hash_tensor_sees_neither_swap_nor_double() -> None:
    x = example(torch.float32, 8)
    swapped = x[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert torch.hash_tensor(swapped) == torch.hash_tensor(x)
    assert torch.hash_tensor(torch.cat([x, x])) == 0
    assert number(swapped) != number(x)
    assert number(torch.cat([x, x])) not in (0, number(x))


def test_the_control_an_l1_norm_sees_neither_sign_nor_order() -> None:
    x = example(torch.float32, 8)
    signed, swapped = x * torch.tensor([-1.0] + [1.0] * 7), x[[1, 0, 2, 3, 4, 5, 6, 7]]
    assert signed.norm(1) == x.norm(1)
    assert torch.allclose(swapped.norm(1), x.norm(1))
    assert len({number(value) for value in (x, signed, swapped)}) == 3


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


def test_leaves_of_dictionaries_lists_and_tuples_are_named_by_their_path() -> None:
    tree = {"a": [1, (2, {"b": 3})], "c": 4}
    assert list(leaves(tree)) == [
        ("/'a'/0", 1),
        ("/'a'/1/0", 2),
        ("/'a'/1/1/'b'", 3),
        ("/'c'", 4),
    ]


def test_every_tensor_of_a_state_has_a_digest_by_its_path() -> None:
    first, second = torch.arange(3), torch.ones(2, 2)
    found = tensor_digests({"ema": {"net.bias": first}, "step": 3, "m": [second]})
    assert found == {
        "ema/net.bias": state_digest({"": first}),
        "m/0": state_digest({"": second}),
    }
