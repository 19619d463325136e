"""A data set on object storage is the same samples in the same order as its files on a disk."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
from contextlib import closing
from pathlib import Path

import cv2
import fsspec
import numpy as np
import pytest
import torch
from fsspec.asyn import AsyncFileSystem

from segpipe.data.augment import Augmenter
from segpipe.data.data_set import Samples
from segpipe.data.loader import train_batches
from segpipe.data.order import Order
from segpipe.data.samples import image_sizes, open_samples
from segpipe.errors import ConfigError, DataError
from segpipe.settings.compose import compose
from segpipe.settings.groups import AugmentConfig, DataConfig

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bucket"
DRAWS = np.random.Generator(np.random.Philox(3))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a user copied it to; processes of the loader import it, too."""
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Six pairs with a train.csv that lists them out of order."""
    root = tmp_path / "bucket"
    rows = []
    for number in (4, 0, 5, 2, 1, 3):
        for kind, high, shape in (("photos", 256, (40, 48, 3)), ("drawn", 3, (40, 48))):
            (root / kind).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(
                str(root / f"{kind}/f{number}.png"),
                DRAWS.integers(0, high, shape, np.uint8),
            )
        rows.append(f"photos/f{number}.png,drawn/f{number}.png\n")
    (root / "train.csv").write_text("image,mask\n" + "".join(rows))
    (root / "classes.yaml").write_text("names: [floor, shelf, person]\n")
    return root


def remote(files: Path, cache: Path, protocol: str = "file") -> Samples:
    name = "bucket:Bucket"
    root = f"{protocol}://{files}"
    return open_samples(
        compose(
            [f"data.name={name}", f"data.root={root}", f"data.args.cache={cache}"]
        ).data,
        "train",
        0,
    )


def batches(samples: Samples, workers: int, how: str = "fork") -> list[torch.Tensor]:
    found = []
    with closing(
        train_batches(
            samples,
            Augmenter(AugmentConfig(crop_size=[32, 32])),
            Order(7, len(samples), 2, 2),
            shards=range(2),
            steps=range(3),
            workers=workers,
            start_method=how,
            prefetch=2,
            pin_memory=False,
        )
    ) as stream:
        for batch in stream:
            found += [batch.image.clone(), batch.target.clone(), batch.index.clone()]
    return found


@pytest.mark.parametrize(
    ("workers", "how"), [(0, "fork"), (2, "fork"), (2, "forkserver"), (1, "spawn")]
)
def test_order_keys_and_pixels_are_those_of_files(
    files: Path, tmp_path: Path, workers: int, how: str
) -> None:
    on_disk = open_samples(DataConfig(name="folder", root=str(files)), "train", 0)
    found = remote(files, tmp_path / "cache")
    assert [found.name(index) for index in range(6)] == [
        on_disk.name(index) for index in range(6)
    ]
    wanted = batches(on_disk, 0)
    assert all(map(torch.equal, batches(found, workers, how), wanted))
    assert not torch.equal(wanted[0], wanted[3])


def test_the_order_is_that_of_names_without_suffix(files: Path, tmp_path: Path) -> None:
    """`-` and a space come before the dot of a suffix."""
    for kind in ("photos", "drawn"):
        for number, name in enumerate(("f-1", "f", "f 2", "f.x")):
            (files / kind / f"f{number}.png").rename(files / kind / f"{name}.png")
    lines = [
        f"photos/{name}.png,drawn/{name}.png\n"
        for name in ("f", "f 2", "f4", "f-1", "f.x", "f5")
    ]
    (files / "train.csv").write_text("image,mask\n" + "".join(lines))
    on_disk = open_samples(DataConfig(name="folder", root=str(files)), "train", 0)
    found = remote(files, tmp_path / "cache")
    assert [found.name(index) for index in range(6)] == [
        on_disk.name(index) for index in range(6)
    ]
    assert all(
        np.array_equal(found.read(index)[0], on_disk.read(index)[0])
        for index in range(6)
    )


def test_two_data_sets_of_one_cache(files: Path, tmp_path: Path) -> None:
    """Their addresses differ only in signs that a folder's name does not keep."""
    other = shutil.copytree(files, files.with_name("a_b"))
    files = files.rename(files.with_name("a-b"))
    cv2.imwrite(str(other / "photos/f0.png"), np.zeros((40, 48, 3), np.uint8))
    assert remote(files, tmp_path / "cache").read(0)[0].any()
    assert not remote(other, tmp_path / "cache").read(0)[0].any()


