"""What goes into a file and what comes out of it: three ways to call the same network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # (H, W, 3) RGB
INPUT = "image"
BATCH, HEIGHT, WIDTH = "batch", "height", "width"  # of axes that are free
MASK, CONFIDENCE, LOGITS, NORMALISED = "mask", "confidence", "logits", "normalised"
PROBES = (LOGITS, NORMALISED)  # tensors inside the graph on which the gates look; a probe has them as outputs


class Answer(NamedTuple):
    """What one image gives; None where the file has no such output.

    mask (H, W) integers, confidence (h, w) uint8, logits float32 (C, H, W), normalised float32 (3, H, W).
    """

    mask: NDArray[Any]
    confidence: NDArray[np.uint8] | None = None
    logits: NDArray[np.float32] | None = None
    normalised: NDArray[np.float32] | None = None


Run = Callable[[Image], Answer]
_LONG = (1032, 1160)  # the coarsest maps, those of 1 / 512 in the pyramids, still have three cells


@dataclass(frozen=True)
class Runner:
    """A file, or the reference, as a `Run`; `batch` gives the answers to several images of one size in one run."""

    batch: Callable[[Sequence[Image]], list[Answer]]

    def __call__(self, image: Image) -> Answer:
        """The answer to one image alone."""
        (answer,) = self.batch([image])
        return answer


@dataclass(frozen=True)
class Profile:
    """Input and outputs of a file. `planar` inputs are float32 (1, 3, H, W) of 0 to 255, others uint8 (1, H, W, 3).

    `dynamic` says which lengths are free: none, that of the batch, or hw, height and width.
    """

    name: str
    outputs: tuple[str, ...]
    mask_dtype: torch.dtype = torch.uint8
    planar: bool = False
    dynamic: str = "none"

    @property
    def probe_outputs(self) -> tuple[str, ...]:
        """Outputs of the variant on which the gates look."""
        return (*self.outputs, *(name for name in PROBES if name not in self.outputs))

    @property
    def input_dtype(self) -> str:
        """numpy's name of the input's type."""
        return "float32" if self.planar else "uint8"

    def input_shape(self, size: tuple[int, int]) -> list[int]:
        """Shape of the input for one image of `size` = (height, width)."""
        return [1, 3, *size] if self.planar else [1, *size, 3]

    def example(self, size: tuple[int, int]) -> torch.Tensor:
        """An input of zeros with which a network is converted.

        What is free is long in it: torch.export takes a length that is 1, be it that of a map deep inside, for one that
        stays so. A file of pidnet_s that was converted with 64x128 was wrong for 32x192.
        """
        shape = self.input_shape(_LONG if self.dynamic == "hw" else size)
        shape[0] += self.dynamic == "batch"
        return torch.zeros(shape, dtype=getattr(torch, self.input_dtype))

    @property
    def free_axes(self) -> dict[int, str]:
        """Names of the input's free axes by their place."""
        row = 2 if self.planar else 1
        return {"none": {}, "batch": {0: BATCH}, "hw": {row: HEIGHT, row + 1: WIDTH}}[self.dynamic]

    def input_axes(self, size: tuple[int, int]) -> list[int | str]:
        """`input_shape`, free axes by their names."""
        return [self.free_axes.get(axis, length) for axis, length in enumerate(self.input_shape(size))]

    def output_axes(self, shape: Sequence[int], stride: int) -> list[int | str]:
        """`shape` of an output at a stride, free axes by their names; rows and columns are its last axes."""
        low = f"/{stride}" if stride > 1 else ""
        sides: list[int | str] = [HEIGHT + low, WIDTH + low] if self.dynamic == "hw" else list(shape[-2:])
        return [BATCH if self.dynamic == "batch" else shape[0], *shape[1:-2], *sides]

    def encode(self, *images: Image) -> NDArray[Any]:
        """The input that images of one size become, in fresh memory."""
        batch = np.stack(images)
        if self.planar:
            return np.ascontiguousarray(batch.transpose(0, 3, 1, 2), dtype=np.float32)
        return np.ascontiguousarray(batch)

    def answers(self, outputs: Sequence[NDArray[Any]]) -> list[Answer]:
        """Outputs of a file, or of its probe, by their order."""
        names = self.outputs if len(outputs) == len(self.outputs) else self.probe_outputs
        return answers_of(names, outputs)


def answers_of(names: Sequence[str], outputs: Sequence[NDArray[Any]]) -> list[Answer]:
    """An answer for each image of the batch, from outputs by their names.

    Raises ValueError when the outputs are of different numbers of images.
    """
    return [_answer(dict(zip(names, parts, strict=True))) for parts in zip(*outputs, strict=True)]


def _answer(found: dict[str, NDArray[Any]]) -> Answer:
    """The mask follows from the logits where it is no output."""
    logits, normalised = (found[name].astype(np.float32, copy=False) if name in found else None for name in PROBES)
    if MASK in found:
        return Answer(found[MASK], found.get(CONFIDENCE), logits, normalised)
    assert logits is not None
    return Answer(logits.argmax(0), found.get(CONFIDENCE), logits, normalised)


ROBOT = Profile("robot", (MASK, CONFIDENCE))
PROFILES = {
    "robot": ROBOT,
    # TensorRT takes uint8 at the borders of a graph only, and Isaac ROS hands over planar floats.
    "isaac": Profile("isaac", (MASK,), mask_dtype=torch.int32, planar=True),
    "logits": Profile("logits", (LOGITS,)),
}
