"""Further transforms: each has its effect, image and target stay aligned, and names are checked."""

import pickle
import random

import albumentations as A
import numpy as np
import pytest

from segpipe.data.augment import TRANSFORMS, Augmenter, builder
from segpipe.errors import ConfigError
from segpipe.keys import generator, sample_key
from segpipe.settings.compose import compose
from segpipe.settings.config import check
from segpipe.settings.groups import AugmentConfig

PLAIN = {
    "scale": [1.0, 1.0],
    "flip": 0.0,
    "brightness": 0.0,
    "contrast": 0.0,
    "saturation": 0.0,
    "hue": 0.0,
}


@pytest.fixture(scope="module")
def frame() -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.Generator(np.random.Philox(3))
    return draws.integers(0, 256, (64, 96, 3), np.uint8), draws.integers(
        0, 11, (64, 96), np.uint8
    )


def keyed(step: A.BasicTransform, image: np.ndarray, key: int) -> np.ndarray:
    """A transform applied alone under a key."""
    step.p = 1.0
    pipeline = A.Compose([step])
    pipeline.set_random_state(generator(key), random.Random(key))
    return pipeline(image=image)["image"]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_shape_type_and_target(name, frame):
    """Every shipped transform changes the image; only cutout touches the target, and only to ignore pixels."""
    augmenter = Augmenter(AugmentConfig(crop_size=[64, 96], extra=[name], **PLAIN))
    part = augmenter.parts()[-1]
    assert part.name.startswith(f"{name} (")
    changed = 0
    for key in range(6):
        image, target = part(*frame, key)
        assert (image.shape, image.dtype) == ((64, 96, 3), np.uint8)
        assert image.flags.c_contiguous
        changed += not np.array_equal(image, frame[0])
        touched = target != frame[1]
        assert touched.any() == (name == "cutout")
        assert (target[touched] == 255).all()
        if name == "cutout":
            assert (image[touched] == (124, 116, 104)).all(), (
                "the image is empty where the target is ignored"
            )
            assert np.array_equal(
                image[target == frame[1]], frame[0][target == frame[1]]
            )
    assert changed == 6


@pytest.mark.parametrize("name", TRANSFORMS)
def test_they_are_left_out_by_chance(name, frame):
    """A transform that always applies would never show the network a clean image."""
    augmenter = Augmenter(AugmentConfig(crop_size=[64, 96], extra=[name], **PLAIN))
    seen = [
        augmenter(*frame, sample_key(0, 0, index, "augment"))[0] for index in range(60)
    ]
    untouched = sum(np.array_equal(image, frame[0]) for image in seen)
    assert 30 < untouched < 60


def test_noise_knows_more_than_65536_seeds(frame):
    """The bits after the first draw come from all 128 bits of the key, not from 16 of them."""
    high = [
        keyed(TRANSFORMS["noise"](), frame[0], 1 + (part << 64)).tobytes()
        for part in range(20)
    ]
    assert len(set(high)) == 20


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"augment.extra = 'nois' is not one of .*Did you mean noise\?",
    ):
        Augmenter(AugmentConfig(extra=["nois"]))
    with pytest.raises(
        ConfigError, match=r"augment.extra = \['noise', 'noise'\] contains a name twice"
    ):
        check(compose(["augment.extra=[noise,noise]"]), world_size=1)


def test_what_is_not_a_transform_is_refused(monkeypatch, frame):
    monkeypatch.setitem(TRANSFORMS, "odd", lambda: 3)
    with pytest.raises(ConfigError, match=r"augment.extra = odd made 3"):
        Augmenter(AugmentConfig(extra=["odd"]))(*frame, 1)


def test_corners_that_a_rotation_uncovers_are_ignored(monkeypatch, frame):
    """By default albumentations gives them class 0: 15 % of the pixels with SafeRotate."""
    turned = A.OneOf([A.Rotate(p=1), A.SafeRotate(p=1)], p=1)
    monkeypatch.setitem(TRANSFORMS, "turned", lambda: turned)
    augmenter = Augmenter(AugmentConfig(crop_size=[64, 96], extra=["turned"], **PLAIN))
    target = np.full_like(frame[1], 3)
    found = [np.unique(augmenter(frame[0], target, key)[1]) for key in range(6)]
    assert np.unique(np.concatenate(found)).tolist() == [3, 255]
    monkeypatch.setitem(TRANSFORMS, "asked", lambda: A.CoarseDropout(fill_mask=0, p=1))
    asked = Augmenter(AugmentConfig(crop_size=[64, 96], extra=["asked"], **PLAIN))
    assert np.unique(asked(frame[0], target, 1)[1]).tolist() == [0, 3], "not a default"


def test_own_transforms_travel_with_the_augmenter(monkeypatch, frame):
    """A worker that was spawned has a TRANSFORMS without them."""
    monkeypatch.setitem(TRANSFORMS, "solarized", A.Solarize)
    augmenter = Augmenter(
        AugmentConfig(crop_size=[64, 96], extra=["solarized"], **PLAIN)
    )
    packed = pickle.dumps(augmenter)
    monkeypatch.delitem(TRANSFORMS, "solarized")
    with pytest.raises(ConfigError):
        builder("solarized")
    outputs = {pickle.loads(packed)(*frame, key)[0].tobytes() for key in range(20)}
    assert outputs == {augmenter(*frame, key)[0].tobytes() for key in range(20)}
    assert len(outputs) == 2


def test_groups_and_overrides_go_together():
    standard, robust = compose([]), compose(["augment=robust"])
    assert standard.augment == AugmentConfig()
    own = {name: getattr(robust.augment, name) for name in ("gamma", "extra")}
    assert robust.augment == AugmentConfig(**own)
    assert set(robust.augment.extra) == set(TRANSFORMS)
    assert compose(
        ["augment=robust", "augment.crop_size=[64,96]"]
    ).augment.crop_size == [64, 96]
    both = compose(["experiment=camvid_cpu", "augment=robust"]).augment
    assert (
        both.crop_size
        == compose(["experiment=camvid_cpu"]).augment.crop_size
        != AugmentConfig().crop_size
    )
    assert both.extra == robust.augment.extra
    assert (
        compose(["augment=robust", "augment.extra=[]", "augment.gamma=[1,1]"])
        == standard
    )
    assert compose(["augment.extra=[noise]"]).augment.extra == ["noise"]
    with pytest.raises(ConfigError, match="robsut"):
        compose(["augment=robsut"])
