"""The objects of a street, one function each: buildings, trees, hedges, vehicles, pedestrians, lamps and signs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from segpipe.data.synthetic.canvas import NEAR, Canvas, Chance, Color, Point

(
    ROAD,
    LANE_MARK,
    SIDEWALK,
    BUILDING,
    VEGETATION,
    VEHICLE,
    PEDESTRIAN,
    POLE,
    SIGN,
    SKY,
) = range(10)  # as catalog.STREET
MIN_POLE = 5.0  # pixels at a width of 384; thinner poles are not learned at stride 8 in a few minutes

WALLS: list[Color] = [
    (150, 82, 62), (186, 158, 118), (205, 196, 178), (150, 150, 152), (172, 122, 84), (120, 104, 96), (214, 184, 132),
    (128, 138, 150),
]  # fmt: skip
PAINTS: list[Color] = [
    (190, 30, 32), (28, 60, 140), (225, 225, 228), (38, 38, 42), (140, 144, 150), (200, 160, 30), (30, 96, 70),
    (96, 30, 40),
]  # fmt: skip
CLOTHES: list[Color] = [
    (200, 40, 50), (40, 60, 120), (30, 30, 36), (220, 200, 60), (230, 230, 230), (60, 130, 90), (190, 90, 160),
    (220, 120, 40),
]  # fmt: skip
TROUSERS: list[Color] = [(36, 40, 60), (60, 56, 52), (24, 24, 28), (96, 104, 130)]
SKINS: list[Color] = [(232, 190, 160), (190, 140, 105), (120, 82, 60)]
HAIR: list[Color] = [(40, 28, 20), (90, 66, 40), (20, 20, 20)]
LEAVES: list[Color] = [(58, 98, 40), (82, 118, 48), (46, 84, 46), (104, 122, 52)]
GLASS: Color = (48, 58, 72)

# Side views as (distance from the end that faces the camera, height) in metres.
REAR = (
    (0.0, 0.3),
    (0.0, 0.92),
    (0.35, 0.98),
    (0.95, 1.46),
    (2.6, 1.48),
    (3.4, 0.98),
    (4.3, 0.84),
    (4.4, 0.3),
)
FRONT = (
    (0.0, 0.3),
    (0.05, 0.72),
    (1.05, 0.96),
    (1.8, 1.46),
    (3.4, 1.48),
    (4.05, 1.0),
    (4.4, 0.96),
    (4.4, 0.3),
)
VAN_REAR = (
    (0.0, 0.35),
    (0.0, 1.15),
    (0.12, 2.05),
    (3.9, 2.1),
    (4.6, 1.25),
    (5.2, 1.05),
    (5.2, 0.35),
)
VAN_FRONT = (
    (0.0, 0.35),
    (0.0, 0.95),
    (0.6, 1.2),
    (1.3, 2.05),
    (5.1, 2.1),
    (5.2, 1.1),
    (5.2, 0.35),
)
BUS = ((0.0, 0.4), (0.0, 1.3), (0.08, 2.9), (9.5, 2.9), (9.6, 1.3), (9.6, 0.4))
VEHICLES = {
    "car": (REAR, FRONT, 0.92),
    "van": (VAN_REAR, VAN_FRONT, 1.02),
    "bus": (BUS, BUS, 1.28),
}  # half widths

# Plates of traffic signs: corners, angle of the first, rim, and the colors inside.
PLATES: tuple[tuple[int, float, Color, list[Color]], ...] = (
    (18, 0.0, (196, 24, 30), [(238, 238, 236), (24, 70, 170)]),
    (3, math.pi / 2, (200, 26, 30), [(240, 238, 230)]),
    (4, math.pi / 2, (235, 235, 235), [(240, 190, 20)]),
    (4, math.pi / 4, (240, 240, 240), [(20, 80, 175), (20, 110, 66)]),
)
SIGNALS: tuple[tuple[Color, Color], ...] = (  # lit and dark
    ((255, 50, 40), (70, 26, 24)),
    ((255, 190, 40), (74, 58, 24)),
    ((60, 240, 130), (22, 60, 38)),
)
Place = Callable[
    [float, float, float], Point
]  # (along, across, up) of a vehicle -> world


def _rectangle(
    left: float, right: float, low: float, high: float
) -> list[tuple[float, float]]:
    return [(left, low), (right, low), (right, high), (left, high)]


def _board(
    x: float, z: float, low: float, high: float, bottom: float, top: float
) -> list[Point]:
    """A board that faces the camera; `low` and `high` are its half widths at the bottom and the top."""
    return [
        (x - low, bottom, z),
        (x + low, bottom, z),
        (x + high, top, z),
        (x - high, top, z),
    ]


def _disc(corners: int, radius: float, turn: float = 0.0) -> list[tuple[float, float]]:
    angles = (turn + 2 * math.pi * corner / corners for corner in range(corners))
    return [(radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _pole(
    canvas: Canvas,
    x: float,
    z: float,
    half: float,
    height: float,
    color: Color,
    taper: float = 1.0,
) -> float:
    """Paint a pole and return its half width in metres: `half`, but at least half of MIN_POLE pixels."""
    half = max(half, 0.5 * MIN_POLE * canvas.width / 384 * z / canvas.camera.focal)
    canvas.fill(_board(x, z, half, half * taper, 0.0, height), color, POLE)
    return half


def _wall(
    canvas: Canvas,
    chance: Chance,
    ends: tuple[Point, Point],
    height: float,
    paint: Color,
    gain: float,
) -> None:
    """A facade between two points on the ground, with rows of windows and a shop or doors below."""
    (x0, _, z0), (x1, _, z1) = ends
    z0, near = max(z0, NEAR), max(min(z0, z1), NEAR)
    canvas.fill(
        [(x0, 0.0, z0), (x1, 0.0, z1), (x1, height, z1), (x0, height, z0)],
        paint,
        BUILDING,
        gain,
    )
    if near > 32:  # windows would be smaller than the grain
        return
    length = math.hypot(x1 - x0, z1 - z0)
    pitch = chance.uniform(2.2, 3.3)
    centres = np.arange(pitch / 2, length - 0.4, pitch) / length
    half = pitch * chance.uniform(0.24, 0.36) / length
    lit = chance.uniform(0, 1) < canvas.light.lamps
    pane: Color = (
        (250, 214, 130)
        if lit
        else chance.color([GLASS, (70, 92, 112), (36, 40, 46)], 12)
    )
    frame: Color = (paint[0] * 1.28 + 10, paint[1] * 1.28 + 10, paint[2] * 1.28 + 10)

    def rows(
        middle: NDArray[np.float64], half: float, low: NDArray[np.float64], tall: float
    ) -> list[NDArray[np.int32]]:
        """Pixels (4, 2) of the rectangles around every `middle`, in fractions of the length, at every height `low`."""
        camera, pixels = canvas.camera, np.empty((len(low), len(middle), 4, 2))
        for span, corners in ((middle - half, (0, 3)), (middle + half, (1, 2))):
            scale = camera.focal / (z0 + span * (z1 - z0))
            for corner, up in zip(corners, (low, low + tall), strict=True):
                pixels[:, :, corner, 0] = (
                    camera.column + (x0 + span * (x1 - x0)) * scale
                )
                pixels[:, :, corner, 1] = (
                    camera.row + (camera.height - up[:, None]) * scale
                )
        return list(np.rint(pixels.reshape(-1, 4, 2)).astype(np.int32))

    def fill(quads: list[NDArray[np.int32]], color: Color, gain: float) -> None:
        canvas.fill_pixels(quads, canvas.shade(color, near, gain), BUILDING)

    floors = np.arange(1, int(height / 3.0), dtype=np.float64) * 3.0 + 0.9
    whole = np.array([0.5])
    if near < 22:
        fill(rows(centres, half + 0.16 / length, floors - 0.16, 1.92), frame, gain)
    fill(rows(centres, half, floors, 1.6), pane, 1.6 if lit else 1.0)
    if near < 26:
        shop = chance.happens(0.6)
        fill(rows(whole, 0.5, np.array([height - 0.5]), 0.5), frame, gain)
        fill(
            rows(centres, half * 1.2, np.array([0.6 if shop else 0.1]), 1.7), GLASS, 0.8
        )
        if shop:
            fill(
                rows(whole, 0.5, np.array([2.45]), 0.6), chance.color(CLOTHES, 20), gain
            )


def building(
    canvas: Canvas,
    chance: Chance,
    side: float,
    outward: int,
    span: tuple[float, float],
    height: float,
    gain: float,
) -> None:
    """A house: the wall along the street, of brightness `gain`, and the end wall that faces the camera."""
    camera = canvas.camera
    paint = chance.color(WALLS, 18)
    front, back = max(span[0], NEAR), span[1]
    corner, far_corner = (
        (camera.across(side, front), 0.0, front),
        (camera.across(side, back), 0.0, back),
    )
    if span[0] > 4.0:
        depth = outward * chance.uniform(9, 14)
        away = (corner[0] + depth, 0.0, front)
        _wall(canvas, chance, (corner, away), height, paint, 0.84)
        if height < 10 and chance.happens(0.7):
            ridge = (corner[0] + depth / 2, height + 3.0, front)
            eaves = [(corner[0], height, front), (away[0], height, front)]
            canvas.fill([*eaves, ridge], paint, BUILDING, 0.84)
            roof = [
                eaves[0],
                ridge,
                (far_corner[0] + depth / 2, height + 3.0, back),
                (far_corner[0], height, back),
            ]
            canvas.fill(
                roof, chance.color([(120, 62, 48), (86, 82, 84)], 14), BUILDING, gain
            )
    _wall(canvas, chance, (corner, far_corner), height, paint, gain)


def tree(canvas: Canvas, chance: Chance, side: float, z: float, height: float) -> None:
    """A trunk and a crown of overlapping discs, darker below."""
    x = canvas.camera.across(side, z)
    radius = height * chance.uniform(0.26, 0.34)
    middle = height - radius
    canvas.fill(
        _board(x, z, 0.13 * radius, 0.09 * radius, 0.0, middle),
        (84, 62, 44),
        VEGETATION,
    )
    leaf = chance.color(LEAVES, 12)
    canvas.ball((x, middle, z), radius * 0.62, leaf, VEGETATION, 0.8)
    blobs = [
        (chance.uniform(0, 6.2832), math.sqrt(chance.uniform(0, 1)))
        for _ in range(12 if z < 24 else 7)
    ]
    for angle, reach in sorted(blobs, key=lambda blob: blob[1] * math.sin(blob[0])):
        up = reach * math.sin(angle)
        centre = (
            x + radius * reach * math.cos(angle) * 0.85,
            middle + radius * up * 0.9,
            z,
        )
        canvas.ball(
            centre,
            radius * chance.uniform(0.38, 0.54),
            leaf,
            VEGETATION,
            0.95 + 0.32 * up,
        )


def hedge(
    canvas: Canvas, chance: Chance, side: float, near: float, far: float, height: float
) -> None:
    """A row of bushes along the street."""
    leaf = chance.color(LEAVES, 12)
    for z in np.linspace(far, near, max(3, int((far - near) / 2.0))).tolist():
        x, low = canvas.camera.across(side, z), height * chance.uniform(0.4, 0.5)
        canvas.ball((x, low, z), height * 0.56, leaf, VEGETATION, 0.72)
        canvas.ball((x, low * 1.5, z), height * 0.47, leaf, VEGETATION, 1.12)


def vehicle(
    canvas: Canvas, chance: Chance, kind: str, side: float, z: float, oncoming: bool
) -> None:
    """A car, van or bus on the street, seen from behind or, when oncoming, from the front."""
    *profiles, half = VEHICLES[kind]
    profile: Sequence[tuple[float, float]] = profiles[oncoming]
    x, slope = canvas.camera.across(side, z), canvas.camera.slope(z)
    paint, length = chance.color(PAINTS, 14), profile[-1][0]

    def place(along: float, across: float, up: float) -> Point:
        return (x + across + slope * along, up, z + along)

    ground = _rectangle(-half - 0.04, half + 0.04, -0.25, length)
    canvas.fill(
        [place(along, across, 0.0) for across, along in ground], (30, 30, 34), ROAD
    )
    if z > NEAR:
        for tread in (-half, half):
            tyre = _rectangle(tread, tread * 0.68, 0.0, 0.4)
            canvas.fill(
                [place(0.0, across, up) for across, up in tyre], (22, 22, 24), VEHICLE
            )
    _body(canvas, profile, half, place, paint)
    _flank(canvas, profile, -half if x > 0 else half, place, paint)
    if z < 30:
        _end_details(canvas, half, place, oncoming)


def _body(
    canvas: Canvas,
    profile: Sequence[tuple[float, float]],
    half: float,
    place: Place,
    paint: Color,
) -> None:
    """The surfaces across a vehicle from its far to its near end, with the window of the near end."""
    roof = max(height for _, height in profile)
    window = next(
        edge for edge in range(len(profile) - 1) if profile[edge + 1][1] > 0.95 * roof
    )
    for edge in range(len(profile) - 2, -1, -1):
        (far, high), (near, low) = profile[edge + 1], profile[edge]
        steep = abs(high - low) / (abs(far - near) + 1e-6) > 2
        points = [
            place(near, -half, low),
            place(near, half, low),
            place(far, half, high),
            place(far, -half, high),
        ]
        canvas.fill(points, paint, VEHICLE, 0.86 if steep else 1.12)
        if edge == window:
            inner = half * 0.84
            start, bottom = near + (far - near) * 0.1, 0.9 * low + 0.1 * high
            end, top = near + (far - near) * 0.88, 0.12 * low + 0.88 * high
            pane = [place(start, -inner, bottom), place(start, inner, bottom)]
            pane += [place(end, inner * 0.93, top), place(end, -inner * 0.93, top)]
            canvas.fill(pane, GLASS, VEHICLE)


def _flank(
    canvas: Canvas,
    profile: Sequence[tuple[float, float]],
    across: float,
    place: Place,
    paint: Color,
) -> None:
    """The side of a vehicle that the camera sees, with windows and wheels."""

    def fill(
        points: Sequence[tuple[float, float]], color: Color, gain: float = 1.0
    ) -> None:
        canvas.fill(
            [place(along, across, up) for along, up in points], color, VEHICLE, gain
        )

    fill(profile, paint, 0.74)
    if place(0, 0, 0)[2] > 26:
        return
    roof, length = max(up for _, up in profile), profile[-1][0]
    top = [along for along, up in profile if up > 0.94 * roof]
    first, last, sill = top[0], top[-1], 0.62 * roof + 0.06
    lean = 0.35 if roof < 1.6 else 0.05
    for left, right in ((0.0, 0.48), (0.53, 1.0)):
        start, end = first + (last - first) * left, first + (last - first) * right
        low = [(start - lean * (left == 0), sill), (end + lean * (right == 1), sill)]
        fill([*low, (end, 0.93 * roof), (start, 0.93 * roof)], GLASS)
    radius = 0.34 if roof < 2.5 else 0.48
    for centre in (0.19 * length, 0.8 * length):
        for size, color in ((radius, (20, 20, 22)), (radius * 0.5, (150, 150, 152))):
            fill(
                [(centre + along, radius + up) for along, up in _disc(12, size)], color
            )


def _end_details(canvas: Canvas, half: float, place: Place, oncoming: bool) -> None:
    """Bumper, lamps and plate of the end that faces the camera."""

    def fill(
        left: float,
        right: float,
        low: float,
        high: float,
        color: Color,
        gain: float = 1.0,
    ) -> None:
        points = [
            place(0.0, across, up) for across, up in _rectangle(left, right, low, high)
        ]
        canvas.fill(points, color, VEHICLE, gain)

    lamp: Color = (250, 244, 214) if oncoming else (196, 26, 24)
    fill(-half, half, 0.3, 0.46, (46, 46, 50))
    for sign in (-1, 1):
        fill(
            sign * half * 0.6,
            sign * half * 0.95,
            0.62,
            0.84,
            lamp,
            1.0 + 1.2 * canvas.light.lamps,
        )
    fill(-0.27, 0.27, 0.46, 0.6, (225, 222, 200))


def pedestrian(canvas: Canvas, chance: Chance, side: float, z: float) -> None:
    """A walking person: legs, torso, arms, head."""
    x, tall = canvas.camera.across(side, z), chance.uniform(1.62, 1.9)
    top, legs, skin = (
        chance.color(CLOTHES, 16),
        chance.color(TROUSERS, 10),
        chance.color(SKINS, 8),
    )
    stride = chance.uniform(0.04, 0.24) * (1 if chance.happens(0.5) else -1)

    def part(
        points: Sequence[tuple[float, float]], color: Color, gain: float = 1.0
    ) -> None:
        canvas.fill(
            [(x + across * tall, up * tall, z) for across, up in points],
            color,
            PEDESTRIAN,
            gain,
        )

    for s, gain in ((-1, 0.8), (1, 1.0)):
        foot, swing = s * abs(stride) / 1.7 + s * 0.02, -s * stride / 2
        part(
            [
                (s * 0.005, 0.5),
                (s * 0.1, 0.5),
                (foot + 0.05, 0.03),
                (foot - 0.05, 0.03),
            ],
            legs,
            gain,
        )
        part(
            [
                (foot - 0.05, 0.05),
                (foot + 0.07, 0.05),
                (foot + 0.08, 0.0),
                (foot - 0.05, 0.0),
            ],
            (30, 26, 24),
        )
        part(
            [
                (s * 0.1, 0.81),
                (s * 0.155, 0.79),
                (s * 0.15 + swing, 0.45),
                (s * 0.09 + swing, 0.46),
            ],
            top,
            0.78,
        )
    part(
        [
            (-0.125, 0.82),
            (-0.05, 0.85),
            (0.05, 0.85),
            (0.125, 0.82),
            (0.105, 0.47),
            (-0.105, 0.47),
        ],
        top,
    )
    canvas.ball((x, 0.925 * tall, z), 0.078 * tall, chance.color(HAIR, 6), PEDESTRIAN)
    canvas.ball((x, 0.905 * tall, z), 0.062 * tall, skin, PEDESTRIAN)


def lamp_post(canvas: Canvas, chance: Chance, side: float, z: float) -> None:
    """A street lamp whose arm hangs over the road."""
    x, height = canvas.camera.across(side, z), chance.uniform(5.5, 7.5)
    color = chance.color([(70, 74, 78), (44, 52, 50), (140, 142, 142)], 10)
    thick = _pole(canvas, x, z, 0.17, height, color, taper=0.8) * 1.3
    end = x + (-1.5 if side > 0 else 1.5)
    arm = [
        (x, height - thick, z),
        (x, height + thick, z),
        (end, height + 0.4, z),
        (end, height + 0.4 - thick, z),
    ]
    canvas.fill(arm, color, POLE)
    lamp: Color = (255, 236, 180) if canvas.light.lamps > 0.5 else (200, 200, 196)
    canvas.fill(_board(end, z, 0.35, 0.25, height + 0.2, height + 0.5), lamp, POLE)


def traffic_sign(canvas: Canvas, chance: Chance, side: float, z: float) -> None:
    """A post with one or two plates: disc, triangle, diamond or board."""
    x, top = canvas.camera.across(side, z), chance.uniform(2.2, 2.9)
    _pole(canvas, x, z, 0.09, top, (128, 130, 132))
    size = chance.uniform(0.48, 0.66)
    for plate in range(2 if chance.happens(0.35) else 1):
        _plate(canvas, chance, (x, top + 0.5 * size - plate * 2.1 * size, z), size)


def _plate(canvas: Canvas, chance: Chance, centre: Point, size: float) -> None:
    x, y, z = centre
    corners, turn, rim, palette = PLATES[chance.integer(0, 3)]
    inside = chance.color(palette, 6)
    for radius, color in ((size * 1.0, rim), (size * 0.74, inside)):
        canvas.fill(
            [(x + across, y + up, z) for across, up in _disc(corners, radius, turn)],
            color,
            SIGN,
            1.05,
        )
    ink: Color = (30, 30, 32) if sum(inside) > 380 else (240, 240, 240)
    bar = size * chance.uniform(0.1, 0.2)
    canvas.fill(_board(x, z, bar, bar, y - size * 0.3, y + size * 0.3), ink, SIGN)


def traffic_light(canvas: Canvas, chance: Chance, side: float, z: float) -> None:
    """A post with a signal head; one of three lamps is lit."""
    x, top = canvas.camera.across(side, z), chance.uniform(3.0, 3.8)
    _pole(canvas, x, z, 0.11, top, (90, 94, 96))
    canvas.fill(_board(x, z, 0.38, 0.38, top - 0.6, top + 0.9), (214, 206, 120), SIGN)
    canvas.fill(_board(x, z, 0.31, 0.31, top - 0.52, top + 0.82), (26, 28, 28), SIGN)
    lit = chance.integer(0, 2)
    for place, (on, off) in enumerate(SIGNALS):
        color, gain = (on, 1.3) if place == lit else (off, 1.0)
        canvas.ball((x, top + 0.6 - 0.45 * place, z), 0.18, color, SIGN, gain)
