"""Procedural street scenes, so that training works before any data set is downloaded.

A scene is a pure function of its generator and the size: layout, weather and noise are drawn from it, and OpenCV only
paints. street.py has the objects, atmosphere.py light and lens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe.data.synthetic import street
from segpipe.data.synthetic.atmosphere import draw_light, expose, paint_sky
from segpipe.data.synthetic.canvas import SUPERSAMPLE, Camera, Canvas, Chance, Color
from segpipe.data.synthetic.street import (
    BUILDING,
    LANE_MARK,
    LEAVES,
    ROAD,
    SIDEWALK,
    SKY,
    VEGETATION,
    WALLS,
)

FAR = 150.0  # metres; the ground ends there, behind the skyline
Thing = tuple[
    float, Callable[[], None]
]  # distance by which it is sorted, and the call that paints it


@dataclass(frozen=True)
class Layout:
    """Cross-section of a street: metres from the middle of the road."""

    road: float  # half width
    verge: float  # width of the grass between kerb and pavement on the right, 0 = none
    left: float  # building lines, as positive distances
    right: float
    parking: bool
    sun_side: int  # -1: the sun stands on the left


def paint_scene(
    source: np.random.Generator, size: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Image uint8 (H, W, 3) RGB and target uint8 (H, W) of the scene that `source` draws."""
    chance = Chance(source)
    layout = _layout(chance)
    canvas = Canvas(size, _camera(chance, size), draw_light(chance))
    paint_sky(canvas, chance, SKY)
    _ground(canvas, chance, layout)
    _marks(canvas, chance, layout)
    _shadows(canvas, chance, layout)
    _skyline(canvas, chance)
    things = [
        *_buildings(canvas, chance, layout),
        *_furniture(canvas, chance, layout),
        *_traffic(canvas, chance, layout),
    ]
    for _, paint in sorted(things, key=lambda thing: -thing[0]):
        paint()
    return expose(canvas, chance, size)


def _layout(chance: Chance) -> Layout:
    parking = chance.happens(0.45)
    road = chance.uniform(3.4, 4.2) + (2.0 if parking else 0.0)
    verge = chance.uniform(1.0, 2.4) if chance.happens(0.35) else 0.0
    left, right = (road + chance.uniform(2.4, 4.5) for _ in range(2))
    return Layout(
        road, verge, left, right + verge, parking, -1 if chance.happens(0.5) else 1
    )


def _camera(chance: Chance, size: tuple[int, int]) -> Camera:
    height, width = size[0] * SUPERSAMPLE, size[1] * SUPERSAMPLE
    return Camera(
        focal=width * chance.uniform(0.7, 0.92),
        column=width * chance.uniform(0.38, 0.62),
        row=height * chance.uniform(0.4, 0.52),
        height=chance.uniform(1.35, 1.9),
        side=chance.uniform(1.0, 2.2),
        heading=chance.uniform(-0.04, 0.04),
        bend=chance.uniform(-0.007, 0.007),
    )


def _ground(canvas: Canvas, chance: Chance, layout: Layout) -> None:
    """Grass up to the horizon, pavements with joints and kerbs, and the road with its patches."""
    horizon = int(canvas.camera.row) + 2
    grass = canvas.shade(chance.color(LEAVES, 10), 25, 1.15)
    cv2.rectangle(
        canvas.pixels,
        (0, horizon),
        (canvas.width, canvas.height),
        (*grass, VEGETATION),
        cv2.FILLED,
    )
    stone = chance.color([(168, 160, 150), (150, 146, 142), (176, 158, 140)], 10)
    asphalt = chance.color([(84, 84, 88), (98, 96, 94), (72, 74, 80)], 8)
    road, middle = layout.road, 12
    for left, right in ((-layout.left, -road), (road + layout.verge, layout.right)):
        canvas.fill_strip(
            (left, right, 1.3, FAR), canvas.shade(stone, middle), SIDEWALK
        )
        _joints(canvas, chance, left, right, canvas.shade(stone, middle, 0.84))
    for left, right in ((-road - 0.02, road + 0.3), (-road - 0.3, road)):
        canvas.fill_strip(
            (left, right, 1.3, FAR), canvas.shade(stone, middle, 1.22), SIDEWALK
        )
    canvas.fill_strip((-road, road, 1.3, FAR), canvas.shade(asphalt, middle), ROAD)
    for track in (-2.5, -1.0, 1.0, 2.5):  # where wheels run
        canvas.fill_strip(
            (track - 0.28, track + 0.28, 1.3, 60),
            canvas.shade(asphalt, middle, 0.93),
            ROAD,
        )
    for _ in range(chance.integer(0, 4)):
        z, side, gain = (
            chance.uniform(4, 24),
            chance.uniform(-road, road - 1.2),
            chance.uniform(0.72, 1.14),
        )
        patch = (side, side + chance.uniform(0.5, 1.8), z, z + chance.uniform(0.6, 4))
        canvas.fill_strip(patch, canvas.shade(asphalt, middle, gain), ROAD)


