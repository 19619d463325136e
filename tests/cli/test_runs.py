"""`segpipe runs`: finished, unfinished and damaged runs in one table."""

import json
import os
import re
from base64 import b64decode
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from segpipe.cli.main import main as segpipe
from segpipe.errors import CheckpointError
from segpipe.run.console import LOOKS
from segpipe.run.lock import held
from segpipe.run.overview import find_runs, grouped, write_overview
from segpipe.run.pages import COLORS
from segpipe.settings.compose import compose
from segpipe.settings.config import to_mapping

pytestmark = pytest.mark.slow


def write_run(
    root: Path,
    name: str,
    *,
    model: str,
    seconds: int,
    miou: float | None = None,
    steps: int = 9,
) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    config = {
        "model": {"name": model},
        "data": {"name": "synthetic"},
        "train": {"steps": 100 if miou is None else steps},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": steps, "kind": "train", "time_s": 1.0}) + "\n"
    )
    if miou is not None:
        result = {"miou": miou, "steps": steps, "ema_digest": "0123456789abcdef"}
        (folder / "result.json").write_text(json.dumps(result))
    for path in folder.iterdir():
        os.utime(path, (seconds, seconds))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_run(tmp_path, "a", model="pidnet_s", seconds=10**9, miou=0.5, steps=30)
    write_run(
        tmp_path, "sweep/b", model="fast_scnn", seconds=2 * 10**9, miou=0.75, steps=20
    )
    write_run(tmp_path, "c", model="ddrnet23_slim", seconds=3 * 10**8, steps=40)
    return tmp_path


def listed(
    capsys: pytest.CaptureFixture[str], root: Path, *arguments: str
) -> list[dict[str, Any]]:
    assert segpipe(["runs", f"root={root}", "--json", *arguments]) == 0
    return list(json.loads(capsys.readouterr().out))


def test_a_root_is_a_folder_and_no_pattern(tmp_path: Path) -> None:
    write_run(tmp_path / "runs[1]", "a", model="pidnet_s", seconds=10**9, miou=0.5)
    assert [row.name for row in find_runs(tmp_path / "runs[1]")] == ["a"]


def test_the_best_run_comes_first(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["name"] for row in listed(capsys, root)] == ["sweep/b", "a", "c"]


