"""The recipes of other projects do what they claim: image and target of the crop's size, moved together."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
import torch

from benchmarks import frames
from segpipe import IGNORE_INDEX

if TYPE_CHECKING:
    from benchmarks.baselines.recipes import Recipe

CROP, SCALE = 64, (0.5, 2.0)


@pytest.fixture
def recipes() -> ModuleType:
    """Imported where it is needed: torchvision takes 2 s."""
    return import_module("benchmarks.baselines.recipes")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """The label of a pixel is whether its red channel is bright."""
    labels = cv2.resize(
        np.random.default_rng(0).integers(0, 2, (4, 8), np.uint8),
        (128, 64),
        interpolation=0,
    )
    image, mask = str(tmp_path / "image.png"), str(tmp_path / "mask.png")
    cv2.imwrite(image, np.dstack([labels * 10, labels * 10, labels * 200]))  # BGR
    cv2.imwrite(mask, labels)
    return image, mask


@pytest.mark.parametrize("color", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_torchvision(
    recipes: ModuleType, files: tuple[str, str], color: bool, raw: bool
) -> None:
    check(
        recipes.Torchvision(CROP, SCALE, color=color, raw=raw),
        files,
        torch.uint8 if raw else torch.float32,
        0,
    )


def test_pidnet(recipes: ModuleType, files: tuple[str, str]) -> None:
    pidnet = recipes.Pidnet(CROP, SCALE)
    check(lambda *given: parts(pidnet(*given)), files, torch.float32, 0)


def test_mmseg(recipes: ModuleType, files: tuple[str, str]) -> None:
    check(recipes.Mmseg(CROP, SCALE), files, torch.uint8, 2)


def parts(
    found: tuple[object, tuple[object, object]],
) -> tuple[torch.Tensor, torch.Tensor]:
    assert found[1][1].shape == found[1][0].shape  # type: ignore[attr-defined]
    return torch.from_numpy(found[0]), torch.from_numpy(found[1][0])


def check(recipe: Recipe, files: tuple[str, str], dtype: torch.dtype, red: int) -> None:
    agreeing = []
    for _ in range(12):
        image, target = recipe(*files)
        assert image.dtype == dtype
        assert image.shape[1:] == target.shape
        assert max(target.shape) == CROP  # mmseg pads on the GPU
        bright = image[red].float()
        bright = bright > (bright.min() + bright.max()) / 2
        known = target != IGNORE_INDEX
        agreeing.append(float((bright == target.bool())[known].float().mean()))
    assert min(agreeing) > 0.85  # but for edges


def test_frames_cost_what_those_of_cityscapes_cost(tmp_path: Path) -> None:
    image, labels = frames.draw(0)
    assert image.shape == (1024, 2048, 3)
    assert (labels.max(), len(np.unique(labels))) == (18, 19)
    assert not np.array_equal(frames.draw(1)[0], image)
    jpeg = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), frames.JPEG)[1]
    assert 400_000 < len(jpeg) < 600_000
