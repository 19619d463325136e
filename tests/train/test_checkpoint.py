"""Truncated, foreign and altered checkpoints are refused; a full disk or a kill leaves the old file."""

import errno
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import CAMVID

import runs
from ranks import launched
from segpipe.errors import CheckpointError, NotWritten, WeightsError
from segpipe.files import write_atomically
from segpipe.models import build_model
from segpipe.settings.config import Config, to_mapping
from segpipe.settings.groups import ModelConfig
from segpipe.train import checkpoint
from segpipe.train.checkpoint import candidates, load, load_network, newest_whole, save
from segpipe.train.recorder import Recorder

SMALL = {
    "step": 7,
    "config": {"seed": 3},
    "classes": {"names": ("road", "sky"), "train_ids": {1: 0, 2: 1}},
    "fingerprint": {"torch": "2.14.1"},
    "model": {"weight": torch.arange(600.0).view(20, 30), "count": torch.tensor(4)},
    "ema": {"weight": torch.arange(600.0).view(20, 30) / 2, "count": torch.tensor(4)},
    "optimizer": {
        "state": {0: {"momentum_buffer": torch.ones(20, 30)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    },
    "scaler": {},
    "best_miou": 0.25,
}
SIZE = 3_000_000  # bytes of a file that a killed process writes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "last.pt"
    save(path, SMALL)
    return path


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def rewritten(path: Path, **changes: Any) -> None:
    """The file with other content, written as a stranger would, without new digests."""
    state = torch.load(path, weights_only=True) | changes
    torch.save({key: value for key, value in state.items() if value is not None}, path)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    return message


def test_round_trip(file: Path) -> None:
    state = load(file)
    assert all(same(state[key], value) for key, value in SMALL.items())
    assert set(state) == {*SMALL, "format", "version", "digests", "stale"}
    assert [path.name for path in file.parent.iterdir()] == ["last.pt"]


def test_a_file_of_an_older_release_counts_no_validation_since_its_best(
    file: Path,
) -> None:
    state = {
        name: value
        for name, value in load(file).items()
        if name not in ("stale", "digests")
    }
    torch.save({**state, "digests": checkpoint._digests(state)}, file)
    assert load(file)["stale"] == 0


def test_digests_of_a_checkpoint_stay(file: Path) -> None:
    """Otherwise checkpoints of earlier versions would be refused as altered."""
    assert load(file)["digests"] == {
        "model": "3f52caad70fb1e50e177fb7b43bd9d63",
        "ema": "3a97ba7892dcaaca5d26f44cff91f877",
        "rest": "8e8ceaeff02440357f83224f9179ae5a-8659516fbf6cf58071a47ff1325bc78f",
    }


def test_torn_file_is_refused_at_any_length(file: Path) -> None:
    whole = file.read_bytes()
    lengths = {
        0,
        1,
        4,
        100,
        *range(0, len(whole), len(whole) // 40),
        len(whole) - 1,
        len(whole) - 22,
    }
    for length in sorted(lengths):
        file.write_bytes(whole[:length])
        message = refused(file)
        assert f"{length} bytes" in message


def test_no_flipped_bit_passes(file: Path) -> None:
    whole, rng = file.read_bytes(), random.Random(0)
    for _ in range(150):
        altered = bytearray(whole)
        altered[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(altered)
        try:
            state = load(file)
        except CheckpointError:
            continue
        assert all(
            same(state[key], value) for key, value in SMALL.items()
        )  # it hit padding that nobody reads


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"state_dict": {}, "epoch": 3}, "'epoch', 'state_dict'"),
        (dict.fromkeys("gfedcba", 0), "['a', 'b', 'c', 'd', 'e']"),
        ([1, 2], "list"),
        (torch.ones(3), "Tensor"),
        ({"format": "other"}, "'format'"),
    ],
)
def test_foreign_file_is_named(tmp_path: Path, content: Any, found: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    message = refused(tmp_path / "x.pt")
    assert found in message
    assert checkpoint.FORMAT in message


@pytest.mark.parametrize(
    ("error", "told", "hidden"),
    [
        (EOFError(), "EOFError", "EOFError:"),
        (RuntimeError(f"{'x' * 400}\nmore"), f": {'x' * 300}.", "more"),
    ],
)
def test_what_torch_says_is_told_in_one_line(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    told: str,
    hidden: str,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(torch, "load", broken)
    message = refused(file)
    assert told in message
    assert hidden not in message


def test_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"format": checkpoint.FORMAT, "model": Evil()}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt")
    assert not (tmp_path / "owned").exists()


def test_text_folder_and_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("not a checkpoint")
    assert "truncated or foreign" in refused(tmp_path / "x.pt")
    assert "does not exist" in refused(tmp_path)
    assert "does not exist" in refused(tmp_path / "y.pt")


def test_another_version_is_named_and_a_file_without_a_part_is_refused(
    file: Path,
) -> None:
    rewritten(file, version=1)
    assert "version 1" in refused(file)
    for part, named in (("optimizer", "rest"), ("ema", "ema"), ("digests", "digests")):
        save(file, SMALL)
        rewritten(file, **{part: None})
        assert named in refused(file)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (
            "model",
            {
                "weight": torch.arange(600.0).view(20, 30).flip(0),
                "count": torch.tensor(4),
            },
        ),
        ("ema", {"weight": torch.arange(600.0).view(20, 30), "count": torch.tensor(4)}),
        ("model", {"other": torch.ones(1)}),
        ("model", [1, 2]),
        ("ema", {"weight": 3}),
        ("step", 8),
        ("step", 7.0),
        ("best_miou", 0.99),
        ("stale", 1),
        ("config", {"seed": 4}),
        ("classes", {"names": ("sky", "road"), "train_ids": {1: 0, 2: 1}}),
        ("scaler", {"scale": 2.0}),
        ("digests", {}),
    ],
)
def test_altered_content_is_refused(file: Path, part: str, value: Any) -> None:
    rewritten(file)
    load(file)  # the control: written anew without a change it passes
    rewritten(file, **{part: value})
    refused(file)