def _joints(
    canvas: Canvas, chance: Chance, left: float, right: float, color: Color
) -> None:
    """Dark lines between the slabs of a pavement, near the camera only."""
    paint = (*color, SIDEWALK)
    for z in np.arange(2.0 + chance.uniform(0, 1), 20, 1.3).tolist():
        ends = canvas.project(
            [(canvas.camera.across(side, z), 0.0, z) for side in (left, right)]
        )
        cv2.polylines(canvas.pixels, [ends], False, paint, 1)
    rows = [
        canvas.strip(side, side, 1.5, 40)[:16]
        for side in np.arange(left + 0.9, right - 0.4, 0.9).tolist()
    ]
    cv2.polylines(canvas.pixels, rows, False, paint, 1)


def _marks(canvas: Canvas, chance: Chance, layout: Layout) -> None:
    """Centre line, edge lines, and sometimes a crossing with its stop line."""
    white = chance.color([(228, 228, 222), (212, 210, 200)], 10)
    centre = (226, 186, 60) if chance.happens(0.2) else white
    width = chance.uniform(0.11, 0.15)

    def mark(
        left: float, right: float, near: float, far: float, color: Color = white
    ) -> None:
        canvas.fill_strip(
            (left, right, near, far),
            canvas.shade(color, (near + min(far, 40)) / 2),
            LANE_MARK,
        )

    if chance.happens(0.3):
        mark(-0.26, -0.06, 1.3, 70, centre)
        mark(0.06, 0.26, 1.3, 70, centre)
    else:
        z = chance.uniform(-1, 4)
        while z < 55:
            mark(-width, width, max(z, 1.3), z + 3.2, centre)
            z += 6.0 if z < 40 else 9.0
    road = layout.road
    if layout.parking or chance.happens(0.7):
        edge = road - (2.1 if layout.parking else 0.35)
        for side in (-edge, edge):
            mark(side - 0.1, side + 0.1, 1.3, 60)
    if chance.happens(0.4):
        z = chance.uniform(7, 15)
        canvas.fill_strip(
            (-road, road, z - 0.2, z + 3.2), canvas.shade((84, 84, 86), z), ROAD
        )
        for side in np.arange(-road + 0.4, road - 0.5, 1.05).tolist():
            mark(side, side + 0.55, z, z + 3.0)
        mark(0.15, road - 0.3, z - 1.3, z - 0.9)


def _shadows(canvas: Canvas, chance: Chance, layout: Layout) -> None:
    """Shadows of houses and trees across the ground when the sun shines."""
    if canvas.light.sun < 0.5:
        return
    horizon = max(0, int(canvas.camera.row))
    shadow = np.zeros((canvas.height - horizon, canvas.width), np.uint8)
    line = (layout.left if layout.sun_side < 0 else layout.right) * layout.sun_side
    z = chance.uniform(-4, 6)
    while z < 60:
        length, reach = chance.uniform(5, 16), chance.uniform(1.5, 6.5)
        left, right = sorted(
            (line + layout.sun_side * 3, line - layout.sun_side * reach)
        )
        strip = canvas.strip(left, right, max(z, 1.3), max(z, 1.3) + length)
        cv2.fillPoly(shadow, [strip - np.array([0, horizon], np.int32)], 255)
        z += length + chance.uniform(1, 9)
    ground = canvas.pixels[horizon:]
    rest = 1 - 0.45 * canvas.light.sun
    dark = cv2.transform(ground, np.diag([rest, rest, rest, 1.0]))
    cv2.copyTo(dark, shadow, ground)


def _skyline(canvas: Canvas, chance: Chance) -> None:
    """Distant trees and roofs, almost lost in haze, that close the view at the horizon."""
    base = canvas.camera.row + canvas.camera.focal * canvas.camera.height / FAR + 3
    unit = canvas.width / 768
    column = -20.0
    while column < canvas.width:
        width, height = chance.uniform(30, 90) * unit, chance.uniform(8, 34) * unit
        if chance.happens(0.4):
            across, up = (
                np.array([0.0, 0.0, width, width]),
                np.array([0.0, height, height, 0.0]),
            )
            shaded, label = canvas.shade(chance.color(WALLS, 10), 110), BUILDING
        else:
            turns = np.linspace(0, np.pi, 9)
            across, up = (
                width / 2 - 0.62 * width * np.cos(turns),
                height * np.sin(turns),
            )
            shaded, label = canvas.shade(chance.color(LEAVES, 10), 95), VEGETATION
        outline = np.stack([column + across, base - up], -1)
        canvas.fill_pixels([np.rint(outline).astype(np.int32)], shaded, label)
        column += width * 0.85


