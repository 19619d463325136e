"""Procedural street scenes, so that training works before any data set is downloaded.

A scene is a pure function of its generator and the size: layout, weather and noise are drawn from the generator, and
OpenCV only paints. scenes.yaml has the colors, the weather, and the things along the street: upright faces with
outlines.

Places are (side, up, ahead) in metres: `side` to the right of the middle of the road, `ahead` along its bend. A paint
is a color and a class id. Painting goes from far to near: later surfaces hide earlier ones in image and target alike.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import yaml
from numpy.random import Generator

from segpipe.data import Float64, Sample, Size, Uint8

Vector = tuple[float, float, float]
Face = tuple[Vector, Vector, Vector]  # a corner, and the edges that start there

TABLES = yaml.safe_load(Path(__file__).with_name("scenes.yaml").read_text())
CLASSES = tuple(TABLES["paints"])
NEAR, FAR = 1.2, 150.0  # meters; nothing nearer is painted, and the ground ends at FAR
GRAIN = 24  # grey levels between the darkest and the brightest noise
OUTLINES: dict[str, Float64] = {
    name: np.array([point.split(",") for point in text.split()], np.float64) / 100
    for name, text in TABLES["outlines"].items()
}


def _colors(text: str) -> Float64:
    """Colors (N, 3) from hexadecimal text."""
    return np.array([[*bytes.fromhex(color)] for color in text.split()], np.float64)


# Paints (N, 4) by name: red, green, blue, class id.
PAINTS: dict[str, Float64] = {
    name: np.insert(_colors(text), 3, label, axis=1)
    for label, paints in enumerate(TABLES["paints"].values())
    for name, text in paints.items()
}


class Kind(NamedTuple):
    """A kind of thing that stands in a row along the street, as in scenes.yaml."""

    paint: str
    sizes: list[list[float]]
    place: float
    gap: list[float]
    ahead: list[float]
    front: list[Any]
    flank: list[Any] = []  # noqa: RUF012


KINDS = [Kind(**kind) for kind in TABLES["kinds"]]


class Thing(NamedTuple):
    """One thing of a kind: the outer and the inner edge of its near end, and its size in metres."""

    kind: Kind
    edges: tuple[float, float]
    ahead: float
    height: float
    length: float
    paint: Float64


class Canvas:
    """Image and target in one array `pixels`, uint8 (H, W, 4): red, green, blue, class id."""

    def __init__(self, size: Size, rng: Generator) -> None:
        rows, columns = size
        colors, self.visibility = TABLES["lights"][rng.integers(len(TABLES["lights"]))]
        self.zenith, self.haze, tint = _colors(colors)
        self.tint = tint / 240 * rng.uniform(0.84, 1.12, 3)
        self.pixels = np.zeros((rows, columns, 4), np.uint8)
        self.view = {name: rng.uniform(*ends) for name, ends in TABLES["view"].items()}
        self.row = rows * self.view["row"]
        # Polygons (N, K, 2) as fractions of a face, with paint and gain; `flush` paints them.
        self.waiting: list[tuple[Face, Float64, Float64, float]] = []

    def draw(self, thing: Thing, rng: Generator) -> None:
        """Queue the flank of a thing that faces the road, then its front."""
        outer, inner = thing.edges
        width, height, length = inner - outer, thing.height, thing.length
        flank = (inner, 0, thing.ahead), (0, 0, length), (0, height, 0)
        front = (outer, 0, thing.ahead), (width, 0, 0), (0, height, 0)
        sides = (flank, length, thing.kind.flank), (front, abs(width), thing.kind.front)
        for face, across, parts in sides:
            for name, paint, gain, *every in parts:
                columns = rows = 1
                if every:
                    columns, rows = int(across / every[0]), int(height / every[1])
                shares = grid(name, max(columns, 1), max(rows, 1))
                own = thing.paint if paint == "own" else pick(rng, paint)
                self.waiting.append((face, shares, own, gain))

    def flush(self) -> None:
        """Paint all queued polygons, with light and haze. Hundreds of polygons are projected together."""
        faces = np.array([face for face, *_ in self.waiting], np.float64)
        points = [shares.reshape(-1, 2) for _, shares, *_ in self.waiting]
        counts = [len(each) for each in points]
        foot, across, up = np.repeat(faces, counts, axis=0).transpose(1, 2, 0)
        x, y = np.concatenate(points).T
        side, height, ahead = foot + x * across + y * up
        ahead = np.maximum(ahead, NEAR)
        view, width = self.view, self.pixels.shape[1]
        bent = (view["heading"] + 0.5 * view["bend"] * ahead) * ahead
        scale = width * view["focal"] / ahead
        columns = width * view["column"] + (side + bent - view["side"]) * scale
        rows = self.row + (view["height"] - height) * scale
        pixels = np.rint(np.column_stack([columns, rows])).astype(np.int32)
        ends = np.cumsum(counts)[:-1]
        outlines, depths = np.split(pixels, ends), np.split(ahead, ends)
        for place, (_, shares, paint, gain) in enumerate(self.waiting):
            nearest = depths[place].min()
            clear = np.exp(-max(nearest - 4, 0) / self.visibility)
            color = paint[:3] * (self.tint * gain * clear) + self.haze * (1 - clear)
            polygons = list(outlines[place].reshape(shares.shape))
            cv2.fillPoly(self.pixels, polygons, [*color.tolist(), paint[3]])


@cache
def grid(name: str, columns: int, rows: int) -> Float64:
    """An outline in each cell of a grid, as fractions (N, K, 2) of the whole."""
    cells = np.indices((columns, rows)).reshape(2, -1).T[:, None]
    return np.asarray((cells + OUTLINES[name]) / (columns, rows))


def pick(rng: Generator, name: str) -> Float64:
    """A random paint with this name, slightly brighter or darker."""
    paint: Float64 = PAINTS[name][rng.integers(len(PAINTS[name]))].copy()
    paint[:3] *= rng.uniform(0.88, 1.12)
    return paint


def paint_scene(rng: Generator, size: Size) -> Sample:
    """Image uint8 (H, W, 3) RGB and target uint8 (H, W) of a scene drawn from `rng`."""
    canvas, kerb = Canvas(size, rng), rng.uniform(5.2, 6.2)
    down = np.linspace(0, 1, int(canvas.row) + 8)[:, None, None]
    sky = canvas.pixels[: len(down)]
    sky[..., :3] = canvas.zenith * (1 - down) + canvas.haze * down
    sky[..., 3] = CLASSES.index("sky")
    paint_ground(canvas, kerb, rng)
    things = [
        thing
        for kind in KINDS
        for sign in (-1, 1)
        for thing in line_up(kind, sign, kerb, rng)
    ]
    for thing in sorted(things, key=lambda thing: -thing.ahead - thing.length):
        canvas.draw(thing, rng)
    canvas.flush()
    return expose(canvas.pixels, rng)


def paint_ground(canvas: Canvas, kerb: float, rng: Generator) -> None:
    """Queue grass, pavements, the road and its markings, as strips along the street."""
    edge = kerb - 2.4
    (stone,), (white,) = PAINTS["kerb"], PAINTS["line"]

    def strip(
        left: float, right: float, near: float, far: float, paint: Float64
    ) -> None:
        ahead = 1 / np.linspace(1 / max(near, NEAR), 1 / far, 12)
        sides = np.repeat([0.0, 1.0], 12)
        shares = np.column_stack([sides, np.append(ahead, ahead[::-1])])
        face = (left, 0, 0), (right - left, 0, 0), (0, 0, 1)
        canvas.waiting.append((face, shares[None], paint, 1))

    strip(-300, 300, 0, FAR, pick(rng, "leaves"))
    strip(-kerb - 3.6, kerb + 3.6, 0, FAR, pick(rng, "stone"))
    strip(-kerb - 0.3, kerb + 0.3, 0, FAR, stone)
    strip(-kerb, kerb, 0, FAR, pick(rng, "asphalt"))
    for side in (-edge, edge):
        strip(side - 0.1, side + 0.1, 0, 60, white)
    for at in np.arange(rng.uniform(-2, 4), 60, 7):
        strip(-0.14, 0.14, at, at + 3.4, white)
    at = rng.uniform(7, 30)
    if at < 16:  # a crossing
        for side in np.arange(0.4 - kerb, kerb - 0.6, 1.1):
            strip(side, side + 0.55, at, at + 3, white)


def line_up(kind: Kind, sign: int, kerb: float, rng: Generator) -> list[Thing]:
    """Things of a kind on one side of the street, with a random density."""
    things = []
    spread = rng.uniform(0.8, 2.0)
    (first, last), (least, most) = kind.ahead, kind.gap
    ahead = first + rng.uniform(0, most)
    while ahead < last:
        usual = np.array(kind.sizes[rng.integers(len(kind.sizes))])
        width, height, length = (usual * rng.uniform(0.85, 1.15, 3)).tolist()
        inner = sign * (kerb + kind.place + rng.uniform(0, 0.7))
        if ahead + length > 4:
            edges = inner + sign * width, inner
            paint = pick(rng, kind.paint)
            things.append(Thing(kind, edges, ahead, height, length, paint))
        ahead += length + spread * rng.uniform(least, most)
    return things


def expose(pixels: Uint8, rng: Generator) -> Sample:
    """Image and target as the camera records them: with lens blur, texture and noise."""
    image = cv2.GaussianBlur(pixels[..., :3], (3, 3), 0.7)
    noise = rng.integers(0, GRAIN, image.shape, np.uint8)
    image = cv2.addWeighted(image, 1, noise, 1, -GRAIN / 2)
    target = np.ascontiguousarray(pixels[..., 3])
    return np.asarray(image, np.uint8), target
