"""A pack delivers the pixels of the files or nothing: damaged, stale, torn, written by two, killed, or read-only."""

import fcntl
import multiprocessing
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from segpipe.cli import pack as command
from segpipe.data import pack as pack_module
from segpipe.data.pack import AUTO, Pack, Sample
from segpipe.data.samples import FileSamples, open_samples
from segpipe.errors import ConfigError, DataError
from segpipe.run.report import predictor
from segpipe.settings.check import check
from segpipe.settings.config import from_mapping
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


@pytest.fixture(params=["raw", "file"])
def data(tmp_path: Path, request: pytest.FixtureRequest) -> DataConfig:
    for number in range(NUM):
        write(tmp_path / "set", "train", number)
    write(tmp_path / "set", "val", 9)
    image = tmp_path / "set" / "images" / "train" / "0.png"
    cv2.imwrite(str(image.with_suffix(".jpg")), cv2.imread(str(image)))
    image.unlink()
    (tmp_path / "set" / "classes.yaml").write_text("names: [a, b, c]\n")
    return DataConfig(
        name="folder",
        root=str(tmp_path / "set"),
        pack="auto",
        pack_images=request.param,
    )


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


def lines(data: DataConfig) -> int:
    return len((Path(data.root) / AUTO / "index").read_bytes().splitlines())


def decoded(samples: FileSamples) -> list[Sample]:
    return [samples.decode(index) for index in range(len(samples))]


