"""Procedural street scenes, so that training works before any data set is downloaded.

A scene is a pure function of its generator and the size: layout, weather and noise are
drawn from it, and OpenCV only paints. scenes.yaml has the colors, the weather and what
stands along the street.

Places are (side, up, ahead) in metres: `side` to the right of the middle of the road,
`ahead` along its bend. A paint is a color and a class id. Painting goes from far to near:
later surfaces hide earlier ones in both images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, exp, pi, sin
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import yaml
from numpy.random import Generator
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Paint = Floats  # (4,): red, green, blue, class id

TABLES = yaml.safe_load(Path(__file__).with_name("scenes.yaml").read_text())
SUPERSAMPLE = 2  # a pixel's color is the mean of 2x2 painted ones, its id that of one
NEAR = 1.2  # metres; nothing nearer is painted
FAR = 150.0  # metres; the ground ends there
# Of the image's width; thinner poles are not learned in a few minutes.
THIN = 6.5 / 384
# Of the texture of surfaces, in grey levels, by class.
GRAIN = np.array([14, 10, 14, 12, 22, 7, 7, 6, 5, 2], np.float32)
ROUND = np.array([(cos(turn * pi / 6), sin(turn * pi / 6)) for turn in range(12)])


def _colors(text: str) -> Floats:
    """Colors (N, 3) from hexadecimal ones."""
    return np.array([[*bytes.fromhex(color)] for color in text.split()], np.float64)


def _paints() -> dict[str, Floats]:
    """Paints (N, 4) by name."""
    found = {}
    for label, paints in enumerate(TABLES["paints"].values()):
        for name, text in paints.items():
            colors = _colors(text)
            found[name] = np.column_stack([colors, np.full(len(colors), label)])
    return found


def _shapes() -> dict[str, Floats]:
    """Outlines (K, 2) by name, as shares of a face."""
    found = {"disc": 0.5 * ROUND + 0.5}
    for name, text in TABLES["shapes"].items():
        corners = [point.split(",") for point in text.split()]
        found[name] = np.array(corners, np.float64) / 100
    return found


CLASSES = tuple(TABLES["paints"])
PAINTS, SHAPES = _paints(), _shapes()


class Light(NamedTuple):
    """Time of day and weather."""

    zenith: Floats  # colors (3,)
    haze: Floats  # of the horizon
    tint: Floats  # of the light, 1 = neutral daylight
    visibility: float  # metres at which a color is 63 % haze
    sun: float  # strength of direct light, 0 = overcast
    lamps: float  # share of lamps and windows that are lit


class Kind(NamedTuple):
    """A kind of thing, of which several stand behind one another; as in scenes.yaml."""

    draw: str
    paint: str
    sizes: list[list[float]]
    place: float
    gap: list[float]
    ahead: list[float]


LIGHTS = [Light(*_colors(light[0]), *light[1:]) for light in TABLES["lights"]]
KINDS = [Kind(**kind) for kind in TABLES["kinds"]]


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
        half = self.width / 2
        bottom, top = self.height * low, self.height * high
        near = self.ahead + self.length * back
        far = self.ahead + self.length * (back + lean)
        return np.array(
            [
                (self.side - half, bottom, near),
                (self.side + half, bottom, near),
                (self.side + half * taper, top, far),
                (self.side - half * taper, top, far),
            ]
        )


class _Polygons(NamedTuple):
    """Polygons to be painted: places (K, 3), or shapes (..., K, 2) on a face (4, 3)."""

    face: Floats | None
    corners: Floats
    paint: Paint
    gain: float


def _on_faces(drawn: Sequence[_Polygons]) -> Floats:
    """Places (n, 3) of the corners of shapes, one shape after another."""
    if not drawn:
        return np.empty((0, 3))
    counts = [each.corners.size // 2 for each in drawn]
    faces = np.array([each.face for each in drawn])
    corners = np.repeat(faces, counts, axis=0).transpose(1, 0, 2)
    shares = np.concatenate([each.corners.reshape(-1, 2) for each in drawn])
    x, y = shares[:, :1], shares[:, 1:]
    low = corners[0] + x * (corners[1] - corners[0])
    high = corners[3] + x * (corners[2] - corners[3])
    whole: Floats = low + y * (high - low)
    return whole


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
        self._waiting: list[_Polygons] = []

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
        """Paint a polygon (K, 3) under the light and behind haze, when `flush` is called."""
        self._waiting.append(_Polygons(None, places, paint, gain))

    def draw(
        self, face: Floats, shape: Floats, paint: Paint, gain: float = 1.0
    ) -> None:
        """The same for shapes (..., K, 2) on a face (4, 3), whose corners are at (0, 0), (1, 0), (1, 1) and (0, 1)."""
        if shape.size:
            self._waiting.append(_Polygons(face, shape, paint, gain))

    def flush(self) -> None:
        """Paint what waits. Computed together, hundreds of polygons cost a tenth of one each."""
        waiting, self._waiting = self._waiting, []
        counts = np.array(
            [each.corners.size // each.corners.shape[-1] for each in waiting]
        )
        on_face = np.repeat([each.face is not None for each in waiting], counts)
        points = np.empty((len(on_face), 3))
        points[on_face] = _on_faces([each for each in waiting if each.face is not None])
        plain = [each.corners for each in waiting if each.face is None]
        if plain:
            points[~on_face] = np.concatenate(plain)
        pixels = self.project(points)
        ends = np.cumsum(counts)
        starts = ends - counts
        nearest = np.minimum.reduceat(points[:, 2], starts).clip(max=1000.0)
        distances = np.maximum(nearest - 4, 0).tolist()
        visibility = self.light.visibility
        clear = np.array([exp(-metres / visibility) for metres in distances])[:, None]
        paints = np.array([each.paint for each in waiting])
        gains = np.array([each.gain for each in waiting])[:, None]
        paints[:, :3] *= self.light.tint
        paints[:, :3] *= gains * clear
        paints[:, :3] += self.light.haze * (1 - clear)
        for each, start, end, color in zip(waiting, starts, ends, paints, strict=True):
            outlines = pixels[start:end].reshape(-1, each.corners.shape[-2], 2)
            cv2.fillPoly(self.pixels, list(outlines), color.tolist())

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
        DRAW[thing.kind.draw](canvas, thing, rng)
    canvas.flush()
    return expose(canvas, size, rng)


def pick(rng: Generator, name: str) -> Paint:
    """One of the paints of that name, a little brighter or darker."""
    gain = rng.uniform(0.88, 1.12)
    choices = PAINTS[name]
    paint: Paint = choices[rng.integers(len(choices))].copy()
    paint[:3] *= gain
    return paint


def line_up(kind: Kind, sign: int, kerb: float, rng: Generator) -> list[Thing]:
    """Things of a kind on one side of the street, more or fewer of them than on others."""
    things = []
    spread = rng.uniform(0.8, 2.0)
    first, last = kind.ahead
    ahead = first + rng.uniform(0, kind.gap[1])
    while ahead < last:
        usual = np.array(kind.sizes[rng.integers(len(kind.sizes))])
        width, height, length = (usual * rng.uniform(0.85, 1.15, 3)).tolist()
        side = sign * (kerb + kind.place + rng.uniform(0, 0.7) + width / 2)
        paint = pick(rng, kind.paint)
        if ahead + length > 4:
            things.append(Thing(kind, side, ahead, width, height, length, paint))
        ahead += length + spread * rng.uniform(kind.gap[0], kind.gap[1])
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
    sky[..., 3] = CLASSES.index("sky")


def paint_ground(canvas: Canvas, kerb: float, rng: Generator) -> None:
    """Grass, pavements, the road and its marks, as strips along the street."""
    walk, edge = kerb + 3.6, kerb - 2.4
    (joint,), (stone,), (white,) = PAINTS["joint"], PAINTS["kerb"], PAINTS["line"]

    def strip(left: float, right: float, near: float, far: float, paint: Paint) -> None:
        ahead = 1 / np.linspace(1 / max(near, NEAR), 1 / max(far, NEAR), 24)
        sides = np.repeat([left, right], 24)
        places = [sides, 0 * sides, np.append(ahead, ahead[::-1])]
        canvas.fill(np.stack(places, -1), paint)

    strip(-300, 300, 0, FAR, pick(rng, "leaves"))
    strip(-walk, walk, 0, FAR, pick(rng, "stone"))
    for at in np.arange(2, 24, 1.5):
        strip(-walk, walk, at, at + 0.06, joint)
    strip(-kerb - 0.3, kerb + 0.3, 0, FAR, stone)
    strip(-kerb, kerb, 0, FAR, pick(rng, "asphalt"))
    for side in (-edge, edge):
        strip(side - 0.08, side + 0.08, 0, 60, white)
    for at in np.arange(rng.uniform(-2, 4), 60, 7):
        strip(-0.12, 0.12, at, at + 3.4, white)
    at = rng.uniform(7, 30)
    if at < 16:  # a crossing
        for side in np.arange(0.4 - kerb, kerb - 0.6, 1.1):
            strip(side, side + 0.55, at, at + 3, white)
    canvas.flush()


def shade_ground(canvas: Canvas, things: list[Thing], rng: Generator) -> None:
    """Shadows below things and away from the sun, then haze, which grows with distance."""
    top = int(canvas.row) + 2
    lit = np.full(canvas.pixels.shape[:2], 255, np.uint8)
    cast = canvas.light.sun * rng.uniform((-0.9, 0, -0.3), (-0.3, 0, 0.5))
    feet = np.array([[*thing.cut(0, 0), *thing.cut(0, 0, 1)] for thing in things])
    heights = np.array([thing.height for thing in things])[:, None, None]
    for pixels in canvas.project(np.concatenate([feet, feet + cast * heights], 1)):
        cv2.fillConvexPoly(lit, cv2.convexHull(pixels), 140)
    ground = canvas.pixels[top:]
    metres = canvas.focal * canvas.height / np.arange(2, 2 + len(ground))
    clear = np.maximum(1 - metres / canvas.light.visibility, 0.2)
    clear = clear[:, None].astype(np.float32)
    shade = clear / np.float32(255) * lit[top:]
    # One channel after another: numpy is slow where the last axis is short.
    for channel, haze in enumerate(canvas.light.haze.astype(np.float32)):
        ground[..., channel] = ground[..., channel] * shade + haze * (1 - clear)


def expose(
    canvas: Canvas, size: tuple[int, int], rng: Generator
) -> tuple[Bytes, Bytes]:
    """What the camera records: lens, texture of the surfaces and noise of the sensor."""
    small = cv2.resize(canvas.pixels, size[::-1], interpolation=cv2.INTER_AREA)
    target = np.ascontiguousarray(canvas.pixels[::SUPERSAMPLE, ::SUPERSAMPLE, 3])
    grain = (rng.random(size, np.float32) - 0.5) * GRAIN.take(target)
    image = small[..., :3] + cv2.merge([grain, grain, grain])
    image += (rng.random((*size, 3), np.float32) - 0.5) * 10
    return np.clip(image, 0, 255, out=image).astype(np.uint8), target


def grid(
    columns: int, rows: int, width: float = 1.0, low: float = 0.0, high: float = 1.0
) -> Floats:
    """Rectangles (N, 4, 2): a share of the width of each column, from `low` to `high` of each row."""
    unit = np.array([(-width, low), (width, low), (width, high), (-width, high)])
    places = [[(x + 0.5, y)] for x in range(columns) for y in range(rows)]
    whole: Floats = (np.array(places) + unit * (0.5, 1)) / (columns, rows)
    return whole


def building(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A house: rows of windows, some of them lit, above shops, and a gable if it is low."""
    if thing.height < 11:
        gables = thing.cut(1, 1.4, 0, 0), thing.cut(1, 1.4, 1, 0)
        canvas.box(*gables, pick(rng, "roof"))
    _, face = canvas.box(thing.cut(), thing.cut(back=1), thing.paint)
    (pane,), (lit_pane,) = PAINTS["pane"], PAINTS["lit_pane"]
    columns, floors = int(thing.length / 2.5), int(thing.height / 3.1)
    share = rng.uniform(0.4, 0.62)
    windows = grid(columns, floors, share, 0.3, 0.82)
    lit = rng.random(len(windows)) < canvas.light.lamps * 0.6
    frames = grid(columns, floors, share + 0.14, 0.24, 0.87)
    canvas.draw(face, frames, pick(rng, "frame"))
    canvas.draw(face, windows, pane)
    canvas.draw(face, windows[lit], lit_pane, 1.5)
    canvas.draw(face, grid(1, 1, 1, 0, 1 / floors), pick(rng, "awning"))
    canvas.draw(face, grid(columns, 1, 0.8, 0, 0.75 / floors), pane)


