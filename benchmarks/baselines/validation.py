"""How peers turn logits at output stride into counts of a validation, written afresh after their published code.

Shapes: logits float32 (1, C, h, w), target int64 (1, H, W), which their loaders deliver.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

IGNORED = 255


def torchvision(logits: Tensor, target: Tensor) -> Tensor:
    """Confusion (C, C). Source: torchvision, references/segmentation: `evaluate`, `ConfusionMatrix.update`."""
    num = logits.shape[1]
    output = F.interpolate(
        logits, size=target.shape[-2:], mode="bilinear", align_corners=False
    )
    wanted, found = target.flatten(), output.argmax(1).flatten()
    known = (wanted >= 0) & (wanted < num)
    return torch.bincount(num * wanted[known] + found[known], minlength=num**2).reshape(
        num, num
    )


def pidnet(logits: Tensor, target: Tensor) -> NDArray[np.float64]:
    """Confusion (C, C). Source: PIDNet, `validate` and `get_confusion_matrix`; for one head, theirs does it for two."""
    num, size = logits.shape[1], target.shape[-2:]
    output = F.interpolate(logits, size=size, mode="bilinear", align_corners=True)
    found = np.asarray(
        np.argmax(output.cpu().numpy().transpose(0, 2, 3, 1), axis=3), dtype=np.uint8
    )
    wanted = np.asarray(target.cpu().numpy()[:, : size[0], : size[1]], dtype=int)
    known = wanted != IGNORED
    counts = np.bincount((wanted[known] * num + found[known]).astype("int32"))
    matrix = np.zeros((num, num))
    for row in range(num):
        for column in range(num):
            if row * num + column < len(counts):
                matrix[row, column] = counts[row * num + column]
    return matrix


def mmseg(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels of each class in both, prediction and target. Source: mmsegmentation 1.x: `predict_by_feat`,
    `postprocess_result` and `IoUMetric.intersect_and_union`.

    The head resizes to the size of the input, and the result is resized to that of the image, here the same.
    """
    num, size = logits.shape[1], target.shape[-2:]
    resized = F.interpolate(logits, size=size, mode="bilinear", align_corners=False)
    output = F.interpolate(
        resized[:1], size=size, mode="bilinear", align_corners=False
    ).squeeze(0)
    found, wanted = output.argmax(dim=0), target[0]
    known = wanted != IGNORED
    found, wanted = found[known], wanted[known]
    both = found[found == wanted]
    counts = (
        torch.histc(ids.float(), bins=num, min=0, max=num - 1)
        for ids in (both, found, wanted)
    )
    return tuple(counts)  # type: ignore[return-value]
