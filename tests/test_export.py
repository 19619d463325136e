"""Export: what is accepted computes the same, and every planted fault leaves a report and no model file."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
import torch
from torch import nn

import scripts.export as command
from segpipe.checkpoint import TrainedNetwork
from segpipe.config import Config
from segpipe.data.catalog import ClassTable
from segpipe.errors import ConfigError, DataError, ExportError, ExportMismatch
from segpipe.export import DeployModel, check_images, deploy_model, export_run, publish, verify
from segpipe.export.formats import FORMATS, Answer, open_onnx, open_torchscript
from segpipe.models import MODELS, build_model
from segpipe.models.layers import SegmentationNet
from segpipe.preprocess import Preprocess

NUM_CLASSES = 5
CLASSES = ClassTable(
    name="toy",
    names=tuple(f"class_{index}" for index in range(NUM_CLASSES)),
    palette=tuple((50 * index, 255 - 50 * index, 128) for index in range(NUM_CLASSES)),
    train_ids={index: index for index in range(NUM_CLASSES)},
)


def structured(count: int, size: tuple[int, int], seed: int = 0) -> list[np.ndarray]:
    """Coloured blobs with noise: neighbouring pixels resemble each other, as in a photograph."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (count, 6, 9, 3), dtype=np.uint8)
    smooth = (cv2.resize(image, size[::-1], interpolation=cv2.INTER_CUBIC) for image in coarse)
    return [np.clip(image + generator.normal(0, 8, image.shape), 0, 255).astype(np.uint8) for image in smooth]


def trained_network(name: str, size: tuple[int, int]) -> TrainedNetwork:
    """A network whose BatchNorms have seen images and have weights of their own, as after a training."""
    torch.manual_seed(0)
    model = build_model(name, NUM_CLASSES).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.3)
            module.momentum = None
    images = torch.from_numpy(np.stack(structured(4, size, seed=1)))
    with torch.no_grad():
        model.logits(Preprocess()(images), aux=True)
        spread = model.eval()(Preprocess()(images)).std()
    for name_of, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.out_channels == NUM_CLASSES and "train_only" not in name_of:
            module.weight.data.mul_(4.0 / spread)
    config = Config()
    config.model.name = name
    config.export.images = 4
    return TrainedNetwork(model.eval(), Preprocess(), config, CLASSES, weights_digest="0123abcd", step=7)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Tiny(SegmentationNet):
    """A network that converts in a moment, for what does not depend on the network."""

    output_stride = 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 5, 4, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.classifier = nn.Conv2d(8, NUM_CLASSES, 3, padding=1)
        self.train_only = nn.ModuleDict({"aux": nn.Conv2d(8, NUM_CLASSES, 1)})

    def logits(self, image: torch.Tensor, *, aux: bool) -> dict[str, torch.Tensor]:
        return {"main": self.classifier(self.body(image))}


SIZE = (64, 96)
IMAGES = structured(4, SIZE)
NAMES = [f"scene_{index}" for index in range(4)]
BOTH = ("onnx", "torchscript")


@pytest.fixture(scope="module")
def trained() -> TrainedNetwork:
    return trained_network("fast_scnn", SIZE)


@pytest.fixture(scope="module")
def tiny() -> TrainedNetwork:
    return TrainedNetwork(Tiny().eval(), Preprocess(), Config(), CLASSES, weights_digest="4567", step=7)


@pytest.fixture(scope="module")
def exported(trained: TrainedNetwork, tmp_path_factory: pytest.TempPathFactory) -> publish.ExportReport:
    folder = tmp_path_factory.mktemp("run") / "export"
    return export_run(trained, IMAGES, folder, BOTH, {"git": "abc"}, names=NAMES)


def model_files(folder: Path) -> list[str]:
    return sorted(str(path) for suffix in ("*.onnx*", "*.pt*") for path in folder.rglob(suffix))


# Acceptance


