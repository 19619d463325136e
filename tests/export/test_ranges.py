"""Ranges of activations: of every image, and with the outliers cut where that costs least."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import write_graph

from exports import IMAGES
from segpipe.export.lowprec.ranges import BINS, STEPS, Histogram, activation_ranges, least_squares, minmax


def histogram(values: np.ndarray) -> Histogram:
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    return Histogram(low, high, np.histogram(values, BINS, (low, high))[0])


def squared_error(values: np.ndarray, low: float, high: float) -> float:
    step = (high - low) / STEPS
    rounded = np.clip(np.round((values - low) / step), 0, STEPS) * step + low
    return float(np.square(values - rounded).mean())


def test_everything_that_was_seen(tmp_path: Path) -> None:
    model = onnx.load(write_graph(tmp_path / "graph.onnx"))
    found = activation_ranges(model, ["wide", "normalised", "stem_norm_relu"], IMAGES, minmax)
    levels = np.stack(IMAGES)
    assert found["wide"] == (0.0, levels.max())
    low, high = levels.min() / 57.0 - 2.1, levels.max() / 57.0 - 2.1
    assert found["normalised"] == pytest.approx((low, high), abs=1e-5)
    assert found["stem_norm_relu"][0] == 0
    assert activation_ranges(model, ["wide"], [IMAGES[0] // 2], minmax)["wide"][1] < levels.max()


def test_an_outlier_is_cut_and_a_uniform_range_is_not() -> None:
    random = np.random.Generator(np.random.Philox(key=0))
    usual = np.abs(random.normal(0, 1, 200_000))
    found = histogram(np.append(usual, 60.0))
    found.counts[:-1] *= 100  # one in 20 million
    low, high = least_squares(found)
    assert low == 0
    assert 3 < high < 15
    assert least_squares(histogram(random.uniform(-1, 2, 100_000))) == pytest.approx((-1, 2), abs=0.03)


@pytest.mark.parametrize("tail", [0.0, 8.0, 20.0])
def test_the_range_has_the_least_error(tail: float) -> None:
    random = np.random.Generator(np.random.Philox(key=1))
    values = np.append(np.abs(random.standard_t(3, 50_000)), tail)
    low, high = least_squares(histogram(values))
    own = squared_error(values, low, high)
    for share in (0.5, 0.8, 1.25, 2.0):
        assert own <= 1.02 * squared_error(values, low, min(high * share, float(values.max())))


def test_an_activation_of_zeros_has_a_range() -> None:
    assert least_squares(Histogram(0.0, 0.0, np.zeros(BINS, np.int64))) == (0.0, 0.0)
