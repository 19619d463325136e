"""`segpipe COMMAND`: help, version, wrong commands and keys, completion."""

import os
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from segpipe import __version__
from segpipe.cli import main, speed
from segpipe.cli.commands import COMMANDS, RUN, TRUST
from segpipe.cli.main import main as segpipe
from segpipe.settings.config import SETTINGS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert segpipe(list(arguments)) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def line_of(text: str, key: str) -> str:
    return next(
        line for line in text.splitlines() if line.strip().startswith(f"{key}=")
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_a_line_for_each_key(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = COMMANDS[name]
    text = printed(capsys, name, "--help")
    assert text.startswith(f"usage: segpipe {name}")
    for entry in (*command.keys, *(SETTINGS[key] for key in command.settings)):
        assert entry.doc in line_of(text, entry.key)
        assert entry.valid in line_of(text, entry.key)
    for key, entry in SETTINGS.items():
        assert key.partition(".")[0] not in command.overrides or entry.doc in line_of(
            text, key
        )
    assert printed(capsys, name, "-h") == text


# Commands from a clone; the other script writes a page of the docs.
SCRIPTS = sorted(
    {*(ROOT / "scripts").glob("*.py")} - {ROOT / "scripts/settings_page.py"}
)
STARTED = [
    *SCRIPTS,
    ROOT / "train.py",
    ROOT / "examples" / "race" / "demo.py",
]
STARTED += [
    ROOT / "benchmarks" / f"{name}.py" for name in ("run", "mutants", "export_table")
]


@pytest.mark.parametrize("path", STARTED, ids=lambda path: path.name)
def test_every_script_explains_itself(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage: ")


def test_help_of_train_shows_meaning_default_and_choices_of_all_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "train", "--help")
    assert sum(f"  {key}=" in text for key in SETTINGS) == len(SETTINGS) > 80
    assert "poly, cosine" in line_of(text, "optim.schedule")
    assert line_of(text, "optim.lr").startswith("  optim.lr=0.05 ")
    assert "street_cpu" in line_of(text, "experiment")


def test_commands_declare_what_exists() -> None:
    for name, command in COMMANDS.items():
        starts = command.starts or f"{name}:main"
        module, _, function = starts.partition(":")
        assert hasattr(import_module(f"segpipe.cli.{module}"), function)
        assert SETTINGS.keys() >= set(command.settings)
        assert {entry.key for entry in command.keys} >= set(command.positional)
        assert command.overrides or command.keys


def test_commands_read_each_of_their_keys() -> None:
    """One that nobody reads would be taken, and do nothing."""
    sources = [*(ROOT / "segpipe").rglob("*.py"), ROOT / "benchmarks/gpu.py"]
    code = "".join(path.read_text() for path in sources if path.stem != "commands")
    for name, command in COMMANDS.items():
        unread = [
            k.key for k in command.keys if not re.search(rf'[\["(]{k.key}["\]]', code)
        ]
        assert not unread, (name, unread)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_what_it_does_not_know(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert segpipe([name, "no.such=1"]) == 2
    assert 1 <= len(capsys.readouterr().err.splitlines()) <= 3


def test_every_command_is_on_the_page_of_commands() -> None:
    page = (ROOT / "docs/commands.md").read_text()
    assert [name for name in COMMANDS if f"`segpipe {name}" not in page] == []


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"segpipe {__version__}\n"
    text = printed(capsys, "--help")
    assert text == printed(capsys)
    assert all(
        f"  {name} " in text and entry.summary in text
        for name, entry in COMMANDS.items()
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "trian is not a command of segpipe. Did you mean train?"),
        (["train", "optim.lrr=1"], "Did you mean optim.lr?"),
        (["doctor", "data.rot=x"], "Did you mean data.root?"),
        (
            ["evaluate", "run=x", "optim.lr=1"],
            "'optim.lr=1' is not an argument of this command",
        ),
        (["evaluate", "run=nowhere"], "nowhere"),
        (["compare", "a"], "b is missing"),
        (["weights", "run=nowhere", "out=x.pt"], "ending in .safetensors was needed"),
        (["split", "data.root=.", "pattern=("], "pattern = '(' is not a regular"),
        (["runs", "which=miuo"], "'which=miuo' is not an argument"),
        (["runs", "root=/nowhere"], "root = /nowhere: no runs found"),
        (["gpu-check", "--device", "cpu", "--only", "nothing"], "only = nothing"),
    ],
)
def test_wrong_commands_and_keys_are_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *arguments, code=2)
    assert named in text
    assert text.count("\n") == 1


def test_ctrl_c_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "parse", interrupted)
    assert printed(capsys, "runs", code=130) == "interrupted.\n"


def test_gpu_check_outside_a_clone_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    assert "in a clone" in printed(capsys, "gpu-check", code=2)


def in_shell(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    "command",
    ["--help", "train --help", "evaluate --help", "runs root=tests", "--version"],
)
def test_light_commands_import_no_torch(command: str) -> None:
    code = "import sys; from segpipe.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    assert in_shell("-c", code, *command.split()).splitlines()[-1] == "False"


def test_all_entry_points_are_the_same_command() -> None:
    version = f"segpipe {__version__}\n"
    assert in_shell("-m", "segpipe", "--version") == version
    text = in_shell("-m", "segpipe", "train", "--help")
    assert in_shell("train.py", "--help") == text
    assert in_shell("scripts/doctor.py", "--help", PYTHONPATH=str(ROOT)).startswith(
        "usage: segpipe doctor"
    )


def test_each_script_is_one_command() -> None:
    scripts = [path.read_text() for path in SCRIPTS]
    found = [text.partition('main(["')[2].partition('"')[0] for text in scripts]
    without = {
        "check-plugin",
        "describe",
        "import",
        "pack",
        "profile",
        "runs",
        "split",
        "train",
        "weights",
    }
    assert set(found) == COMMANDS.keys() - without
    assert not [
        text for text in scripts if "sys.path" in text or len(text.splitlines()) > 10
    ]


def test_commands_that_read_a_run_take_trust() -> None:
    """Its network may be a plug-in outside the current folder."""
    reading = {name for name, command in COMMANDS.items() if RUN in command.keys}
    assert {"evaluate", "export", "weights", "audit"} <= reading
    assert not {name for name in reading if TRUST not in COMMANDS[name].keys}


def test_the_configuration_is_shown_with_files_of_the_user(tmp_path: Path) -> None:
    shown = in_shell("-m", "segpipe", "train", "optim.lr=0.25", "--cfg", "job")
    assert "lr: 0.25" in shown
    assert "name: synthetic-fast_scnn-seed0" in shown
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\noptim: {lr: 0.125}\n"
    )
    own = in_shell(
        "train.py",
        "--config-dir",
        str(tmp_path),
        "experiment=mine",
        "--cfg",
        "job",
    )
    assert "lr: 0.125" in own
