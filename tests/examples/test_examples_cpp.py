"""The C++ programs: built once, they repeat the golden answers of an export and refuse a folder that was altered."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from exports import IMAGES, NAMES, export_run, tiny_network
from segpipe.export.gates import judge
from segpipe.runtime.artifact import FORMAT

pytestmark = pytest.mark.slow

SOURCES = Path(__file__).resolve().parents[2] / "examples" / "cpp"
PROGRAMS = ("segpipe_torch", "segpipe_ort")


class Build(NamedTuple):
    """Folder of the programs, and what CMake said when it configured it; None where there is no CMake."""

    folder: Path
    log: str | None


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )


def with_cmake(folder: Path) -> Build:
    configured = run(
        "cmake",
        "-S",
        SOURCES,
        "-B",
        folder,
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        "-DCMAKE_BUILD_TYPE=None",  # Release has -O3, which takes a quarter longer
        "-DCMAKE_CXX_FLAGS=-O1",
    )
    assert configured.returncode == 0, configured.stderr
    built = run("cmake", "--build", folder)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "warning:" not in built.stdout + built.stderr
    return Build(folder, configured.stdout)


def with_compiler(compiler: str, folder: Path) -> Build:
    """Without CMake: the program for libtorch alone."""
    place = Path(torch.__file__).parent
    includes = (
        f"-isystem{place / 'include'}",
        f"-isystem{place / 'include/torch/csrc/api/include'}",
    )
    libraries = (
        f"-L{place / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{place / 'lib'},--allow-shlib-undefined",
    )
    source, program = SOURCES / "segpipe_torch.cpp", folder / "segpipe_torch"
    built = run(
        compiler,
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Wextra",
        *includes,
        source,
        "-o",
        program,
        *libraries,
    )
    assert built.returncode == 0, built.stderr
    return Build(folder, None)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    folder = tmp_path_factory.mktemp("build")
    return (
        with_cmake(folder) if shutil.which("cmake") else with_compiler(compiler, folder)
    )


@pytest.fixture(scope="module")
def exported(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    formats = (
        ["torchscript", "onnx"]
        if (build.folder / "segpipe_ort").exists()
        else ["torchscript"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "SECONDS", 0.0)
        folder = tmp_path_factory.mktemp("export") / "export"
        return export_run(tiny_network(), IMAGES, folder, formats, names=NAMES).folder


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "export"))


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest, build: Build) -> Path:
    path = build.folder / request.param
    if not path.exists():
        if build.log is None:
            pytest.skip(f"{path.name} was not built: there is no CMake on this machine")
        assert f"{path.name} is skipped" in build.log
        pytest.skip(f"{path.name} was not built: its headers are not on this machine")
    return path


def write_sums(folder: Path) -> None:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != "SHA256SUMS"
    )
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in files
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def test_golden_answers_are_repeated(program: Path, exported: Path) -> None:
    done = run(program, exported, "5")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(np.load(exported / "golden" / "image.npy"))
    for index, line in enumerate(lines):
        found = re.fullmatch(
            r"frame (\d+): ([\d.]+) % of the pixels equal, confidence within (\d) levels, p50 ([\d.]+) ms",
            line,
        )
        assert found is not None, line
        assert int(found[1]) == index
        assert 99.9 <= float(found[2]) <= 100
        assert int(found[3]) <= 1
        assert float(found[4]) > 0


def change(name: str, by: int, count: int = 64) -> Callable[[Path], None]:
    """Changes values of the last golden frame, and the checksums with them."""

    def damage(folder: Path) -> None:
        path = folder / "golden" / f"{name}.npy"
        array = np.load(path)
        array.reshape(-1)[-count:] ^= np.uint8(by)
        np.save(path, array)
        write_sums(folder)

    return damage


def flip(folder: Path) -> None:
    """Changes a golden byte behind the checksum's back."""
    path = folder / "golden" / "mask.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for path in folder.glob(name):
            path.write_bytes(path.read_bytes()[:-1])

    return damage


