"""Tiles, flips and scales: where they lie, how they are averaged, and when they change nothing at all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from exports import Tiny, structured
from segpipe.errors import ConfigError
from segpipe.models.preprocess import Preprocess
from segpipe.predict.inference import (
    SMALLEST,
    Inference,
    inference,
    ramp,
    segment,
    starts,
)
from segpipe.train.validate import predict

NET, PREPROCESS = Tiny().eval(), Preprocess()
SIZE = (64, 96)


def image(size: tuple[int, int] = SIZE, count: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.stack(structured(count, size, seed=3)))


def ids(how: Inference, picture: torch.Tensor) -> torch.Tensor:
    return segment(NET, PREPROCESS, picture, how)


def probabilities(picture: torch.Tensor) -> torch.Tensor:
    """Of the whole image, by the book."""
    with torch.inference_mode():
        logits = NET(PREPROCESS(picture))
        return torch.nn.functional.interpolate(
            logits, picture.shape[1:3], mode="bilinear"
        ).softmax(1)


@pytest.mark.parametrize(
    ("length", "tile", "overlap", "expected"),
    [
        (10, 10, 0.25, [0]),
        (7, 10, 0.25, [0]),
        (11, 10, 0.0, [0, 1]),
        (20, 10, 0.0, [0, 10]),
        (20, 10, 0.5, [0, 5, 10]),
        (100, 40, 0.25, [0, 30, 60]),
        (101, 40, 0.25, [0, 20, 40, 61]),
        (3, 1, 0.9, [0, 1, 2]),
    ],
)
def test_tiles_cover_a_side_with_the_overlap_that_was_asked_for(
    length: int, tile: int, overlap: float, expected: list[int]
) -> None:
    found = starts(length, tile, overlap)
    assert found == expected
    assert found[-1] + tile >= length
    assert all(
        first + tile - after >= int(tile * overlap)
        for first, after in itertools.pairwise(found)
    )


def test_weights_rise_over_the_overlap_and_never_vanish() -> None:
    assert ramp(8, 0.25).tolist() == pytest.approx(
        [1 / 3, 2 / 3, 1, 1, 1, 1, 2 / 3, 1 / 3]
    )
    assert ramp(3, 0.0).tolist() == [1, 1, 1]
    assert ramp(100, 0.9).min() > 0


@pytest.mark.parametrize("tile", [None, SIZE, (64, 500), (1000, 1000)])
def test_one_tile_that_covers_the_image_is_the_whole_image_bit_for_bit(
    tile: tuple[int, int] | None,
) -> None:
    pictures = image(count=2)
    assert torch.equal(
        ids(Inference(tile=tile), pictures), predict(NET, PREPROCESS, pictures)
    )
    views = Inference(flip=True, scales=(1.0, 0.75))
    covered = Inference(tile=tile, flip=True, scales=(1.0, 0.75))
    assert torch.equal(ids(covered, pictures), ids(views, pictures))


def test_one_tile_decides_between_logits_that_have_the_same_probability() -> None:
    flat = Tiny().eval()
    flat.classifier.weight.data.mul_(1e-7)
    flat.classifier.bias.data.zero_()
    whole = predict(flat, PREPROCESS, image())
    assert torch.equal(
        segment(flat, PREPROCESS, image(), Inference(tile=(500, 500))), whole
    )
    with (
        torch.inference_mode()
    ):  # the control: probabilities of these logits are rounded to ties
        logits = torch.nn.functional.interpolate(
            flat(PREPROCESS(image())), SIZE, mode="bilinear"
        )
    assert not torch.equal(logits.softmax(1).argmax(1).to(torch.uint8), whole)


@pytest.mark.parametrize("batch", [1, 3])
def test_tiles_are_blended_by_their_weighted_probabilities(batch: int) -> None:
    picture = image((70, 90))
    weights = torch.outer(ramp(40, 0.25), ramp(48, 0.25)).float()
    total = torch.zeros(5, 70, 90)
    for top in (0, 30):
        for left in (0, 21, 42):
            crop = np.s_[top : top + 40, left : left + 48]
            found = probabilities(picture[:, crop[0], crop[1]])[0]
            total[:, crop[0], crop[1]] += found * weights
    answer = ids(Inference(tile=(40, 48), batch=batch), picture)[0]
    assert torch.equal(answer, total.argmax(0).to(torch.uint8))
    assert not torch.equal(
        answer, predict(NET, PREPROCESS, picture)[0]
    )  # the control: tiles do see less


def test_views_are_averaged_as_probabilities() -> None:
    picture = image()
    mirrored = probabilities(picture.flip(2)).flip(3)
    expected = (probabilities(picture) + mirrored).argmax(1).to(torch.uint8)
    answer = ids(Inference(flip=True), picture)
    assert torch.equal(answer, expected)
    assert torch.equal(
        answer.flip(2), ids(Inference(flip=True), picture.flip(2))
    )  # mirrored images, mirrored answers
    with torch.inference_mode():
        half = torch.nn.functional.interpolate(
            PREPROCESS(picture), (32, 48), mode="bilinear"
        )
        scaled = torch.nn.functional.interpolate(
            NET(half), SIZE, mode="bilinear"
        ).softmax(1)
    expected = (probabilities(picture) + scaled).argmax(1).to(torch.uint8)
    assert torch.equal(ids(Inference(scales=(1.0, 0.5)), picture), expected)
    assert not torch.equal(expected, predict(NET, PREPROCESS, picture))


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (33, 57), (2000, 31)])
@pytest.mark.parametrize(
    "how",
    [
        Inference(),
        Inference(tile=(32, 32), flip=True, scales=(1.0, 0.5, 2.0), batch=50),
    ],
)
def test_any_size_gets_an_answer_of_its_own_size(
    size: tuple[int, int], how: Inference
) -> None:
    answer = ids(how, image(size))
    assert answer.shape == (1, *size)
    assert answer.dtype == torch.uint8


def test_small_images_are_padded_by_their_edges() -> None:
    picture = image((7, 40))
    padded = torch.nn.functional.pad(
        picture.permute(0, 3, 1, 2).float(), (0, 0, 0, SMALLEST - 7), mode="replicate"
    )
    expected = predict(NET, PREPROCESS, padded.permute(0, 2, 3, 1).to(torch.uint8))[
        :, :7
    ]
    assert torch.equal(ids(Inference(), picture), expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tile": "64"}, "HEIGHTxWIDTH"),
        ({"tile": "0x64"}, "at least 32x32"),
        ({"tile": "64x31"}, "at least 32x32"),
        ({"tta": ["flop"]}, "flop is neither flip nor a scale"),
        ({"tta": ["flip", "9"]}, "9 is neither"),
        ({"tta": ["nan"]}, "nan is neither"),
        ({"precision": "int8"}, "one of fp32, bf16, fp16"),
    ],
)
def test_wrong_values_are_refused_with_what_is_needed(
    changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        inference({"tile": "", "overlap": 0.25, "tta": [], **changes})


def test_keys_become_an_inference_that_says_what_was_asked_for() -> None:
    how = inference(
        {
            "tile": "64x96",
            "overlap": 0.5,
            "tta": ["1.25", "flip", "0.75", "1"],
            "batch": 3,
        }
    )
    assert how == Inference((64, 96), 0.5, True, (1.0, 0.75, 1.25), "fp32", 3)
    assert how.described == {"tile": "64x96", "overlap": 0.5, "tta": "flip,0.75,1.25"}
    assert len(how.views) == 6
    assert inference({"tile": "", "overlap": 0.25, "tta": []}) == Inference()
    assert Inference().described == {}
