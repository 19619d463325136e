"""Fast-SCNN, arXiv:1902.04502, in the variant of the published weights.

It has a 1x1 convolution after the pyramid, ReLU after both convolutions of a separable block, no padding in the first
convolution, and align_corners True in every resize.
"""

from functools import partial

import torch
from torch import Tensor, nn

from segpipe.models.layers import (
    Classifier,
    Features,
    InvertedResidual,
    ReLU,
    SegmentationNet,
    conv_bn,
    init_weights,
    relu,
    renames,
    separable,
    stage,
    upsample_like,
)
from segpipe.models.resize import adaptive_avg_pool

_BINS = (1, 2, 3, 6)
_conv_bn_relu = partial(conv_bn, act=ReLU)


class FastSCNN(SegmentationNet):
    """1,157,174 parameters in training, 1,138,051 in inference (19 classes).

    256 of them are biases that the published network has before two BatchNorms of the fusion. The first convolution is
    not padded, so logit sizes are rounded down if a side is not a multiple of 8.
    """

    align_corners = True

    def __init__(self, num_classes: int, *, aux: bool = True) -> None:
        super().__init__()

        self.detail = nn.Sequential(
            _conv_bn_relu(3, 32, 3, stride=2, padding=0),
            separable(32, 48, stride=2),
            separable(48, 64, stride=2),
        )
        self.context = nn.Sequential(
            stage(InvertedResidual, 64, 64, 3),
            stage(InvertedResidual, 64, 96, 3),
            stage(InvertedResidual, 96, 128, 3, stride=1),
        )
        self.ppm = PyramidPooling()
        self.fusion = FeatureFusion()
        self.classifier = nn.Sequential(
            separable(128, 128),
            separable(128, 128),
            nn.Dropout(0.1),
            Classifier(128, num_classes, 1),
        )
        self.train_only = nn.ModuleDict()
        if aux:
            head = nn.Sequential(
                _conv_bn_relu(64, 32, 3),
                nn.Dropout(0.1),
                Classifier(32, num_classes, 1),
            )
            self.train_only["aux"] = head

        init_weights(self)

    def features(self, image: Tensor) -> Features:
        """Logits at stride 8; "aux", if the network has it, reads the detail branch."""
        high = self.detail(image)
        fused = self.fusion(high, self.ppm(self.context(high)))
        return self.classifier(fused), {"aux": high}

    published_keys = renames(r"""
        ^detail\.0\.                     learning_to_downsample.conv.conv.
        ^detail\.(\d)\.                  learning_to_downsample.dsconv\1.conv.
        ^context\.0\.                    global_feature_extractor.bottleneck1.
        ^context\.1\.                    global_feature_extractor.bottleneck2.
        ^context\.2\.                    global_feature_extractor.bottleneck3.
        \.expand\.                       .block.0.conv.
        (bottleneck\d\.\d)\.depthwise\.  \1.block.1.conv.
        \.project\.0\.                   .block.2.
        \.project\.1\.                   .block.3.
        ^ppm\.out\.                      global_feature_extractor.ppm.out.conv.
        ^ppm\.branches\.0\.              global_feature_extractor.ppm.conv1.conv.
        ^ppm\.branches\.1\.              global_feature_extractor.ppm.conv2.conv.
        ^ppm\.branches\.2\.              global_feature_extractor.ppm.conv3.conv.
        ^ppm\.branches\.3\.              global_feature_extractor.ppm.conv4.conv.
        ^fusion\.depthwise\.             feature_fusion.dwconv.conv.
        ^fusion\.low\.                   feature_fusion.conv_lower_res.
        ^fusion\.high\.                  feature_fusion.conv_higher_res.
        ^classifier\.0\.                 classifier.dsconv1.conv.
        ^classifier\.1\.                 classifier.dsconv2.conv.
        ^classifier\.3\.                 classifier.conv.1.
        ^train_only\.aux\.0\.            auxlayer.
        ^train_only\.aux\.2\.            auxlayer.4.
    """)


class PyramidPooling(nn.Module):
    """(B, 128, h, w) -> same shape: averages over 1, 2, 3 and 6 bins per side, concatenated with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(_conv_bn_relu(128, 32, 1) for _ in _BINS)
        self.out = _conv_bn_relu(256, 128, 1)

    def forward(self, x: Tensor) -> Tensor:
        scales = (
            upsample_like(branch(adaptive_avg_pool(x, bins)), x, align_corners=True)
            for branch, bins in zip(self.branches, _BINS, strict=True)
        )
        return self.out(torch.cat([x, *scales], dim=1))


class FeatureFusion(nn.Module):
    """Sum of the detail (B, 64, h, w) and the upsampled context (B, 128, h/4, w/4) -> (B, 128, h, w)."""

    def __init__(self) -> None:
        super().__init__()

        self.depthwise = _conv_bn_relu(128, 128, 3, groups=128)
        self.low = conv_bn(128, 128, 1, bias=True)
        self.high = conv_bn(64, 128, 1, bias=True)

    def forward(self, high: Tensor, low: Tensor) -> Tensor:
        low = upsample_like(low, high, align_corners=True)
        return relu(self.high(high) + self.low(self.depthwise(low)))