def test_packed_samples_are_those_of_the_files_and_no_file_is_decoded_again(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = opened(data)
    expected = decoded(samples)
    assert same(read_all(samples), expected)
    assert samples.pack is not None
    assert samples.pack.use() == (0, 0, NUM)
    again = opened(data)
    monkeypatch.setattr(
        FileSamples, "target", lambda self, index: pytest.fail("decoded again")
    )
    for _ in range(2):
        assert same(read_all(again), expected)
    assert again.pack is not None
    assert again.pack.use() == (NUM, 0, 0)
    for array in again.read(0) if data.pack_images == "raw" else again.read(0)[1:]:
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
        DataConfig(
            name="folder",
            root=f"{data.root}_moved",
            pack="auto",
            pack_images=data.pack_images,
        )
    )
    monkeypatch.setattr(
        FileSamples, "target", lambda self, index: pytest.fail("decoded again")
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
        f"{data.root}/images/train/2.png was changed after it was packed."
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
        FileSamples, "target", lambda self, index: pytest.fail("decoded again")
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
    assert f"{path} was changed after it was packed" in capfd.readouterr().err


def test_a_file_that_changes_while_it_is_packed_is_not_packed(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pixels would be those before, its hash that of the new content."""
    digest = pack_module.sha256

    def changed(path: Path) -> str:
        write(Path(data.root), "train", 1, seed=5)
        return digest(path)

    samples = opened(data)
    samples.read(2)
    kept = lines(data)
    with monkeypatch.context() as patch:
        patch.setattr(pack_module, "sha256", changed)
        samples.read(1)
    assert lines(data) == kept
    samples.read(1)
    assert lines(data) == kept + 1, "packed now, not before"
    assert same([opened(data).read(1)], [decoded(opened(data))[1]])


def test_a_pack_that_another_process_removed_and_built_anew(data: DataConfig) -> None:
    """The lines of the new index name other places of the pixels than those that this process has mapped."""
    for kind in ("images", "masks"):
        path = next((Path(data.root) / kind / "train").glob("1.png"))
        pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        cv2.imwrite(str(path), np.tile(pixels, (20, 20) + (1,) * (pixels.ndim - 2)))
    write(Path(data.root), "train", 4)
    samples = opened(data)
    expected = decoded(samples)
    for index in (0, 1, 0, 1):
        samples.read(index)
    shutil.rmtree(Path(data.root) / AUTO)
    other = opened(data)
    for index in (2, 3, 4, 0, 1):
        other.read(index)
    samples.read(3)
    assert same(read_all(samples), expected)


def test_a_pack_that_is_deleted_while_it_is_filled_stops_nothing(
    data: DataConfig,
) -> None:
    samples = opened(data)
    samples.read(0)
    shutil.rmtree(Path(data.root) / AUTO)
    assert same(read_all(samples), decoded(samples))


def test_entries_that_were_added_later_are_not_trusted(data: DataConfig) -> None:
    """The last line of a key counts, also while a process has trusted an earlier one."""
    samples = opened(data)
    expected = decoded(samples)
    for index in (0, 1, 0, 1):
        samples.read(index)
    index = Path(data.root) / AUTO / "index"
    first, second = (
        pack_module._entry(line) for line in index.read_bytes().splitlines()
    )
    assert first is not None
    assert second is not None
    wrong = first._replace(place=second.place)
    index.write_bytes(index.read_bytes() + pack_module._line(wrong))
    samples.read(2)
    assert same(read_all(samples), expected)


def test_lines_of_another_format_and_an_index_that_cannot_be_read(
    data: DataConfig,
) -> None:
    expected = read_all(opened(data))
    index = Path(data.root) / AUTO / "index"
    for text in ("[]", "[1, 2, 3]", "7", '["k", 0, 1, 1, 0, "", [1, 2], [3]]'):
        index.write_bytes(
            index.read_bytes() + f"{pack_module._checksum(text)} {text}\n".encode()
        )
    samples = opened(data)
    assert same(read_all(samples), expected)
    assert samples.pack is not None
    assert samples.pack.use() == (NUM, 0, 0)
    index.unlink()
    index.mkdir()
    with pytest.raises(
        DataError, match=r"\.segpipe-pack cannot take .* MiB more: Is a directory"
    ):
        opened(data).read(0)


def test_whatever_is_damaged_the_pixels_are_right(
    data: DataConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = decoded(opened(data))
    read_all(opened(data))
    folder, random = Path(data.root) / AUTO, np.random.default_rng(0)
    named = 0
    for number in range(100):
        path = folder / ("index" if number % 2 else "pixels")
        content = bytearray(path.read_bytes())
        place = int(random.integers(len(content)))
        if number % 10 < 6:
            content[place] ^= 1 << int(random.integers(8))
        elif number % 10 < 8:
            del content[place:]
        else:
            content[place : place + 40] = bytes(len(content[place : place + 40]))
        path.write_bytes(content)
        assert same(read_all(opened(data)), expected), number
        named += f"{folder}: " in capfd.readouterr().err
        again = opened(data)
        assert same(read_all(again), expected)
        assert capfd.readouterr().err == ""  # repaired
        assert again.pack is not None
        assert again.pack.use() == (NUM, 0, 0)
    assert named > 20  # pages are 4 KiB here and samples 0.5: most flips hit a hole


def test_the_index_of_another_pack(data: DataConfig, tmp_path: Path) -> None:
    """Its lines are whole and name other files; and those of the same files lie elsewhere."""
    read_all(opened(data))
    folder = Path(data.root) / AUTO
    rows = (folder / "index").read_bytes().splitlines(keepends=True)
    other = replace(data, pack=f"{data.root}/.other")
    for index in reversed(range(NUM)):
        opened(other).read(index)
    (folder / "index").write_bytes(
        b"".join(rows[:1]) + (Path(data.root) / ".other" / "index").read_bytes()
    )
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))


def write_together(data: DataConfig, barrier: object) -> None:
    samples = opened(data)
    barrier.wait()  # type: ignore[attr-defined]
    os._exit(0 if same(read_all(samples), decoded(samples)) else 1)


def test_two_writers_at_once_write_each_sample_once(data: DataConfig) -> None:
    barrier = FORK.Barrier(3)
    writers = [
        FORK.Process(target=write_together, args=(data, barrier)) for _ in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert lines(data) == NUM
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))


def test_space_is_reserved_and_lines_are_added_under_the_lock(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*given: Any) -> Any:
            with (
                (Path(data.root) / AUTO / "index").open() as other,
                pytest.raises(BlockingIOError),
            ):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append(call)
            return call(*given)

        return locked

    for owner, name in ((pack_module, "_line"), (pack_module.os, "ftruncate")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    read_all(opened(data))
    assert len(seen) == 2 * NUM


def die_in(data: DataConfig, place: str) -> None:
    real = pack_module._line

    def line(entry: pack_module.PackEntry) -> bytes:
        if place == "inside a line":
            path = Path(data.root) / AUTO / "index"
            path.write_bytes(path.read_bytes() + real(entry)[:50])
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    samples = opened(data)
    samples.read(0)
    pack_module._line = line
    samples.read(1)


@pytest.mark.parametrize("place", ["before a line", "inside a line"])
def test_a_writer_that_was_killed_is_continued(data: DataConfig, place: str) -> None:
    child = FORK.Process(target=die_in, args=(data, place))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))
    assert samples.pack is not None
    assert samples.pack.use() == (1, 0, NUM - 1)
    again = opened(data)
    read_all(again)
    assert again.pack is not None
    assert again.pack.use() == (NUM, 0, 0)


def child_opens(samples: FileSamples) -> None:
    pack = samples.pack
    assert pack is not None
    (before,) = pack._opened.values()
    samples.read(0)
    now = pack._opened[os.getpid()]
    os._exit(0 if now is not before and now._map is not before._map else 1)


def test_a_process_opens_its_own_map(data: DataConfig) -> None:
    samples = opened(data)
    read_all(samples)
    read_all(samples)
    child = FORK.Process(target=child_opens, args=(samples,))
    child.start()
    child.join()
    assert child.exitcode == 0
    copy = pickle.loads(pickle.dumps(samples))
    assert copy.pack._opened == {}
    assert len(pickle.dumps(samples.pack)) < 500


def test_a_pack_that_cannot_be_written_is_read(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(data).read(0)

    def refuse(folder: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(pack_module, "_locked", refuse)
    samples = opened(data)
    assert same(read_all(samples), decoded(samples))
    assert samples.pack is not None
    assert samples.pack.use() == (1, 0, 0)
    assert lines(data) == 1


def test_a_full_disk_is_named(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack_module, "_locked", full)
    with pytest.raises(
        DataError,
        match=r"\.segpipe-pack cannot take 0\.0 MiB more: No space left on device",
    ):
        opened(data).read(0)


def test_no_folder_for_a_pack(data: DataConfig) -> None:
    with pytest.raises(
        DataError, match=r"classes\.yaml/x cannot be made: Not a directory"
    ):
        Pack(f"{data.root}/classes.yaml/x", "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"pack": "auto"}, "the samples of data=synthetic do not lie in files"),
        ({"pack": "", "name": "folder", "root": "x"}, "data.pack is empty"),
        ({"pack_images": "file"}, "data.pack_images = file, but data.pack = off"),
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
        f"data.pack_images={data.pack_images}",
        "data.pack=auto",
    ]

    def said() -> str:
        assert command.main(arguments) == 0
        return capsys.readouterr().out

    folder = Path(data.root) / AUTO
    assert said() == f"{folder}: 0 samples intact, 0 replaced, {NUM + 1} added\n"
    content = bytearray((folder / "pixels").read_bytes())
    content[0] ^= 1
    (folder / "pixels").write_bytes(content)
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
