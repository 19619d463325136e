"""Whether a network that is not trained yet can be exported: asked before the hours that its training takes."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from segpipe.checks.clause import NOTE
from segpipe.data.catalog import ClassTable
from segpipe.export.dataset import GateInputs, check_set
from segpipe.export.publish import export_run
from segpipe.models.preprocess import Preprocess
from segpipe.train.checkpoint import TrainedNetwork

if TYPE_CHECKING:
    from segpipe.models.layers import SegmentationNet
    from segpipe.settings.config import Config

NUM_IMAGES = 2


def exported(
    config: Config, network: SegmentationNet, num_classes: int, size: tuple[int, int]
) -> str:
    """A note of the formats in which an export of random images passes all gates. Raises what the export raises.

    Random weights are held to no lower precision, speed or quality of classes.
    """
    settings = replace(
        config.export,
        precision=["fp32"],
        engines=[],
        critical_classes=[],
        latency_budget_ms=0.0,
    )
    ids = range(num_classes)
    classes = ClassTable(
        name="example",
        names=tuple(f"class{i}" for i in ids),
        palette=tuple((i, i, i) for i in ids),
        train_ids={i: i for i in ids},
    )
    trained = TrainedNetwork(
        model=copy.deepcopy(network).eval(),
        preprocess=Preprocess(),
        config=config,
        classes=classes,
        ema_digest="0" * 16,
        step=0,
    )
    draws = np.random.default_rng(0)
    shape = (NUM_IMAGES, *size, 3)
    images = [*draws.integers(0, 256, shape, np.uint8)]
    with tempfile.TemporaryDirectory(prefix="segpipe-contract-") as folder:
        out = Path(folder, "export")
        names = [f"image_{index:06d}" for index in range(NUM_IMAGES)]
        export_run(trained, GateInputs(check_set(images, names), None, settings), out)
    return f"{NOTE}{', '.join(settings.formats)}"
