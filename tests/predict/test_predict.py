"""`segpipe predict`: what is written for which sources, what is kept, what is refused, what an interrupt leaves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from artifacts import SIZE as TOY_SIZE
from artifacts import frame, toy_manifest, write_artifact, write_sums
from PIL import Image

import exports
from exports import SIZE, Tiny, structured, tiny_network, write_run
from runs import torch_restored
from segpipe.cli.main import main as segpipe
from segpipe.data.readers import read_image
from segpipe.data.samples import open_samples
from segpipe.errors import DataError, Interrupted
from segpipe.predict import job as job_module
from segpipe.predict.inference import Inference, segment
from segpipe.predict.job import find, names
from segpipe.predict.predictor import of_exported, of_network
from segpipe.train import checkpoint
from segpipe.train.checkpoint import load_network
from segpipe.train.metrics import confusion, miou

IMAGES = structured(3, SIZE, seed=5)


@pytest.fixture(scope="module", autouse=True)
def _tiny_networks() -> Iterator[None]:
    """Checkpoints of this file hold a network that converts in a moment."""
    with pytest.MonkeyPatch.context() as patch, torch_restored():
        patch.setattr(checkpoint, "build_model", lambda *_, **__: Tiny(10))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, _tiny_networks: None) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports, "SCENES", 4)
        return write_run(tmp_path_factory.mktemp("runs") / "scenes", tiny_network)


def write(path: Path, image: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    done, data = cv2.imencode(
        path.suffix, image[..., ::-1] if image.ndim == 3 else image
    )
    assert done
    path.write_bytes(data.tobytes())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of odd names and sizes."""
    for place, image in (
        ("one.png", IMAGES[0]),
        ("sub dir/straße 1.jpg", IMAGES[1]),
        ("sub dir/straße 1.png", IMAGES[2]),
        ("small.png", IMAGES[0][:33, :35]),
        ("grey.png", IMAGES[1][..., 0]),
    ):
        write(tmp_path / "images" / place, image)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    write(tmp_path / "images" / ".hidden.png", IMAGES[0])
    return tmp_path / "images"


def start(out: Path, *arguments: str) -> int:
    return segpipe(
        ["predict", f"out={out}", "compute.device=cpu", "compute.threads=1", *arguments]
    )


def ids_of(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def written(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def record(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "predictions.json").read_text()))


def whole(run: Path, path: Path) -> np.ndarray:
    network = load_network(run)
    pixels = torch.from_numpy(read_image(str(path)))[None]
    return segment(network.model, network.preprocess, pixels, Inference())[0].numpy()


def test_every_image_of_a_folder_gets_a_mask_and_an_overlay(
    run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = (
        folder / "answers"
    )  # inside the source: a second run must not predict its own overlays
    os.mkfifo(folder / "pipe.png")
    assert start(out, f"run={run}", f"source={folder}") == 0
    told = capsys.readouterr()
    assert told.err == "skipped files of other types: 1 .txt, 1 .png.\n", (
        "neither the hidden one nor outputs"
    )
    line = json.loads(told.out)
    assert (line["predicted"], line["kept"], line["images"], line["problems"]) == (
        5,
        0,
        5,
        0,
    )
    assert line["ema_digest"] == load_network(run).ema_digest
    first = written(out)
    assert {name for name in first if name.startswith("masks/")} == {
        "masks/one.png.png", "masks/small.png.png", "masks/grey.png.png",
        "masks/sub dir/straße 1.jpg.png", "masks/sub dir/straße 1.png.png",
    }  # fmt: skip
    network = load_network(run)
    for entry in record(out)["predictions"]:
        mask = Image.open(out / entry["mask"])
        ids = np.asarray(mask)
        assert mask.mode == "P"
        assert np.array(mask.getpalette()[:30]).reshape(-1, 3).tolist() == [
            list(c) for c in network.classes.palette
        ]
        if entry["source"] != "small.png":  # padded, see test_inference.py
            assert np.array_equal(ids, whole(run, folder / entry["source"]))
        counts = np.bincount(ids.ravel(), minlength=10) / ids.size
        assert list(entry["share"].values()) == pytest.approx(counts.tolist())
        assert (out / entry["overlay"]).is_file()
    assert record(out)["model"] == {"ema_digest": network.ema_digest, "step": 7}
    assert record(out)["complete"]
    assert sum(line["share"].values()) == pytest.approx(1, abs=1e-3)

    assert start(out, f"run={run}", f"source={folder}") == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["predicted"], line["kept"], line["images"]) == (0, 5, 0)
    assert written(out) == first


