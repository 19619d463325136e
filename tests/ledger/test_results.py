"""Runs whose ledgers are equal are not called identical when their results or files are not."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ledgers
from segpipe.cli.main import main as segpipe
from segpipe.errors import CheckpointError
from segpipe.ledger.divergence import Comparison, compare, result_differences
from segpipe.ledger.reader import read_run

RESULT = {
    "steps": 3, "weights_digest": "aa", "ema_digest": "bb", "pixels": 90, "miou": 0.150, "iou": {"road": 0.15},
    "images_per_second": 9.0, "name": "a", "best_miou": 0.2, "f1": {"road": 0.3, "sky": float("nan")}, "segpipe": "1",
}  # fmt: skip
INPUTS = {
    "data": {"files": {"val/x.png": "11", "val/y.png": "22"}},
    "code": {"files": {"losses/total.py": "33"}},
}
Content = dict[str, Any]


def write(
    folder: Path,
    change: Callable[[Content], None] = lambda content: None,
    steps: int = 3,
) -> Path:
    """A run of three updates with its files, in which `change` altered something."""
    ledgers.write_session(folder, ledgers.header(), range(steps))
    content: Content = copy.deepcopy({"result": RESULT, "inputs": INPUTS})
    change(content)
    for name in ("result", "inputs"):
        if content[name]:
            (folder / f"{name}.json").write_text(json.dumps(content[name]))
    return folder


def compared(
    tmp_path: Path, change: Callable[[Content], None], steps: int = 3
) -> Comparison:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", change, steps)
    return compare(read_run(a), read_run(b))


def test_equal_results_and_files_are_identical(tmp_path: Path) -> None:
    """Speed, name, time and the number of validations, from which `best_miou` is, may differ."""

    def change(content: Content) -> None:
        content["result"] |= {
            "images_per_second": 8.0,
            "best_miou": 0.3,
            "name": "b",
            "world_size": 2,
            "segpipe": "2",
            "new_score": 1,
        }

    found = compared(tmp_path, change)
    assert (found.verdict, found.exit_code, found.inputs, found.notes) == (
        "identical",
        0,
        "",
        (),
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("miou", 0.139, "miou in result.json is 0.15 in A and 0.139 in B"),
        (
            "weights_digest",
            "ac",
            "weights_digest in result.json is aa in A and ac in B",
        ),
        (
            "ema_digest",
            "bc",
            "ema_digest in result.json is bb in A and bc in B",
        ),
        ("iou", {"road": 0.1}, "iou in result.json"),
        ("pixels", 91, "pixels in result.json"),
        (
            "f1",
            {"road": 0.4},
            "f1 in result.json is {'road': 0.3, 'sky': nan} in A and {'road': 0.4} in B",
        ),
        (
            "interval_95",
            [0.1, 0.2],
            "interval_95 in result.json is missing in A and [0.1, 0.2] in B",
        ),
    ],
)
def test_another_result_of_equal_updates_is_a_divergence(
    tmp_path: Path, name: str, value: Any, words: str
) -> None:
    def change(content: Content) -> None:
        content["result"][name] = value

    found = compared(tmp_path, change)
    assert (found.verdict, found.exit_code, found.stage, found.step) == (
        "diverged",
        5,
        "result",
        2,
    )
    assert f"identical in all 3 common steps, but {words}" in found.sentence


def test_changed_files_and_sources_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(content: Content) -> None:
        content["inputs"]["data"]["files"] = {"val/x.png": "12", "val/z.png": "22"}
        content["inputs"]["code"]["files"] = {"losses/total.py": "34"}

    found = compared(tmp_path, change)
    assert found.verdict == "identical"  # no number depends on them
    expected = (
        "data of B: val/x.png was altered, val/y.png is missing, val/z.png was added; "
    )
    assert found.inputs == f"{expected}code of B: losses/total.py was altered"
    assert segpipe(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert expected in capsys.readouterr().out
    shutil.rmtree(tmp_path / "b" / "ledger")
    changed = {(1, 0, "loss", 0): 1}
    ledgers.write_session(tmp_path / "b", ledgers.header(), range(3), changed=changed)
    found = compare(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert "Data files or segpipe's code differ" in found.advice


def test_results_after_other_numbers_of_updates_are_not_compared(
    tmp_path: Path,
) -> None:
    def change(content: Content) -> None:
        content["result"] |= {"steps": 5, "weights_digest": "zz"}

    found = compared(tmp_path, change, steps=5)
    assert (found.verdict, found.exit_code) == ("identical_up_to", 2)


def test_files_of_one_run_only_are_told(tmp_path: Path) -> None:
    found = compared(tmp_path, lambda content: content.update(result={}))
    assert (found.verdict, found.notes) == ("identical", ("result.json is in A only",))


def test_a_damaged_result_is_refused_by_name(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (b / "result.json").write_text("[1")
    with pytest.raises(CheckpointError, match=r"b/result\.json cannot be read"):
        result_differences(a, b)
