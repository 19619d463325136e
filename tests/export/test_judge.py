"""The judge and its check set: every file passes the gates in order, and what stops one does not hide another.

A model file is an empty file here, and what it computes is a deploy model in memory: nothing is converted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exports import CLASSES, IMAGES, NAMES, NUM_CLASSES, SIZE, FakeSamples, tiny_network
from segpipe.errors import ConfigError, DataError
from segpipe.export.dataset import GateInputs, check_set, gather, spread
from segpipe.export.gates import judge
from segpipe.export.gates.comparison import Candidate
from segpipe.export.gates.controls import CONTROLS
from segpipe.export.graph import formats
from segpipe.export.graph.formats import FORMATS, ModelFile
from segpipe.export.graph.network import (
    Answer,
    DeployModel,
    Image,
    Run,
    run_eager,
)
from segpipe.export.verify_report import EAGER, ExportReport
from segpipe.settings.config import Config
from segpipe.settings.groups import ExportConfig

pytestmark = pytest.mark.usefixtures("quick_exports")
ANSWERS = ["G2", "G3", "G4"]
TRAINED = tiny_network()


class Shelf:
    """What each path computes and has wrong with it; takes the place of converters and loaders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[Path, Run] = {}
        self.faults: dict[Path, list[str]] = {}
        self.optimized: dict[Path, bool] = {}

    def open(
        self, path: Path, _: object, *, engine: str = "", optimize: bool = True
    ) -> Run:
        self.optimized[path] = optimize
        return self.runs[path]

    def file(
        self,
        kind: str = "onnx",
        precision: str = "fp32",
        fault: Callable[[DeployModel], None] = lambda model: None,
    ) -> ModelFile:
        """A file of the trained network with a fault in it."""
        path = self.folder / FORMATS[kind].file_name(precision)
        path.touch()
        model = DeployModel(TRAINED)
        fault(model)
        self.runs[path] = self.runs[path.with_suffix(".probe")] = run_eager(model)
        return ModelFile(kind, precision, path, path.with_suffix(".probe"), {})


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    made = Shelf(tmp_path)
    for name, kind in list(FORMATS.items()):
        monkeypatch.setitem(FORMATS, name, dataclasses.replace(
            kind,
            open=made.open,
            problems=lambda path, _: made.faults.get(path, []),
        ))  # fmt: skip
    monkeypatch.setattr(formats, "open_onnx", made.open)
    return made


def judged(
    *files: ModelFile, labelled: Any = None, **settings: Any
) -> tuple[ExportReport, dict[str, Any]]:
    classes = [{"name": name} for name in CLASSES.names]
    manifest = {
        "profile": "robot",
        "align_corners": False,
        "classes": classes,
    }
    report = ExportReport(Path("export"), manifest)
    inputs = GateInputs(
        check_set(IMAGES[:2], NAMES[:2]), labelled, ExportConfig(**settings)
    )
    return report, judge.judge(
        report, DeployModel(TRAINED), TRAINED.preprocess, files, inputs
    )


def gates(report: ExportReport, name: str) -> list[str]:
    return [gate.gate for gate in report.gates[name]]


def failures(report: ExportReport) -> list[tuple[str, str]]:
    return [(name, gate.gate) for name, gate in report.failed]


class Blind:
    """A file that answers `image` with class 0 and any other image as the network does."""

    def __init__(self, image: Image) -> None:
        self.image, self.right = image, run_eager(DeployModel(TRAINED))

    def __call__(self, image: Image) -> Answer:
        answer = self.right(image)
        return (
            answer._replace(mask=np.zeros_like(answer.mask))
            if np.array_equal(image, self.image)
            else answer
        )


def labelled(images: list[Image]) -> Any:
    """The images with the trained network's own answers as labels, so that its IoU is 1."""
    run = run_eager(DeployModel(TRAINED))
    return [(image, run(image).mask) for image in images]