def test_an_overlay_shows_the_colors_of_the_classes(run: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "one.png", IMAGES[0])
    for name, *changes in (
        ("full", "alpha=1"),
        ("none", "alpha=0"),
        ("off", "overlay=false"),
    ):
        assert start(tmp_path / name, f"run={run}", f"source={path}", *changes) == 0
    network = load_network(run)
    full = np.asarray(Image.open(tmp_path / "full" / "overlays" / "one.jpg")).astype(
        int
    )
    colors = np.array(network.classes.palette)[whole(run, path)]
    assert np.abs(full - colors).mean() < 12  # of the JPEG
    plain = np.asarray(Image.open(tmp_path / "none" / "overlays" / "one.jpg")).astype(
        int
    )
    assert plain.shape == (*SIZE, 3)
    assert np.abs(plain - IMAGES[0]).mean() < 12
    assert not (tmp_path / "off" / "overlays").exists()


def test_bad_files_are_named_and_the_rest_is_predicted(
    run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.png").write_bytes((folder / "one.png").read_bytes()[:400])
    (folder / "empty.jpg").write_bytes(b"")
    cv2.imwrite(str(folder / "tiny.png"), np.zeros((8, 8, 3), np.uint8))
    (folder / "film.mp4").write_bytes(b"no film")
    out = folder.parent / "out"
    assert start(out, f"run={run}", f"source={folder}") == 2
    told = capsys.readouterr()
    assert [
        name
        for name in ("broken.png", "empty.jpg", "tiny.png", "film.mp4")
        if name not in told.err
    ] == []
    *problems, left_out = told.err.splitlines()
    assert left_out.startswith("skipped files of other types")
    assert json.loads(told.out)["problems"] == 4
    assert json.loads(told.out)["images"] == 5
    assert len(record(out)["predictions"]) == 5
    assert record(out)["problems"] == problems
    assert len(problems) == 4
    assert not record(out)["complete"]


def test_what_another_model_wrote_is_refused_unless_it_may_be_replaced(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    settings = (f"run={run}", f"source={folder}", "overlay=false")
    assert start(out, *settings) == 0
    before = written(out)
    assert start(out, *settings, "tta=[flip]") == 2
    assert "predictions of another model or other settings" in capsys.readouterr().err
    assert written(out) == before
    assert start(out, *settings, "tta=[flip]", "exists=replace") == 0
    assert record(out)["settings"]["tta"] == "flip"
    capsys.readouterr()

    write(folder / "one.png", IMAGES[2])  # the source changes
    assert start(out, *settings, "tta=[flip]") == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["predicted"], line["kept"]) == (1, 4)
    (out / "predictions.json").unlink()  # nobody knows any more what made the masks
    assert start(out, *settings, "tta=[flip]") == 2


def test_an_interrupt_leaves_whole_files_and_the_rest_for_the_next_time(
    run: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = (f"run={run}", f"source={folder}")
    assert start(tmp_path / "whole", *settings) == 0
    expected = written(tmp_path / "whole")
    put, done = job_module.write_mask, []

    def interrupted(*given: Any) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(given)
        put(*given)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(job_module, "write_mask", interrupted)
        assert start(out, *settings) == Interrupted.exit_code
    assert "2 of 5 sources are finished" in capsys.readouterr().err
    left = written(out)
    assert {
        name: data for name, data in left.items() if name != "predictions.json"
    }.items() <= expected.items()
    assert not record(out)["complete"]
    assert start(out, *settings) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["kept"] == 2
    assert written(out) == expected


def test_photos_are_turned_upright(run: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned by 90 degrees
    photo, out = tmp_path / "photo.png", tmp_path / "out"
    Image.fromarray(IMAGES[0]).save(photo, exif=exif)
    turned = np.ascontiguousarray(np.rot90(IMAGES[0], -1))
    plain = write(tmp_path / "plain.png", turned)
    assert start(out, f"run={run}", f"source={photo}", "overlay=false") == 0
    assert np.array_equal(ids_of(out / "masks" / "photo.png"), whole(run, plain))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("source={folder}",), "set exactly one"),
        (("run={run}", "artifact=x", "source={folder}"), "set exactly one"),
        (("run={run}", "source={folder}/nothing.png"), "does not exist"),
        (("run={run}", "source={folder}/*.gif"), "has no images or videos"),
        (("run={run}", "source={folder}/notes.txt"), "notes.txt has no images"),
        (
            ("run={run}", "source={folder}", "provider=Quantum"),
            "provider = Quantum, but run is set",
        ),
        (
            ("artifact=x", "source={folder}", "tta=[flip]"),
            "tta = ['flip'], but artifact is set",
        ),
        (("artifact=x", "source={folder}"), "x is not an exported folder"),
        (("run={run}", "source={folder}", "precision=int8"), "precision = int8"),
        (
            ("run={run}", "source={folder}", "out={folder}/one.png"),
            "one.png is a file, but a folder",
        ),
        (
            ("run={run}", "source={folder}", "out={folder}"),
            "or contains it, so results and sources would be mixed",
        ),
        (
            ("run={run}", "source={folder}/one.png", "out={folder}/.."),
            "or contains it",
        ),
        (("run={run}", "source={folder}/*.png", "out={folder}"), "or contains it"),
        (
            ("artifact={run}", "source={folder}"),
            "is not an exported folder",
        ),
        (
            ("run={run}", "source={folder}", "out={folder}/one.png/x"),
            "x cannot be written",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    run: Path,
    folder: Path,
    arguments: tuple[str, ...],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [
        argument.format(run=run, folder=folder)
        for argument in arguments
        if "compute" not in argument
    ]
    out = (
        []
        if any(argument.startswith("out=") for argument in given)
        else [f"out={folder}/out"]
    )
    assert segpipe(["predict", *given, *out]) == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1


def test_names_are_distinct_and_stay_near_the_source() -> None:
    assert names(["a.jpg", "b/a.jpg"]) == ["a", "b/a"]
    assert names(["a.jpg", "a.png", "b.png"]) == ["a.jpg", "a.png", "b.png"]
    assert names(["a.jpg", "a.jpg.png", "a.png"]) == ["a.jpg", "a.jpg.png", "a.png"]


def test_files_folders_and_patterns(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def places(given: str) -> list[str]:
        return [source.place for source in find(given, out)[0]]

    assert places(f"{folder}/sub dir/*.jpg") == ["straße 1.jpg"]
    assert places(f"{folder}/**/straße*") == [
        "sub dir/straße 1.jpg",
        "sub dir/straße 1.png",
    ]
    assert places(f"{folder}/s*") == [
        "small.png",
        "sub dir/straße 1.jpg",
        "sub dir/straße 1.png",
    ]
    assert places(str(folder / "one.png")) == ["one.png"]
    bracket = write(folder / "x[1].png", IMAGES[0])
    assert places(str(bracket)) == ["x[1].png"]
    (folder / "loop").symlink_to(folder)
    assert len(places(str(folder))) == 6
    with pytest.raises(DataError, match="has no images"):
        places(str(out.parent / "empty*"))


# The same inference in `segpipe evaluate`


def test_evaluate_takes_views_and_changes_nothing_without_them(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def scored(*arguments: str) -> dict[str, Any]:
        assert (
            segpipe(
                [
                    "evaluate",
                    f"run={run}",
                    "data.workers=0",
                    "compute.threads=1",
                    *arguments,
                ]
            )
            == 0
        )
        return dict(json.loads(capsys.readouterr().out))

    network = load_network(run)
    samples = open_samples(network.config.data, "val", 0)

    def by_hand(how: Inference) -> float:
        counts = torch.zeros(10, 10, dtype=torch.int64)
        for index in range(len(samples)):
            image, target = (
                torch.from_numpy(part)[None] for part in samples.read(index)
            )
            given = (network.model, network.preprocess, image)
            counts += confusion(segment(*given, how), target, 10)
        return miou(counts)

    plain = scored()
    assert plain["miou"] == by_hand(Inference())
    assert "tta" not in plain
    views = scored("tta=[flip,0.75]")
    assert views["miou"] == by_hand(Inference(True, (1.0, 0.75))) != plain["miou"]
    assert views["tta"] == "flip,0.75"


# Exported folders


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("toy") / "export")


def test_one_image_gets_ids_and_their_probability(run: Path, toy: Path) -> None:
    network = load_network(run)
    for how in (Inference(), Inference(flip=True)):
        predictor = of_network(network, torch.device("cpu"), how)
        ids, confidence = predictor.predict(IMAGES[0])
        assert confidence.shape == ids.shape == SIZE
        assert confidence.dtype == np.float32
        assert 0.1 <= confidence.min() < confidence.max() <= 1.00001
    logits = network.model(network.preprocess(torch.from_numpy(IMAGES[0])[None]))
    full = torch.nn.functional.interpolate(logits, SIZE, mode="bilinear").softmax(1)
    _, confidence = of_network(network, torch.device("cpu"), Inference()).predict(
        IMAGES[0]
    )
    assert np.abs(confidence - full.detach()[0].max(0).values.numpy()).max() < 1e-5
    exported = of_exported(toy)
    image = np.random.default_rng(1).integers(0, 190, (*TOY_SIZE, 3), dtype=np.uint8)
    image[..., 2] = 0  # of the toy file: no loops
    ids, confidence = exported.predict(image)
    assert confidence.shape == ids.shape == image.shape[:2]
    assert 0 <= confidence.min() < confidence.max() <= 1


def test_images_come_from_opencv_and_others_are_named(run: Path, toy: Path) -> None:
    """RGB made of its BGR by [..., ::-1] lies backwards in memory, and Pillow's may not be written.

    A float image would be answered with nonsense.
    """
    network = of_network(load_network(run), torch.device("cpu"), Inference())
    small = np.random.default_rng(1).integers(0, 190, (*TOY_SIZE, 3), dtype=np.uint8)
    small[..., 2] = 0  # of the toy file: no loops
    for predictor, image in ((network, IMAGES[0]), (of_exported(toy), small)):
        backwards = np.ascontiguousarray(image[..., ::-1])[..., ::-1]
        backwards.setflags(write=False)
        wanted = predictor.predict(image)
        read_only = image.copy()
        read_only.setflags(write=False)
        predictor.predict(read_only)  # a warning would be an error
        for found, right in zip(predictor.predict(backwards), wanted, strict=True):
            np.testing.assert_array_equal(found, right)
        for other in (image[..., 0], image / np.float32(255), image[..., [0, 1, 2, 2]]):
            with pytest.raises(DataError, match=r"but uint8 \(height, width, 3\)"):
                predictor.predict(other)


def test_images_of_other_sizes_are_named_and_the_rest_is_predicted(
    toy: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    height, width = TOY_SIZE
    for name, shape in (("large", (2 * height, width)), ("own", TOY_SIZE)):
        write(tmp_path / "in" / f"{name}.png", np.zeros((*shape, 3), np.uint8))
    where = (f"source={tmp_path / 'in'}", f"out={tmp_path / 'out'}", "overlay=false")
    assert segpipe(["predict", f"artifact={toy}", *where]) == 2
    told = capsys.readouterr().err
    assert f"large.png: an image of {2 * height}x{width}, but the file takes" in told
    assert [path.name for path in (tmp_path / "out" / "masks").iterdir()] == ["own.png"]
    video = tmp_path / "drive.avi"
    code = cv2.VideoWriter.fourcc(*"MJPG")
    writer = cv2.VideoWriter(str(video), code, 5.0, (width, 2 * height))
    writer.write(np.zeros((2 * height, width, 3), np.uint8))
    writer.release()
    where = (f"source={video}", f"out={tmp_path / 'film'}")
    assert segpipe(["predict", f"artifact={toy}", *where]) == 2
    assert f"drive.avi: an image of {2 * height}x{width}" in capsys.readouterr().err
    tiny = write(tmp_path / "tiny.png", np.zeros((7, 50, 3), np.uint8))
    assert start(tmp_path / "b", f"run={run}", f"source={tiny}") == 2
    assert "tiny.png: an image of 7x50 is too small" in capsys.readouterr().err


def test_an_export_that_is_not_verified_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = toy_manifest() | {"status": "UNVERIFIED_REAL_DATA"}
    folder = write_artifact(tmp_path / "export", manifest)
    path = write(tmp_path / "one.png", frame(0))
    where = (f"source={path}", f"out={tmp_path / 'out'}", "overlay=false")
    assert segpipe(["predict", f"artifact={folder}", *where]) == 0
    assert "has the status UNVERIFIED_REAL_DATA" in capsys.readouterr().err


def test_altered_folders_and_other_answers_are_refused(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "one.png", frame(0))
    altered = shutil.copytree(toy, tmp_path / "altered")
    (altered / "model.onnx").write_bytes((toy / "model.onnx").read_bytes()[:-1])
    assert (
        segpipe(
            ["predict", f"artifact={altered}", f"source={path}", f"out={tmp_path}/o"]
        )
        == 7
    )
    other = shutil.copytree(toy, tmp_path / "other")
    np.save(other / "golden" / "mask.npy", 1 - np.load(toy / "golden" / "mask.npy"))
    write_sums(other)
    assert (
        segpipe(["predict", f"artifact={other}", f"source={path}", f"out={tmp_path}/o"])
        == 4
    )
    assert not (tmp_path / "o" / "masks").exists()


def test_an_interrupt_while_a_frame_is_written_leaves_the_film(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame is in the file then, but nobody has counted it."""
    real = cv2.VideoWriter

    class Writer:  # no subclass: the garbage collector crashes in those of OpenCV
        fourcc = staticmethod(real.fourcc)

        def __init__(self) -> None:
            self.writer, self.number = real(), 0
            self.open, self.release = self.writer.open, self.writer.release

        def write(self, frame: np.ndarray) -> None:
            self.writer.write(frame)
            self.number += 1
            if self.number == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(cv2, "VideoWriter", Writer)
    interrupted = pytest.raises(KeyboardInterrupt)
    with job_module.film(tmp_path / "film.mp4", 10.0) as add, interrupted:
        for _ in range(4):
            add(np.zeros((64, 96, 3), np.uint8))
    capture = cv2.VideoCapture(str(tmp_path / "film.mp4"))
    assert capture.get(cv2.CAP_PROP_FRAME_COUNT) == 3
