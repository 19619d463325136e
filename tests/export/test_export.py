"""Export: what is accepted computes the same, and every planted fault leaves a report and no model file."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
import torch
from torch import nn

from exports import (
    CLASSES,
    IMAGES,
    NAMES,
    SIZE,
    FakeSamples,
    export_run,
    tiny_network,
    trained_network,
)
from segpipe.cli import export as command
from segpipe.cli.main import main as segpipe
from segpipe.errors import (
    ConfigError,
    ExportError,
    ExportMismatch,
    IntegrityError,
)
from segpipe.export import dataset, publish
from segpipe.export.artifact import place
from segpipe.export.artifact.manifest import describe
from segpipe.export.gates.comparison import (
    Candidate,
    Check,
    as_trained,
    compare,
    gate_logits,
    gate_mask,
    gate_preprocessing,
)
from segpipe.export.gates.controls import CONTROLS
from segpipe.export.graph import formats
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.network import DeployModel, run_eager
from segpipe.export.graph.onnx_format import open_onnx
from segpipe.predict.predictor import of_exported
from segpipe.runtime import Segmenter
from segpipe.runtime.frames import enlarged
from segpipe.settings.groups import ExportConfig
from segpipe.train.checkpoint import TrainedNetwork

pytestmark = [pytest.mark.usefixtures("quick_exports"), pytest.mark.slow]


@pytest.fixture(scope="module")
def trained() -> TrainedNetwork:
    return trained_network("fast_scnn", SIZE)


@pytest.fixture(scope="module")
def tiny() -> TrainedNetwork:
    return tiny_network()


@pytest.fixture(scope="module")
def exported(
    trained: TrainedNetwork, tmp_path_factory: pytest.TempPathFactory
) -> publish.ExportReport:
    folder = tmp_path_factory.mktemp("run") / "export"
    return export_run(trained, IMAGES, folder, list(FORMATS), names=NAMES)


def model_files(folder: Path) -> list[str]:
    return sorted(
        str(path) for suffix in ("*.onnx*", "*.pt*") for path in folder.rglob(suffix)
    )


# Acceptance


def test_an_export_holds_what_it_promises(exported: publish.ExportReport) -> None:
    assert {"model.onnx", "model.torchscript.pt"} <= {
        path.name for path in exported.folder.iterdir()
    }
    assert sorted(path.name for path in exported.folder.parent.iterdir()) == ["export"]
    names = ["G1 integrity", "G2 logits", "G3 mask", "G4 preprocessing", "latency"]
    assert [gate.name for gate in exported.gates["model.onnx"]] == names
    assert [gate.name for gate in exported.gates["eager"]] == ["G6 power"]
    assert exported.images[:4] == NAMES
    assert len(exported.images) == 17
    assert exported.latency.keys() == {
        "eager",
        "model.onnx",
        "model.torchscript.pt",
    }
    assert all(found["n"] == 10 for found in exported.latency.values())


def test_the_converter_folds_every_batchnorm_of_a_convolution(
    trained: TrainedNetwork, exported: publish.ExportReport
) -> None:
    """int8 relies on it: in fp32 between int8 convolutions a norm would cost more than it saves."""
    assert any(isinstance(each, nn.BatchNorm2d) for each in trained.model.modules())
    graph = onnx.load(exported.folder / "model.onnx").graph
    assert "BatchNormalization" not in {node.op_type for node in graph.node}


def test_the_manifest_explains_a_lone_file(exported: publish.ExportReport) -> None:
    manifest = json.loads((exported.folder / "manifest.json").read_text())
    inside = json.loads(
        onnx.load(exported.folder / "model.onnx").metadata_props[0].value
    )
    assert inside == {key: manifest[key] for key in inside}
    assert inside["source"]["ema_digest"] == "0123abcd"
    assert [entry["name"] for entry in inside["classes"]] == list(CLASSES.names)
    assert inside["io"]["inputs"][0]["shape"] == [1, 64, 96, 3]
    assert (manifest["status"], manifest["real_images"]) == (
        "VERIFIED_FEW_IMAGES",
        len(IMAGES),
    )
    card = (exported.folder / "model_card.md").read_text()
    assert "Status: VERIFIED_FEW_IMAGES" in card
    assert "compared on 4 real images; verified needs 16" in card
    assert manifest["gates"]["model.onnx"]["G2 logits"]["max_sigma"] <= 1e-3


def test_both_files_answer_as_the_eager_network(
    trained: TrainedNetwork, exported: publish.ExportReport
) -> None:
    model = DeployModel(trained)
    with torch.no_grad():
        logits = trained.model(trained.preprocess(torch.from_numpy(IMAGES[0])[None]))
        mask, confidence = model(torch.from_numpy(IMAGES[0])[None])
    full = nn.functional.interpolate(
        logits, SIZE, mode="bilinear", align_corners=trained.model.align_corners
    )
    assert torch.equal(mask, full.argmax(1).to(torch.uint8))
    assert confidence.shape[1:] == logits.shape[2:]
    assert len(mask.unique()) > 1, "a constant mask would agree with anything"
    for opened in (
        open_onnx(exported.folder / "model.onnx"),
        FORMATS["torchscript"].open(
            exported.folder / "model.torchscript.pt", model.profile
        ),
    ):
        answer = opened(IMAGES[0])
        assert (answer.mask == mask[0].numpy()).mean() > 0.999
        assert np.abs(answer.confidence.astype(int) - confidence[0].numpy()).max() <= 1


def test_auxiliary_heads_are_not_in_the_files(
    trained: TrainedNetwork, exported: publish.ExportReport
) -> None:
    assert any("train_only" in name for name in trained.model.state_dict()), (
        "the control: the network has such heads"
    )
    assert not any("train_only" in name for name in DeployModel(trained).state_dict())
    for name in exported.files:
        assert b"train_only" not in (exported.folder / name).read_bytes()
    stored = sum(
        int(np.prod(entry.dims))
        for entry in onnx.load(exported.folder / "model.onnx").graph.initializer
    )
    assert stored < sum(tensor.numel() for tensor in trained.model.parameters())


def converted(
    name: str, trained: TrainedNetwork, checks: list[Check], folder: Path
) -> tuple[list[str], list[str]]:
    """G1 findings, and messages of G2 to G4 that fail, for a new file of the format `name`."""
    model, size = DeployModel(trained), checks[0].image.shape[:2]
    manifest, shipped, probe = (
        describe(trained, model, size),
        folder / "a",
        folder / "b",
    )
    FORMATS[name].write(model, manifest, shipped, probe)
    candidate = Candidate(
        *(FORMATS[name].open(path, model.profile) for path in (probe, shipped))
    )
    sigma = compare(
        as_trained(run_eager(model), trained.preprocess), [candidate], checks
    )
    found = candidate.comparisons
    assert len(found) == len(checks), candidate.broken
    gates = (
        gate_logits(found, sigma),
        gate_mask(found, sigma),
        gate_preprocessing(found),
    )
    problems = ModelFile(name, "fp32", shipped, probe, manifest).problems()
    return problems, [gate.message for gate in gates if not gate.passed]


EVERY = bool(os.environ.get("SEGPIPE_EVERY"))
FURTHER = ["ddrnet23_slim", "erfnet"] if EVERY else []


@pytest.mark.parametrize("name", ["pidnet_s", "timm", *FURTHER])
def test_every_model_is_converted(name: str, tmp_path: Path) -> None:
    checks = [
        Check(name, image) for name, image in zip(NAMES[:2], IMAGES[:2], strict=True)
    ]
    assert converted("onnx", trained_network(name, SIZE), checks, tmp_path) == ([], [])


FRAMES = Path(__file__).resolve().parents[3] / "shared" / "data" / "cityscapes_frames"


@pytest.mark.skipif(not FRAMES.is_dir(), reason="no real frames on this machine")
def test_photographs_of_two_megapixels(tmp_path: Path) -> None:
    checks = [
        Check(path.stem, cv2.imread(str(path))[..., ::-1].copy())
        for path in sorted(FRAMES.glob("*.png"))
    ]
    assert [check.image.shape for check in checks] == [(1024, 2048, 3)] * 2
    assert converted(
        "onnx", trained_network("fast_scnn", (64, 128)), checks, tmp_path
    ) == ([], [])


# Refusal: the conversion is given another model than the reference


def not_a_number(model: DeployModel) -> None:
    model.network.classifier.bias[0] = float("nan")


Fault = Callable[[DeployModel], None]
bgr, one_weight_scaled = CONTROLS["bgr"], CONTROLS["one_weight_scaled"]


def plant(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    fault: Fault,
    *,
    shipped_only: bool = False,
) -> None:
    """The conversion to `name` now works on a model with `fault`, or ships one with a correct probe beside it."""
    right = FORMATS[name].convert

    def wrong(model: DeployModel, manifest: Any, shipped: Path, probe: Path) -> None:
        faulty = copy.deepcopy(model)
        fault(faulty)
        right(faulty, manifest, shipped, probe)
        if shipped_only:
            right(model, manifest, probe.with_name("unused"), probe)

    monkeypatch.setitem(
        FORMATS, name, dataclasses.replace(FORMATS[name], convert=wrong)
    )


def failed_gates(run_dir: Path) -> set[str]:
    """Names of the gates that failed, from the report that a refusal leaves; there is no model file beside it."""
    assert model_files(run_dir) == []
    assert [path.name for path in run_dir.iterdir()] == ["export.rejected"]
    report = json.loads(
        (run_dir / "export.rejected" / "verify_report.json").read_text()
    )
    assert report["status"] == "rejected"
    return {
        gate[:2]
        for gates in report["gates"].values()
        for gate, entry in gates.items()
        if not entry["passed"]
    }


@pytest.mark.parametrize("name", CONTROLS)
def test_a_planted_fault_is_refused(
    name: str, tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "torchscript", CONTROLS[name])
    with pytest.raises(
        ExportMismatch, match=r"^EXPORT REJECTED: G2 logits differ by .* > 0.001 sigma"
    ) as caught:
        export_run(tiny, IMAGES, tmp_path / "export", ["torchscript"], names=NAMES)
    assert caught.value.exit_code == 4
    wrong_input = name in ("bgr", "no_normalisation", "half_mean_and_std")
    assert failed_gates(tmp_path) == (
        {"G2", "G3", "G4"} if wrong_input else {"G2", "G3"}
    )


def test_a_network_with_synchronised_norms_is_the_same_one(
    tiny: TrainedNetwork, tmp_path: Path
) -> None:
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(tiny.model))  # type: ignore[no-untyped-call]
    assert any(
        isinstance(module, nn.SyncBatchNorm) for module in synchronised.modules()
    ), "the control"
    network = dataclasses.replace(tiny, model=synchronised)
    model = DeployModel(network)
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    expected, found = DeployModel(tiny).state_dict(), model.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    for image in IMAGES:
        assert np.array_equal(
            run_eager(model)(image).mask, run_eager(DeployModel(tiny))(image).mask
        )
    assert export_run(network, IMAGES[:1], tmp_path / "export", ["torchscript"]).passed


@pytest.mark.parametrize("name", ["onnx"])
def test_a_planted_fault_is_refused_in_other_formats(
    name: str, tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, name, bgr)
    with pytest.raises(
        ExportMismatch, match=rf"G4 preprocessing differs by .* in model\.{name}"
    ):
        export_run(
            tiny, IMAGES, tmp_path / "export", [name, "torchscript"], names=NAMES
        )
    assert failed_gates(tmp_path) == {"G2", "G3", "G4"}


def test_a_fault_of_the_shipped_file_alone_is_seen_by_g3(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        monkeypatch, "torchscript", CONTROLS["align_corners_flipped"], shipped_only=True
    )
    line = r"^EXPORT REJECTED: G3 mask agreement \d\d\.\d\d % < 99.99 % \(worst: \w+, \d+ unexplained pixels\)"
    with pytest.raises(ExportMismatch, match=line):
        export_run(tiny, IMAGES, tmp_path / "export", ["torchscript"], names=NAMES)
    assert failed_gates(tmp_path) == {"G3"}


def test_logits_that_are_no_numbers_are_refused(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "torchscript", not_a_number)
    with pytest.raises(ExportMismatch, match="G2 logits are NaN or infinite"):
        export_run(tiny, IMAGES, tmp_path / "export", ["torchscript"])
    assert "G2" in failed_gates(tmp_path)


def test_a_file_that_is_not_what_the_manifest_says_is_refused(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: DeployModel, manifest: Any, shipped: Path, probe: Path) -> None:
        right(model, {**manifest, "model": "another"}, shipped, probe)

    right = FORMATS["torchscript"].convert
    broken = dataclasses.replace(FORMATS["torchscript"], convert=wrong)
    monkeypatch.setitem(FORMATS, "torchscript", broken)
    with pytest.raises(
        IntegrityError, match=r"G1 integrity: manifest\.json inside the file differs"
    ) as caught:
        export_run(tiny, IMAGES, tmp_path / "export", ["torchscript"])
    assert caught.value.exit_code == 7
    assert failed_gates(tmp_path) == {"G1"}


@pytest.mark.parametrize(
    "change",
    ["output name", "opset", "reader", "no manifest", "weights elsewhere", "torn"],
)
def test_integrity_of_onnx_sees(
    change: str, exported: publish.ExportReport, tmp_path: Path
) -> None:
    path = exported.folder / "model.onnx"
    assert ModelFile("onnx", "fp32", path, path, exported.manifest).problems() == []
    model = onnx.load(path)
    if change == "output name":
        next(node for node in model.graph.node if "mask" in node.output).output[:] = [
            "classes"
        ]
        model.graph.output[0].name = "classes"
    elif change == "opset":
        model.opset_import[0].version = 19
    elif change == "reader":
        model.ir_version = 9
    elif change == "no manifest":
        del model.metadata_props[:]
    changed = tmp_path / "model.onnx"
    elsewhere = change == "weights elsewhere"
    onnx.save(model, changed, save_as_external_data=elsewhere, size_threshold=0)
    if change == "torn":
        changed.write_bytes(changed.read_bytes()[:-1000])
    assert ModelFile("onnx", "fp32", changed, changed, exported.manifest).problems()


# The folder


def test_an_older_export_is_replaced(tiny: TrainedNetwork, tmp_path: Path) -> None:
    for label in ("first", "second"):
        export_run(
            tiny, IMAGES[:1], tmp_path / "export", ["torchscript"], names=[label]
        )
    assert json.loads((tmp_path / "export" / "manifest.json").read_text())["golden"][
        "images"
    ] == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_export_through_a_link_is_where_the_link_leads(
    tiny: TrainedNetwork, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    for label in ("first", "second"):
        export_run(tiny, IMAGES[:1], link, ["torchscript"], names=[label])
    manifest = json.loads((tmp_path / "real" / "manifest.json").read_text())
    assert manifest["golden"]["images"] == ["second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_refusal_leaves_the_older_export(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"])
    before = (tmp_path / "export" / "SHA256SUMS").read_bytes()
    with monkeypatch.context() as patch:
        plant(patch, "torchscript", bgr)
        with pytest.raises(ExportMismatch):
            export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"])
    assert (tmp_path / "export" / "SHA256SUMS").read_bytes() == before
    assert model_files(tmp_path / "export.rejected") == []
    export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"])
    assert [path.name for path in tmp_path.iterdir()] == ["export"], (
        "a success takes the old refusal away"
    )


@pytest.mark.parametrize("crash_in", ["judge", "put_in_place"])
def test_a_crash_leaves_no_model_file(
    crash_in: str, tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        assert model_files(tmp_path / "export.partial"), (
            "the control: files were there when it crashed"
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, crash_in, crash)
    with pytest.raises(KeyboardInterrupt):
        export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"])
    assert list(tmp_path.iterdir()) == []


def test_the_older_export_survives_a_failing_rename(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_dir = tmp_path / "export"
    export_run(tiny, IMAGES[:1], out_dir, ["torchscript"], names=["first"])
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name == "files":
            raise OSError("disk full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(
        ConfigError,
        match=r"^export\.dir = .* cannot be written \(disk full\)\. Choose another",
    ):
        export_run(tiny, IMAGES[:1], out_dir, ["torchscript"], names=["second"])
    manifest = json.loads((out_dir / "manifest.json").read_text())
    assert manifest["golden"]["images"] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_kill_between_the_renames_is_mended(
    tiny: TrainedNetwork, tmp_path: Path
) -> None:
    out_dir = tmp_path / "export"
    export_run(tiny, IMAGES[:1], out_dir, ["torchscript"])
    backup = tmp_path / "export.old"  # of the user
    shutil.copytree(out_dir, backup)
    out_dir.rename(tmp_path / "export.replaced")
    place.recover(out_dir)
    assert model_files(out_dir) == [str(out_dir / "model.torchscript.pt")]
    place.recover(out_dir)
    assert model_files(backup)


@pytest.mark.parametrize("name", ["thesis.txt", "manifest.json", "projects"])
def test_a_folder_that_is_not_an_export_is_never_replaced(
    tiny: TrainedNetwork, tmp_path: Path, name: str
) -> None:
    (tmp_path / "golden").mkdir()
    place.check_place(tmp_path)  # an empty folder is no file
    if name == "projects":  # which is not walked
        (tmp_path / name / "2019").mkdir(parents=True)
    else:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"holds other files \({name}\)"):
        export_run(tiny, IMAGES, tmp_path, ["torchscript"])
    assert (tmp_path / name).exists()


def test_what_torch_cannot_convert_is_an_export_error(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unconvertible(model: DeployModel) -> None:
        raise RuntimeError("\x1b[96mstep 3/3\x1b[0m failed")  # colors as torch.onnx

    plant(monkeypatch, "torchscript", unconvertible)
    with pytest.raises(ExportError, match="could not convert") as caught:
        export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"])
    assert caught.value.exit_code == 3
    assert "(RuntimeError: step 3/3 failed)" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("align_corners", [False, True])
def test_masks_at_the_output_stride(
    tiny: TrainedNetwork, tmp_path: Path, align_corners: bool
) -> None:
    """Gated, self-tested and drawn as the others; each id is that of the logits in its cell, where the network has it.

    The labels are what the network says, so it scores 100 %.
    """
    settings = ExportConfig(mask_stride=4)
    tiny.model.align_corners = align_corners
    labelled = []
    for image in IMAGES:
        with torch.no_grad():
            logits = tiny.model(tiny.preprocess(torch.from_numpy(image.copy())[None]))
        ids = logits[0].argmax(0).numpy().astype(np.uint8)
        labelled.append((image, enlarged(ids, *SIZE, align_corners=align_corners)))
    report = export_run(
        tiny, IMAGES, tmp_path / "export", settings=settings, labelled=labelled
    )
    assert report.passed
    quality = report.gates["model.onnx"][-2]
    assert quality.name == "G5 quality"
    assert "mIoU 100.00 % changes by +0.0000 points" in quality.finding
    segmenter = Segmenter.load(tmp_path / "export", deadline_ms=60_000)
    with torch.no_grad():
        logits = tiny.model(tiny.preprocess(torch.from_numpy(IMAGES[0])[None]))
    result = segmenter.infer(IMAGES[0])
    assert np.array_equal(result.mask, logits[0].argmax(0).numpy())
    mask = report.manifest["io"]["outputs"][0]
    assert (mask["shape"], mask["stride"]) == ([1, 16, 24], 4)
    predictor = of_exported(tmp_path / "export")
    ids, confidence = predictor.predict(IMAGES[0])
    assert ids.shape == confidence.shape == SIZE
    wanted = enlarged(result.mask, *SIZE, align_corners=align_corners)
    assert np.array_equal(ids, wanted)


@pytest.mark.parametrize("fault", ["bgr", "classes_permuted"])
def test_a_fault_is_refused_at_the_output_stride_too(
    fault: str, tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "torchscript", CONTROLS[fault])
    settings = ExportConfig(mask_stride=4)
    with pytest.raises(ExportMismatch, match="G3 mask agreement"):
        export_run(
            tiny, IMAGES, tmp_path / "export", ["torchscript"], settings=settings
        )


def test_another_mask_stride_is_refused(tiny: TrainedNetwork, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"export\.mask_stride = 3, but it must be 1 or 4"
    ):
        export_run(
            tiny, IMAGES, tmp_path / "export", settings=ExportConfig(mask_stride=3)
        )


# The check set and the command line


@pytest.fixture
def _run_exists(
    tiny: TrainedNetwork,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path_factory.mktemp("run") / "last.pt"
    path.write_bytes(b"weights")
    loaded = dataclasses.replace(tiny, path=path)
    monkeypatch.setattr(command, "load_network", lambda *_: loaded)
    monkeypatch.setattr(dataset, "open_samples", lambda *_, **__: FakeSamples(IMAGES))


@pytest.mark.usefixtures("_run_exists")
def test_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"run={tmp_path}", "export.formats=[torchscript]", "export.images=2"]
    assert segpipe(["export", *arguments]) == 0
    report = (tmp_path / "export" / "verify_report.md").read_text()
    assert report.splitlines()[0].endswith(
        ": VERIFIED_FEW_IMAGES, compared on 2 real images; verified needs 16"
    )
    assert "| model.torchscript.pt | " in report.partition("## Latency")[2]
    captured = capsys.readouterr().out
    assert "G3 mask" in captured
    assert captured.splitlines()[-1].startswith(
        "EXPORT VERIFIED_FEW_IMAGES: model.torchscript.pt in "
    )
    plant(monkeypatch, "torchscript", bgr)
    assert segpipe(["export", *arguments, f"export.dir={tmp_path}/else/export"]) == 4
    assert failed_gates(tmp_path / "else") == {"G2", "G3", "G4"}
    assert capsys.readouterr().err.startswith("EXPORT REJECTED: ")


@pytest.mark.usefixtures("_run_exists")
def test_a_folder_that_cannot_be_written_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, free = formats.write_archive, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*given: Any) -> None:
        """A limit on file sizes in place of a full disk."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, free[1]))
        try:
            write(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, free)

    (tmp_path / "file").touch()
    arguments = [f"run={tmp_path}", "export.formats=[torchscript]", "export.images=2"]
    for folder, reason in (
        (f"{tmp_path}/file/export", "Not a directory"),
        (f"{tmp_path}/file", "Not a directory"),
        (f"{tmp_path}/{'a' * 300}", "File name too long"),
    ):
        assert segpipe(["export", *arguments, f"export.dir={folder}"]) == 2
        line = f"export.dir = {folder} cannot be written ({reason}). Choose another folder.\n"
        assert capsys.readouterr().err == line
    assert segpipe(["export", *arguments, "export.dir=/"]) == 2
    assert "export.dir = / holds other files (" in capsys.readouterr().err
    monkeypatch.setattr(formats, "write_archive", full)
    assert segpipe(["export", *arguments, f"export.dir={tmp_path}/export"]) == 2
    assert "cannot be written (File too large)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("_run_exists")
@pytest.mark.parametrize(
    "argument",
    [
        "model.name=pidnet_s",
        "mean=0.5",
        "std=0.5",
        "data.classes=x.yaml",
        "export.formats=[x]",
        "which=it",
    ],
)
def test_what_the_checkpoint_knows_cannot_be_given(
    argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert segpipe(["export", f"run={tmp_path}", argument]) == 2
    assert argument.partition("=")[0] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_run_is_a_usage_error(tmp_path: Path) -> None:
    assert segpipe(["export"]) == 2
    assert segpipe(["export", f"run={tmp_path / 'nothing'}"]) == 2
