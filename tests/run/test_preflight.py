"""What stops loader processes is found before they start, with its fix."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runs import TINY, run, torch_restored
from segpipe.cli import checks
from segpipe.cli.main import main as segpipe
from segpipe.data import Sample
from segpipe.data.catalog import STREET, ClassTable
from segpipe.data.data_set import DataSet
from segpipe.data.samples import open_samples, open_splits
from segpipe.errors import ConfigError
from segpipe.run.launch import alone, check_crop, check_workers, examine, with_crop
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, saved_config


@dataclass
class Nested(DataSet):
    """Samples with something that no other process can get."""

    inner: Any
    classes: ClassTable = STREET

    def __len__(self) -> int:
        return 4

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> Sample:
        return np.zeros((64, 96, 3), np.uint8), np.zeros((64, 96), np.uint8)


LOCK = threading.Lock()


def config(*changes: str) -> Config:
    return compose([*TINY, *changes])


def test_samples_that_loader_processes_cannot_copy_are_refused() -> None:
    """With fork, too: what is open in a user's object has one position for all. Validation reads in them, too."""
    for method, kept in zip(
        ("fork", "spawn", "forkserver"),
        ((LOCK, 0), (0, LOCK), (LOCK, LOCK)),
        strict=True,
    ):
        given = config("data.workers=1", f"data.start_method={method}")
        with pytest.raises(ConfigError) as refused:
            check_workers(given, *map(Nested, kept))
        for part in (
            "cannot be pickled (TypeError: cannot pickle '_thread.lock' object)",
            f"data.start_method = {method}",
            "data.workers=0",
        ):
            assert part in str(refused.value)
    check_workers(config("data.workers=0", "data.start_method=spawn"), Nested(LOCK))


def test_a_file_that_the_export_would_refuse_is_named_before_the_training(
    tmp_path: Path,
) -> None:
    (tmp_path / "a/export").mkdir(parents=True)
    (tmp_path / "a/export/model.plan").touch()
    changes = f"run.root={tmp_path}", "run.name=a", "export.enabled=true"
    with torch_restored():
        examine(config(*changes, "run.exists=replace"))  # deletes it
        with pytest.raises(ConfigError, match=r"holds other files \(model\.plan\)"):
            examine(config(*changes, "run.exists=resume"))
        examine(config("run.root=/proc/no", "export.enabled=true"))  # told elsewhere


def test_the_last_of_several_readers_gives_torchs_default_dtype_back() -> None:
    first, second = (
        (ThreadPoolExecutor(1).submit, alone(reads=True)) for _ in range(2)
    )
    torch.set_default_dtype(torch.float64)
    try:
        for thread, reader in (first, second):
            thread(reader.__enter__).result()
        for (thread, reader), after in zip(
            (first, second), (torch.float32, torch.float64), strict=True
        ):
            thread(reader.__exit__, None, None, None).result()
            assert torch.get_default_dtype() == after
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_run_is_refused_before_its_folder_is_claimed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lockbox.py").write_text(
        "import threading, numpy as np\n"
        "class Data:\n"
        "    classes, palette = ['a', 'b'], [(0, 0, 0), (9, 9, 9)]\n"
        "    def __init__(self, root, split): self.lock = threading.Lock()\n"
        "    def __len__(self): return 4\n"
        "    def name(self, index): return f'n{index}'\n"
        "    def read(self, index): return np.zeros((64, 96, 3), np.uint8), np.tri(64, 96, dtype=np.uint8)\n"
    )
    changes = (
        "data.name=lockbox:Data",
        "data.workers=1",
        "data.start_method=spawn",
        "data.size=[64,96]",
    )
    with torch_restored(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert (
            segpipe(
                ["train", *TINY[:1], *TINY[2:], *changes, "run.root=runs", "run.name=a"]
            )
            == 2
        )
    assert "cannot pickle '_thread.lock' object" in capsys.readouterr().err
    assert not (tmp_path / "runs/a").exists()


def test_a_folder_that_cannot_even_be_looked_at_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of a colleague whose umask is 077."""
    assert run(tmp_path / ("a" * 300)) == 2
    assert "cannot be created or read: File name too long" in capsys.readouterr().err


def test_the_samples_of_a_set_in_files_travel(tmp_path: Path) -> None:
    """The control: what segpipe itself sends can be pickled."""
    own = config("data.workers=1", "data.start_method=spawn")
    check_workers(own, *open_splits(own))


@pytest.mark.parametrize(
    ("size", "crop"),
    [([360, 480], [320, 416]), ([64, 96], [32, 64]), ([32, 34], [32, 32])],
)
def test_auto_crops_nine_tenths_of_the_images(size: list[int], crop: list[int]) -> None:
    changes = (f"data.size={size}", "data.num_train=2", "augment.crop_size=auto")
    given = config(*(part.replace(" ", "") for part in changes))
    train = open_samples(given.data, "train", 0)
    found = with_crop(given, train)
    assert found.augment.crop_size == crop
    assert with_crop(found, train) == found


def test_a_misspelled_auto_is_told_of_auto() -> None:
    with pytest.raises(ConfigError, match=r"a list such as .*, or auto was needed"):
        config("augment.crop_size=atuo")
    with pytest.raises(ConfigError, match=r"a list such as \[[^]]*\] was needed"):
        config("augment.scale=auto")


def test_a_crop_that_is_mostly_padding_is_warned_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Photos of 360x480 with the crop of data=folder."""
    given = config(
        "data.size=[360,480]", "data.num_train=2", "augment.scale=[0.75,1.5]"
    )
    train = open_samples(given.data, "train", 0)
    for crop, share in (([512, 512], "29%"), ([320, 416], "")):
        given.augment.crop_size = crop
        check_crop(given, train)
        warned = (
            f"Warning: {share} of the crops of augment.crop_size = {crop} is padding"
        )
        said = capsys.readouterr().err
        assert said.startswith(warned) == bool(share)
        assert ("augment.crop_size=auto" in said) == bool(share)


def test_auto_trains_with_the_crop_that_it_names(tmp_path: Path) -> None:
    changes = ("augment.crop_size=auto", "train.steps=1", "export=off")
    where = (f"run.root={tmp_path}", "run.name=a")
    with torch_restored():
        assert segpipe(["train", *TINY, *where, *changes]) == 0
        resumed = (*changes, "run.exists=resume")
        assert segpipe(["train", *TINY, *where, *resumed]) == 0
    assert saved_config(tmp_path / "a").augment.crop_size == [32, 64]


def test_a_check_without_a_training_takes_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    crops = []
    monkeypatch.setattr(
        checks, "clauses", lambda given, _: crops.append(given.augment.crop_size) or []
    )
    with torch_restored():
        given = ["check-plugin", "loss.name=focal", *TINY, "augment.crop_size=auto"]
        assert segpipe(given) == 0
    assert crops == [[32, 64]]
