"""The one model that is exported in every format and is also the eager reference."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from segpipe.export.graph.profiles import CONFIDENCE, LOGITS, MASK, NORMALISED, ROBOT, Profile
from segpipe.models.resize import bilinear

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork


class DeployModel(nn.Module):
    """A camera image to class ids and confidence: preprocessing, network, upsampling and argmax in one graph.

    `preprocess` is the training module itself, so the graph cannot normalise differently from the training. A planar
    profile takes its buffers in the same two operations, since the module takes bytes.
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
        """The outputs of the profile, and those on which the gates look in the variant that has them.

        Shapes: image as the profile has it -> mask (B, H, W), class ids, never 255; confidence uint8 (B, h, w) at the
        output stride, 255 * largest probability of softmax(logits / temperature); logits float32 (B, C, H, W);
        normalised float32 (B, 3, H, W).
        """
        normalised = self._normalise(image)
        logits = self.network(normalised)
        full = bilinear(logits, (normalised.shape[2], normalised.shape[3]), align_corners=self.align_corners)
        tensors = {LOGITS: full, NORMALISED: normalised, MASK: full.argmax(1).to(self.profile.mask_dtype)}
        if CONFIDENCE in self.profile.outputs:
            scaled = logits if self.temperature == 1.0 else logits / self.temperature
            tensors[CONFIDENCE] = scaled.softmax(1).amax(1).mul(255.0).round().to(torch.uint8)
        names = self.profile.probe_outputs if self.is_probe else self.profile.outputs
        return tuple(tensors[name] for name in names)

    def _normalise(self, image: Tensor) -> Tensor:
        if self.profile.planar:
            return image * self.preprocess.get_buffer("scale") + self.preprocess.get_buffer("bias")
        packed: Tensor = self.preprocess(image)
        return packed

    def probe(self) -> DeployModel:
        """The same modules and weights with `logits` and `normalised` as further outputs."""
        return self._variant(self.profile, is_probe=True)

    def as_robot(self) -> DeployModel:
        """The same modules and weights under the profile `robot`."""
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
        variant.training = self.training  # of this module alone: train() would set the shared ones too
        return variant


def _unsynchronise(network: nn.Module) -> None:
    for parent in list(network.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, nn.SyncBatchNorm):
                plain = nn.BatchNorm2d(
                    norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
                )
                plain.load_state_dict(norm.state_dict())
                setattr(parent, name, plain)


def deploy_model(trained: TrainedNetwork, *, profile: Profile = ROBOT, temperature: float = 1.0) -> DeployModel:
    """DeployModel of a trained network: a copy on the CPU, fp32, in eval mode, without the training-only heads.

    SyncBatchNorm, which no CPU and no format has, becomes the BatchNorm that it is in eval mode.
    """
    network = copy.deepcopy(trained.model)
    del network.train_only
    _unsynchronise(network)
    preprocess = copy.deepcopy(trained.preprocess)
    model = DeployModel(
        network, preprocess, align_corners=network.align_corners, profile=profile, temperature=temperature
    )
    return model.cpu().float().eval().requires_grad_(False)
