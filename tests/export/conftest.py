"""A run and its export whose network converts in a moment, for the tests through the command lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from plants import METRICS

from exports import Tiny, export, tiny_network, write_run
from segpipe.export.artifact import manifest
from segpipe.train import checkpoint

NOT_FITTED = {"method": "none", "temperature": 1.0}


@pytest.fixture(scope="module")
def tiny_networks() -> Iterator[None]:
    """Checkpoints of this file hold a network that converts in a moment: what is tested does not depend on it.

    It is not trained, so a fitted temperature would make all classes equally likely, and faults of the confidence
    could not be seen.
    """
    fixed = {
        "method": "temperature",
        "temperature": 0.25,
        "ece_before": 0.2,
        "ece_after": 0.1,
        "images": 4,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checkpoint, "build_model", lambda _, num_classes, *args: Tiny(num_classes)
        )
        patch.setattr(
            manifest,
            "calibration_entry",
            lambda _, labelled: dict(fixed if labelled else NOT_FITTED),
        )
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_networks: None) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "scenes", tiny_network)
    path = folder / "result.json"
    digest = checkpoint.load_network(folder, "last").ema_digest
    path.write_text(
        json.dumps({**json.loads(path.read_text()), **METRICS, "ema_digest": digest})
    )
    return folder


@pytest.fixture(scope="module")
def artifact(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the ONNX file alone, in which faults are planted."""
    folder = tmp_path_factory.mktemp("sound") / "export"
    assert export(run, folder, "export.formats=[onnx]") == 0
    return folder
