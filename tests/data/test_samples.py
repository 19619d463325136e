"""Reading files: exact pixels, and every fault is reported with its file."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segpipe.cli.main import main as segpipe
from segpipe.data.readers import read_image, threaded
from segpipe.data.samples import class_pixels, open_samples
from segpipe.datasets.problems import problems, verify
from segpipe.errors import DataError
from segpipe.settings.groups import DataConfig

CAMVID_ROOT = Path(__file__).resolve().parents[3] / "shared" / "data" / "camvid"
CAMVID_TRAIN_PIXELS = [
    10682767, 14750079, 623349, 20076880, 2845085, 6166762, 743859, 714595, 3719877, 405385, 184967,
]  # fmt: skip
HEIGHT, WIDTH = 24, 32
TABLE = "names: [a, b, c]\npalette: [[0, 0, 0], [1, 1, 1], [2, 2, 2]]\nids: {0: a, 4: b, 7: c}\n"


def image_of(number: int, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    return np.random.Generator(np.random.Philox(number)).integers(
        0, 256, (*size, 3), np.uint8
    )


def mask_of(number: int, size: tuple[int, int] = (HEIGHT, WIDTH)) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(1000 + number))
    return np.array([0, 4, 7, 255], np.uint8)[generator.integers(0, 4, size)]


def write(path: Path, rgb_or_ids: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(
        str(path),
        np.ascontiguousarray(rgb_or_ids[..., ::-1])
        if rgb_or_ids.ndim == 3
        else rgb_or_ids,
    )


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """A sound folder data set: 3 training and 2 validation pairs."""
    for number in range(5):
        split = "train" if number < 3 else "val"
        write(tmp_path / f"images/{split}/frame{number}.png", image_of(number))
        write(tmp_path / f"masks/{split}/frame{number}.png", mask_of(number))
    (tmp_path / "classes.yaml").write_text(TABLE)
    return DataConfig(name="folder", root=str(tmp_path))


def found(data: DataConfig) -> list[str]:
    return list(problems(data, ["train", "val"]))


def truncate(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def test_folder_reads_rgb_and_train_ids(data: DataConfig) -> None:
    samples = open_samples(data, "train", seed=0)
    assert [samples.name(index) for index in range(len(samples))] == [
        "frame0",
        "frame1",
        "frame2",
    ]
    image, target = samples.read(1)
    assert np.array_equal(image, image_of(1))
    assert image.dtype == target.dtype == np.uint8
    lut = {0: 0, 4: 1, 7: 2, 255: 255}
    assert np.array_equal(target, np.vectorize(lut.get)(mask_of(1)))
    assert found(data) == []


def test_samples_are_picklable_and_small(data: DataConfig) -> None:
    samples = open_samples(data, "val", seed=0)
    content = pickle.dumps(samples)
    assert len(content) < 4096
    assert np.array_equal(pickle.loads(content).read(0)[0], samples.read(0)[0])


def test_listed_splits_read_the_same_pairs(data: DataConfig, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    for number in range(5):
        write(flat / f"images/frame{number}.png", image_of(number))
        write(flat / f"masks/frame{number}.png", mask_of(number))
    (flat / "train.txt").write_text("frame2\nframe0\n\nframe1\n")
    (flat / "val.txt").write_text("frame3\nframe4\n")
    (flat / "classes.yaml").write_text(TABLE)
    listed = DataConfig(name="folder", root=str(flat))
    one, two = open_samples(data, "train", 0), open_samples(listed, "train", 0)
    assert all(
        np.array_equal(one.read(index)[1], two.read(index)[1]) for index in range(3)
    )
    assert len(two) == 3
    assert found(listed) == []
    (flat / "val.txt").write_text("frame3\nframe3\nfrme4\n")
    assert any("val.txt lists frame3 2 times" in text for text in found(listed))
    assert any("val.txt lists frme4, but" in text for text in found(listed))


def test_jpeg_images_are_read(data: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "images/val/frame3.png").unlink()
    smooth = np.full((HEIGHT, WIDTH, 3), (200, 90, 20), np.uint8)
    write(tmp_path / "images/val/frame3.JPG", smooth)
    assert found(data) == []
    image = open_samples(data, "val", 0).read(0)[0].astype(int)
    assert np.abs(image - smooth).max() < 10


def names(data: DataConfig, split: str) -> list[str]:
    samples = open_samples(data, split, seed=0)
    return [samples.name(index) for index in range(len(samples))]


def test_a_sequence_that_is_held_out_moves_from_training_to_validation(
    tmp_path: Path,
) -> None:
    for split, stems in {
        "train": ["a_1", "a_2", "b_1", "c_1"],
        "val": ["a_3", "c_2", "c_1"],
    }.items():
        for stem in stems:
            write(tmp_path / split / f"{stem}.png", image_of(1))
            write(
                tmp_path / f"{split}annot" / f"{stem}.png",
                np.full((HEIGHT, WIDTH), len(stem), np.uint8),
            )
    data = DataConfig(name="camvid", root=str(tmp_path), hold_out="a")
    assert names(data, "train") == ["b_1", "c_1"]
    assert names(data, "val") == ["a_1", "a_2", "a_3"]
    assert (
        class_pixels(open_samples(data, "train", seed=0)).sum() == 2 * HEIGHT * WIDTH
    )  # not those of `a`
    assert names(replace(data, hold_out="c"), "val") == [
        "c_1",
        "c_1",
        "c_2",
    ]  # of both splits
    assert names(replace(data, sequence="_([123])", hold_out="1"), "train") == ["a_2"]
    assert names(replace(data, hold_out=""), "val") == [
        "a_3",
        "c_1",
        "c_2",
    ]  # the control
    with pytest.raises(
        DataError,
        match=r"no image belongs to that sequence.*a: 3, b: 1, c: 3\.",
    ):
        names(replace(data, hold_out="aa"), "train")
    with pytest.raises(DataError, match="training would have no image left"):
        names(replace(data, sequence=r"_", hold_out="_"), "train")
    with pytest.raises(DataError, match=r"data.sequence = '_\[9\]' does not match a_1"):
        names(replace(data, sequence="_[9]"), "train")


def test_class_pixels_counts_all_but_ignored(data: DataConfig) -> None:
    masks = np.stack([mask_of(number) for number in range(3)])
    counts = class_pixels(open_samples(data, "train", 0))
    assert counts.dtype == np.int64
    assert counts.tolist() == [int((masks == raw).sum()) for raw in (0, 4, 7)]


def break_root(root: Path) -> None:
    root.rename(root.parent / (root.name + "s"))


def break_split(root: Path) -> None:
    (root / "images/val").rename(root / "images/vall")


def break_empty(root: Path) -> None:
    for path in [*root.glob("images/val/*"), *root.glob("masks/val/*")]:
        path.unlink()


def break_colors(root: Path) -> None:
    write(root / "masks/train/frame1.png", image_of(1))


def break_depth(root: Path) -> None:
    write(root / "masks/train/frame1.png", image_of(1).astype(np.uint16))


def break_id(root: Path) -> None:
    write(
        root / "masks/train/frame1.png",
        np.where(mask_of(1) == 7, 9, mask_of(1)).astype(np.uint8),
    )


def break_byte(root: Path) -> None:
    path = root / "images/train/frame1.png"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def break_jpeg(root: Path) -> None:
    (root / "images/train/frame1.png").unlink()
    write(root / "images/train/frame1.jpg", image_of(1))
    truncate(root / "images/train/frame1.jpg", 0.6)


FAULTS = {
    "root": (break_root, ["does not exist. Nearest: "]),
    "split": (
        break_split,
        ["images/val does not exist. Nearest: ", "images/vall. Set data.root"],
    ),
    "table": (
        lambda root: (root / "classes.yaml").unlink(),
        ["classes.yaml does not exist"],
    ),
    "empty": (break_empty, ["images/val is empty"]),
    "no mask": (
        lambda root: (root / "masks/train/frame1.png").unlink(),
        ["images/train/frame1.png has no mask"],
    ),
    "no image": (
        lambda root: (root / "images/train/frame1.png").unlink(),
        ["masks/train/frame1.png has no image"],
    ),
    "twice": (
        lambda root: write(root / "images/val/frame3.jpg", image_of(3)),
        ["frame3.png have the same stem"],
    ),
    "size": (
        lambda root: write(root / "masks/train/frame1.png", mask_of(1, (12, 32))),
        ["images/train/frame1.png is 24x32", "masks/train/frame1.png is 12x32"],
    ),
    "colors": (break_colors, ["masks/train/frame1.png holds colors"]),
    "depth": (break_depth, ["masks/train/frame1.png cannot be a mask: 16 bits"]),
    "id": (
        break_id,
        [
            "masks/train/frame1.png has id 9",
            "table has 0, 4, 7, 255",
            "extend the table",
        ],
    ),
    "torn image": (
        lambda root: truncate(root / "images/train/frame1.png", 0.6),
        ["images/train/frame1.png is trunc"],
    ),
    "torn mask": (
        lambda root: truncate(root / "masks/train/frame1.png", 0.6),
        ["masks/train/frame1.png is trunc"],
    ),
    "torn head": (
        lambda root: truncate(root / "images/train/frame1.png", 0.005),
        ["images/train/frame1.png is"],
    ),
    "no bytes": (
        lambda root: truncate(root / "images/train/frame1.png", 0.0),
        ["images/train/frame1.png is empty"],
    ),
    "torn jpeg": (break_jpeg, ["images/train/frame1.jpg is truncated"]),
    "flipped bit": (break_byte, ["images/train/frame1.png is damaged"]),
    "text": (
        lambda root: (root / "images/train/frame1.png").write_text("not found"),
        ["neither PNG nor JPEG"],
    ),
}
NEEDS_PIXELS = {"id", "flipped bit"}


@pytest.mark.parametrize("mode", ["auto", "full", "headers"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_with_its_file(
    data: DataConfig, fault: str, mode: str
) -> None:
    data.verify = mode
    verify(data, {split: open_samples(data, split, 0) for split in ("train", "val")})
    damage, parts = FAULTS[fault]
    damage(Path(data.root))
    if mode == "headers" and fault in NEEDS_PIXELS:
        verify(
            data, {split: open_samples(data, split, 0) for split in ("train", "val")}
        )
        return
    with pytest.raises(DataError) as caught:
        verify(
            data, {split: open_samples(data, split, 0) for split in ("train", "val")}
        )
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert len(found(data)) == 1


@pytest.mark.parametrize(
    "fault", ["root", "split", "table", "empty", "no mask", "no image", "twice"]
)
def test_open_refuses_an_incomplete_split(data: DataConfig, fault: str) -> None:
    FAULTS[fault][0](Path(data.root))
    with pytest.raises(DataError):
        open_samples(data, "train" if fault.startswith("no") else "val", 0)


@pytest.mark.parametrize(
    "fault", ["size", "colors", "depth", "id", "torn image", "torn mask", "torn jpeg"]
)
def test_reading_refuses_a_faulty_sample(data: DataConfig, fault: str) -> None:
    FAULTS[fault][0](Path(data.root))
    samples = open_samples(data, "train", 0)
    with pytest.raises(DataError, match="frame1"):
        samples.read(1)


def test_problems_finds_all_in_one_pass(data: DataConfig) -> None:
    root = Path(data.root)
    break_id(root)
    truncate(root / "images/train/frame1.png", 0.6)
    (root / "masks/val/frame3.png").unlink()
    write(root / "masks/val/frame4.png", mask_of(4, (8, 8)))
    texts = found(data)
    assert len(texts) == 4
    for part in (
        "frame3.png has no mask",
        "frame4.png is 24x32",
        "frame1.png is truncated",
        "has id 9",
    ):
        assert sum(part in text for text in texts) == 1


def doctor(data: DataConfig, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = segpipe(["doctor", "data=folder", f"data.root={data.root}"])
    return code, capsys.readouterr().out


def test_doctor_prints_all_problems_at_once(
    data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = doctor(data, capsys)
    assert code == 0
    assert "train: 3 images of 24x32 (3)" in text
    share = 100 * float(
        np.mean(
            [
                (m == 4)[m != 255].mean()
                for m in [np.stack([mask_of(n) for n in range(3)])]
            ]
        )
    )
    assert f"{share:.2f}" in text
    break_id(Path(data.root))
    (Path(data.root) / "masks/val/frame3.png").unlink()
    code, text = doctor(data, capsys)
    assert code == 2
    for part in ("frame1.png has id 9", "frame3.png has no mask", "2 problems"):
        assert part in text


def test_doctor_names_a_split_without_a_labelled_pixel(
    data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (Path(data.root) / "masks/val").iterdir():
        write(path, np.full_like(mask_of(0), 255))
    code, text = doctor(data, capsys)
    assert code == 2
    assert "none of the 2 images of split val has a labelled pixel" in text


def test_every_cut_of_a_file_is_seen(tmp_path: Path) -> None:
    for suffix, end in ((".png", 1), (".jpg", 1)):
        path = tmp_path / f"whole{suffix}"
        write(path, image_of(0))
        read_image(str(path))
        content = path.read_bytes()
        for length in [*range(0, len(content) - end, 37), len(content) - 1]:
            path.write_bytes(content[:length])
            with pytest.raises(
                DataError, match="whole.* is truncated" if length > 8 else "whole"
            ):
                read_image(str(path))


def test_the_control_opencv_accepts_a_torn_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "torn.jpg"
    write(path, image_of(0))
    truncate(path, 0.6)
    assert (
        cv2.imread(str(path)) is not None
    )  # why readers.py checks the structure itself
    capfd.readouterr()


def test_progress_ends_at_its_total(data: DataConfig) -> None:
    calls: list[tuple[int, int]] = []
    assert (
        list(
            problems(
                data,
                ["train", "val"],
                progress=lambda done, total: calls.append((done, total)),
            )
        )
        == []
    )
    assert calls == [(3, 3), (2, 2)]  # train and val: each is one block


@pytest.mark.skipif(
    not CAMVID_ROOT.is_dir(), reason="the CamVid frames are not on this machine"
)
def test_camvid_has_the_published_counts() -> None:
    data = DataConfig(name="camvid", root=str(CAMVID_ROOT))
    train, val = open_samples(data, "train", 0), open_samples(data, "val", 0)
    assert (len(train), len(val)) == (367, 101)
    assert class_pixels(train).tolist() == CAMVID_TRAIN_PIXELS
    image, target = val.read(0)
    assert image.shape == (360, 480, 3)
    assert target.shape == (360, 480)
    assert found(data) == []


def test_no_thread_outlives_a_read_of_many_files() -> None:
    """A thread that is still ending may hold OpenCV's lock while a loader process is forked."""
    tasks = Path("/proc/self/task")
    before = set(tasks.iterdir())
    for _ in range(50):
        assert len(threaded(slow_flip, range(4))) == 4
        assert set(tasks.iterdir()) <= before


NOISE = np.zeros((8, 8, 3), np.uint8)


def slow_flip(number: int) -> Any:
    """So slow that threads are taken."""
    time.sleep(0.001)
    return cv2.flip(NOISE, number % 2)
