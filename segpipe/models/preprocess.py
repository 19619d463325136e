"""Preprocessing between the uint8 batch and the network: in training, in validation and inside the exported file."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _mean(values: Tensor) -> Tensor:
    """Mean of each image, (B, 1, 1, 1). At 1024x2048 onnxruntime is off by 3e-4 in one sum, 6e-7 with rows first."""
    return values.mean(3, True).mean((1, 2), True)


class Preprocess(nn.Module):
    """Normalized float32 image from uint8 RGB, on the device of its buffers.

    Computes image * scale + bias in fp32, always as one multiplication and one addition, with scale = 1 / (255 * std)
    and bias = -mean / std, which is (image / 255 - mean) / std. Mean and std are per RGB channel, in units of 0 to 1.
    With `standardize`, each image instead gets mean 0 and variance 1 over its channels and pixels, in any light.

    Shapes: uint8 (B, H, W, 3) -> float32 (B, 3, H, W). The result keeps the memory order of its input, so it is
    channels_last without a copy. Raises TypeError for another dtype and ValueError if the last axis is not RGB: both
    would otherwise broadcast to something that looks like an image.
    """

    scale: Tensor
    bias: Tensor

    def __init__(
        self,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        *,
        standardize: bool = False,
    ) -> None:
        super().__init__()
        self.standardize = standardize

        mean64, std64 = (
            torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)
            for values in (mean, std)
        )
        self.register_buffer("scale", (1 / (255 * std64)).float())
        self.register_buffer("bias", (-mean64 / std64).float())

    def forward(self, image: Tensor) -> Tensor:
        if image.dtype != torch.uint8:
            raise TypeError(
                f"image is {image.dtype}, but uint8 (B, H, W, 3) in RGB order was needed."
            )

        # Under tracing, the comparison would only warn.
        if not torch.jit.is_tracing() and image.shape[-1] != 3:  # type: ignore[attr-defined,no-untyped-call]
            raise ValueError(
                f"image has shape {tuple(image.shape)}, but (B, H, W, 3) was needed."
            )

        return self.normalized(image.permute(0, 3, 1, 2).float())

    def normalized(self, values: Tensor) -> Tensor:
        """Like `forward`, for float32 values from 0 to 255, (B, 3, H, W)."""
        if not self.standardize:
            return values * self.scale + self.bias
        centered = values - _mean(values)
        return centered * (_mean(centered.square()) + 1).rsqrt()
