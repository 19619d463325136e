"""What stands along a street: a table of kinds, and how each is drawn.

A thing is a box or a board with shapes on its faces, so a kind is a row of KINDS and a short function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from segpipe.data.synthetic.canvas import (
    ROUND,
    Canvas,
    Floats,
    Paint,
    grid,
    paints,
    pick,
    shape,
)

# Class ids, as in catalog.STREET, and the paints of each class.
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
) = range(10)
WALLS = paints(BUILDING, "a05842 c4a87e d6cdba 9e9ea0 b6845c 7e6e66 dec08c 8894a4")
FRAMES = paints(BUILDING, "ece8e0 5a5450")
ROOFS = paints(BUILDING, "7e4232 5a5658")
AWNINGS = paints(BUILDING, "cc2c36 2c4282 e0cc42 40885e e07c2c")
PANE, LIT_PANE = paints(BUILDING, "344254 ffe296")
LEAVES = paints(VEGETATION, "3e682a 587e34 325a32 70823a")
TRUNK = paints(VEGETATION, "544030")[0]
BODIES = paints(VEHICLE, "be1e20 1c3c8c e4e4e8 28282e 92969c cca422 1e6046")
GLASS, TYRE, TAIL_LAMP, HEAD_LAMP = paints(VEHICLE, "344254 1c1c20 d81818 fff8dc")
CLOTHES = paints(PEDESTRIAN, "cc2c36 2c4282 e0cc42 e8e8e8 40885e e07c2c 222228")
TROUSERS = paints(PEDESTRIAN, "262a40 3e3a36 626a84")
SKINS = paints(PEDESTRIAN, "e8bea0 be8c69 78523c")
METAL = paints(POLE, "4c5054 343c3a 929494")
LANTERN = paints(POLE, "fff0c0")[0]
RED, BLUE, YELLOW, GREEN, WHITE, BLACK = paints(
    SIGN, "d01c20 1854b4 f2c016 30d070 f2f2f0 1c1c20"
)
THIN = 6.5 / 384  # of the image's width; thinner poles are not learned in a few minutes

DISC, TRIANGLE = 0.5 * ROUND + 0.5, shape("0,5 100,5 50,95")
DIAMOND, SIGNAL = shape("50,0 100,50 50,100 0,50"), shape("15,0 85,0 85,180 15,180")
PLATES = (  # outline, rim, inside and mark
    (DISC, RED, WHITE, BLACK),
    (DISC, WHITE, BLUE, WHITE),
    (TRIANGLE, RED, WHITE, BLACK),
    (DIAMOND, WHITE, YELLOW, BLACK),
    (SIGNAL, YELLOW, BLACK, RED),
    (SIGNAL, YELLOW, BLACK, GREEN),
)


class Thing(NamedTuple):
    """One thing of a kind: the middle of its near end and its size in metres."""

    kind: Kind
    side: float
    ahead: float
    width: float
    height: float
    length: float
    paint: Paint

    def cut(
        self,
        low: float = 0.0,
        high: float = 1.0,
        back: float = 0.0,
        taper: float = 1.0,
        lean: float = 0.0,
    ) -> Floats:
        """The face (4, 3) across it, from `low` to `high` and at `back`, as shares of its height and length.

        The top has a share `taper` of the width and is `lean` further back.
        """
        across = self.side + self.width / 2 * np.array([-1, 1, taper, -taper])
        up = self.height * np.array([low, low, high, high])
        along = self.length * np.array([back, back, back + lean, back + lean])
        return np.stack([across, up, self.ahead + along], -1)


class Kind(NamedTuple):
    """A kind of thing, of which several stand behind one another on each side of the street; all in metres."""

    draw: Callable[[Canvas, Thing, Generator], None]
    paints: Floats
    sizes: list[tuple[float, float, float]]  # width, height, length; 15 % more or less
    place: float  # of the nearer edge, outwards from the kerb; up to 0.7 further
    gap: tuple[float, float]  # between two of them
    first: float  # where they begin
    last: float = 60.0


def building(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A house: rows of windows, some of them lit, above shops, and a gable if it is low."""
    if thing.height < 11:
        gables = thing.cut(1, 1.4, 0, 0), thing.cut(1, 1.4, 1, 0)
        canvas.box(*gables, pick(rng, ROOFS))
    _, face = canvas.box(thing.cut(), thing.cut(back=1), thing.paint)
    columns, floors = int(thing.length / 2.5), int(thing.height / 3.1)
    share = rng.uniform(0.4, 0.62)
    windows = grid(columns, floors, share, 0.3, 0.82)
    lit = rng.random(len(windows)) < canvas.light.lamps * 0.6
    frames = grid(columns, floors, share + 0.14, 0.24, 0.87)
    canvas.draw(face, frames, pick(rng, FRAMES))
    canvas.draw(face, windows, PANE)
    canvas.draw(face, windows[lit], LIT_PANE, 1.5)
    canvas.draw(face, grid(1, 1, 1, 0, 1 / floors), pick(rng, AWNINGS))
    canvas.draw(face, grid(columns, 1, 0.8, 0, 0.75 / floors), PANE)


