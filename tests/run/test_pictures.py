"""Pictures that a page holds: what is blended, shrunk and drawn."""

import base64
import re

import cv2
import numpy as np
import pytest

from segpipe.predict.outputs import blend
from segpipe.run.pages import chart, errors, jpeg_url, shrink

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


def test_errors_have_the_color_of_the_prediction_and_no_label_is_hatched() -> None:
    image = np.full((24, 24, 3), (0, 100, 200), np.uint8)
    target, pred = np.zeros((24, 24), np.uint8), np.zeros((24, 24), np.uint8)
    pred[:, 8:] = 1
    target[:, 16:] = 255
    shown = errors(image, target, pred, ((0, 0, 0), (250, 20, 20)))
    assert shown[0, 0].tolist() == [177, 177, 177]  # half of the mean, and 127
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
    assert shrink(ids, 37).shape == (15, 37)
    assert set(np.unique(shrink(ids, 37))) <= {0, 10, 255}
    assert (
        len(np.unique(shrink(np.dstack([ids] * 3), 37))) > 3
    )  # the control: averaging does
    assert shrink(ids, 200) is ids


@pytest.mark.parametrize("points", [[(5.0, 0.0)], [(1.0, -3.0), (2.0, -3.0)]])
def test_flat_and_single_curves_are_drawn_the_same_each_time(
    points: list[tuple[float, float]],
) -> None:
    url = chart("loss", {"": points})
    assert url.startswith("data:image/svg+xml;base64,")
    drawn = base64.b64decode(url.partition(",")[2])
    assert b"#3b82f6" in drawn
    assert chart("loss", {"": points}) == url
    assert chart("loss", {"": []}) == ""


def test_a_curve_stays_below_the_frame_of_its_chart() -> None:
    """The margin was that of the curve's own range: one from 92 to 96 % ran into the upper edge."""
    url = chart("mIoU", {"": [(40.0, 92.0), (80.0, 95.0), (120.0, 96.0)]}, marked=True)
    drawn = base64.b64decode(url.partition(",")[2]).decode()
    curve = next(path for path in drawn.split("<path ") if "#3b82f6" in path)
    heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", curve)]
    frame = drawn.partition('id="patch_2"')[2].partition("/>")[0]
    top = min(float(y) for y in re.findall(r"[ML] \S+ (\S+)", frame))
    assert min(heights) > top + 5
