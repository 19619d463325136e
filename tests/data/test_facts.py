"""Files are read once, whatever the number of checks; what would spoil a run is refused before it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks import frames
from segpipe.data import facts
from segpipe.data.catalog import load_masks
from segpipe.data.facts import CACHE, facts_of
from segpipe.data.masks import read_target, settled
from segpipe.data.pack import Pack
from segpipe.data.pairs import Pair, scan
from segpipe.data.readers import read_image
from segpipe.data.samples import (
    check_labelled,
    check_scorable,
    class_pixels,
    image_sizes,
    open_samples,
)
from segpipe.datasets.problems import verify as verify_opened
from segpipe.errors import DataError
from segpipe.ledger import inputs
from segpipe.settings.groups import DataConfig

SPLITS = ("train", "val")
SIZE = (12, 10)


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*SIZE, 3), np.uint8)


def mask_of(number: int) -> np.ndarray:
    return np.random.default_rng(90 + number).integers(0, 3, SIZE).astype(np.uint8)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    root = tmp_path / "set"
    for number in range(5):
        split = "train" if number < 3 else "val"
        for kind, content in (("images", pixels(number)), ("masks", mask_of(number))):
            path = root / kind / split / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), content)
    (root / "classes.yaml").write_text("names: [a, b, c]\n")
    time.sleep(0.06)  # facts of younger files are not kept
    return DataConfig(name="folder", root=str(root))


def verify(data: DataConfig, splits: Sequence[str]) -> None:
    """All checks of splits, opened for them."""
    verify_opened(data, {split: open_samples(data, split, 0) for split in splits})


def start(data: DataConfig) -> list[int]:
    """What a run asks before its first step."""
    verify(data, SPLITS)
    for split in SPLITS:
        image_sizes(open_samples(data, split, 0))
    train = open_samples(data, "train", 0)
    check_labelled(train)
    return class_pixels(train).tolist()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is read, as a whole or its header."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> None:
        read = getattr(facts, name)

        def count(path: str) -> object:
            counts[path] += 1
            return read(path)

        monkeypatch.setattr(facts, name, count)

    for name in ("read_header", "read_file"):
        counted(name)
    return counts


def test_each_file_is_read_once_whatever_is_asked(
    data: DataConfig, reads: Counter[str]
) -> None:
    found = start(data)
    assert (
        found == np.bincount(np.stack([mask_of(n) for n in range(3)]).ravel()).tolist()
    )
    assert len(reads) == 10
    # The first mask of a split says of which kind all are.
    assert reads.total() == 12
    assert start(data) == found
    assert reads.total() == 12


def test_the_next_process_reads_only_what_changed(
    data: DataConfig, reads: Counter[str]
) -> None:
    start(data)
    facts_of.cache_clear()
    reads.clear()
    start(data)
    assert not reads
    path = Path(data.root) / "masks/train/1.png"
    cv2.imwrite(str(path), np.full(SIZE, 2, np.uint8))
    facts_of.cache_clear()
    assert class_pixels(open_samples(data, "train", 0)).tolist() == (
        np.bincount(
            np.concatenate([mask_of(0), mask_of(2), np.full(SIZE, 2)]).ravel()
        ).tolist()
    )
    assert reads.keys() == {str(path)}


def test_hashes_of_the_checks_are_those_of_the_files(data: DataConfig) -> None:
    start(data)
    facts_of.cache_clear()
    samples = open_samples(data, "train", 0)
    known = samples.facts.hashes(samples.inputs().values())
    assert len(known) == 6
    expected = inputs.hashes_of(inputs.inputs_of([samples]))
    assert all(
        expected[Path(path).relative_to(data.root).as_posix()] == digest
        for path, digest in known.items()
    )
    cv2.imwrite(f"{data.root}/masks/train/1.png", np.full(SIZE, 2, np.uint8))
    del known[f"{data.root}/masks/train/1.png"]
    assert samples.facts.hashes(samples.inputs().values()) == known


def test_what_a_refused_start_has_read_is_kept_and_written_once(
    data: DataConfig, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits of one folder share their facts: a large set is written once. A fault in the last file loses no other."""
    written = []
    write = facts.write_atomically

    def counted(path: Path, content: bytes) -> None:
        written.append(path)
        write(path, content)

    monkeypatch.setattr(facts, "write_atomically", counted)
    last = Path(data.root, "masks", "val", "4.png")
    whole = last.read_bytes()
    last.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"4\.png"):
        verify(data, SPLITS)
    assert written == [Path(data.root, CACHE)]
    last.write_bytes(whole)
    time.sleep(0.06)
    facts_of.cache_clear()
    reads.clear()
    verify(data, SPLITS)
    assert reads.keys() == {str(last)}


