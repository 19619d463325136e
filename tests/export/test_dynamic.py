"""Files that leave lengths open: what they promise is shown in three shapes, and a fault in one of them is refused."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from exports import (
    CLASSES,
    IMAGES,
    NAMES,
    SIZE,
    Tiny,
    export_run,
    structured,
    tiny_network,
    trained_network,
    write_run,
)
from segpipe.cli.main import main as segpipe
from segpipe.errors import ConfigError, ExportMismatch, IntegrityError
from segpipe.export import dataset, publish
from segpipe.export.artifact.manifest import in_file, schema_problems
from segpipe.export.artifact.place import write_sums
from segpipe.export.dataset import trials
from segpipe.export.graph import profiles
from segpipe.export.graph.formats import FORMATS
from segpipe.export.graph.network import DeployModel, deploy_model
from segpipe.export.graph.onnx_format import write_probe
from segpipe.export.graph.profiles import (
    dynamic_of,
    free_lengths,
    further_sizes,
    manifest_text,
)
from segpipe.models.layers import upsample_like
from segpipe.models.preprocess import Preprocess
from segpipe.models.resize import adaptive_avg_pool, pool_weights, traced_pool_weights
from segpipe.runtime import Segmenter, Status
from segpipe.runtime.artifact import Shapes, resolved
from segpipe.settings.check import check
from segpipe.settings.config import Config
from segpipe.settings.groups import ExportConfig
from segpipe.train import checkpoint
from segpipe.train.checkpoint import TrainedNetwork

FREE = free_lengths("hw", SIZE, 4)
SHAPES = ("", ", 32x144", ", 96x48")  # as the names of gates tell them
BATCHES = ("", ", batches of 2", ", batches of 3")


pytestmark = pytest.mark.usefixtures("quick_exports")


class Pooled(Tiny):
    """A network whose answers depend on a mean over the image and on every image of a batch alone.

    With `cells` the mean is a sum over so many: right for one size. With `mixes` it is over the batch as well.
    """

    cells = 0
    mixes = False

    def logits(self, image: torch.Tensor, *, aux: bool) -> dict[str, torch.Tensor]:
        x = self.body(image)
        mean = (
            x.sum((2, 3), keepdim=True) / self.cells
            if self.cells
            else x.mean((2, 3), keepdim=True)
        )
        return {
            "main": self.classifier(
                x + (mean.mean(0, keepdim=True) if self.mixes else mean)
            )
        }


class Deep(Tiny):
    """What networks have in them that depends on the size: a pool over few cells, and bins that do not divide it."""

    output_stride = 8

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 9, 8, 4), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.context = nn.Conv2d(8, 8, 9, 8, 4)
        self.pool = nn.Sequential(nn.AvgPool2d(5, 2, 2), nn.Conv2d(8, 8, 1))

    def logits(self, image: torch.Tensor, *, aux: bool) -> dict[str, torch.Tensor]:
        x = self.body(image)
        deep = self.context(x)
        deep = (
            deep
            + upsample_like(self.pool(deep), deep)
            + upsample_like(adaptive_avg_pool(deep, 3), deep)
        )
        return {"main": self.classifier(x + upsample_like(deep, x))}


def pooled_network() -> TrainedNetwork:
    return dataclasses.replace(tiny_network(), model=Pooled().eval())


def export(
    trained: TrainedNetwork,
    folder: Path,
    dynamic: str,
    formats: list[str],
    **settings: Any,
) -> publish.ExportReport:
    wanted = ExportConfig(dynamic=dynamic, **settings)
    return export_run(trained, IMAGES, folder, formats, names=NAMES, settings=wanted)


@pytest.fixture(scope="module")
def free_size(tmp_path_factory: pytest.TempPathFactory) -> publish.ExportReport:
    folder = tmp_path_factory.mktemp("hw") / "export"
    return export(
        pooled_network(), folder, "hw", ["onnx", "pt2"], precision=["fp32", "fp16"]
    )


@pytest.fixture(scope="module")
def free_batch(tmp_path_factory: pytest.TempPathFactory) -> publish.ExportReport:
    return export(
        pooled_network(),
        tmp_path_factory.mktemp("batch") / "export",
        "batch",
        list(FORMATS),
    )


def manifest_of(report: publish.ExportReport) -> dict[str, Any]:
    return dict(json.loads((report.folder / "manifest.json").read_text()))


# What is asked for


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dynamic": "both"}, "export.dynamic = 'both' is not one of none, batch, hw"),
        ({"dynamic": "hw"}, "has torchscript, whose trace keeps the size"),
        (
            {"dynamic": "hw", "formats": ["onnx"], "precision": ["fp32", "int8"]},
            "int8 is calibrated for one shape",
        ),
        (
            {"dynamic": "batch", "precision": ["fp32", "int8"]},
            "int8 is calibrated for one shape",
        ),
        (
            {"dynamic": "batch", "profile": "isaac"},
            "export.profile = isaac: the nodes of Isaac ROS take one shape",
        ),
    ],
)
def test_settings_that_cannot_work(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    settings = dataclasses.replace(ExportConfig(), **changes)
    with pytest.raises(ConfigError) as caught:
        check(Config(export=settings), world_size=1)
    assert told in str(caught.value)
    if settings.dynamic != "both":
        with pytest.raises(ConfigError) as caught:
            export_run(
                tiny_network(),
                IMAGES,
                tmp_path / "export",
                settings.formats,
                settings=settings,
            )
        assert told in str(caught.value)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dynamic", ["none", "batch", "hw"])
def test_settings_that_work(dynamic: str) -> None:
    check(
        Config(export=ExportConfig(dynamic=dynamic, formats=["onnx", "pt2"])),
        world_size=1,
    )


def test_lengths_go_opposite_ways_between_those_that_are_tried() -> None:
    found = free_lengths("hw", (360, 480), 8)
    assert found["height"] == {
        "exported": 360,
        "tried": [360, 176, 544],
        "multiple": 8,
        "min": 176,
        "max": 544,
    }
    assert found["width"] == {
        "exported": 480,
        "tried": [480, 720, 240],
        "multiple": 8,
        "min": 240,
        "max": 720,
    }
    assert further_sizes(found) == [(176, 720), (544, 240)]
    assert free_lengths("batch", (361, 481), 8).keys() == {"batch"}
    assert free_lengths("none", (361, 481), 8) == {}
    assert [
        dynamic_of(free_lengths(name, SIZE, 8)) for name in ("none", "batch", "hw")
    ] == ["none", "batch", "hw"]


@pytest.mark.parametrize(
    ("size", "near"),
    [
        ((60, 96), "64x96"),
        ((64, 98), "64x100"),
        ((56, 96), "64x96"),
        ((64, 32), "64x64"),
    ],
)
def test_sizes_from_which_nothing_can_be_tried(
    size: tuple[int, int], near: str, tmp_path: Path
) -> None:
    told = f"the images are {size[0]}x{size[1]}; it needs multiples of 4 from 64 up, .* of that split to {near}, see"
    with pytest.raises(ConfigError, match=told):
        export_run(
            tiny_network(),
            structured(1, size),
            tmp_path / "export",
            ["onnx"],
            settings=ExportConfig(dynamic="hw"),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_pooling_in_the_graph_has_the_bits_of_the_constant(real: Any) -> None:
    dtype = torch.from_numpy(np.zeros(1, real)).dtype
    for bins in (2, 3, 6):
        for num_in in range(1, 70):
            found = traced_pool_weights(
                num_in, bins, torch.device("cpu"), dtype
            ).numpy()
            assert np.array_equal(found, pool_weights(num_in, bins, real)), (
                num_in,
                bins,
            )


# Height and width


def gate_names(
    report: publish.ExportReport, name: str, shapes: tuple[str, ...]
) -> bool:
    """Whether G2 to G4 of the file have a verdict in each shape."""
    found = [gate.name for gate in report.gates[name]]
    needed = [
        f"{gate}{shape}"
        for shape in shapes
        for gate in ("G2 logits", "G3 mask", "G4 preprocessing")
    ]
    return found == ["G1 integrity", *needed, "latency"]


def test_a_free_size_is_judged_in_three_shapes(free_size: publish.ExportReport) -> None:
    files = {"model.onnx", "model.fp16.onnx", "model.pt2"}
    assert free_size.files.keys() == files
    assert all(gate_names(free_size, name, SHAPES) for name in files)
    manifest = manifest_of(free_size)
    assert manifest["io"]["free"] == FREE
    shapes = {
        entry["name"]: entry["shape"]
        for kind in ("inputs", "outputs")
        for entry in manifest["io"][kind]
    }
    assert shapes == {
        "image": [1, "height", "width", 3],
        "mask": [1, "height", "width"],
        "confidence": [1, "height/4", "width/4"],
    }
    figures = manifest["gates"]["model.onnx"]["G2 logits, 32x144"]
    assert figures["shape"] == "32x144"
    assert figures["max_sigma"] <= 1e-3
    text = (free_size.folder / "verify_report.md").read_text()
    assert "Run with height 64, 32, 96 and width 96, 144, 48, in this order." in text
    assert "| model.onnx | G3 mask, 96x48 | passed |" in text
    assert (
        "- `height`: multiples of 4 from 32 to 96"
        in (free_size.folder / "model_card.md").read_text()
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda io: io["free"].pop("width"),
        lambda io: io["free"]["height"].update(exported=62),
        lambda io: io["free"]["height"].update(multiple=0),
        lambda io: io["free"]["height"].pop("min"),
        lambda io: io["outputs"][0]["shape"].__setitem__(1, "depth"),
    ],
)
def test_a_manifest_that_tells_too_little_is_refused(
    change: Callable[[Any], Any], free_size: Any
) -> None:
    io = copy.deepcopy(free_size.manifest["io"])
    assert Shapes(io).exported == (*SIZE, 3)
    assert Shapes(io).describe() == "32 to 96 in steps of 4 x 48 to 144 in steps of 4"
    change(io)
    with pytest.raises((KeyError, ValueError, ArithmeticError)):
        Shapes(io)


def test_the_contract_of_the_manifest_knows_free_lengths(
    free_size: publish.ExportReport,
) -> None:
    manifest = manifest_of(free_size)
    assert schema_problems(manifest) == []
    manifest["io"]["inputs"][0]["shape"][1] = "rows"
    manifest["io"]["free"]["width"].pop("tried")
    assert [text.partition(":")[0] for text in schema_problems(manifest)] == [
        "manifest.io.free.width",
        "manifest.io.inputs[0].shape[1]",
    ]


def test_the_runtime_answers_every_size_that_fits(
    free_size: publish.ExportReport,
) -> None:
    segmenter = Segmenter.load(free_size.folder)
    model = deploy_model(pooled_network())
    for size in (SIZE, (32, 48), (96, 144), (60, 100), (32, 144), SIZE):
        (image,) = structured(1, size, seed=5)
        result = segmenter.infer(image)
        with torch.no_grad():
            mask, confidence = model(torch.from_numpy(image)[None])
        assert result.status is Status.OK, segmenter.last_error
        assert (result.mask == mask[0].numpy()).mean() > 0.999
        assert np.abs(result.confidence.astype(int) - confidence[0].numpy()).max() <= 1
        assert segmenter.infer(image // 40).mask.shape == size, (
            "a frame that fits is refused in its own size"
        )
    for shape in (
        (62, 96, 3),
        (64, 98, 3),
        (28, 96, 3),
        (64, 148, 3),
        (100, 96, 3),
        (64, 96),
        (64, 96, 4),
        (0, 0, 3),
    ):
        result = segmenter.infer(np.full(shape, 100, np.uint8))
        assert result.status is Status.BAD_SHAPE
        assert result.mask.shape == SIZE
        assert (result.mask == 255).all()
    image = structured(1, (60, 100), seed=6)[0]
    assert [segmenter.infer(image).status for _ in range(6)][-1] is Status.FROZEN


def test_two_conversions_are_equal_and_silent(
    free_size: publish.ExportReport, tmp_path: Path
) -> None:
    profile = dataclasses.replace(profiles.ROBOT, dynamic="hw")
    here = [
        str(place).encode()
        for place in (Path(__file__).resolve().parents[2], Path.home(), tmp_path)
    ]
    for name in ("onnx", "pt2"):
        shipped = tmp_path / FORMATS[name].file_name()
        manifest = in_file(free_size.manifest, "fp32")
        FORMATS[name].write(
            deploy_model(pooled_network(), profile=profile),
            SIZE,
            manifest,
            shipped,
            tmp_path / name,
        )
        content = shipped.read_bytes()
        assert content == (free_size.folder / shipped.name).read_bytes(), name
        assert not [place for place in here if place in content], name


def test_maps_of_few_cells_stay_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = dataclasses.replace(tiny_network(), model=Deep().eval())
    assert gate_names(
        export(deep, tmp_path / "a" / "export", "hw", ["onnx"]), "model.onnx", SHAPES
    )
    monkeypatch.setattr(profiles, "_LONG", SIZE)
    with pytest.raises(ExportMismatch):
        export(deep, tmp_path / "b" / "export", "hw", ["onnx"])


# The batch


def test_a_free_batch_is_judged_image_by_image(
    free_batch: publish.ExportReport,
) -> None:
    assert free_batch.files.keys() == {
        "model.onnx",
        "model.torchscript.pt",
        "model.pt2",
    }
    assert all(gate_names(free_batch, name, BATCHES) for name in free_batch.files)
    manifest = manifest_of(free_batch)
    assert manifest["io"]["inputs"][0]["shape"] == ["batch", *SIZE, 3]
    assert manifest["io"]["outputs"][1]["shape"] == ["batch", 16, 24]
    assert manifest["io"]["free"] == {
        "batch": {"exported": 1, "tried": [1, 2, 3], "multiple": 1, "min": 1}
    }
    segmenter = Segmenter.load(free_batch.folder)
    assert segmenter.infer(IMAGES[0]).status is Status.OK
    assert segmenter.infer(IMAGES[0][:60]).status is Status.BAD_SHAPE


def test_answers_come_in_the_order_of_the_images(
    free_batch: publish.ExportReport,
) -> None:
    for name, entry in free_batch.files.items():
        run = FORMATS[entry["format"]].open(
            free_batch.folder / name, deploy_model(tiny_network()).profile
        )
        assert isinstance(run, profiles.Runner)
        alone = [run(image).mask for image in IMAGES]
        assert len({mask.tobytes() for mask in alone}) == len(IMAGES), (
            "the control: the images differ"
        )
        for mask, answer in zip(alone, run.batch(IMAGES), strict=True):
            assert (mask == answer.mask).mean() > 0.999


@pytest.mark.parametrize("name", ["fast_scnn", "ddrnet23_slim", "pidnet_s"])
def test_the_pt2_file_of_a_real_network_takes_one_image_and_more(
    name: str, tmp_path: Path
) -> None:
    """torch.export demands more than one image of these, which the small networks above do not show."""
    trained = trained_network(name, SIZE)
    report = export(trained, tmp_path / "export", "batch", ["pt2"], images=2)
    assert gate_names(report, "model.pt2", BATCHES)
    module = torch.export.load(report.folder / "model.pt2").module()
    frames, model = torch.from_numpy(np.stack(IMAGES)), deploy_model(trained)
    with torch.no_grad():
        for number in (1, 2, 4):
            for found, wanted in zip(
                module(frames[:number]), model(frames[:number]), strict=True
            ):
                assert found.shape[0] == number
                assert (found == wanted).double().mean() > 0.999


# Faults that one shape does not show


def plant(
    patch: pytest.MonkeyPatch, name: str, change: Callable[[DeployModel], Any]
) -> None:
    """The conversion to `name` now works on a network that was changed."""
    right = FORMATS[name].convert

    def wrong(model: DeployModel, *given: Any) -> None:
        faulty = copy.deepcopy(model)
        change(faulty)
        right(faulty, *given)

    patch.setitem(FORMATS, name, dataclasses.replace(FORMATS[name], convert=wrong))


def mean_over_a_constant(model: DeployModel) -> None:
    model.network.cells = SIZE[0] * SIZE[1] // 16


def mean_over_the_batch(model: DeployModel) -> None:
    model.network.mixes = True


def failed_gates(run_dir: Path) -> set[str]:
    assert [path.name for path in run_dir.iterdir()] == ["export.rejected"]
    report = json.loads(
        (run_dir / "export.rejected" / "verify_report.json").read_text()
    )
    return {
        gate
        for gates in report["gates"].values()
        for gate, entry in gates.items()
        if not entry["passed"]
    }


@pytest.mark.parametrize(
    ("name", "dynamic", "fault", "shapes"),
    [
        ("pt2", "hw", mean_over_a_constant, SHAPES),
        ("torchscript", "batch", mean_over_the_batch, BATCHES),
    ],
    ids=lambda value: getattr(
        value, "__name__", value if isinstance(value, str) else ""
    ),
)
def test_a_fault_of_other_shapes_is_refused(
    name: str,
    dynamic: str,
    fault: Callable[[DeployModel], None],
    shapes: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, name, fault)
    with pytest.raises(
        ExportMismatch, match=r"^EXPORT REJECTED: G2 logits differ by .* > 0.001 sigma"
    ) as caught:
        export(pooled_network(), tmp_path / "export", dynamic, [name])
    assert caught.value.exit_code == 4
    failed = failed_gates(tmp_path)
    assert {f"G2 logits{shape}" for shape in shapes[1:]} <= failed
    assert all(gate.endswith(shapes[1:]) for gate in failed), (
        "in the exported shape there is nothing to see"
    )
    assert len(list((tmp_path / "export.rejected").glob("worst_*.png"))) == 3


def test_control_without_further_shapes_the_fault_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "pt2", mean_over_a_constant)
    monkeypatch.setattr(
        dataset, "trials", lambda free, checks: list(trials(free, checks))[:1]
    )
    assert export(pooled_network(), tmp_path / "export", "hw", ["pt2"]).passed


def constant_target(model: onnx.ModelProto) -> None:
    """Logits are brought to the size of the export, whatever the image's is."""
    resize = next(node for node in model.graph.node if "logits" in node.output)
    assert resize.op_type == "Resize"
    sizes = np.array([1, CLASSES.num_classes, *SIZE], np.int64)
    model.graph.initializer.append(numpy_helper.from_array(sizes, "constant_target"))
    resize.input[3] = "constant_target"


