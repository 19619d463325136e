"""`segpipe runs`: finished, unfinished and damaged runs in one sorted table."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from segpipe.cli.main import main as segpipe


def write_run(root: Path, name: str, *, model: str, seconds: int, miou: float | None = None, steps: int = 9) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    config = {"model": {"name": model}, "data": {"name": "synthetic"}, "train": {"steps": 100}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": steps, "kind": "train", "time_s": 1.0}) + "\n")
    if miou is not None:
        result = {"miou": miou, "steps": steps, "ema_digest": "0123456789abcdef"}
        (folder / "result.json").write_text(json.dumps(result))
    for path in folder.iterdir():
        os.utime(path, (seconds, seconds))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path, "a", model="pidnet_s", seconds=10**9, miou=0.5, steps=30)
    write_run(tmp_path, "sweep/b", model="fast_scnn", seconds=2 * 10**9, miou=0.75, steps=20)
    write_run(tmp_path, "c", model="ddrnet23_slim", seconds=3 * 10**8, steps=40)
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> list[dict[str, Any]]:
    assert segpipe(["runs", f"root={root}", "--json", *arguments]) == 0
    return list(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("column", "names"),
    [
        ("date", ["sweep/b", "a", "c"]),
        ("miou", ["sweep/b", "a", "c"]),
        ("steps", ["c", "a", "sweep/b"]),
        ("name", ["a", "c", "sweep/b"]),
        ("model", ["c", "sweep/b", "a"]),
    ],
)
def test_runs_are_sorted(root: Path, column: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["name"] for row in listed(capsys, root, f"sort={column}")] == names


def test_rows_hold_what_the_files_say(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in listed(capsys, root)}
    assert rows["a"]["date"].startswith("2001-09-")
    assert {key: rows["a"][key] for key in ("model", "miou", "steps", "state")} == {
        "model": "pidnet_s",
        "miou": 0.5,
        "steps": 30,
        "state": "finished",
    }
    assert rows["c"]["state"] == "unfinished, step 40 of 100"
    assert rows["c"]["miou"] is None


def test_the_table_shows_percent_and_digest_and_is_not_cut_in_a_pipe(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert segpipe(["runs", f"root={root}"]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "sweep/b" in line)
    assert [cell.strip() for cell in line.split("│")[1:6]] == ["sweep/b", "fast_scnn", "synthetic", "75.00", "20"]
    assert "0123456789ab " in line


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\x00", '{"miou"'])
def test_a_damaged_file_is_named(root: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "a" / "result.json").write_text(content)
    (root / "c" / "config.json").write_text(content)
    rows = {row["name"]: row for row in listed(capsys, root)}
    assert rows["a"]["state"] == "result.json is damaged"
    assert rows["c"]["state"] == "config.json is damaged"
    assert rows["sweep/b"]["state"] == "finished"


def test_a_value_of_another_type_is_named_too(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "a" / "config.json").write_text('{"model": 5}')
    (root / "c" / "result.json").write_text('{"miou": "high", "steps": null}')
    states = {row["name"]: row["state"] for row in listed(capsys, root, "sort=miou")}
    assert states["a"] == "config.json is damaged"
    assert states["c"] == "result.json is damaged"
