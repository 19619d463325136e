"""`segpipe evaluate`: one line of JSON on stdout, tables beside it, and a page."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from runs import result, run, torch_restored, write_camvid
from segpipe.cli import evaluate as module
from segpipe.cli.main import main as segpipe
from segpipe.data.samples import open_splits
from segpipe.ledger import inputs
from segpipe.settings.config import Config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def drives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training images of the drives a and b, validation images of b and c."""
    root = write_camvid(tmp_path_factory.mktemp("data"), num_val=4)
    for split, drive_of in (("train", "aaaabbbb"), ("val", "bbcc")):
        for number, drive in enumerate(drive_of):
            for folder in (split, f"{split}annot"):
                (root / folder / f"frame{number:02d}.png").rename(
                    root / folder / f"{drive}_{split}{number:02d}.png"
                )
    return root


@pytest.fixture(scope="module")
def held_out(drives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that holds drive b out."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert (
        run(
            folder,
            "data=camvid",
            f"data.root={drives}",
            "data.hold_out=b",
            "train.steps=1",
        )
        == 0
    )
    return folder


def evaluated(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[dict[str, Any], str]:
    """The figures on stdout and the text on stderr."""
    capsys.readouterr()
    with torch_restored():
        assert segpipe(["evaluate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    return dict(json.loads(out, parse_constant=pytest.fail)), err


def test_a_run_is_scored_on_the_drive_that_it_held_out(
    held_out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, tables = evaluated(capsys, f"run={held_out}")
    recorded = result(held_out)
    for key in (
        "miou",
        "iou",
        "precision",
        "recall",
        "f1",
        "interval_95",
        "sequences",
        "images",
    ):
        assert found[key] == recorded[key], key
    assert found["sequences"] == {
        "b": {"images": 6, "miou": found["miou"], "in_training": False}
    }
    assert found["note"] == ""
    assert "optimistic" not in tables
    assert set(found["mean"]) == {"precision", "recall", "f1"}
    for name, iou in found["iou"].items():
        assert name in tables
        assert iou is not None


def test_a_split_that_is_named_is_scored_whole(
    held_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    arguments = (f"run={held_out}", "data.split=train", f"out={page}")
    found, tables = evaluated(capsys, *arguments)
    sequences = found["sequences"]
    assert {
        name: (entry["images"], entry["in_training"])
        for name, entry in sequences.items()
    } == {
        "a": (4, True),
        "b": (4, False),
    }
    assert found["note"].startswith(
        "4 of 8 images are from sequences that are also in training (a)"
    )
    assert found["note"] in tables
    assert str(page) in tables
    text = page.read_text()
    assert "split train · 8 images" in text
    # The worst, and examples of weak classes: each in its figure once.
    assert text.count(": errors") == 4 + 6
    assert evaluated(capsys, *arguments)[0] == found
    assert page.read_text() == text


def test_the_page_shows_the_predictions_that_were_scored(
    held_out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment, asked = module.segment, []

    def spy(*arguments: Any, how: module.Inference) -> Any:
        asked.append(how.described)
        return segment(*arguments, how=how)

    monkeypatch.setattr(module, "segment", spy)
    evaluated(capsys, f"run={held_out}", "tta=[flip]", f"out={tmp_path / 'page.html'}")
    # Scored, shown as one of the four worst or as an example, and measured in detail.
    assert len(asked) == 6 + 4 + 6 + 6
    assert all(described == asked[0] and described for described in asked)


def test_files_that_changed_since_the_run_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, folder, page = (
        write_camvid(tmp_path / "data", num_val=3),
        tmp_path / "run",
        tmp_path / "page.html",
    )
    assert run(folder, "data=camvid", f"data.root={root}", "train.steps=1") == 0
    mask = root / "valannot" / "frame01.png"
    labels = cv2.imread(str(mask), cv2.IMREAD_UNCHANGED)
    cv2.imwrite(str(mask), np.roll(labels, 1))
    cv2.imwrite(str(root / "train" / "frame00.png"), np.zeros((72, 96, 3), np.uint8))
    change = "valannot/frame01.png was altered: this is not the score of the run."
    told = f"The labelled images changed since the run: {change}"
    found, tables = evaluated(capsys, f"run={folder}", f"out={page}")
    assert found["note"].startswith(told)
    assert told in tables
    assert told in page.read_text()
    assert evaluated(capsys, f"run={folder / 'last.pt'}")[0]["note"].startswith(told)
    others = evaluated(capsys, f"run={folder}", "data.split=train")[0]["note"]
    assert others.startswith(
        "The labelled images changed since the run: train/frame00.png was altered: "
    )
    cv2.imwrite(str(mask), labels)
    restored = evaluated(capsys, f"run={folder}")[0]["note"]
    assert "changed" not in restored, "the control: restored"
    for path in (root / "valannot").iterdir():
        cv2.imwrite(str(path), np.full_like(labels, 11))
    with torch_restored():
        assert segpipe(["evaluate", f"run={folder}"]) == 2
    unlabelled = "none of the 3 images of split val has a labelled pixel"
    assert unlabelled in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has recorded its data, DATA beside it, before any step."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    folder.mkdir()
    inputs.record(config_of(folder), open_splits(config_of(folder)))
    return folder


def config_of(folder: Path) -> Config:
    config = Config()
    config.run.root, config.run.name = str(folder.parent), folder.name
    config.data.name, config.data.root = "camvid", str(folder.parent / "data")
    if not Path(config.data.root).exists():
        write_camvid(Path(config.data.root), num_train=3, num_val=2)
    return config


def remove(root: Path, split: str, number: int) -> None:
    for folder in (split, f"{split}annot"):
        (root / folder / f"frame{number:02d}.png").unlink()


def touch(root: Path, name: str) -> None:
    path = root / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    ("change", "settings", "told"),
    [
        (lambda root: None, {}, ""),
        (lambda root: touch(root, "valannot/frame01.png"), {}, "valannot/frame01.png was altered"),
        (lambda root: touch(root, "valannot/frame01.png"), {"hash": False}, ""),
        (lambda root: (root / "val/frame01.png").write_bytes(b"x"), {"hash": False}, "val/frame01.png was altered"),
        (lambda root: remove(root, "val", 1), {}, "val/frame01.png is missing, valannot/frame01.png is missing"),
        (lambda root: touch(root, "train/frame00.png"), {}, ""),
        (lambda root: touch(root, "train/frame00.png"), {"split": "train"}, "train/frame00.png was altered"),
        (
            lambda root: touch(root, "train/frame00.png"),
            {"hold_out": "00", "sequence": r"frame(\d+)"},
            "train/frame00.png was altered",
        ),
        (lambda root: remove(root, "train", 1), {}, "train/frame01.png is missing, trainannot/frame01.png is missing"),
        (lambda root: [shutil.rmtree(root / name) for name in ("train", "trainannot")], {}, ""),
        (
            lambda root: [shutil.copytree(root / f"val{end}", root / f"test{end}") for end in ("", "annot")],
            {"split": "test"},
            "",
        ),
    ],
)  # fmt: skip
def test_what_changed_is_told_of_the_split_that_is_read(
    change: Any, settings: dict[str, Any], told: str, recorded: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(recorded.parent / "data", tmp_path / "data"))
    change(root)
    trained = config_of(recorded).data
    found = inputs.changed_since(
        recorded, trained, replace(trained, root=str(root), **settings)
    )
    assert found == (
        f"the labelled images changed since the run: {told}" if told else ""
    )


def test_another_data_set_has_not_changed(recorded: Path, tmp_path: Path) -> None:
    """Even if it has the same class table."""
    root, trained = write_camvid(tmp_path / "data"), config_of(recorded).data
    for path in root.glob("*/frame*"):
        path.rename(path.with_name(f"other_{path.name}"))
    other = replace(trained, root=str(root))
    assert inputs.changed_since(recorded, trained, other) == ""
    assert inputs.changed_since(tmp_path, trained, trained) == "", (
        "the control: a folder that recorded nothing"
    )
    config = config_of(
        Path(shutil.copytree(recorded.parent, tmp_path / "runs")) / "run"
    )
    for data in (config.data, other):
        data.name, data.images, data.masks = "folder", "SPLIT", "SPLITannot"
        names = ", ".join(f"class{number}" for number in range(12))
        (Path(data.root) / "classes.yaml").write_text(f"names: [{names}]")
    (config.run_dir / "inputs.json").unlink()
    inputs.record(config, open_splits(config))
    assert inputs.changed_since(config.run_dir, config.data, other) == ""
    (Path(config.data.root) / "classes.yaml").write_text(f"names: [other, {names[8:]}]")
    changed = inputs.changed_since(config.run_dir, config.data, config.data)
    assert "classes.yaml was altered" in changed, "the control"


def test_images_of_another_folder_were_not_seen_for_their_names(
    held_out: Path, drives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a folder that was moved, training has seen the same images; of another one with equal names, nobody knows."""
    moved, other = (
        shutil.copytree(drives, tmp_path / name) for name in ("moved", "other")
    )
    for path in other.glob("train/*.png"):
        cv2.imwrite(str(path), np.zeros((72, 96, 3), np.uint8))
    for kind, folder in (("train", "pictures"), ("trainannot", "drawn")):
        shutil.copytree(other / kind, moved / folder / "train")
    named = ("data.images=pictures/SPLIT", "data.masks=drawn/SPLIT")
    for root, folders, seen in (
        (moved, (), {"a": True, "b": False}),
        (moved, named, {"a": None, "b": None}),
        (other, (), {"a": None, "b": None}),
    ):
        arguments = (f"run={held_out}", f"data.root={root}", "data.split=train")
        found, _ = evaluated(capsys, *arguments, *folders)
        of_drives = found["sequences"].items()
        assert {name: each["in_training"] for name, each in of_drives} == seen
        assert ("optimistic" in found["note"]) == bool(seen["a"])
