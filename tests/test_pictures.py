"""Pictures that a page holds: what is blended, what is thinned, and where the ticks stand."""

import base64

import cv2
import numpy as np
import pytest

from segpipe.pictures import blend, curve_svg, jpeg_url, shrink, ticks

PALETTE = ((255, 0, 0), (0, 0, 255))


def test_blend_mixes_the_class_colour_and_hatches_what_is_ignored() -> None:
    image = np.full((24, 24, 3), 100, np.uint8)
    ids = np.zeros((24, 24), np.uint8)
    ids[:, 8:16], ids[:, 16:] = 1, 255
    mixed = blend(image, ids, PALETTE, opacity=0.5)
    assert mixed.dtype == np.uint8
    assert mixed[0, 0].tolist() == [178, 50, 50]
    assert mixed[0, 10].tolist() == [50, 50, 178]
    assert set(np.unique(mixed[:, 16:])) == {24, 96}


def test_jpeg_keeps_red_red() -> None:
    url = jpeg_url(np.full((16, 16, 3), (250, 10, 10), np.uint8))
    kind, data = url.split(",", 1)
    assert kind == "data:image/jpeg;base64"
    decoded = cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)
    assert np.abs(decoded[8, 8].astype(int) - (10, 10, 250)).max() < 12  # OpenCV's order is BGR


def test_shrinking_ids_makes_no_new_ones() -> None:
    ids = np.random.default_rng(0).choice(np.array([0, 10, 255], np.uint8), (40, 100))
    assert shrink(ids, 37, smooth=False).shape == (15, 37)
    assert set(np.unique(shrink(ids, 37, smooth=False))) <= {0, 10, 255}
    assert len(np.unique(shrink(ids, 37, smooth=True))) > 3  # the control: averaging does
    assert shrink(ids, 200, smooth=False) is ids


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (10, 8000, [2000, 4000, 6000, 8000]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_ticks_of_a_single_value() -> None:
    assert ticks(3.0, 3.0) == [3.0]


def test_long_curve_is_thinned_but_keeps_its_extremes_in_the_band() -> None:
    points = [(float(step), 1.0) for step in range(5000)]
    points[2500] = (2500.0, 9.0)
    svg = curve_svg(points, label="loss")
    assert len(svg) < 12_000
    line, band = svg.split('class="line"')[1], svg.split('class="band"')[1].split("/>")[0]
    height = {float(pair.split(",")[1]) for pair in band.split('"')[1].split()}
    assert min(height) < 25 < 180 < max(height)  # the one spike reaches the top
    assert line.count(",") < 250


@pytest.mark.parametrize("points", [[(5.0, 0.0)], [(1.0, 2.0), (1.0, 2.0)], [(1.0, -3.0), (2.0, -3.0)]])
def test_flat_and_single_curves_have_finite_coordinates(points: list[tuple[float, float]]) -> None:
    svg = curve_svg(points, label="x", dots=True)
    assert "nan" not in svg
    assert "inf" not in svg