def test_sound_files_pass_every_gate_in_order(shelf: Shelf) -> None:
    report, found = judged(
        shelf.file(), shelf.file("torchscript"), labelled=labelled(IMAGES)
    )
    assert report.passed, report.failed
    names = ["model.onnx", "model.torchscript.pt"]
    for name in names:
        assert gates(report, name) == ["G1", *ANSWERS, "G5", "latency"]
        assert [entry.name for entry in found[name]] == report.images
        assert report.gates[name][4].figures["miou_reference"] == pytest.approx(100)
    assert gates(report, EAGER) == ["G6"]
    assert list(found) == names
    copies = [
        f"{name} ({how})"
        for name in NAMES[:2]
        for how in ("dark", "blurred", "noisy", "shifted")
    ]
    made = ["constant_0", "constant_128", "constant_255", "noise", "checkerboard"]
    assert report.images == [*NAMES[:2], *copies, *made]
    assert report.real_images == 2
    assert set(report.latency) == {EAGER, *names}
    reference = run_eager(DeployModel(TRAINED))
    logits = np.stack(
        [reference(check.image).logits for check in check_set(IMAGES[:2], NAMES[:2])]
    )  # type: ignore[misc]
    assert report.sigma.everything == pytest.approx(
        logits.std(dtype=np.float64), rel=1e-5
    )
    assert report.sigma.real == pytest.approx(
        logits[:2].std(dtype=np.float64), rel=1e-5
    )


def test_without_labels_quality_is_not_judged_and_latency_is(shelf: Shelf) -> None:
    report, _ = judged(shelf.file())
    assert gates(report, "model.onnx") == ["G1", *ANSWERS, "latency"]


def test_the_latency_is_that_of_the_first_check_image(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Image] = []
    monkeypatch.setattr(
        judge,
        "measure",
        lambda runs, image: (
            seen.append(image)
            or {name: {"p50_ms": 1.0, "cpu_ms": 1.0} for name in runs}
        ),
    )
    judged(shelf.file())
    assert [np.array_equal(image, IMAGES[0]) for image in seen] == [True]


@pytest.mark.parametrize("fault", ["listed", "does not open", "no probe"])
def test_a_file_that_is_not_whole_is_refused_and_not_compared(
    shelf: Shelf, fault: str
) -> None:
    torn, good = shelf.file(), shelf.file("torchscript")
    if fault == "listed":
        shelf.faults[torn.path] = ["the manifest is missing"]
    else:
        del shelf.runs[torn.path if fault == "does not open" else torn.probe]
    report, found = judged(torn, good, labelled=labelled(IMAGES))
    assert failures(report) == [("model.onnx", "G1")]
    assert gates(report, "model.onnx") == ["G1"]
    assert (
        "the manifest is missing" if fault == "listed" else "KeyError"
    ) in report.gates["model.onnx"][0].message
    assert gates(report, "model.torchscript.pt") == ["G1", *ANSWERS], (
        "no quality and latency after a refusal"
    )
    assert list(found) == ["model.torchscript.pt"]
    assert report.latency == {}


def test_a_fault_is_named_at_its_file_and_gate(shelf: Shelf) -> None:
    report, found = judged(
        shelf.file(fault=CONTROLS["no_normalisation"]), shelf.file("torchscript")
    )
    assert {name for name, _ in failures(report)} == {"model.onnx"}
    assert {gate for _, gate in failures(report)} == set(ANSWERS)
    assert report.latency == {}
    assert len(found["model.onnx"]) == len(report.images)


@pytest.mark.parametrize("role", ["probe", "path"])
def test_logits_come_from_the_probe_and_masks_from_the_shipped_file(
    shelf: Shelf, role: str
) -> None:
    file = shelf.file()
    wrong = DeployModel(TRAINED)
    CONTROLS["no_normalisation"](wrong)
    shelf.runs[getattr(file, role)] = run_eager(wrong)
    report, _ = judged(file)
    assert failures(report) == [
        ("model.onnx", gate) for gate in (["G2", "G4"] if role == "probe" else ["G3"])
    ]


def test_a_file_that_fails_on_an_image_has_one_finding_of_integrity_more(
    shelf: Shelf,
) -> None:
    def torn(image: Image) -> Answer:
        raise RuntimeError("out of shape")

    file = shelf.file()
    shelf.runs[file.path] = torn
    report, _ = judged(file)
    assert gates(report, "model.onnx") == ["G1", "G1"]
    assert failures(report) == [("model.onnx", "G1")]
    assert "out of shape" in report.gates["model.onnx"][1].message


