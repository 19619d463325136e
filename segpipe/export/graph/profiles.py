"""Inputs and outputs of an exported file: profile, free axes, and the answer to one image."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from segpipe.errors import ConfigError

Image = NDArray[np.uint8]  # (H, W, 3) RGB
Size = tuple[int, int]  # height, width
Free = Mapping[str, Mapping[str, Any]]  # `io.free` of the manifest
Manifest = dict[str, Any]

INPUT = "image"
BATCH, HEIGHT, WIDTH = "batch", "height", "width"  # names of free axes
MASK, CONFIDENCE, LOGITS, NORMALISED = "mask", "confidence", "logits", "normalised"
PROBES = (
    LOGITS,
    NORMALISED,
)  # tensors inside the graph that the gates compare; a probe has them as outputs

_LONG = (
    1032,
    1160,
)  # at this size the coarsest maps, 1/512 in the pyramids, still have three cells
_SMALLEST = 32  # rows or columns that the networks need
_BATCHES = (1, 2, 3)
# Height shrinks where width grows, so a graph that computes one from the other gives a wrong answer.
_SHARES = {HEIGHT: (1.0, 0.5, 1.5), WIDTH: (1.0, 1.5, 0.5)}


class Answer(NamedTuple):
    """Outputs for one image; None where the file has no such output.

    mask (H, W) integers, confidence (h, w) uint8, logits float32 (C, H, W), normalised float32 (3, H, W).
    """

    mask: NDArray[Any]
    confidence: NDArray[np.uint8] | None = None
    logits: NDArray[np.float32] | None = None
    normalised: NDArray[np.float32] | None = None


Run = Callable[[Image], Answer]


@dataclass(frozen=True)
class Runner:
    """A file, or the eager reference, as a `Run`; `batch` answers several images of one size in one call."""

    batch: Callable[[Sequence[Image]], list[Answer]]

    def __call__(self, image: Image) -> Answer:
        """Answer to a single image."""
        (answer,) = self.batch([image])
        return answer


@dataclass(frozen=True)
class Profile:
    """Inputs and outputs of a file. `planar` inputs are float32 (1, 3, H, W) in 0..255, others uint8 (1, H, W, 3).

    dynamic: "none", "batch" (number of images is free) or "hw" (height and width are free).
    """

    name: str
    outputs: tuple[str, ...]
    mask_dtype: torch.dtype = torch.uint8
    planar: bool = False
    dynamic: str = "none"

    @property
    def probe_outputs(self) -> tuple[str, ...]:
        """Outputs of the probe: those of the file, then the tensors that the gates compare."""
        return (*self.outputs, *(name for name in PROBES if name not in self.outputs))

    @property
    def input_dtype(self) -> str:
        """numpy name of the input's dtype."""
        return "float32" if self.planar else "uint8"

    def input_shape(self, size: Size) -> list[int]:
        """Input shape for one image."""
        return [1, 3, *size] if self.planar else [1, *size, 3]

    def example(self, size: Size) -> torch.Tensor:
        """Input of zeros for the conversion.

        Free lengths are large in it: torch.export treats a length of 1, even of a map deep inside the network, as
        constant. A pidnet_s file converted with 64x128 gave wrong answers at 32x192.
        """
        shape = self.input_shape(_LONG if self.dynamic == "hw" else size)
        shape[0] += self.dynamic == "batch"
        return torch.zeros(shape, dtype=getattr(torch, self.input_dtype))

    @property
    def free_axes(self) -> dict[int, str]:
        """Free axes of the input: index -> name."""
        if self.dynamic == "batch":
            return {0: BATCH}
        if self.dynamic == "hw":
            row = 2 if self.planar else 1
            return {row: HEIGHT, row + 1: WIDTH}
        return {}

    def dynamic_shapes(self, manifest: Manifest) -> tuple[dict[int, Any]] | None:
        """Free axes of the input in torch.export's form; None for a file of one shape."""
        free = manifest["io"].get("free")
        if not free:
            return None
        dims = {
            axis: torch.export.Dim(axis, min=entry["min"])
            for axis, entry in free.items()
        }
        return ({place: dims[axis] for place, axis in self.free_axes.items()},)

    def input_axes(self, size: Size) -> list[int | str]:
        """`input_shape` with names in place of free lengths."""
        return [
            self.free_axes.get(axis, length)
            for axis, length in enumerate(self.input_shape(size))
        ]

    def output_axes(self, shape: Sequence[int], stride: int) -> list[int | str]:
        """Output shape with names in place of free lengths; height and width are the last two axes."""
        axes: list[int | str] = list(shape)
        if self.dynamic == "batch":
            axes[0] = BATCH
        if self.dynamic == "hw":
            low = f"/{stride}" if stride > 1 else ""
            axes[-2:] = [HEIGHT + low, WIDTH + low]
        return axes

    def encode(self, *images: Image) -> NDArray[Any]:
        """Input batch made of images of one size, in new memory."""
        batch = np.stack(images)
        if self.planar:
            return np.ascontiguousarray(batch.transpose(0, 3, 1, 2), dtype=np.float32)
        return np.ascontiguousarray(batch)

    def answers(self, outputs: Sequence[NDArray[Any]]) -> list[Answer]:
        """Answers from the outputs of a file, or of its probe, in order."""
        is_shipped = len(outputs) == len(self.outputs)
        names = self.outputs if is_shipped else self.probe_outputs
        return answers_of(names, outputs)


