"""Augmentation: a pure function of bytes and key, image and target on the same grid, and zero strength does nothing."""

import copy
import hashlib
import os
import pickle
import random

import albumentations as A
import cv2
import numpy as np
import pytest

from segpipe.data import augment
from segpipe.data.augment import PAD_COLOR, TRANSFORMS, Augmenter, color_matrix
from segpipe.keys import generator, sample_key
from segpipe.settings.groups import AugmentConfig

NO_COLOR = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}


def config(**changes) -> AugmentConfig:
    return AugmentConfig(**{"crop_size": [32, 48], "scale": [0.5, 2.0], **changes})


@pytest.fixture(scope="module")
def frame() -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.Generator(np.random.Philox(7))
    return draws.integers(0, 256, (60, 80, 3), np.uint8), draws.integers(
        0, 11, (60, 80), np.uint8
    )


def digest(augmenter, frame, key) -> bytes:
    return b"".join(part.tobytes() for part in augmenter(*frame, key))


def test_shape_and_memory(frame):
    image, target = Augmenter(config())(*frame, 1)
    assert (image.shape, target.shape) == ((32, 48, 3), (32, 48))
    assert image.dtype == target.dtype == np.uint8
    assert image.flags.c_contiguous
    assert target.flags.c_contiguous


def test_the_sample_is_left_alone(frame):
    before = [part.copy() for part in frame]
    Augmenter(config(scale=[1.0, 1.0], crop_size=[60, 80]))(*frame, 1)
    assert all(
        np.array_equal(now, then) for now, then in zip(frame, before, strict=True)
    )


@pytest.mark.parametrize("crop_size", [[60, 80], [32, 48]])
def test_the_output_is_never_memory_of_the_sample(frame, crop_size):
    """A cache may hold the sample, so writing into the crop must not change it."""
    augmenter = Augmenter(
        config(crop_size=crop_size, scale=[1.0, 1.0], flip=0.0, **NO_COLOR)
    )
    for output in augmenter(*frame, 1):
        assert not any(np.may_share_memory(output, part) for part in frame)


def test_parts_are_the_transforms_alone_and_always(frame):
    whole = Augmenter(config(flip=0.001, extra=["noise"], keyed=False))
    parts = whole.parts()
    assert [part.name for part in parts] == [
        "ScaleCrop",
        "HorizontalFlip",
        "ColorMatrix",
        "noise (ISONoise)",
    ]
    flipped = parts[1](*frame, 1)
    assert all(
        np.array_equal(now, then[:, ::-1])
        for now, then in zip(flipped, frame, strict=True)
    )
    assert (
        digest(parts[0], frame, 1)
        == digest(copy.copy(parts[0]), frame, 1)
        != digest(parts[0], frame, 2)
    )


def test_parts_of_nested_transforms(monkeypatch, frame):
    def nested() -> A.OneOf:
        return A.OneOf(
            [
                A.VerticalFlip(p=0.1),
                A.Sequential([A.Solarize(p=0.2), A.ToGray(p=0.2)], p=0.3),
            ],
            p=0.5,
        )

    monkeypatch.setitem(TRANSFORMS, "nested", nested)
    parts = Augmenter(config(extra=["nested"])).parts()[3:]
    assert [part.name for part in parts] == [
        "nested (VerticalFlip)",
        "nested (Solarize)",
        "nested (ToGray)",
    ]
    assert np.array_equal(parts[0](*frame, 1)[0], frame[0][::-1])


def test_a_fresh_augmenter_starts_anew(frame):
    control = Augmenter(config(keyed=False))
    first = digest(control, frame, 1)
    assert digest(control, frame, 1) != first
    assert digest(copy.copy(control), frame, 1) == first


def test_equal_keys_give_equal_bytes_in_any_order(frame):
    keys = [sample_key(0, 0, index, "augment") for index in range(40)]
    augmenter = Augmenter(config())
    forth = [digest(augmenter, frame, key) for key in keys]
    back = [digest(augmenter, frame, key) for key in reversed(keys)]
    assert forth == back[::-1]
    assert len(set(forth)) == 40


