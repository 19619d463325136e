"""Cached samples: no bit changes, the budget holds, and a copy for another process starts empty."""

import pickle

import numpy as np
import pytest
import torch
from tables import CAMVID

from segpipe.data import Sample, ring
from segpipe.data.augment import Augmenter
from segpipe.data.catalog import ClassTable
from segpipe.data.data_set import CachedSamples, Samples
from segpipe.data.loader import eval_images, train_batches
from segpipe.data.order import Order
from segpipe.data.samples import open_samples
from segpipe.settings.groups import AugmentConfig, DataConfig

PAIR_BYTES = 64 * 64 * 4


class Counted:
    """Samples that count how often each is read."""

    classes: ClassTable = CAMVID

    def __init__(self, num: int = 8) -> None:
        self.num, self.reads = num, [0] * num

    def __len__(self) -> int:
        return self.num

    def name(self, index: int) -> str:
        return f"sample{index}"

    def read(self, index: int) -> Sample:
        self.reads[index] += 1
        random = np.random.default_rng(index)
        image = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        return image, random.integers(0, 11, (64, 64), dtype=np.uint8)


def test_a_kept_sample_is_read_once_and_equal() -> None:
    samples, plain = Counted(), Counted()
    cached = CachedSamples(samples, 1)
    for _ in range(3):
        for index in (3, 0, 5):
            for found, expected in zip(
                cached.read(index), plain.read(index), strict=True
            ):
                np.testing.assert_array_equal(found, expected)
    assert samples.reads == [1, 0, 0, 1, 0, 1, 0, 0]
    assert plain.reads[3] == 3
    assert (len(cached), cached.name(2), cached.classes) == (8, "sample2", CAMVID)


def test_budget_is_kept_and_the_first_stay() -> None:
    samples = Counted(100)
    cached = CachedSamples(samples, 1)
    fitting = 2**20 // PAIR_BYTES
    for _ in range(2):
        for index in range(100):
            cached.read(index)
    assert fitting == 64
    assert samples.reads == [1] * 64 + [2] * 36
    assert (
        CachedSamples(samples, 0).read(0)[0].flags.writeable
    )  # nothing is kept with no budget


def test_kept_arrays_cannot_be_changed() -> None:
    cached = CachedSamples(Counted(), 1)
    for array in cached.read(0):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_a_copy_for_another_process_starts_empty() -> None:
    cached = CachedSamples(
        open_samples(DataConfig(size=[64, 64], num_train=4), "train", 0), 64
    )
    before = len(pickle.dumps(cached))
    image, _ = cached.read(1)
    assert len(pickle.dumps(cached)) == before
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(cached)).read(1)[0], image)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("touch", [True, False], ids=["augmented", "left as it is"])
def test_batches_have_the_same_bits_with_a_cache(workers: int, touch: bool) -> None:
    plain = AugmentConfig(
        crop_size=[64, 64],
        scale=[1.0, 1.0],
        flip=0.0,
        brightness=0.0,
        contrast=0.0,
        saturation=0.0,
        hue=0.0,
    )
    config = AugmentConfig(crop_size=[64, 64]) if touch else plain
    found = []
    for samples in (Counted(), CachedSamples(Counted(), 1)):
        batches = train_batches(
            samples,
            Augmenter(config),
            Order(0, 8, 2, 2),
            shards=range(2),
            steps=range(6),
            workers=workers,
            start_method="fork",
            prefetch=2,
            pin_memory=False,
        )
        found.append(
            [(b.image.numpy().tobytes(), b.target.numpy().tobytes()) for b in batches]
        )
    assert found[0] == found[1]
    assert len(found[0]) == 12


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("num", [10, 80], ids=["all fit", "64 of 80 fit"])
def test_a_later_pass_over_whole_images_loads_only_what_did_not_fit(
    workers: int, num: int
) -> None:
    def images(
        samples: Samples, cache: CachedSamples | None = None
    ) -> list[tuple[int, bytes, bytes]]:
        found = []
        how = {"workers": workers, "start_method": "fork", "cache": cache}
        for index, image, target in eval_images(samples, range(num)[::-1], **how):
            found.append((index, image.numpy().tobytes(), target.numpy().tobytes()))
            image.fill_(0)  # what a caller writes does not reach the next pass
        return found

    expected, samples = images(Counted(num)), Counted(num)
    kept = CachedSamples(samples, 1)
    assert images(samples, kept) == expected
    if not workers:
        assert samples.reads == [1] * num
    samples.reads = [0] * num
    assert images(samples, kept) == expected
    assert sum(index in kept for index in range(num)) == min(num, 64)
    if not workers:
        assert samples.reads == [1] * (num - 64) + [0] * min(num, 64)


def test_without_anything_to_load_no_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples, kept = Counted(4), CachedSamples(Counted(4), 1)
    first = [
        part[1].clone()
        for part in eval_images(
            samples, range(4), workers=1, start_method="fork", cache=kept
        )
    ]
    monkeypatch.setattr(ring, "Ring", None)
    again = [
        part[1]
        for part in eval_images(
            samples, range(4), workers=1, start_method="fork", cache=kept
        )
    ]
    assert all(map(torch.equal, first, again))
    with pytest.raises(TypeError):  # the control
        list(eval_images(samples, range(4), workers=1, start_method="fork"))
