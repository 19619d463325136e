"""Training on train+val: the files of both splits, validation on another one, and a page that says so."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from runs import run, write_camvid
from segpipe.data.pairs import scan
from segpipe.data.samples import open_samples
from segpipe.datasets.problems import problems
from segpipe.errors import ConfigError, DataError
from segpipe.settings.config import check, from_mapping
from segpipe.settings.groups import DataConfig


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    root = write_camvid(tmp_path / "data", num_train=4, num_val=3)
    other = write_camvid(tmp_path / "other", num_val=5)
    for folder in ("val", "valannot"):
        name = folder.replace("val", "test")
        shutil.copytree(other / folder, root / name)
        for path in (root / folder).iterdir():
            path.rename(path.with_name(f"val_{path.name}"))
    return DataConfig(name="camvid", root=str(root), split="test")


def images(data: DataConfig, split: str) -> list[str]:
    (files,) = open_samples(data, split, 0).file_sets()
    return [Path(pair.image).relative_to(data.root).as_posix() for pair in files.pairs]


def test_training_reads_both_splits(data: DataConfig) -> None:
    both = replace(data, train_split="train+val")
    assert images(both, "train") == [
        *(f"train/frame{number:02d}.png" for number in range(4)),
        *(f"val/val_frame{number:02d}.png" for number in range(3)),
    ]
    assert images(both, "test") == images(data, "test")
    assert images(data, "train") == images(both, "train")[:4], "the control"
    assert list(open_samples(both, "train", 0).inputs())[-1].startswith("valannot/")


def test_faults_of_both_are_found(data: DataConfig) -> None:
    both = replace(data, train_split="train+val")
    assert not list(problems(both, ["train"]))
    next(Path(data.root).glob("valannot/*")).unlink()
    assert "has no mask" in next(problems(both, ["train"]))
    assert "does not exist" in next(
        problems(replace(data, train_split="train+vla"), ["train"])
    )


def test_a_run_says_what_it_was_trained_on(
    data: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("data=camvid", f"data.root={data.root}", "data.train_split=train+val")
    folder = tmp_path / "run"
    settings = (*files, "train.steps=1", "train.progress=true", "data.split=test")
    assert run(folder, *settings) == 0
    assert "7 training images of train+val" in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    assert "trained on train+val: another protocol" in page
    assert "val/val_frame00.png" in (folder / "inputs.json").read_text()
    assert run(tmp_path / "leak", *files, "data.split=val") == 2
    assert "byte for byte" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values", [{"name": "synthetic"}, {"name": "camvid", "root": "x", "mix": [{}]}]
)
def test_other_data_has_no_splits_to_join(values: dict[str, object]) -> None:
    config = from_mapping({"data": {**values, "train_split": "train+val"}})
    with pytest.raises(ConfigError, match=r"data\.train_split = train\+val, but only"):
        check(config, world_size=1)


def test_no_split_is_joined_with_itself(tmp_path: Path) -> None:
    root = write_camvid(tmp_path / "data", num_train=4)
    data = DataConfig(name="camvid", root=str(root), train_split="train+train")
    with pytest.raises(DataError, match="4 images are in two of these splits"):
        open_samples(data, "train", 0)


def test_an_image_of_two_joined_lists_is_refused(tmp_path: Path) -> None:
    """It would come twice in each epoch."""
    written, root = write_camvid(tmp_path / "data", num_train=4), tmp_path / "lists"
    root.mkdir()
    for kind, folder in (("images", "train"), ("masks", "trainannot")):
        (written / folder).rename(root / kind)
    (root / "train.txt").write_text("frame00\nframe01\n")
    (root / "trainval.txt").write_text("frame01\nframe02\n")
    (root / "val.txt").write_text("frame03\n")
    data = DataConfig(name="folder", root=str(root), train_split="train+trainval")
    (fault,) = scan(data, "train").faults
    assert "1 images are in two of these splits: frame01" in fault
    assert not scan(replace(data, train_split="train+val"), "train").faults