def test_an_export_holds_what_it_promises(exported: publish.ExportReport) -> None:
    names = {path.name for path in exported.folder.iterdir()}
    reports = {"verify_report.json", "verify_report.md"}
    assert names == {"model.onnx", "model.torchscript.pt", "manifest.json", "SHA256SUMS", *reports}
    for line in (exported.folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((exported.folder / name).read_bytes()).hexdigest() == digest
    assert sorted(path.name for path in exported.folder.parent.iterdir()) == ["export"]
    assert [gate.name for gate in exported.gates["model.onnx"]] == ["G1 integrity", "G2 logits", "G3 mask"]
    assert exported.images[:4] == NAMES
    assert len(exported.images) == 9
    assert exported.latency_ms.keys() == {"eager", "model.onnx", "model.torchscript.pt"}


def test_the_manifest_explains_a_lone_file(exported: publish.ExportReport) -> None:
    manifest = json.loads((exported.folder / "manifest.json").read_text())
    inside = json.loads(onnx.load(exported.folder / "model.onnx").metadata_props[0].value)
    assert inside == {key: manifest[key] for key in inside}
    assert inside["git"] == "abc"
    assert inside["source"]["weights_digest"] == "0123abcd"
    assert [entry["name"] for entry in inside["classes"]] == list(CLASSES.names)
    assert inside["io"]["inputs"][0]["shape"] == [1, 64, 96, 3]
    assert manifest["status"] == "verified"
    assert manifest["gates"]["model.onnx"]["G2 logits"]["max_sigma"] <= 1e-3


def test_files_name_no_path_of_this_machine(exported: publish.ExportReport) -> None:
    content = (exported.folder / "model.onnx").read_bytes()
    assert b"stack_trace" not in content
    assert str(Path(__file__).resolve().parents[1]).encode() not in content


def test_both_files_answer_as_the_eager_network(trained: TrainedNetwork, exported: publish.ExportReport) -> None:
    model = deploy_model(trained)
    with torch.no_grad():
        logits = trained.model(trained.preprocess(torch.from_numpy(IMAGES[0])[None]))
        mask, confidence = model(torch.from_numpy(IMAGES[0])[None])
    full = nn.functional.interpolate(logits, SIZE, mode="bilinear", align_corners=trained.model.align_corners)
    assert torch.equal(mask, full.argmax(1).to(torch.uint8))
    assert confidence.shape[1:] == logits.shape[2:]
    assert len(mask.unique()) > 1, "a constant mask would agree with anything"
    for opened in (
        open_onnx(exported.folder / "model.onnx"),
        open_torchscript(exported.folder / "model.torchscript.pt"),
    ):
        answer = opened(IMAGES[0])
        assert (answer.mask == mask[0].numpy()).mean() > 0.999
        assert np.abs(answer.confidence.astype(int) - confidence[0].numpy()).max() <= 1


def test_auxiliary_heads_are_not_in_the_files(trained: TrainedNetwork, exported: publish.ExportReport) -> None:
    assert any("train_only" in name for name in trained.model.state_dict()), "the control: the network has such heads"
    assert not any("train_only" in name for name in deploy_model(trained).state_dict())
    for name in exported.files:
        assert b"train_only" not in (exported.folder / name).read_bytes()
    stored = sum(int(np.prod(entry.dims)) for entry in onnx.load(exported.folder / "model.onnx").graph.initializer)
    assert stored < sum(tensor.numel() for tensor in trained.model.parameters())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "fast_scnn"])
def test_every_model_is_accepted(name: str, tmp_path: Path) -> None:
    size = (64, 128)
    report = export_run(trained_network(name, size), structured(2, size), tmp_path / "export", BOTH, {})
    assert report.passed
    assert model_files(tmp_path) == [str(tmp_path / "export" / file) for file in ("model.onnx", "model.torchscript.pt")]


# Refusal: the conversion is given another model than the reference