def test_global_state_does_not_enter(frame):
    augmenter = Augmenter(config())
    seen = set()
    for hostile in (1, 2):
        random.seed(hostile)
        np.random.seed(hostile)
        cv2.setRNGSeed(hostile)
        seen.add(digest(augmenter, frame, 5))
    assert len(seen) == 1


def test_another_augmenter_gives_the_same_bytes(frame):
    used = Augmenter(config())
    digest(used, frame, 1)
    copies = [Augmenter(config()), pickle.loads(pickle.dumps(used))]
    assert {digest(copy, frame, 9) for copy in copies} == {digest(used, frame, 9)}


def test_the_pipeline_is_neither_pickled_nor_shared_across_a_fork(frame, monkeypatch):
    augmenter = Augmenter(config())
    digest(augmenter, frame, 1)
    parents = augmenter.ready()
    assert augmenter.ready() is parents
    assert len(pickle.dumps(augmenter)) < 1000
    monkeypatch.setattr(augment.os, "getpid", lambda: -1)
    assert augmenter.ready() is not parents


def test_the_unkeyed_control_depends_on_history(frame):
    """The control must break the promises above."""
    augmenter = Augmenter(config(keyed=False))
    assert digest(augmenter, frame, 1) != digest(augmenter, frame, 1)
    pair = [pickle.loads(pickle.dumps(augmenter)) for _ in range(2)]
    assert digest(pair[0], frame, 1) == digest(pair[1], frame, 2)


def test_the_random_state_reaches_nested_steps():
    """The contract with the pinned albumentations: one state for all steps, however deeply they are nested."""
    inner = [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)]
    pipeline = A.Compose([A.OneOf([A.Sequential(inner, p=1.0), A.SomeOf(inner, n=1)])])
    pythons, numpys = random.Random(1), generator(1)
    pipeline.set_random_state(numpys, pythons)
    assert all(
        step.py_random is pythons and step.random_generator is numpys for step in inner
    )


def test_zero_strength_changes_nothing(frame):
    still = Augmenter(
        config(scale=[1.0, 1.0], crop_size=[60, 80], flip=0.0, **NO_COLOR)
    )
    assert all(
        np.array_equal(now, then)
        for now, then in zip(still(*frame, 3), frame, strict=True)
    )
    assert len(still.ready().transforms) == 1
    moved = Augmenter(config(scale=[1.0, 1.0], crop_size=[60, 80], flip=0.0))
    assert not np.array_equal(moved(*frame, 3)[0], frame[0])


@pytest.mark.parametrize("scale", [2 / 3, 1.0, 2.0])
@pytest.mark.parametrize("axis", [0, 1])
def test_image_and_target_share_the_grid(axis, scale):
    """Both hold a coordinate of the source; after the resize they agree to half a pixel, without bias."""
    ramp = np.indices((60, 60))[axis].astype(np.uint8)
    image = np.repeat(
        (4 * ramp)[..., None], 3, axis=2
    )  # times 4: interpolated values at these scales stay whole
    augmenter = Augmenter(config(crop_size=[32, 32], scale=[scale, scale], **NO_COLOR))
    errors = []
    for key in range(8):
        seen, target = augmenter(image, ramp, key)
        part = (
            slice(2, -2),
            slice(2, -2),
        )  # at the border of the frame the interpolation stops being linear
        errors.append(seen[part][..., 0] / 4 - target[part])
    assert np.abs(errors).max() <= 0.5
    assert abs(np.mean(errors)) < 0.05


def test_plain_nearest_is_biased(monkeypatch):
    """The control: OpenCV's INTER_NEAREST takes the pixel to the upper left, half a pixel off at this scale."""
    monkeypatch.setattr(augment.cv2, "INTER_NEAREST_EXACT", cv2.INTER_NEAREST)
    with pytest.raises(AssertionError):
        test_image_and_target_share_the_grid(1, 2 / 3)


def test_flips_happen_and_keep_pairs_together():
    target = np.repeat(np.arange(48, dtype=np.uint8)[None], 32, axis=0)
    image = np.repeat(target[..., None] * 5, 3, axis=2)
    augmenter = Augmenter(config(scale=[1.0, 1.0], flip=0.5, **NO_COLOR))
    flipped = 0
    for key in range(100):
        seen, kept = augmenter(image, target, sample_key(0, 0, key, "augment"))
        assert np.array_equal(seen[..., 0], kept * 5)
        flipped += int(kept[0, 0] == 47)
    assert 35 < flipped < 65


