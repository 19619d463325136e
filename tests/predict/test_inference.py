"""Flips and scales: how they are averaged, and when they change nothing at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exports import Tiny, structured
from segpipe.errors import ConfigError
from segpipe.models.preprocess import Preprocess
from segpipe.predict.inference import (
    Inference,
    answers,
    inference,
    segment,
)
from segpipe.train.validate import classes_and_confusion

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


def validated(net: Tiny, picture: torch.Tensor) -> torch.Tensor:
    """Class ids as a validation counts them."""
    with torch.inference_mode():
        logits, target = net(PREPROCESS(picture)).float(), picture[..., 0] % 5
        return classes_and_confusion(
            logits, target, align_corners=net.align_corners, backend="plain"
        )[0]


def test_one_view_is_the_answer_of_validation_bit_for_bit() -> None:
    pictures = image(count=2)
    expected = validated(NET, pictures)
    assert torch.equal(ids(Inference(), pictures), expected)
    assert torch.equal(answers(NET, PREPROCESS, pictures, Inference())[0], expected)


def test_one_view_decides_between_logits_that_have_the_same_probability() -> None:
    flat = Tiny().eval()
    flat.classifier.weight.data.mul_(1e-7)
    flat.classifier.bias.data.zero_()
    whole = validated(flat, image())
    assert torch.equal(answers(flat, PREPROCESS, image(), Inference())[0], whole)
    with (
        torch.inference_mode()
    ):  # the control: probabilities of these logits are rounded to ties
        logits = torch.nn.functional.interpolate(
            flat(PREPROCESS(image())), SIZE, mode="bilinear"
        )
    assert not torch.equal(logits.softmax(1).argmax(1).to(torch.uint8), whole)


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
    assert not torch.equal(expected, validated(NET, picture))


@pytest.mark.parametrize("size", [(33, 57), (400, 32)])
@pytest.mark.parametrize(
    "how", [Inference(), Inference(flip=True, scales=(1.0, 0.5, 2.0))]
)
def test_any_size_gets_an_answer_of_its_own_size(
    size: tuple[int, int], how: Inference
) -> None:
    answer = ids(how, image(size))
    assert answer.shape == (1, *size)
    assert answer.dtype == torch.uint8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
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
        inference({"tta": [], **changes})


def test_keys_become_an_inference_that_says_what_was_asked_for() -> None:
    how = inference({"tta": ["1.25", "flip", "0.75", "1"]})
    assert how == Inference(True, (1.0, 0.75, 1.25), "fp32")
    assert how.described == {"tta": "flip,0.75,1.25"}
    assert len(how.views) == 6
    assert inference({"tta": []}) == Inference()
    assert Inference().described == {}
