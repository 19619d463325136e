"""Preprocessing: the formula to the last bits, RGB order, memory order, and tracing."""

import numpy as np
import pytest
import torch

from segpipe.models.preprocess import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocess,
)

DRAWS = np.random.Generator(np.random.Philox(5))


@pytest.fixture
def every_value() -> torch.Tensor:
    """All 256 values in all three channels, in three different orders."""
    values = torch.arange(256).repeat(2, 1).view(2, 16, 16)
    return torch.stack([values, 255 - values, (values * 7) % 256], dim=-1).to(
        torch.uint8
    )


def reference(image: torch.Tensor) -> np.ndarray:
    wide = image.numpy().astype(np.float64)
    return np.moveaxis(
        (wide / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD), -1, 1
    )


def error_of(result: torch.Tensor, image: torch.Tensor) -> float:
    return float(np.abs(result.numpy() - reference(image)).max())


def test_formula(every_value):
    result = Preprocess()(every_value)
    assert result.dtype == torch.float32
    assert error_of(result, every_value) < 1e-6


def test_swapped_channels_are_seen(every_value):
    """The control: BGR instead of RGB, the most common mistake on a robot, exceeds the bound by far."""
    assert error_of(Preprocess()(every_value.flip(-1)), every_value) > 1


def test_half_precision_would_miss_the_bound(every_value):
    assert error_of(Preprocess().half()(every_value).float(), every_value) > 1e-6


@pytest.mark.parametrize("batch", [1, 2])
def test_channels_last_without_a_copy(every_value, batch):
    result = Preprocess()(every_value[:batch])
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert result.stride() == (16 * 16 * 3, 1, 16 * 3, 3)


def test_other_statistics(every_value):
    assert torch.equal(
        Preprocess(mean=[0, 0, 0], std=[1 / 255] * 3)(every_value),
        every_value.permute(0, 3, 1, 2).float(),
    )


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.trace:FutureWarning",
    "ignore:.torch.jit.trace:DeprecationWarning",
)
def test_traced_for_one_size_it_serves_another(every_value):
    traced = torch.jit.trace(Preprocess(), every_value[:, :8, :8])
    assert torch.equal(traced(every_value), Preprocess()(every_value))


@pytest.mark.parametrize("standardize", [True, False])
def test_the_light_of_an_image_is_taken_out(standardize: bool) -> None:
    """That of each image alone; without the setting it decides, which is the control."""
    draws = np.random.default_rng(0)
    day = torch.from_numpy(draws.integers(0, 120, (2, 48, 64, 3), np.uint8)) * 2
    dusk = day // 2 + torch.tensor([3, 40], dtype=torch.uint8)[:, None, None, None]
    preprocess = Preprocess(standardize=standardize)
    by_day, at_dusk = preprocess(day), preprocess(dusk)
    assert torch.allclose(by_day, at_dusk, atol=1e-3) is standardize
    assert torch.allclose(by_day[:1], preprocess(day[:1]), rtol=0, atol=1e-6)
    planar = preprocess.normalized(day.permute(0, 3, 1, 2).float())
    assert torch.equal(planar, by_day), "what a robot with float planes sends"


def test_a_standardized_image_has_mean_0_and_variance_1() -> None:
    draws = np.random.default_rng(0)
    image = torch.from_numpy(draws.integers(0, 256, (2, 1024, 512, 3), np.uint8))
    seen = Preprocess(standardize=True)(image).double()
    assert seen.mean((1, 2, 3)).abs().max() < 1e-6
    assert seen.var((1, 2, 3), correction=0).sub(1).abs().max() < 1e-3
    gray = torch.full((1, 32, 32, 3), 128, dtype=torch.uint8)
    assert Preprocess(standardize=True)(gray).abs().max() == 0


def test_the_state_travels_with_the_module():
    odd = Preprocess(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    fresh = Preprocess()
    fresh.load_state_dict(odd.state_dict())
    assert torch.equal(fresh.scale, odd.scale)
    assert torch.equal(fresh.bias, odd.bias)


def test_wrong_inputs_are_named(every_value):
    with pytest.raises(TypeError, match=r"float32, but uint8 \(B, H, W, 3\)"):
        Preprocess()(every_value.float())
    with pytest.raises(ValueError, match=r"\(2, 3, 16, 16\), but \(B, H, W, 3\)"):
        Preprocess()(every_value.permute(0, 3, 1, 2))