def _buildings(canvas: Canvas, chance: Chance, layout: Layout) -> list[Thing]:
    """Houses and gaps along both sides; a gap holds a tree and a hedge."""
    things: list[Thing] = []
    town = chance.uniform(0.45, 1.0)  # how closed the rows are
    tall = chance.uniform(1.0, 1.9)
    for sign, line in ((-1, layout.left), (1, layout.right)):
        gain = 0.94 - 0.24 * sign * layout.sun_side * max(canvas.light.sun, 0.15)
        z = chance.uniform(-6, 5)
        while z < 70:
            if chance.happens(town):
                far, side = (
                    z + chance.uniform(8, 18),
                    sign * (line + chance.uniform(0, 0.8)),
                )
                height = round(chance.uniform(2, 3.4 * tall)) * 3.0 + 0.8
                if far > 4:
                    house = partial(
                        street.building,
                        canvas,
                        chance,
                        side,
                        sign,
                        (z, far),
                        height,
                        gain,
                    )
                    things.append((far, house))
            else:
                near, far = max(z, 4.0), max(z, 4.0) + chance.uniform(5, 12)
                side, middle = (
                    sign * (line + chance.uniform(1.5, 4)),
                    max((near + far) / 2, 7.0),
                )
                things.append(
                    (
                        middle,
                        partial(
                            street.tree,
                            canvas,
                            chance,
                            side,
                            middle,
                            chance.uniform(5, 9),
                        ),
                    )
                )
                hedge = partial(
                    street.hedge,
                    canvas,
                    chance,
                    sign * (line + 0.5),
                    near,
                    far,
                    chance.uniform(0.9, 1.6),
                )
                things.append((far, hedge))
            z = far + chance.uniform(0.0, 2.5)
    return things


def _furniture(canvas: Canvas, chance: Chance, layout: Layout) -> list[Thing]:
    """Trees, lamps, signs and people on the pavements; sometimes people who cross."""
    things: list[Thing] = []
    kerb = layout.road + 0.55

    def add(paint: Callable[..., None], side: float, z: float, *more: float) -> None:
        things.append((z, partial(paint, canvas, chance, side, z, *more)))

    for sign, line in ((-1, layout.left), (1, layout.right)):
        spacing, z = chance.uniform(13, 22), chance.uniform(6.5, 16)
        while z < 48:
            if chance.happens(0.85):
                add(street.lamp_post, sign * kerb, z)
            if chance.happens(0.5):
                add(
                    street.tree,
                    sign * (kerb + 0.3),
                    z + spacing / 2,
                    chance.uniform(4.2, 6.5),
                )
            z += spacing
        for _ in range(chance.integer(1, 2) if sign > 0 else chance.integer(0, 2)):
            paint = street.traffic_light if chance.happens(0.3) else street.traffic_sign
            add(paint, sign * (kerb + chance.uniform(0, 0.5)), chance.uniform(7.5, 20))
        for _ in range(chance.integer(1, 3)):
            add(
                street.pedestrian,
                sign * chance.uniform(kerb + 0.2, line - 0.3),
                chance.uniform(5.5, 14),
            )
    for _ in range(chance.integer(0, 2) if chance.happens(0.35) else 0):
        add(
            street.pedestrian,
            chance.uniform(-layout.road, layout.road),
            chance.uniform(7.5, 14),
        )
    return things


def _traffic(canvas: Canvas, chance: Chance, layout: Layout) -> list[Thing]:
    """Vehicles ahead, oncoming and parked, with gaps between them."""
    things: list[Thing] = []
    lanes = [(1.75, False, 0.75, 8.0, 16.0), (-1.75, True, 0.8, 7.0, 16.0)]
    if layout.parking:
        lanes += [
            (layout.road - 1.0, False, 0.6, 4.5, 3.0),
            (1.0 - layout.road, True, 0.6, 4.5, 3.0),
        ]
    for side, oncoming, odds, first, gap in lanes:
        z = first + chance.uniform(0, 9)
        while z < 38:
            draw = chance.uniform(0, 1)
            kind = "bus" if draw < 0.05 and z > 12 else "van" if draw < 0.22 else "car"
            if chance.happens(odds):
                place = side + chance.uniform(-0.2, 0.2)
                things.append(
                    (
                        z,
                        partial(
                            street.vehicle, canvas, chance, kind, place, z, oncoming
                        ),
                    )
                )
            z += {"bus": 12.0, "van": 7.0, "car": 6.0}[kind] + chance.uniform(0, gap)
    return things
