"""The exported network: the profile of its inputs and outputs, and its answer to one image."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from segpipe.models.resize import bilinear

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

Array = NDArray[Any]
Image = NDArray[np.uint8]  # (H, W, 3) RGB
Size = tuple[int, int]  # height, width
Manifest = dict[str, Any]

INPUT = "image"
MASK, CONFIDENCE, LOGITS, NORMALISED = "mask", "confidence", "logits", "normalised"
# Tensors inside the graph that the gates compare; a probe outputs them.
PROBES = (LOGITS, NORMALISED)


# Manifest entries that exist only after the files are written.
FIGURES = (
    "status",
    "created",
    "check_images",
    "real_images",
    "sigma",
    "gates",
    "files",
    "dropped",
    "latency",
)


class Answer(NamedTuple):
    """Outputs for one image; None for an output that the file does not have.

    mask (H, W) integers, confidence (h, w) uint8, logits float32 (C, H, W), normalised float32 (3, H, W).
    """

    mask: Array
    confidence: Array | None = None
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
        return (*self.outputs, *PROBES)

    def encode(self, image: Image) -> Array:
        """Input batch of one image, in new memory."""
        if self.planar:
            return np.ascontiguousarray(image.transpose(2, 0, 1)[None], np.float32)
        return image[None].copy()


ROBOT = Profile("robot", (MASK, CONFIDENCE))
PROFILES = {
    "robot": ROBOT,
    # TensorRT allows uint8 only at the inputs and outputs of a graph, and Isaac ROS passes planar floats.
    "isaac": Profile("isaac", (MASK,), mask_dtype=torch.int32, planar=True),
}


def answer_of(names: Sequence[str], outputs: Sequence[Array]) -> Answer:
    """Answer from the outputs to a batch of one image."""
    found = {name: output[0] for name, output in zip(names, outputs, strict=True)}
    for name in PROBES:
        if name in found:  # fp16 files have fp16 probes
            found[name] = found[name].astype(np.float32, copy=False)
    return Answer(**found)


def torch_run(module: Any, profile: Profile) -> Run:
    """Function that runs a torch module with the inputs and outputs of `profile`, or of its probe."""

    def run(image: Image) -> Answer:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            outputs = module(torch.from_numpy(profile.encode(image)))
        names = profile.probe_outputs[: len(outputs)]
        return answer_of(names, [output.numpy() for output in outputs])

    return run


def example_of(manifest: Manifest) -> Tensor:
    """Input of zeros for one image, as the manifest describes it."""
    (image,) = manifest["io"]["inputs"]
    return torch.zeros(image["shape"], dtype=getattr(torch, image["dtype"]))


def io_problems(kind: str, got: list[Any], expected: list[Manifest]) -> list[str]:
    """G1 finding when (name, dtype, shape) of inputs or outputs differ from the manifest's."""
    needed = [(entry["name"], entry["dtype"], entry["shape"]) for entry in expected]
    if got == needed:
        return []
    return [f"{kind} = {got}, but the manifest has {needed}"]


def manifest_text(manifest: Manifest) -> str:
    """The manifest as JSON text; equal content gives equal text."""
    return json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False)


def in_file(manifest: Manifest, precision: str) -> Manifest:
    """The part of manifest.json that a file of this precision embeds: all but the figures."""
    inside = {name: value for name, value in manifest.items() if name not in FIGURES}
    return {**inside, "precision": precision}


class DeployModel(nn.Module):
    """Camera image in, class ids and confidence out: preprocessing, network, upsampling and argmax in one graph.

    `preprocess` is a copy of the training module, so the graph cannot normalise differently from training. That module
    takes bytes, so a planar profile applies its two buffers in the same two operations.

    Holds a copy of the trained network on the CPU, in fp32 and eval mode, without the training-only heads.
    SyncBatchNorm, which neither CPUs nor export formats support, becomes BatchNorm: the same function in eval mode.
    """

    def __init__(
        self,
        trained: TrainedNetwork,
        *,
        profile: Profile = ROBOT,
        temperature: float = 1.0,
        mask_stride: int = 1,
    ) -> None:
        super().__init__()
        self.network = copy.deepcopy(trained.model)
        if hasattr(self.network, "train_only"):
            del self.network.train_only
        for module in self.network.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
        self.preprocess = copy.deepcopy(trained.preprocess)
        self.align_corners = trained.model.align_corners
        self.profile = profile
        self.temperature = temperature
        self.mask_stride = mask_stride
        self.is_probe = False
        self.cpu().float().eval().requires_grad_(False)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the profile; a probe adds the tensors that the gates compare.

        Shapes: image in the profile's format -> mask (B, H, W), class ids, never 255; confidence uint8 (B, h, w) at the
        output stride, 255 * largest probability of softmax(logits / temperature); logits float32 (B, C, H, W);
        normalised float32 (B, 3, H, W). With a mask stride above 1, mask and logits are also at the output stride.
        """
        planar = self.profile.planar
        normalise = self.preprocess.normalized if planar else self.preprocess
        normalised = normalise(image)
        logits = self.network(normalised)
        full = logits
        if self.mask_stride == 1:
            height, width = normalised.shape[2:]
            full = bilinear(logits, (height, width), align_corners=self.align_corners)
        tensors = {
            LOGITS: full,
            NORMALISED: normalised,
            MASK: full.argmax(1).to(self.profile.mask_dtype),
        }
        if CONFIDENCE in self.profile.outputs:
            scaled = logits if self.temperature == 1.0 else logits / self.temperature
            highest = scaled.softmax(1).amax(1)
            tensors[CONFIDENCE] = highest.mul(255.0).round().to(torch.uint8)
        names = self.profile.probe_outputs if self.is_probe else self.profile.outputs
        return tuple(tensors[name] for name in names)

    def probe(self) -> DeployModel:
        """Same modules and weights, with `logits` and `normalised` as extra outputs."""
        variant = copy.copy(self)
        variant.is_probe = True
        return variant


def run_eager(model: DeployModel) -> Run:
    """The reference: eager fp32 with all tensors that the gates compare. Call inside `one_thread`."""
    return torch_run(model.probe(), model.profile)
