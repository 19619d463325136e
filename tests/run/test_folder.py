"""A run's folder has one owner: living ones are respected on every file system, dead ones are replaced with a word."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from runs import (
    PATIENCE_S,
    ROOT,
    finished,
    metrics,
    outcome,
    run,
    settings,
    start,
    updates,
)
from segpipe.distributed import environment
from segpipe.errors import ConfigError, NotWritten
from segpipe.files import write_atomically
from segpipe.ledger.divergence import compare
from segpipe.ledger.reader import read_run
from segpipe.processes import process_start, this_host
from segpipe.run import folder as folders
from segpipe.run import launch, lock
from segpipe.run.folder import clear_folder
from segpipe.run.tracking import failure
from segpipe.settings.compose import compose
from segpipe.settings.config import to_mapping
from segpipe.train import engine
from segpipe.train.checkpoint import load

pytestmark = pytest.mark.slow

LONG = ("train.steps=2000", "train.log_every=1", "checkpoint.every=2")
HOLD = """
import sys, time
from pathlib import Path
from segpipe.run import lock
from segpipe.train.stop import Stopped, stops_raised
try:
    with stops_raised(), lock.held(Path(sys.argv[1])):
        print("held", flush=True)
        while True:  # a signal just before a sleep is seen after it
            time.sleep(0.1)
except Stopped:
    sys.exit(130)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that owns the folder."""
    process = start("-c", HOLD, str(folder))
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(
    process: subprocess.Popen[str], number: signal.Signals = signal.SIGKILL
) -> int:
    os.killpg(process.pid, number)
    return finished(process).returncode


def write_lock(folder: Path, /, *, silent_s: float = 0.0, **changes: Any) -> Path:
    path = folder / lock.LOCK
    owner = {
        "host": "far-1",
        "pid": 77,
        "started": "5",
        "name": "process 77 on far since 2026-01-01",
        "id": "x",
        **changes,
    }
    path.write_text(json.dumps(owner))
    os.utime(path, (time.time() - silent_s,) * 2)
    return path


def taken(folder: Path) -> str:
    """What taking the lock says; it is released again."""
    with lock.held(folder) as dead:
        assert (folder / lock.LOCK).exists()
    assert not (folder / lock.LOCK).exists()
    return dead


# --- jobs


class Job:
    """A training in a process of its own, which a server forks: it has imported torch once for all of them."""

    def __init__(self, folder: Path, *changes: str) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["segpipe.train.engine"])
        self._said, theirs = context.Pipe()
        self.process = context.Process(target=_train, args=(folder, changes, theirs))
        self.process.start()
        self.pid = self.process.pid
        theirs.close()

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            assert self.process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ended(self) -> tuple[int, str]:
        """Exit code of the command, and what it wrote to stderr."""
        assert self._said.poll(PATIENCE_S)
        found: tuple[int, str] = self._said.recv()
        self.process.join()
        return found


def _train(folder: Path, changes: tuple[str, ...], said: Connection) -> None:
    with redirect_stderr(io.StringIO()) as words:
        code = run(folder, *changes)
    said.send((code, words.getvalue()))


def test_a_second_job_of_one_name_is_refused_and_a_killed_one_is_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, changes = tmp_path / "run", (*LONG, "train.steps=16", "compute.shards=1")
    first = Job(folder, *changes)
    try:
        first.wait_for(lambda: (folder / "last.pt").exists())
        os.kill(
            first.pid, signal.SIGSTOP
        )  # or it would be done before the others have tried
        for exists in ("error", "resume", "replace"):
            assert run(folder, f"run.exists={exists}") == 2
            said = capsys.readouterr().err
            assert f"{folder} is in use by process {first.pid} on " in said
            assert all(
                part in said
                for part in (
                    "since 20",
                    "last sign of life",
                    f"kill {first.pid}",
                    "run.name",
                )
            )
        steps = len(updates(folder))
        os.kill(first.pid, signal.SIGCONT)
        first.wait_for(lambda: len(updates(folder)) > steps)
    finally:
        first.process.kill()
        first.process.join()
    assert first.process.exitcode == -signal.SIGKILL
    assert (folder / lock.LOCK).exists()
    assert run(folder, *changes, "run.exists=resume") == 0
    assert f"taken over from process {first.pid} on " in capsys.readouterr().err
    assert not (folder / lock.LOCK).exists()
    assert run(tmp_path / "alone", *changes) == 0
    assert outcome(folder) == outcome(tmp_path / "alone")


def test_two_jobs_that_start_together_have_one_winner(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    jobs = [Job(folder, f"seed={seed}") for seed in (1, 2)]
    done = [job.ended() for job in jobs]
    assert sorted(code for code, _ in done) == [0, 2], done
    (loser,) = (said for code, said in done if code)
    assert "is in use by process" in loser or "already holds" in loser
    winner = next(
        seed for seed, (code, _) in zip((1, 2), done, strict=True) if not code
    )
    assert run(tmp_path / "alone", f"seed={winner}") == 0
    assert outcome(folder) == outcome(tmp_path / "alone")


def test_rank_0_owns_the_folder_and_the_parent_removes_its_lock_when_it_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This process is the parent; a thread of it looks on, and kills rank 0."""
    folder = tmp_path / "run"

    def killed() -> int:
        deadline = time.monotonic() + PATIENCE_S
        while not updates(folder):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        owner = int(json.loads((folder / lock.LOCK).read_text())["pid"])
        try:
            with pytest.raises(ConfigError, match=f"in use by process {owner} on "):
                taken(folder)
        finally:
            os.kill(owner, signal.SIGKILL)
        return owner

    with ThreadPoolExecutor(1) as pool:
        owner = pool.submit(killed)
        code = run(folder, *LONG, "compute.nproc=2", "compute.shards=2")
        assert owner.result() != os.getpid()
    assert code == 9, capsys.readouterr().err
    assert not (folder / lock.LOCK).exists()
    code, reason, *_ = failure(folder)
    assert code == 9
    assert reason.startswith(
        "rank 0 was killed by signal 9 (Killed). The machine's memory may have run out"
    )


