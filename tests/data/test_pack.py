"""A pack delivers the pixels of the files or nothing: damaged, stale, torn, written by two, killed, or read-only."""

import multiprocessing
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from segpipe.cli.data_sets import pack
from segpipe.data import Sample
from segpipe.data import pack as pack_module
from segpipe.data.data_set import FileSamples
from segpipe.data.pack import AUTO, Pack
from segpipe.data.samples import open_samples
from segpipe.errors import ConfigError, DataError
from segpipe.run.report import predictor
from segpipe.settings.config import check, from_mapping
from segpipe.settings.groups import DataConfig

NUM = 4
FORK = multiprocessing.get_context("fork")


def write(root: Path, split: str, number: int, seed: int = 0) -> None:
    random = np.random.default_rng([seed, number])
    size = (8 + number, 13)
    for kind, pixels in (
        ("images", random.integers(0, 256, (*size, 3))),
        ("masks", random.integers(0, 3, size)),
    ):
        path = root / kind / split / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), pixels.astype(np.uint8))


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    for number in range(NUM):
        write(tmp_path / "set", "train", number)
    write(tmp_path / "set", "val", 9)
    image = tmp_path / "set" / "images" / "train" / "0.png"
    cv2.imwrite(str(image.with_suffix(".jpg")), cv2.imread(str(image)))
    image.unlink()
    (tmp_path / "set" / "classes.yaml").write_text("names: [a, b, c]\n")
    return DataConfig(name="folder", root=str(tmp_path / "set"), pack="auto")


def opened(data: DataConfig) -> FileSamples:
    """As another process would: nothing is known of the pack."""
    samples = open_samples(data, "train", 0)
    assert isinstance(samples, FileSamples)
    return samples


def read_all(samples: FileSamples) -> list[Sample]:
    return [samples.read(index) for index in range(len(samples))]


def same(found: list[Sample], expected: list[Sample]) -> bool:
    return all(
        np.array_equal(*parts)
        for pairs in zip(found, expected, strict=True)
        for parts in zip(*pairs, strict=True)
    )


def files(data: DataConfig) -> list[Path]:
    return sorted((Path(data.root) / AUTO).iterdir())


def use(samples: FileSamples) -> dict[str, int]:
    assert samples.pack is not None
    return dict(samples.pack.use())


def decoded(samples: FileSamples) -> list[Sample]:
    return [samples.decode(index) for index in range(len(samples))]


def test_packed_samples_are_those_of_the_files_and_no_file_is_decoded_again(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = opened(data)
    expected = decoded(samples)
    assert same(read_all(samples), expected)
    assert use(samples) == {"added": NUM}
    again = opened(data)
    monkeypatch.setattr(
        FileSamples, "decode", lambda self, index: pytest.fail("decoded again")
    )
    for _ in range(2):
        assert same(read_all(again), expected)
    assert use(again) == {"intact": NUM}
    for array in again.read(0):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_another_class_table_has_other_targets(data: DataConfig) -> None:
    read_all(opened(data))
    (Path(data.root) / "classes.yaml").write_text(
        "names: [a, b]\nids: {0: a, 1: b, 2: a}\n"
    )
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))
    assert samples.read(0)[1].max() == 1


def test_a_data_set_may_move_with_its_pack(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_all(opened(data))
    moved = os.rename(data.root, f"{data.root}_moved") or opened(
        replace(data, root=f"{data.root}_moved")
    )
    monkeypatch.setattr(
        FileSamples, "decode", lambda self, index: pytest.fail("decoded again")
    )
    assert same(read_all(moved), expected)


def test_a_changed_file_is_named_and_packed_again(
    data: DataConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [
        tuple(part.copy() for part in sample) for sample in read_all(opened(data))
    ]
    write(Path(data.root), "train", 2, seed=1)
    samples = opened(data)
    found = read_all(samples)
    assert same(found, decoded(samples))
    assert [
        np.array_equal(one[0], two[0]) for one, two in zip(found, before, strict=True)
    ] == [True, True, False, True]
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        f"{data.root}/images/train/2.png has changed since it was packed."
    )
    read_all(opened(data))
    assert capfd.readouterr().err == ""


def test_another_time_alone_decodes_nothing(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_all(opened(data))
    for path in Path(data.root).rglob("*.png"):
        os.utime(path, ns=(1, 1))
    monkeypatch.setattr(
        FileSamples, "decode", lambda self, index: pytest.fail("decoded again")
    )
    assert same(read_all(opened(data)), expected)


def test_a_mask_of_the_same_size_and_time_is_noticed(
    data: DataConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """As cp -p, touch -r, an archive, or a link to other masks leaves it."""
    path = Path(data.root) / "masks" / "train" / "1.bmp"
    pixels = cv2.imread(str(path.with_suffix(".png")), cv2.IMREAD_UNCHANGED)
    path.with_suffix(".png").unlink()
    cv2.imwrite(str(path), pixels)
    before = path.stat()
    read_all(opened(data))
    cv2.imwrite(str(path), (pixels + 1) % 3)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (
        before.st_size,
        before.st_mtime_ns,
    )
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))
    assert f"{path} has changed since it was packed" in capfd.readouterr().err


def test_a_file_that_changes_while_it_is_packed_is_not_packed(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pixels would be those before, its hash that of the new content."""
    digest = pack_module.file_sha256

    def changed(path: Path) -> str:
        write(Path(data.root), "train", 1, seed=5)
        return digest(path)

    samples = opened(data)
    samples.read(2)
    kept = files(data)
    with monkeypatch.context() as patch:
        patch.setattr(pack_module, "file_sha256", changed)
        samples.read(1)
    assert files(data) == kept
    samples.read(1)
    assert len(files(data)) == len(kept) + 1, "packed now, not before"
    assert same([opened(data).read(1)], [decoded(opened(data))[1]])


def test_a_pack_that_is_deleted_while_it_is_filled_stops_nothing(
    data: DataConfig,
) -> None:
    samples = opened(data)
    samples.read(0)
    shutil.rmtree(Path(data.root) / AUTO)
    assert same(read_all(samples), decoded(samples))


def test_whatever_is_damaged_the_pixels_are_right(
    data: DataConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = decoded(opened(data))
    read_all(opened(data))
    folder, random = Path(data.root) / AUTO, np.random.default_rng(0)
    for number in range(100):
        path = files(data)[number % NUM]
        content = bytearray(path.read_bytes())
        page = number % 2  # the entry, or the pixels
        place = int(random.integers(*((0, 600) if page else (4096, len(content)))))
        if number % 10 < 6:
            content[place] ^= 1 << int(random.integers(8))
        elif number % 10 < 8:
            del content[place:]
        else:
            content[place : place + 40] = bytes([7]) * len(content[place : place + 40])
        path.write_bytes(content)
        assert same(read_all(opened(data)), expected), number
        assert f"{folder}: " in capfd.readouterr().err
        again = opened(data)
        assert same(read_all(again), expected)
        assert capfd.readouterr().err == ""  # repaired
        assert use(again) == {"intact": NUM}
    path.write_bytes(b"")
    assert same(read_all(opened(data)), expected)


def test_a_file_under_the_name_of_another_sample(
    data: DataConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is whole, and is of another sample."""
    read_all(opened(data))
    first, second, *_ = files(data)
    shutil.copy(first, second)
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))
    assert use(samples) == {"intact": NUM - 1, "replaced": 1}
    assert (
        "holds a different sample. Reading it from its files" in capfd.readouterr().err
    )