def test_padding_is_mean_color_and_ignored(frame):
    augmenter = Augmenter(
        config(crop_size=[64, 96], scale=[0.5, 0.5], flip=0.0, **NO_COLOR)
    )
    places = set()
    for key in range(30):
        image, target = augmenter(*frame, key)
        padding = target == 255
        assert (~padding).sum() == 30 * 40
        assert (image[padding] == PAD_COLOR).all()
        places.add(tuple(np.argwhere(~padding)[0]))
    assert len(places) > 20


def test_scale_is_uniform_in_log():
    """Half of all factors lie below 1 when the range is 1/2 to 2; uniform in the factor it would be a third."""
    cropper = augment.ScaleCrop((32, 32), (0.5, 2.0))
    cropper.set_random_state(generator(0), random.Random(0))
    boxes = [
        cropper.get_params_dependent_on_data({"shape": (500, 500)}, {})["source"][0]
        for _ in range(1000)
    ]
    assert 0.45 < np.mean([box.stop - box.start > 32 for box in boxes]) < 0.55


def test_crops_reach_every_border():
    cropper = augment.ScaleCrop((32, 32), (1.0, 1.0))
    cropper.set_random_state(generator(0), random.Random(0))
    starts = [
        cropper.get_params_dependent_on_data({"shape": (36, 36)}, {})["source"][0].start
        for _ in range(500)
    ]
    assert set(starts) == {0, 1, 2, 3, 4}


@pytest.fixture(scope="module")
def street() -> tuple[np.ndarray, np.ndarray]:
    """Class 0 nearly everywhere, 40 pixels of class 1, 10 of class 2, an unlabelled border."""
    target = np.zeros((60, 80), np.uint8)
    target[4:8, 60:70], target[50:52, 5:10], target[:1] = 1, 2, 255
    return np.repeat(target[..., None], 3, axis=2), target


def test_rare_crops_hold_each_class_by_the_inverse_of_its_pixels(street):
    """4,710, 40 and 10 pixels: class 2 is drawn with p = 0.80 and class 1 with 0.20; the two never share a crop."""
    augmenter = Augmenter(
        config(crop_size=[32, 32], scale=[1.0, 1.5], rare_crop=1.0, **NO_COLOR)
    )
    seen = [set(np.unique(augmenter(*street, key)[1])) - {0, 255} for key in range(400)]
    assert (
        sum(len(classes) == 1 for classes in seen) >= 395
    )  # class 0 is drawn with p = 0.002
    assert 0.74 < np.mean([classes == {2} for classes in seen]) < 0.86


@pytest.mark.parametrize(
    ("rare_crop", "low", "high"), [(0.0, 0.20, 0.35), (0.5, 0.57, 0.73)]
)
def test_rare_crops_come_with_their_probability(street, rare_crop, low, high):
    """A crop anywhere holds one of the two classes with p = 0.27."""
    augmenter = Augmenter(
        config(crop_size=[32, 32], scale=[1.0, 1.0], rare_crop=rare_crop, **NO_COLOR)
    )
    held = [
        bool(np.isin(augmenter(*street, key)[1], (1, 2)).any()) for key in range(400)
    ]
    assert low < np.mean(held) < high


def test_without_rare_crops_the_bytes_are_those_of_ever(frame):
    """Frozen: a run that does not ask for them keeps its bits, and their draws come after all others."""
    assert (
        hashlib.sha256(digest(Augmenter(config()), frame, 5)).hexdigest()[:16]
        == "91bfff2338672d3e"
    )
    probable = augment.ScaleCrop((32, 48), (0.5, 2.0), rare=1e-9)
    never = augment.ScaleCrop((32, 48), (0.5, 2.0))
    for cropper in (probable, never):
        cropper.set_random_state(generator(0), random.Random(0))
    one, two = (
        crop.get_params_dependent_on_data({"shape": (60, 80)}, {"mask": frame[1]})
        for crop in (probable, never)
    )
    assert one == two