def test_replace_deletes_all_but_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "ledger").mkdir(parents=True)
    for name in ("config.json", "ledger/rank00.bin"):
        (folder / name).touch()
    config = compose(settings(folder, "run.exists=replace"))
    with lock.held(folder):
        clear_folder(config)
        assert [path.name for path in folder.iterdir()] == [lock.LOCK]


# --- the lock


@pytest.mark.parametrize("when", ["training", "export"])
def test_a_run_whose_folder_is_moved_away_is_no_success(
    when: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither before the export, at its next line, nor at the end; and no half of a run takes its place."""
    folder, away = tmp_path / "run", tmp_path / "away"
    place, name = (engine, "_keep") if when == "training" else (launch, "finish")
    monkeypatch.setattr(place, name, lambda *_: folder.rename(away))
    assert run(folder, "train.steps=2", "train.log_every=1") == NotWritten.exit_code
    said = " ".join(capsys.readouterr().err.split())
    lost = "No such file or directory. It or its folder was deleted or moved during the run: move it back, or"
    assert lost in said
    assert not folder.exists()
    assert (away / "result.json").exists() is (when == "export")


def test_a_folder_of_another_user_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(lock._Lock, "_create", denied)
    with pytest.raises(NotWritten, match=r"run\.lock .*Permission denied\. .*owner"):
        lock.held(tmp_path).__enter__()


@pytest.mark.parametrize(
    ("number", "left"),
    [(signal.SIGTERM, False), (signal.SIGHUP, False), (signal.SIGKILL, True)],
)
def test_only_sigkill_leaves_the_lock_and_it_is_taken_over(
    tmp_path: Path, number: signal.Signals, left: bool
) -> None:
    process = hold(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} on "):
        lock.dead_lock(tmp_path / lock.LOCK)
    assert kill(process, number) == (-number if left else 130)
    assert (tmp_path / lock.LOCK).exists() is left
    assert (f"taken over from process {process.pid} on " in taken(tmp_path)) is left


def test_a_process_that_has_ended_but_is_still_listed_is_dead(tmp_path: Path) -> None:
    process = hold(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert "taken over" in taken(tmp_path)
    finished(process)


def test_a_suspended_process_lives(tmp_path: Path) -> None:
    process = hold(tmp_path)
    os.kill(process.pid, signal.SIGSTOP)
    os.utime(tmp_path / lock.LOCK, (0, 0))
    with pytest.raises(ConfigError, match="in use"):
        taken(tmp_path)
    kill(process)


def test_a_pid_that_another_process_has_now_is_dead(tmp_path: Path) -> None:
    start_of_own = process_start(os.getpid())
    write_lock(tmp_path, host=this_host(), pid=os.getpid(), started=start_of_own)
    with pytest.raises(ConfigError, match=rf"kill {os.getpid()}\b"):
        taken(tmp_path)
    write_lock(tmp_path, host=this_host(), pid=os.getpid(), started=f"{start_of_own}0")
    assert "taken over" in taken(tmp_path)


def test_an_owner_on_another_machine_is_judged_by_its_last_touch_not_by_a_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock(tmp_path, silent_s=lock.SILENT_S - 20)
    monkeypatch.setattr(
        time, "time", lambda: 4e9
    )  # this machine's clock is decades ahead
    with pytest.raises(
        ConfigError,
        match=r"process 77 on far since .* last sign of life 4\d s ago.* its lock ends 60 s after",
    ):
        taken(tmp_path)
    monkeypatch.undo()
    write_lock(tmp_path, silent_s=lock.SILENT_S + 60)
    assert "taken over from process 77 on far" in taken(tmp_path)


@pytest.mark.parametrize(
    ("slurm", "torchrun", "silent_s", "taken_over"),
    [
        ("1", "0", 0, True),  # Slurm has ended the attempt before
        ("0", "1", 0, False),  # torchrun started again what was refused here
        ("", "1", 31, True),  # and what lost its machine; an empty count is 0
        ("0", "0", 31, False),
    ],
)
def test_a_later_attempt_takes_over_what_is_dead(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slurm: str,
    torchrun: str,
    silent_s: float,
    taken_over: bool,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "j")
    monkeypatch.setenv("SLURM_RESTART_COUNT", slurm)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", torchrun)
    write_lock(tmp_path, silent_s=silent_s, job="j", attempt=[0, 0])
    with nullcontext() if taken_over else pytest.raises(ConfigError):
        assert "taken over" in taken(tmp_path)


def test_a_resume_that_saves_more_often_misses_no_checkpoint(tmp_path: Path) -> None:
    """None was due before step 2000, so none was lost."""
    folder = tmp_path / "run"
    folder.mkdir()
    before = compose(settings(folder, "train.steps=9999", "checkpoint.every=2000"))
    (folder / "config.json").write_text(json.dumps(to_mapping(before)))
    line = {"step": 7, "kind": "train", "time_s": 1.0, "saved_step": 0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    changes = ("train.steps=9999", "checkpoint.every=5", "run.exists=resume")
    folders.claim_folder(compose(settings(folder, *changes)), create=False)
    line |= {"step": 2001, "saved_step": 2000}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="step 2000 was saved"):
        folders.claim_folder(compose(settings(folder, *changes)), create=False)


@pytest.mark.parametrize("kept", ["checkpoint.keep_every=1", "train.validate_every=1"])
def test_a_lost_step_or_best_checkpoint_is_missed_as_last_is(
    tmp_path: Path, kept: str
) -> None:
    changes = ("checkpoint.every=0", "train.log_every=1", kept)
    assert run(tmp_path / "run", *changes) == 0
    for path in (*tmp_path.glob("run/*.pt"), tmp_path / "run" / "result.json"):
        path.unlink()
    again = compose(settings(tmp_path / "run", *changes, "run.exists=resume"))
    with pytest.raises(ConfigError, match=r"step \d+ was saved"):
        folders.claim_folder(again, create=False)


def test_a_group_that_may_write_may_go_on(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        assert run(tmp_path / "run") == 0
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"rank00.bin", "metrics.jsonl"} <= {path.name for path in files}
    assert [path.name for path in files if not path.stat().st_mode & 0o020] == []


def test_a_pid_that_a_process_of_another_user_has_now_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    write_lock(
        tmp_path,
        host=this_host(),
        pid=os.getpid(),
        started=f"{process_start(os.getpid())}0",
    )
    monkeypatch.setattr(os, "kill", denied)
    assert "taken over" in taken(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}'])
def test_a_lock_that_cannot_be_read_is_respected_for_a_while(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / lock.LOCK).write_bytes(content)
    with pytest.raises(ConfigError, match="an unknown process"):
        taken(tmp_path)
    os.utime(tmp_path / lock.LOCK, (0, 0))
    assert "taken over" in taken(tmp_path)


def test_of_many_that_find_a_dead_owner_one_takes_over(tmp_path: Path) -> None:
    """Each holds it until all have tried."""
    everyone, won = threading.Barrier(8), []

    def take(number: int) -> None:
        for attempt in range(30):
            if number == 0:
                write_lock(tmp_path, silent_s=2 * lock.SILENT_S)
            everyone.wait()
            try:
                with lock.held(tmp_path):
                    won.append(attempt)
                    everyone.wait()
            except ConfigError:
                everyone.wait()
            everyone.wait()

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == list(range(30))
    assert list(tmp_path.iterdir()) == []


def test_adead_lock_is_deleted_by_one_job_and_never_another_lock(
    tmp_path: Path,
) -> None:
    path, beside = write_lock(tmp_path), tmp_path / f".{lock.LOCK}.removal"
    dead = path.read_bytes()
    lock._remove(path, b"of an owner that was replaced meanwhile")
    assert path.exists()
    beside.touch()  # another job is at it
    lock._remove(path, dead)
    assert path.exists()
    beside.unlink()
    lock._remove(path, dead)
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_was_killed_does_not_block_for_ever(tmp_path: Path) -> None:
    write_lock(tmp_path, silent_s=2 * lock.SILENT_S)
    beside = tmp_path / f".{lock.LOCK}.removal"
    beside.touch()
    os.utime(beside, (0, 0))
    assert "taken over" in taken(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_owner_touches_its_lock_and_puts_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    path = tmp_path / lock.LOCK
    with lock.held(tmp_path):
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 60
        while path.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        path.unlink()
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not path.exists()


def test_an_owner_that_lost_its_folder_ends_without_a_word_to_its_files(
    tmp_path: Path,
) -> None:
    code = HOLD.replace("try:", "lock.BEAT_S = 0.02\ntry:")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        stdout=-1,
        stderr=-1,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    os.kill(process.pid, signal.SIGSTOP)
    path = write_lock(tmp_path)
    os.kill(process.pid, signal.SIGCONT)
    done = finished(process)
    assert done.returncode == 2
    assert "taken over by process 77 on far" in done.stderr
    assert json.loads(path.read_text())["pid"] == 77


def test_a_forked_child_does_not_release(tmp_path: Path) -> None:
    held = lock.held(tmp_path)
    with held:
        child = os.fork()
        if child == 0:
            held.__exit__(None, None, None)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert (tmp_path / lock.LOCK).exists()


# --- copies of a folder that is in use


def test_a_copy_of_a_folder_in_use_names_the_file_to_delete(tmp_path: Path) -> None:
    """On this machine, and on a shared file system whose owner is on another one."""
    folder = tmp_path / "run"
    folder.mkdir()
    process = hold(folder)
    near = Path(shutil.copytree(folder, tmp_path / "near"))
    with pytest.raises(ConfigError, match=f"in use by process {process.pid}"):
        taken(folder)
    kill(process)
    write_lock(folder)
    far = Path(shutil.copytree(folder, tmp_path / "far"))
    with pytest.raises(ConfigError, match=f"is a copy, delete {far / lock.LOCK}"):
        taken(far)
    (far / lock.LOCK).unlink()  # as the message says
    assert taken(far) == ""
    assert "taken over" in taken(near), "its owner is dead"


# --- resuming from what is left

STEPPED = (
    "train.steps=8",
    "train.log_every=1",
    "checkpoint.every=2",
    "checkpoint.keep_every=3",
    "compute.shards=1",
)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never disturbed."""
    folder = tmp_path_factory.mktemp("stepped") / "run"
    assert run(folder, *STEPPED) == 0
    return folder


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "found", "step"),
    [
        ("last.pt is missing", "step_000006.pt", 6),
        ("last.pt is damaged", "step_000006.pt", 6),
        ("last.pt and step_000006.pt are damaged", "step_000003.pt", 3),
        ("last.pt and all step files are missing", "best.pt", 8),
    ],
)
def test_without_a_whole_last_pt_the_newest_whole_checkpoint_is_continued(
    stepped: Path,
    tmp_path: Path,
    damage: str,
    found: str,
    step: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rows of metrics and ledger after it are written again, and nothing is left of the others."""
    folder = Path(shutil.copytree(stepped, tmp_path / "run"))
    last, newest, oldest = (
        folder / name for name in ("last.pt", "step_000006.pt", "step_000003.pt")
    )
    if "step files" not in damage:
        (folder / "best.pt").unlink()
    if "missing" in damage:
        last.unlink()
    else:
        tear(last)
    if "step_000006.pt are" in damage:
        tear(newest)
    if "step files" in damage:
        newest.unlink()
        oldest.unlink()
    assert run(folder, *STEPPED, "run.exists=resume") == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{last} is {'missing' if 'missing' in damage else 'damaged'}" in said
    assert f"the newest intact checkpoint is {found} of step {step}" in said
    assert outcome(folder) == outcome(stepped)
    assert [(line["step"], line["kind"]) for line in metrics(folder)] == [
        (line["step"], line["kind"]) for line in metrics(stepped)
    ]
    again = read_run(folder)
    assert again.faults == ()
    assert (
        compare(read_run(stepped), again).sentence == "identical in all 8 common steps"
    )
    assert load(last)["step"] == 8


def test_a_whole_last_pt_is_continued_as_ever(
    stepped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(stepped, tmp_path / "run"))
    tear(folder / "step_000006.pt")
    assert run(folder, *STEPPED, "run.exists=resume") == 0
    assert capsys.readouterr().err == ""
    assert outcome(folder) == outcome(stepped)


@pytest.mark.parametrize(
    "left",
    ["torn checkpoints", "metrics and ledger", "metrics"],
)
def test_a_run_with_progress_and_nothing_whole_never_starts_again_unasked(
    stepped: Path, tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(stepped, tmp_path / "run"))
    for path in folder.glob("*.pt"):
        tear(path) if left == "torn checkpoints" else path.unlink()
    if left == "metrics":
        for path in folder.iterdir():
            if path.name != "metrics.jsonl":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run(folder, *STEPPED, "run.exists=resume") == 2
    said = capsys.readouterr().err
    assert (
        "no intact checkpoint" in said
        if left == "torn checkpoints"
        else "no checkpoint" in said
    )
    assert "back" in said
    assert "run.exists=replace" in said
    assert run(folder, *STEPPED) == 2  # run.exists=error
    capsys.readouterr()
    (folder / "failure.json").unlink(missing_ok=True)  # why it was refused
    assert {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } == before
    assert run(folder, *STEPPED, "run.exists=replace") == 0  # the second way on
    assert outcome(folder) == outcome(stepped)


def test_an_empty_folder_or_a_run_without_a_step_starts(
    stepped: Path, tmp_path: Path
) -> None:
    """A job that always sets run.exists=resume starts the first time, also after it was killed before a step."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(stepped / "config.json", folder)
    (folder / "metrics.jsonl").write_text("")
    assert run(folder, *STEPPED, "run.exists=resume") == 0
    assert outcome(folder) == outcome(stepped)


@pytest.mark.parametrize("ended", ["killed", "diverged"])
def test_a_run_that_ended_before_its_first_checkpoint_starts_again(
    stepped: Path, tmp_path: Path, ended: str
) -> None:
    """At step 1 of a run that saves every 2: a cluster's next attempt must not need a person.

    What the first attempt recorded of its code is gone: it may have failed for it, and an audit would name it.
    """
    folder = Path(shutil.copytree(stepped, tmp_path / "run"))
    recorded = (folder / "inputs.json").read_text()
    (folder / "inputs.json").write_text(
        recorded.replace('"train/engine.py": "', '"train/engine.py": "0')
    )
    for path in (
        *folder.glob("*.pt"),
        folder / "result.json",
    ):
        path.unlink()
    early = [
        line
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["step"] <= 1
    ]
    (folder / "metrics.jsonl").write_text("\n".join(early) + "\n")
    assert run(folder, *STEPPED, "run.exists=resume") == 0
    assert outcome(folder) == outcome(stepped)
    assert (
        compare(read_run(stepped), read_run(folder)).sentence
        == "identical in all 8 common steps"
    )
    assert (folder / "inputs.json").read_text() == recorded
    assert len(read_run(folder).headers) == 1


def test_a_run_that_failed_after_its_training_is_not_finished(tmp_path: Path) -> None:
    config = compose(settings(tmp_path / "run", "run.exists=resume"))
    config.run_dir.mkdir()
    (config.run_dir / "report.html").write_text("")
    (config.run_dir / "result.json").write_text('{"steps": 3}')
    assert folders.finished(config)
    (config.run_dir / "failure.json").write_text(
        '{"exit_code": 4, "reason": "an export was rejected"}'
    )
    assert not folders.finished(config)


def test_a_run_whose_resume_was_killed_is_not_finished(tmp_path: Path) -> None:
    """Config.json already has the export that the resume was to make; the one there is older."""
    config = compose(settings(tmp_path / "run", "run.exists=resume"))
    config.export.enabled = True
    (config.run_dir / "export").mkdir(parents=True)
    for name, content in {
        "report.html": "",
        "result.json": '{"steps": 3}',
        "config.json": json.dumps(to_mapping(config)),
        "export/manifest.json": "{}",
    }.items():
        (config.run_dir / name).write_text(content)
    assert folders.finished(config)
    dead = lock.Owner(this_host(), 2**30, "1", "process 2**30", "")
    (config.run_dir / lock.LOCK).write_text(json.dumps(dead._asdict()))
    assert not folders.finished(config)


def test_another_recipe_is_refused_before_anything_is_loaded(
    stepped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "segpipe.run.launch.work", lambda *_, **__: pytest.fail("it started")
    )
    assert run(stepped, *STEPPED, "run.exists=resume", "optim.lr=0.125") == 2
    assert "optim.lr: 0.05 -> 0.125" in capsys.readouterr().err


# --- temporary files, tasks


def test_temporary_files_of_living_processes_and_other_machines_stay(
    tmp_path: Path,
) -> None:
    sleeper = start("-c", "import time; time.sleep(600)")
    living, far = (
        tmp_path / f".last.pt.{this_host()}.{sleeper.pid}.tmp",
        tmp_path / f".last.pt.far-1.{sleeper.pid}.tmp",
    )
    other = (
        tmp_path / f".last.pt.sha.{this_host()}.{sleeper.pid}.tmp"
    )  # of another file
    for path in (living, far, other):
        path.write_bytes(b"half")
    write_atomically(tmp_path / "last.pt", b"whole")
    assert sorted(tmp_path.iterdir()) == sorted(
        [living, far, other, tmp_path / "last.pt"]
    )
    kill(sleeper)
    write_atomically(tmp_path / "last.pt", b"whole")
    assert sorted(tmp_path.iterdir()) == sorted([far, other, tmp_path / "last.pt"])


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1"}, True),
        ({"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_NTASKS": "4"}, False),  # sbatch runs a script once
        (
            {
                "SLURM_STEP_NUM_TASKS": "4",
                "RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "-",
            },
            False,
        ),
        ({}, False),
    ],
)
def test_srun_without_a_launcher_is_refused_with_the_command(
    variables: dict[str, str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not refused:
        return environment.check_tasks()
    with pytest.raises(
        ConfigError,
        match=rf"{next(iter(variables))} = 4.*srun --ntasks-per-node=1 torchrun --nnodes",
    ):
        environment.check_tasks()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "two"},
            "WORLD_SIZE = 'two', but a whole number from 1 was needed",
        ),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE = '0'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK = '-1', but a whole number from 0"),
        (
            {"RANK": "3", "WORLD_SIZE": "1"},
            "RANK = 3, but WORLD_SIZE = 1",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "MASTER_PORT is not set, but WORLD_SIZE = 2",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""},
            "MASTER_ADDR is not set, but WORLD_SIZE = 2",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "x"}, "LOCAL_RANK = 'x'"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused_in_a_line(
    variables: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"MASTER_ADDR": "localhost", **variables}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(
            name, raising=False
        )
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert run(tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert words in said
    assert "torchrun" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_no_task_of_srun_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert run(tmp_path / "run") == 2
    assert "srun --ntasks=1 segpipe train" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_lock_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    """Created exclusively it exists, read it does not: looking again would never end."""
    (tmp_path / lock.LOCK).symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is a link"), lock.held(tmp_path):
        pass
