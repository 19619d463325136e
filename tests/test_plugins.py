"""The user's code: found, refused with what is near, trusted by where it lies, and hashed with what it imports."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from segpipe import plugins
from segpipe.errors import CheckpointError, ConfigError

Write = Callable[[str, str], None]
KEY = "model.name"


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plugins.load(KEY, path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_code_of_the_current_folder_is_found(project: Write) -> None:
    project("net.py", "class Net: pass")
    project("deep/er/net.py", "class Deeper: pass")  # without __init__.py
    plugins.trust(["deep"])
    assert plugins.load(KEY, "net:Net").__name__ == "Net"
    assert plugins.load(KEY, "deep.er.net:Deeper").__name__ == "Deeper"
    assert sys.path[0] == str(Path.cwd())


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("net:Nett", "net has no Nett. Did you mean Net?"),
        (
            "nets:Net",
            "there is no module nets in .*project or among the installed packages",
        ),
        ("other:Net", "folder that contains other; code of a notebook"),
        (
            "pack.nets:Net",
            "there is no module pack.nets in ",
        ),
        ("net.py:Net", "package.module:Name was needed, without .py"),
        (
            "./pack/net.py:Net",
            "package.module:Name was needed, without .py and slashes",
        ),
        ("net:", "package.module:Name was needed"),
        ("net:NUMBER", "is 3, but a class or function was needed"),
        (
            "broken:Net",
            r"broken.py, line 2 \(import nothing_there\): ModuleNotFoundError",
        ),
        ("wrong:Net", "wrong.py, line 1: SyntaxError"),
        ("borrows:Net", r"borrows.py, line 1 \(from net import Nothing\): ImportError"),
        ("attribute:Net", r"attribute.py, line 2 \(np.nothing\): AttributeError"),
        ("leaves:Net", "leaves.py, line 2 .*SystemExit"),
    ],
)
def test_what_cannot_be_imported_is_named(project: Write, path: str, says: str) -> None:
    project("net.py", "NUMBER = 3\nclass Net: pass")
    project("pack/__init__.py", "")
    project("pack/net.py", "class Net: pass")
    project("broken.py", "import os\nimport nothing_there\n")
    project("wrong.py", "def f(:\n")
    project("borrows.py", "from net import Nothing\n")
    project("attribute.py", "import numpy as np\nnp.nothing\n")
    project("leaves.py", "import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=says):
        plugins.load(KEY, path)


def test_a_run_cannot_name_code_outside_the_project(
    project: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "outside.py").write_text(
        "raise SystemExit('was imported')"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    project("net.py", "class Net: pass")
    project(".venv/lib/site-packages/package.py", "raise SystemExit('was imported')")
    monkeypatch.syspath_prepend(str(Path(".venv/lib/site-packages").absolute()))
    for path, place in (
        ("os:system", "os lies in Python itself"),
        ("posix:system", "outside the project"),
        ("outside:Net", "elsewhere"),
        ("package:Net", "site-packages"),
        ("segpipe.files:write_atomically", "segpipe"),
    ):
        assert place in refused(path)
        assert f"trust=[{path.partition(':')[0].partition('.')[0]}]" in refused(path)
    assert plugins.load(KEY, "net:Net")
    monkeypatch.chdir(
        Path(plugins.__file__).parents[1]
    )  # in a clone, segpipe itself lies in the current folder
    assert "trust=[segpipe]" in refused("segpipe.files:write_atomically")


RUN_FILES = {"config.json": "{}", "last.pt": "weights"}
RAN = "raise SystemExit('was imported')"


@pytest.mark.parametrize("package", [False, True], ids=["folder", "package"])
@pytest.mark.parametrize("run", ["received", "received/run", "received/a/run"])
def test_code_beside_a_run_is_not_imported_because_the_run_names_it(
    project: Write, run: str, package: bool
) -> None:
    """A run that somebody hands over lies below the current folder, and brings the code that it names."""
    for name, text in RUN_FILES.items():
        project(f"{run}/{name}", text)
    project("received/evil.py", RAN)
    if package:
        project("received/__init__.py", RAN)
    message = refused("received.evil:Net")
    assert "was imported" not in message
    assert "trust=[received]" in message


@pytest.mark.parametrize("file", ["a/weights.pt", "inputs.json", "a/inputs.json"])
def test_a_package_that_brings_its_checkpoint_is_not_imported(
    project: Write, file: str
) -> None:
    """Under any name: `segpipe evaluate run=received/weights.pt`. One beside the packages of a project says nothing."""
    project("weights.pt", "weights")
    project("received/__init__.py", "Net = dict")
    assert plugins.load(KEY, "received:Net")
    project(f"received/{file}", "weights")
    assert "trust=[received]" in refused("received:Net")


def test_code_in_the_folder_of_a_run_is_not_imported_by_a_command_started_there(
    project: Write,
) -> None:
    project("evil.py", RAN)
    for name, text in RUN_FILES.items():
        project(name, text)
    assert "trust=[evil]" in refused("evil:Net")


def test_a_folder_that_is_no_package_is_not_imported_because_a_run_names_it(
    project: Write,
) -> None:
    """Such as a data set with a script in it."""
    project("shots/evil.py", "class Net: pass")
    assert "shots/__init__.py" in refused("shots.evil:Net")
    project("shots/__init__.py", "")
    assert plugins.load(KEY, "shots.evil:Net")


def test_code_that_the_user_names_is_imported_from_anywhere(project: Write) -> None:
    plugins.trust(["json:dumps"])
    assert plugins.load(KEY, "json:dumps")({}) == "{}"
    assert "trust=[json]" in refused("json:loads")
    plugins.trust(["json"])
    assert plugins.load(KEY, "json:loads")("3") == 3


def test_a_parent_outside_is_not_imported_to_look_inside(
    project: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')"
    )
    (tmp_path / "pack" / "net.py").write_text("class Net: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    refused("pack.net:Net")
    assert not (tmp_path / "ran").exists()


def function(first: int, *, width: int = 3, depth: int = 2) -> tuple[int, int, int]:
    if depth == 0:
        raise ValueError("depth is 0")
    return first, width, depth


def test_arguments_are_those_of_the_signature() -> None:
    assert plugins.call(KEY, "f:function", function, {"width": 4}, 1) == (1, 4, 2)
    for args, named, says in (
        (
            {"widht": 1},
            {},
            "model.args.widht is not an argument of f:function, which takes width, depth. Did you mean width?",
        ),
        ({"zzz": 1}, {}, "which takes width, depth.$"),
        (
            {"width": 1},
            {"width": 2},
            "model.args.width is not an argument of f:function, which takes depth.",
        ),
        (
            {},
            {"num_classes": 2},
            "must accept the keyword num_classes.",
        ),
        ({"depth": 0}, {}, r"test_plugins.py, line \d+ .*ValueError: depth is 0"),
    ):
        with pytest.raises(
            ConfigError,
            match=says.replace("(...", r"\(\.\.\.").replace("...)", r"...\)"),
        ):
            plugins.call(KEY, "f:function", function, args, 1, **named)
    with pytest.raises(
        ConfigError,
        match=r"cannot be called as function\(\): missing a required argument: 'first'",
    ):
        plugins.call(KEY, "f:function", function, {})


def test_a_file_is_read_once_however_many_names_are_imported_from_it(
    project: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large package this took minutes."""
    project("net.py", "from parts import a, b, c\nimport parts")
    project("parts.py", "a = b = c = 1")
    read = []
    real = plugins._imports
    monkeypatch.setattr(
        plugins, "_imports", lambda *given: read.append(given) or real(*given)
    )
    assert sorted(plugins.sources([(KEY, "net:Net")])) == ["net.py", "parts.py"]
    assert len(read) == 2
    assert not plugins.sources([("loss.name", "torch.nn:CrossEntropyLoss")])
    assert len(read) == 2, "each fingerprint has torch's version"


