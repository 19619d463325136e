"""What is exported, and its answer to one image: the network with its pre- and post-processing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from segpipe.models.resize import bilinear

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

Image = NDArray[np.uint8]  # (H, W, 3) RGB
Size = tuple[int, int]  # height, width
Manifest = dict[str, Any]

INPUT = "image"
MASK, CONFIDENCE, LOGITS, NORMALISED = "mask", "confidence", "logits", "normalised"
OUTPUTS = (MASK, CONFIDENCE)
# Tensors inside the graph that the gates compare; a probe has them as outputs.
PROBES = (LOGITS, NORMALISED)


class Answer(NamedTuple):
    """Outputs for one image; None where the file has no such output.

    mask (H, W) and confidence (h, w) uint8, logits float32 (C, H, W), normalised float32 (3, H, W).
    """

    mask: NDArray[np.uint8]
    confidence: NDArray[np.uint8]
    logits: NDArray[np.float32] | None = None
    normalised: NDArray[np.float32] | None = None


Run = Callable[[Image], Answer]


def answer_of(names: Sequence[str], outputs: Sequence[NDArray[Any]]) -> Answer:
    """Answer from the outputs to a batch of one image."""
    found = {name: output[0] for name, output in zip(names, outputs, strict=True)}
    for name in PROBES:
        if name in found:  # fp16 files have fp16 probes
            found[name] = found[name].astype(np.float32, copy=False)
    return Answer(**found)


def manifest_text(manifest: Manifest) -> str:
    """The manifest as JSON text, the same in every file: equal content gives equal text."""
    return json.dumps(manifest, sort_keys=True, indent=1, allow_nan=False)


class DeployModel(nn.Module):
    """Camera image in, class ids and confidence out: preprocessing, network, upsampling and argmax in one graph.

    `preprocess` is the training module itself, so the graph cannot normalise differently from training.
    """

    def __init__(
        self,
        network: nn.Module,
        preprocess: nn.Module,
        *,
        align_corners: bool,
        temperature: float = 1.0,
        mask_stride: int = 1,
    ) -> None:
        super().__init__()
        self.network = network
        self.preprocess = preprocess
        self.align_corners = align_corners
        self.temperature = temperature
        self.mask_stride = mask_stride
        self.is_probe = False

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the file; a probe adds the tensors that the gates compare.

        Shapes: image uint8 (B, H, W, 3) -> mask uint8 (B, H, W), class ids, never 255; confidence uint8 (B, h, w) at
        the output stride, 255 * largest probability of softmax(logits / temperature); logits float32 (B, C, H, W);
        normalised float32 (B, 3, H, W). With a mask stride above 1, mask and logits are at the output stride, too.
        """
        normalised = self.preprocess(image)
        logits = self.network(normalised)
        full = logits
        if self.mask_stride == 1:
            height, width = normalised.shape[2:]
            full = bilinear(logits, (height, width), align_corners=self.align_corners)
        scaled = logits if self.temperature == 1.0 else logits / self.temperature
        highest = scaled.softmax(1).amax(1)
        outputs = (
            full.argmax(1).to(torch.uint8),
            highest.mul(255.0).round().to(torch.uint8),
        )
        return (*outputs, full, normalised) if self.is_probe else outputs

    def probe(self) -> DeployModel:
        """Same modules and weights, with `logits` and `normalised` as further outputs."""
        variant = copy.copy(self)
        variant.is_probe = True
        return variant


def deploy_model(
    trained: TrainedNetwork,
    *,
    temperature: float = 1.0,
    mask_stride: int = 1,
) -> DeployModel:
    """DeployModel of a trained network: a copy on the CPU, fp32, eval mode, without the training-only heads.

    SyncBatchNorm, which neither CPUs nor export formats support, becomes BatchNorm: the same function in eval mode.
    """
    network = copy.deepcopy(trained.model)
    if hasattr(network, "train_only"):
        del network.train_only
    for module in network.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
    preprocess = copy.deepcopy(trained.preprocess)
    model = DeployModel(
        network,
        preprocess,
        align_corners=network.align_corners,
        temperature=temperature,
        mask_stride=mask_stride,
    )
    return model.cpu().float().eval().requires_grad_(False)


def run_eager(model: DeployModel) -> Run:
    """The reference: eager fp32 with all tensors that the gates compare. Call it inside `one_thread`."""
    probe = model.probe()

    def run(image: Image) -> Answer:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            outputs = probe(torch.from_numpy(image[None].copy()))
        names = (*OUTPUTS, *PROBES)
        return answer_of(names, [output.numpy() for output in outputs])

    return run