# --- the check set


def test_the_check_set_is_real_images_and_generated_ones_of_their_size() -> None:
    checks = check_set(IMAGES[:2], NAMES[:2])
    assert [(check.name, check.is_real) for check in checks[:2]] == [
        (name, True) for name in NAMES[:2]
    ]
    assert all(
        check.image is image
        for check, image in zip(checks[:2], IMAGES[:2], strict=True)
    )
    made = {check.name: check.image for check in checks[2:] if not check.is_scene}
    assert not any(check.is_real for check in checks[2:])
    assert {(image.shape, image.dtype) for image in made.values()} == {
        ((*SIZE, 3), np.dtype(np.uint8))
    }
    for level in (0, 128, 255):
        assert (made[f"constant_{level}"] == level).all()
    assert len(np.unique(made["noise"])) == 256
    assert int(made["noise"].sum()) == 2353661, "the same in every export"
    board = made["checkerboard"]
    assert sorted(np.unique(board)) == [0, 255]
    assert (board == board[..., :1]).all()
    assert [
        board[0, 0, 0],
        board[7, 7, 0],
        board[0, 8, 0],
        board[8, 0, 0],
        board[8, 8, 0],
    ] == [0, 0, 255, 255, 0]
    assert board.mean() == 127.5
    alone = check_set([], [], (16, 24))
    assert [check.image.shape for check in alone] == [(16, 24, 3)] * 5
    copies = {
        check.name: check.image.astype(int) for check in checks[2:] if check.is_scene
    }
    assert list(copies)[:4] == [
        f"{NAMES[0]} ({how})" for how in ("dark", "blurred", "noisy", "shifted")
    ]
    assert len(copies) == 8
    image = IMAGES[0].astype(int)
    dark, blurred, noisy, shifted = (
        copies[f"{NAMES[0]} ({how})"] for how in ("dark", "blurred", "noisy", "shifted")
    )
    assert (dark == image // 4).all()
    assert (
        np.abs(np.diff(blurred, axis=0)).mean()
        < 0.6 * np.abs(np.diff(image, axis=0)).mean()
    )
    assert 8 < np.abs(noisy - image).mean() < 11  # of a standard deviation of 12 levels
    assert (shifted[4:, 6:] == image[:-4, :-6]).all()
    assert (
        len([check for check in check_set(IMAGES, NAMES) if check.is_scene]) == 4 + 8
    ), "of the first two images alone"


# --- precisions


def test_each_precision_is_held_to_its_own_limits(shelf: Shelf) -> None:
    def shifted(model: DeployModel) -> None:
        with torch.no_grad():
            model.network.classifier.bias.add_(1e-3)  # type: ignore[operator, union-attr]

    files = [
        shelf.file("onnx", precision, shifted) for precision in ("fp32", "fp16", "int8")
    ]
    report, _ = judged(*files, engines=["openvino", "openvino_bf16"])
    assert ("model.onnx", "G2") in failures(report)
    refused = {name for name, _ in failures(report)}
    assert refused == {"model.onnx", "model.onnx (openvino)"}
    assert gates(report, "model.onnx (openvino_bf16)") == ["G1", *ANSWERS]


def test_the_probe_of_an_int8_file_runs_node_by_node(shelf: Shelf) -> None:
    """Otherwise onnxruntime may show the normalised image after its quantisation, and G4 refuses a sound file."""
    files = [shelf.file("onnx", precision) for precision in ("fp32", "int8")]
    judged(*files)
    fp32, int8 = files
    asked = [
        shelf.optimized[path] for path in (fp32.path, fp32.probe, int8.path, int8.probe)
    ]
    assert asked == [True, True, True, False]


def test_quality_is_judged_on_the_labelled_images(shelf: Shelf) -> None:
    good, bad = shelf.file(), shelf.file("torchscript")
    shelf.runs[bad.path] = Blind(IMAGES[3])  # which is no check image
    report, _ = judged(good, bad, labelled=labelled(IMAGES))
    assert failures(report) == [("model.torchscript.pt", "G5")]
    assert report.latency == {}, "a file that was refused is not measured"
    figures = report.gates["model.torchscript.pt"][-1].figures
    assert (figures["miou_reference"], figures["images"]) == (
        pytest.approx(100),
        len(IMAGES),
    )
    assert figures["points"] < 0


def test_a_critical_class_is_the_users_choice(shelf: Shelf) -> None:
    """A file whose mIoU stays within the limit of int8 while one class falls by more than two points."""
    image = IMAGES[3]
    [(_, target)] = many = labelled([image])
    counts = np.bincount(target.ravel(), minlength=NUM_CLASSES)
    rare = int(np.where(counts > 0, counts, counts.max() + 1).argmin())
    file = shelf.file("onnx", "int8")
    right = shelf.runs[file.path]

    def misses(shown: Image) -> Answer:
        """Gives away 3 % of the pixels of the rare class."""
        answer = right(shown)
        mask = answer.mask.copy()
        if np.array_equal(shown, image):
            places = np.flatnonzero(mask.ravel() == rare)
            mask.ravel()[places[: max(1, int(0.03 * len(places)))]] = (
                rare + 1
            ) % NUM_CLASSES
        return answer._replace(mask=mask)

    shelf.runs[file.path] = misses
    assert judged(file, labelled=many)[0].passed
    report, _ = judged(file, labelled=many, critical_classes=[CLASSES.names[rare]])
    assert failures(report) == [("model.int8.onnx", "G5")]
    assert CLASSES.names[rare] in report.gates["model.int8.onnx"][-1].message


def timed(monkeypatch: pytest.MonkeyPatch, **ms: float) -> None:
    names = {
        "int8": "model.int8.onnx",
        "fp32": "model.onnx",
        "torch": "model.torchscript.pt",
        EAGER: EAGER,
    }
    times = {
        names[name]: {"p50_ms": value, "cpu_ms": value} for name, value in ms.items()
    }
    monkeypatch.setattr(
        judge, "measure", lambda runs, _: {name: times[name] for name in runs}
    )


def test_latency_is_held_to_the_budget_and_int8_to_the_fp32_onnx_file(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [shelf.file(), shelf.file("onnx", "int8"), shelf.file("torchscript")]
    timed(monkeypatch, eager=50.0, fp32=10.0, int8=9.5, torch=20.0)
    report, _ = judged(*files)
    assert failures(report) == [("model.int8.onnx", "latency")]
    assert "0.95 > 0.9 of the fp32 file's" in report.failed[0][1].message
    assert report.latency["model.onnx"] == {"p50_ms": 10.0, "cpu_ms": 10.0}
    (_, *others) = files
    assert judged(*others)[0].passed, (
        "without the fp32 file there is nothing to compare with"
    )
    timed(monkeypatch, eager=50.0, fp32=10.0, int8=8.0, torch=20.0)
    assert judged(*files)[0].passed
    assert failures(judged(*files, latency_budget_ms=15.0)[0]) == [
        ("model.torchscript.pt", "latency")
    ]


def test_int8_is_held_to_the_fp32_file_in_its_own_engine(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {}
    for precision in ("fp32", "int8"):
        file = shelf.file("onnx", precision)
        files |= {
            each.name: each
            for each in (file, dataclasses.replace(file, engine="openvino"))
        }
    times = {
        "model.onnx": 10.0,
        "model.int8.onnx": 8.0,
        "model.onnx (openvino)": 6.0,
        "model.int8.onnx (openvino)": 8.0,
    }
    monkeypatch.setattr(
        judge,
        "measure",
        lambda *_: {name: {"p50_ms": ms, "cpu_ms": ms} for name, ms in times.items()},
    )
    report = ExportReport(Path("export"), {}, gates={name: [] for name in files})
    model = DeployModel(TRAINED)
    run = run_eager(model)
    inputs = GateInputs(check_set(IMAGES[:1], NAMES[:1]), None, ExportConfig())
    candidates = {name: Candidate(run, run) for name in files}
    judge._latency(judge._Case(report, model, run, files, inputs, candidates))
    assert failures(report) == [("model.int8.onnx (openvino)", "latency")]
    assert "1.33 > 0.9 of the fp32 file's" in report.failed[0][1].message


# --- as the robot loads it


class Robot:
    """A segmenter that notes what it loads, and fails where it should."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: list[str] = []
        self.fails_at: object = None

    def load(self, folder: Path, *, precision: str) -> Robot:
        assert folder == self.folder
        self.loaded.append(precision)
        if precision == self.fails_at:
            raise RuntimeError(f"{self.folder}/model.onnx: {precision} does not run")
        return self


@pytest.mark.parametrize(
    ("profile", "fails_at", "failed"),
    [
        ("robot", None, []),
        ("robot", "int8", ["model.int8.onnx"]),
        ("isaac", "int8", []),
    ],
)
def test_every_onnx_file_runs_on_the_robot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    fails_at: object,
    failed: list[str],
) -> None:
    robot = Robot(tmp_path)
    robot.fails_at = fails_at
    monkeypatch.setattr(judge, "Segmenter", robot)
    entries = {
        "model.onnx": ("onnx", "fp32"),
        "model.int8.onnx": ("onnx", "int8"),
        "model.torchscript.pt": ("torchscript", "fp32"),
    }
    report = ExportReport(Path("runs/x/export"), {"profile": profile})
    report.files = {
        name: {"format": kind, "precision": precision}
        for name, (kind, precision) in entries.items()
    }
    sound, other = (judge.gate_integrity([]) for _ in range(2))
    report.gates = {name: [sound, other] for name in entries}
    judge.load_as_robot(report, tmp_path)
    assert [name for name, _ in report.failed] == failed
    assert robot.loaded == (["fp32", "int8"] if profile == "robot" else [])
    for name in failed:
        first, second = report.gates[name]
        assert (first.gate, first.passed, second) == ("G1", False, other)
        assert f"export/model.onnx: {fails_at} does not run" in first.message
        assert str(tmp_path) not in first.message, (
            "a temporary folder that will be gone"
        )


def check_names(
    images: list[np.ndarray], count: int, size: tuple[int, int] | None = None
) -> list[str]:
    config = Config()
    config.export.images = count
    found = gather(FakeSamples(images), config, size)  # type: ignore[arg-type]
    assert {check.image.shape[:2] for check in found.checks} == {found.size}
    return [check.name for check in found.checks if check.is_real]


def test_check_images_are_spread_over_the_split() -> None:
    assert check_names(IMAGES * 5, 4) == ["scene_0", "scene_5", "scene_10", "scene_15"]
    assert len(check_names(IMAGES, 100)) == 4
    small = IMAGES[0][:32]
    assert check_names([small, *IMAGES], 5) == [
        f"scene_{index}" for index in range(1, 5)
    ]
    mixed = [small, *IMAGES] * 4
    names = ["scene_1", "scene_6", "scene_11", "scene_16"]
    assert check_names(mixed, 4, SIZE) == names, "0, 5, 10 and 15 do not fit"
    assert len(check_names(mixed, 100, SIZE)) == 16
    with pytest.raises(DataError, match=r"has no image of 9x9 pixels .* among its 20"):
        check_names(mixed, 4, (9, 9))
    with pytest.raises(DataError, match="has no images"):
        check_names([], 4)


class Places:
    """A split whose images are their own numbers."""

    def __len__(self) -> int:
        return 10

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> tuple[np.ndarray, None]:
        return np.full((1, 1, 3), index, np.uint8), None


def test_images_are_spread_over_a_split() -> None:
    assert [int(image[0, 0, 0]) for image in spread(Places(), 4)] == [0, 2, 5, 7]
    assert len(list(spread(Places()))) == 10


def test_real_images_are_those_of_the_data_set() -> None:
    inputs = GateInputs(check_set(IMAGES[:2], NAMES[:2]), None, ExportConfig())
    assert len(inputs.real_images) == 2
    assert all(map(np.array_equal, inputs.real_images, IMAGES))


def test_without_a_data_set_the_size_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"export\.height = 0 and export\.width = 0"):
        gather(None, Config())
    assert gather(None, Config(), SIZE).size == SIZE
