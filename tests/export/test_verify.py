"""Both command lines on sound and on altered folders; test_plants.py has the table of planted faults."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from openvino_stand_in import StandIn
from PIL import Image
from plants import byte_flipped, edited, golden_changed, int8_scale, retold, sign, std

from exports import (
    SCENES,
    SIZE,
    export,
    last_line,
    scenes,
    tiny_network,
    trained_network,
    verify,
    write_run,
)
from runs import write_camvid
from segpipe.cli.main import main as segpipe
from segpipe.data.samples import open_samples, open_splits
from segpipe.errors import DataError
from segpipe.export import dataset
from segpipe.export import verify as verification
from segpipe.export.artifact.frame_statistics import unknown_frames
from segpipe.export.artifact.golden import golden_problems
from segpipe.export.artifact.manifest import converters
from segpipe.export.gates import judge
from segpipe.export.graph.formats import (
    jit,
    quiet_torch,
    write_archive,
)
from segpipe.export.graph.lowprec import to_int8
from segpipe.export.graph.network import DeployModel
from segpipe.export.graph.onnx_format import open_onnx, write_probe
from segpipe.ledger import inputs
from segpipe.runtime import Segmenter
from segpipe.train import checkpoint
from segpipe.train.checkpoint import load_network

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {**converters(), "torch": "9.9"}
MANY = f"export.images={SCENES}"  # so that ties on the made images weigh as little as they do beside photographs


pytestmark = [
    pytest.mark.usefixtures("quick_exports", "tiny_networks"),
    pytest.mark.slow,
]


def test_the_exit_code_reaches_the_shell(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(artifact, folder)
    byte_flipped(folder)
    run = write_run(
        tmp_path / "run", partial(trained_network, "fast_scnn", SIZE)
    )  # another process: no tiny network
    command = [
        sys.executable,
        "-m",
        "segpipe",
        "verify",
        f"artifact={folder}",
        f"run={run}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("ARTIFACT REFUSED: G1 integrity: ")
    assert "model.onnx has sha256" in line


@pytest.mark.parametrize(
    "arguments",
    [["run=x"], ["artifact=x"], ["artifact={folder}", "run=x"], ["artifact=x", "run={run}"],
     ["artifact={folder}", "run={run}", "export.profile=isaac"]],
)  # fmt: skip
def test_usage(arguments: list[str], artifact: Path, run: Path) -> None:
    assert (
        segpipe(
            ["verify", *[text.format(folder=artifact, run=run) for text in arguments]]
        )
        == 2
    )


def test_another_run_is_refused(
    artifact: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    state = checkpoint.load(other / "last.pt")
    name = next(iter(state["ema"]))
    state["ema"] = {**state["ema"], name: state["ema"][name] + 1e-3}
    checkpoint.save(
        other / "last.pt",
        {key: state[key] for key in state if key not in ("format", "version")},
    )
    assert verify(other, artifact) == 7
    assert "manifest.json has source.ema_digest = " in last_line(capsys)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("missing", 'Missing key(s) in state_dict: "classifier.bias"'),
        ("too many", 'Unexpected key(s) in state_dict: "classifier.scale"'),
        ("another shape", "size mismatch for classifier.bias"),
    ],
)
def test_a_checkpoint_of_other_tensors_exports_nothing(
    fault: str,
    told: str,
    artifact: Path,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    state = copy.copy(checkpoint.load(other / "last.pt"))
    state["ema"] = dict(state["ema"])
    if fault == "missing":
        del state["ema"]["classifier.bias"]
    elif fault == "too many":
        state["ema"]["classifier.scale"] = torch.zeros(3)
    else:
        state["ema"]["classifier.bias"] = torch.zeros(3)
    checkpoint.save(
        other / "last.pt",
        {key: state[key] for key in state if key not in ("format", "version")},
    )
    assert export(other, tmp_path / "export") == 7
    line = capsys.readouterr().err
    assert line.startswith("EXPORT REJECTED: G1 integrity: ")
    assert line.count("\n") == 1
    assert told in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]
    assert verify(other, artifact) == 7
    assert last_line(capsys).startswith("ARTIFACT REFUSED: G1 integrity: ")


def test_latency_over_the_budget(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = "export.latency_budget_ms=0.001"
    assert (
        export(run, tmp_path / "export", "export.formats=[torchscript]", budget) == 12
    )
    assert "> 0.001 ms of export.latency_budget_ms" in last_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["export.rejected"]


def test_a_verification_depends_on_no_stopwatch(
    run: Path, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "measure", lambda *_: pytest.fail("timed"))
    assert verify(run, artifact) == 0


# Claims: what is counted is counted here


def retold_as_trivial(manifest: dict[str, Any]) -> None:
    """As of an export without the data set, which has no limits and nothing to fit a temperature on."""
    manifest.update(unknown_frames(), real_images=0, status="UNVERIFIED_REAL_DATA")
    manifest["calibration"] = {"method": "none", "temperature": 1.0}
    manifest["golden"]["images"] = ["noise", "checkerboard"]


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        (
            lambda manifest: manifest.update(real_images=0, **unknown_frames()),
            2,
            "made from 0 check images, 4 labelled images and 0 none images, but this data has 2",
        ),
        (retold_as_trivial, 2, "made from 0 check images, 0 labelled images"),
        (
            lambda manifest: manifest["frame_statistics"].update(source="check"),
            2,
            "and 4 check images, but this data has 2 check images",
        ),
        (
            lambda manifest: manifest["calibration"].update(images=9),
            2,
            "9 labelled images and",
        ),
        (
            lambda manifest: manifest["golden"]["images"].__setitem__(0, "x"),
            7,
            'golden.images[0] = "x"',
        ),
        (
            lambda manifest: (
                manifest["check_images"].insert(0, "x"),
                manifest["golden"].update(images=["noise", "checkerboard"]),
            ),
            7,
            'golden.images[0] = "noise"',
        ),
    ],
)
@pytest.mark.parametrize("settings", [[], ["export.allow_unverified=true"]])
def test_counts_and_names_of_the_manifest_switch_no_claim_off(
    change: Any,
    code: int,
    told: str,
    settings: list[str],
    run: Path,
    artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "export"))
    retold(folder, change)
    assert verify(run, folder, *settings) == code
    assert told in last_line(capsys)


def test_golden_frames_are_the_images_of_their_names(
    run: Path, artifact: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "export"))
    frames = np.load(folder / "golden" / "image.npy")
    model = DeployModel(load_network(run, "last"), temperature=0.25)

    def problems(*images: np.ndarray) -> list[str]:
        checks = [
            dataset.Check(str(index), image) for index, image in enumerate(images)
        ]
        return list(golden_problems(model, folder, checks))

    assert problems(*frames) == []
    for images in (frames[::-1], (frames[0], frames[1] ^ 128), frames[:1]):
        assert "golden/image.npy differs from" in problems(*images)[0]
    shutil.rmtree(folder / "golden")
    (problem,) = problems(*frames)
    assert "golden/ cannot be compared" in problem
    assert "export again" in problem


def test_a_folder_without_its_golden_frames_is_refused_by_name(
    run: Path, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "export"))
    shutil.rmtree(folder / "golden")
    assert verify(run, folder) == 7
    assert "golden/confidence.npy cannot be read: No such file" in last_line(capsys)
    sign(folder)
    assert verify(run, folder) == 7
    assert "golden/ cannot be compared" in last_line(capsys)


def test_both_commands_print_the_digest_of_the_checksums(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "export"
    assert export(run, folder, "export.formats=[onnx]") == 0
    digest = hashlib.sha256((folder / "SHA256SUMS").read_bytes()).hexdigest()
    line = f"SHA256SUMS has sha256 {digest}"
    assert line in capsys.readouterr().out.splitlines()
    assert verify(run, folder) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_images_that_changed_since_the_run_are_named_and_not_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = scenes(), tmp_path / "run" / "export"
    config.data.name, config.data.root = (
        "camvid",
        str(write_camvid(tmp_path / "data", num_val=4)),
    )
    config.run.root, config.run.name = str(tmp_path), "run"
    config.train.steps = 12
    run = write_run(tmp_path / "run", tiny_network, config)
    inputs.record(config, open_splits(config))
    assert export(run, folder, "export.formats=[onnx]") == 0
    unfinished = "trained for 7 of 12 steps: the run was interrupted, or goes on"
    assert capsys.readouterr().err == f"warning: {unfinished}.\n"
    assert json.loads((folder / "manifest.json").read_text())["warnings"] == [
        unfinished
    ]
    assert f"Warning: {unfinished}.\n" in (folder / "model_card.md").read_text()
    image = tmp_path / "data" / "val" / "frame00.png"
    Image.fromarray(255 - np.asarray(Image.open(image))).save(image)
    told = "the labelled images changed since the run: val/frame00.png was altered"
    assert verify(run, folder) == 2
    line = last_line(capsys)
    assert line.startswith(f"{told}. {folder} cannot be compared on these images")
    assert "golden/image.npy differs from" in line

    other = Path(shutil.copytree(folder, tmp_path / "other"))
    edited(folder / "model.onnx", other / "model.onnx", std)
    sign(other)
    assert verify(run, other) == 7, "the files themselves are at fault"

    assert export(run, folder, "export.formats=[onnx]") == 0
    assert (
        f"warning: {told}; the gates and the temperature are" in capsys.readouterr().err
    )
    for name in ("model_card.md", "verify_report.md"):
        assert f"Warning: {told}; " in (folder / name).read_text()
    assert verify(run, folder) == 0, "of the images as they are now"
    assert capsys.readouterr().err == f"warning: {told}.\n"


# TorchScript: the inside of the shipped file is its tensors


def test_another_bias_in_torchscript_is_refused(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, files = tmp_path / "export", {"manifest.json": ""}
    assert export(run, folder, "export.formats=[torchscript]") == 0
    assert verify(run, folder) == 0
    assert last_line(capsys).startswith(
        "ARTIFACT VERIFIED_FEW_IMAGES: model.torchscript.pt"
    )
    path = folder / "model.torchscript.pt"
    with quiet_torch():
        module = jit.load(str(path), _extra_files=files)
        with torch.no_grad():
            module.state_dict()["network.classifier.bias"].add_(1e-6)
        text = files["manifest.json"]
        write_archive(
            module,
            path,
            {"manifest.json": text.decode() if isinstance(text, bytes) else text},
        )
    sign(folder)
    assert verify(run, folder) == 7
    assert (
        "model.torchscript.pt is not what the checkpoint converts to: its bytes"
        in last_line(capsys)
    )
    monkeypatch.setattr(verification, "converters", lambda: OTHERS)
    assert verify(run, folder) == 2
    assert "it was exported with torch 2" in (line := last_line(capsys))
    assert "Verify with these versions" in line


def test_golden_answers_are_repeated_without_onnx(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "export"
    assert export(run, folder, "export.formats=[torchscript]") == 0
    assert verify(run, folder) == 0
    golden_changed(folder)
    capsys.readouterr()
    assert verify(run, folder) == 7
    assert (
        "G1 integrity: golden/mask.npy differs from what the trained network gives"
        in last_line(capsys)
    )


# Reduced precision


def int8_takes(patch: pytest.MonkeyPatch, share: float) -> None:
    """The int8 file now takes this share of the fp32 file's time, whatever it really takes here."""
    measure = judge.measure

    def measured(runs: Any, image: Any) -> Any:
        found = measure(runs, image)
        cpu_ms = share * found["model.onnx"]["cpu_ms"]
        return {**found, "model.int8.onnx": {**found["model.onnx"], "cpu_ms": cpu_ms}}

    patch.setattr(judge, "measure", measured)