def test_a_damaged_jpeg_is_found_after_another_pair_was_refused(
    data: DataConfig,
) -> None:
    """It ends with the marker of an end, so only what the decoder says tells that the middle is missing."""
    root = Path(data.root)
    content = cv2.imencode(".jpg", pixels(1))[1].tobytes()
    image = root / "images/train/1.jpg"
    image.write_bytes(content[:-150] + b"\xff\xd9")
    image.with_suffix(".png").unlink()
    mask = root / "masks/train/0.png"
    whole = mask.read_bytes()
    cv2.imwrite(str(mask), mask_of(0)[1:])
    time.sleep(0.06)
    with pytest.raises(DataError, match=r"0\.png is 12x10, but its mask"):
        verify(data, SPLITS)
    mask.write_bytes(whole)
    facts_of.cache_clear()
    with pytest.raises(DataError, match=r"1\.jpg is damaged: the decoder reports"):
        verify(data, SPLITS)


def test_a_torn_cache_is_not_believed(data: DataConfig, reads: Counter[str]) -> None:
    found = start(data)
    cache = Path(data.root) / CACHE
    cache.write_bytes(cache.read_bytes()[:-9])
    facts_of.cache_clear()
    reads.clear()
    assert start(data) == found
    assert len(reads) == 10


def test_a_folder_that_is_read_only_stays_as_it_is(
    data: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: Counter[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path(data.root).chmod(0o555)
    start(data)
    assert not (Path(data.root) / CACHE).exists()
    facts_of.cache_clear()
    reads.clear()
    start(data)
    assert not reads


@pytest.mark.parametrize("suffix", [".jpe", ".jfif"])
def test_photos_of_other_suffixes_are_read(data: DataConfig, suffix: str) -> None:
    image = Path(data.root) / "images/train/1.png"
    content = cv2.imencode(".jpg", pixels(1))[1].tobytes()
    image.with_suffix(suffix).write_bytes(content)
    image.unlink()
    verify(data, SPLITS)
    assert len(open_samples(data, "train", 0)) == 3


@pytest.mark.parametrize("suffix", [".ppm", ".pnm", ".bmp"])
def test_pictures_without_loss_are_read_exactly(tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"a{suffix}")
    cv2.imwrite(path, pixels(0)[..., ::-1])
    assert np.array_equal(read_image(path), pixels(0))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_mask_may_be_a_pgm(tmp_path: Path, dtype: type) -> None:
    (tmp_path / "classes.yaml").write_text("names: [a, b, c]\n")
    path = str(tmp_path / "m.pgm")
    cv2.imwrite(path, mask_of(0).astype(dtype))
    table = settled(load_masks(tmp_path / "classes.yaml"), [path])
    assert np.array_equal(read_target(table, path), mask_of(0))


def test_a_mask_whose_values_pillow_would_scale_is_refused(tmp_path: Path) -> None:
    (tmp_path / "classes.yaml").write_text("names: [a, b, c]\n")
    path = tmp_path / "m.pgm"
    path.write_bytes(b"P5 3 1 2\n" + bytes([0, 1, 2]))
    with pytest.raises(DataError, match=r"a maximum other than 255.*PNG"):
        read_target(load_masks(tmp_path / "classes.yaml"), str(path))


def test_a_mask_in_black_and_white_is_refused(tmp_path: Path) -> None:
    """Its values are read as 0 and 255, those of a PNG of one bit as 0 and 1."""
    (tmp_path / "classes.yaml").write_text("names: [a, b, c]\n")
    path = tmp_path / "m.pbm"
    path.write_bytes(b"P4 8 1\n" + bytes([0b10100000]))
    with pytest.raises(DataError, match=r"a PBM are read as 0 and 255.*PNG"):
        read_target(load_masks(tmp_path / "classes.yaml"), str(path))


@pytest.mark.parametrize("name", ["1.exr", "1.jxl", "1.tga", "1.png ", "1"])
def test_pairs_of_kinds_that_nobody_reads_are_named(
    data: DataConfig, name: str
) -> None:
    for kind in ("images", "masks"):
        path = Path(data.root) / kind / "train/1.png"
        path.rename(path.with_name(name))
    faults = scan(data, "train").faults
    assert len(faults) == 2
    assert all(f"{name}'" in fault and "unknown formats" in fault for fault in faults)


def test_a_few_files_of_unknown_kinds_are_counted(
    data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        for kind in ("images", "masks"):
            path = Path(data.root) / kind / "train" / f"x{number}.png"
            path.write_bytes((Path(data.root) / kind / "train/1.png").read_bytes())
    folder = Path(data.root) / "images/train"
    for name in ("a.raw2", "b.png.gz", "LICENSE", "b.png.json", "b.tar.gz"):
        (folder / name).write_text("")
    verify(data, SPLITS)
    told = "has 2 files of unknown formats besides 43 images"
    assert told in capsys.readouterr().err


def test_a_pack_with_other_pixels_is_refused_at_the_start(data: DataConfig) -> None:
    """As if whoever wrote it had read other files, with every checksum right."""
    data.pack = "auto"
    samples = open_samples(data, "train", 0)
    for index in range(len(samples)):
        samples.read(index)
    verify(data, SPLITS)
    pack = Pack(str(Path(data.root) / ".segpipe-pack"), samples.pack.table)
    for path in (Path(data.root) / ".segpipe-pack").iterdir():
        path.unlink()
    for pair in samples.pairs:
        pack.read(Pair(*pair), lambda: (pixels(77), mask_of(1)))
    assert np.array_equal(open_samples(data, "train", 0).read(0)[0], pixels(77))
    with pytest.raises(DataError, match=r"has different pixels for \d than"):
        verify(data, SPLITS)


def check_val(data: DataConfig) -> None:
    val = open_samples(data, "val", 0)
    check_scorable(val, "val", val.classes.names)


def test_a_validation_without_a_label_is_refused(data: DataConfig) -> None:
    for path in (Path(data.root) / "masks/val").iterdir():
        cv2.imwrite(str(path), np.full(SIZE, 255, np.uint8))
    with pytest.raises(DataError, match="none of the 2 images of split val has a lab"):
        check_val(data)


@pytest.mark.parametrize("size", [(1, 1), (1, 500)])
def test_a_validation_image_that_no_network_can_read_is_refused(
    data: DataConfig, size: tuple[int, int]
) -> None:
    root = Path(data.root)
    cv2.imwrite(str(root / "images/val/3.png"), np.zeros((*size, 3), np.uint8))
    cv2.imwrite(str(root / "masks/val/3.png"), np.zeros(size, np.uint8))
    with pytest.raises(DataError, match=rf"3\.png of split val is {size[0]}x{size[1]}"):
        check_val(data)


def test_sizes_have_the_names_of_the_files_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "set"
    frames.write(root, 3, size=(8, 16), splits=("train", "val"))
    data = DataConfig(name="folder", root=str(root))
    expected = {
        path.relative_to(root).as_posix(): path.stat().st_size
        for path in root.rglob("*.*")
        if path.is_file() and ".segpipe-cache" not in path.parts
    }
    assert len(expected) == 13
    assert (
        inputs.sizes_of(
            inputs.inputs_of([open_samples(data, each, 0) for each in SPLITS])
        )
        == expected
    )
