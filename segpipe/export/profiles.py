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


@dataclass(frozen=True)
class Profile:
    """Input and outputs of a file. `planar` inputs are float32 (1, 3, H, W) of 0 to 255, others uint8 (1, H, W, 3)."""

    name: str
    outputs: tuple[str, ...]
    mask_dtype: torch.dtype = torch.uint8
    planar: bool = False

    @property
    def probe_outputs(self) -> tuple[str, ...]:
        """Outputs of the variant on which the gates look."""
        return (*self.outputs, *(name for name in PROBES if name not in self.outputs))

    @property
    def input_dtype(self) -> str:
        """numpy's name of the input's type."""
        return "float32" if self.planar else "uint8"

    def input_shape(self, size: tuple[int, int]) -> list[int]:
        """Shape of the input for images of `size` = (height, width)."""
        return [1, 3, *size] if self.planar else [1, *size, 3]

    def example(self, size: tuple[int, int]) -> torch.Tensor:
        """An input of zeros."""
        return torch.zeros(self.input_shape(size), dtype=getattr(torch, self.input_dtype))

    def encode(self, image: Image) -> NDArray[Any]:
        """The input that an image becomes, in fresh memory."""
        if self.planar:
            return np.ascontiguousarray(image.transpose(2, 0, 1)[None], dtype=np.float32)
        return image[None].copy()

    def answer(self, outputs: Sequence[NDArray[Any]]) -> Answer:
        """Outputs of a file, or of its probe, by their order."""
        names = self.outputs if len(outputs) == len(self.outputs) else self.probe_outputs
        return answer_of(names, outputs)


def answer_of(names: Sequence[str], outputs: Sequence[NDArray[Any]]) -> Answer:
    """Outputs by their names, each with a leading axis of 1; the mask follows from the logits where it is no output."""
    found = {name: output[0] for name, output in zip(names, outputs, strict=True)}
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
