"""Copies of a run on object storage: an empty machine goes on from them to the same bits, never from damaged ones."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

import runs
from benchmarks.measure import held_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mirror"


@pytest.fixture(autouse=True)
def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, as where a user copied it to, and a bucket in memory."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("MIRROR", f"memory://{tmp_path.name}")
    import mirror

    monkeypatch.setattr(mirror, "WAIT_S", 0.0)
    return mirror


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a run."""
    folder = tmp_path / "runs" / "one"
    (folder / "ledger").mkdir(parents=True)
    for name in ("last.pt", "config.json", "ledger/rank00.bin", "run.lock", ".x.tmp"):
        (folder / name).write_text(f"content of {name}")
    return folder


@pytest.fixture
def place(mirror: Any, folder: Path) -> tuple[Any, str]:
    """Its copy: file system and root."""
    place: tuple[Any, str] = mirror.opened(mirror.os.environ["MIRROR"], "one")
    mirror.copy(folder, *place)
    return place


@pytest.mark.slow
def test_an_empty_machine_goes_on_to_the_same_bits(tmp_path: Path, mirror: Any) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "runs" / "one"
    changes = ("checkpoint.every=2", "optim.schedule_steps=6")
    assert runs.run(alone, *changes, "train.steps=6") == 0
    changes = (*changes, "track.name=mirror:Mirror", "train.log_every=1")
    assert runs.run(folder, *changes, "train.steps=4") == 0
    shutil.rmtree(folder)
    assert mirror.main(["one", str(folder.parent)], lambda _: None) == 0
    assert runs.run(folder, *changes, "train.steps=6", "run.exists=resume") == 0
    assert [line["step"] for line in runs.updates(folder)] == [1, 2, 3, 4, 5, 6]
    assert runs.outcome(folder) == runs.outcome(alone)


def test_all_files_come_back_but_the_lock_and_what_is_being_written(
    mirror: Any, folder: Path, place: tuple[Any, str], tmp_path: Path
) -> None:
    assert mirror.restore(*place, tmp_path / "back") == 3
    back = {path.name: path for path in (tmp_path / "back").rglob("*.*")}
    assert set(back) == {"last.pt", "config.json", "rank00.bin"}
    assert back["last.pt"].read_text() == "content of last.pt"


def test_a_copy_that_is_cut_off_leaves_the_one_before(
    mirror: Any, folder: Path, place: tuple[Any, str], tmp_path: Path
) -> None:
    store, root = place
    (folder / "last.pt").write_text("newer")

    def cut(path: str, content: bytes) -> None:
        if path.endswith(mirror.MANIFEST):
            raise OSError("the link is down")
        store.pipe_file(path, content)

    broken = SimpleNamespace(
        makedirs=store.makedirs, find=store.find, invalidate_cache=store.invalidate_cache,
        rm_file=store.rm_file, pipe_file=cut,
    )  # fmt: skip
    with pytest.raises(OSError, match="down"):
        mirror.copy(folder, broken, root)
    mirror.restore(store, root, tmp_path / "back")
    assert (tmp_path / "back/last.pt").read_text() == "content of last.pt"
    mirror.copy(folder, store, root)
    mirror.restore(store, root, tmp_path / "again")
    assert (tmp_path / "again/last.pt").read_text() == "newer"
    assert len(store.find(f"{root}/objects")) == 3, "the former one is gone"


def test_the_checkpoint_is_copied_before_files_that_go_on_beyond_it(
    mirror: Any, folder: Path
) -> None:
    store, root = mirror.opened(mirror.os.environ["MIRROR"], "order")
    written: list[bytes] = []

    def put(path: str, content: bytes) -> None:
        written.append(content)
        store.pipe_file(path, content)

    recorded = SimpleNamespace(
        makedirs=store.makedirs, find=store.find, invalidate_cache=store.invalidate_cache,
        rm_file=store.rm_file, pipe_file=put,
    )  # fmt: skip
    mirror.copy(folder, recorded, root)
    assert written[0] == b"content of last.pt"


def test_a_store_that_fails_ends_no_later_copy(
    mirror: Any,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tries = []

    def failing(*given: Any) -> None:
        tries.append(given)
        if len(tries) <= mirror.TRIES:
            raise OSError("no route")

    monkeypatch.setattr(mirror, "copy", failing)
    tracker = mirror.Mirror()
    tracker.on_start(SimpleNamespace(run_dir=folder), 0)
    for step in range(3):
        tracker.on_metrics(step, {})
    assert len(tries) == mirror.TRIES + 1, "and no copy of the same checkpoint twice"
    assert capsys.readouterr().err.count("no route") == mirror.TRIES


@pytest.mark.parametrize("fault", ["bytes", "path", "missing"])
def test_a_damaged_copy_is_refused_and_leaves_no_folder(
    mirror: Any, place: tuple[Any, str], fault: str, tmp_path: Path
) -> None:
    store, root = place
    names = json.loads(store.cat_file(f"{root}/{mirror.MANIFEST}"))
    path = f"{root}/objects/{names['last.pt']}"
    if fault == "bytes":
        store.pipe_file(path, b"other")
    elif fault == "missing":
        store.rm_file(path)
    else:
        names["../../escaped"] = names["last.pt"]
        store.pipe_file(f"{root}/{mirror.MANIFEST}", json.dumps(names).encode())
    said: list[str] = []
    assert mirror.main(["one", str(tmp_path / "new")], said.append) == 2
    assert not (tmp_path / "new/one").exists()
    assert not (tmp_path / "escaped").exists()
    assert len(said) == 1


def test_a_folder_that_exists_is_left_alone(mirror: Any, folder: Path) -> None:
    before = (folder / "config.json").read_text()
    assert mirror.main(["one", str(folder.parent)], lambda _: None) == 2
    assert (folder / "config.json").read_text() == before


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of a bucket of a server that speaks S3; needs moto[server] and s3fs, which the lock does not have."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with held_port() as port:
        pass
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
        ("AWS_ACCESS_KEY_ID", "any"),
        ("AWS_SECRET_ACCESS_KEY", "any"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            for _ in range(600):
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.1)
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
            yield "s3://bucket/runs"
        finally:
            server.kill()


def test_a_server_that_speaks_s3(
    mirror: Any, folder: Path, s3: str, tmp_path: Path
) -> None:
    place = mirror.opened(s3, "one")
    mirror.copy(folder, *place)
    (folder / "last.pt").write_text("newer")
    mirror.copy(folder, *place)
    assert mirror.restore(*place, tmp_path / "back") == 3
    assert (tmp_path / "back/last.pt").read_text() == "newer"
