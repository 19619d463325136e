"""The temperature that makes confidence mean what it says, for the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from segpipe import IGNORE_INDEX
from segpipe.export.gates.calibration import fit_temperature
from segpipe.export.gates.checks import Target
from segpipe.export.graph.profiles import Image

if TYPE_CHECKING:
    from segpipe.train.checkpoint import TrainedNetwork

NOT_FITTED = {"method": "none", "temperature": 1.0}


def calibration_entry(trained: TrainedNetwork, labelled: Iterable[tuple[Image, Target]] | None) -> dict[str, Any]:
    """`calibration` of the manifest: temperature and expected calibration error (0 to 1) before and after.

    Without labels the confidence stays the plain softmax. Call it inside `one_thread`.
    """
    if labelled is None:
        return dict(NOT_FITTED)
    fitted = fit_temperature(_logits(trained, labelled), ignore_index=IGNORE_INDEX)
    return {
        "method": "temperature",
        "temperature": fitted.temperature,
        "ece_before": fitted.ece_before,
        "ece_after": fitted.ece_after,
        "images": fitted.images,
    }


def _logits(
    trained: TrainedNetwork, labelled: Iterable[tuple[Image, Target]]
) -> Iterator[tuple[NDArray[np.float32], Target]]:
    """Logits (C, h, w) at the output stride, where confidence is computed, with the target of each image."""
    device = next(trained.model.parameters()).device
    for image, target in labelled:
        batch = torch.from_numpy(image.copy())[None].to(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            logits = trained.model(trained.preprocess(batch))
        yield logits[0].float().cpu().numpy(), target
