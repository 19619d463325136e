"""Terminal output: names are shown as they are, and a log file gets a line now and then instead of a bar."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from runs import finished, settings, start
from segpipe.run import console as module
from segpipe.run.console import LOOKS, TrainView, iou_table
from segpipe.train.metrics import summary

NAMES = ("[/x]", "<b>", "[red]", "road")


def printed(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def terminal(**looks: Any) -> Console:
    return Console(
        **looks, file=io.StringIO(), width=120, force_terminal=True, color_system=None
    )


def test_names_between_colons_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """rich draws a car for the name of one."""
    module.CONSOLE.print("runs/a:car:b")
    assert capsys.readouterr().out == "runs/a:car:b\n"
    sources = [
        path
        for path in Path(module.__file__).parents[1].rglob("*.py")
        if path.parent.name in ("cli", "run")
    ]
    making = [
        path.name for path in sources if re.search(r"\b_?Console\(", path.read_text())
    ]
    assert making == ["console.py"], "consoles that show names as they are"


def test_class_names_are_not_markup() -> None:
    figures = summary(
        np.array([[9, 1, 0, 0], [0, 5, 0, 0], [0, 0, 0, 0], [0, 0, 0, 5]]), NAMES
    )
    console = terminal()
    console.print(iou_table(figures, [0.5, 0.25, 0.0, 0.25]))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed(console).splitlines()
        if "│" in line
    ]
    assert [row[0] for row in rows] == [*NAMES, "mean"]
    assert [row[1] for row in rows] == ["90.0", "83.3", "absent", "100.0", "91.11"]
    with pytest.raises(
        Exception, match="closing tag"
    ):  # the control: a plain string is markup
        console.print("[/x]")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_name_is_not_markup(name: str) -> None:
    console = terminal(**LOOKS)
    with TrainView(console, name=name, done=2, total=8, enabled=True) as view:
        view.advance(3, {"loss": name})
        view.say(f"saved {name}")
    text = printed(console)
    assert f"saved {name}\n" in text
    assert f"loss {name}" in text
    assert "3/8" in text


def test_the_time_left_is_known_when_updates_are_slow() -> None:
    """Slower than the 30 s from which rich takes a speed."""
    now, console = 0.0, terminal(**LOOKS)
    view = TrainView(console, name="run", done=2, total=8, enabled=True)
    (task,) = view._bar.tasks
    view._bar.get_time = task._get_time = lambda: now
    for done in (3, 4, 5):
        now += 40
        view.advance(done, {"loss": "1.5"})
    assert task.time_remaining == 3 * 40


def test_a_reader_that_goes_away_does_not_end_the_training(tmp_path: Path) -> None:
    """As `| head -1` does, and a terminal that closes."""
    process = start("train.py", *settings(tmp_path / "run", "train.progress=true"))
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert finished(process).returncode == 0
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_log_file_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    for enabled, expected in ((True, ["run  step 3/8  loss 1.5"]), (False, [])):
        now[0] = 0.0
        console = Console(file=io.StringIO(), width=120, **LOOKS)
        with TrainView(console, name="run", done=0, total=8, enabled=enabled) as view:
            for done in (1, 2, 3, 4):
                now[0] = 6.0 * done
                view.advance(done, {"loss": "1.5"})
        assert printed(console).strip().splitlines() == expected