def test_int8_is_held_to_its_own_limits(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, wanted = (
        tmp_path / "export",
        ("export.formats=[onnx]", "export.precision=[fp32,fp16,int8]", MANY),
    )
    with monkeypatch.context() as patch:
        int8_takes(patch, 0.91)
        assert export(run, folder, *wanted) == 0
    told = "latency CPU time 0.91 > 0.9 of the fp32 file's, so the file gains nothing"
    line = last_line(capsys)
    assert line.startswith(
        f"EXPORT verified: model.onnx, model.fp16.onnx in {folder}; "
    )
    assert f"model.int8.onnx refused: {told}" in line
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["dropped"] == {"model.int8.onnx": told}
    assert manifest["files"].keys() == {"model.onnx", "model.fp16.onnx"}
    assert not (folder / "model.int8.onnx").exists()
    for name in ("model_card.md", "verify_report.md"):
        assert told in (folder / name).read_text()
    assert verify(run, folder, MANY) == 0
    capsys.readouterr()
    int8_takes(monkeypatch, 0.89)
    for place in (folder, tmp_path / "again"):
        assert export(run, place, *wanted) == 0
        assert (
            last_line(capsys)
            == f"EXPORT verified: model.onnx, model.fp16.onnx, model.int8.onnx in {place}"
        )
    for name in ("model.onnx", "model.fp16.onnx", "model.int8.onnx"):
        assert (folder / name).read_bytes() == (
            tmp_path / "again" / name
        ).read_bytes(), "the same every time"
    entry = json.loads((folder / "manifest.json").read_text())["files"][
        "model.int8.onnx"
    ]
    assert entry["precision"] == "int8"
    assert entry["golden_agreement"] >= 0.9
    inside = json.loads(onnx.load(folder / "model.int8.onnx").metadata_props[0].value)
    assert inside["precision"] == "int8"
    assert verify(run, folder, MANY) == 0
    assert last_line(capsys).startswith("ARTIFACT verified: ")
    edited(folder / "model.int8.onnx", folder / "model.int8.onnx", int8_scale)
    sign(folder)
    capsys.readouterr()
    assert verify(run, folder, MANY) == 7
    assert (
        "model.int8.onnx is not what the checkpoint converts to: tensor "
        in last_line(capsys)
    )
    monkeypatch.setattr(verification, "converters", lambda: OTHERS)
    assert verify(run, folder, MANY) == 2
    assert "Verify with these versions" in last_line(capsys)


def test_the_inside_of_an_int8_file_is_seen_as_it_is(
    artifact: Path, tmp_path: Path
) -> None:
    image = np.load(artifact / "golden" / "image.npy")[0]
    lowered, probe, whole = (
        tmp_path / f"{name}.onnx" for name in ("int8", "probe", "whole")
    )
    to_int8(artifact / "model.onnx", lowered, [image])
    write_probe(lowered, probe)
    write_probe(artifact / "model.onnx", whole)
    seen, expected = (
        open_onnx(probe, optimize=False)(image).normalised,
        open_onnx(whole)(image).normalised,
    )
    assert seen is not None
    assert expected is not None
    assert np.abs(seen - expected).max() <= 1e-5


# Other engines


def test_an_engine_passes_the_gates_too_or_nothing_is_published(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, wanted = (
        tmp_path / "export",
        ("export.formats=[onnx]", "export.precision=[fp32,fp16]"),
    )
    stand_in, engine = StandIn(), "export.engines=[openvino]"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "openvino", None)  # type: ignore[arg-type]
        patch.setattr("segpipe.export.gates.judge.find_spec", lambda _: None)
        assert export(run, folder, *wanted, engine) == 2
        assert (
            "export.engines = ['openvino'], but openvino is not installed"
            in last_line(capsys)
        )
    monkeypatch.setitem(sys.modules, "openvino", stand_in)  # type: ignore[arg-type]
    assert export(run, folder, "export.formats=[torchscript]", engine) == 2
    assert "only ONNX files run there" in last_line(capsys)
    assert export(run, folder, *wanted, engine) == 0
    found = json.loads((folder / "verify_report.json").read_text())
    for name in ("model.onnx (openvino)", "model.fp16.onnx (openvino)"):
        assert set(found["gates"][name]) == set(found["gates"]["model.onnx"])
        assert found["latency"]["files"][name]["n"] >= 10
    assert set(found["files"]) == {"model.onnx", "model.fp16.onnx"}, (
        "the files are the same"
    )
    assert verify(run, folder, engine) == 0
    capsys.readouterr()
    stand_in.off = 1
    assert verify(run, folder) == 0, "the control: without the engine nobody asks it"
    assert verify(run, folder, engine) == 4
    line = last_line(capsys)
    assert "in model.onnx (openvino)" in line
    assert "in model.onnx;" not in line


# Without the data set


def test_without_data_a_file_is_published_only_on_request(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def absent(*_: Any, **__: Any) -> Any:
        raise DataError("data.root = there is no folder.")

    folder, wanted = (
        tmp_path / "export",
        ("export.formats=[onnx]", "export.allow_unverified=true"),
    )
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "open_samples", absent)
        assert export(run, folder, "export.formats=[onnx]") == 2
        assert "export.allow_unverified=true" in last_line(capsys)
        assert export(run, folder, *wanted) == 2
        assert "export.height = 0" in last_line(capsys)
        assert list(tmp_path.iterdir()) == []
        assert (
            export(
                run,
                folder,
                *wanted,
                f"export.height={SIZE[0]}",
                f"export.width={SIZE[1]}",
            )
            == 0
        )
        assert verify(run, folder) == 2
        capsys.readouterr()
        assert verify(run, folder, "export.allow_unverified=true") == 0
        line = last_line(capsys)
        assert line.startswith("ARTIFACT UNVERIFIED_REAL_DATA: model.onnx")
        assert line.endswith("; compared on generated images only")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["status"], manifest["allow_unverified"]) == (
        "UNVERIFIED_REAL_DATA",
        True,
    )
    assert manifest["calibration"]["method"] == "none"
    assert "generated images only" in (folder / "model_card.md").read_text()
    with pytest.warns(UserWarning, match="UNVERIFIED_REAL_DATA"):
        Segmenter.load(folder)
    for more in ([], ["export.allow_unverified=true"]):  # with the data set
        assert verify(run, folder, *more) == 2
        assert "made from 0 check images" in last_line(capsys)


