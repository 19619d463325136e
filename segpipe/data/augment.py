"""Augmentation of one sample: a pure function of the sample's bytes and its key.

albumentations creates its random state when a pipeline is built, and every forked worker inherits a copy of it: 8
samples from 4 workers then get 2 distinct augmentations. Here every sample has its own key, and every process builds
its own pipeline.

Further transforms are given by name: `augment.extra=[noise, jpeg]` applies them after scale, crop, flip and color. Your
own is given by its import path, `augment.extra=[package.module:Class]`, see docs/plugins.md. A transform may draw
only from `self.py_random` and `self.random_generator`, which are set from the sample's key before every call, and must
keep nothing from one call to the next; segpipe check-augment checks this. albumentations' GaussNoise, AdditiveNoise and
RGBShift pass it, but seed OpenCV's global generator with only 65,536 possible values.
"""

import copy
import math
import os
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

# Keeps the import of albumentations from checking the internet for a newer release.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import cv2
import numpy as np
from albumentations.augmentations.dropout.transforms import BaseDropout

from segpipe import IGNORE_INDEX, plugins
from segpipe.data import Float64, Size, Uint8
from segpipe.errors import ConfigError, SegpipeError
from segpipe.keys import generator
from segpipe.settings.groups import AugmentConfig
from segpipe.settings.setting import nearest

