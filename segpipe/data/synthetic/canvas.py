"""A camera on a curved street, and the two images it paints at once: colors and class ids.

Places are (side, up, ahead) in metres: `side` to the right of the middle of the road, `ahead` along its bend. A paint
is a color and a class id. Painting goes from far to near: later surfaces hide earlier ones in both images.
"""

from __future__ import annotations

from math import cos, exp, pi, sin
from typing import NamedTuple

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Paint = Floats  # (4,): red, green, blue, class id
SUPERSAMPLE = 2  # a pixel's color is the mean of 2x2 painted ones, its id that of one
NEAR = 1.2  # metres; nothing nearer is painted


class Light(NamedTuple):
    """Time of day and weather."""

    zenith: Floats  # colors (3,)
    haze: Floats  # of the horizon
    tint: Floats  # of the light, 1 = neutral daylight
    visibility: float  # metres at which a color is 63 % haze
    sun: float  # strength of direct light, 0 = overcast
    lamps: float  # share of lamps and windows that are lit


class Canvas:
    """Both images in one array `pixels`, uint8 (2H, 2W, 4): red, green, blue, class id."""

    def __init__(self, size: tuple[int, int], light: Light, rng: Generator) -> None:
        rows, columns = size[0] * SUPERSAMPLE, size[1] * SUPERSAMPLE
        self.light = light
        self.pixels = np.zeros((rows, columns, 4), np.uint8)
        self.focal = columns * rng.uniform(0.7, 0.92)  # in pixels, like the next two
        self.column = columns * rng.uniform(0.38, 0.62)  # of the vanishing point
        self.row = rows * rng.uniform(0.4, 0.52)  # of the horizon
        self.height = rng.uniform(1.35, 1.9)  # of the camera, in metres
        self.side = rng.uniform(1.0, 2.2)
        self.heading = rng.uniform(-0.04, 0.04)  # of the road, as a slope
        self.bend = rng.uniform(-0.007, 0.007)  # curvature of the road, 1/m

    def project(self, places: Floats) -> NDArray[np.int32]:
        """Pixels (..., 2) as (column, row) of places (..., 3)."""
        ahead = np.maximum(places[..., 2], NEAR)
        scale = self.focal / ahead
        bent = (self.heading + 0.5 * self.bend * ahead) * ahead
        pixels = np.empty((*ahead.shape, 2))
        pixels[..., 0] = self.column + (places[..., 0] + bent - self.side) * scale
        pixels[..., 1] = self.row + (self.height - places[..., 1]) * scale
        return np.rint(pixels).astype(np.int32)

    def fill(self, places: Floats, paint: Paint, gain: float = 1.0) -> None:
        """Paint a polygon (K, 3), or several (N, K, 3), under the light and behind haze."""
        ahead = places[..., 2].min(initial=1000.0)
        clear = exp(-max(ahead - 4, 0) / self.light.visibility)
        color = paint[:3] * self.light.tint * (gain * clear)
        color += self.light.haze * (1 - clear)
        polygons = self.project(places).reshape(-1, places.shape[-2], 2)
        cv2.fillPoly(self.pixels, list(polygons), (*color.tolist(), paint[3]))

    def draw(
        self, face: Floats, shape: Floats, paint: Paint, gain: float = 1.0
    ) -> None:
        """Paint shapes (..., K, 2) on a face (4, 3), whose corners are at (0, 0), (1, 0), (1, 1) and (0, 1)."""
        x, y = shape[..., :1], shape[..., 1:]
        low = face[0] + x * (face[1] - face[0])
        high = face[3] + x * (face[2] - face[3])
        self.fill(low + y * (high - low), paint, gain)

    def box(self, front: Floats, back: Floats, paint: Paint) -> tuple[Floats, Floats]:
        """Paint the body between two faces; returns the front and the side that is seen."""
        corners = np.concatenate([front, back])
        left, right = corners[[4, 0, 3, 7]], corners[[1, 5, 6, 2]]
        near, far = self.project(right[:2])[:, 0]
        seen = right if far > near else left
        self.fill(corners[[3, 2, 6, 7]], paint, 1.1)
        self.fill(seen, paint)
        self.fill(front, paint, 0.82)
        return front, seen


ROUND = np.array([(cos(turn * pi / 6), sin(turn * pi / 6)) for turn in range(12)])


def shape(points: str) -> Floats:
    """A shape by its corners in percent of a face, as in "0,0 100,0 50,100"."""
    corners = [point.split(",") for point in points.split()]
    outline: Floats = np.array(corners, np.float64) / 100
    return outline


def grid(
    columns: int, rows: int, width: float = 1.0, low: float = 0.0, high: float = 1.0
) -> Floats:
    """Rectangles (N, 4, 2): a share of the width of each column, from `low` to `high` of each row."""
    unit = np.array([(-width, low), (width, low), (width, high), (-width, high)])
    places = [[(x + 0.5, y)] for x in range(columns) for y in range(rows)]
    whole: Floats = (np.array(places) + unit * (0.5, 1)) / (columns, rows)
    return whole


def paints(label: int, colors: str) -> Floats:
    """Paints (N, 4) of a class from hexadecimal colors."""
    rows = [[*bytes.fromhex(color), label] for color in colors.split()]
    return np.array(rows, np.float64)


def pick(rng: Generator, choices: Floats) -> Paint:
    """One of some paints, a little brighter or darker."""
    gain = rng.uniform(0.88, 1.12)
    paint: Paint = rng.choice(choices) * (gain, gain, gain, 1)
    return paint
