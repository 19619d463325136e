"""The exported folder: complete, the same every time, silent about the machine, and understood by its readers."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from jsonschema import Draft202012Validator

import runs
from exports import (
    CLASSES,
    IMAGES,
    NAMES,
    NUM_CLASSES,
    SIZE,
    export_run,
    structured,
    tiny_network,
)
from segpipe.errors import DataError, IntegrityError
from segpipe.export import publish
from segpipe.export.artifact.frame_statistics import frames_of
from segpipe.export.artifact.manifest import (
    SCHEMA,
    differences,
    origin_of,
    require_schema,
    schema_problems,
)
from segpipe.export.artifact.place import sums_problems, write_sums
from segpipe.export.dataset import spread
from segpipe.export.gates import judge
from segpipe.export.graph.formats import FORMATS, jit, quiet_torch
from segpipe.export.graph.network import DeployModel, manifest_text
from segpipe.export.graph.onnx_format import write_probe
from segpipe.export.verify_report import render
from segpipe.files import git_state
from segpipe.runtime import Segmenter, Status
from segpipe.runtime.__main__ import main as runtime
from segpipe.runtime.artifact import EXPORT_AGAIN, parse_manifest
from segpipe.train.checkpoint import load_network

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "manifest.json", "SHA256SUMS", "model.onnx", "model.torchscript.pt", "verify_report.json",
    "verify_report.md",
    "model_card.md", "golden/image.npy", "golden/mask.npy", "golden/confidence.npy", "golden/logits.npy",
    "golden/logits_index.npy", "golden/preprocess_input.npy", "golden/preprocess_output.npy", "ros/labels.yaml",
}  # fmt: skip
METRICS = {
    "split": "val",
    "miou": 0.25,
    "pixel_accuracy": float("nan"),
    "iou": {**dict.fromkeys(CLASSES.names, 0.25), "class_4": None},
    "absent": ["class_4"],
    "pixels": 1000,
}
TRAIN = structured(6, (40, 50), seed=3)


def export(folder: Path) -> publish.ExportReport:
    """Of the last checkpoint of a run, whose result.json has a commit and scores."""
    run = folder.parent / "run"
    run.mkdir()
    (run / "last.pt").write_bytes(b"weights")
    network = dataclasses.replace(tiny_network(), path=run / "last.pt")
    commit = {"commit": "0123456789abcdef", "dirty": False}
    write_result(run, git=commit, steps=network.config.train.steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "SECONDS", 0.0)
        train = iter(TRAIN)
        return export_run(
            network,
            IMAGES,
            folder,
            list(FORMATS),
            names=NAMES,
            train_images=train,
        )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("first") / "export").folder


@pytest.fixture(scope="module")
def again(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a process that has traced before, with other switches and in a folder of another name."""
    cudnn = torch.backends.cudnn
    switches = (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(
            ("deterministic", "benchmark", "allow_tf32"), switches, strict=True
        ):
            patch.setattr(cudnn, name, not value)
        folder = export(tmp_path_factory.mktemp("second") / "robot").folder
        assert (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32) == tuple(
            not value for value in switches
        )
    return folder


@pytest.fixture(scope="module")
def manifest(exported: Path) -> dict[str, Any]:
    return dict(json.loads((exported / "manifest.json").read_text()))


def listed(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    }


# The folder


def test_the_folder_is_complete(exported: Path) -> None:
    assert listed(exported) == FILES
    sums = dict(
        reversed(line.split("  "))
        for line in (exported / "SHA256SUMS").read_text().splitlines()
    )
    assert sums.keys() == FILES - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((exported / name).read_bytes()).hexdigest() == digest


CHANGING = ("created", "latency")  # keys of manifest.json and verify_report.json


def stable(folder: Path) -> dict[str, Any]:
    """Content of every file without what changes from export to export."""
    content: dict[str, Any] = {}
    for name in listed(folder):
        text = (folder / name).read_bytes()
        if name in ("manifest.json", "verify_report.json"):
            content[name] = {
                key: value
                for key, value in json.loads(text).items()
                if key not in CHANGING
            }
        elif name == "verify_report.md":
            head, _, latencies = text.partition(b"\n## Latency\n")
            assert b"| model.onnx |" in latencies
            content[name] = re.sub(
                rb"Created \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", b"", head
            )
        elif name == "SHA256SUMS":
            parts = ("manifest.json", "verify_report.json", "verify_report.md")
            content[name] = [
                line for line in text.decode().splitlines() if not line.endswith(parts)
            ]
        else:
            content[name] = text
    return content


def test_two_exports_differ_in_time_stamps_and_latencies_alone(
    exported: Path, again: Path
) -> None:
    first, second = stable(exported), stable(again)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
    changed = json.loads((again / "manifest.json").read_text())
    assert changed.keys() >= set(CHANGING)
    assert all(f"model.{suffix}" in first for suffix in ("onnx", "torchscript.pt"))


def test_every_other_difference_would_be_seen(exported: Path, tmp_path: Path) -> None:
    altered = tmp_path / "export"
    shutil.copytree(exported, altered)
    manifest = json.loads((altered / "manifest.json").read_text())
    manifest["source"]["seed"] += 1
    (altered / "manifest.json").write_text(json.dumps(manifest))
    (altered / "verify_report.md").write_text(
        (altered / "verify_report.md").read_text().replace("passed", "failed")
    )
    first, second = stable(exported), stable(altered)
    assert {name for name in first if first[name] != second[name]} == {
        "manifest.json",
        "verify_report.md",
    }


def test_checksums_name_every_difference(tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    for name in ("a", "b", "golden/c"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path)
    assert sums_problems(tmp_path) == []
    (tmp_path / "a").write_text("other")
    (tmp_path / "b").unlink()
    (tmp_path / "golden" / "d").write_text("d")
    assert sums_problems(tmp_path) == [
        "golden/d is not in SHA256SUMS",
        f"{tmp_path}/a has sha256 d9298a10d1b0..., but SHA256SUMS says ca978112ca1b...: it was altered or truncated. "
        f"{EXPORT_AGAIN}",
        f"{tmp_path}/b cannot be read: No such file or directory. {EXPORT_AGAIN}",
    ]
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  ../a\n")
    assert "has the line" in sums_problems(tmp_path)[0], "a name outside the folder"
    (tmp_path / "SHA256SUMS").unlink()
    assert "has no SHA256SUMS" in sums_problems(tmp_path)[0]


# The machine

PATHS = re.compile(
    rb"/(?:home|root|usr|opt|tmp|var|Users|private|mnt|proc)/[\w.]|[A-Z]:\\\\\w|site-packages"
)


def paths_in(path: Path) -> list[bytes]:
    """Absolute paths in a file, in the members of an archive too."""
    contents = [path.read_bytes()]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            contents += [archive.read(name) for name in archive.namelist()]
    here = [
        str(place).encode() for place in (ROOT, Path.home(), sys.prefix, path.parent)
    ]
    return [
        text
        for content in contents
        for text in [*PATHS.findall(content), *(p for p in here if p in content)]
    ]


def test_no_file_names_a_path_of_this_machine(exported: Path) -> None:
    for name in listed(exported):
        assert paths_in(exported / name) == [], name


def test_the_search_for_paths_finds_some(tmp_path: Path) -> None:
    with quiet_torch(), torch.no_grad():
        traced = jit.trace(
            DeployModel(tiny_network()),
            (torch.zeros((1, *SIZE, 3), dtype=torch.uint8),),
        )
        jit.save(traced, str(tmp_path / "plain.pt"))
    assert paths_in(tmp_path / "plain.pt")


def test_the_archive_is_whole_without_its_debug_records(exported: Path) -> None:
    with zipfile.ZipFile(exported / "model.torchscript.pt") as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    assert not any("debug" in name for name in names)
    assert len(names) == len(set(names))
    numbers = {
        int(number)
        for name in names
        for number in re.findall(r"___torch_mangle_(\d+)", name)
    }
    assert numbers == set(range(len(numbers)))
    assert numbers, "the control: a class occurs twice"


# The manifest


def test_the_manifest_keeps_its_contract(
    exported: Path, manifest: dict[str, Any]
) -> None:
    assert schema_problems(manifest) == []
    inside = json.loads(onnx.load(exported / "model.onnx").metadata_props[0].value)
    files = {"manifest.json": ""}
    with quiet_torch():
        jit.load(str(exported / "model.torchscript.pt"), _extra_files=files)
    assert json.loads(files["manifest.json"]) == inside
    assert schema_problems(inside) == []
    figures = {
        "status",
        "created",
        "check_images",
        "real_images",
        "sigma",
        "gates",
        "files",
        "latency",
    }
    assert inside == {
        key: value for key, value in manifest.items() if key not in figures
    }
    assert figures <= manifest.keys()


def test_old_readers_can_read_the_files(
    exported: Path, manifest: dict[str, Any]
) -> None:
    versions = {
        path.name: onnx.load(path).ir_version for path in exported.glob("*.onnx")
    }
    assert versions
    assert set(versions.values()) == {8}
    assert manifest["requires"] == {"onnxruntime": "1.15"}


def test_the_manifest_says_where_the_network_comes_from(
    exported: Path, manifest: dict[str, Any]
) -> None:
    source = manifest["source"]
    commit = {"commit": "0123456789abcdef", "dirty": False, "known_at": "train"}
    assert source["git"] == commit
    digest = hashlib.sha256(b"weights").hexdigest()
    assert source["checkpoint"] == {"file": "last.pt", "sha256": digest}
    assert (source["ema_digest"], source["seed"], source["step"]) == ("4567", 0, 7)
    assert manifest["metrics"] == {**METRICS, "pixel_accuracy": None}
    mask = manifest["io"]["outputs"][0]
    assert (mask["invalid"], mask["stride"]) == (255, 1)
    assert manifest["io"]["outputs"][1]["stride"] == 4
    assert manifest["latency"]["threads"] == 1
    for name in ("eager", "model.onnx", "model.torchscript.pt"):
        found = manifest["latency"]["files"][name]
        assert 0 < found["p50_ms"] <= found["p90_ms"] <= found["p99_ms"]
        assert found["n"] == 10
    for name, entry in manifest["files"].items():
        assert (
            entry["sha256"]
            == hashlib.sha256((exported / name).read_bytes()).hexdigest()
        )
        assert entry["precision"] == "fp32"
    assert manifest["gates"]["model.onnx"]["G3 mask"]["agreement"] >= 0.9999


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of the manifest: `value` at a dotted path; None takes the entry away."""

    def change(manifest: dict[str, Any]) -> None:
        *way, last = path.split(".")
        place: Any = manifest
        for key in way:
            place = place[int(key) if isinstance(place, list) else key]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "segpipe-export/1"),
        ("status", "rejected"),
        ("latency", None),
        ("source.git.commit", "main"),
        ("source.seed", "0"),
        ("source.seed", True),
        ("source.host", "robot"),
        ("classes.0.color", [1, 2]),
        ("classes.0.id", 255),
        ("metrics.miou", 25.0),
        ("metrics.iou.class_0", "good"),
        ("io.inputs.0.color_order", "BGR"),
        ("io.outputs.0.invalid", 0),
        ("precision", "fp8"),
        ("created", "yesterday"),
        ("gates.model", {"G1": {"passed": False, "message": ""}}),
        ("frame_limits.mean", None),
        ("frame_statistics.source", "elsewhere"),
        ("files", {}),
        ("versions.torch", "2.14.1\nARTIFACT verified: model.onnx in export"),
        ("versions.torch", "2.14.1\n"),
        ("class_table", "toy\x1b[2J"),
        ("calibration.temperature", 1000.0),
        ("calibration", {"method": "temperature", "temperature": 1.5}),
    ],
)
def test_a_broken_contract_is_seen(
    path: str, value: Any, manifest: dict[str, Any]
) -> None:
    broken = copy.deepcopy(manifest)
    put(path, value)(broken)
    found = schema_problems(broken)
    assert len(found) == 1
    assert path.rpartition(".")[2] in found[0] or path.startswith("gates")
    with pytest.raises(IntegrityError, match="G1 integrity: manifest"):
        require_schema(broken)


def test_every_required_entry_is_missed(manifest: dict[str, Any]) -> None:
    for name in json.loads(SCHEMA.read_text())["required"]:
        broken = {key: value for key, value in manifest.items() if key != name}
        assert schema_problems(broken) == [f"manifest: {name!r} is a required property"]


def test_the_schema_is_a_schema() -> None:
    schema = json.loads(SCHEMA.read_text())
    Draft202012Validator.check_schema(schema)
    known = set(Draft202012Validator.VALIDATORS) | {
        "$schema",
        "$id",
        "title",
        "$defs",
        "description",
    }
    pending = [schema]
    while pending:
        entry = pending.pop()
        assert entry.keys() <= known, "a misspelled keyword would check nothing"
        for key in ("properties", "$defs"):
            pending += entry.get(key, {}).values()
        pending += [
            entry[key]
            for key in ("items", "additionalProperties")
            if isinstance(entry.get(key), dict)
        ]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_manifest_has_finite_numbers(number: str) -> None:
    assert parse_manifest(b'{"image_agreement": 0.5}') == {"image_agreement": 0.5}
    with pytest.raises(ValueError, match=f"{number} is not a JSON number"):
        parse_manifest(f'{{"image_agreement": {number}}}'.encode())


def test_the_manifest_page_names_every_entry() -> None:
    text = (ROOT / "docs" / "manifest.md").read_text()
    for name in json.loads(SCHEMA.read_text())["properties"]:
        assert f"`{name}`" in text, name


# Golden answers and neighbours


def test_golden_answers_are_those_of_the_trained_network(exported: Path) -> None:
    golden = {
        path.stem: np.load(path, allow_pickle=False)
        for path in (exported / "golden").iterdir()
    }
    network = tiny_network()
    with torch.no_grad():
        mask, confidence, logits, _ = DeployModel(network).probe()(
            torch.from_numpy(IMAGES[1])[None]
        )
        patch = network.preprocess(torch.from_numpy(golden["preprocess_input"]))
    assert np.array_equal(golden["image"], np.stack(IMAGES[:2]))
    assert np.array_equal(golden["mask"][1], mask[0].numpy())
    assert np.array_equal(golden["confidence"][1], confidence[0].numpy())
    assert golden["logits"].shape == (64,)
    assert golden["logits"].dtype == np.float32
    second = golden["logits_index"][:, 0] == 1
    assert 10 < second.sum() < 54
    picked = logits[0].numpy()[tuple(golden["logits_index"][second, 1:].T)]
    np.testing.assert_allclose(golden["logits"][second], picked, rtol=1e-5)
    assert golden["preprocess_input"].shape == (1, 16, 16, 3)
    assert np.array_equal(golden["preprocess_output"], patch.numpy())


def test_labels_are_a_label_info_message(exported: Path) -> None:
    message = yaml.safe_load((exported / "ros" / "labels.yaml").read_text())
    assert message.keys() == {"header", "class_map", "threshold"}
    names = [*CLASSES.names, "no_answer"]
    ids = [*range(NUM_CLASSES), 255]
    assert message["class_map"] == [
        {"class_id": i, "class_name": n} for i, n in zip(ids, names, strict=True)
    ]
    odd = ['say "no": {x}', "straße # 1", "- yes", "null"]
    classes = [{"id": index, "name": name} for index, name in enumerate(odd)]
    text = render("labels.yaml", classes=classes)
    assert [entry["class_name"] for entry in yaml.safe_load(text)["class_map"]] == [
        *odd,
        "no_answer",
    ]


def test_the_card_tells_quality_source_and_limits(exported: Path) -> None:
    card = (exported / "model_card.md").read_text()
    assert "; weights 4567 (averaged: `ema_digest` of result.json)." in card
    for text in (
        "mIoU 25.00 % on the split val",
        "0123456789abcdef",
        "| 4 | class_4 | #c83780 | - |",
        "6 train images",
        "that are covered or torn.",  # too few images to tell up from down
    ):
        assert text in card, text


# The robot


def test_the_runtime_answers_as_the_trained_network(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segmenter = Segmenter.load(exported, deadline_ms=60_000)
    model = DeployModel(tiny_network())
    for image in IMAGES:
        result = segmenter.infer(image)
        with torch.no_grad():
            mask, confidence = model(torch.from_numpy(image)[None])
        assert result.status is Status.OK
        assert np.array_equal(result.mask, mask[0].numpy())
        assert np.abs(result.confidence.astype(int) - confidence[0].numpy()).max() <= 1
    assert segmenter.infer(IMAGES[0] // 40).status is Status.TOO_DARK
    assert segmenter.infer(255 - IMAGES[0] // 40).status is Status.SATURATED
    assert runtime(["selftest", str(exported)]) == 0
    assert f"{len(FILES) - 1} files as exported" in capsys.readouterr().out


def test_a_folder_that_the_runtime_refuses_is_never_published(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def converted_before(
        _model: Any, manifest: Any, shipped: Path, probe: Path
    ) -> None:
        model = onnx.load(exported / "model.onnx")
        onnx.helper.set_model_props(model, {"segpipe": manifest_text(manifest)})
        onnx.save(model, shipped)
        write_probe(shipped, probe)

    def wrong(*given: Any) -> None:
        write_golden(*given)
        path = given[-1] / "golden" / "mask.npy"
        np.save(path, (np.load(path) + 1) % NUM_CLASSES)

    write_golden = publish.write_golden
    monkeypatch.setitem(
        FORMATS, "onnx", dataclasses.replace(FORMATS["onnx"], convert=converted_before)
    )
    monkeypatch.setattr(judge, "SECONDS", 0.0)
    out_dir = tmp_path / "export"
    assert export_run(tiny_network(), IMAGES[:1], out_dir, ["onnx"]).passed
    monkeypatch.setattr(publish, "write_golden", wrong)
    shutil.rmtree(out_dir)
    line = (
        r"^EXPORT REJECTED: G1 integrity: export: on this machine "
        r"0\.000 % of a golden mask is equal .* in model\.onnx"
    )
    with pytest.raises(IntegrityError, match=line) as caught:
        export_run(tiny_network(), IMAGES[:1], out_dir, ["onnx"])
    assert caught.value.exit_code == 7
    assert [path.name for path in tmp_path.iterdir()] == ["export.rejected"]
    assert not list(tmp_path.rglob("*.onnx"))


# Frames and origin


def test_statistics_of_frames(manifest: dict[str, Any]) -> None:
    found = manifest["frame_statistics"]
    assert (found["source"], found["images"]) == ("train", 6)
    levels = [float(image.mean()) for image in TRAIN]
    assert found["quantiles"]["mean"] == pytest.approx(
        np.quantile(levels, (0.05, 0.5, 0.95)), abs=1.0
    )
    entries, frames = frames_of(IMAGES, None, IMAGES[0].shape)
    assert entries["frame_statistics"]["images"] == len(frames) == len(IMAGES)


def write_result(folder: Path, **entries: Any) -> None:
    content = {**METRICS, "ema_digest": "4567", **entries}
    (folder / "result.json").write_text(json.dumps(content))


def test_the_card_tells_how_many_training_images_were_looked_at(
    exported: Path,
) -> None:
    class Split:
        def __len__(self) -> int:
            return 249

        def read(self, index: int) -> tuple[Any, None]:
            return IMAGES[index // 125], None

    entries, frames = frames_of(IMAGES, spread(Split()), IMAGES[0].shape)
    assert (len(frames), frames[15] is IMAGES[0], frames[17] is IMAGES[1]) == (
        32,
        True,
        True,
    ), "not the first 32, which are all of one drive"
    manifest = json.loads((exported / "manifest.json").read_text())
    known = {**manifest, **entries}
    assert schema_problems(known) == []
    card = render("model_card.md", **known, caveat="")
    assert "like the 64 train images that were measured: their mean" in card
    assert list(differences(known, {**known, **entries})) == []
    other = copy.deepcopy(known)
    other["frame_statistics"]["images"] = 6
    other["frame_limits"]["mean"][1] += 1.0  # another decoder of JPEG
    other["frame_limits"]["lost_rows"][1] += 0.02
    assert list(differences(other, {**known, **entries})) == [
        f"manifest.json has frame_limits.lost_rows[1] = {other['frame_limits']['lost_rows'][1]}, but the checkpoint "
        f"and the data give {known['frame_limits']['lost_rows'][1]}",
        "manifest.json has frame_statistics.images = 6, but the checkpoint and the data give 64",
    ]


def test_origin_of_a_network(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_bytes(b"weights")
    network = dataclasses.replace(tiny_network(), path=path)
    assert origin_of(network)["metrics"] is None
    write_result(tmp_path)
    found = origin_of(network)
    assert found["checkpoint"] == {
        "file": "last.pt",
        "sha256": hashlib.sha256(b"weights").hexdigest(),
    }
    assert found["metrics"] is not None
    assert found["metrics"]["miou"] == 0.25
    best = origin_of(dataclasses.replace(network, ema_digest="89"))
    assert best["metrics"] is None, "result.json speaks of other weights"
    write_result(tmp_path, git={"commit": "abcdef0", "dirty": True})
    assert origin_of(network)["git"] == {
        "commit": "abcdef0",
        "dirty": True,
        "known_at": "train",
    }
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(DataError, match=r"result\.json is not valid JSON"):
        origin_of(network)


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({}, True),
        ({"steps": 60}, True),  # of a session before the run was made longer
        ({"steps": 120}, False),  # the best checkpoint of a run that is done
        ({"steps": 60, "stopped_early": True}, False),
    ],
)
def test_an_interrupted_run_is_told(
    result: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(result))
    path = tmp_path / "last.pt"
    path.write_bytes(b"weights")
    network = dataclasses.replace(tiny_network(), step=32, path=path)
    network.config.train.steps = 120
    wanted = (
        ["trained for 32 of 120 steps: the run was interrupted, or goes on"]
        if told
        else []
    )
    assert origin_of(network)["warnings"] == wanted
    assert origin_of(dataclasses.replace(network, step=120))["warnings"] == []


def test_origin_of_a_real_run(tmp_path: Path) -> None:
    assert runs.run(tmp_path / "run", "train.steps=1") == 0
    run = tmp_path / "run"
    (run / "best.pt").unlink(missing_ok=True)
    found = origin_of(load_network(run, "best"))
    assert found["checkpoint"] is not None
    assert found["checkpoint"]["file"] == "last.pt"
    shutil.copy(run / "last.pt", run / "best.pt")
    best = origin_of(load_network(run, "best"))
    assert best["checkpoint"] == {**found["checkpoint"], "file": "best.pt"}
    assert origin_of(load_network(run, "last")) == found
    told = runs.result(run)
    assert found["metrics"] is not None
    assert found["metrics"]["miou"] == told["miou"]
    here = git_state(ROOT)
    if here is None:
        pytest.skip("no commit is known here")
    assert told["git"]["commit"] == here["commit"]
    assert found["git"] is not None
    assert found["git"]["known_at"] == "train"
    assert found["git"]["commit"] == here["commit"]


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
    for key, value in (
        ("AUTHOR_NAME", "a"),
        ("AUTHOR_EMAIL", "a@b"),
        ("COMMITTER_NAME", "a"),
        ("COMMITTER_EMAIL", "a@b"),
    ):
        monkeypatch.setenv(f"GIT_{key}", value)
    (tmp_path / "file").write_text("1")
    for arguments in (
        ["init", "-q"],
        ["add", "file"],
        ["commit", "-q", "--no-gpg-sign", "-m", "first"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    clean = git_state(tmp_path)
    assert clean is not None
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"])
    assert clean == {"commit": clean["commit"], "dirty": False, "known_at": "export"}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {**clean, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