def test_altered_momentum_is_refused(file: Path) -> None:
    buffer = torch.ones(20, 30)
    buffer[3, 3] = 1 + 2**-23
    rewritten(
        file,
        optimizer={
            "state": {0: {"momentum_buffer": buffer}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
    )
    assert "altered" in refused(file)


def test_one_unit_in_the_last_place_of_momentum_is_seen(tmp_path: Path) -> None:
    """Printed, both buffers are the same text."""
    path, buffer = tmp_path / "last.pt", torch.rand(50, 60)
    altered = buffer.clone()
    altered[20, 20] = altered[20, 20].nextafter(torch.tensor(9.0))
    assert repr(altered) == repr(buffer)
    assert not torch.equal(altered, buffer)
    states = [
        {"state": {0: {"momentum_buffer": value}}, "param_groups": []}
        for value in (buffer, altered)
    ]
    save(path, SMALL | {"optimizer": states[0]})
    rewritten(path, optimizer=states[0])
    load(path)
    rewritten(path, optimizer=states[1])
    assert "altered" in refused(path)


# --- a disk that takes no more


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "replace", "write", "open"])
def test_full_disk_leaves_the_old_file_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = file.read_bytes()
    if call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, no_space)
    else:
        opened = Path.open

        def broken(self: Path, mode: str = "r", **rest: Any) -> Any:
            if "w" in mode and call == "open":
                no_space()
            found = opened(self, mode, **rest)
            if "w" in mode:
                found.close()
                found = _FullFile(self)
            return found

        monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(
        CheckpointError,
        match=r"last\.pt .* No space left .* unharmed.*run\.exists=resume",
    ):
        save(file, SMALL | {"step": 8})
    monkeypatch.undo()
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["last.pt"]
    save(file, SMALL | {"step": 8})  # once there is room again
    assert load(file)["step"] == 8