KEY = "augment.extra"
# Called with a transform's name and its input image and target.
Look = Callable[[str, Uint8, Uint8], None]
Transform: TypeAlias = A.BasicTransform | A.BaseCompose
Builder = Callable[[], Transform]
PAD_COLOR = (124, 116, 104)  # mean color of ImageNet: about 0 after normalization
RGB_TO_YIQ = np.array(
    [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
)


TRANSFORMS: dict[str, Builder] = {
    "shadow": partial(
        A.RandomShadow,
        num_shadows_limit=(1, 2),
        shadow_intensity_range=(0.3, 0.6),
        p=0.2,
    ),
    "gaussian_blur": partial(A.GaussianBlur, sigma_limit=(0.3, 1.5), p=0.15),
    # Camera motion during the exposure; without a shift, the image stays aligned with its target.
    "motion_blur": partial(
        A.MotionBlur,
        blur_limit=(3, 9),
        allow_shifted=False,
        direction_range=(0.0, 0.0),
        p=0.15,
    ),
    "noise": partial(A.ISONoise, p=0.3),
    "jpeg": partial(A.ImageCompression, quality_range=(30, 90), p=0.2),
    "cutout": partial(
        A.CoarseDropout,
        num_holes_range=(1, 4),
        hole_height_range=(0.05, 0.2),
        hole_width_range=(0.05, 0.2),
        fill=PAD_COLOR,
        fill_mask=IGNORE_INDEX,
        p=0.2,
    ),
}


class ScaleCrop(A.DualTransform):  # type: ignore[misc]
    """Random resize and random crop in one resampling.

    The logarithm of the factor is uniform. Only the box of the source that fills the crop is cut out and resized,
    which gives the same views as resizing the whole frame and cropping, for a fraction of the work. If the box is
    larger than the source, the frame is placed at random and the rest is padded (mean color; ignore).

    With probability `rare`, the box contains a pixel of a rare class: a class of the sample, drawn with a weight
    inverse to its number of pixels there, then any of its pixels with equal probability. Uses only the sample, no
    statistics of the data set. If the box is downscaled, a single pixel may be skipped.

    Image and target share every coordinate: both resamplers put pixel centres at half integers and compute in
    integers, so every CPU gives the same bytes.
    """

    def __init__(
        self, crop_size: Sequence[int], scale: Sequence[float], rare: float = 0.0
    ) -> None:
        super().__init__(p=1.0)
        self.crop_size, self.scale, self.rare = tuple(crop_size), scale, rare

    def get_params_dependent_on_data(
        self, params: dict[str, Any], data: dict[str, Any]
    ) -> dict[str, Any]:
        """Corresponding parts of the source and of the crop, as slices of rows and columns."""
        low, high = self.scale
        factor = log_uniform(low, high, self.py_random)
        draws = self.py_random.random(), self.py_random.random()
        kept = self._rare_pixel(data) or (None, None)
        axes = zip(params["shape"], self.crop_size, draws, kept, strict=False)
        spans = [_spans(length, crop, factor, *axis) for length, crop, *axis in axes]
        source, place = zip(*spans, strict=True)
        return {"source": source, "place": place}

    def _rare_pixel(self, data: dict[str, Any]) -> tuple[int, int] | None:
        """Row and column of the pixel that the crop must contain; None if the crop may lie anywhere."""
        if not self.rare or self.py_random.random() >= self.rare:
            return None

        target = data["mask"]
        # bincount takes 5 times as long.
        counts = cv2.calcHist(
            [target], [0], None, [IGNORE_INDEX], [0, IGNORE_INDEX]
        ).ravel()
        present = np.flatnonzero(counts).tolist()
        if not present:
            return None

        ends = list(accumulate(1.0 / float(counts[train]) for train in present))
        drawn = bisect(ends, self.py_random.random() * ends[-1])
        chosen = present[min(drawn, len(present) - 1)]
        places = np.flatnonzero(target == chosen)
        number = math.floor(self.py_random.random() * len(places))
        return divmod(int(places[number]), int(target.shape[1]))

    def apply(self, img: Uint8, **params: Any) -> Uint8:
        """The crop of the image, uint8 (H, W, 3)."""
        return self._resample(img, PAD_COLOR, cv2.INTER_LINEAR_EXACT, **params)

    def apply_to_mask(self, mask: Uint8, **params: Any) -> Uint8:
        """The crop of the target, uint8 (H, W)."""
        return self._resample(mask, (IGNORE_INDEX,), cv2.INTER_NEAREST_EXACT, **params)

    def _resample(
        self,
        array: Uint8,
        fill: tuple[int, ...],
        how: int,
        *,
        source: Any,
        place: Any,
        **_: Any,
    ) -> Uint8:
        """The part `source` of the array, resized to `place` in a crop filled with `fill` elsewhere."""
        rows, columns = place
        size = rows.stop - rows.start, columns.stop - columns.start
        part = _resized(array[source], size, how)
        if size == self.crop_size:
            return part

        height, width = self.crop_size
        padded = cv2.copyMakeBorder(
            part,
            rows.start,
            height - rows.stop,
            columns.start,
            width - columns.stop,
            cv2.BORDER_CONSTANT,
            value=fill,
        )
        return np.asarray(padded)


def _resized(part: Uint8, size: Size, how: int) -> Uint8:
    """`part` resized to (height, width) `size`. Colors are resized with four channels, in half the time of three;
    OpenCV's exact resampling treats each channel separately, so the bytes are the same."""
    if part.shape[:2] == size:
        # A copy, since others may read the sample's memory.
        return part.copy()
    if part.ndim == 2:
        return np.asarray(cv2.resize(part, size[::-1], interpolation=how))
    wide = cv2.cvtColor(part, cv2.COLOR_RGB2RGBA)
    resized = cv2.resize(wide, size[::-1], interpolation=how)
    return np.asarray(cv2.cvtColor(resized, cv2.COLOR_RGBA2RGB))


def log_uniform(low: float, high: float, rng: random.Random) -> float:
    """A log-uniform number between `low` and `high`."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _spans(
    length: int, crop: int, factor: float, draw: float, kept: int | None
) -> tuple[slice, slice]:
    """Along one axis: the part of the source to use, which contains pixel `kept`, and its place in the crop."""
    box = max(1, round(crop / factor))
    # Possible starts of the box: outside the source only if the box is larger.
    lowest = min(0, length - box)
    highest = max(0, length - box)
    if kept is not None and box < length:
        lowest = max(lowest, kept - box + 1)
        highest = min(highest, kept)

    room = highest - lowest
    start = lowest + min(math.floor(draw * (room + 1)), room)
    first = max(0, start)
    last = min(length, start + box)
    low = min(round((first - start) * crop / box), crop - 1)
    high = max(low + 1, round((last - start) * crop / box))
    return slice(first, last), slice(low, high)


class Gamma(A.ImageOnlyTransform):  # type: ignore[misc]
    """Gamma correction with a log-uniform random exponent, for dusk and glare. Keeps black and white."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(p=1.0)
        self.limits = low, high

    def get_params(self) -> dict[str, Any]:
        """Lookup table from old to new values."""
        exponent = log_uniform(*self.limits, self.py_random)
        shares = np.arange(256) / 255
        table = np.rint(255 * shares**exponent)
        return {"table": table.astype(np.uint8)}

    def apply(self, img: Uint8, table: Uint8, **_: Any) -> Uint8:
        """The image with the table applied."""
        return np.asarray(cv2.LUT(img, table), np.uint8)


class ColorMatrix(A.ImageOnlyTransform):  # type: ignore[misc]
    """Random brightness, contrast, saturation and hue as one affine map of RGB, rounded once.

    Each is given by its largest change in either direction; changes are drawn in the order given.

    Contrast scales around the padding color and hue rotates in YIQ, so all four are matrices, and their product needs
    one pass over the pixels. Libraries that convert to HSV need one or two passes for each.
    """

    def __init__(self, **strengths: float) -> None:
        super().__init__(p=1.0)
        self.strengths = strengths

    def get_params(self) -> dict[str, Any]:
        """The affine map, drawn from the sample's generator."""
        changes = {
            name: most * (2 * self.py_random.random() - 1)
            for name, most in self.strengths.items()
        }
        return {"matrix": color_matrix(**changes)}

    def apply(self, img: Uint8, matrix: Float64, **_: Any) -> Uint8:
        """The image with the map applied."""
        return np.asarray(cv2.transform(img, matrix), np.uint8)


def color_matrix(
    brightness: float, contrast: float, saturation: float, hue: float
) -> Float64:
    """Affine map (3, 4) of RGB values 0 to 255; the identity for zeros. Hue is in turns, the rest is relative."""
    angle = 2 * math.pi * hue
    cos, sin = math.cos(angle), math.sin(angle)
    turn = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    rotate = np.eye(3)
    if hue:
        rotate = np.linalg.solve(RGB_TO_YIQ, turn @ RGB_TO_YIQ)

    to_grey = np.tile(RGB_TO_YIQ[0], (3, 1))
    saturate = (1 + saturation) * np.eye(3) - saturation * to_grey
    linear = (1 + brightness) * (rotate @ saturate)
    offset = -contrast * (linear @ np.array(PAD_COLOR, float))
    return np.column_stack([(1 + contrast) * linear, offset])


class CallableTransform(A.DualTransform):  # type: ignore[misc]
    """`function(image, target, rng)`, applied to every sample.

    `rng` is a numpy generator that restarts from the sample's key before every call.

    Shapes: image uint8 (H, W, 3), target uint8 (H, W) -> both of the same size.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(p=1.0)
        self.function = function

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> Any:
        """The sample that the function returns."""
        image, mask = self.function(data["image"], data["mask"], self.random_generator)
        return {**data, "image": image, "mask": mask}


def builder(name: str) -> Builder:
    """A function that builds the transform of this name or import path; can be pickled.

    Raises ConfigError if it cannot be imported, or if the name is unknown, with the nearest name.
    """
    kind = plugins.load(KEY, name) if plugins.is_path(name) else TRANSFORMS.get(name)
    if kind is None:
        raise ConfigError(
            f"{KEY} = {name!r} is not one of {', '.join(TRANSFORMS)}.{nearest(name, TRANSFORMS)}"
        )
    return partial(_made, kind, name)


def _made(kind: Callable[..., Any], path: str) -> Any:
    """The transform that a class or function returns. Raises ConfigError for anything else."""
    built = plugins.call(KEY, path, kind, {})
    if isinstance(built, A.BasicTransform | A.BaseCompose):
        for leaf in _leaves(built):
            # The corners that a rotation uncovers; albumentations makes them class 0.
            # For a dropout the default is None.
            zero = getattr(leaf, "fill_mask", None) == 0
            if zero and not isinstance(leaf, BaseDropout):
                leaf.fill_mask = IGNORE_INDEX
        return built
    if not callable(built) or isinstance(built, type):
        raise ConfigError(
            f"{KEY} = {path} made {built!r}, but an albumentations transform was needed, or an object that can be "
            f"called with image, target and a random generator."
        )

    return CallableTransform(built)


def _steps(config: AugmentConfig) -> list[tuple[str, Builder]]:
    """Name and builder of each transform, in the order of application; only `config.extra` transforms have a name.

    Leaves out transforms of zero strength.
    """
    found: list[Builder] = [
        partial(ScaleCrop, config.crop_size, config.scale, config.rare_crop)
    ]
    if config.flip:
        found.append(partial(A.HorizontalFlip, p=config.flip))
    if config.gamma != [1, 1]:
        found.append(partial(Gamma, *config.gamma))
    strengths = {
        name: getattr(config, name)
        for name in ("brightness", "contrast", "saturation", "hue")
    }
    if any(strengths.values()):
        found.append(partial(ColorMatrix, **strengths))
    extra = [(name, builder(name)) for name in config.extra]
    return [*(("", build) for build in found), *extra]


def _leaves(step: Transform) -> list[A.BasicTransform]:
    """The transform itself, or the transforms inside OneOf and the like."""
    if not isinstance(step, A.BaseCompose):
        return [step]
    return [leaf for inner in step.transforms for leaf in _leaves(inner)]


def _alone(build: Builder, place: int) -> A.BasicTransform:
    """One of the transforms inside a step, with probability 1."""
    leaf = _leaves(build())[place]
    leaf.p = 1.0
    return leaf


class Augmenter:
    """Returns the crop of a sample: `augmenter(image, target, key)`; equal bytes and keys give equal bytes.

    Cheap to create and to pickle: each process builds the pipeline at its first use, also after a fork. The builders
    of `config.extra` are looked up here and pickled too, so a worker can use transforms that only the main program
    has registered. Raises ConfigError for a name that is not in TRANSFORMS.

    `config.keyed=False` is for comparison, not for training: the key is ignored and the pipeline keeps the random
    state it was built with, as in other trainers, so forked workers repeat each other.

    Shapes: image uint8 (H, W, 3), target uint8 (H, W) -> the same with `config.crop_size`, C-contiguous.
    """

    name = "whole pipeline"

    def __init__(self, config: AugmentConfig) -> None:
        self.config = config
        self.steps = _steps(config)
        self._pipeline: A.Compose | None = None if config.keyed else self._build()
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy, which has not been called yet."""
        return {**self.__dict__, "_pipeline": None}

    def __call__(
        self, image: Uint8, target: Uint8, key: int, look: Look | None = None
    ) -> tuple[Uint8, Uint8]:
        """The crop; `look` is called with the input of each transform."""
        pipeline = self.ready()
        if self.config.keyed:
            pipeline.set_random_state(generator(key), random.Random(key))

        inner = pipeline.transforms
        if look is not None or self.config.extra:
            pipeline.transforms = [
                partial(_applied, name, step, look)
                for (name, _), step in zip(self.steps, inner, strict=True)
            ]

        try:
            made = pipeline(image=image, mask=target)
        except Exception as error:
            own = any(map(plugins.is_path, self.config.extra))
            if not own or isinstance(error, SegpipeError):
                raise
            raise ConfigError(
                f"{KEY} = {self.config.extra}: {plugins.located(error)}."
            ) from error
        finally:
            pipeline.transforms = inner

        image, target = map(np.ascontiguousarray, (made["image"], made["mask"]))
        return image, target

    def ready(self) -> A.Compose:
        """The pipeline of this process, built at the first call; one inherited through a fork is replaced."""
        inherited = self.config.keyed and self._owner != os.getpid()
        if self._pipeline is None or inherited:
            self._pipeline, self._owner = self._build(), os.getpid()
        return self._pipeline

    def parts(self) -> "list[Augmenter]":
        """An augmenter for each transform of the pipeline, with probability 1 and keyed, in the order of application.

        The first takes a sample; the others take the output of the first.
        """
        found = []
        for name, build in self.steps:
            for place, leaf in enumerate(_leaves(build())):
                part = copy.copy(self)
                part.config = replace(self.config, keyed=True)
                part.steps = [(name, partial(_alone, build, place))]
                part.name = _title(name, leaf)
                found.append(part)
        return found

    def _build(self) -> A.Compose:
        """The pipeline of all transforms."""
        transforms = [build() for _, build in self.steps]
        return A.Compose(transforms, seed=None if self.config.keyed else 0)


def _applied(
    name: str, step: Transform, look: Look | None, **data: Any
) -> dict[str, Any]:
    """The output of a step; calls `look` with its input first.

    Raises ConfigError if a transform of `augment.extra` changes dtype or shape.
    """
    if look is not None:
        look(_title(name, step), data["image"], data["mask"])
    output: dict[str, Any] = step(**data)
    for part, value in data.items() if name else ():
        wanted, found = (
            f"{getattr(each, 'dtype', type(each).__name__)} {np.shape(each)}"
            for each in (value, output[part])
        )
        if found != wanted:
            raise ConfigError(
                f"{KEY} = {name} made {found} of the {part} {wanted}, but dtype and shape must not change: the crop "
                f"already has its size."
            )
    return output


def _title(name: str, step: Transform) -> str:
    """Name of a transform in messages: its name in the configuration, if it has one, and its class."""
    kind = type(step).__name__
    return f"{name} ({kind})" if name else kind
