"""inputs.json binds what a run reads: a resume with other files is refused by name."""

from pathlib import Path

import numpy as np
import pytest

from runs import run
from segpipe.data.order import COUNTS_NAME, PixelCounts, load_counts
from segpipe.errors import DataError

RUN = (
    "loss.class_weights=log",
    "optim.schedule_steps=9",
    "compute.shards=1",
    "data.num_train=4",
    "data.num_val=1",
)


def test_a_resume_refuses_pixel_counts_that_were_edited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run(folder, *RUN, "train.steps=1") == 0
    path = folder / COUNTS_NAME
    counts = load_counts(path)
    assert counts is not None
    path.unlink()  # the control: counted again
    assert run(folder, *RUN, "train.steps=2", "run.exists=resume") == 0
    pixels = np.flip(counts.pixels, axis=1).copy()
    PixelCounts(pixels, counts.indices).save(path)
    capsys.readouterr()
    code = run(folder, *RUN, "train.steps=3", "run.exists=resume")
    assert code == DataError.exit_code
    assert "pixels.npz was altered" in capsys.readouterr().err
