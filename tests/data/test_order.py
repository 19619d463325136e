"""Order: every sample once per epoch, for any number of ranks and wherever the run was stopped."""

import numpy as np
import pytest

from segpipe.data.order import Order, permutation
from segpipe.keys import generator, sample_key


def test_values_are_frozen():
    assert permutation(0, 0, 8).tolist() == [2, 4, 0, 7, 6, 1, 5, 3]
    assert permutation(7, 3, 8).tolist() == [6, 3, 2, 5, 7, 1, 4, 0]


@pytest.mark.parametrize("n", [1, 2, 367, 5000])
def test_every_sample_once(n):
    order = permutation(0, 0, n)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


def test_seeds_and_epochs_give_other_orders():
    orders = {
        tuple(permutation(seed, epoch, 50).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_permutation_is_fair():
    """Every sample is equally likely at the first place: chi-square with 9 degrees of freedom, p = 0.001."""
    first = [int(permutation(0, epoch, 10)[0]) for epoch in range(2000)]
    counts = np.bincount(first, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9


def test_the_cached_order_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        permutation(0, 0, 5)[0] = 1


def test_batches_span_epochs_and_drop_nothing():
    order = Order(seed=3, num_samples=10, shards=2, samples_per_shard=3)
    seen = [
        pair
        for step in range(5)
        for shard in range(2)
        for pair in order.shard(step, shard)
    ]
    assert seen == [
        (epoch, index) for epoch in range(3) for index in permutation(3, epoch, 10)
    ]
    assert {epoch for epoch, _ in order.shard(1, 1)} == {0, 1}


def test_a_batch_may_be_larger_than_the_data():
    order = Order(seed=0, num_samples=2, shards=1, samples_per_shard=5)
    assert [epoch for epoch, _ in order.shard(0, 0)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_the_number_of_ranks_does_not_matter(ranks):
    """Each rank takes only its own shards; together they are the same global batch."""
    order = Order(seed=5, num_samples=37, shards=16, samples_per_shard=2)
    whole = [order.sample(3 * 32 + position) for position in range(32)]
    per_rank = 16 // ranks
    parts = [
        order.shard(3, rank * per_rank + place)
        for rank in range(ranks)
        for place in range(per_rank)
    ]
    assert [pair for part in parts for pair in part] == whole


def test_resuming_is_arithmetic():
    fresh, used = (
        Order(seed=1, num_samples=11, shards=4, samples_per_shard=2) for _ in range(2)
    )
    for step in range(50):
        used.shard(step, 0)
    assert fresh.shard(50, 3) == used.shard(50, 3)


def test_a_carried_generator_cannot_resume():
    """The control: a shuffle that carries its state gives another order when it starts in the middle."""
    carried = generator(sample_key(0, 0, 0, "order"))
    orders = [carried.permutation(50).tolist() for _ in range(3)]
    resumed = generator(sample_key(0, 0, 0, "order")).permutation(50).tolist()
    assert resumed != orders[2]
    permutation.cache_clear()
    kept = permutation(0, 2, 50).tolist()
    permutation.cache_clear()
    assert permutation(0, 2, 50).tolist() == kept
