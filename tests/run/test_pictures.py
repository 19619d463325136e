"""Pictures that a page holds: what is blended, and what is thinned."""

import base64

import cv2
import numpy as np
import pytest

from segpipe.run.pages import Chart, Curve, PlotAxis, jpeg_url, thin
from segpipe.run.pictures import blend, errors, shrink

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


def test_a_long_curve_is_thinned_but_keeps_its_extremes() -> None:
    points = [(float(step), 1.0) for step in range(5000)]
    points[2500] = (2500.0, 9.0)
    points[3333] = (3333.0, -4.0)
    thinned = thin(points, 240)
    assert len(thinned) <= 240
    assert {(2500.0, 9.0), (3333.0, -4.0)} <= set(thinned)
    assert thinned == sorted(thinned)
    assert thin(points[:9], 240) == points[:9]


@pytest.mark.parametrize(
    "points", [[(5.0, 0.0)], [(1.0, 2.0), (1.0, 2.0)], [(1.0, -3.0), (2.0, -3.0)]]
)
def test_flat_and_single_curves_lie_inside_the_chart(
    points: list[tuple[float, float]],
) -> None:
    chart = Chart("x", [Curve(points)])
    for x, y in chart.drawn(chart.lines[0]):
        assert 0 <= x <= chart.width
        assert 0 <= y <= chart.height
    assert chart.y.ticks()
    assert chart.x.ticks(whole=True)


def test_ticks_are_round_and_inside() -> None:
    axis = PlotAxis(0.0, 0.083, 100.0, 0.0)
    assert axis.ticks() == [
        (100.0, "0"),
        (75.9, "0.02"),
        (51.8, "0.04"),
        (27.7, "0.06"),
        (3.6, "0.08"),
    ]
    assert [text for _, text in PlotAxis(1, 3, 0, 9).ticks(whole=True)] == [
        "1",
        "2",
        "3",
    ]