class Swapped(nn.Module):
    """A preprocessing that sees BGR."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image.flip(-1))


def bgr(model: DeployModel) -> None:
    model.preprocess = Swapped(model.preprocess)


def no_normalisation(model: DeployModel) -> None:
    model.preprocess = Preprocess((0.0,) * 3, (1.0,) * 3)


def half_mean_and_std(model: DeployModel) -> None:
    model.preprocess = Preprocess((0.5,) * 3, (0.5,) * 3)


def align_corners_flipped(model: DeployModel) -> None:
    model.align_corners = not model.align_corners


def one_weight_scaled(model: DeployModel) -> None:
    convolutions = [module for module in model.network.modules() if isinstance(module, nn.Conv2d)]
    convolutions[len(convolutions) // 2].weight.mul_(1.01)


def classes_permuted(model: DeployModel) -> None:
    for tensor in (model.network.classifier[3].weight, model.network.classifier[3].bias):
        tensor.copy_(tensor.roll(1, 0))


def batchnorm_in_training_mode(model: DeployModel) -> None:
    for module in model.network.detail.modules():
        module.training = True


def not_a_number(model: DeployModel) -> None:
    model.network.classifier.bias[0] = float("nan")


Fault = Callable[[DeployModel], None]
FAULTS: list[Fault] = [
    bgr,
    no_normalisation,
    half_mean_and_std,
    align_corners_flipped,
    one_weight_scaled,
    classes_permuted,
    batchnorm_in_training_mode,
]


def plant(monkeypatch: pytest.MonkeyPatch, name: str, fault: Fault, *, shipped_only: bool = False) -> None:
    """The conversion to `name` now works on a model with `fault`, or ships one with a correct probe beside it."""
    right = FORMATS[name].convert

    def wrong(model: DeployModel, size: Any, manifest: Any, shipped: Path, probe: Path) -> None:
        faulty = copy.deepcopy(model)
        fault(faulty)
        right(faulty, size, manifest, shipped, probe)
        if shipped_only:
            right(model, size, manifest, probe.with_name("unused"), probe)

    monkeypatch.setitem(FORMATS, name, dataclasses.replace(FORMATS[name], convert=wrong))


def failed_gates(run_dir: Path) -> set[str]:
    """Names of the gates that failed, from the report that a refusal leaves; there is no model file beside it."""
    assert model_files(run_dir) == []
    assert [path.name for path in run_dir.iterdir()] == ["export.rejected"]
    report = json.loads((run_dir / "export.rejected" / "verify_report.json").read_text())
    assert report["status"] == "rejected"
    return {gate[:2] for gates in report["gates"].values() for gate, entry in gates.items() if not entry["passed"]}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_refused(
    fault: Fault, trained: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "torchscript", fault)
    with pytest.raises(ExportMismatch, match=r"^EXPORT REJECTED: G2 logits differ by .* > 0.001 sigma") as caught:
        export_run(trained, IMAGES, tmp_path / "export", ["torchscript"], {}, names=NAMES)
    assert caught.value.exit_code == 4
    assert failed_gates(tmp_path) == {"G2", "G3"}
    assert len(list((tmp_path / "export.rejected").glob("worst_*.png"))) == 3


@pytest.mark.parametrize("fault", [bgr, one_weight_scaled], ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_refused_in_onnx(
    fault: Fault, tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "onnx", fault)
    with pytest.raises(ExportMismatch, match=r"in model\.onnx"):
        export_run(tiny, IMAGES, tmp_path / "export", BOTH, {}, names=NAMES)
    assert failed_gates(tmp_path) == {"G2", "G3"}


def test_a_fault_of_the_shipped_file_alone_is_seen_by_g3(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "torchscript", align_corners_flipped, shipped_only=True)
    line = r"^EXPORT REJECTED: G3 mask agreement \d\d\.\d\d % < 99.99 % \(worst: \w+, \d+ unexplained pixels\)"
    with pytest.raises(ExportMismatch, match=line):
        export_run(tiny, IMAGES, tmp_path / "export", ["torchscript"], {}, names=NAMES)
    assert failed_gates(tmp_path) == {"G3"}


def test_logits_that_are_no_numbers_are_refused(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "torchscript", not_a_number)
    with pytest.raises(ExportMismatch, match="G2 logits are NaN or infinite"):
        export_run(tiny, IMAGES, tmp_path / "export", ["torchscript"], {})
    assert "G2" in failed_gates(tmp_path)


def test_a_file_that_is_not_what_the_manifest_says_is_refused(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: DeployModel, size: Any, manifest: Any, shipped: Path, probe: Path) -> None:
        FORMATS["torchscript"].convert(model, size, {**manifest, "model": "another"}, shipped, probe)

    broken = dataclasses.replace(FORMATS["torchscript"], convert=wrong)
    monkeypatch.setattr(publish, "FORMATS", {"torchscript": broken})
    with pytest.raises(ExportMismatch, match=r"G1 integrity: manifest\.json inside the file is not the manifest"):
        export_run(tiny, IMAGES, tmp_path / "export", ["torchscript"], {})
    assert failed_gates(tmp_path) == {"G1"}


@pytest.mark.parametrize("change", ["output name", "opset", "no manifest", "torn"])
def test_integrity_of_onnx_sees(change: str, exported: publish.ExportReport, tmp_path: Path) -> None:
    problems = FORMATS["onnx"].problems
    path = exported.folder / "model.onnx"
    assert problems(path, exported.manifest) == []
    model = onnx.load(path)
    if change == "output name":
        next(node for node in model.graph.node if "mask" in node.output).output[:] = ["classes"]
        model.graph.output[0].name = "classes"
    elif change == "opset":
        model.opset_import[0].version = 19
    elif change == "no manifest":
        del model.metadata_props[:]
    changed = tmp_path / "model.onnx"
    onnx.save(model, changed)
    if change == "torn":
        changed.write_bytes(changed.read_bytes()[:-1000])
    assert publish._problems("onnx", changed, exported.manifest)


def test_integrity_sees_a_second_file(exported: publish.ExportReport, tmp_path: Path) -> None:
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).write_bytes((exported.folder / "model.onnx").read_bytes())
    assert publish._problems("onnx", tmp_path / "model.onnx", exported.manifest) == [
        "needs more than one file: model.onnx, model.onnx.data"
    ]


# Gates at their limits

ONE = verify.Sigma(1.0, 1.0)


def answers(num_different: int, margin: float, *, pixels: int = 100_000) -> verify.Comparison:
    """Two classes, sigma 1: `num_different` pixels differ where the reference is `margin` from a tie."""
    logits = np.zeros((2, 1, pixels), dtype=np.float32)
    logits[0] = margin
    mask, changed = np.zeros((1, pixels), dtype=np.uint8), np.zeros((1, pixels), dtype=np.uint8)
    changed[0, :num_different] = 1
    confidence = np.zeros((1, 1), dtype=np.uint8)
    right = Answer(mask, confidence, logits)
    return verify.compare_answers(verify.Check("x", IMAGES[0]), right, right, Answer(changed, confidence))


@pytest.mark.parametrize(
    ("num_different", "margin", "passed"),
    [(0, 1.0, True), (9, 1.9e-3, True), (11, 1.9e-3, False), (1, 2.1e-3, False), (1, float("nan"), False)],
)
def test_mask_gate_at_its_limits(num_different: int, margin: float, passed: bool) -> None:
    assert verify.gate_mask([answers(num_different, margin)], ONE).passed is passed


def test_mask_gate_looks_at_every_image() -> None:
    small = answers(2, 0.0, pixels=1000)
    assert verify.gate_mask([answers(0, 1.0), answers(1, 0.0, pixels=1000)], ONE).passed
    result = verify.gate_mask([answers(0, 1.0), small], ONE)
    assert not result.passed
    assert "99.80 % < 99.9 %" in result.message


def test_mask_gate_sees_confidence() -> None:
    entry = answers(0, 1.0)
    assert verify.gate_mask([dataclasses.replace(entry, confidence_difference=1)], ONE).passed
    assert not verify.gate_mask([dataclasses.replace(entry, confidence_difference=2)], ONE).passed


@pytest.mark.parametrize(
    ("difference", "sigma", "passed"),
    [(0.9e-3, 1.0, True), (1.1e-3, 1.0, False), (1.1e-3, 2.0, True), (float("inf"), 1.0, False), (0.0, 0.0, False)],
)
def test_logits_gate_at_its_limits(difference: float, sigma: float, passed: bool) -> None:
    entry = dataclasses.replace(answers(0, 1.0), logits_difference=difference)
    result = verify.gate_logits([entry], verify.Sigma(sigma, sigma))
    assert result.passed is passed
    json.dumps(result.figures, allow_nan=False)


def test_real_images_are_held_to_their_own_sigma() -> None:
    entry = dataclasses.replace(answers(1, 1.5e-3), logits_difference=0.9e-3)
    made = dataclasses.replace(entry, is_real=False)
    inflated = verify.Sigma(everything=1.0, real=0.5)
    for gate in (verify.gate_logits, verify.gate_mask):
        assert gate([made], inflated).passed
        assert not gate([entry], inflated).passed
        assert gate([entry], verify.Sigma(everything=1.0, real=9.0)).passed


def test_sigma_is_the_standard_deviation() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, (4, 1000)).astype(np.float32)
    moments = verify.Moments()
    for row in values:
        moments.add(row)
    assert moments.sigma == pytest.approx(values.std(), rel=1e-5)


# The folder


def test_an_older_export_is_replaced(tiny: TrainedNetwork, tmp_path: Path) -> None:
    for label in ("first", "second"):
        export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"], {"label": label})
        (tmp_path / "export" / label).touch()
    assert json.loads((tmp_path / "export" / "manifest.json").read_text())["label"] == "second"
    assert not (tmp_path / "export" / "first").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_refusal_leaves_the_older_export(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"], {})
    before = (tmp_path / "export" / "SHA256SUMS").read_bytes()
    with monkeypatch.context() as patch:
        plant(patch, "torchscript", bgr)
        with pytest.raises(ExportMismatch):
            export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"], {})
    assert (tmp_path / "export" / "SHA256SUMS").read_bytes() == before
    assert model_files(tmp_path / "export.rejected") == []
    export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"], {})
    assert [path.name for path in tmp_path.iterdir()] == ["export"], "a success takes the old refusal away"


@pytest.mark.parametrize("crash_in", ["compare", "_publish"])
def test_a_crash_leaves_no_model_file(
    crash_in: str, tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        assert model_files(tmp_path / "export.partial"), "the control: files were there when it crashed"
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, crash_in, crash)
    with pytest.raises(KeyboardInterrupt):
        export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"], {})
    assert list(tmp_path.iterdir()) == []


def test_the_older_export_survives_a_failing_rename(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_dir = tmp_path / "export"
    export_run(tiny, IMAGES[:1], out_dir, ["torchscript"], {"label": "first"})
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if source.name == "files":
            raise OSError("disk full")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="disk full"):
        export_run(tiny, IMAGES[:1], out_dir, ["torchscript"], {"label": "second"})
    assert json.loads((out_dir / "manifest.json").read_text())["label"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_kill_between_the_renames_is_mended(tiny: TrainedNetwork, tmp_path: Path) -> None:
    out_dir = tmp_path / "export"
    export_run(tiny, IMAGES[:1], out_dir, ["torchscript"], {})
    out_dir.rename(tmp_path / "export.old")
    publish._recover(out_dir)
    assert model_files(tmp_path) == [str(out_dir / "model.torchscript.pt")]


def test_a_folder_that_is_not_an_export_is_never_replaced(tiny: TrainedNetwork, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        export_run(tiny, IMAGES, tmp_path, ["torchscript"], {})
    assert (tmp_path / "thesis.txt").exists()


def test_what_torch_cannot_convert_is_an_export_error(
    tiny: TrainedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unconvertible(model: DeployModel) -> None:
        del model.network.classifier

    plant(monkeypatch, "torchscript", unconvertible)
    with pytest.raises(ExportError, match="could not convert") as caught:
        export_run(tiny, IMAGES[:1], tmp_path / "export", ["torchscript"], {})
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("images", "formats", "message"),
    [
        ([], ["onnx"], "export.images gave no image"),
        (IMAGES, [], "export.formats"),
        (IMAGES, ["tflite"], "export.formats"),
        ([IMAGES[0], IMAGES[1][:32]], ["onnx"], "check image image_000001"),
        ([IMAGES[0].astype(np.float32)], ["onnx"], "check image image_000000 is float32"),
    ],
)
def test_unusable_requests(
    images: list[np.ndarray], formats: list[str], message: str, tiny: TrainedNetwork, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        export_run(tiny, images, tmp_path / "export", formats, {})


# The check set and the command line


class FakeSamples:
    """`sizes[i]` is the (height, width) of image i."""

    def __init__(self, images: list[np.ndarray]) -> None:
        self.images = images
        self.classes = CLASSES

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        return f"scene_{index}"

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.images[index], np.zeros(self.images[index].shape[:2], dtype=np.uint8)


def test_check_images_are_spread_over_the_split() -> None:
    assert check_images(FakeSamples(IMAGES * 5), 4)[0] == ["scene_0", "scene_5", "scene_10", "scene_15"]
    assert len(check_images(FakeSamples(IMAGES), 100)[1]) == 4
    assert check_images(FakeSamples([IMAGES[0][:32], *IMAGES]), 5)[0] == [f"scene_{index}" for index in range(1, 5)]
    with pytest.raises(DataError, match="holds no image"):
        check_images(FakeSamples([]), 4)


@pytest.fixture
def _run_exists(tiny: TrainedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_network", lambda *_: tiny)
    monkeypatch.setattr(command, "open_samples", lambda *_: FakeSamples(IMAGES))


@pytest.mark.usefixtures("_run_exists")
def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"run={tmp_path}", "export.formats=[torchscript]", "export.images=2"]
    assert command.main(arguments) == 0
    assert "verified" in (tmp_path / "export" / "verify_report.md").read_text()
    assert "G3 mask" in capsys.readouterr().out
    plant(monkeypatch, "torchscript", bgr)
    assert command.main([*arguments, f"export.dir={tmp_path}/else/export"]) == 4
    assert failed_gates(tmp_path / "else") == {"G2", "G3"}
    assert capsys.readouterr().err.startswith("EXPORT REJECTED: ")


@pytest.mark.usefixtures("_run_exists")
@pytest.mark.parametrize(
    "argument", ["model.name=pidnet_s", "mean=0.5", "std=0.5", "data.classes=x.yaml", "export.formats=[x]", "which=it"]
)
def test_what_the_checkpoint_knows_cannot_be_given(
    argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([f"run={tmp_path}", argument]) == 2
    assert argument.partition("=")[0] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_run_is_a_usage_error(tmp_path: Path) -> None:
    assert command.main([]) == 2
    assert command.main([f"run={tmp_path / 'nothing'}"]) == 2
