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
        is_probe: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.preprocess = preprocess
        self.align_corners = align_corners
        self.profile = profile
        self.temperature = temperature
        self.is_probe = is_probe

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the profile; a probe adds the tensors that the gates compare.

        Shapes: image as the profile has it -> mask (B, H, W), class ids, never 255; confidence uint8 (B, h, w) at the
        output stride, 255 * largest probability of softmax(logits / temperature); logits float32 (B, C, H, W);
        normalised float32 (B, 3, H, W).
        """
        normalised = self._normalise(image)
        logits = self.network(normalised)
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
        return self._variant(self.profile, is_probe=True)

    def as_robot(self) -> DeployModel:
        """Same modules and weights in the profile `robot`."""
        return self._variant(ROBOT, is_probe=False)

    def _variant(self, profile: Profile, *, is_probe: bool) -> DeployModel:
        variant = DeployModel(
            self.network,
            self.preprocess,
            align_corners=self.align_corners,
            profile=profile,
            temperature=self.temperature,
            is_probe=is_probe,
        )
        variant.training = self.training  # train() would also set the shared modules
        return variant


def deploy_model(
    trained: TrainedNetwork, *, profile: Profile = ROBOT, temperature: float = 1.0
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
    )
    return model.cpu().float().eval().requires_grad_(False)


def run_eager(model: DeployModel) -> Run:
    """The reference: eager fp32 with all tensors that the gates compare. Call it inside `one_thread`."""
    return torch_run(model.probe(), model.profile)
