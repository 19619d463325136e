"""Synthetic scenes: pure functions of (seed, split, index) that show every class."""

from __future__ import annotations

import hashlib
import multiprocessing
import random

import cv2
import numpy as np
import pytest

from segpipe.data.catalog import STREET
from segpipe.data.data_set import SyntheticSamples
from segpipe.data.samples import class_pixels, open_samples
from segpipe.data.scenes import CLASSES
from segpipe.datasets.problems import problems
from segpipe.settings.groups import DataConfig

SIZE = (96, 192)


def scenes(seed: int = 3, split: str = "train") -> SyntheticSamples:
    return SyntheticSamples(seed=seed, split=split, num=200, scene_size=SIZE)


def content(samples: SyntheticSamples, index: int) -> bytes:
    image, target = samples.read(index)
    return image.tobytes() + target.tobytes()


def contents(samples: SyntheticSamples, indices: list[int]) -> list[bytes]:
    return [content(samples, index) for index in indices]


def test_shapes_types_and_ids() -> None:
    for size in (SIZE, (192, 384), (65, 97), (128, 128)):
        image, target = SyntheticSamples(0, "train", 4, size).read(1)
        assert image.shape == (*size, 3)
        assert target.shape == size
        assert image.dtype == target.dtype == np.uint8
        assert image.flags.c_contiguous
        assert target.flags.c_contiguous
        assert target.max() < STREET.num_classes


def test_painted_ids_are_those_of_the_class_table() -> None:
    assert STREET.names == CLASSES


def test_the_pixels_are_frozen() -> None:
    """The README's accuracy and the digests of runs on scenes depend on them.

    Colors may differ in the last bit on another CPU, where OpenCV computes in floats; targets may not.
    """
    images, targets = zip(*(scenes().read(index) for index in range(4)), strict=True)
    digest = hashlib.sha256(
        b"".join(target.tobytes() for target in targets)
    ).hexdigest()
    assert digest == "ac9b4d779c7d11be06900b4461baacee7b42b7a26ae5d8cb12885002d0b6657d"
    assert np.mean(images, (0, 1, 2)) == pytest.approx(
        [118.739, 114.758, 109.114], abs=2e-3
    )


def test_the_same_scene_whatever_came_before() -> None:
    samples, order = scenes(), [5, 0, 9, 3, 7]
    first = dict(zip(order, contents(samples, order), strict=True))
    for index in reversed(order):
        assert content(scenes(), index) == first[index]


def test_the_same_scene_under_hostile_global_state() -> None:
    expected = contents(scenes(), [0, 1])
    threads = cv2.getNumThreads()
    for seed in (0, 99):
        random.seed(seed)
        np.random.seed(seed)
        cv2.setRNGSeed(seed)
        for number in (1, 3):
            cv2.setNumThreads(number)
            assert contents(scenes(), [0, 1]) == expected
    cv2.setNumThreads(threads)


def test_painting_leaves_global_generators_alone() -> None:
    before = (random.getstate(), np.random.get_state()[1].tobytes())
    cv2.setRNGSeed(7)
    expected = cv2.randu(np.zeros(4, np.uint8), 0, 255).tobytes()
    cv2.setRNGSeed(7)
    scenes().read(2)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before
    assert cv2.randu(np.zeros(4, np.uint8), 0, 255).tobytes() == expected


@pytest.mark.slow
def test_the_same_scene_in_another_process() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(contents, (scenes(), [4, 2])) == contents(scenes(), [4, 2])


def test_seed_split_and_index_matter() -> None:
    variants = [
        content(scenes(seed, split), index)
        for seed in (0, 1)
        for split in ("train", "val")
        for index in (0, 1)
    ]
    assert len(set(variants)) == 8


def test_scenes_are_diverse() -> None:
    assert len({scenes().read(index)[1].tobytes() for index in range(24)}) == 24


def test_every_class_is_common_enough_to_be_learned() -> None:
    samples = SyntheticSamples(1, "train", 30, (192, 384))
    counts = np.stack(
        [
            np.bincount(samples.read(index)[1].ravel(), minlength=10)
            for index in range(30)
        ]
    )
    share = counts.sum(0) / counts.sum()
    assert share.min() >= 0.005, dict(zip(STREET.names, share, strict=True))
    assert (counts > 40).mean(0).min() >= 0.6


def test_image_and_target_show_the_same_things() -> None:
    """Class explains far more of a scene's color variance than chance; the control mixes images and targets."""

    def explained(image: np.ndarray, target: np.ndarray) -> float:
        pixels = image.reshape(-1, 3).astype(float)
        means = [pixels[target.ravel() == label].mean(0) for label in np.unique(target)]
        weights = [(target == label).mean() for label in np.unique(target)]
        between = sum(
            w * ((m - pixels.mean(0)) ** 2).sum()
            for w, m in zip(weights, means, strict=True)
        )
        return float(between / pixels.var(0).sum())

    samples = scenes()
    own = np.mean([explained(*samples.read(index)) for index in range(8)])
    other = np.mean(
        [
            explained(samples.read(index)[0], samples.read(index + 50)[1])
            for index in range(8)
        ]
    )
    assert own > 0.4
    assert own > other + 0.1


def test_targets_are_crisp() -> None:
    """Isolated pixels are rare: downsampling creates no ids between two classes."""
    target = SyntheticSamples(2, "val", 4, (192, 384)).read(0)[1]
    same = np.zeros(target[1:-1, 1:-1].shape, bool)
    for rows, columns in ((0, 1), (2, 1), (1, 0), (1, 2)):
        same |= target[rows : rows + 190, columns : columns + 382] == target[1:-1, 1:-1]
    assert (~same).mean() < 0.002


def test_open_samples_takes_sizes_and_counts_from_the_config() -> None:
    data = DataConfig(size=[64, 96], num_train=5, num_val=3)
    train, val = open_samples(data, "train", 4), open_samples(data, "val", 4)
    assert (len(train), len(val)) == (5, 3)
    assert (train.name(4), val.name(0)) == ("train_000004", "val_000000")
    assert train.read(4)[0].shape == (64, 96, 3)
    assert list(problems(data, ["train", "val"])) == []
    assert class_pixels(train).sum() == 5 * 64 * 96
    with pytest.raises(IndexError):
        train.read(5)