def plant(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A tree, or a bush if it is wide: leaves in layers, from dark ones below to light ones above."""
    canvas.draw(thing.cut(), SHAPES["trunk"], PAINTS["trunk"][0])
    face = thing.cut(0.35 if thing.height > thing.width else 0.0)
    canvas.draw(face, SHAPES["disc"], thing.paint, 0.6)
    blob = ROUND * (0.16 * min(1.0, thing.height / thing.width), 0.16)
    for layer in range(3):
        middles = rng.uniform((0.15, 0.1), (0.85, 0.5), (12, 1, 2))
        middles[..., 1] += 0.2 * layer
        canvas.draw(face, middles + blob, thing.paint, 0.72 + 0.2 * layer)


LAMPS = grid(4, 1, 0.75, 0.55, 0.82)[::3]
SIDE_WINDOWS = grid(2, 1, 0.84, 0.08, 0.82)


def vehicle(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A car, or a van or bus if it is tall, seen from behind or, oncoming, from the front."""
    (tyre,), (glass,) = PAINTS["tyre"], PAINTS["glass"]
    (head_lamp,), (lamp,) = PAINTS["head_lamp"], PAINTS["tail_lamp"]
    bonnet = 0.02 if thing.height > 1.8 else 0.25
    near, far = 0.06, 1 - bonnet
    if thing.side < 0:
        near, far, lamp = bonnet, 0.94, head_lamp
    canvas.draw(thing.cut(-0.2, 0.3), LAMPS, tyre)
    low = thing.cut(0.18, 0.6), thing.cut(0.18, 0.6, 1)
    front, flank = canvas.box(*low, thing.paint)
    canvas.draw(front, LAMPS, lamp, 1 + canvas.light.lamps)
    canvas.draw(front, SHAPES["bumper"], tyre)
    canvas.draw(front, SHAPES["number_plate"], head_lamp, 0.9)
    for x in (0.2, 0.8):
        wheel = ROUND * (0.36 / thing.length, 0.86 / thing.height) + (x, 0.02)
        canvas.draw(flank, wheel, tyre)
    taper, lean = 1 - bonnet, bonnet / 2
    high = thing.cut(0.6, 1, near, taper, lean), thing.cut(0.6, 1, far, taper, -lean)
    front, flank = canvas.box(*high, thing.paint)
    canvas.draw(front, SHAPES["windscreen"], glass, 1.2)
    canvas.draw(flank, SIDE_WINDOWS, glass)


def person(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A walking person, with a step as wide as the board."""
    trousers, face = pick(rng, "trousers"), thing.cut()
    head = ROUND * (0.12 / thing.width, 0.075) + (0.5, 0.92)
    skin = pick(rng, "skin")
    canvas.draw(face, SHAPES["rear_leg"], trousers, 0.8)
    canvas.draw(face, SHAPES["front_leg"], trousers)
    canvas.draw(face, SHAPES["arms"], thing.paint, 0.75)
    canvas.draw(face, SHAPES["body"], thing.paint)
    canvas.draw(face, head, trousers, 0.8)
    canvas.draw(face, head * (1, 0.97), skin)


def post(canvas: Canvas, thing: Thing) -> None:
    """A pole, but never too thin to be learned."""
    width = THIN * canvas.pixels.shape[1] * thing.ahead / canvas.focal
    canvas.fill(thing._replace(width=max(thing.width, width)).cut(), thing.paint)


def lamp(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A street lamp that hangs over the road."""
    post(canvas, thing)
    face = thing._replace(width=4.0 if thing.side < 0 else -4.0).cut()
    canvas.draw(face, SHAPES["arm"], thing.paint)
    canvas.draw(face, SHAPES["lantern"], PAINTS["lantern"][0])


def sign(canvas: Canvas, thing: Thing, rng: Generator) -> None:
    """A post with a plate, or with a signal."""
    post(canvas, thing)
    face = thing._replace(width=rng.uniform(0.8, 1.1)).cut(0.7)
    plates: Sequence[Sequence[str]] = TABLES["plates"]
    outline, *names = plates[int(rng.integers(len(plates)))]
    rim, inside, mark = (PAINTS[name][0] for name in names)
    canvas.draw(face, SHAPES[outline], rim)
    canvas.draw(face, 0.76 * SHAPES[outline] + 0.12, inside)
    canvas.draw(face, 0.2 * ROUND + (0.5, 0.45), mark)


DRAW: dict[str, Callable[[Canvas, Thing, Generator], None]] = {
    "building": building,
    "plant": plant,
    "vehicle": vehicle,
    "person": person,
    "lamp": lamp,
    "sign": sign,
}