def test_a_sample_without_labels_is_cropped_anywhere(frame):
    augmenter = Augmenter(config(rare_crop=1.0))
    assert (augmenter(frame[0], np.full_like(frame[1], 255), 1)[1] == 255).all()


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (33, 31), (480, 360)])
def test_any_image_and_any_factor_fit(size):
    draws = random.Random(0)
    for _ in range(300):
        factor, draw = (
            10 ** draws.uniform(-1, 1),
            draws.choice([0.0, draws.random(), 1 - 2**-53]),
        )
        kept = draws.choice([None, 0, size[0] - 1, draws.randrange(size[0])])
        source, place = augment._spans(size[0], 32, factor, draw, kept)
        assert kept is None or source.start <= kept < source.stop
        assert 0 <= source.start < source.stop <= size[0]
        assert 0 <= place.start < place.stop <= 32


def test_color_is_the_identity_at_zero_and_keeps_grey_grey():
    assert np.array_equal(color_matrix(0, 0, 0, 0), np.eye(3, 4))
    turned = color_matrix(0, 0, 0.4, 0.1)
    assert turned[:, :3].sum(axis=1) == pytest.approx([1, 1, 1], abs=1e-3)
    assert turned[:, 3] == pytest.approx([0, 0, 0], abs=1e-9)
    assert color_matrix(0, 0.5, 0, 0)[:, :3] @ PAD_COLOR + color_matrix(0, 0.5, 0, 0)[
        :, 3
    ] == pytest.approx(PAD_COLOR)


def test_color_is_integer_arithmetic(frame):
    """OpenCV multiplies bytes in fixed point (10 bits), so that the same matrix gives the same bytes on any CPU."""
    matrix = color_matrix(0.2, -0.1, 0.2, 0.02)
    fixed = np.rint(matrix * 1024).astype(np.int64)
    fixed[:, 3] = np.rint(matrix[:, 3] * 1024 + 512)
    expected = np.clip(
        (frame[0].astype(np.int64) @ fixed[:, :3].T + fixed[:, 3]) >> 10, 0, 255
    )
    assert np.array_equal(cv2.transform(frame[0], matrix), expected)


DUSK = {"gamma": [1.5, 3.0], "contrast": 0.6}


def test_gamma_and_contrast_stay_in_their_ranges_and_reach_their_ends():
    """Of an image whose columns have one value each: 0, 64, 124 (the middle of contrast in red) and 255."""
    image = np.repeat(np.array([0, 64, 124, 255], np.uint8), 16)
    frame = np.tile(image[None, :, None], (64, 1, 3)), np.zeros((64, 64), np.uint8)
    still = dict(crop_size=[64, 64], scale=[1.0, 1.0], flip=0.0, **NO_COLOR)

    def reds(**changes) -> np.ndarray:
        made = Augmenter(config(**{**still, **changes}))
        return np.stack([made(*frame, key)[0][0, ::16, 0] for key in range(400)])

    darker = reds(gamma=[1.5, 3.0])
    assert set(darker[:, 0]) == {0}
    assert set(darker[:, 3]) == {255}
    low, high = 255 * (64 / 255) ** 3, 255 * (64 / 255) ** 1.5
    assert darker[:, 1].min() == pytest.approx(low, abs=1)
    assert darker[:, 1].max() == pytest.approx(high, abs=1)
    spread = reds(contrast=0.6)
    assert np.abs(spread[:, 2].astype(int) - 124).max() <= 1
    assert spread[:, 1].max() == pytest.approx(124 - 0.4 * 60, abs=1)
    assert spread[:, 1].min() == pytest.approx(124 - 1.6 * 60, abs=1)


def test_gamma_is_keyed(frame):
    worker = Augmenter(config(**DUSK))
    again = Augmenter(config(**DUSK))
    for key in range(5):
        assert digest(worker, frame, key) == digest(again, frame, key)
        assert digest(worker, frame, key) != digest(Augmenter(config()), frame, key)


def test_color_leaves_the_target_alone(frame):
    plain, colored = Augmenter(config(**NO_COLOR)), Augmenter(config())
    for key in range(5):
        assert np.array_equal(plain(*frame, key)[1], colored(*frame, key)[1])


def test_importing_asks_no_server():
    assert os.environ["NO_ALBUMENTATIONS_UPDATE"] == "1"
