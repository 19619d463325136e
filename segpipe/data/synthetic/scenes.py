"""Procedural street scenes, so that training works before any data set is downloaded.

A scene is a pure function of its generator and the size: layout, weather and noise are drawn from it, and OpenCV only
paints. canvas.py has the camera, things.py what stands along the street.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from segpipe.data.synthetic.canvas import (
    NEAR,
    SUPERSAMPLE,
    Canvas,
    Light,
    Paint,
    paints,
    pick,
)
from segpipe.data.synthetic.things import (
    KINDS,
    LANE_MARK,
    LEAVES,
    ROAD,
    SIDEWALK,
    SKY,
    Kind,
    Thing,
)

Bytes = NDArray[np.uint8]
ASPHALT = paints(ROAD, "56565a 4a4c52")
STONE = paints(SIDEWALK, "a6a098 b0a090")
KERB, JOINT = paints(SIDEWALK, "ccc8c0 84807a")
WHITE = paints(LANE_MARK, "f0f0ec")[0]
FAR = 150.0  # metres; the ground ends there
GRAIN = np.array(
    [14, 10, 14, 12, 22, 7, 7, 6, 5, 2], np.float32
)  # grey levels, by class
LIGHTS = [
    Light(*paints(SKY, colors)[:, :3], *strengths)
    for colors, *strengths in (
        ("4684d6 c8dcee fff8ea", 150, 1.0, 0.0),  # clear day
        ("96a0ac d0d4d8 d4d8dc", 110, 0.0, 0.0),  # overcast
        ("566ca8 fac48e ffd0a4", 120, 0.8, 0.3),  # evening
        ("c4cace dededa e0e0dc", 50, 0.1, 0.1),  # mist
        ("243060 967a8c 78789a", 100, 0.0, 0.9),  # dusk
    )
]


def paint_scene(rng: Generator, size: tuple[int, int]) -> tuple[Bytes, Bytes]:
    """Image uint8 (H, W, 3) RGB and target uint8 (H, W) of the scene that `rng` draws."""
    light = LIGHTS[rng.integers(len(LIGHTS))]
    tint = light.tint / 240 * rng.uniform(0.84, 1.12, 3)
    canvas = Canvas(size, light._replace(tint=tint), rng)
    kerb = rng.uniform(5.2, 6.2)
    things: list[Thing] = []
    for kind in KINDS:
        things += line_up(kind, -1, kerb, rng) + line_up(kind, 1, kerb, rng)
    paint_sky(canvas, rng)
    paint_ground(canvas, kerb, rng)
    shade_ground(canvas, things, rng)
    for thing in sorted(things, key=lambda thing: -thing.ahead - thing.length):
        thing.kind.draw(canvas, thing, rng)
    return expose(canvas, size, rng)


def line_up(kind: Kind, sign: int, kerb: float, rng: Generator) -> list[Thing]:
    """Things of a kind on one side of the street, more or fewer of them than on others."""
    things = []
    spread = rng.uniform(0.8, 2.0)
    ahead = kind.first + rng.uniform(0, kind.gap[1])
    while ahead < kind.last:
        width, height, length = rng.choice(kind.sizes) * rng.uniform(0.85, 1.15, 3)
        side = sign * (kerb + kind.place + rng.uniform(0, 0.7) + width / 2)
        paint = pick(rng, kind.paints)
        if ahead + length > 4:
            things.append(Thing(kind, side, ahead, width, height, length, paint))
        ahead += length + spread * rng.uniform(*kind.gap)
    return things


def paint_sky(canvas: Canvas, rng: Generator) -> None:
    """A gradient from zenith to horizon, and clouds of smooth noise."""
    sky = canvas.pixels[: int(canvas.row) + 8]
    size = sky.shape[1] // 4, sky.shape[0] // 4
    down = np.linspace(0, 1, size[1])[:, None, None]
    noise = cv2.resize(rng.random((9, 9)), size, interpolation=cv2.INTER_CUBIC)
    cloud = np.clip(2 * noise - 1.1, 0, 0.8)[..., None] * (1 - down / 2)
    colors = canvas.light.zenith * (1 - down) + canvas.light.haze * down
    colors = colors + cloud * (canvas.light.haze / 2 + 120 - colors)
    sky[..., :3] = cv2.resize(np.clip(colors, 0, 255), sky.shape[1::-1])
    sky[..., 3] = SKY


def paint_ground(canvas: Canvas, kerb: float, rng: Generator) -> None:
    """Grass, pavements, the road and its marks, as strips along the street."""
    walk, edge = kerb + 3.6, kerb - 2.4
    strips: list[tuple[float, float, float, float, Paint]] = []
    strips.append((-300, 300, 0, FAR, pick(rng, LEAVES)))
    strips.append((-walk, walk, 0, FAR, pick(rng, STONE)))
    strips += [(-walk, walk, at, at + 0.06, JOINT) for at in np.arange(2, 24, 1.5)]
    strips.append((-kerb - 0.3, kerb + 0.3, 0, FAR, KERB))
    strips.append((-kerb, kerb, 0, FAR, pick(rng, ASPHALT)))
    strips += [(side - 0.08, side + 0.08, 0, 60, WHITE) for side in (-edge, edge)]
    for at in np.arange(rng.uniform(-2, 4), 60, 7):
        strips.append((-0.12, 0.12, at, at + 3.4, WHITE))
    at = rng.uniform(7, 30)
    if at < 16:  # a crossing
        for side in np.arange(0.4 - kerb, kerb - 0.6, 1.1):
            strips.append((side, side + 0.55, at, at + 3, WHITE))
    for left, right, near, far, paint in strips:
        ahead = 1 / np.linspace(1 / max(near, NEAR), 1 / max(far, NEAR), 24)
        sides = np.repeat([left, right], 24)
        places = [sides, 0 * sides, np.append(ahead, ahead[::-1])]
        canvas.fill(np.stack(places, -1), paint)


def shade_ground(canvas: Canvas, things: list[Thing], rng: Generator) -> None:
    """Shadows below things and away from the sun, then haze, which grows with distance."""
    top = int(canvas.row) + 2
    ground = canvas.pixels[top:, :, :3]
    lit = np.full(canvas.pixels.shape[:2], 255, np.uint8)
    cast = canvas.light.sun * rng.uniform((-0.9, 0, -0.3), (-0.3, 0, 0.5))
    feet = np.array([[*thing.cut(0, 0), *thing.cut(0, 0, 1)] for thing in things])
    heights = np.array([thing.height for thing in things])[:, None, None]
    for pixels in canvas.project(np.concatenate([feet, feet + cast * heights], 1)):
        cv2.fillConvexPoly(lit, cv2.convexHull(pixels), 140)
    metres = canvas.focal * canvas.height / np.arange(2, 2 + len(ground))
    clear = np.maximum(1 - metres / canvas.light.visibility, 0.2)
    clear = clear[:, None, None].astype(np.float32)
    shade = clear / np.float32(255) * lit[top:, :, None]
    ground[:] = ground * shade + np.float32(canvas.light.haze) * (1 - clear)


def expose(
    canvas: Canvas, size: tuple[int, int], rng: Generator
) -> tuple[Bytes, Bytes]:
    """What the camera records: lens, texture of the surfaces and noise of the sensor."""
    small = cv2.resize(canvas.pixels, size[::-1], interpolation=cv2.INTER_AREA)
    target = np.ascontiguousarray(canvas.pixels[::SUPERSAMPLE, ::SUPERSAMPLE, 3])
    grain = (rng.random(size, np.float32) - 0.5) * GRAIN[target]
    noise = (rng.random((*size, 3), np.float32) - 0.5) * 10
    image = np.clip(small[..., :3] + grain[..., None] + noise, 0, 255)
    return image.astype(np.uint8), target
