"""The two wheels hold what a user needs, and can be installed side by side."""

import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Both wheels by name, built without isolation, so without network."""
    folder = tmp_path_factory.mktemp("wheels")
    build = "import sys, hatchling.build; hatchling.build.build_wheel(sys.argv[1])"
    for source in (ROOT, ROOT / "packaging" / "runtime"):
        subprocess.run(
            [sys.executable, "-c", build, str(folder)],
            cwd=source,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return {
        path.name.partition("-")[0]: zipfile.ZipFile(path)
        for path in folder.glob("*.whl")
    }


def sources(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    } - {".gitignore"}


def test_segpipe_holds_every_file_of_the_package_and_conf(
    wheels: dict[str, zipfile.ZipFile],
) -> None:
    names = set(wheels["segpipe"].namelist())
    package = {name for name in sources(ROOT / "segpipe") if "__pycache__" not in name}
    assert {f"segpipe/{name}" for name in package} <= names
    assert {f"segpipe/conf/{name}" for name in sources(ROOT / "conf")} <= names
    for part in (
        "conf/config.yaml",
        "ledger/digest.c",
        "export/artifact/manifest.schema.json",
        "py.typed",
    ):
        assert f"segpipe/{part}" in names
    assert not [
        name for name in names if name.startswith(("tests", "benchmarks", "train.py"))
    ]


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(
        next(path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    ).decode()


@pytest.mark.parametrize("name", ["segpipe", "segpipe_runtime"])
def test_wheels_carry_licence_and_command(
    name: str, wheels: dict[str, zipfile.ZipFile]
) -> None:
    assert "Apache License" in metadata(wheels[name], "licenses/LICENSE")
    assert "License-Expression: Apache-2.0" in metadata(wheels[name], "METADATA")
    assert f"{name.replace('_', '-')} = {name}." in metadata(
        wheels[name], "entry_points.txt"
    )


def test_runtime_wheel_is_the_same_source_under_its_own_name(
    wheels: dict[str, zipfile.ZipFile],
) -> None:
    wheel, runtime = wheels["segpipe_runtime"], ROOT / "segpipe" / "runtime"
    for path in runtime.glob("*.py"):
        content = wheel.read(f"segpipe_runtime/{path.name}").decode()
        assert content == path.read_text().replace("segpipe.runtime", "segpipe_runtime")
        assert "import segpipe\n" not in content
        assert "from segpipe." not in content
    assert "Requires-Python: >=3.10" in metadata(wheel, "METADATA")


def test_both_wheels_can_be_installed_in_one_environment(
    wheels: dict[str, zipfile.ZipFile], tmp_path: Path
) -> None:
    files = [set(wheel.namelist()) for wheel in wheels.values()]
    assert len(files) == 2
    assert not files[0] & files[1]
    for wheel in wheels.values():
        wheel.extractall(tmp_path)
    code = (
        "import segpipe, segpipe.runtime, segpipe_runtime; from segpipe.settings.compose import CONF, compose;"
        "print(segpipe.__file__, segpipe_runtime.__file__, CONF, compose(['experiment=street_cpu']).run.name)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    *paths, name = done.stdout.split()
    assert all(Path(path).is_relative_to(tmp_path) for path in paths)
    assert name == "street-fast_scnn-seed0"


def test_setup_without_cuda_knows_a_build_for_cuda_by_its_metadata() -> None:
    needs_cuda = runpy.run_path(str(ROOT / "packaging" / "cpu.py"))["needs_cuda"]

    def report(*required: str) -> str:
        metadata = {"requires_dist": ["filelock", *required]}
        return json.dumps({"install": [{"metadata": metadata}]})

    assert needs_cuda(report('nvidia-cudnn-cu13==9.1; python_version > "3"'))
    assert not needs_cuda(report('nvidia-cudnn-cu13==9.1; python_version < "3"'))
    assert not needs_cuda(report())
