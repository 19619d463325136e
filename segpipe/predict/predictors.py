"""What answers images: the network of a run, or the file of an exported folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from segpipe import IGNORE_INDEX
from segpipe.distributed.watch.health import is_out_of_memory
from segpipe.errors import ConfigError, OutOfMemory
from segpipe.files import sha256
from segpipe.predict.exported import Exported
from segpipe.predict.inference import Inference, segment
from segpipe.predict.outputs import Pixels, Predictor
from segpipe.runtime.artifact import MANIFEST
from segpipe.train.checkpoint import TrainedNetwork


def of_network(trained: TrainedNetwork, device: torch.device, how: Inference, *, raw: bool = False) -> Predictor:
    """The averaged network of a run; with `raw`, masks hold the ids of the data set's masks."""
    model, preprocess = trained.model.to(device), trained.preprocess.to(device)

    def answer(images: Sequence[Pixels]) -> list[Pixels]:
        try:
            ids = segment(model, preprocess, torch.from_numpy(np.stack(images)).to(device), how)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size = "x".join(map(str, images[0].shape[:2]))
            raise OutOfMemory(
                f"{len(images)} images of {size} do not fit into the memory of {device}. Set a smaller batch=, or cut "
                f"them with tile=, for example tile=512x1024."
            ) from error
        return list(ids.cpu().numpy())

    return Predictor(
        answer,
        trained.classes.names,
        trained.classes.palette,
        {"weights_digest": trained.weights_digest, "step": trained.step},
        {**how.described, "precision": how.precision, "ids": "raw" if raw else "train"},  # the batch changes last bits
        raw_ids=raw_ids(trained.classes.train_ids, trained.classes.num_classes) if raw else None,
    )


def raw_ids(train_ids: Mapping[int, int], num_classes: int) -> Pixels:
    """The smallest raw id of each class, uint8 (256,). Raises ConfigError for a class that has none from 0 to 255."""
    found: dict[int, int] = {}
    for raw, train in sorted(train_ids.items(), reverse=True):
        if train != IGNORE_INDEX:
            found[train] = raw
    if not all(found.get(train, -1) in range(256) for train in range(num_classes)):
        raise ConfigError(
            "ids = raw, but a class of this run has no id from 0 to 255 in the class table. Leave it out."
        )
    return np.array([found.get(train, IGNORE_INDEX) for train in range(256)], np.uint8)


def of_exported(exported: Exported, *, precision: str) -> Predictor:
    """The file of an exported folder."""
    manifest, folder = exported.artifact.manifest, exported.artifact.folder
    classes = manifest["classes"]
    return Predictor(
        lambda images: [exported(image) for image in images],
        tuple(entry["name"] for entry in classes),
        tuple(tuple(entry["color"]) for entry in classes),
        {
            "weights_digest": manifest["source"]["weights_digest"],
            "artifact": exported.artifact.model_id,
            "manifest_sha256": sha256(Path(folder, MANIFEST)),
        },
        {
            "tile": "x".join(map(str, exported.tile)),
            "fit": "resize" if exported.resize else "tile",
            "overlap": exported.overlap,
            "precision": precision,
        },
        exported.note,
    )
