"""`segpipe evaluate`: one line of JSON on stdout, tables beside it, and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runs import result, run, torch_restored, write_camvid
from segpipe.cli import evaluate as module
from segpipe.cli.main import main as segpipe


@pytest.fixture(scope="module")
def drives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training images of the drives a and b, validation images of b and c."""
    root = write_camvid(tmp_path_factory.mktemp("data"), num_val=4)
    for split, drive_of in (("train", "aaaabbbb"), ("val", "bbcc")):
        for number, drive in enumerate(drive_of):
            for folder in (split, f"{split}annot"):
                (root / folder / f"frame{number:02d}.png").rename(root / folder / f"{drive}_{split}{number:02d}.png")
    return root


@pytest.fixture(scope="module")
def held_out(drives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that holds drive b out."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert run(folder, "data=camvid", f"data.root={drives}", "data.hold_out=b", "train.steps=1") == 0
    return folder


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The figures on stdout and the text on stderr."""
    capsys.readouterr()
    with torch_restored():
        assert segpipe(["evaluate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    return dict(json.loads(out, parse_constant=pytest.fail)), err


def test_a_run_is_scored_on_the_drive_that_it_held_out(held_out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, tables = evaluated(capsys, f"run={held_out}")
    recorded = result(held_out)
    for key in ("miou", "iou", "precision", "recall", "f1", "interval_95", "sequences", "images"):
        assert found[key] == recorded[key], key
    assert found["sequences"] == {"b": {"images": 6, "miou": found["miou"], "in_training": False}}
    assert found["note"] == ""
    assert "flatter" not in tables
    assert set(found["mean"]) == {"precision", "recall", "f1", "boundary_iou"}
    for name, iou in found["iou"].items():
        assert name in tables
        assert 0 <= found["boundary_iou"][name] <= 1
        assert iou is not None


def test_a_split_that_is_named_is_scored_whole(
    held_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    arguments = (f"run={held_out}", "data.split=train", f"out={page}")
    found, tables = evaluated(capsys, *arguments)
    sequences = found["sequences"]
    assert {name: (entry["images"], entry["in_training"]) for name, entry in sequences.items()} == {
        "a": (4, True),
        "b": (4, False),
    }
    assert found["note"].startswith("4 of 8 images are from sequences that training has seen too (a)")
    assert found["note"] in tables
    assert str(page) in tables
    text = page.read_text()
    assert "split train · 8 images" in text
    assert text.count(": errors") == 8  # four worst, four best: each in its figure once
    assert text.index("Worst images") < text.index("Best images")
    assert evaluated(capsys, *arguments)[0] == found
    assert page.read_text() == text


def test_a_report_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert segpipe(["evaluate", "run=x", "out=report"]) == 2
    assert "out = report, but" in capsys.readouterr().err


def test_the_page_shows_the_predictions_that_were_scored(
    held_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, asked = module.segment, []

    def spy(*arguments: Any, how: module.Inference) -> Any:
        asked.append(how.described)
        return segment(*arguments, how=how)

    monkeypatch.setattr(module, "segment", spy)
    evaluated(capsys, f"run={held_out}", "tta=[flip]", f"out={tmp_path / 'page.html'}")
    assert len(asked) == 6 + 6  # scored, and shown as one of the three worst or best
    assert all(described == asked[0] and described for described in asked)
