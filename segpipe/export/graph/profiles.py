"""Inputs and outputs of an exported file: its profile, and the answer to one image."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # (H, W, 3) RGB
Size = tuple[int, int]  # height, width
Manifest = dict[str, Any]

INPUT = "image"
MASK, CONFIDENCE, LOGITS, NORMALISED = "mask", "confidence", "logits", "normalised"
# Tensors inside the graph that the gates compare; a probe has them as outputs.
PROBES = (LOGITS, NORMALISED)


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
class Profile:
    """Inputs and outputs of a file. `planar` inputs are float32 (1, 3, H, W) in 0..255, others uint8 (1, H, W, 3)."""

    name: str
    outputs: tuple[str, ...]
    mask_dtype: torch.dtype = torch.uint8
    planar: bool = False

    @property
    def probe_outputs(self) -> tuple[str, ...]:
        """Outputs of the probe: those of the file, then the tensors that the gates compare."""
        return (*self.outputs, *(name for name in PROBES if name not in self.outputs))

    def example(self, size: Size) -> torch.Tensor:
        """Input of zeros for one image."""
        shape = (1, 3, *size) if self.planar else (1, *size, 3)
        return torch.zeros(shape, dtype=torch.float32 if self.planar else torch.uint8)

    def encode(self, image: Image) -> NDArray[Any]:
        """Input batch of one image, in new memory."""
        if self.planar:
            return np.ascontiguousarray(image.transpose(2, 0, 1)[None], np.float32)
        return image[None].copy()


ROBOT = Profile("robot", (MASK, CONFIDENCE))
PROFILES = {
    "robot": ROBOT,
    # TensorRT allows uint8 only at the inputs and outputs of a graph, and Isaac ROS passes planar floats.
    "isaac": Profile("isaac", (MASK,), mask_dtype=torch.int32, planar=True),
    "logits": Profile("logits", (LOGITS,)),
}


def answer_of(names: Sequence[str], outputs: Sequence[NDArray[Any]]) -> Answer:
    """Answer from the outputs to a batch of one image; the mask is the best class where the file has logits only."""
    found = {name: output[0] for name, output in zip(names, outputs, strict=True)}
    for name in PROBES:
        if name in found:  # fp16 files have fp16 probes
            found[name] = found[name].astype(np.float32, copy=False)
    if MASK not in found:
        found[MASK] = found[LOGITS].argmax(0)
    return Answer(**found)


def torch_run(module: Any, profile: Profile) -> Run:
    """A torch module with the inputs and outputs of `profile`, or of its probe."""

    def run(image: Image) -> Answer:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            outputs = module(torch.from_numpy(profile.encode(image)))
        is_shipped = len(outputs) == len(profile.outputs)
        names = profile.outputs if is_shipped else profile.probe_outputs
        return answer_of(names, [output.numpy() for output in outputs])

    return run


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
