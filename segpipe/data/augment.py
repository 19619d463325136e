"""Augmentation of one sample: a pure function of the sample's bytes and its key.

albumentations creates its random state when a pipeline is built, and every forked worker inherits a copy of it: 8
samples from 4 workers then get 2 distinct augmentations. Here every sample has its own key, and every process builds
its own pipeline.
"""

from __future__ import annotations

import copy
import math
import os
import random
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

os.environ.setdefault(
    "NO_ALBUMENTATIONS_UPDATE", "1"
)  # or its import asks the network for a newer release

import albumentations as A
import cv2
import numpy as np
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX, plugins
from segpipe.data.transforms import PAD_COLOR, Builder, builder
from segpipe.errors import ConfigError, SegpipeError
from segpipe.keys import generator
from segpipe.models.preprocess import COLOR_UNIT

if TYPE_CHECKING:
    from segpipe.settings.groups import AugmentConfig

Uint8 = NDArray[np.uint8]
Look = Callable[
    [str, Uint8, Uint8], None
]  # called with a transform's name and its input image and target
Transform: TypeAlias = A.BasicTransform | A.BaseCompose
GREY = np.array([0.299, 0.587, 0.114])
IDENTITY = COLOR_UNIT * np.eye(3, 4, dtype=np.int32)
RGB_TO_YIQ = np.array(
    [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
)


class Crop(NamedTuple):
    """An augmented sample as it leaves a loader process."""

    image: Uint8  # (H, W, 3)
    target: Uint8  # (H, W)
    color: NDArray[np.int32] | None = (
        None  # what the device applies to the image, see models/preprocess.py
    )


class ScaleCrop(A.DualTransform):  # type: ignore[misc]
    """Random resize and random crop in one resampling.

    The logarithm of the factor is uniform. The box of the source that fills the crop is cut first and only that is
    resized: the same views as resizing the whole frame and then cropping, for a fraction of the work. Where the box is
    larger than the source, the frame is placed at random and the rest is padding (mean color; ignore).

    With probability `rare`, the box is placed so that it contains a pixel of a rare class: a class of the sample, drawn
    by the inverse of its number of pixels there, and of that class any pixel alike. Nothing but the sample enters, no
    statistics of the data set. Where the box is resized to fewer pixels, a single one may be skipped.

    Image and target share every coordinate: both resamplers put pixel centres at half integers, and both compute in
    integers, so that another CPU gives the same bytes.
    """

    def __init__(
        self, crop_size: tuple[int, int], scale: tuple[float, float], rare: float = 0.0
    ) -> None:
        super().__init__(p=1.0)
        self.crop_size, self.scale, self.rare = crop_size, scale, rare

    def get_params_dependent_on_data(
        self, params: dict[str, Any], data: dict[str, Any]
    ) -> dict[str, Any]:
        low, high = (math.log(factor) for factor in self.scale)
        factor = math.exp(low + (high - low) * self.py_random.random())
        draws = self.py_random.random(), self.py_random.random()
        row, column = self._rare_pixel(data) or (None, None)
        rows = _spans(params["shape"][0], self.crop_size[0], factor, draws[0], row)
        columns = _spans(
            params["shape"][1], self.crop_size[1], factor, draws[1], column
        )
        return {"source": (rows[0], columns[0]), "place": (rows[1], columns[1])}

    def _rare_pixel(self, data: dict[str, Any]) -> tuple[int, int] | None:
        """Row and column of the pixel that the crop shall contain; None for a crop anywhere."""
        if not self.rare or self.py_random.random() >= self.rare:
            return None
        target = data["mask"]
        counts = cv2.calcHist(
            [target], [0], None, [IGNORE_INDEX], [0, IGNORE_INDEX]
        ).ravel()  # bincount takes 5 times
        present = np.flatnonzero(counts).tolist()
        if not present:
            return None
        ends = list(accumulate(1.0 / float(counts[train]) for train in present))
        chosen = present[
            min(bisect(ends, self.py_random.random() * ends[-1]), len(present) - 1)
        ]
        places = np.flatnonzero(target == chosen)
        place = int(places[math.floor(self.py_random.random() * len(places))])
        row, column = divmod(place, int(target.shape[1]))
        return row, column

    def apply(self, img: Uint8, **params: Any) -> Uint8:
        return self._resample(img, PAD_COLOR, cv2.INTER_LINEAR_EXACT, **params)

    def apply_to_mask(self, mask: Uint8, **params: Any) -> Uint8:
        return self._resample(mask, IGNORE_INDEX, cv2.INTER_NEAREST_EXACT, **params)

    def _resample(
        self,
        array: Uint8,
        fill: int | tuple[int, ...],
        how: int,
        *,
        source: Any,
        place: Any,
        **_: Any,
    ) -> Uint8:
        part, (rows, columns) = array[source], place
        size = (rows.stop - rows.start, columns.stop - columns.start)
        resized = part.shape[:2] != size
        if resized:
            part = _resized(part, size, how)
        if size == self.crop_size:
            return (
                np.asarray(part) if resized else part.copy()
            )  # never memory of the sample, which others may read
        height, width = self.crop_size
        edges = rows.start, height - rows.stop, columns.start, width - columns.stop
        value = fill if isinstance(fill, tuple) else (fill,)
        return np.asarray(
            cv2.copyMakeBorder(part, *edges, cv2.BORDER_CONSTANT, value=value)
        )


def _resized(part: Uint8, size: tuple[int, int], how: int) -> Uint8:
    """`part` at (height, width) `size`. Colors go through four channels, which OpenCV resizes in half the time of
    three; its exact resampling treats each channel alone, so that the bytes are the same."""
    if part.ndim == 2:
        return np.asarray(cv2.resize(part, size[::-1], interpolation=how))
    wide = cv2.resize(
        cv2.cvtColor(part, cv2.COLOR_RGB2RGBA), size[::-1], interpolation=how
    )
    return np.asarray(cv2.cvtColor(wide, cv2.COLOR_RGBA2RGB))


def _spans(
    length: int, crop: int, factor: float, draw: float, kept: int | None = None
) -> tuple[slice, slice]:
    """Along one axis: the part of the source that is used, and its place in the crop; the pixel `kept` is in it."""
    box = max(1, round(crop / factor))
    lowest, highest = min(0, length - box), max(0, length - box)
    if kept is not None and box < length:
        lowest, highest = max(lowest, kept - box + 1), min(highest, kept)
    start = lowest + min(math.floor(draw * (highest - lowest + 1)), highest - lowest)
    first, last = max(0, start), min(length, start + box)
    low = min(round((first - start) * crop / box), crop - 1)
    return slice(first, last), slice(
        low, max(low + 1, round((last - start) * crop / box))
    )


class ColorMatrix(A.ImageOnlyTransform):  # type: ignore[misc]
    """Random brightness, contrast, saturation and hue as one affine map of RGB, rounded once.

    Contrast scales around the padding color and hue rotates in YIQ, so all four are matrices and their product costs
    one pass over the pixels. Libraries that convert to HSV need a pass or two for each.

    OpenCV multiplies bytes by 1/COLOR_UNIT steps of the matrix in integers, so a GPU can make the same bytes. With
    `deferred`, the image stays as it is and the matrix goes, in these steps, to the target `color`.
    """

    def __init__(
        self,
        *,
        brightness: float,
        contrast: float,
        saturation: float,
        hue: float,
        deferred: bool = False,
    ) -> None:
        self.strengths, self.deferred = (
            (brightness, contrast, saturation, hue),
            deferred,
        )
        super().__init__(p=1.0)

    @property
    def targets(self) -> dict[str, Callable[..., Any]]:
        return (
            {"color": self.apply_to_color} if self.deferred else {"image": self.apply}
        )

    def get_params(self) -> dict[str, Any]:
        draws = [
            strength * (2 * self.py_random.random() - 1) for strength in self.strengths
        ]
        return {"matrix": color_matrix(*draws)}

    def apply(self, img: Uint8, matrix: NDArray[np.float64], **_: Any) -> Uint8:
        return np.asarray(cv2.transform(img, matrix), np.uint8)

    def apply_to_color(
        self, color: NDArray[np.int32], matrix: NDArray[np.float64], **_: Any
    ) -> NDArray[np.int32]:
        return np.asarray(
            np.rint(matrix.astype(np.float32) * COLOR_UNIT), np.int32
        )  # as OpenCV rounds it


def color_matrix(
    brightness: float, contrast: float, saturation: float, hue: float
) -> NDArray[np.float64]:
    """Affine map (3, 4) of RGB values 0 to 255; the identity for zeros. Hue in turns, the rest relative."""
    angle = 2 * math.pi * hue
    turn = np.array(
        [
            [1, 0, 0],
            [0, math.cos(angle), -math.sin(angle)],
            [0, math.sin(angle), math.cos(angle)],
        ]
    )
    rotate = np.linalg.solve(RGB_TO_YIQ, turn @ RGB_TO_YIQ) if hue else np.eye(3)
    saturate = (1 + saturation) * np.eye(3) - saturation * np.tile(GREY, (3, 1))
    linear = (1 + brightness) * (rotate @ saturate)
    offset = -contrast * (linear @ np.array(PAD_COLOR, float))
    return np.column_stack([(1 + contrast) * linear, offset])


def steps(
    config: AugmentConfig, extra: tuple[Builder, ...]
) -> list[tuple[str, Builder]]:
    """Name and builder of each transform, in the order of application; the first three have no name.

    Transforms of strength zero are left out.
    """
    crop_size, scale = (
        (config.crop_size[0], config.crop_size[1]),
        (config.scale[0], config.scale[1]),
    )
    found: list[tuple[str, Builder]] = [
        ("", partial(ScaleCrop, crop_size, scale, config.rare_crop))
    ]
    if config.flip:
        found.append(("", partial(A.HorizontalFlip, p=config.flip)))
    if any((strengths := _strengths(config)).values()):
        found.append(
            (
                "",
                partial(ColorMatrix, **strengths, deferred=config.color_on == "device"),
            )
        )
    return [*found, *zip(config.extra, extra, strict=True)]


def _strengths(config: AugmentConfig) -> dict[str, float]:
    return {
        name: getattr(config, name)
        for name in ("brightness", "contrast", "saturation", "hue")
    }


def _built(name: str, build: Builder) -> Transform:
    step = build()
    if not isinstance(step, Transform):
        raise ConfigError(
            f"augment.extra = {name!r} builds {step!r}, but a transform of albumentations was needed: an instance of "
            f"A.BasicTransform or A.BaseCompose."
        )
    return step


def _leaves(
    step: Transform, certain: bool = True
) -> list[tuple[A.BasicTransform, bool]]:
    """The transform, or those inside OneOf and the like, and whether each is applied to every sample."""
    if isinstance(step, A.BaseCompose):
        return [leaf for inner in step.transforms for leaf in _leaves(inner, False)]
    return [(step, certain and step.p >= 1)]


class Augmenter:
    """Crop of a sample, as `augmenter(image, target, key)`; equal bytes and keys give equal bytes.

    Cheap to create and to pickle: each process builds the pipeline at the first use, also after a fork. The builders
    behind `config.extra` are looked up here and pickled too, so a worker can use transforms that only the main program
    has registered. Raises ConfigError on a name that is not in TRANSFORMS.

    `config.keyed=False` is the control, not a way to train: the key is ignored and the pipeline keeps the random state
    it was built with from `seed`, as in other trainers, so forked workers repeat each other.

    Shapes: image uint8 (H, W, 3), target uint8 (H, W) -> the same of `config.crop_size`, C-contiguous.
    """

    name = "whole pipeline"

    def __init__(self, config: AugmentConfig, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self.defers_color = config.color_on == "device" and any(
            _strengths(config).values()
        )
        self.extra = tuple(map(builder, config.extra))
        self._pipeline: A.Compose | None = None if config.keyed else self._build()
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None}

    def __call__(self, image: Uint8, target: Uint8, key: int) -> tuple[Uint8, Uint8]:
        image, target, color = self.crop(image, target, key)
        return (
            image
            if color is None
            else np.asarray(cv2.transform(image, color / COLOR_UNIT), np.uint8)
        ), target

    def crop(self, image: Uint8, target: Uint8, key: int) -> Crop:
        """The same, but with `augment.color_on=device` before its color, and the matrix of that."""
        try:
            return self._apply(self._keyed_pipeline(key), image, target)
        except SegpipeError:
            raise
        except Exception as error:
            if not any(map(plugins.is_path, self.config.extra)):
                raise
            raise ConfigError(
                f"augment.extra = {self.config.extra}: {plugins.located(error)}."
            ) from error

    def looked_at(self, image: Uint8, target: Uint8, key: int, look: Look) -> Crop:
        """The same as `crop` by the same pipeline; `look` is called with the input of each transform."""
        pipeline = self._keyed_pipeline(key)
        inner = pipeline.transforms
        names = [name for name, _ in steps(self.config, self.extra)]
        pipeline.transforms = [
            partial(_shown, *step, look) for step in zip(names, inner, strict=True)
        ]
        try:
            return self._apply(pipeline, image, target)
        finally:
            pipeline.transforms = inner

    def fresh(self) -> Augmenter:
        """The same function, not called yet."""
        return copy.copy(self)

    def ready(self) -> A.Compose:
        """The pipeline of this process, built if it has not been yet."""
        return self._own_pipeline()

    def parts(self) -> list[Part]:
        """Every transform of the pipeline alone, in the order of application.

        The first takes a sample; the others take the output of the first.
        """
        numbers = [
            len(_leaves(_built(*step))) for step in steps(self.config, self.extra)
        ]
        return [
            Part(self, step, leaf)
            for step, number in enumerate(numbers)
            for leaf in range(number)
        ]

    def _keyed_pipeline(self, key: int) -> A.Compose:
        pipeline = self._own_pipeline()
        if self.config.keyed:
            pipeline.set_random_state(generator(key), random.Random(key))
        return pipeline

    def _own_pipeline(self) -> A.Compose:
        """The pipeline that this process built; one inherited through a fork is dropped."""
        inherited = self.config.keyed and self._owner != os.getpid()
        if self._pipeline is None or inherited:
            self._pipeline, self._owner = self._build(), os.getpid()
        return self._pipeline

    def _build(self) -> A.Compose:
        transforms = [_built(*step) for step in steps(self.config, self.extra)]
        return A.Compose(transforms, seed=None if self.config.keyed else self.seed)

    def _apply(self, pipeline: A.Compose, image: Uint8, target: Uint8) -> Crop:
        more = {"color": IDENTITY} if self.defers_color else {}
        made = pipeline(image=image, mask=target, **more)
        return Crop(
            np.ascontiguousarray(made["image"]),
            np.ascontiguousarray(made["mask"]),
            made.get("color"),
        )


def _shown(name: str, step: Transform, look: Look, **data: Any) -> dict[str, Any]:
    look(_title(name, step), data["image"], data["mask"])
    output: dict[str, Any] = step(**data)
    return output


def _title(name: str, step: Transform) -> str:
    """Name of a transform in messages: its name in the configuration, if it has one, and its class."""
    kind = type(step).__name__
    return f"{name} ({kind})" if name else kind


class Part(Augmenter):
    """One transform of a pipeline, always applied and always keyed, for the purity checker.

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
        return _leaves(_built(*steps(self.config, self.extra)[step]))[leaf]
