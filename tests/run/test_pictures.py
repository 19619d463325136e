"""Pictures that a page holds: what is blended, and what is thinned."""

import base64

import cv2
import numpy as np
import pytest

from segpipe.run.pictures import (
    COLORS,
    Line,
    blend,
    curve_svg,
    errors,
    jpeg_url,
    shrink,
)

PALETTE = ((255, 0, 0), (0, 0, 255))


def test_blend_mixes_the_class_color_and_hatches_what_is_ignored() -> None:
    image = np.full((24, 24, 3), 100, np.uint8)
    ids = np.zeros((24, 24), np.uint8)
    ids[:, 8:16], ids[:, 16:] = 1, 255
    mixed = blend(image, ids, PALETTE, opacity=0.5)
    assert mixed.dtype == np.uint8
    assert mixed[0, 0].tolist() == [178, 50, 50]
    assert mixed[0, 10].tolist() == [50, 50, 178]
    assert set(np.unique(mixed[:, 16:])) == {24, 96}


def test_errors_are_red_and_what_has_no_label_is_hatched() -> None:
    image = np.full((24, 24, 3), (0, 100, 200), np.uint8)
    target, pred = np.zeros((24, 24), np.uint8), np.zeros((24, 24), np.uint8)
    pred[:, 8:] = 1
    target[:, 16:] = 255
    shown = errors(image, target, pred)
    assert shown[0, 0].tolist() == [178, 178, 178]  # half of the mean, and 128
    red, green, blue = shown[0, 10].tolist()
    assert red > 200
    assert max(green, blue) < 70
    assert set(np.unique(shown[:, 16:])) == {24, 96}


def test_jpeg_keeps_red_red() -> None:
    url = jpeg_url(np.full((16, 16, 3), (250, 10, 10), np.uint8))
    kind, data = url.split(",", 1)
    assert kind == "data:image/jpeg;base64"
    decoded = cv2.imdecode(
        np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR
    )
    assert (
        np.abs(decoded[8, 8].astype(int) - (10, 10, 250)).max() < 12
    )  # OpenCV's order is BGR


def test_shrinking_ids_makes_no_new_ones() -> None:
    ids = np.random.default_rng(0).choice(np.array([0, 10, 255], np.uint8), (40, 100))
    assert shrink(ids, 37, smooth=False).shape == (15, 37)
    assert set(np.unique(shrink(ids, 37, smooth=False))) <= {0, 10, 255}
    assert (
        len(np.unique(shrink(ids, 37, smooth=True))) > 3
    )  # the control: averaging does
    assert shrink(ids, 200, smooth=False) is ids


def alone(points: list[tuple[float, float]]) -> list[Line]:
    return [(COLORS[0], "solid", points)]


def path_of(svg: str, start: str) -> list[tuple[float, float]]:
    """Coordinates of the first path after `start`."""
    data = svg.split(start, 1)[1].split(' d="', 1)[1].split('"', 1)[0]
    numbers = [
        float(word)
        for word in data.replace("M", " ").replace("L", " ").replace("z", " ").split()
    ]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_long_curve_is_thinned_but_keeps_its_extremes_in_the_band() -> None:
    points = [(float(step), 1.0) for step in range(5000)]
    points[2500] = (2500.0, 9.0)
    svg = curve_svg(alone(points), label="loss")
    assert len(svg) < 40_000
    band = path_of(svg, 'id="band"')
    heights = [y for _, y in band]
    assert (
        max(heights) - min(heights) > 80
    )  # of 173: the one spike reaches the top, 0 is the bottom
    assert len(band) < 500


def test_a_curve_is_the_same_each_time_and_loads_nothing() -> None:
    first, second = (
        curve_svg(alone([(0.0, 1.0), (5.0, 2.0)]), label="loss", dots=True)
        for _ in range(2)
    )
    assert first == second
    assert "<?xml" not in first
    assert "<!DOCTYPE" not in first
    assert 'href="http' not in first


@pytest.mark.parametrize(
    "points", [[(5.0, 0.0)], [(1.0, 2.0), (1.0, 2.0)], [(1.0, -3.0), (2.0, -3.0)]]
)
def test_flat_and_single_curves_have_finite_coordinates(
    points: list[tuple[float, float]],
) -> None:
    svg = curve_svg(alone(points), label="x", dots=True)
    assert "nan" not in svg.lower()
    assert "inf" not in svg.lower()
