"""What a frame shows: limits learned from real frames answer other real frames and refuse five kinds of wrong ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch.nn import functional

from segpipe.export.artifact.frame_statistics import frame_entries, unknown_frames
from segpipe.runtime.frames import (
    QUANTITIES,
    FrameLimits,
    Refused,
    Status,
    enlarged,
    look_at,
)

pytestmark = pytest.mark.slow

CAMVID = Path(__file__).resolve().parents[3] / "shared" / "data" / "camvid"
CITYSCAPES = CAMVID.with_name("cityscapes_frames")
GREEN = (0, 135, 0)  # what decoders make of planes of zeros
Image = np.ndarray


def read(folder: Path, step: int = 1) -> list[Image]:
    paths = sorted(folder.glob("*.png"))[::step]
    if not paths:
        pytest.skip(f"{folder} is not here")
    return [np.ascontiguousarray(cv2.imread(str(path))[..., ::-1]) for path in paths]


@pytest.fixture(scope="module")
def limits() -> FrameLimits:
    """Of 62 training frames, as an export takes them."""
    return FrameLimits(
        frame_entries(read(CAMVID / "train", 6), "train")["frame_limits"]
    )


@pytest.fixture(scope="module")
def frames() -> list[Image]:
    return read(CAMVID / "val")


def status_of(limits: FrameLimits, image: Image) -> tuple[Status, str]:
    """Status, and the quantity that decided."""
    try:
        limits.check(image)
    except Refused as refused:
        return refused.status, str(refused).split()[0]
    return Status.OK, ""


# Real frames


def varied(image: Image, draw: np.random.Generator) -> Image:
    """The scene under other light, with other noise, from beside, through a JPEG."""
    row, column = draw.integers(0, 30, 2)
    image = image[row : row + 330, column : column + 440].astype(np.float32)
    noise = draw.standard_normal(image.shape, np.float32) * draw.uniform(0, 8)
    levels = image * draw.uniform(0.7, 1.3) + draw.uniform(-15, 15)
    found = np.clip(levels + noise, 0, 255).astype(np.uint8)
    if draw.random() < 0.5:
        found = found[:, ::-1]
    if draw.random() < 0.3:
        quality = [cv2.IMWRITE_JPEG_QUALITY, 60]
        found = cv2.imdecode(cv2.imencode(".jpg", found, quality)[1], 1)
    return np.ascontiguousarray(found)


def test_fewer_than_one_real_frame_in_a_thousand_is_refused(
    limits: FrameLimits, frames: list[Image]
) -> None:
    draw = np.random.default_rng(0)
    shown = [*frames, *(varied(frame, draw) for frame in frames for _ in range(10))]
    found = Counter(status_of(limits, frame) for frame in shown)
    assert len(shown) > 1000
    assert found == {(Status.OK, ""): len(shown)}


def test_frames_of_another_camera_are_answered(limits: FrameLimits) -> None:
    for frame in read(CITYSCAPES):
        assert status_of(limits, frame) == (Status.OK, "")
        assert status_of(limits, frame[::-1]) == (Status.IMPLAUSIBLE, "upright")


def noise(level: float, spread: float) -> Callable[[Image], Image]:
    draw = np.random.default_rng(0)
    return lambda image: np.clip(draw.normal(level, spread, image.shape), 0, 255)


def lost(value: Any) -> Callable[[Image], Image]:
    """The lower half never arrived; None: its last row was repeated."""

    def change(image: Image) -> Image:
        image = image.copy()
        half = len(image) // 2
        image[half:] = image[half - 1] if value is None else value
        return image

    return change


def blocks(size: int) -> Callable[[Image], Image]:
    def change(image: Image) -> Image:
        height, width, _ = image.shape
        small = cv2.resize(
            image, (width // size, height // size), interpolation=cv2.INTER_AREA
        )
        return cv2.resize(small, (width, height), interpolation=cv2.INTER_NEAREST)

    return change


CORRUPTIONS: dict[str, tuple[Callable[[Image], Image], set[tuple[Status, str]]]] = {
    "lens cap, dark": (noise(6, 3), {(Status.TOO_DARK, "mean")}),
    "lens cap, gray": (noise(40, 4), {(Status.IMPLAUSIBLE, "structure")}),
    "half black": (
        lost(0),
        {(Status.IMPLAUSIBLE, "lost_rows"), (Status.TOO_DARK, "dark_share")},
    ),
    "half gray": (lost(128), {(Status.IMPLAUSIBLE, "lost_rows")}),
    "half repeated": (lost(None), {(Status.IMPLAUSIBLE, "lost_rows")}),
    "half gray, on a side": (
        lambda image: np.where(np.arange(image.shape[1])[:, None] < 250, image, 128),
        {(Status.IMPLAUSIBLE, "lost_rows")},
    ),
    "half green": (lost(GREEN), {(Status.IMPLAUSIBLE, "lost_rows")}),
    "green": (
        lambda image: np.clip(image + np.array([-60, 80, -60]), 0, 255),
        {(Status.IMPLAUSIBLE, "green")},
    ),
    "blocks of 8": (blocks(8), {(Status.IMPLAUSIBLE, "flat_share")}),
    "blocks of 32": (blocks(32), {(Status.IMPLAUSIBLE, "flat_share")}),
    "upside down": (lambda image: image[::-1], {(Status.IMPLAUSIBLE, "upright")}),
    "turned": (lambda image: image[::-1, ::-1], {(Status.IMPLAUSIBLE, "upright")}),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupt_frame_is_refused(
    name: str, limits: FrameLimits, frames: list[Image]
) -> None:
    change, wanted = CORRUPTIONS[name]
    found = Counter(
        status_of(limits, np.asarray(change(frame), np.uint8)) for frame in frames[::4]
    )
    assert set(found) <= wanted


def test_the_check_takes_well_below_a_millisecond(limits: FrameLimits) -> None:
    frame = np.random.default_rng(0).integers(0, 256, (512, 1024, 3), np.uint8)
    seconds = []
    for _ in range(50):
        started = time.process_time()
        look_at(frame)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 1e-3


# Quantities


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(40, 56), (37, 50)])
def test_enlarged_masks_have_the_geometry_of_the_network(
    size: tuple[int, int], align_corners: bool
) -> None:
    """As torch resizes logits: the nearest cell is that of the larger of the two weights."""
    ids = np.arange(5)[:, None] * 7 + np.arange(7)
    found = enlarged(ids, *size, align_corners=align_corners)
    logits = torch.eye(35)[torch.from_numpy(ids).ravel()].T.reshape(1, 35, 5, 7)
    resized = functional.interpolate(
        logits, size, mode="bilinear", align_corners=align_corners
    )
    share = (resized[0].argmax(0).numpy() == found).mean()
    assert share > 0.98
    other = enlarged(ids, *size, align_corners=not align_corners)
    assert (resized[0].argmax(0).numpy() == other).mean() < 0.95, "the control"


def test_quantities_of_a_made_frame() -> None:
    image = np.zeros((128, 256, 3), np.uint8)
    image[64:, :, 1] = np.arange(256) % 128 * 2  # a ramp of green below black
    found, profile = look_at(image)
    assert found.keys() == QUANTITIES.keys() - {"upright"}
    assert found["mean"] == pytest.approx(127 / 6, abs=1)
    assert found["dark_share"] == pytest.approx(0.5, abs=0.05)
    assert found["lost_rows"] == pytest.approx(1.0), "each row equals the next"
    assert found["flat_share"] == pytest.approx(0.5, abs=0.01)
    assert found["green"] == pytest.approx(127, abs=3)
    turned, other = look_at(image[::-1].copy())
    assert turned["mean"] == pytest.approx(found["mean"], abs=1)
    assert profile.shape == (12,)
    np.testing.assert_allclose(other, -profile, atol=2.0)
    white, _ = look_at(np.full((40, 50, 3), 255, np.uint8))
    assert (white["bright_share"], white["structure"]) == (1.0, 0.0)


def test_up_is_learned_from_enough_images_that_show_it() -> None:
    draw = np.random.default_rng(0)
    ramp = np.linspace(200, 50, 64)[:, None, None]
    sky = [
        np.clip(ramp + draw.normal(0, 20, (64, 96, 3)), 0, 255).astype(np.uint8)
        for _ in range(20)
    ]
    floor = [draw.integers(0, 256, (64, 96, 3), np.uint8) for _ in range(20)]

    def weights(images: list[Image]) -> Any:
        return np.array(
            frame_entries(images, "train")["frame_limits"]["upright_weights"]
        )

    assert weights(sky).any()
    assert not weights(sky[:15]).any()
    assert not weights(floor).any(), "nothing tells up from down"


def test_without_images_only_dark_bright_and_flat_frames_are_refused() -> None:
    limits = FrameLimits(unknown_frames()["frame_limits"])
    draw = np.random.default_rng(0)
    noise = draw.integers(0, 256, (64, 96, 3), np.uint8)
    assert status_of(limits, noise) == (Status.OK, "")
    assert status_of(limits, noise // 40) == (Status.TOO_DARK, "dark_share")
    assert status_of(limits, 255 - noise // 40) == (Status.SATURATED, "bright_share")
    assert status_of(limits, np.full_like(noise, 99))[0] is Status.IMPLAUSIBLE


def test_limits_leave_room_and_always_refuse_the_extremes() -> None:
    draw = np.random.default_rng(0)

    def scene(level: int) -> Image:
        return draw.integers(level - 30, level + 30, (64, 96, 3)).astype(np.uint8)

    small = np.zeros((1, 1, 3), np.uint8), np.zeros((8, 500, 3), np.uint8)
    images = [*small, *(scene(level) for level in range(80, 121))]
    day = frame_entries(images, "check")
    assert day["frame_statistics"]["images"] == 41, "less than a pixel per block"
    low, high = day["frame_limits"]["mean"]
    assert low == pytest.approx(82 / 4, abs=1)
    assert high == pytest.approx(255 - (255 - 118) / 4, abs=1)
    black = frame_entries([np.zeros((64, 96, 3), np.uint8)], "check")["frame_limits"]
    assert black["dark_share"] == [0.0, 0.99]
    assert status_of(FrameLimits(black), np.zeros((64, 96, 3), np.uint8)) == (
        Status.TOO_DARK,
        "dark_share",
    )