def write_together(data: DataConfig, barrier: object) -> None:
    samples = opened(data)
    barrier.wait()  # type: ignore[attr-defined]
    os._exit(0 if same(read_all(samples), decoded(samples)) else 1)


def test_writers_at_once_write_whole_samples(data: DataConfig) -> None:
    barrier = FORK.Barrier(3)
    writers = [
        FORK.Process(target=write_together, args=(data, barrier)) for _ in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(files(data)) == NUM
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))
    assert use(samples) == {"intact": NUM}


def die_in(data: DataConfig) -> None:
    samples = opened(data)
    samples.read(0)
    pack_module.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    samples.read(1)


def test_a_writer_that_was_killed_is_continued(data: DataConfig) -> None:
    child = FORK.Process(target=die_in, args=(data,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))
    assert use(samples) == {"intact": 1, "added": NUM - 1}
    again = opened(data)
    read_all(again)
    assert use(again) == {"intact": NUM}


def test_a_copy_for_another_process_trusts_nothing(data: DataConfig) -> None:
    samples = opened(data)
    read_all(samples)
    copy = pickle.loads(pickle.dumps(samples))
    assert use(copy) == {}
    assert copy.pack._ready == {}
    assert len(pickle.dumps(samples.pack)) < 500


def test_a_pack_that_cannot_be_written_is_read(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(data).read(0)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(pack_module.os, "replace", refuse)
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))
    assert use(samples) == {"intact": 1}
    assert len(files(data)) == 1


def test_a_full_disk_is_named(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack_module.os, "replace", full)
    with pytest.raises(
        DataError,
        match=r"\.segpipe-pack has no room for 0\.0 MiB more: No space left on device",
    ):
        opened(data).read(0)
    assert files(data) == []


def test_no_folder_for_a_pack(data: DataConfig) -> None:
    with pytest.raises(
        DataError, match=r"classes\.yaml/x cannot be created: Not a directory"
    ):
        Pack(f"{data.root}/classes.yaml/x", "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"pack": "auto"}, "the samples of data=synthetic are not files"),
        ({"pack": "", "name": "folder", "root": "x"}, "data.pack is empty"),
    ],
)
def test_settings_that_cannot_work(given: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check(from_mapping({"data": given}), world_size=1)


def test_the_command_fills_checks_and_repairs(
    data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "data=folder",
        f"data.root={data.root}",
        "data.pack=auto",
    ]

    def said() -> str:
        assert pack({"overrides": arguments}) == 0
        return capsys.readouterr().out

    folder = Path(data.root) / AUTO
    assert said() == f"{folder}: 0 samples intact, 0 replaced, {NUM + 1} added\n"
    content = bytearray(files(data)[0].read_bytes())
    content[-1] ^= 1
    files(data)[0].write_bytes(content)
    assert said() == f"{folder}: {NUM} samples intact, 1 replaced, 0 added\n"
    assert said() == f"{folder}: {NUM + 1} samples intact, 0 replaced, 0 added\n"


def test_a_page_shows_packed_images(data: DataConfig) -> None:
    """torch warns of a tensor of read-only memory, which is an error here."""
    read_all(opened(data))
    image, _ = opened(data).read(0)
    assert np.array_equal(
        predictor(lambda batch: batch[..., 0], torch.device("cpu"))(image),
        image[..., 0],
    )
