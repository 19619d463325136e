"""What a report page shows of a validation: figures, and the worst and the best images predicted once more.

torch is imported inside the functions, as in finish.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segpipe.run.report import Overlay, ReportData, pick_extremes
from segpipe.settings.config import Config, to_mapping

if TYPE_CHECKING:
    import torch

    from segpipe.data.samples import Samples
    from segpipe.train.validate import Validation

Predict = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


def predictor(answer: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Predict:
    """A function from an image uint8 (H, W, 3) to its class ids uint8 (H, W).

    `answer` has it for images uint8 (1, H, W, 3) on `device`.
    """
    import torch

    def ids(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.asarray(answer(torch.from_numpy(image.copy())[None].to(device))[0].cpu().numpy(), np.uint8)

    return ids


def page_data(
    config: Config,
    samples: Samples,
    found: Validation,
    result: dict[str, Any],
    predict: Predict,
    history: Sequence[Mapping[str, Any]] = (),
) -> ReportData:
    """Input of the report page; predicts the worst and the best images once more."""
    from segpipe.data.samples import sequences
    from segpipe.train.metrics import miou

    scores = {index: miou(counts) for index, counts in found.per_image.items()}

    def overlay(index: int) -> Overlay:
        image, target = samples.read(index)
        return Overlay(samples.name(index), scores[index], image, target, predict(image))

    worst, best = pick_extremes(scores, sequences(samples, config.data.sequence))
    return ReportData(
        config=to_mapping(config),
        result=result,
        confusion=found.total.numpy(),
        names=samples.classes.names,
        palette=samples.classes.palette,
        data_name=samples.classes.name,
        history=history,
        worst=[overlay(index) for index in worst],
        best=[overlay(index) for index in best],
    )
