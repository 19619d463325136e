"""Augmentation of one sample: a pure function of the sample's bytes and its key.

albumentations makes its random state when a pipeline is built, and every forked worker inherits a copy of it: 8 samples
from 4 workers then get 2 distinct augmentations. Here every sample brings its own key, and every process builds its
own pipeline.
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # importing it would ask the network for a newer release

import albumentations as A
import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.data.transforms import PAD_COLOUR, Builder, builder
from segpipe.errors import ConfigError
from segpipe.keys import generator
from segpipe.settings.config import AugmentConfig

Uint8 = NDArray[np.uint8]
Look = Callable[[str, Uint8, Uint8], None]  # is given the name of a transform, and its image and target
GREY = np.array([0.299, 0.587, 0.114])
RGB_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])


class ScaleCrop(A.DualTransform):  # type: ignore[misc]
    """Random resize and random crop in one resampling.

    The factor is uniform in its logarithm. The box of the source that will fill the crop is cut first and only that is
    resized: the same views as resizing the whole frame and then cropping, for a fraction of the work. Where the box is
    larger than the source, the frame lands at a random place and the rest is padding (mean colour; ignore).

    Image and target share every coordinate: both resamplers take pixel centres at half integers, and both compute in
    integers, so that another CPU gives the same bytes.
    """

    def __init__(self, crop_size: tuple[int, int], scale: tuple[float, float]) -> None:
        super().__init__(p=1.0)
        self.crop_size, self.scale = crop_size, scale

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        low, high = (math.log(factor) for factor in self.scale)
        factor = math.exp(low + (high - low) * self.py_random.random())
        rows = _spans(params["shape"][0], self.crop_size[0], factor, self.py_random.random())
        columns = _spans(params["shape"][1], self.crop_size[1], factor, self.py_random.random())
        return {"source": (rows[0], columns[0]), "place": (rows[1], columns[1])}

    def apply(self, img: Uint8, **params: Any) -> Uint8:
        return self._resample(img, PAD_COLOUR, cv2.INTER_LINEAR_EXACT, **params)

    def apply_to_mask(self, mask: Uint8, **params: Any) -> Uint8:
        return self._resample(mask, IGNORE_INDEX, cv2.INTER_NEAREST_EXACT, **params)

    def _resample(
        self, array: Uint8, fill: int | tuple[int, ...], how: int, *, source: Any, place: Any, **_: Any
    ) -> Uint8:
        part, (rows, columns) = array[source], place
        size = (rows.stop - rows.start, columns.stop - columns.start)
        resized = part.shape[:2] != size
        if resized:
            part = cv2.resize(part, size[::-1], interpolation=how)
        if size == self.crop_size:
            return np.asarray(part) if resized else part.copy()  # never the memory of a sample that a cache may hold
        canvas = np.empty((*self.crop_size, *array.shape[2:]), np.uint8)
        canvas[:] = fill
        canvas[place] = part
        return canvas


def _spans(length: int, crop: int, factor: float, draw: float) -> tuple[slice, slice]:
    """Along one axis: the part of the source that is used, and where in the crop it lands."""
    box = max(1, round(crop / factor))
    start = min(math.floor(draw * (abs(length - box) + 1)), abs(length - box)) + min(0, length - box)
    first, last = max(0, start), min(length, start + box)
    low = min(round((first - start) * crop / box), crop - 1)
    return slice(first, last), slice(low, max(low + 1, round((last - start) * crop / box)))


class ColourMatrix(A.ImageOnlyTransform):  # type: ignore[misc]
    """Random brightness, contrast, saturation and hue as one affine map of RGB, rounded once.

    Contrast turns about the padding colour and hue is a rotation in YIQ, so all four are matrices and their product
    costs one pass over the pixels; libraries that go through HSV spend a pass or two on each.
    """

    def __init__(self, *, brightness: float, contrast: float, saturation: float, hue: float) -> None:
        super().__init__(p=1.0)
        self.strengths = (brightness, contrast, saturation, hue)

    def get_params(self) -> dict[str, Any]:
        draws = [strength * (2 * self.py_random.random() - 1) for strength in self.strengths]
        return {"matrix": colour_matrix(*draws)}

    def apply(self, img: Uint8, matrix: NDArray[np.float64], **_: Any) -> Uint8:
        return np.asarray(cv2.transform(img, matrix), np.uint8)


def colour_matrix(brightness: float, contrast: float, saturation: float, hue: float) -> NDArray[np.float64]:
    """Affine map (3, 4) of RGB values 0 to 255; all zeros give the identity. Hue in turns, the rest relative."""
    angle = 2 * math.pi * hue
    turn = np.array([[1, 0, 0], [0, math.cos(angle), -math.sin(angle)], [0, math.sin(angle), math.cos(angle)]])
    rotate = np.linalg.solve(RGB_TO_YIQ, turn @ RGB_TO_YIQ) if hue else np.eye(3)
    saturate = (1 + saturation) * np.eye(3) - saturation * np.tile(GREY, (3, 1))
    linear = (1 + brightness) * (rotate @ saturate)
    offset = -contrast * (linear @ np.array(PAD_COLOUR, float))
    return np.column_stack([(1 + contrast) * linear, offset])


def steps(config: AugmentConfig, extra: tuple[Builder, ...]) -> list[tuple[str, Builder]]:
    """What builds each transform, with its name, in the order in which they are applied; the first three have no name.

    One whose strength is zero is left out, so that it changes nothing and costs nothing.
    """
    height, width = config.crop_size
    found: list[tuple[str, Builder]] = [
        ("", partial(ScaleCrop, (height, width), (config.scale[0], config.scale[1]))),
    ]
    if config.flip:
        found.append(("", partial(A.HorizontalFlip, p=config.flip)))
    strengths = {name: getattr(config, name) for name in ("brightness", "contrast", "saturation", "hue")}
    if any(strengths.values()):
        found.append(("", partial(ColourMatrix, **strengths)))
    return [*found, *zip(config.extra, extra, strict=True)]


def _made(name: str, make: Builder) -> A.BasicTransform | A.BaseCompose:
    step = make()
    if not isinstance(step, A.BasicTransform | A.BaseCompose):
        raise ConfigError(
            f"augment.extra = {name!r} builds {step!r}, but a transform of albumentations was needed: an instance of "
            f"A.BasicTransform or A.BaseCompose."
        )
    return step


def _leaves(step: A.BasicTransform | A.BaseCompose, certain: bool = True) -> list[tuple[A.BasicTransform, bool]]:
    """A transform, or those inside of OneOf and the like; and whether each is applied to every sample."""
    if isinstance(step, A.BaseCompose):
        return [leaf for inner in step.transforms for leaf in _leaves(inner, False)]
    return [(step, certain and step.p >= 1)]


class Augmenter:
    """Crop of a sample, as `augmenter(image, target, key)`; equal bytes and keys give equal bytes.

    Cheap to make and to pickle: the pipeline is built where it is first used, once per process, also after a fork.
    The functions behind `config.extra` are looked up here and travel along, so that a worker which has never seen the
    program that added them can use them. Raises ConfigError on a name that TRANSFORMS does not have.

    With `config.keyed=False` the key is ignored and the pipeline keeps the random state it got from `seed` when it was
    built, as other trainers do: forked workers then repeat each other. That is the control, not a way to train.

    Shapes: image uint8 (H, W, 3), target uint8 (H, W) -> the same of `config.crop_size`, C-contiguous.
    """

    name = "whole pipeline"

    def __init__(self, config: AugmentConfig, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self.extra = tuple(builder(name) for name in config.extra)
        self._pipeline: A.Compose | None = None if config.keyed else self._build()
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None}

    def __call__(self, image: Uint8, target: Uint8, key: int) -> tuple[Uint8, Uint8]:
        return _applied(self._at(key), image, target)

    def looked_at(self, image: Uint8, target: Uint8, key: int, look: Look) -> tuple[Uint8, Uint8]:
        """The same crop, by the same pipeline; `look` is told what each of its transforms is given."""
        pipeline = self._at(key)
        inner = pipeline.transforms
        names = [name for name, _ in steps(self.config, self.extra)]
        pipeline.transforms = [partial(_shown, *step, look) for step in zip(names, inner, strict=True)]
        try:
            return _applied(pipeline, image, target)
        finally:
            pipeline.transforms = inner

    def fresh(self) -> Augmenter:
        """The same function, which has never been called."""
        return copy.copy(self)

    def parts(self) -> list[Part]:
        """Every transform of the pipeline alone, in the order in which they are applied.

        The first takes a sample; the others take what the first gives.
        """
        numbers = [len(_leaves(_made(*step))) for step in steps(self.config, self.extra)]
        return [Part(self, step, leaf) for step, number in enumerate(numbers) for leaf in range(number)]

    def _at(self, key: int) -> A.Compose:
        """The pipeline, ready for the sample of this key."""
        pipeline = self._own_pipeline()
        if self.config.keyed:
            pipeline.set_random_state(generator(key), random.Random(key))
        return pipeline

    def _build(self) -> A.Compose:
        transforms = [_made(*step) for step in steps(self.config, self.extra)]
        return A.Compose(transforms, seed=None if self.config.keyed else self.seed)

    def _own_pipeline(self) -> A.Compose:
        """The pipeline of this very process; one that came through a fork is dropped."""
        inherited = self.config.keyed and self._owner != os.getpid()
        if self._pipeline is None or inherited:
            self._pipeline, self._owner = self._build(), os.getpid()
        return self._pipeline


def _applied(pipeline: A.Compose, image: Uint8, target: Uint8) -> tuple[Uint8, Uint8]:
    augmented = pipeline(image=image, mask=target)
    return np.ascontiguousarray(augmented["image"]), np.ascontiguousarray(augmented["mask"])


def _shown(name: str, step: A.BasicTransform | A.BaseCompose, look: Look, **data: Any) -> dict[str, Any]:
    """A step of a pipeline, after a look at what it is given."""
    look(_title(name, step), data["image"], data["mask"])
    gives: dict[str, Any] = step(**data)
    return gives


def _title(name: str, step: A.BasicTransform | A.BaseCompose) -> str:
    """How a transform is called in messages: by its name in the configuration, if it has one, and its class."""
    kind = type(step).__name__
    return f"{name} ({kind})" if name else kind


class Part(Augmenter):
    """One transform of a pipeline, applied always and keyed always: what the purity checker asks about.

    `certain` tells whether the pipeline applies it to every sample.
    """

    def __init__(self, whole: Augmenter, step: int, leaf: int) -> None:
        super().__init__(replace(whole.config, keyed=True))
        self.extra, self.place = whole.extra, (step, leaf)
        transform, self.certain = self._leaf()
        self.name = _title(steps(self.config, self.extra)[step][0], transform)

    def _build(self) -> A.Compose:
        transform, _ = self._leaf()
        transform.p = 1.0
        return A.Compose([transform])

    def _leaf(self) -> tuple[A.BasicTransform, bool]:
        step, leaf = self.place
        return _leaves(_made(*steps(self.config, self.extra)[step]))[leaf]
