"""The temperature: found where it is known, the same every time, and honest about what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from segpipe.errors import DataError
from segpipe.export.artifact.manifest import differences
from segpipe.export.gates import quality as temperature
from segpipe.export.gates.quality import (
    calibration_error,
    fit_temperature,
)

IGNORE, CLASSES, SIZE = 255, 6, (24, 32)


def calibrated(
    num: int = 6, *, factor: float = 1.0, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Logits whose softmax, once they are divided by `factor`, is right as often as it says; labels drawn from it."""
    random = np.random.Generator(np.random.Philox(key=seed))
    found = []
    for _ in range(num):
        logits = random.normal(0, 2, (CLASSES, *SIZE))
        label = (logits + random.gumbel(size=logits.shape)).argmax(
            0
        )  # one draw from the softmax
        found.append(((factor * logits).astype(np.float32), label.astype(np.uint8)))
    return found


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_logits_times_a_factor_give_that_temperature(factor: float) -> None:
    found = fit_temperature(calibrated(factor=factor))
    assert found["temperature"] == pytest.approx(factor, rel=0.05)
    assert found["images"] == 6
    assert found["ece_after"] < 0.025
    if factor != 1.0:
        assert found["ece_before"] > 4 * found["ece_after"], (
            "the control: it was not calibrated before"
        )


def test_no_other_temperature_is_more_likely() -> None:
    pairs = calibrated(factor=2.0, seed=3)
    best = fit_temperature(pairs)["temperature"]
    score = np.concatenate(
        [logits.reshape(CLASSES, -1).T for logits, _ in pairs]
    ).astype(np.float64)
    label = np.concatenate([target.ravel() for _, target in pairs]).astype(np.int64)

    def loss(temperature: float) -> float:
        scaled = score / temperature
        total = np.log(np.exp(scaled).sum(1)) - scaled[np.arange(len(label)), label]
        return float(total.mean())

    assert loss(best) < min(loss(best * 0.999), loss(best * 1.001))


def test_both_errors_are_those_of_the_labelled_pixels() -> None:
    [(logits, target)] = calibrated(1, factor=2.5)
    found = fit_temperature([(logits, target)])
    score, label = (
        logits.reshape(CLASSES, -1).T.astype(np.float64),
        target.ravel().astype(np.int64),
    )
    assert found["ece_before"] == calibration_error(score, label)
    assert (
        found["ece_after"]
        == calibration_error(score / found["temperature"], label)
        < found["ece_before"]
    )