def rewrite(name: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
        write_sums(folder)

    return damage


def garble(folder: Path) -> None:
    for path in folder.glob("model.*"):
        path.write_bytes(b"no model" * 99)
    write_sums(folder)


def wide(folder: Path) -> None:
    path = folder / "golden" / "mask.npy"
    np.save(path, np.load(path).astype(np.int32))
    write_sums(folder)


def escape(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  ../secret\n")


DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "golden byte": (flip, 7, r"mask\.npy is missing, altered or truncated"),
    "golden mask": (change("mask", 1), 4, "different answers on this machine"),
    "golden confidence": (
        change("confidence", 128),
        4,
        "different answers on this machine",
    ),
    "model cut": (cut("model.*"), 7, "is missing, altered or truncated"),
    "no model": (garble, 7, "cannot be used"),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        7,
        r"manifest\.json is missing",
    ),
    "no sums": (
        lambda folder: (folder / "SHA256SUMS").unlink(),
        7,
        "expected an exported folder",
    ),
    "way out": (escape, 7, "has the line"),
    "other weights": (
        rewrite("manifest.json", '"4567"', '"89"'),
        7,
        "weights that the manifest does not describe",
    ),
    "other profile": (
        rewrite("manifest.json", '"profile": "robot"', '"profile": "isaac"'),
        7,
        "format or profile",
    ),
    "other format": (
        rewrite("manifest.json", FORMAT, "segpipe-export/0"),
        7,
        "format or profile",
    ),
    "no limits": (
        rewrite("manifest.json", '"image_agreement"', '"agreement"'),
        7,
        r"no golden\.image_agreement",
    ),
    "looser limit": (
        rewrite("manifest.json", '"image_agreement": 0.999', '"image_agreement": 0.5'),
        7,
        "golden limits are not",
    ),
    "no limit": (
        rewrite("manifest.json", '"image_agreement": 0.999', '"image_agreement": NaN'),
        7,
        "golden limits are not",
    ),
    "more levels": (
        rewrite("manifest.json", '"confidence_levels": 1', '"confidence_levels": 2'),
        7,
        "golden limits are not",
    ),
    "wide mask": (wide, 7, "uint8 frames were needed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_altered_folder_is_refused(name: str, program: Path, copied: Path) -> None:
    damage, code, message = DAMAGES[name]
    damage(copied)
    done = run(program, copied, "1")
    assert done.returncode == code, done.stdout + done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_checksums_of_every_length(program: Path, copied: Path) -> None:
    for length in (0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 128):
        (copied / f"notes_{length}.txt").write_bytes(bytes(range(length)))
    write_sums(copied)
    change("confidence", 1, count=1)(copied)  # one level is within the limit
    assert run(program, copied, "1").returncode == 0
    cut("notes_57.txt")(copied)
    assert run(program, copied, "1").returncode == 7, "the control: the files are read"


@pytest.mark.parametrize(
    "arguments", [(), ("export", "0"), ("export", "many"), ("export", "1", "2")]
)
def test_usage(arguments: tuple[str, ...], program: Path) -> None:
    done = run(program, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "FOLDER [RUNS]" in done.stderr


def test_the_programs_are_short() -> None:
    def code_lines(path: Path) -> int:
        lines = (line.strip() for line in path.read_text().splitlines())
        return sum(bool(line) and not line.startswith("//") for line in lines)

    shared = code_lines(SOURCES / "artifact.hpp")
    assert shared > 100
    for name in PROGRAMS:
        assert shared + code_lines(SOURCES / f"{name}.cpp") < 200


def test_the_manifest_is_spelled_as_the_programs_read_it(exported: Path) -> None:
    text = (exported / "manifest.json").read_text()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
    assert f'\n "format": "{FORMAT}"' in text
