"""Draws: repeats of rare samples and shares of data sets are exact, and a function of the position alone."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from segpipe.data.order import (
    Draws,
    Order,
    Passes,
    PixelCounts,
    check_given_weights,
    draws,
    merged_counts,
    permutation,
    pixels_seen,
    repeat_factors,
    repeats_by_class,
    repeats_by_sequence,
    whole_shares,
)
from segpipe.errors import ConfigError
from segpipe.keys import sample_key

REPEATS = np.array([1.0, 1.0, 1.25, 1.0, 2.5, 1.0, 3.0, 1.75])  # 12.5 together


def mixture(seed: int = 3) -> Draws:
    sets = [
        Passes(seed, 0, 0, np.ones(6)),
        Passes(seed, 1, 6, np.ones(4)),
        Passes(seed, 2, 10, REPEATS),
    ]
    return Draws(seed, sets, [12, 3, 5])


def drawn(order: Draws, epochs: range) -> list[tuple[int, int]]:
    return [
        order.sample(position)
        for position in range(epochs.start * order.length, epochs.stop * order.length)
    ]


def test_an_order_takes_the_positions_that_it_was_given() -> None:
    order, found = Order(3, 18, 2, 4, mixture()), []
    for step, shard in ((0, 0), (0, 1), (1, 0)):
        found += order.shard(step, shard)
    assert found == [mixture().sample(position) for position in range(12)]


def test_a_pass_holds_every_sample_as_often_as_its_repeats_rounded() -> None:
    order = Passes(0, 0, 100, REPEATS)
    assert order.length == 13
    scaled = REPEATS * 13 / 12.5
    for turn in range(50):
        counts = Counter(order.draw(turn * 13 + place)[1] - 100 for place in range(13))
        for index, wanted in enumerate(scaled):
            assert np.floor(wanted) <= counts[index] <= np.ceil(wanted), (turn, index)


def test_repeats_are_exact_on_average() -> None:
    order = Passes(0, 0, 0, REPEATS)
    counts = Counter(order.draw(number)[1] for number in range(13 * 2000))
    found = np.array([counts[index] for index in range(8)]) / 2000
    np.testing.assert_allclose(
        found, REPEATS * 13 / 12.5, atol=0.05
    )  # 4.5 standard deviations of a fair coin


def test_no_two_draws_share_a_key() -> None:
    found = drawn(mixture(), range(40))
    assert len(set(found)) == len(found) == 40 * 20
    assert len(
        {sample_key(3, epoch, index, "augment") for epoch, index in found}
    ) == len(found)


def test_every_epoch_has_the_exact_shares_and_every_set_its_whole_passes() -> None:
    found = drawn(mixture(), range(40))
    for epoch in range(40):
        kinds = Counter(
            np.searchsorted([6, 10], index, side="right")
            for _, index in found[20 * epoch : 20 * epoch + 20]
        )
        assert [kinds[0], kinds[1], kinds[2]] == [12, 3, 5], epoch
    first, second = (
        [index for _, index in found if index < 6],
        [index for _, index in found if 6 <= index < 10],
    )
    for own, num in ((first, 6), (second, 4)):
        for start in range(0, len(own), num):
            assert len(set(own[start : start + num])) == num, (
                "each sample once per pass, also over the end of an epoch"
            )


def test_values_are_frozen() -> None:
    found = [mixture().sample(position) for position in (0, 1, 2, 19, 20, 1234)]
    assert found == [(0, 1), (0, 4), (0, 5), (0, 13), (0, 15), (123, 0)]


def test_a_position_depends_on_nothing_before_it() -> None:
    whole = drawn(mixture(), range(6))
    backwards = mixture()
    assert [backwards.sample(position) for position in reversed(range(120))] == whole[
        ::-1
    ]
    assert drawn(mixture(), range(4, 6)) == whole[80:]
    assert drawn(mixture(4), range(6)) != whole


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_number_of_ranks_does_not_matter(ranks: int) -> None:
    order = Order(3, 18, 8, 3, mixture())
    per_rank = 8 // ranks
    parts = [
        order.shard(5, rank * per_rank + place)
        for rank in range(ranks)
        for place in range(per_rank)
    ]
    assert [member for part in parts for member in part] == [
        order.sample(120 + place) for place in range(24)
    ]


def test_sets_of_one_size_are_shuffled_apart() -> None:
    order = Draws(
        0, [Passes(0, 0, 0, np.ones(50)), Passes(0, 1, 50, np.ones(50))], [50, 50]
    )
    found = [index for _, index in drawn(order, range(1))]
    first, second = (
        [index for index in found if index < 50],
        [index - 50 for index in found if index >= 50],
    )
    assert first != second
    assert first != [index for index in permutation(0, 0, 50).tolist() if index < 50]


def test_shares_are_whole_and_exact() -> None:
    assert whole_shares([1, 2], 300) == [100, 200]
    assert whole_shares([0.1, 0.2, 0.7], 10) == [1, 2, 7]
    assert whole_shares([1, 1, 1], 10) == [4, 3, 3]
    for total in range(5, 60):
        found = whole_shares([3, 2.5, 1.7], total)
        assert sum(found) == total
        assert all(
            abs(one - weight * total / 7.2) < 1
            for one, weight in zip(found, (3, 2.5, 1.7), strict=True)
        )
    with pytest.raises(
        ConfigError,
        match=r"data\.mix\[1\] has weight 1, which is less than 1 of the 10 samples",
    ):
        whole_shares([99, 1], 10)


def test_repeat_factors_are_those_of_the_definition() -> None:
    """10 images; class 0 is in all, class 1 in 4, class 2 in 1."""
    present = np.zeros((10, 3), bool)
    present[:, 0], present[:4, 1], present[0, 2] = True, True, True
    found = repeat_factors(present, 0.5, np.ones(10))
    expected = [np.sqrt(5), *[np.sqrt(1.25)] * 3, *[1.0] * 6]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (repeat_factors(present, 0.1, np.ones(10)) == 1).all()
    heavy = np.array(
        [5.0] + [1.0] * 9
    )  # the first image is drawn five times as often: class 2 is in 5 of 14
    assert repeat_factors(present, 0.5, heavy)[0] == pytest.approx(
        np.sqrt(0.5 * 14 / 5)
    )
    assert (repeat_factors(np.zeros((3, 2), bool), 1.0, np.ones(3)) == 1).all()


COUNTS = PixelCounts(np.array([[6, 0], [3, 3], [5, 1], [6, 0]]), np.arange(4))


def test_the_plain_order_is_left_alone() -> None:
    assert draws(None, [(4, 1.0)], 0) is None
    assert draws(np.ones(4), [(4, 1.0)], 0) is not None


def test_balanced_samples_come_more_often() -> None:
    """Class 1 is in half of the images, so with a threshold of 1 these come sqrt(2) times as often."""
    sets = [(4, 1.0)]
    order = draws(repeats_by_class(1.0, sets, COUNTS), sets, 0)
    assert order is not None
    counts = Counter(order.sample(position)[1] for position in range(5 * 1000))
    assert (counts[1] + counts[2]) / (counts[0] + counts[3]) == pytest.approx(
        np.sqrt(2), rel=0.01
    )
    assert min(counts.values()) >= 1000


def test_every_sequence_comes_equally_often() -> None:
    """Each in its own data set of a mixture, whose share stays; control: without repeats, as often as it has images."""
    names = [["dusk", *["noon"] * 5, *["rain"] * 3], ["a", "b", "b"]]
    flat = [*names[0], *names[1]]
    sets = [(9, 3.0), (3, 1.0)]

    def shares(repeats: NDArray[np.float64] | None) -> dict[str, float]:
        order = draws(repeats, sets, 0)
        assert order is not None
        numbers = range(400 * order.length)
        counts = Counter(flat[order.sample(number)[1]] for number in numbers)
        return {name: counts[name] / len(numbers) for name in counts}

    even = pytest.approx(dict.fromkeys(["dusk", "noon", "rain"], 1 / 4), rel=0.02)
    found = shares(repeats_by_sequence(names))
    assert {name: found[name] for name in ("dusk", "noon", "rain")} == even
    assert found["a"] == pytest.approx(found["b"], rel=0.02)
    assert found["a"] + found["b"] == pytest.approx(1 / 4, rel=0.02)
    assert shares(None)["dusk"] == pytest.approx(1 / 12, rel=0.02)
    with pytest.raises(ConfigError, match=r"belong to one sequence, dusk\. Set"):
        repeats_by_sequence([["dusk"] * 4])


def test_pixels_are_weighed_as_training_meets_them() -> None:
    assert pixels_seen(None, [(4, 1.0)], COUNTS).tolist() == [20, 4]
    assert pixels_seen(None, [(4, 1.0)], COUNTS).dtype == np.int64
    mixed = pixels_seen(
        None, [(2, 3.0), (2, 1.0)], COUNTS
    )  # the first two images make three quarters of the samples
    np.testing.assert_allclose(
        mixed, [0.75 * 4.5 + 0.25 * 5.5, 0.75 * 1.5 + 0.25 * 0.5]
    )
    sets = [(4, 1.0)]
    balanced = pixels_seen(repeats_by_class(1.0, sets, COUNTS), sets, COUNTS)
    root = np.sqrt(2)
    np.testing.assert_allclose(
        balanced, [(12 + 8 * root) / (2 + 2 * root), 4 * root / (2 + 2 * root)]
    )
    some = PixelCounts(
        COUNTS.pixels[[0, 2]], np.array([0, 2])
    )  # of each set one image was counted
    np.testing.assert_allclose(
        pixels_seen(None, [(2, 3.0), (2, 1.0)], some), [0.75 * 6 + 0.25 * 5, 0.25]
    )


def test_counts_of_all_ranks_are_put_together() -> None:
    parts = [
        PixelCounts(COUNTS.pixels[rank::3], COUNTS.indices[rank::3])
        for rank in range(3)
    ]
    found = merged_counts(parts)
    assert np.array_equal(found.pixels, COUNTS.pixels)
    assert np.array_equal(found.indices, COUNTS.indices)


def test_weights_that_do_not_fit_the_classes_are_refused() -> None:
    check_given_weights([0.0, 2.0], ["sky", "road"])
    with pytest.raises(ConfigError, match="3 weights, but the data set has 2 classes"):
        check_given_weights([1.0, 1.0, 1.0], ["sky", "road"])
    with pytest.raises(ConfigError, match="only zeros"):
        check_given_weights([0.0, 0.0], ["sky", "road"])
