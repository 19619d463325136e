"""Light, sky, lens and sensor: everything between the street and its image."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.data.synthetic.canvas import SUPERSAMPLE, Canvas, Chance, Light

LIGHTS = (
    Light(
        (84, 142, 214), (196, 218, 236), (1.04, 1.02, 0.98), 140, 1.0, 0.0
    ),  # clear day
    Light(
        (150, 160, 172), (206, 210, 214), (0.86, 0.88, 0.9), 110, 0.0, 0.0
    ),  # overcast
    Light(
        (92, 112, 168), (246, 196, 146), (1.04, 0.88, 0.72), 120, 0.8, 0.2
    ),  # evening
    Light((196, 202, 206), (220, 220, 216), (0.92, 0.92, 0.9), 52, 0.1, 0.1),  # mist
    Light((44, 58, 104), (160, 132, 140), (0.54, 0.54, 0.66), 100, 0.0, 0.8),  # dusk
)
LIGHT_ODDS = (0.36, 0.58, 0.76, 0.88, 1.0)  # cumulative


def _by_class(*values: float) -> NDArray[np.float32]:
    """Table float32 (256,) by class id, as cv2.LUT needs it."""
    return np.array([*values, *[0] * (256 - len(values))], np.float32)


# Strength of fine grain and of blotches on each class, in grey levels, in the order of the class ids.
GRAIN = _by_class(9, 8, 9, 7, 24, 4, 5, 5, 3, 2)
BLOTCH = _by_class(8, 12, 9, 9, 24, 5, 5, 6, 4, 0)


def draw_light(chance: Chance) -> Light:
    """One of LIGHTS, a little brighter or darker and tinted."""
    draw = chance.uniform(0, 1)
    light = LIGHTS[next(place for place, odds in enumerate(LIGHT_ODDS) if draw <= odds)]
    level = chance.uniform(0.85, 1.12)
    red, green, blue = (
        part * level * chance.uniform(0.95, 1.05) for part in light.gain
    )
    return replace(
        light,
        gain=(red, green, blue),
        visibility=light.visibility * chance.uniform(0.8, 1.3),
    )


def paint_sky(canvas: Canvas, chance: Chance, label: int) -> None:
    """A gradient from zenith to horizon, and clouds of smooth noise that flatten towards the horizon."""
    rows, columns = int(canvas.camera.row) + 8, canvas.width
    size = (columns // 4, rows // 4 + 1)
    top, low = (
        np.asarray(color, np.float32)
        for color in (canvas.light.sky_top, canvas.light.sky_low)
    )
    down = np.linspace(0, 1, size[1], dtype=np.float32)[:, None, None] ** 0.8
    sky = top * (1 - down) + low * down
    cover = chance.uniform(0.42, 0.75)
    coarse, fine = (
        cv2.resize(
            chance.generator.random(shape, np.float32),
            size,
            interpolation=cv2.INTER_CUBIC,
        )
        for shape in ((7, 9), (20, 22))
    )
    cloud = np.clip((0.68 * coarse + 0.32 * fine - cover) * 3.2, 0, 0.85)[..., None] * (
        1 - 0.5 * down
    )
    sky = sky + cloud * (np.float32(0.5) * low + np.float32(120) - sky)
    small = np.full((*sky.shape[:2], 4), label, np.uint8)
    small[..., :3] = np.clip(sky, 0, 255)
    cv2.resize(small, (columns, rows), dst=canvas.pixels[:rows])


@lru_cache(maxsize=4)
def _vignette(size: tuple[int, int]) -> NDArray[np.float32]:
    """Squared distance from the middle, 1 in the corners, float32 (H, W, 3)."""
    rows, columns = (
        np.linspace(-1, 1, length, dtype=np.float32) ** 2 for length in size
    )
    return np.repeat(((rows[:, None] + columns) / 2)[..., None], 3, -1)


def expose(
    canvas: Canvas, chance: Chance, size: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Image uint8 (H, W, 3) and target uint8 (H, W) that the camera records: optics, surface grain, sensor noise."""
    target = np.ascontiguousarray(canvas.pixels[::SUPERSAMPLE, ::SUPERSAMPLE, 3])
    small = cv2.resize(canvas.pixels, (size[1], size[0]), interpolation=cv2.INTER_AREA)
    source = chance.generator
    coarse = source.random((size[0] // 3, size[1] // 3), np.float32) - np.float32(0.5)
    blotch = cv2.resize(coarse, (size[1], size[0]), interpolation=cv2.INTER_LINEAR)
    grain = _bytes(source, size) - np.float32(127.5)
    level = np.float32(sum(canvas.light.gain) / 3)
    marks = (
        cv2.LUT(target, level / 128 * GRAIN) * grain
        + cv2.LUT(target, 2 * level * BLOTCH) * blotch
    )
    strength = chance.uniform(4, 14) / 255
    colors, noise = cv2.cvtColor(small, cv2.COLOR_RGBA2RGB), _bytes(source, (*size, 3))
    image = cv2.addWeighted(
        colors, 1.0, noise, strength, -127.5 * strength, dtype=cv2.CV_32F
    )
    image += cv2.cvtColor(marks, cv2.COLOR_GRAY2RGB)
    shading = 1 - np.float32(chance.uniform(0.1, 0.4)) * _vignette(size)
    return np.clip(cv2.multiply(image, shading), 0, 255).astype(np.uint8), target


def _bytes(source: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uniform noise; a byte per value is four times as fast as floats."""
    return np.frombuffer(source.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
