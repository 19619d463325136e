"""TensorBoard: figures, settings with the final mIoU, and pictures of the report, in RUN/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segpipe.run.tracked import RunEnd
from segpipe.settings.config import Config, recipe

FOLDER = "tensorboard"


class TensorboardMirror:
    """Event files of the run; a resumed run continues them, and hides what will be written again."""

    def __init__(self, config: Config, run_dir: Path, step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(  # type: ignore[no-untyped-call]
            str(run_dir / FOLDER), purge_step=None if step is None else step + 1
        )
        self._settings = {
            key: value if isinstance(value, bool | int | float) else str(value) for key, value in recipe(config).items()
        }

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, end: RunEnd) -> None:
        """Results of the whole run."""
        for caption, image in end.pictures:
            self._writer.add_image(caption, image, end.step, dataformats="HWC")
        if end.miou is not None:
            self._writer.add_hparams(self._settings, {"miou": end.miou}, run_name=".", global_step=end.step)

    def close(self, exit_code: int) -> None:
        """Close the event file; TensorBoard knows no failed runs."""
        self._writer.close()