def test_logits_are_computed_in_fp32_even_under_autocast() -> None:
    network = nn.Conv2d(3, CLASSES, 1)
    network.align_corners = False  # type: ignore[assignment]
    image = np.random.Generator(np.random.Philox(key=2)).integers(
        0, 256, (*SIZE, 3), dtype=np.uint8
    )
    trained = SimpleNamespace(
        model=network, preprocess=lambda batch: batch.permute(0, 3, 1, 2) / 255
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [(logits, _)] = temperature._logits(
            trained, [(image, np.zeros(SIZE, np.uint8))]
        )
    with torch.no_grad():
        assert np.array_equal(
            logits,
            network(trained.preprocess(torch.from_numpy(image)[None]))[0].numpy(),
        )


@pytest.mark.parametrize("align_corners", [False, True])
def test_the_label_is_read_where_the_logit_is(align_corners: bool) -> None:
    """With align_corners, the first and the last logit lie on the first and the last pixel, not in their cells."""
    network = nn.AvgPool2d(8)
    network.align_corners = align_corners  # type: ignore[assignment]
    trained: Any = SimpleNamespace(
        model=network, preprocess=lambda batch: batch.permute(0, 3, 1, 2).float()
    )
    size = (33, 65)
    target = np.arange(size[1], dtype=np.uint8)[None].repeat(size[0], 0)
    image = np.zeros((*size, 3), np.uint8)
    [(logits, label)] = temperature._logits(trained, [(image, target)])
    assert logits.shape == (3, 4, 8)
    # Without align_corners `_pixels` reads the centers.
    wanted = [0, 9, 18, 27, 37, 46, 55, 64] if align_corners else list(range(65))
    assert label[0].tolist() == wanted


def test_the_error_by_hand() -> None:
    # Two pixels of confidence 0.9, one of them right; two of 0.6, both right.
    sure, unsure = np.log([0.9, 0.1]), np.log([0.6, 0.4])
    score = np.stack([sure, sure, unsure, unsure])
    assert calibration_error(score, np.array([0, 1, 0, 0])) == pytest.approx(
        (0.8 + 0.8) / 4
    )


def test_the_error_is_measured_in_fifteen_bins_of_which_the_last_holds_certainty() -> (
    None
):
    def error(*pixels: tuple[float, bool]) -> float:
        """Of two classes, with these confidences, right or wrong."""
        score = np.array(
            [
                [np.log(share / (1 - share)) if share < 1 else 800.0, 0.0]
                for share, _ in pixels
            ]
        )
        return calibration_error(
            score, np.array([not right for _, right in pixels], np.int64)
        )

    apart = ((0.66, True), (0.67, False))  # on both sides of 10 / 15
    assert error(*apart) == pytest.approx((0.34 + 0.67) / 2)
    together = ((1.0, False), (0.99, True))
    assert error(*together) == pytest.approx((1.99 - 1) / 2)


def test_at_most_2048_pixels_of_an_image_are_used() -> None:
    logits = (
        np.random.Generator(np.random.Philox(key=1))
        .normal(0, 1, (2, 50, 60))
        .astype(np.float32)
    )
    target = np.zeros((50, 60), np.uint8)
    score, label = temperature._pixels(0, logits, target)
    assert (score.shape, label.shape) == ((2048, 2), (2048,))
    assert len(np.unique(score[:, 0])) == 2048, "none twice"
    target.ravel()[2048:] = IGNORE
    score, _ = temperature._pixels(0, logits, target)
    assert np.array_equal(score, logits.reshape(2, -1)[:, :2048].T)


def test_targets_are_taken_at_the_centres_of_the_cells() -> None:
    pairs = calibrated(factor=1.5)
    wanted = fit_temperature(pairs)
    large = [
        (logits, np.repeat(np.repeat(target, 8, 0), 8, 1)) for logits, target in pairs
    ]
    assert fit_temperature(large) == wanted
    shifted = [(logits, np.roll(target, 8, 1)) for logits, target in large]
    assert fit_temperature(shifted)["ece_before"] > 2 * wanted["ece_before"]
    ramp = np.arange(90 * 120, dtype=np.uint8).reshape(90, 120)
    nearest = cv2.resize(
        ramp, (SIZE[1], SIZE[0]), interpolation=cv2.INTER_NEAREST_EXACT
    )
    logits = (
        np.random.Generator(np.random.Philox(key=5))
        .normal(0, 1, (256, *SIZE))
        .astype(np.float32)
    )
    assert fit_temperature([(logits, ramp)]) == fit_temperature([(logits, nearest)])


def test_ignored_pixels_do_not_count() -> None:
    pairs = calibrated(factor=2.0)
    for _, target in pairs:
        target[: SIZE[0] // 2] = IGNORE
    wanted = fit_temperature(pairs)
    for logits, _ in pairs:
        logits[:, : SIZE[0] // 2] *= -7
    assert fit_temperature(pairs) == wanted


def test_pixels_are_drawn_by_the_place_of_the_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(temperature, "PIXELS", 200)
    np.random.seed(1)
    one = fit_temperature(iter(calibrated(factor=2.0)))
    np.random.seed(2)
    assert fit_temperature(calibrated(factor=2.0)) == one
    assert one["temperature"] == pytest.approx(2.0, rel=0.15)
    monkeypatch.setattr(temperature, "PIXELS", 199)
    assert fit_temperature(calibrated(factor=2.0)) != one


def test_the_ends_of_the_scale() -> None:
    logits = np.zeros((CLASSES, *SIZE), dtype=np.float32)
    target = np.zeros(SIZE, dtype=np.uint8)
    assert fit_temperature([(logits, target)])["temperature"] == 1.0
    logits[0] = 1.0  # always right: no confidence is too high
    assert fit_temperature([(logits, target)])["temperature"] == pytest.approx(
        0.02, rel=0.5
    )
    logits[0] = 0.01  # so that even the lowest is not low enough
    assert fit_temperature([(logits, target)])["temperature"] == pytest.approx(0.02)
    logits[0] = -1.0  # always wrong: none is too low
    assert fit_temperature([(logits, target)])["temperature"] == pytest.approx(50)


def unusable() -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    logits, target = calibrated(1)[0]
    yield logits, np.full_like(target, IGNORE), "no labelled pixel"
    yield logits, target + np.uint8(CLASSES), f"of {CLASSES} classes"
    yield (
        logits,
        np.minimum(target + np.uint8(1), np.uint8(CLASSES)),
        f"has class {CLASSES} of",
    )
    yield logits * np.float32(np.nan), target, "NaN or infinite"


@pytest.mark.parametrize(
    ("logits", "target", "message"), list(unusable()), ids=lambda value: str(value)[:9]
)
def test_unusable_data(logits: np.ndarray, target: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit_temperature([(logits, target)])


def test_no_image_at_all() -> None:
    with pytest.raises(DataError, match="0 images"):
        fit_temperature([])


NOT_FITTED = {"method": "none", "temperature": 1.0}


def fitted(
    temperature: float, images: int = 8, after: float = 0.01
) -> dict[str, object]:
    errors = {"ece_before": 0.1, "ece_after": after}
    return {
        "method": "temperature",
        "temperature": temperature,
        "images": images,
        **errors,
    }


@pytest.mark.parametrize(
    ("claimed", "found", "entry"),
    [
        (fitted(1.5), fitted(1.5), ""),
        (fitted(2.0019), fitted(2.0), ""),  # a thousandth, as of another processor
        (fitted(1.9981), fitted(2.0), ""),
        (fitted(2.0021), fitted(2.0), "temperature"),
        (fitted(float("nan")), fitted(1.5), "temperature"),
        (fitted(1.5), fitted(float("nan")), "temperature"),
        (fitted(1.5, after=0.0109), fitted(1.5), ""),
        (fitted(1.5, after=0.0), fitted(1.5), "ece_after"),
        (fitted(1.5, after=float("nan")), fitted(1.5), "ece_after"),
        (fitted(1.5, 9), fitted(1.5), "images"),
        (NOT_FITTED, NOT_FITTED, ""),
        ({"method": "none", "temperature": 20.0}, NOT_FITTED, "temperature"),
    ],
)
def test_a_claimed_temperature_is_held_against_the_fitted_one(
    claimed: dict[str, object], found: dict[str, object], entry: str
) -> None:
    problems = list(differences({"calibration": claimed}, {"calibration": found}))
    assert [f"calibration.{entry} = " in text for text in problems] == [True] * bool(
        entry
    )


@pytest.mark.parametrize("scale", [0.03, 0.3, 1.0, 20.0])
def test_the_zero_of_the_slope_is_found_to_nine_digits(scale: float) -> None:
    """Two classes at a distance d, right with the share s: the temperature is d / log(s / (1 - s)), by hand."""
    score = np.tile([scale, 0.0], (10, 1))
    label = np.array([0] * 7 + [1] * 3)
    assert temperature._most_likely(score, label) == pytest.approx(
        scale / np.log(7 / 3), rel=1e-8
    )
