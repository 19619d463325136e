"""ERFNet (Romera et al., IEEE T-ITS 2018): factorized residual blocks, and a decoder of transposed convolutions."""

import torch
from torch import Tensor, nn

from segpipe.models.layers import (
    Features,
    ReLU,
    SegmentationNet,
    asymmetric,
    init_near_zero,
    relu,
    renames,
)

EPS = 1e-3  # of BatchNorm
DILATIONS = (2, 4, 8, 16)


class ERFNet(SegmentationNet):
    """2,064,191 parameters (19 classes), all used in inference. Logits have the size of the image.

    Published files hold 2,451 more: a classifier of the encoder, used only in pretraining. Initial weights are torch's
    defaults, as in the authors' code.
    """

    output_stride = 1
    size_multiple = 8
    unused_keys = r"(^|\.)encoder\.output_conv\."

    def __init__(self, num_classes: int) -> None:
        super().__init__()

        context = [
            NonBottleneck1D(128, dilation, dropout=0.3) for dilation in DILATIONS * 2
        ]
        fine = [NonBottleneck1D(64, 1, dropout=0.03) for _ in range(5)]
        self.encoder = nn.Sequential(
            ERFDownsampler(3, 16),
            ERFDownsampler(16, 64),
            *fine,
            ERFDownsampler(64, 128),
            *context,
        )
        self.decoder = nn.Sequential(
            ERFUpsampler(128, 64),
            NonBottleneck1D(64, 1),
            NonBottleneck1D(64, 1),
            ERFUpsampler(64, 16),
            NonBottleneck1D(16, 1),
            NonBottleneck1D(16, 1),
        )
        self.head = nn.ConvTranspose2d(16, num_classes, 2, stride=2)
        self.train_only = nn.ModuleDict()
        init_near_zero(self.head)

    def features(self, image: Tensor) -> Features:
        """Main logits (B, num_classes, H, W); the decoder's excess, up to multiples of 8, is cropped."""
        logits = self.head(self.decoder(self.encoder(image)))
        height, width = image.shape[-2:]
        if logits.shape[-2:] != image.shape[-2:]:
            logits = logits[..., :height, :width]
        return logits, {}

    published_keys = renames(r"""
        ^encoder\.0\.     encoder.initial_block.
        ^encoder\.1\.     encoder.layers.0.
        ^encoder\.2\.     encoder.layers.1.
        ^encoder\.3\.     encoder.layers.2.
        ^encoder\.4\.     encoder.layers.3.
        ^encoder\.5\.     encoder.layers.4.
        ^encoder\.6\.     encoder.layers.5.
        ^encoder\.7\.     encoder.layers.6.
        ^encoder\.8\.     encoder.layers.7.
        ^encoder\.9\.     encoder.layers.8.
        ^encoder\.10\.    encoder.layers.9.
        ^encoder\.11\.    encoder.layers.10.
        ^encoder\.12\.    encoder.layers.11.
        ^encoder\.13\.    encoder.layers.12.
        ^encoder\.14\.    encoder.layers.13.
        ^encoder\.15\.    encoder.layers.14.
        ^decoder\.(\d)\.  decoder.layers.\1.
        \.near\.(\d)      .\1_1
        \.far\.(\d)       .\1_2
        \.0_              .conv3x1_
        \.2_              .conv1x3_
        \.3_              .bn
        ^head\.           decoder.output_conv.
    """)


class ERFDownsampler(nn.Module):
    """Half the size: a strided convolution, concatenated with a max-pooling of the input."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()

        self.conv = nn.Conv2d(num_in, num_out - num_in, 3, 2, 1)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.bn = nn.BatchNorm2d(num_out, EPS)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.conv(x), self.pool(x)], dim=1)
        return relu(self.bn(both))


class ERFUpsampler(nn.Module):
    """Twice the size, by a transposed convolution."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(num_in, num_out, 3, 2, 1, output_padding=1)
        self.bn = nn.BatchNorm2d(num_out, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.bn(self.conv(x)))


class NonBottleneck1D(nn.Module):
    """Two pairs of 3x1 and 1x3 convolutions, the second pair dilated, and a shortcut."""

    def __init__(self, planes: int, dilation: int, *, dropout: float = 0.0) -> None:
        super().__init__()

        self.near, self.far = (
            asymmetric(planes, each, ReLU(), nn.BatchNorm2d(planes, EPS))
            for each in (1, dilation)
        )
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = self.far(relu(self.near(x)))
        return relu(self.dropout(out) + x)
