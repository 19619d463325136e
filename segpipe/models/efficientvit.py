"""EfficientViT-Seg, arXiv:2205.14756: timm's encoder with linear attention, and the authors' head."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from segpipe.models.layers import (
    Classifier,
    Features,
    InvertedResidual,
    conv_bn,
    renames,
    stage,
)
from segpipe.models.packages import EncoderNet
from segpipe.models.resize import bicubic


def efficientvit_seg_b0(num_classes: int, *, pretrained: bool = False) -> EfficientViT:
    """EfficientViT-Seg-B0; `pretrained` loads timm's encoder for step 0."""
    return EfficientViT(num_classes, "b0", width=32, depth=1, pretrained=pretrained)


def efficientvit_seg_b1(num_classes: int, *, pretrained: bool = False) -> EfficientViT:
    """EfficientViT-Seg-B1; `pretrained` loads timm's encoder for step 0."""
    return EfficientViT(num_classes, "b1", width=64, depth=3, pretrained=pretrained)


Hardswish = partial(nn.Hardswish, inplace=True)
NAMES = ("conv", "norm", "act")
_conv = partial(conv_bn, names=NAMES)


class EfficientViT(EncoderNet):
    """timm's encoder efficientvit_`size`, and a head of `depth` inverted residuals that is `width` channels wide.

    19 classes: 706,691 parameters for B0 and 4,803,443 for B1, all used in inference. Raises ConfigError without timm.
    """

    def __init__(
        self, num_classes: int, size: str, *, width: int, depth: int, pretrained: bool
    ) -> None:
        super().__init__(f"efficientvit_{size}", pretrained)

        channels = self.encoder.feature_info.channels()[:0:-1]
        self.inputs = nn.ModuleList(_conv(num, width, 1) for num in channels)
        block = partial(InvertedResidual, ratio=4, act=Hardswish, names=NAMES)
        self.middle = stage(block, width, width, depth, stride=1)
        self.widen = _conv(width, 4 * width, 1, act=Hardswish)
        self.head = Classifier(4 * width, num_classes, 1)
        self.train_only = nn.ModuleDict()
        self.init_decoder()

    def features(self, image: Tensor) -> Features:
        """Main logits (B, num_classes, H/8, W/8)."""
        _, stride8, stride16, stride32 = self.encoder(image)
        size = stride8.shape[-2:]
        at32, at16, at8 = self.inputs
        x = bicubic(at32(stride32), size) + bicubic(at16(stride16), size) + at8(stride8)

        return self.head(self.widen(self.middle(x))), {}

    published_keys = renames(r"""
        ^encoder\.stem_in_conv\.         backbone.input_stem.op_list.0.
        ^encoder\.stem_res0\.            backbone.input_stem.op_list.1.
        ^encoder\.stages_(\d)\.blocks\.  backbone.stages.\1.op_list.
        ^inputs\.([01])\.                head.input_ops.\1.op_list.0.
        ^inputs\.2\.                     head.input_ops.2.
        ^middle\.(\d)\.                  head.middle.op_list.\1.main.
        \.expand\.                       .inverted_conv.
        \.depthwise\.                    .depth_conv.
        \.project\.                      .point_conv.
        ^widen\.                         head.output_ops.0.op_list.0.
        ^head\.(weight|bias)$            head.output_ops.0.op_list.1.conv.\1
    """)
