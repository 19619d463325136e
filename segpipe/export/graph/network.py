"""The deploy model: the one module that is exported in every format and is also the eager reference."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segpipe.export.graph.profiles import (
    CONFIDENCE,
    LOGITS,
    MASK,
    NORMALISED,
    ROBOT,
    Profile,
    Run,
    torch_run,
)
from segpipe.models.resize import bilinear

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork


class DeployModel(nn.Module):
    """Camera image in, class ids and confidence out: preprocessing, network, upsampling and argmax in one graph.

    `preprocess` is the training module itself, so the graph cannot normalise differently from training. That module
    takes bytes, so a planar profile applies its two buffers in the same two operations.
    """

    def __init__(
        self,
        network: nn.Module,
        preprocess: nn.Module,
        *,
        align_corners: bool,
        profile: Profile = ROBOT,
        temperature: float = 1.0,
        mask_stride: int = 1,
    ) -> None:
        super().__init__()
        self.network = network
        self.preprocess = preprocess
        self.align_corners = align_corners
        self.profile = profile
        self.temperature = temperature
        self.mask_stride = mask_stride
        self.is_probe = False

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the profile; a probe adds the tensors that the gates compare.

        Shapes: image as the profile has it -> mask (B, H, W), class ids, never 255; confidence uint8 (B, h, w) at the
        output stride, 255 * largest probability of softmax(logits / temperature); logits float32 (B, C, H, W);
        normalised float32 (B, 3, H, W). With a mask stride above 1, mask and logits are at the output stride, too.
        """
        normalised = self._normalise(image)
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

    def _normalise(self, image: Tensor) -> Tensor:
        if self.profile.planar:
            scale, bias = map(self.preprocess.get_buffer, ("scale", "bias"))
            return image * scale + bias
        packed: Tensor = self.preprocess(image)
        return packed

    def probe(self) -> DeployModel:
        """Same modules and weights, with `logits` and `normalised` as further outputs."""
        variant = copy.copy(self)
        variant.is_probe = True
        return variant

    def as_robot(self) -> DeployModel:
        """Same modules and weights in the profile `robot`."""
        variant = copy.copy(self)
        variant.profile = ROBOT
        return variant


def deploy_model(
    trained: TrainedNetwork,
    *,
    profile: Profile = ROBOT,
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
        profile=profile,
        temperature=temperature,
        mask_stride=mask_stride,
    )
    return model.cpu().float().eval().requires_grad_(False)


def run_eager(model: DeployModel) -> Run:
    """The reference: eager fp32 with all tensors that the gates compare. Call it inside `one_thread`."""
    return torch_run(model.probe(), model.profile)