class _FullFile:
    """A file that takes half of what is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def __enter__(self) -> "_FullFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        self._file.write(content[: len(content) // 2])
        no_space()


def test_first_write_that_fails_says_that_nothing_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(CheckpointError, match="no file was there before"):
        save(tmp_path / "last.pt", SMALL)
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "runs" / "last.pt", SMALL)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB, where the machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)],
        capture_output=True,
    )
    if mount.returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_really_full_disk(tiny_disk: Path) -> None:
    path = tiny_disk / "last.pt"
    save(path, SMALL)
    (tiny_disk / "other").write_bytes(bytes(200 * 1024))
    before = path.read_bytes()
    big = {"weight": torch.zeros(100, 1000), "count": torch.tensor(4)}
    with pytest.raises(CheckpointError, match="No space left"):
        save(path, SMALL | {"model": big})
    assert path.read_bytes() == before
    assert sorted(p.name for p in tiny_disk.iterdir()) == ["last.pt", "other"]
    assert load(path)["step"] == 7


# --- a process that is killed while it writes


def _write_for_ever(path: Path, first: int, written: int) -> None:
    for step in itertools.count(first):
        os.write(written, b".")
        write_atomically(path, bytes([step % 256]) * SIZE)


def _write_plainly_for_ever(path: Path, first: int, written: int) -> None:
    for step in itertools.count(first):
        os.write(written, b".")
        with path.open("wb") as file:
            for _ in range(3):
                file.write(bytes([step % 256]) * (SIZE // 3))


def _killed_while_it_writes(
    write: Callable[[Path, int, int], None], path: Path, rng: random.Random
) -> Iterator[bytes]:
    """Content of `path` after each of 20 processes that wrote it again and again was killed at some moment.

    A process is given the time for up to two whole writes, however slow the machine is, and a part of one more.
    """
    start = time.perf_counter()
    write_atomically(path, bytes(SIZE))
    duration = time.perf_counter() - start
    for number in range(20):
        started, written = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(path, 10 * number, written)
            finally:
                os._exit(1)
        os.close(written)
        for _ in range(1 + number % 3):
            os.read(started, 1)
        time.sleep(duration * rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(started)
        yield path.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded:DeprecationWarning"
)  # the children never touch torch
def test_sigkill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path, left_over, seen = tmp_path / "last.pt", 0, set()
    for content in _killed_while_it_writes(_write_for_ever, path, random.Random(0)):
        assert len(content) == SIZE
        assert len(set(content[::1000])) == 1
        seen.add(content[0])
        left_over += len(list(tmp_path.iterdir())) - 1
        assert (
            len(list(tmp_path.iterdir())) <= 2
        )  # what one killed process left, the next write removes
    assert left_over, "no kill met a write: the test shows nothing"
    assert len(seen) > 1
    write_atomically(path, b"end")
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded:DeprecationWarning"
)  # the children never touch torch
def test_the_control_plain_write_is_torn_by_sigkill(tmp_path: Path) -> None:
    contents = _killed_while_it_writes(
        _write_plainly_for_ever, tmp_path / "last.pt", random.Random(0)
    )
    assert any(len(content) != SIZE for content in contents)


# --- a trained network


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Config(model=ModelConfig(name="fast_scnn"))
    for name, step in (("best", 3), ("last", 9)):
        state = {
            **SMALL,
            "config": to_mapping(config),
            "classes": asdict(CAMVID),
            "model": build_model("fast_scnn", CAMVID.num_classes).state_dict(),
            "ema": build_model("fast_scnn", CAMVID.num_classes).state_dict(),
            "step": step,
        }
        save(tmp_path / f"{name}.pt", state)
    return tmp_path


def test_network_comes_back_with_all_that_is_needed(run: Path) -> None:
    for which, step in (("best", 3), ("last", 9)):
        trained = load_network(run, which)
        assert trained.step == step
        assert trained.classes == CAMVID
        assert not trained.model.training
        assert not any(p.requires_grad for p in trained.model.parameters())
        state = load(run / f"{which}.pt")
        assert same(dict(trained.model.state_dict()), state["ema"])
        assert trained.ema_digest == state["digests"]["ema"]
    assert load_network(run / "last.pt").step == 9
    (run / "best.pt").unlink()
    assert load_network(run, "best").step == 9


def test_weights_of_another_network_are_refused(run: Path) -> None:
    state = load(run / "last.pt")
    state["config"]["model"]["name"] = "ddrnet23_slim"
    save(run / "last.pt", {key: value for key, value in state.items() if key in SMALL})
    with pytest.raises(CheckpointError, match=r"last\.pt does not fit DDRNet"):
        load_network(run, "last")


@pytest.mark.parametrize("change", ["missing", "further"])
def test_weights_that_do_not_fit_are_named(change: str) -> None:
    network = build_model("fast_scnn", CAMVID.num_classes)
    weights = network.state_dict()
    name, value = next(iter(weights.items()))
    del weights[name]
    weights |= {name: value, "more": value} if change == "further" else {}
    with pytest.raises(WeightsError, match=r"x\.pt does not fit FastSCNN") as caught:
        checkpoint.load_weights(network, weights, Path("x.pt"))
    assert ("more" if change == "further" else name) in str(caught.value)


def test_candidates_for_resuming_come_newest_first(tmp_path: Path) -> None:
    for name in (
        "step_000002.pt",
        "step_000010.pt",
        "step_9.pt",
        "step_x.pt",
        "best.pt",
    ):
        (tmp_path / name).touch()
    (tmp_path / "last.pt").mkdir()
    names = [path.name for path in candidates(tmp_path)]
    assert names == ["best.pt", "step_000010.pt", "step_9.pt", "step_000002.pt"]
    (tmp_path / "last.pt").rmdir()
    (tmp_path / "last.pt").touch()
    assert [path.name for path in candidates(tmp_path)] == ["last.pt", *names]


# --- which checkpoint a run is resumed from


def folder_of(folder: Path, **steps: int) -> Path:
    """A run folder with checkpoints of these steps, by file name without suffix; those of a negative step are torn."""
    for name, step in steps.items():
        path = folder / f"{name}.pt"
        save(path, SMALL | {"step": abs(step)})
        if step < 0:
            path.write_bytes(path.read_bytes()[:-1000])
    return folder


@pytest.mark.parametrize(
    ("files", "found", "step"),
    [
        ({"last": 8, "best": 9, "step_9": 9}, "last.pt", 8),
        ({"last": -8, "best": 4, "step_6": 6, "step_3": 3}, "step_6.pt", 6),
        ({"best": 4, "step_3": 3}, "best.pt", 4),
        ({"best": 4, "step_6": -6, "step_5": 5}, "step_5.pt", 5),
        ({"best": -4, "step_3": 3}, "step_3.pt", 3),
        ({"last": -8, "best": 4}, "best.pt", 4),
    ],
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    tmp_path: Path, files: dict[str, int], found: str, step: int
) -> None:
    folder_of(tmp_path, **files)
    answer = newest_whole(tmp_path)
    assert answer is not None
    assert (answer.path, answer.content["step"]) == (tmp_path / found, step)
    last = tmp_path / "last.pt"
    assert bool(answer.note) is (found != "last.pt")
    if answer.note:
        assert f"the newest intact checkpoint is {found} of step {step}" in answer.note
        assert (
            f"{last} is damaged ({last} (" if last.is_file() else f"{last} is missing"
        ) in answer.note


def test_without_a_whole_checkpoint_nothing_is_found_or_the_faults_are_named(
    tmp_path: Path,
) -> None:
    assert newest_whole(tmp_path) is None
    folder_of(tmp_path, last=-8, best=-4, step_3=-3)
    with pytest.raises(CheckpointError, match="holds no intact checkpoint") as caught:
        newest_whole(tmp_path)
    message = str(caught.value)
    assert f"{tmp_path / 'last.pt'} (" in message
    assert f"{tmp_path / 'best.pt'} (" in message
    assert "run.exists=replace" in message


def test_a_file_that_cannot_be_read_now_is_not_taken_for_a_torn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path, best=4, step_6=6, step_3=3)
    unreadable = "step_6.pt"

    def stale(path: Path) -> bytes:
        if path.name == unreadable:
            raise OSError(errno.ESTALE, "Stale file handle")
        return path.read_bytes()

    monkeypatch.setattr("segpipe.models.weights.read", stale)
    monkeypatch.setattr("segpipe.files.PAUSES_S", (0.0,))
    with pytest.raises(CheckpointError, match=r"step_6\.pt .*Stale file handle"):
        newest_whole(tmp_path)
    unreadable = "step_3.pt"  # which is older than what is found
    found = newest_whole(tmp_path)
    assert found is not None
    assert found.path.name == "step_6.pt"


def _rank_1_cannot_write(rank: int, folder: str) -> int:
    def flush(self: Recorder, *, sync: bool = False) -> None:
        raise NotWritten("the disk of rank 1 is full")

    if rank:
        Recorder.flush = flush  # type: ignore[assignment, method-assign]
    return runs.run(Path(folder), "train.steps=2")


@pytest.mark.slow
def test_no_checkpoint_is_ahead_of_a_ledger(tmp_path: Path) -> None:
    """Rank 0 writes it when all ranks have their rows on the disk; otherwise an audit would miss some of them."""
    assert launched(2, _rank_1_cannot_write, str(tmp_path / "run")) == [2, 2]
    assert not (tmp_path / "run" / "last.pt").exists()