def plant(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A tree, or a bush if it is wide: leaves in layers, from dark ones below to light ones above."""
    canvas.draw(thing.cut(), shape("46,0 54,0 53,60 47,60"), TRUNK)
    face = thing.cut(0.35 if thing.height > thing.width else 0.0)
    canvas.draw(face, DISC, thing.paint, 0.6)
    blob = ROUND * (0.16 * min(1.0, thing.height / thing.width), 0.16)
    for layer in range(3):
        middles = rng.uniform((0.15, 0.1), (0.85, 0.5), (12, 1, 2))
        middles[..., 1] += 0.2 * layer
        canvas.draw(face, middles + blob, thing.paint, 0.72 + 0.2 * layer)


def vehicle(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A car, or a van or bus if it is tall, seen from behind or, oncoming, from the front."""
    bonnet = 0.02 if thing.height > 1.8 else 0.25
    cabin, lamp = (0.06, 1 - bonnet), TAIL_LAMP
    if thing.side < 0:
        cabin, lamp = (bonnet, 0.94), HEAD_LAMP
    corners = grid(4, 1, 0.75, 0.55, 0.82)[::3]
    canvas.draw(thing.cut(-0.2, 0.3), corners, TYRE)
    low = thing.cut(0.18, 0.6), thing.cut(0.18, 0.6, 1)
    front, flank = canvas.box(*low, thing.paint)
    canvas.draw(front, corners, lamp, 1 + canvas.light.lamps)
    canvas.draw(front, shape("0,0 100,0 100,20 0,20"), TYRE)
    canvas.draw(front, shape("36,25 64,25 64,45 36,45"), HEAD_LAMP, 0.9)
    for x in (0.2, 0.8):
        wheel = ROUND * (0.36 / thing.length, 0.86 / thing.height) + (x, 0.02)
        canvas.draw(flank, wheel, TYRE)
    near, far = cabin
    taper, lean = 1 - bonnet, bonnet / 2
    high = thing.cut(0.6, 1, near, taper, lean), thing.cut(0.6, 1, far, taper, -lean)
    front, flank = canvas.box(*high, thing.paint)
    canvas.draw(front, shape("6,8 94,8 94,84 6,84"), GLASS, 1.2)
    canvas.draw(flank, grid(2, 1, 0.84, 0.08, 0.82), GLASS)


def person(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A walking person, with a step as wide as the board."""
    trousers, face = pick(rng, TROUSERS), thing.cut()
    head = ROUND * (0.12 / thing.width, 0.075) + (0.5, 0.92)
    for part, paint, gain in (
        (shape("36,50 50,50 26,0 6,0"), trousers, 0.8),
        (shape("50,50 64,50 96,0 76,0"), trousers, 1.0),
        (shape("32,82 68,82 88,46 72,44 50,80 28,44 12,46"), thing.paint, 0.75),
        (shape("32,84 68,84 65,46 35,46"), thing.paint, 1.0),
        (head, trousers, 0.8),
        (head * (1, 0.97), pick(rng, SKINS), 1.0),
    ):
        canvas.draw(face, part, paint, gain)


def post(canvas: Canvas, thing: Thing) -> None:
    """A pole, but never too thin to be learned."""
    width = THIN * canvas.pixels.shape[1] * thing.ahead / canvas.focal
    canvas.fill(thing._replace(width=max(thing.width, width)).cut(), thing.paint)


def lamp(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A street lamp that hangs over the road."""
    post(canvas, thing)
    face = thing._replace(width=4.0 if thing.side < 0 else -4.0).cut()
    canvas.draw(face, shape("48,98 100,101 100,104 48,101"), thing.paint)
    canvas.draw(face, shape("78,98 102,98 100,104 82,104"), LANTERN)


def sign(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A post with a plate, or with a signal."""
    post(canvas, thing)
    face = thing._replace(width=rng.uniform(0.8, 1.1)).cut(0.7)
    outline, rim, inside, mark = PLATES[rng.integers(len(PLATES))]
    canvas.draw(face, outline, rim)
    canvas.draw(face, 0.76 * outline + 0.12, inside)
    canvas.draw(face, 0.2 * ROUND + (0.5, 0.45), mark)


CAR, VAN, BUS = (1.8, 1.5, 4.3), (2.0, 2.2, 5.2), (2.4, 3.1, 10.0)
HOUSES = [(12.0, 8.0, 12.0), (12.0, 13.0, 14.0), (12.0, 20.0, 12.0)]
KINDS = (
    Kind(plant, LEAVES, [(60, 14, 0)], -40, (3, 3), 120, 130),  # woods on the horizon
    Kind(building, WALLS, HOUSES, 3.6, (0, 7), -9, 100),
    Kind(plant, LEAVES, [(4, 6.5, 0), (3, 5, 0)], 0, (12, 40), 7),
    Kind(plant, LEAVES, [(1.8, 1.6, 0)], 2.2, (2, 20), 5),
    Kind(lamp, METAL, [(0.3, 6.5, 0)], 0.3, (12, 22), 6),
    Kind(sign, METAL, [(0.16, 3.2, 0)], 0.3, (4, 14), 6, 22),
    Kind(person, CLOTHES, [(0.5, 1.75, 0), (0.8, 1.8, 0)], 0.7, (0.5, 5), 6.5, 17),
    Kind(person, CLOTHES, [(0.7, 1.75, 0)], 1.8, (1, 8), 7, 18),
    Kind(person, CLOTHES, [(0.7, 1.75, 0)], -3, (15, 60), 7, 20),
    Kind(vehicle, BODIES, [CAR, CAR, CAR, VAN], -2.3, (2, 16), 3.5),
    Kind(vehicle, BODIES, [CAR, CAR, CAR, VAN, BUS], -5.1, (8, 30), 8),
)
