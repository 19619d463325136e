"""MLflow: settings as parameters, figures, pictures and files of the end, in the experiment `track.project`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from segpipe.run.tracked import RunEnd, run_id
from segpipe.settings.config import Config, recipe

TAG = "segpipe.id"
_BATCH = 100  # parameters that MLflow takes at once
_VALUE = 500  # characters of a parameter


class MlflowMirror:
    """The MLflow run that bears the id of this recipe and folder; a resumed run continues it."""

    def __init__(self, config: Config, run_dir: Path, step: int | None) -> None:
        import mlflow
        from mlflow import entities

        self._entities: Any = entities
        # MLflow's default is a database, which mlflow-skinny cannot use; 3.x asks to allow files.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        files = (Path(config.run.root) / "mlruns").resolve().as_uri()
        self._client: Any = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or files)
        known = self._client.get_experiment_by_name(config.track.project)
        experiment = known.experiment_id if known else self._client.create_experiment(config.track.project)
        own = run_id(config, run_dir)
        earlier = [] if step is None else self._client.search_runs([experiment], f"tags.`{TAG}` = '{own}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=config.run.name, tags={TAG: own}).info.run_id
        params = [entities.Param(key, str(value)[:_VALUE]) for key, value in recipe(config).items()]
        for start in range(0, len(params), _BATCH):
            self._client.log_batch(self._id, params=params[start : start + _BATCH])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step."""
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, end: RunEnd) -> None:
        """Results of the whole run."""
        ious = {f"class_iou/{name}": iou for name, iou in {**end.iou, "mean": end.miou}.items() if iou is not None}
        self.log(end.step, ious)
        for number, (caption, image) in enumerate(end.pictures):
            _log_picture(self._client, self._id, f"images/{number:02d} {_name(caption)}.jpg", image)
        for path in end.files:
            if path.is_dir():
                self._client.log_artifacts(self._id, str(path), "export")
            else:
                self._client.log_artifact(self._id, str(path))

    def close(self, exit_code: int) -> None:
        """End the run, as failed if `exit_code` is not 0."""
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


def _name(text: str) -> str:
    """`text` with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", text)


def _log_picture(client: Any, run: str, place: str, image: np.ndarray) -> None:
    import tempfile

    import cv2

    folder, _, name = place.rpartition("/")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / name.replace("/", "_")
        cv2.imwrite(str(path), image[..., ::-1])
        client.log_artifact(run, str(path), folder)
