"""LR-ASPP on MobileNetV3-Large, arXiv:1905.02244, of torchvision's layers."""

from torch import Tensor, nn

from segpipe.models.layers import SegmentationNet, init_near_zero, upsample_like


class LRASPP(SegmentationNet):
    """3,221,198 parameters (19 classes), all used in inference. Names of tensors are torchvision's."""

    size_multiple = 16

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        # A second of imports, torch's compiler among them, that other networks do not need.
        from torchvision.models.segmentation import lraspp_mobilenet_v3_large

        net = lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=num_classes
        )
        self.backbone, self.classifier = net.backbone, net.classifier
        self.train_only = nn.ModuleDict()
        init_near_zero(self.classifier.low_classifier)
        init_near_zero(self.classifier.high_classifier)

    def logits(self, image: Tensor, *, aux: bool) -> dict[str, Tensor]:
        """Logits "main" (B, num_classes, H/8, W/8)."""
        features, parts = self.backbone(image), self.classifier
        low, high = features["low"], features["high"]
        # torchvision's own forward would resize with an op that CUDA does not repeat.
        context = upsample_like(parts.cbr(high) * parts.scale(high), low)
        main = parts.low_classifier(low) + parts.high_classifier(context)
        return {"main": main}