def test_sources_are_what_the_import_statements_reach(project: Write) -> None:
    project(
        "net.py",
        "import json, numpy, jinja2\nfrom parts import conv\ndef f():\n    from pack.sub import deep\n",
    )
    project("parts/__init__.py", "from . import conv")
    project("parts/conv.py", "from .norm import Norm\nfrom ..parts import pool")
    project("parts/norm.py", "")
    project("parts/pool.py", "")
    project("parts/unused.py", "")
    project("pack/sub.py", "")
    project("other.py", "")
    found = plugins.sources([(KEY, "net:Net")])
    packages = {
        name: value for name, value in found.items() if not name.endswith(".py")
    }
    assert set(found) - set(packages) == {
        "net.py", "pack/sub.py", "parts/__init__.py", "parts/conv.py", "parts/norm.py", "parts/pool.py",
    }  # fmt: skip
    assert set(packages) == {"jinja2"}  # the version; numpy's is recorded in every run
    before = found["parts/norm.py"]
    project("parts/norm.py", "x = 1")
    assert plugins.sources([(KEY, "net:Net")])["parts/norm.py"] != before
    with pytest.raises(ConfigError, match="no module nothing"):
        plugins.sources([(KEY, "nothing:Net")])
    assert "parts" not in sys.modules


def test_changed_code_is_refused_unless_it_is_named(project: Write) -> None:
    project("net.py", "import parts")
    project("parts.py", "a = 1")
    recorded = plugins.sources([(KEY, "net:Net")])
    plugins.check_unchanged(KEY, "net:Net", recorded, "last.pt")
    project("parts.py", "a = 2")
    with pytest.raises(
        CheckpointError,
        match=r"last.pt: .*parts.py changed since the training.*trust=\[net\]",
    ):
        plugins.check_unchanged(KEY, "net:Net", recorded, "last.pt")
    plugins.trust(["net"])
    plugins.check_unchanged(KEY, "net:Net", recorded, "last.pt")


def test_code_that_was_edited_since_an_earlier_training_is_refused(
    project: Write,
) -> None:
    """The process would train with the old code, and the run would record the new one."""
    project("net.py", "from parts import a\ndef make(): return a")
    project("parts.py", "a = 1")
    plugins.trust(["net"])
    plugins.check_current(KEY, "net:make")
    plugins.check_current(KEY, "net:make")
    project("parts.py", "a = 20")
    with pytest.raises(ConfigError, match=r"parts\.py changed since this process"):
        plugins.check_current(KEY, "net:make")
    del sys.modules["net"], sys.modules["parts"]  # as a process that starts anew
    plugins.check_current(KEY, "net:make")
    assert plugins.load(KEY, "net:make")() == 20