def test_rows_hold_what_the_files_say(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_run_whose_process_lives_is_running(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: after the process has left, it is unfinished."""
    states = []
    for owner in (held(root / "c"), nullcontext()):
        with owner:
            rows = {row["name"]: row["state"] for row in listed(capsys, root)}
        states.append(rows["c"])
    assert states == ["running, step 40 of 100", "unfinished, step 40 of 100"]


def test_a_run_that_was_made_longer_is_not_finished(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its result is of the steps that it had; and a resume that was refused leaves a finished run what it is."""
    config = json.loads((root / "a" / "config.json").read_text())
    config["train"]["steps"] = 60
    (root / "a" / "config.json").write_text(json.dumps(config))
    refused = {"exit_code": CheckpointError.exit_code, "reason": "another environment"}
    (root / "sweep/b" / "failure.json").write_text(json.dumps(refused))
    rows = {row["name"]: row for row in listed(capsys, root)}
    assert (rows["a"]["state"], rows["a"]["miou"]) == (
        "unfinished, step 30 of 60",
        None,
    )
    assert rows["sweep/b"]["state"] == "finished"


def test_the_table_shows_percent_and_digest_and_is_not_cut_in_a_pipe(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert segpipe(["runs", f"root={root}"]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "sweep/b" in line)
    assert [cell.strip() for cell in line.split("│")[1:6]] == [
        "sweep/b",
        "75.00",
        "20",
        "finished",
        "fast_scnn",
    ]
    assert "0123456789ab " in line


def write_recipe(root: Path, name: str, score: float | None, *overrides: str) -> Path:
    """A run of a whole configuration, with a curve; unfinished without a score."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        json.dumps(
            to_mapping(compose([f"run.name={name}", "train.steps=300", *overrides]))
        )
    )
    lines = [
        {
            "step": step,
            "kind": kind,
            "time_s": 1.0,
            "loss": 1.0 / step,
            "miou": 0.01 * step,
        }
        for step in range(1, 301)
        for kind in ("train", "validation")
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    if score is not None:
        (folder / "result.json").write_text(
            json.dumps({"miou": score, "steps": 300, "ema_digest": "ab" * 20})
        )
    return folder


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """Two rates, the better one with three seeds; one run failed, and its name is markup."""
    write_recipe(tmp_path, "s1", 0.50, "seed=1", "optim.lr=0.1", "data.workers=0")
    write_recipe(tmp_path, "s2", 0.56, "seed=2", "optim.lr=0.1")
    failed = write_recipe(tmp_path, "s3", None, "seed=3", "optim.lr=0.1")
    (failed / "failure.json").write_text(
        '{"exit_code": 6, "reason": "<b>loss nan</b>"}'
    )
    write_recipe(tmp_path, "slow", 0.40, "seed=1", "optim.lr=0.01")
    return tmp_path


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if f"│ {name} " in line)
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_columns_are_the_settings_that_differ_and_the_best_comes_first(
    seeds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert segpipe(["runs", f"root={seeds}"]) == 0
    text = capsys.readouterr().out
    titles = [cell.strip() for cell in text.splitlines()[1].split("┃")[1:-1]]
    assert titles == [
        "name",
        "mIoU %",
        "steps",
        "state",
        "seed",
        "optim.lr",
        "date",
        "digest",
    ]
    assert [text.index(f"│ {name} ") for name in ("s2", "s1", "slow", "s3")] == sorted(
        text.index(f"│ {name} ") for name in ("s1", "s2", "s3", "slow")
    )
    assert cells(text, "s2")[1:6] == ["56.00", "300", "finished", "2", "0.1"]
    assert cells(text, "s3")[3] == "failed"
    assert "\ns3 failed: <b>loss nan</b>\n" in text


@pytest.mark.parametrize("width", [80, 120, 160])
def test_name_score_steps_and_state_are_readable_in_every_terminal(
    width: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "segpipe.run.overview.CONSOLE",
        Console(force_terminal=True, width=width, no_color=True, **LOOKS),
    )
    reason = (
        "step 3: loss 9.38e+22, gradient norm inf, lr 1e+06. " * 4 + "Lower optim.lr."
    )
    settings = (
        "loss.name=ohem",
        "optim.lr=1000000.0",
        "optim.momentum=0.8",
        "optim.weight_decay=0.01",
        "model=pidnet_s",
    )
    names = [
        f"synthetic-fast_scnn-lr1000000.0-momentum0.8-weight_decay0.01-seed{seed}"
        for seed in range(1, 6)
    ]
    for place, name in enumerate(names):
        write_recipe(tmp_path, name, 0.5, f"seed={place}", *settings[:place])
    failed = write_recipe(tmp_path, "broken", None, "seed=9", *settings)
    (failed / "failure.json").write_text(json.dumps({"exit_code": 6, "reason": reason}))
    assert segpipe(["runs", f"root={tmp_path}"]) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table, below = text.split("└")
    assert max(map(len, table.splitlines())) <= width
    found = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in table.splitlines()
        if "│" in line
    ]
    for name in names:
        assert name in "".join(cell[0] for cell in found)  # folded
    scores = [line[1:4] for line in found if line[1]]
    assert scores == [["50.00", "300", "finished"]] * 5 + [["n/a", "300", "failed"]]
    assert f"\nbroken failed: {reason}\n" in below


def test_the_page_shows_the_score_first_and_a_reason_on_one_line(
    tmp_path: Path,
) -> None:
    failed = write_recipe(tmp_path, "a", None, "optim.lr=1000000.0")
    write_recipe(tmp_path, "b", 0.5)
    (failed / "failure.json").write_text('{"exit_code": 6, "reason": "loss \\"nan\\""}')
    page = write_overview(tmp_path / "page.html", grouped(find_runs(tmp_path)))
    text = page.read_text()
    places = [
        text.index(f">{title}</button></th>")
        for title in ("run", "mIoU, %", "steps", "state", "optim.lr")
    ]
    assert places == sorted(places)
    assert 'title="loss &#34;nan&#34;">failed: loss' in text
    assert "<td>1e+06</td>" in text


def test_seeds_are_grouped_with_mean_range_and_number(
    seeds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert segpipe(["runs", f"root={seeds}", "group=seed"]) == 0
    text = capsys.readouterr().out
    assert cells(text, "1,2,3") == ["1,2,3", "53.00", "50.00", "56.00", "2 of 3", "0.1"]
    assert cells(text, "1") == ["1", "40.00", "40.00", "40.00", "1 of 1", "0.01"]
    best, _ = listed(capsys, seeds, "group=seed")
    assert best["scores"] == [0.5, 0.56]
    assert best["runs"] == ["s1", "s2", "s3"]
    for wrong in ("sead", "data.workers"):
        assert segpipe(["runs", f"root={seeds}", f"group={wrong}"]) == 2
    assert "Did you mean seed?" in capsys.readouterr().err


def test_a_repeated_run_is_no_second_sample(
    seeds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("again", "slower"):
        write_recipe(seeds, name, 0.40, "seed=1", "optim.lr=0.01")
    write_recipe(seeds, "third", 0.53, "seed=3", "optim.lr=0.1")  # it had failed
    assert segpipe(["runs", f"root={seeds}", "group=seed"]) == 0
    text = capsys.readouterr().out
    assert cells(text, "1") == ["1", "40.00", "40.00", "40.00", "1 of 1", "0.01"]
    assert cells(text, "1,2,3") == ["1,2,3", "53.00", "50.00", "56.00", "3 of 3", "0.1"]


def test_runs_are_named_or_matched(
    seeds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = f"runs=[{seeds}/s1,{seeds}/s*]"
    assert [Path(row["name"]).name for row in listed(capsys, seeds, chosen)] == [
        "s2",
        "s1",
        "slow",
        "s3",
    ]
    assert segpipe(["runs", f"runs=[{seeds}/x*]"]) == 2
    assert "no runs found" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["", "seed"])
def test_the_page_has_one_table_and_all_curves_and_loads_nothing(
    seeds: Path, by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = seeds / "compare.html"
    assert segpipe(["runs", f"root={seeds}", f"group={by}", f"out={page}"]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert text.count("<table") == 2  # and the settings that all share
    assert "&lt;b&gt;loss nan" in text
    assert text.count("<script") == text.count("script-src ") == 1
    assert "http" not in text.replace("http-equiv", "")
    assert "<th><button>optim.lr</button></th>" in text
    drawn = text.split("data:image/svg+xml;base64,")[1:]
    assert len(drawn) == 2
    for picture in drawn:
        svg = b64decode(picture.partition('"')[0]).decode()
        assert len([color for color in COLORS if color in svg]) == (2 if by else 4)
    if by:
        assert "50.00 to 56.00" in text
        assert "2 of 3" in text
    again = write_overview(seeds / "again.html", grouped(find_runs(seeds)))
    assert (
        write_overview(page, grouped(find_runs(seeds))).read_text() == again.read_text()
    )


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "\x00\x00", '{"miou"', "[" * 100_000],
    ids=["empty", "open", "a list", "zeros", "torn", "nested"],
)
def test_a_damaged_file_is_named(
    root: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "a" / "result.json").write_text(content)
    (root / "c" / "config.json").write_text(content)
    rows = {row["name"]: row for row in listed(capsys, root)}
    assert rows["a"]["state"] == "result.json is damaged"
    assert rows["c"]["state"] == "config.json is damaged"
    assert rows["sweep/b"]["state"] == "finished"


@pytest.mark.parametrize(
    "wrong", ['"miou": "high"', '"miou": NaN', '"iou": [0.5]', '"steps": null']
)
def test_a_value_of_another_type_is_named_too(
    root: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    (root / "a" / "config.json").write_text('{"model": 5}')
    result = f'{{"miou": 0.5, "steps": 100, "ema_digest": "ab", {wrong}}}'
    (root / "c" / "result.json").write_text(result)
    rows = {row["name"]: row for row in listed(capsys, root)}
    assert rows["a"]["state"] == "config.json is damaged"
    assert "model is a group of settings" in rows["a"]["reason"]
    assert rows["c"]["state"] == "result.json is damaged"


@pytest.mark.parametrize("hashed", [True, False])
def test_runs_on_other_data_show_it_and_are_not_averaged(
    seeds: Path, capsys: pytest.CaptureFixture[str], hashed: bool
) -> None:
    """The name of the folder alone, which another machine may keep elsewhere; its content decides, if it was hashed."""
    for name, root, digest in (
        ("s1", "/data/a/photos", "a" * 64),
        ("s2", ".", "a" * 64),
        ("s3", "/x/photos", "b" * 64),
    ):
        path = seeds / name / "config.json"
        config = json.loads(path.read_text())
        config["data"] |= {"name": "folder", "root": root}
        path.write_text(json.dumps(config))
        data = {"data": {"sha256": digest if hashed else "e" * 64, "hashed": hashed}}
        (seeds / name / "inputs.json").write_text(json.dumps(data))
    assert segpipe(["runs", f"root={seeds}"]) == 0
    text = capsys.readouterr().out
    titles = [cell.strip() for cell in text.splitlines()[1].split("┃")[1:-1]]
    place = titles.index("data.root")
    found = [cells(text, name)[place] for name in ("s1", "s2", "s3")]
    assert found == ["photos", ".", "photos"]
    assert segpipe(["runs", f"root={seeds}", "group=seed"]) == 0
    table = capsys.readouterr().out
    seeds_of = [
        line.split("│")[1].strip() for line in table.splitlines() if "│" in line
    ]
    grouped_as = ("1,2", "3") if hashed else ("1,3", "2")  # by the name, if not
    assert set(grouped_as) <= set(seeds_of), table


def test_held_out_sequences_are_one_group_though_they_read_other_files(
    seeds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, drive in (("s1", "a"), ("s2", "b")):
        path = seeds / name / "config.json"
        config = json.loads(path.read_text())
        config["data"] |= {"name": "folder", "root": "/d/x", "hold_out": drive}
        config["seed"] = 1
        path.write_text(json.dumps(config))
        data = {"data": {"sha256": drive * 64, "hashed": True}}
        (seeds / name / "inputs.json").write_text(json.dumps(data))
    assert (
        segpipe(["runs", f"runs=[{seeds}/s1,{seeds}/s2]", "group=data.hold_out"]) == 0
    )
    assert "a,b" in capsys.readouterr().out


def test_a_column_shows_the_first_digits_of_a_hash(seeds: Path) -> None:
    path = seeds / "s1" / "config.json"
    config = json.loads(path.read_text())
    config["model"]["weights_sha256"] = "0123456789abcdef" * 4
    path.write_text(json.dumps(config))
    (row,) = (row for row in find_runs(seeds) if row.name == "s1")
    assert row.settings["model.weights_sha256"] == "0123456789ab"
