"""Weights & Biases: figures, a table of classes, pictures of the report, the exported files as an artifact."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segpipe.run.tracked import RunEnd, run_id
from segpipe.settings.config import Config, to_mapping


class WandbMirror:
    """The wandb run with the id of this recipe and folder."""

    def __init__(self, config: Config, run_dir: Path, step: int | None) -> None:
        if config.track.mode == "offline":
            # wandb 0.31 sends a report of its start over the network even offline, unless this is set.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # takes a second and starts a service process

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=config.track.project,
            entity=config.track.entity or None,
            name=config.run.name,
            id=run_id(config, run_dir),
            resume=None if step is None else "allow",  # None replaces an earlier run with this id
            dir=str(run_dir),
            mode="offline" if config.track.mode == "offline" else "online",
            config=to_mapping(config),
            save_code=False,
            # Leave our output alone and never prompt.
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step."""
        self._run.log(dict(values), step=step)

    def finish(self, end: RunEnd) -> None:
        """Results of the whole run."""
        table = self._wandb.Table(columns=["class", "IoU"], data=[list(row) for row in end.iou.items()])
        pictures = [self._wandb.Image(image, caption=caption) for caption, image in end.pictures]
        self._run.log({"classes": table, **({"images": pictures} if pictures else {})}, step=end.step)
        self._run.summary.update({"miou": end.miou})
        if end.files:
            artifact = self._wandb.Artifact(f"{self._run.id}-export", type="model", metadata={"miou": end.miou})
            for path in end.files:
                artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
            self._run.log_artifact(artifact)

    def close(self, exit_code: int) -> None:
        """Finish the run, failed if `exit_code` is not 0."""
        self._run.finish(exit_code=exit_code)
