"""docs/tutorial.md, typed as it stands, in a folder outside the project."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch
from parity import state_dict

import runs
from segpipe import plugins
from segpipe.cli.main import main as segpipe

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SAVED = re.compile(
    r"[Ss]ave (?:it|this|the recipe) as `([^`]+)`[^\n]*\n\n```\w+\n(.*?)```", re.DOTALL
)
TYPED = re.compile(r"^    ((?:segpipe|python) .*)$", re.MULTILINE)
PATIENCE_S = 300

pytestmark = pytest.mark.slow


def typed(line: str, capfd: pytest.CaptureFixture[str]) -> str:
    """Output of a command of the page, which must end with 0; those of segpipe run in this process."""
    program, *arguments = shlex.split(line)
    if program == "segpipe":
        plugins._trusted.clear()  # as a new process
        with runs.torch_restored():
            code = segpipe(arguments)
    else:
        command = [sys.executable, *arguments]
        code = subprocess.run(command, timeout=PATIENCE_S, check=False).returncode
    said = capfd.readouterr()
    assert code == 0, f"{line}\n{said.out}\n{said.err}"
    return said.out


def test_the_tutorial_works_as_it_is_typed(
    project: object, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path = Path.cwd()
    for name, content in SAVED.findall(TUTORIAL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "crates.yaml",
        "draw.py",
        "mine.py",
    ]
    torch.save(
        state_dict("fast_scnn"), tmp_path / "fast_scnn_citys.pth"
    )  # in the authors' names, of 19 classes
    printed = {line: typed(line, capfd) for line in TYPED.findall(TUTORIAL)}
    said = {line.split()[1]: text for line, text in printed.items()}
    one, two = (
        json.loads((tmp_path / "runs" / name / "result.json").read_text())
        for name in ("one", "two")
    )
    assert two["world_size"] == 2
    assert [one[name] for name in ("weights_digest", "ema_digest", "miou")] == [
        two[name] for name in ("weights_digest", "ema_digest", "miou")
    ]
    assert "identical in all 40 common steps" in said["compare"]
    assert json.loads(said["evaluate"])["miou"] == one["miou"] > 0.6
    assert (tmp_path / "scores.html").stat().st_size > 10_000
    assert "passed: 40 of 40 updates" in said["audit"]
    assert "ARTIFACT VERIFIED_FEW_IMAGES" in said["verify"]  # eight images
    videos = (tmp_path / "seen").rglob("*.mp4")
    (video,) = (path for path in videos if path.is_file())
    assert int(cv2.VideoCapture(str(video)).get(cv2.CAP_PROP_FRAME_COUNT)) == 12
    assert "encoder" in (tmp_path / "runs" / "tuned" / "weights.json").read_text()
    published = json.loads(
        (tmp_path / "runs" / "published" / "weights.json").read_text()
    )
    assert len(published["kept"]) > 100
    assert published["adapted"]
    assert all(name in said["runs"] for name in ("one", "two", "tuned", "published"))
