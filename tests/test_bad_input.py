"""Bad input ends with exit code 2 and one line before the first step, and costs no earlier run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from runs import command, metrics, run, settings, write_camvid

EARLIER = b"the only copy of an earlier run"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A sound data set."""
    return write_camvid(tmp_path / "data")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder that holds an earlier run."""
    path = tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / "last.pt").write_bytes(EARLIER)
    return path


def assert_refused(folder: Path, code: int, text: str, parts: tuple[str, ...]) -> None:
    """Exit code 2, one line that holds all parts, and the earlier run as it was, but for the note of the failure."""
    assert code == 2, text
    assert text.count("\n") == 1, text
    for part in parts:
        assert part in text
    assert {path.name for path in folder.iterdir()} - {"failure.json"} == {"last.pt"}
    assert (folder / "last.pt").read_bytes() == EARLIER


def from_files(root: Path, *changes: str) -> tuple[str, ...]:
    return ("run.exists=replace", "data=camvid", f"data.root={root}", *changes)


def remove_mask(root: Path) -> None:
    (root / "trainannot" / "frame03.png").unlink()


def shrink_mask(root: Path) -> None:
    cv2.imwrite(str(root / "valannot" / "frame01.png"), np.zeros((60, 96), np.uint8))


def add_foreign_id(root: Path) -> None:
    mask = np.zeros((72, 96), np.uint8)
    mask[5, 7] = 34
    cv2.imwrite(str(root / "trainannot" / "frame02.png"), mask)


def truncate(root: Path) -> None:
    path = root / "train" / "frame04.png"
    path.write_bytes(path.read_bytes()[:-500])


def damage(root: Path) -> None:
    path = root / "val" / "frame00.png"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(root: Path) -> None:
    for split in ("val", "valannot"):
        for path in (root / split).iterdir():
            path.unlink()


def unlabel(root: Path) -> None:
    for path in (root / "trainannot").iterdir():
        cv2.imwrite(str(path), np.full((72, 96), 11, np.uint8))


def copy_into_training(root: Path) -> None:
    for kind in ("", "annot"):
        (root / f"train{kind}" / "copy.png").write_bytes((root / f"val{kind}" / "frame01.png").read_bytes())


def rename(root: Path) -> None:
    root.rename(root.with_name("date"))


BAD_FILES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (rename, ("/data does not exist", "Nearest", "/date", "Set data.root")),
    (remove_mask, ("/train/frame03.png has no mask", "/trainannot/frame03.png")),
    (shrink_mask, ("/val/frame01.png is 72x96", "/valannot/frame01.png is 60x96")),
    (add_foreign_id, ("/trainannot/frame02.png has id 34 (1 pixels, the first at row 5, column 7)", "camvid")),
    (truncate, ("/train/frame04.png is truncated", "Copy it again")),
    (damage, ("/val/frame00.png is damaged", "Copy it again")),
    (empty, ("/val is empty", "split val")),
    (unlabel, ("none of the 8 training images has a labelled pixel (the first is frame00)", "Check the masks")),
    (
        copy_into_training,
        ("1 of the images of split val", "train/copy.png = ", "val/frame01.png", "data.allow_overlap"),
    ),
]


@pytest.mark.parametrize(("spoil", "parts"), BAD_FILES, ids=[spoil.__name__ for spoil, _ in BAD_FILES])
def test_bad_files(
    data: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    parts: tuple[str, ...],
) -> None:
    spoil(data)
    code = run(folder, *from_files(data))
    assert_refused(folder, code, capsys.readouterr().err, parts)


def test_sound_files_are_trained_on(data: Path, folder: Path) -> None:
    """The control: with the same settings and nothing spoilt the run goes through, and replaces the earlier one."""
    assert run(folder, *from_files(data, "train.steps=1")) == 0
    assert metrics(folder)
    assert (folder / "last.pt").read_bytes() != EARLIER


BAD_SETTINGS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("model=fast_scn",), ("model = fast_scn is not one of", "Did you mean fast_scnn?")),
    (("model.name=unet",), ("model.name = 'unet' is not one of", "pidnet_s")),
    (("optim.lrr=1",), ("optim.lrr", "Did you mean optim.lr?")),
    (("augment.crop_size=[64,160]",), ("crop_size = [64, 160]", "72x96", "'augment.crop_size=[64, 144]'")),
    (("compute.nproc=3", "compute.mode=ddp"), ("compute.shards = 4 cannot be divided among 3", "compute.mode=elastic")),
    (("compute.nproc=5",), ("compute.shards = 4, but there are 5 processes", "compute.shards=5")),
    (("compute.nproc=many",), ("compute.nproc = ", "many", "auto")),
    (("compute.nproc=0",), ("compute.nproc = ", "auto")),
    (("compute.samples_per_shard=1",), ("compute.samples_per_shard = 1", "2 to 65536")),
    (("data.split=test",), ("/test does not exist", "holds train, trainannot")),
    (("loss.class_weights=[1,2]",), ("loss.class_weights holds 2 weights", "11 classes", "sky, building, pole")),
    (("loss.class_weights=[0,0,0,0,0,0,0,0,0,0,0]",), ("loss.class_weights holds only zeros",)),
    (("data.root=",), ("data.root is empty", "Set data.root=FOLDER")),
    (("export.dir=/dev/null/export", "export.enabled=true"), ("export.dir = /dev/null/export", "Not a directory")),
    (("run.exists=keep",), ("run.exists = 'keep' is not one of error, resume, replace",)),
    (("run.exists=error",), ("already holds", "run.exists=resume", "run.exists=replace")),
    (("run.exists=resume",), ("last.pt (31 bytes) cannot be read", "truncated or foreign")),
    # Found only when the loader is made, that is after the folder was claimed:
    (("data.workers=8", "data.prefetch=32", "compute.samples_per_shard=65536"), ("shared memory", "data.prefetch")),
]


@pytest.mark.parametrize(("changes", "parts"), BAD_SETTINGS, ids=[changes[0] for changes, _ in BAD_SETTINGS])
def test_bad_settings(
    data: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    changes: tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    code = run(folder, *from_files(data, *changes))
    assert_refused(folder, code, capsys.readouterr().err, parts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that must be missing")
@pytest.mark.parametrize("nproc", ["1", "2", "auto"])
def test_missing_gpu(data: Path, folder: Path, capsys: pytest.CaptureFixture[str], nproc: str) -> None:
    code = run(folder, *from_files(data, "compute.device=cuda", f"compute.nproc={nproc}"))
    assert_refused(folder, code, capsys.readouterr().err, ("compute.device = cuda", "compute.device=cpu"))


def test_one_training_image_cannot_be_shuffled(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_camvid(tmp_path / "one", num_train=1)
    code = run(folder, *from_files(data, "data.shuffle_labels=true"))
    assert_refused(folder, code, capsys.readouterr().err, ("data.shuffle_labels = True needs at least two",))


@pytest.mark.parametrize("where", ["/proc", "a file", "a closed folder"])
def test_unwritable_root(tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
    root = Path("/proc")
    if where == "a file":
        root = tmp_path / "file"
        root.write_text("")
    elif where == "a closed folder":
        root = tmp_path / "closed"
        root.mkdir(mode=0o555)
        if os.access(root, os.W_OK):
            pytest.skip("the superuser may write everywhere")
    assert run(root / "run") == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    for part in (f"run.root = {root}", "cannot be created", "Set run.root"):
        assert part in text


@pytest.mark.parametrize("nproc", [1, 2])
def test_command_line(data: Path, folder: Path, nproc: int) -> None:
    """As a user sees it: one line, no traceback, no process left."""
    truncate(data)
    done = command("train.py", *settings(folder, *from_files(data, f"compute.nproc={nproc}")))
    assert done.stdout == ""
    assert_refused(folder, done.returncode, done.stderr, ("/train/frame04.png is truncated",))