def test_a_cache_on_a_full_disk_is_named(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = remote(files, tmp_path / "cache")

    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        DataError,
        match=r"f2\.png cannot be written: No space left on device\. Free some",
    ):
        found.read(2)
    assert not list((tmp_path / "cache").rglob("*f2.png*")), "no part of it is left"


def test_sizes_are_known_without_reading_all(files: Path, tmp_path: Path) -> None:
    found = remote(files, tmp_path / "cache")
    assert image_sizes(found) == {(40, 48): 6}
    assert (
        len(list((tmp_path / "cache").rglob("*.png"))) == 1
    )  # the first mask, which tells the size
    rows = (files / "train.csv").read_text().splitlines()
    (files / "train.csv").write_text(
        "\n".join([f"{rows[0]},height,width", *(f"{row},7,9" for row in rows[1:])])
    )
    assert image_sizes(remote(files, tmp_path / "other")) == {(7, 9): 6}


def test_an_object_is_fetched_once(files: Path, tmp_path: Path) -> None:
    first = remote(files, tmp_path / "cache").read(2)
    (files / "photos/f2.png").unlink()
    again = remote(files, tmp_path / "cache")
    assert np.array_equal(again.read(2)[0], first[0])
    (files / "photos/f3.png").unlink()
    with pytest.raises(
        DataError, match=r"bucket/photos/f3\.png cannot be read: FileNotFoundError"
    ):
        again.read(3)
    assert not list((tmp_path / "cache").rglob("*f3.png")), "no part of it is left"


def test_any_file_system_of_fsspec_will_do(files: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in files.rglob("*.*"):
        memory.pipe_file(f"memory://{path}", path.read_bytes())
    found = remote(files, tmp_path / "cache", "memory")
    assert np.array_equal(
        found.read(0)[0],
        open_samples(DataConfig(name="folder", root=str(files)), "train", 0).read(0)[0],
    )
    assert pickle.loads(pickle.dumps(found)).name(0) == found.name(0)


class Threaded(AsyncFileSystem):
    """Runs on a thread of fsspec, as those of the network do; a forked process does not have it."""

    protocol = "threaded"

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: object
    ) -> bytes:
        await asyncio.sleep(0)
        return Path(self._strip_protocol(path)).read_bytes()


def test_a_file_system_with_a_thread_survives_a_fork(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("threaded", Threaded, clobber=True)
    found = remote(
        files, tmp_path / "cache", "threaded"
    )  # the list is read here, before the fork
    assert all(
        map(
            torch.equal,
            batches(found, 2),
            batches(remote(files, tmp_path / "other"), 0),
        )
    )
    found = remote(files, tmp_path / "third", "threaded")
    shared = found.source._files()
    monkeypatch.setattr(type(found.source), "_files", lambda self: shared)
    with pytest.raises(DataError, match="not fork-safe"):  # the control
        batches(found, 2)


def test_a_process_opens_its_own_file_system(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the network run a thread, which a forked process does not have."""
    own = remote(files, tmp_path / "cache").source
    before = own._files()
    assert own._files() is before
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert own._files() is not before


def test_what_is_wrong_is_said_with_the_url(files: Path, tmp_path: Path) -> None:
    (files / "train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        ConfigError,
        match=r"bucket/train\.csv has no rows below a header with image and mask",
    ):
        remote(files, tmp_path / "a")
    (files / "train.csv").write_text("image,mask\nphotos/f0.png\n")
    with pytest.raises(
        ConfigError,
        match=r"train\.csv: \['photos/f0\.png', None\] is not an image and its",
    ):
        remote(files, tmp_path / "a2")
    (files / "train.csv").write_text(
        "image,mask\nphotos/f0.png,drawn/f0.png\nphotos/f0.jpg,drawn/f1.png\n"
    )
    with pytest.raises(ConfigError, match=r"train\.csv has photos/f0 twice"):
        remote(files, tmp_path / "a3")
    (files / "train.csv").write_text("image,mask\n../../x.png,drawn/f0.png\n")
    with pytest.raises(
        ConfigError, match=r"\.\./\.\./x\.png leads outside the data set"
    ):
        remote(files, tmp_path / "b")
    with pytest.raises(ConfigError, match=r"nowhere/train\.csv cannot be read"):
        remote(files / "nowhere", tmp_path / "c")
