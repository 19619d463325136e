"""A pinhole camera over a curved street, and the two images it paints at once: colors and class ids.

World coordinates are in metres: x to the right of the camera, y up from the ground, z ahead. A place on the street is
(side, z), with `side` metres to the right of the middle of the road. Painting goes from far to near: later objects hide
earlier ones in both images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

Point = tuple[float, float, float]
Color = tuple[float, float, float]
SUPERSAMPLE = 2  # colors are averaged over 2x2 painted pixels, class ids are taken from one of them
SHORT, LONG = (
    np.linspace(0, 1, 3),
    np.linspace(0, 1, 16),
)  # steps along a strip of ground
NEAR = 1.2  # metres; nothing nearer is painted, so no division by z gets too large


class Chance:
    """Random draws from one generator, taken in blocks because a single draw by numpy costs a microsecond."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator
        self._block: list[float] = []

    def uniform(self, low: float, high: float) -> float:
        if not self._block:
            self._block = self.generator.random(512).tolist()
        return low + (high - low) * self._block.pop()

    def happens(self, probability: float) -> bool:
        return self.uniform(0, 1) < probability

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return min(high, int(self.uniform(low, high + 1)))

    def color(self, palette: Sequence[Color], spread: float) -> Color:
        """One of the palette, with brightness moved by at most `spread` and each channel by a third of it."""
        chosen = palette[self.integer(0, len(palette) - 1)]
        shift, third = self.uniform(-spread, spread), spread / 3
        red, green, blue = (
            max(0.0, part + shift + self.uniform(-third, third)) for part in chosen
        )
        return red, green, blue


@dataclass(frozen=True)
class Light:
    """Time of day and weather."""

    sky_top: Color
    sky_low: Color
    gain: Color  # color of the light, 1 = neutral daylight
    visibility: float  # metres at which a color is 63 % haze
    sun: float  # strength of direct light, 0 = overcast; decides how dark shadows are
    lamps: float  # 0 = daylight, 1 = every lamp and many windows are lit


@dataclass(frozen=True)
class Camera:
    """Where the image is taken; lengths in pixels of the painted canvas and in metres."""

    focal: float
    column: float  # of the vanishing point
    row: float  # of the horizon
    height: float
    side: float  # of the camera, from the middle of the road
    heading: float  # of the road relative to the camera, as a slope
    bend: float  # curvature of the road, 1/m

    def across(self, side: float, z: float) -> float:
        """x of a place on the street."""
        return side - self.side + self.heading * z + 0.5 * self.bend * z * z

    def slope(self, z: float) -> float:
        """Direction of the street at z, as dx/dz."""
        return self.heading + self.bend * z


class Canvas:
    """Both images in one array, uint8 (2H, 2W, 4): red, green, blue, class id. One call paints both."""

    def __init__(self, size: tuple[int, int], camera: Camera, light: Light) -> None:
        self.height, self.width = size[0] * SUPERSAMPLE, size[1] * SUPERSAMPLE
        self.camera, self.light = camera, light
        self.pixels = np.empty(
            (self.height, self.width, 4), np.uint8
        )  # sky and ground cover all of it

    def project(self, points: Sequence[Point]) -> NDArray[np.int32]:
        """Pixels (N, 2) as (column, row) of world points."""
        camera = self.camera
        column, row, focal, height = (
            camera.column,
            camera.row,
            camera.focal,
            camera.height,
        )
        pixels = []
        for x, y, z in points:
            scale = focal / (z if z > NEAR else NEAR)
            pixels.append(
                (round(column + x * scale), round(row + (height - y) * scale))
            )
        return np.array(pixels, np.int32)

    def shade(self, color: Color, z: float, gain: float = 1.0) -> Color:
        """A surface color under the light, behind `z` metres of haze."""
        clear = math.exp(-max(z - 4.0, 0.0) / self.light.visibility)
        tint, haze = self.light.gain, self.light.sky_low
        gain, thick = gain * clear, 1 - clear
        return (
            color[0] * gain * tint[0] + haze[0] * thick,
            color[1] * gain * tint[1] + haze[1] * thick,
            color[2] * gain * tint[2] + haze[2] * thick,
        )

    def fill(
        self, points: Sequence[Point], color: Color, label: int, gain: float = 1.0
    ) -> None:
        """Paint a polygon of world points."""
        self.fill_pixels(
            [self.project(points)], self.shade(color, points[0][2], gain), label
        )

    def fill_pixels(
        self, polygons: Sequence[NDArray[np.int32]], shaded: Color, label: int
    ) -> None:
        """Paint polygons of pixels, which must not overlap, in an already shaded color."""
        cv2.fillPoly(self.pixels, polygons, (*shaded, label))

    def ball(
        self, centre: Point, radius: float, color: Color, label: int, gain: float = 1.0
    ) -> None:
        """Paint a disc that faces the camera; radius in metres."""
        ((column, row),) = self.project([centre]).tolist()
        pixels = max(1, round(radius * (self.camera.focal / max(centre[2], NEAR))))
        cv2.circle(
            self.pixels,
            (column, row),
            pixels,
            (*self.shade(color, centre[2], gain), label),
            cv2.FILLED,
        )

    def fill_strip(
        self, strip: tuple[float, float, float, float], shaded: Color, label: int
    ) -> None:
        """Paint a strip of ground, given as for `strip`."""
        self.fill_pixels([self.strip(*strip)], shaded, label)

    def strip(
        self, left: float, right: float, near: float, far: float
    ) -> NDArray[np.int32]:
        """Pixels of a strip of ground between two sides of the street, following its bend."""
        camera = self.camera
        near = max(near, NEAR)
        z = near * (far / near) ** (SHORT if far < 1.6 * near else LONG)
        scale = camera.focal / z
        middle = (
            camera.column
            + (camera.heading * z + 0.5 * camera.bend * z * z - camera.side) * scale
        )
        pixels = np.empty((2, len(z), 2))
        pixels[0, :, 0], pixels[1, :, 0] = (
            middle + left * scale,
            (middle + right * scale)[::-1],
        )
        pixels[0, :, 1] = camera.row + camera.height * scale
        pixels[1, :, 1] = pixels[0, ::-1, 1]
        return np.rint(pixels.reshape(-1, 2)).astype(np.int32)
