"""The example of plug-ins, copied to a folder outside the project: a session as docs/plugins.md has it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import runs
from segpipe import plugins
from segpipe.cli.main import main as segpipe
from segpipe.train.checkpoint import load

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"
FAST = (
    "--config-dir=conf", "experiment=mine", "train.steps=2", "train.progress=false", "compute.device=cpu",
    "compute.shards=2", "compute.samples_per_shard=2", "compute.threads=1", "data.workers=0", "augment.check=false",
    "augment.crop_size=[64,64]", "export.enabled=false", "run.root=runs",
)  # fmt: skip


@pytest.fixture
def example(project: object) -> Path:
    """A copy of the example with its data, which is the current folder."""
    folder = Path.cwd()
    shutil.copytree(
        EXAMPLE,
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    subprocess.run([sys.executable, "draw.py", "shots"], check=True)
    return folder


def command(*arguments: str) -> int:
    with runs.torch_restored():
        return segpipe(list(arguments))


def test_a_session_with_plug_ins(
    example: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One process gives the bits of two: the audit trains again; evaluate works; other code is refused by name."""
    run = "run=runs/two"
    assert command("train", *FAST, "run.name=two", "compute.nproc=2") == 0, (
        capfd.readouterr().err
    )
    two = json.loads(Path("runs/two/result.json").read_text())
    assert two["world_size"] == 2
    saved = load(Path("runs/two/last.pt"))
    assert any(name.startswith("net.backbone.") for name in saved["model"])
    code = {
        "mine/__init__.py",
        "mine/network.py",
        "mine/loss.py",
        "mine/data.py",
        "mine/transform.py",
        "torchvision",
    }
    assert set(saved["fingerprint"]["plugins"]) == code
    content = json.loads(Path("runs/two/inputs.json").read_text())
    assert len(content["data"]["files"]) == 2 * 16 + 1
    capfd.readouterr()
    assert command("evaluate", run, "data.workers=0") == 0
    assert json.loads(capfd.readouterr().out)["miou"] == pytest.approx(two["miou"])
    audit = ("audit", run, "spans=9", "span_steps=0", "data.workers=0")
    assert command(*audit) == 0, capfd.readouterr()
    assert "passed: 2 of 2 updates" in capfd.readouterr().out
    plugins._trusted.clear()  # the training in this process named them
    with Path("mine/network.py").open("a") as file:
        file.write("# another\n")
    for arguments in (
        ["evaluate", run],
        ["train", *FAST, "run.name=two", "run.exists=resume"],
    ):
        assert command(*arguments) == 2
        assert "mine/network.py" in capfd.readouterr().err
    assert command("evaluate", run, "data.workers=0", "trust=[mine]") == 0
