"""Every fault of the table is refused by its gate, and nothing of a judged folder is run before that is known."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from plants import PASSED, PLANTS, REFUSED, Evil, Plant

from exports import export, last_line, verify
from segpipe.export import verify as verification
from segpipe.export.artifact.manifest import converters
from segpipe.export.gates import judge
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.onnx_format import write_probe

pytestmark = [
    pytest.mark.usefixtures("quick_exports", "tiny_networks"),
    pytest.mark.slow,
]
OTHERS = {**converters(), "torch": "9.9"}
# Both commands run the same gates: without a conversion to compare with, answers alone show these.
BY_EXPORT = [
    name
    for name, plant in PLANTS.items()
    if plant.answers and plant.before  # a file without them cannot be made
]


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def int8_is_fast(patch: pytest.MonkeyPatch) -> None:
    """Else the machine's load might refuse it."""
    measure = judge.measure

    def measured(runs: Any, image: Any) -> Any:
        return {
            name: {**found, "cpu_ms": 1 - 0.5 * ("int8" in name)}
            for name, found in measure(runs, image).items()
        }

    patch.setattr(judge, "measure", measured)


@pytest.fixture(scope="module")
def all_files(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every format and precision."""
    folder = tmp_path_factory.mktemp("all") / "export"
    wanted = (
        "export.formats=[onnx,torchscript]",
        "export.precision=[fp32,fp16,int8]",
        "export.images=16",
    )
    with pytest.MonkeyPatch.context() as patch:
        int8_is_fast(patch)
        assert export(run, folder, *wanted) == 0
    return folder


@pytest.fixture
def converted_before(all_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion gives the same files every time (test_conversion.py), so the sound ones are what it would give."""

    def copies(
        _result: Any,
        _model: Any,
        folder: Path,
        kinds: Sequence[tuple[str, str]],
        *_: Any,
    ) -> list[ModelFile]:
        files = []
        for name, precision in kinds:
            path = Path(
                shutil.copy(all_files / FORMATS[name].file_name(precision), folder)
            )
            files.append(
                ModelFile(name, precision, path, folder / "probes" / path.name, {})
            )
        return files

    monkeypatch.setattr(verification, "convert", copies)


@pytest.fixture
def other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files cannot be compared with a conversion of today."""
    monkeypatch.setattr(verification, "converters", lambda: OTHERS)


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> Any:
        pytest.fail("something of the judged folder was loaded")

    for module, attribute in (
        (torch.jit, "load"),
        (torch.export, "load"),
        (onnxruntime, "InferenceSession"),
    ):
        monkeypatch.setattr(module, attribute, loaded)


def planted(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    fixture: str = "converted_before",
) -> tuple[Plant, Path]:
    plant, folder = PLANTS[name], tmp_path / "export"
    request.getfixturevalue(fixture)
    shutil.copytree(
        request.getfixturevalue("all_files" if plant.name else "artifact"), folder
    )
    plant.change(folder)
    return plant, folder


def test_the_table_holds_what_it_should() -> None:
    counts = Counter(plant.before for plant in PLANTS.values())
    assert counts[PASSED] == 7, "the harmful ones that the first gates verified"
    assert counts[REFUSED] >= 12
    assert counts[""] >= 10, "new ones"


@pytest.mark.parametrize("name", PLANTS)
def test_every_plant_is_refused_before_anything_is_run(
    name: str,
    run: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant, folder = planted(name, request, tmp_path)
    if "converts to" in plant.told:  # other faults are found beside what is loaded
        request.getfixturevalue("nothing_is_loaded")
    same_images = ("export.images=16",) if plant.name else ()
    code = verify(run, folder, *same_images)
    line = last_line(capsys)
    assert plant.told in line
    if "made from" in plant.told:  # as if the data set were another one
        assert code == 2
    else:
        assert code == 7
        assert line.startswith("ARTIFACT REFUSED: G1 integrity: ")


def test_other_versions_explain_a_difference_and_nothing_is_run(
    run: Path,
    artifact: Path,
    tmp_path: Path,
    other_versions: None,
    nothing_is_loaded: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "export"))
    PLANTS["one filter"].change(folder)
    before = contents(folder)
    assert verify(run, folder) == 2
    assert f"it was exported with torch {torch.__version__.partition('+')[0]}" in (
        line := last_line(capsys)
    )
    assert "Verify with these versions, or export again." in line
    assert contents(folder) == before, "nothing is written there"


@pytest.mark.parametrize("name", BY_EXPORT)
def test_an_export_refuses_it_too(
    name: str,
    run: Path,
    artifact: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant, folder = planted(name, request, tmp_path / "planted")
    code, gate = plant.answers or (14, "")

    def wrong(_model: Any, _manifest: Any, shipped: Path, probe: Path) -> None:
        # An export is the same every time, so the file of the sound one is what a conversion would give.
        shutil.copy(folder / "model.onnx", shipped)
        write_probe(shipped, probe)

    monkeypatch.setitem(
        FORMATS, "onnx", dataclasses.replace(FORMATS["onnx"], convert=wrong)
    )
    (tmp_path / "out").mkdir()
    assert export(run, tmp_path / "out" / "export", "export.formats=[onnx]") == code
    line = last_line(capsys)
    assert line.startswith("EXPORT REJECTED: ")
    assert gate in line
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["export.rejected"]
    assert not [
        path
        for path in (tmp_path / "out").rglob("*")
        if path.suffix in (".onnx", ".pt", ".npy")
    ]


def test_a_sound_folder_of_every_file_passes_the_comparison(
    run: Path, all_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the folder into which faults are planted has none, and what is equal was not made by others."""
    int8_is_fast(monkeypatch)
    monkeypatch.setattr(
        verification, "converters", lambda: {**converters(), "onnx": "9.9"}
    )
    assert verify(run, all_files, "export.images=16") == 0


def test_the_control_a_plain_load_would_have_run_the_pickle(tmp_path: Path) -> None:
    pickle.load(io.BytesIO(pickle.dumps(Evil(tmp_path / "here"))))
    assert (tmp_path / "here").is_dir()
