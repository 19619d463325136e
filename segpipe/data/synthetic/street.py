"""The things of a street, each a function that paints itself: walls, trees, vehicles, people, poles, signs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from segpipe.data.catalog import STREET
from segpipe.data.synthetic.canvas import NEAR, Canvas, Chance, Colour, Point

ROAD, LANE_MARK, SIDEWALK, BUILDING, VEGETATION, VEHICLE, PEDESTRIAN, POLE, SIGN, SKY = range(STREET.num_classes)
MIN_POLE = 5.0  # pixels at a width of 384; thinner poles are not learnt at stride 8 in a few minutes

WALLS: list[Colour] = [
    (150, 82, 62), (186, 158, 118), (205, 196, 178), (150, 150, 152), (172, 122, 84), (120, 104, 96), (214, 184, 132),
    (128, 138, 150),
]  # fmt: skip
PAINTS: list[Colour] = [
    (190, 30, 32), (28, 60, 140), (225, 225, 228), (38, 38, 42), (140, 144, 150), (200, 160, 30), (30, 96, 70),
    (96, 30, 40),
]  # fmt: skip
CLOTHES: list[Colour] = [
    (200, 40, 50), (40, 60, 120), (30, 30, 36), (220, 200, 60), (230, 230, 230), (60, 130, 90), (190, 90, 160),
    (220, 120, 40),
]  # fmt: skip
SKINS: list[Colour] = [(232, 190, 160), (190, 140, 105), (120, 82, 60)]
WHEEL = [turn * math.pi / 6 for turn in range(12)]
GLASS: Colour = (48, 58, 72)
LEAVES: list[Colour] = [(58, 98, 40), (82, 118, 48), (46, 84, 46), (104, 122, 52)]

# Side views as (distance from the end that faces the camera, height) in metres, and which edges are glass.
REAR = ((0.0, 0.3), (0.0, 0.92), (0.35, 0.98), (0.95, 1.46), (2.6, 1.48), (3.4, 0.98), (4.3, 0.84), (4.4, 0.3))
FRONT = ((0.0, 0.3), (0.05, 0.72), (1.05, 0.96), (1.8, 1.46), (3.4, 1.48), (4.05, 1.0), (4.4, 0.96), (4.4, 0.3))
VAN_REAR = ((0.0, 0.35), (0.0, 1.15), (0.12, 2.05), (3.9, 2.1), (4.6, 1.25), (5.2, 1.05), (5.2, 0.35))
VAN_FRONT = ((0.0, 0.35), (0.0, 0.95), (0.6, 1.2), (1.3, 2.05), (5.1, 2.1), (5.2, 1.1), (5.2, 0.35))
BUS = ((0.0, 0.4), (0.0, 1.3), (0.08, 2.9), (9.5, 2.9), (9.6, 1.3), (9.6, 0.4))


Place = Callable[[float, float, float], Point]  # (along, across, up) of a vehicle -> world
Face = Callable[[Sequence[tuple[float, float]]], list[Point]]  # (across, up) of its end -> world


def wall(canvas: Canvas, chance: Chance, ends: tuple[Point, Point], height: float, paint: Colour, gain: float) -> None:
    """A facade between two points on the ground, with rows of windows and a shop or doors below."""
    (x0, _, z0), (x1, _, z1) = ends
    z0, near = max(z0, NEAR), max(min(z0, z1), NEAR)
    canvas.fill([(x0, 0.0, z0), (x1, 0.0, z1), (x1, height, z1), (x0, height, z0)], paint, BUILDING, gain)
    if near > 32:  # windows would be smaller than the grain
        return
    length = math.hypot(x1 - x0, z1 - z0)
    pitch = chance.uniform(2.2, 3.3)
    centres = np.arange(pitch / 2, length - 0.4, pitch) / length
    half = pitch * chance.uniform(0.24, 0.36) / length
    lit = chance.uniform(0, 1) < canvas.light.lamps
    pane: Colour = (250, 214, 130) if lit else chance.colour([GLASS, (70, 92, 112), (36, 40, 46)], 12)
    frame: Colour = (paint[0] * 1.28 + 10, paint[1] * 1.28 + 10, paint[2] * 1.28 + 10)

    def rows(
        middle: NDArray[np.float64], half: float, low: NDArray[np.float64], tall: float, colour: Colour, gain: float
    ) -> None:
        quads = _wall_quads(canvas, (x0, z0, x1, z1), (middle - half, middle + half), low, tall)
        canvas.fill_pixels(quads, canvas.shade(colour, near, gain), BUILDING)

    floors = np.arange(1, int(height / 3.0), dtype=np.float64) * 3.0 + 0.9
    whole = np.array([0.5])
    if near < 22:
        rows(centres, half + 0.16 / length, floors - 0.16, 1.92, frame, gain)
    rows(centres, half, floors, 1.6, pane, 1.6 if lit else 1.0)
    if near < 26:
        shop = chance.happens(0.6)
        rows(whole, 0.5, np.array([height - 0.5]), 0.5, frame, gain)
        rows(centres, half * 1.2, np.array([0.6 if shop else 0.1]), 1.7, GLASS, 0.8)
        if shop:
            rows(whole, 0.5, np.array([2.45]), 0.6, chance.colour(CLOTHES, 20), gain)


def _wall_quads(
    canvas: Canvas,
    ends: tuple[float, float, float, float],
    spans: tuple[NDArray[np.float64], NDArray[np.float64]],
    low: NDArray[np.float64],
    tall: float,
) -> list[NDArray[np.int32]]:
    """Pixels (4, 2) of the rectangles on a wall: every span, as fractions of its length, at every height `low`."""
    camera = canvas.camera
    x0, z0, x1, z1 = ends
    pixels = np.empty((len(low), len(spans[0]), 4, 2))
    for span, corners in zip(spans, ((0, 3), (1, 2)), strict=True):
        scale = camera.focal / (z0 + span * (z1 - z0))
        column = camera.column + (x0 + span * (x1 - x0)) * scale
        for corner, up in zip(corners, (low, low + tall), strict=True):
            pixels[:, :, corner, 0] = column
            pixels[:, :, corner, 1] = camera.row + (camera.height - up[:, None]) * scale
    return list(np.rint(pixels.reshape(-1, 4, 2)).astype(np.int32))


def building(
    canvas: Canvas,
    chance: Chance,
    side: float,
    outward: int,
    near: float,
    far: float,
    height: float,
    gains: tuple[float, float],
) -> None:
    """A house: the wall along the street and the end wall that faces the camera. `gains` are their brightness."""
    camera = canvas.camera
    paint = chance.colour(WALLS, 18)
    front, back = max(near, NEAR), far
    corner = (camera.across(side, front), 0.0, front)
    if near > 4.0:
        depth = outward * chance.uniform(9, 14)
        away = (corner[0] + depth, 0.0, front)
        wall(canvas, chance, (corner, away), height, paint, gains[1])
        if height < 10 and chance.happens(0.7):
            ridge = (corner[0] + depth / 2, height + 3.0, front)
            eaves = [(corner[0], height, front), (away[0], height, front)]
            canvas.fill([*eaves, ridge], paint, BUILDING, gains[1])
            behind = (camera.across(side, back) + depth / 2, height + 3.0, back)
            roof = [eaves[0], ridge, behind, (camera.across(side, back), height, back)]
            canvas.fill(roof, chance.colour([(120, 62, 48), (86, 82, 84)], 14), BUILDING, gains[0])
    wall(canvas, chance, (corner, (camera.across(side, back), 0.0, back)), height, paint, gains[0])


def tree(canvas: Canvas, chance: Chance, side: float, z: float, height: float) -> None:
    """A trunk and a crown of overlapping discs, darker below."""
    x = canvas.camera.across(side, z)
    radius = height * chance.uniform(0.26, 0.34)
    middle = height - radius
    canvas.fill(_upright(x, z, 0.13 * radius, 0.09 * radius, 0.0, middle), (84, 62, 44), VEGETATION)
    leaf = chance.colour(LEAVES, 12)
    canvas.ball((x, middle, z), radius * 0.62, leaf, VEGETATION, 0.8)
    blobs = [(chance.uniform(0, 6.2832), math.sqrt(chance.uniform(0, 1))) for _ in range(12 if z < 24 else 7)]
    for angle, reach in sorted(blobs, key=lambda blob: blob[1] * math.sin(blob[0])):
        up = reach * math.sin(angle)
        centre = (x + radius * reach * math.cos(angle) * 0.85, middle + radius * up * 0.9, z)
        canvas.ball(centre, radius * chance.uniform(0.38, 0.54), leaf, VEGETATION, 0.95 + 0.32 * up)


def hedge(canvas: Canvas, chance: Chance, side: float, near: float, far: float, height: float) -> None:
    """A row of bushes along the street."""
    leaf = chance.colour(LEAVES, 12)
    for z in np.linspace(far, near, max(3, int((far - near) / 2.0))).tolist():
        x, low = canvas.camera.across(side, z), height * chance.uniform(0.4, 0.5)
        canvas.ball((x, low, z), height * 0.56, leaf, VEGETATION, 0.72)
        canvas.ball((x, low * 1.5, z), height * 0.47, leaf, VEGETATION, 1.12)


def vehicle(canvas: Canvas, chance: Chance, kind: str, side: float, z: float, oncoming: bool) -> None:
    """A car, van or bus on the street, seen from behind or, when oncoming, from the front."""
    profile = {"car": FRONT if oncoming else REAR, "van": VAN_FRONT if oncoming else VAN_REAR, "bus": BUS}[kind]
    half = {"car": 0.92, "van": 1.02, "bus": 1.28}[kind]
    x, slope = canvas.camera.across(side, z), canvas.camera.slope(z)
    paint = chance.colour(PAINTS, 14)

    def place(along: float, across: float, up: float) -> Point:
        return (x + across + slope * along, up, z + along)

    def face(points: Sequence[tuple[float, float]]) -> list[Point]:
        return [place(0.0, across, up) for across, up in points]

    length = profile[-1][0]
    shadow = [place(-0.25, -half - 0.04, 0.0), place(-0.25, half + 0.04, 0.0)]
    shadow += [place(length, half + 0.04, 0.0), place(length, -half - 0.04, 0.0)]
    canvas.fill(shadow, (30, 30, 34), ROAD)
    if z > NEAR:
        tyres = [
            face([(s * half, 0.0), (s * half * 0.68, 0.0), (s * half * 0.68, 0.4), (s * half, 0.4)]) for s in (-1, 1)
        ]
        for tyre in tyres:
            canvas.fill(tyre, (22, 22, 24), VEHICLE)
    glass = _glass_edge(profile)
    for edge in range(len(profile) - 2, -1, -1):
        (far, high), (near, low) = profile[edge + 1], profile[edge]
        steep = abs(high - low) / (abs(far - near) + 1e-6)
        gain = 0.86 if steep > 2 else 1.12
        points = [place(near, -half, low), place(near, half, low), place(far, half, high), place(far, -half, high)]
        canvas.fill(points, paint, VEHICLE, gain)
        if edge == glass:
            inner = half * 0.84
            low_edge, high_edge = (0.9 * low + 0.1 * high, 0.12 * low + 0.88 * high)
            shift = [near + (far - near) * part for part in (0.1, 0.88)]
            pane = [place(shift[0], -inner, low_edge), place(shift[0], inner, low_edge)]
            pane += [place(shift[1], inner * 0.93, high_edge), place(shift[1], -inner * 0.93, high_edge)]
            canvas.fill(pane, GLASS, VEHICLE)
    _flank(canvas, profile, -half if x > 0 else half, place, paint)
    if z < 30:
        _end_details(canvas, half, face, oncoming)


def _glass_edge(profile: Sequence[tuple[float, float]]) -> int:
    """The edge of the end that carries the window: the one that reaches the roof first."""
    roof = max(height for _, height in profile)
    return next(edge for edge in range(len(profile) - 1) if profile[edge + 1][1] > 0.95 * roof)


def _flank(canvas: Canvas, profile: Sequence[tuple[float, float]], across: float, place: Place, paint: Colour) -> None:
    """The side of a vehicle that the camera sees, with windows and wheels."""
    canvas.fill([place(along, across, up) for along, up in profile], paint, VEHICLE, 0.74)
    if place(0, 0, 0)[2] > 26:
        return
    roof, length = max(up for _, up in profile), profile[-1][0]
    top = [along for along, up in profile if up > 0.94 * roof]
    sill = 0.62 * roof + 0.06
    first, last = top[0], top[-1]
    lean = 0.35 if roof < 1.6 else 0.05
    for left, right in ((0.0, 0.48), (0.53, 1.0)):
        start, end = first + (last - first) * left, first + (last - first) * right
        pane = [
            (start - lean * (left == 0), sill),
            (end + lean * (right == 1), sill),
            (end, 0.93 * roof),
            (start, 0.93 * roof),
        ]
        canvas.fill([place(along, across, up) for along, up in pane], GLASS, VEHICLE)
    radius = 0.34 if roof < 2.5 else 0.48
    for centre in (0.19 * length, 0.8 * length):
        for size, colour in ((radius, (20, 20, 22)), (radius * 0.5, (150, 150, 152))):
            wheel = [place(centre + size * math.cos(turn), across, radius + size * math.sin(turn)) for turn in WHEEL]
            canvas.fill(wheel, colour, VEHICLE)


def _end_details(canvas: Canvas, half: float, face: Face, oncoming: bool) -> None:
    """Lamps, plate and bumper of the end that faces the camera."""
    lamp: Colour = (250, 244, 214) if oncoming else (196, 26, 24)
    gain = 1.0 + 1.2 * canvas.light.lamps
    canvas.fill(face([(-half, 0.3), (half, 0.3), (half, 0.46), (-half, 0.46)]), (46, 46, 50), VEHICLE)
    for sign in (-1, 1):
        inner, outer = sign * half * 0.6, sign * half * 0.95
        canvas.fill(face([(inner, 0.62), (outer, 0.62), (outer, 0.84), (inner, 0.84)]), lamp, VEHICLE, gain)
    canvas.fill(face([(-0.27, 0.46), (0.27, 0.46), (0.27, 0.6), (-0.27, 0.6)]), (225, 222, 200), VEHICLE)


def pedestrian(canvas: Canvas, chance: Chance, side: float, z: float) -> None:
    """A walking person: legs, torso, arms, head."""
    x, tall = canvas.camera.across(side, z), chance.uniform(1.62, 1.9)
    top, legs = (
        chance.colour(CLOTHES, 16),
        chance.colour([(36, 40, 60), (60, 56, 52), (24, 24, 28), (96, 104, 130)], 10),
    )
    skin, stride = chance.colour(SKINS, 8), chance.uniform(0.04, 0.24) * (1 if chance.happens(0.5) else -1)

    def part(points: Sequence[tuple[float, float]], colour: Colour, gain: float = 1.0) -> None:
        canvas.fill([(x + across * tall, up * tall, z) for across, up in points], colour, PEDESTRIAN, gain)

    for sign, gain in ((-1, 0.8), (1, 1.0)):
        foot = sign * abs(stride) / 1.7 + sign * 0.02
        part([(sign * 0.005, 0.5), (sign * 0.1, 0.5), (foot + 0.05, 0.03), (foot - 0.05, 0.03)], legs, gain)
        part([(foot - 0.05, 0.05), (foot + 0.07, 0.05), (foot + 0.08, 0.0), (foot - 0.05, 0.0)], (30, 26, 24))
        swing = -sign * stride / 2
        part(
            [(sign * 0.1, 0.81), (sign * 0.155, 0.79), (sign * 0.15 + swing, 0.45), (sign * 0.09 + swing, 0.46)],
            top,
            0.78,
        )
    part([(-0.125, 0.82), (-0.05, 0.85), (0.05, 0.85), (0.125, 0.82), (0.105, 0.47), (-0.105, 0.47)], top)
    canvas.ball(
        (x, 0.925 * tall, z), 0.078 * tall, chance.colour([(40, 28, 20), (90, 66, 40), (20, 20, 20)], 6), PEDESTRIAN
    )
    canvas.ball((x, 0.905 * tall, z), 0.062 * tall, skin, PEDESTRIAN)


def lamp_post(canvas: Canvas, chance: Chance, side: float, z: float) -> None:
    """A street lamp whose arm hangs over the road."""
    x, height = canvas.camera.across(side, z), chance.uniform(5.5, 7.5)
    colour = chance.colour([(70, 74, 78), (44, 52, 50), (140, 142, 142)], 10)
    half = _pole_half(canvas, z, 0.17)
    inward = -1.0 if side > 0 else 1.0
    canvas.fill(_upright(x, z, half, half * 0.8, 0.0, height), colour, POLE)
    end, thick = x + inward * 1.5, half * 1.3
    canvas.fill(
        [(x, height - thick, z), (x, height + thick, z), (end, height + 0.4, z), (end, height + 0.4 - thick, z)],
        colour,
        POLE,
    )
    head = [
        (end - 0.35, height + 0.2, z),
        (end + 0.35, height + 0.2, z),
        (end + 0.25, height + 0.5, z),
        (end - 0.25, height + 0.5, z),
    ]
    canvas.fill(head, (255, 236, 180) if canvas.light.lamps > 0.5 else (200, 200, 196), POLE)


def traffic_sign(canvas: Canvas, chance: Chance, side: float, z: float) -> None:
    """A post with one or two plates: disc, triangle, diamond or board."""
    x, top = canvas.camera.across(side, z), chance.uniform(2.2, 2.9)
    half = _pole_half(canvas, z, 0.09)
    canvas.fill(_upright(x, z, half, half, 0.0, top), (128, 130, 132), POLE)
    size = chance.uniform(0.48, 0.66)
    for plate in range(2 if chance.happens(0.35) else 1):
        _plate(canvas, chance, (x, top + 0.5 * size - plate * 2.1 * size, z), size)


def _plate(canvas: Canvas, chance: Chance, centre: Point, size: float) -> None:
    x, y, z = centre
    gain = 1.05
    kind = chance.integer(0, 3)
    corners, turn = ((18, 0.0), (3, math.pi / 2), (4, math.pi / 2), (4, math.pi / 4))[kind]
    rim: Colour = ((196, 24, 30), (200, 26, 30), (235, 235, 235), (240, 240, 240))[kind]
    inside = chance.colour(
        ([(238, 238, 236), (24, 70, 170)], [(240, 238, 230)], [(240, 190, 20)], [(20, 80, 175), (20, 110, 66)])[kind], 6
    )
    angles = [turn + 2 * math.pi * corner / corners for corner in range(corners)]
    for scale, colour in ((1.0, rim), (0.74, inside)):
        canvas.fill(
            [(x + size * scale * math.cos(a), y + size * scale * math.sin(a), z) for a in angles], colour, SIGN, gain
        )
    ink: Colour = (30, 30, 32) if sum(inside) > 380 else (240, 240, 240)
    bar = size * chance.uniform(0.1, 0.2)
    canvas.fill(
        [
            (x - bar, y - size * 0.3, z),
            (x + bar, y - size * 0.3, z),
            (x + bar, y + size * 0.3, z),
            (x - bar, y + size * 0.3, z),
        ],
        ink,
        SIGN,
    )


def traffic_light(canvas: Canvas, chance: Chance, side: float, z: float) -> None:
    """A post with a signal head; one of three lamps is lit."""
    x, top = canvas.camera.across(side, z), chance.uniform(3.0, 3.8)
    half = _pole_half(canvas, z, 0.11)
    canvas.fill(_upright(x, z, half, half, 0.0, top), (90, 94, 96), POLE)
    canvas.fill(_upright(x, z, 0.38, 0.38, top - 0.6, top + 0.9), (214, 206, 120), SIGN)
    canvas.fill(_upright(x, z, 0.31, 0.31, top - 0.52, top + 0.82), (26, 28, 28), SIGN)
    lit = chance.integer(0, 2)
    for place, (on, off) in enumerate(
        (((255, 50, 40), (70, 26, 24)), ((255, 190, 40), (74, 58, 24)), ((60, 240, 130), (22, 60, 38)))
    ):
        canvas.ball(
            (x, top + 0.6 - 0.45 * place, z), 0.18, on if place == lit else off, SIGN, 1.3 if place == lit else 1.0
        )


def _pole_half(canvas: Canvas, z: float, half: float) -> float:
    """Half width in metres, but never below half of MIN_POLE pixels."""
    return max(half, 0.5 * MIN_POLE * canvas.width / 384 * z / canvas.camera.focal)


def _upright(x: float, z: float, low: float, high: float, bottom: float, top: float) -> list[Point]:
    """A board that faces the camera; half widths below and above."""
    return [(x - low, bottom, z), (x + low, bottom, z), (x + high, top, z), (x - high, top, z)]