ROBOT = Profile("robot", (MASK, CONFIDENCE))
PROFILES = {
    "robot": ROBOT,
    # TensorRT allows uint8 only at the inputs and outputs of a graph, and Isaac ROS passes planar floats.
    "isaac": Profile("isaac", (MASK,), mask_dtype=torch.int32, planar=True),
    "logits": Profile("logits", (LOGITS,)),
}


def answers_of(names: Sequence[str], outputs: Sequence[NDArray[Any]]) -> list[Answer]:
    """One answer per image of the batch. Raises ValueError when the outputs have different batch sizes."""
    return [
        _answer(dict(zip(names, parts, strict=True)))
        for parts in zip(*outputs, strict=True)
    ]


def _answer(found: dict[str, NDArray[Any]]) -> Answer:
    """The outputs by name; the mask is the best class where the file has logits only."""
    for name in PROBES:
        if name in found:  # fp16 files have fp16 probes
            found[name] = found[name].astype(np.float32, copy=False)
    if MASK not in found:
        found[MASK] = found[LOGITS].argmax(0)
    return Answer(**found)


def torch_runner(module: Any, profile: Profile) -> Runner:
    """A torch module with the inputs and outputs of `profile` as a Runner."""

    def batch(images: Sequence[Image]) -> list[Answer]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            outputs = module(torch.from_numpy(profile.encode(*images)))
        return profile.answers([output.numpy() for output in outputs])

    return Runner(batch)


def io_problems(
    kind: str, got: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> list[str]:
    """G1 finding when name, dtype or shape of inputs or outputs differ from the manifest's."""
    keys = ("name", "dtype", "shape")
    needed = [{key: entry[key] for key in keys} for entry in expected]
    if got == needed:
        return []
    return [f"{kind} = {got}, but the manifest has {needed}"]


def manifest_text(manifest: Manifest) -> str:
    """The manifest as JSON text, the same in every file: equal content gives equal text."""
    return json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False)


def free_lengths(dynamic: str, size: Size, multiple: int) -> dict[str, dict[str, Any]]:
    """`io.free` of the manifest: per free axis the `exported` length, the lengths `tried`, and which lengths fit.

    Multiples of `multiple` from `min` to `max` fit, the range that is tried; a batch has no maximum. `dynamic` is
    export.dynamic. Raises ConfigError when `size` does not allow a trial at half its length.
    """
    if dynamic == "none":
        return {}
    if dynamic == "batch":
        return {
            BATCH: {"exported": 1, "tried": list(_BATCHES), "multiple": 1, "min": 1}
        }
    if any(length % multiple or length < 2 * _SMALLEST for length in size):
        height, width = (
            max(-(-length // multiple) * multiple, 2 * _SMALLEST) for length in size
        )
        raise ConfigError(
            f"export.dynamic = hw, but the images are {size[0]}x{size[1]}; it needs multiples of {multiple} from "
            f"{2 * _SMALLEST} up, since half the size is tried as well. Set export.height and export.width to such a "
            f"size that images of data.split have; or pad a copy of that split to {height}x{width}, see Other sizes "
            f"in docs/robots.md; or set export.dynamic=none."
        )
    found = {}
    for axis, length in zip((HEIGHT, WIDTH), size, strict=True):
        tried = [multiple * round(length * share / multiple) for share in _SHARES[axis]]
        found[axis] = {
            "exported": length,
            "tried": tried,
            "multiple": multiple,
            "min": min(tried),
            "max": max(tried),
        }
    return found


def dynamic_of(free: Free) -> str:
    """Value of `export.dynamic` that gives these free axes."""
    if BATCH in free:
        return "batch"
    return "hw" if free else "none"


def further_sizes(free: Free) -> list[Size]:
    """Sizes that are tried besides the exported one."""
    if HEIGHT not in free:
        return []
    return list(zip(free[HEIGHT]["tried"][1:], free[WIDTH]["tried"][1:], strict=True))