def test_a_size_that_no_image_has_is_compared_on_generated_images_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, wanted = (
        tmp_path / "export",
        ("export.formats=[onnx]", "export.height=32", "export.width=64"),
    )
    assert export(run, folder, *wanted) == 2
    assert "has no image of 32x64 pixels" in (line := last_line(capsys))
    assert line.endswith(
        "export.allow_unverified=true compares on generated images only."
    )
    assert export(run, folder, *wanted, "export.allow_unverified=true") == 0
    capsys.readouterr()
    assert verify(run, folder) == 2
    assert last_line(capsys).endswith(
        "export.allow_unverified=true compares on generated images only."
    )
    assert verify(run, folder, "export.allow_unverified=true") == 0
    assert last_line(capsys).startswith("ARTIFACT UNVERIFIED_REAL_DATA: model.onnx")


# Other profiles


def test_another_profile_passes_the_same_gates(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "export"
    assert (
        export(
            run,
            folder,
            "export.profile=isaac",
            "export.formats=[onnx]",
            "export.precision=[fp32,fp16]",
        )
        == 0
    )
    capsys.readouterr()
    assert verify(run, folder) == 0
    assert last_line(capsys).startswith(
        "ARTIFACT VERIFIED_FEW_IMAGES: model.fp16.onnx, model.onnx"
    )
    manifest = json.loads((folder / "manifest.json").read_text())
    image, outputs = manifest["io"]["inputs"][0], manifest["io"]["outputs"]
    needed = ("float32", "NCHW", ["mask"])
    assert (
        image["dtype"],
        image["layout"],
        [entry["name"] for entry in outputs],
    ) == needed
    altered = tmp_path / "altered"
    shutil.copytree(folder, altered)
    golden_changed(altered)
    assert verify(run, altered) == 7
    assert "golden/mask.npy differs from what" in last_line(capsys)
    edited(folder / "model.fp16.onnx", folder / "model.fp16.onnx", std)
    sign(folder)
    assert verify(run, folder) == 4
    assert "G4 preprocessing differs by" in last_line(capsys)


# The exported file beside the run


def test_predict_gives_the_same_ids_by_the_exported_file_as_by_the_run(
    run: Path, artifact: Path, tmp_path: Path
) -> None:
    samples = open_samples(scenes().data, "val", 0)
    (tmp_path / "images").mkdir()
    for index in range(3):
        Image.fromarray(samples.read(index)[0]).save(
            tmp_path / "images" / f"{index}.png"
        )
    for name, network in (("a", f"run={run}"), ("b", f"artifact={artifact}")):
        given = (
            f"source={tmp_path / 'images'}",
            f"out={tmp_path / name}",
            "compute.threads=1",
        )
        assert segpipe(["predict", network, *given]) == 0
    manifest = json.loads((artifact / "manifest.json").read_text())
    for index in range(3):
        by_run, by_file = (
            np.asarray(Image.open(tmp_path / name / "masks" / f"{index}.png"))
            for name in "ab"
        )
        assert (by_run == by_file).mean() >= manifest["golden"]["image_agreement"]
        assert len(np.unique(by_run)) > 1
    found = {
        name: json.loads((tmp_path / name / "predictions.json").read_text())
        for name in "ab"
    }
    assert found["a"]["model"]["ema_digest"] == found["b"]["model"]["ema_digest"]
    assert found["b"]["model"]["artifact"].startswith(f"{manifest['model']}-fp32-")