def edited(path: Path, fault: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(path)
    fault(model)
    onnx.save(model, path)


def test_a_constant_target_of_the_upsampling_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = FORMATS["onnx"].convert

    def wrong(
        model: DeployModel, size: Any, manifest: Any, shipped: Path, probe: Path
    ) -> None:
        right(model, size, manifest, shipped, probe)
        edited(shipped, constant_target)
        write_probe(shipped, probe)

    monkeypatch.setitem(
        FORMATS, "onnx", dataclasses.replace(FORMATS["onnx"], convert=wrong)
    )
    with pytest.raises(IntegrityError, match="G1 integrity"):
        export(tiny_network(), tmp_path / "export", "hw", ["onnx"])
    assert [path.name for path in tmp_path.iterdir()] == ["export.rejected"]


def test_a_length_that_the_converter_fixed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(
        monkeypatch,
        "onnx",
        lambda model: setattr(
            model, "profile", dataclasses.replace(model.profile, dynamic="none")
        ),
    )
    with pytest.raises(
        IntegrityError,
        match=r"G1 integrity: inputs = .*\[1, 64, 96, 3\].*, but .*'height'",
    ):
        export(tiny_network(), tmp_path / "export", "hw", ["onnx"])


# The command lines


@pytest.fixture
def run(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    def make(classes: Any) -> TrainedNetwork:
        return TrainedNetwork(
            Pooled(classes.num_classes).eval(),
            Preprocess(),
            Config(),
            classes,
            "4567",
            7,
        )

    monkeypatch.setattr(
        checkpoint, "build_model", lambda _, num_classes, *args: Pooled(num_classes)
    )
    return write_run(tmp_path_factory.mktemp("runs") / "scenes", make)


def sign(folder: Path, manifest: dict[str, Any] | None = None) -> None:
    """Manifest and checksums of what lies there, as a forger would write them."""
    manifest = manifest or json.loads((folder / "manifest.json").read_text())
    path = folder / "model.onnx"
    manifest["files"]["model.onnx"]["sha256"] = hashlib.sha256(
        path.read_bytes()
    ).hexdigest()
    (folder / "manifest.json").write_text(manifest_text(manifest))
    write_sums(folder)


def test_from_the_command_line_to_verify(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "export"
    few = ("export.images=2", "export.quality_images=4")
    asked = [f"run={run}", f"export.dir={folder}", "export.dynamic=hw", *few]
    assert segpipe(["export", *asked]) == 2
    assert "whose trace keeps the size" in capsys.readouterr().err
    assert segpipe(["export", *asked, "export.formats=[onnx]"]) == 0
    shown = [f"run={run}", f"artifact={folder}", *few]
    assert segpipe(["verify", *shown]) == 0
    out = capsys.readouterr().out
    assert "G2 logits, 32x144" in out
    assert "ARTIFACT" in out
    sound = json.loads((folder / "manifest.json").read_text())
    wider = copy.deepcopy(sound)
    wider["io"]["free"]["width"]["max"] = 960
    sign(folder, wider)
    assert segpipe(["verify", *shown]) == 7
    assert "manifest.json has io.free.width.max = 960" in capsys.readouterr().err
    edited(folder / "model.onnx", constant_target)
    sign(folder, sound)
    assert segpipe(["verify", *shown]) == 7
    assert "ARTIFACT REFUSED: G1 integrity" in capsys.readouterr().err


def test_axes_of_a_manifest_in_numbers() -> None:
    assert resolved([1, "height", "width/8", 3], {"height": 64, "width": 96}) == (
        1,
        64,
        12,
        3,
    )
