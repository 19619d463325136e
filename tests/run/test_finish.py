"""The command that a finished run suggests; its order of output is tested with whole runs in tests/train."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from segpipe.run import finish as module


@pytest.mark.parametrize("installed", [False, True], ids=["checkout", "wheel"])
def test_the_next_command_needs_no_editing(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        monkeypatch.setattr(module, "EVALUATE", tmp_path / "evaluate.py")
    folder = tmp_path / "a run's folder"
    interpreter, *words = shlex.split(module._next_command(folder))
    assert Path.cwd() / interpreter == Path(sys.executable)
    script = (
        ["-m", "segpipe", "evaluate"]
        if installed
        else [str(module.EVALUATE.relative_to(Path.cwd()))]
    )
    assert words == [*script, f"run={folder}"]


def test_the_next_command_names_segpipe_where_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "segpipe"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "train"])
    assert module._next_command(Path("runs/a")) == f"{program} evaluate run=runs/a"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._next_command(Path("runs/a")) == "segpipe evaluate run=runs/a"


def test_importing_the_module_is_cheap() -> None:
    """The command imports it before it sets the variables that torch and OpenMP read once."""
    code = "import sys, segpipe.run.finish; print([m for m in ('torch', 'cv2', 'matplotlib') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]"
