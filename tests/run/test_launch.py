"""Ways to start a run: any number of processes and any launcher compute the same bits; an error ends them all."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch.multiprocessing import ProcessExitedException

import ranks
from ranks import forked, launched
from runs import (
    PATIENCE_S,
    TORCHRUN,
    finished,
    outcome,
    result,
    run,
    settings,
    start,
    torch_restored,
    updates,
    wait_for,
    write_camvid,
)
from segpipe.cli.main import main as segpipe
from segpipe.data.order import Order
from segpipe.distributed import environment, group
from segpipe.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    ImpureAugmentError,
    Interrupted,
    NumericsError,
)
from segpipe.ledger import inputs
from segpipe.run import launch
from segpipe.run.tracking import failure, note_failure
from segpipe.settings.compose import compose
from segpipe.train.stop import asking, signals_deferred_by_children

# All that could depend on the division of the shards: OHEM, auxiliary heads, class weights, clipping, validation, and
# the counts behind a balanced order, which the ranks share.
RECIPE = (
    "train.steps=2", "compute.shards=16", "loss.name=ohem", "loss.ohem_threshold=0.2", "loss.class_weights=log",
    "optim.clip_norm=1", "optim.warmup_steps=0", "data.balance=1", "augment.rare_crop=0.5",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, with which all others are compared."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert run(folder, *RECIPE) == 0
    return folder


def _rank(rank: int, folder: str, changes: tuple[str, ...] = RECIPE) -> int:
    return run(Path(folder), *changes)


@pytest.mark.slow
def test_sixteen_processes_compute_the_same_bits(
    alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks are forked, as a launcher would start them: importing torch 16 times takes a minute on two cores.

    Rank 0 holds the store, and leaves last: no other loses it and says so.
    """
    folder = tmp_path / "sixteen"
    assert launched(16, _rank, str(folder)) == [0] * 16
    assert "TCPStore" not in capfd.readouterr().err
    assert result(folder)["world_size"] == 16
    assert outcome(folder) == outcome(alone)
    assert result(folder)["versions"] == result(alone)["versions"]


@pytest.mark.slow
def test_multirun_makes_two_runs_and_a_table(
    alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In processes of 5, 5 and 6 shards: one has the bits of one process, the other recipe has others (the control)."""
    changes = (
        *RECIPE,
        "compute.nproc=3",
        "optim.clip_norm=1,2",
        "run.name=clip${optim.clip_norm}",
    )
    with torch_restored():
        code = segpipe(
            ["train", "--multirun", *settings(tmp_path / "unused", *changes)]
        )
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "Traceback" not in said.err
    table = said.out[said.out.index("┃ name") :]
    for name in ("clip1.0", "clip2.0"):
        assert f"{100 * result(tmp_path / name)['miou']:.2f}" in next(
            x for x in table.splitlines() if name in x
        )
    assert "seeds" not in table  # there is one seed only
    assert result(tmp_path / "clip1.0")["world_size"] == 3
    assert result(tmp_path / "clip1.0")["versions"] == result(alone)["versions"]
    assert outcome(tmp_path / "clip1.0") == outcome(alone)
    other = outcome(tmp_path / "clip2.0")["weights_digest"]
    assert other != outcome(alone)["weights_digest"]


ENDLESS = ("train.steps=9999", "compute.nproc=2", "data.workers=1")


def _listening(pid: int) -> list[str]:
    """Local addresses, as in /proc/net/tcp, on which a process and its children listen."""
    process = psutil.Process(pid)
    inodes = set()
    for member in (process, *process.children(recursive=True)):
        for descriptor in Path(f"/proc/{member.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(os.readlink(descriptor))
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                addresses.append(fields[1])
    return addresses


def test_processes_of_one_machine_listen_on_the_loopback_alone(tmp_path: Path) -> None:
    """No store and no connection of the ranks can be reached from another machine.

    At the end a scheduler sends SIGTERM to all processes, the one that forks the ranks among them.
    """
    folder = tmp_path / "run"
    process = forked(run, folder, *ENDLESS)
    ranks.wait_for(lambda: len(updates(folder)) > 1, process)
    found = _listening(process.pid)
    os.killpg(process.pid, signal.SIGTERM)
    process.join(PATIENCE_S)
    assert process.exitcode == Interrupted.exit_code
    assert updates(folder)[-1]["step"] > 1
    assert (folder / "last.pt").exists()
    assert len(found) >= 3, "the store, and a socket of each rank"
    assert {address.split(":")[0] for address in found} == {"0100007F"}


def test_a_job_of_a_sweep_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """It is not its child, so the system does not tell it; a rank among several would lose the store."""
    folder = tmp_path / "run"
    changes = (*ENDLESS, "compute.nproc=1", "seed=0")
    process = start("train.py", "--multirun", *settings(folder, *changes))
    wait_for(lambda: len(updates(folder)) > 1, process)
    others = psutil.Process(process.pid).children(recursive=True)
    assert len(others) >= 3, "the tracker of resources, the server and the job"
    process.kill()
    _, alive = psutil.wait_procs(others, timeout=30)
    for one in alive:
        one.kill()
    finished(process)
    assert not alive


@pytest.mark.parametrize("change", ["loss.class_weights=none", "data.balance=0"])
def test_another_recipe_computes_other_bits(
    alone: Path, tmp_path: Path, change: str
) -> None:
    """The control: the digests see what changes the weights, so their equality means something."""
    assert run(tmp_path / "other", *RECIPE, change) == 0
    assert (
        outcome(tmp_path / "other")["weights_digest"]
        != outcome(alone)["weights_digest"]
    )


@pytest.mark.slow
def test_mode_ddp_keeps_its_promise_and_says_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same processes give the same bits across a resume; other processes are refused by name."""
    changes = (
        *RECIPE,
        "compute.mode=ddp",
        "compute.shards=4",
        "train.steps=4",
        "checkpoint.keep_every=2",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert launched(2, _rank, str(whole), changes) == [0, 0]
    shutil.copytree(whole, parts)  # as a run that ended after step 2
    (parts / "step_000002.pt").replace(parts / "last.pt")
    for name in ("result.json", "best.pt"):
        (parts / name).unlink()
    assert (
        run(parts, *changes, "compute.nproc=1", "run.exists=resume")
        == CheckpointError.exit_code
    )
    assert "world_size: 2 -> 1" in capsys.readouterr().err
    assert launched(2, _rank, str(parts), (*changes, "run.exists=resume")) == [0, 0]
    assert [line["step"] for line in updates(parts)] == [
        line["step"] for line in updates(whole)
    ]
    assert outcome(parts) == outcome(whole)
    assert result(whole)["switches"]["deterministic_algorithms"] is True


def test_as_many_processes_start_beside_eight_gpus_as_a_recipe_has_use_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name in ("street_cpu", "camvid_cpu", "camvid_dabnet"):  # the last: one shard
        assert launch._world_size(compose([f"experiment={name}"])) == 1
    assert capsys.readouterr().err.startswith("1 of 8 GPUs are used: ")
    assert launch._world_size(compose([])) == 4
    assert launch._world_size(compose(["compute.shards=16"])) == 8  # the control


class Spawned:
    """In place of torch.multiprocessing.start_processes and the processes that it returns."""

    def __init__(self, join: Callable[[], bool]) -> None:
        self.join = join

    def __call__(self, entry: object, given: object, **_: object) -> Spawned:
        return self


def test_children_find_their_environment_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have imported torch before they could set a variable; the next job of a sweep may need another one.

    What a caller logs stays as it was, too.
    """
    found: list[dict[str, str]] = []
    monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)

    def join() -> bool:
        found.append(dict(os.environ))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return True

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr("torch.multiprocessing.start_processes", Spawned(join))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = signal.getsignal(signal.SIGTERM)
    try:
        for nproc in (4, 1):
            config = compose(
                settings(
                    tmp_path / f"of{nproc}",
                    "compute.shards=4",
                    f"compute.nproc={nproc}",
                )
            )
            assert launch.launch_apart(config) == 0
            assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
    four, one = found
    assert four["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in one  # the control: one thread on two cores
    assert "OMP_WAIT_POLICY" not in os.environ
    assert logging.root.manager.disable == logging.INFO


@pytest.mark.parametrize("spoke", [True, False])
def test_a_killed_rank_ends_with_9_and_the_text_of_the_rank_that_spoke_is_kept(
    spoke: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = compose(settings(tmp_path / "run", "compute.nproc=2", "run.exists=resume"))
    config.run_dir.mkdir()
    note_failure(config, ConfigError("of an earlier session"))

    def join() -> bool:
        if spoke:
            lost = "rank 1 was lost after call 95,\nwhich was all_reduce."
            note_failure(config, CollectiveError(lost))
        raise ProcessExitedException("gone", error_index=1, error_pid=1, exit_code=-9)

    monkeypatch.setattr("torch.multiprocessing.start_processes", Spawned(join))
    assert launch.launch_apart(config) == 9
    told = "rank 1 was killed by signal 9 (Killed). The machine's memory may have run out: see dmesg."
    assert capsys.readouterr().err.strip() == told
    kept = " rank 1 was lost after call 95, which was all_reduce." if spoke else ""
    assert failure(config.run_dir)[:2] == (9, told + kept)


def wait_for_signal() -> None:
    for _ in range(1000):  # another thread receives it, which ends no sleep
        time.sleep(0.01)


def _interrupt_this() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    wait_for_signal()


def test_children_defer_ctrl_c_while_this_process_gets_it() -> None:
    """A child that imports torch would print a traceback."""
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # processes of pytest-xdist ignore it
    try:
        _check_that_children_defer()
    finally:
        signal.signal(signal.SIGINT, before)


def _check_that_children_defer() -> None:
    asks = [
        sys.executable,
        "-c",
        "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ]
    with signals_deferred_by_children():
        assert subprocess.check_output(asks, text=True) == "True\n"
        with pytest.raises(KeyboardInterrupt):
            _interrupt_this()
    assert subprocess.check_output(asks, text=True) == "False\n"


def test_a_long_name_of_the_folder_for_temporary_files_stops_no_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The path of a socket has at most 107 bytes; folders of clusters' jobs can be longer."""
    address = "/pymp-12345678/listener-12345678"
    for length, method in ((107, "forkserver"), (108, "spawn")):
        folder = "/" + (length - len(address) - 1) * "x"
        monkeypatch.setattr("tempfile.gettempdir", lambda folder=folder: folder)
        assert launch._start_method() == method


def _sleep_unblocked() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asking())
    time.sleep(3600)


def test_a_signal_reaches_a_child_that_is_just_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent does not know it yet, and would wait for ever. No rank is there to say that the run was stopped."""
    child = multiprocessing.get_context("spawn").Process(target=_sleep_unblocked)

    def starting(*_: object, **__: object) -> None:
        child.start()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_signal()

    monkeypatch.setattr("torch.multiprocessing.start_processes", starting)
    try:
        assert (
            launch.launch_apart(compose(settings(tmp_path / "run", "compute.nproc=2")))
            == 130
        )
        child.join(60)
        assert child.exitcode == -signal.SIGTERM
        assert capsys.readouterr().err == "stopped. Continue with run.exists=resume.\n"
    finally:
        child.kill()


def test_one_process_sets_its_environment_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting GPUs and opening the data import torch, and with it OpenMP, which reads the variable once."""
    seen = []
    monkeypatch.setenv("OMP_WAIT_POLICY", "unset")
    monkeypatch.delenv(
        "OMP_WAIT_POLICY"
    )  # what the launch sets is taken back at the end
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(
        launch,
        "_world_size",
        lambda config: seen.append(os.environ.get("OMP_WAIT_POLICY")) or 1,
    )
    monkeypatch.setattr(launch, "prepare", lambda *_: None)
    monkeypatch.setattr(launch, "work", lambda *_, **__: 0)
    assert launch.launch(compose(settings(tmp_path / "run", "compute.threads=2"))) == 0
    assert seen == ["PASSIVE"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_files_are_checked_ends_in_a_line(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), number)
        wait_for_signal()

    monkeypatch.setattr(launch, "prepare", interrupted)
    assert run(tmp_path / "run") == 130
    assert (
        capsys.readouterr().err
        == "stopped before the first step; nothing was written.\n"
    )


def test_augmentation_that_is_not_keyed_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unkeyed = ("augment.keyed=false", "train.steps=1")
    assert (
        run(tmp_path / "run", *unkeyed, "augment.check=true")
        == ImpureAugmentError.exit_code
    )
    assert "not a pure function of sample and key" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert run(tmp_path / "run", *unkeyed) == 0  # the control: nobody asked
    assert run(tmp_path / "keyed", "augment.check=true", "train.steps=1") == 0


def test_mode_off_promises_nothing_and_says_so(tmp_path: Path) -> None:
    assert run(tmp_path / "off", *RECIPE, "compute.mode=off") == 0
    assert result(tmp_path / "off")["mode"] == "off"
    assert result(tmp_path / "off")["switches"]["deterministic_algorithms"] is False


@pytest.fixture
def as_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that torchrun gives to the only process of a run."""
    for key, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "-",
    }.items():
        monkeypatch.setenv(key, str(value))


@pytest.mark.usefixtures("as_torchrun")
def test_number_of_processes_is_not_ignored_under_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "run", "compute.nproc=2") == 2
    assert "compute.nproc = 2, but the launcher started 1" in capsys.readouterr().err
    assert run(tmp_path / "run", "compute.nproc=1", "train.steps=1") == 0


@pytest.mark.usefixtures("as_torchrun")
def test_ranks_compare_the_images_of_which_their_steps_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before their configurations, whose hashes then differ, too, and say less."""
    compared: list[tuple[str, str]] = []

    def join(compute: object, same: dict[str, str]) -> None:
        compared.extend(same.items())
        raise ConfigError("enough")

    monkeypatch.setattr(group, "join", join)
    assert run(tmp_path / "run", "train.epochs=1", "train.steps=0") == 2
    assert [value for _, value in compared][1:-1] == ["16"]
    assert compared[-1][0] == "configuration"


@pytest.mark.usefixtures("as_torchrun")
def test_multirun_under_a_launcher_ends_with_the_usage_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert segpipe(["train", "--multirun", "seed=1,2"]) == 2
    assert "Use: segpipe train --multirun compute.nproc=N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "decides"),
    [
        ("train/step.py", True),
        ("ledger/digest.c", True),
        ("losses/upsampled.c", True),
        ("data/scenes.yaml", True),
        ("run/page.css", False),
    ],
)
def test_what_ranks_compare_of_segpipe_holds_every_source_that_decides_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, decides: bool
) -> None:
    """Kernels in C and tables of classes and scenes, too; control: the style of a page decides none."""
    folder = tmp_path / "segpipe"
    shutil.copytree(inputs.SOURCES, folder)
    monkeypatch.setattr(inputs, "SOURCES", folder)
    before = launch._version()
    with (folder / file).open("a") as source:
        source.write("\n")
    assert (launch._version() != before) == decides


def test_a_silent_rank_leaves_the_word_to_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Were it to end first, the launcher would end the rank that says what is wrong."""
    for key, value in {
        "RANK": 1,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "-",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(environment, "LINGER_S", 0.5)
    for refused in (["--multirun", "seed=1,2"], ["sead=1"]):
        started = time.monotonic()
        assert segpipe(["train", *refused]) == 2
        assert time.monotonic() - started > 0.5
    started = time.monotonic()
    assert launch._report(NumericsError("said by rank 0"), rank=1) == 6
    assert time.monotonic() - started > 0.5
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("local", [0, 1])
def test_what_a_machine_lacks_is_said_there(
    local: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0, on another machine, which waits for all ranks, is told.

    The launcher ends the others when the first rank of the machine has said it, unless that rank lacks nothing.
    """
    store = group.local_store()
    for key, value in {
        "RANK": 8 + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": 16,
        "LOCAL_WORLD_SIZE": 8,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": store.port,
    }.items():
        monkeypatch.setenv(key, str(value))

    def refused(*_: object) -> None:
        raise ConfigError("no GPU here")

    waited: list[str] = []

    def wait() -> None:
        waited.append(capsys.readouterr().err)

    monkeypatch.setattr(group, "choose_device", refused)
    monkeypatch.setattr(environment, "wait_to_be_ended", wait)
    assert run(tmp_path / "run", "compute.shards=16") == 2
    assert waited == [""] * local
    assert capsys.readouterr().err.strip() == f"rank {8 + local}: no GPU here"
    card = json.loads(store.get("segpipe/0/card/1"))
    assert group.conflict([card]).startswith(f"rank {8 + local} (host ")
    assert group.conflict([card]).endswith("): no GPU here")
    # Without a store, torch would wait for twice this time, and print frames of its code.
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(environment, "LINGER_S", 10.0)
    started = time.monotonic()
    group.give_up(ConfigError("no GPU here"))
    assert time.monotonic() - started < 8


def test_a_rank_above_0_reports_its_own_error() -> None:
    assert launch._speaks(ConfigError("my module is missing here"), rank=1)


def test_a_rank_that_lost_another_leaves_the_exit_code_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits to be ended, because the launcher reports whichever process it sees ending first."""
    said = "[gloo/transport/tcp/pair.cc:561] Connection closed by peer"

    def lost(*_: object) -> int:
        raise RuntimeError(said)

    monkeypatch.setattr(launch, "_train", lost)
    monkeypatch.setattr(environment, "LINGER_S", 0.5)
    started = time.monotonic()
    assert run(tmp_path / "run") == 9
    assert time.monotonic() - started > 0.5
    wanted = "rank 0 on .*: a collective failed, often because a rank ended or cannot be reached: "
    assert re.search(wanted + re.escape(said), capsys.readouterr().err)
    said = "mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(
        RuntimeError, match="mat1"
    ):  # any other error keeps its traceback
        run(tmp_path / "run")
    code, reason, *_ = failure(
        tmp_path / "run"
    )  # and `segpipe runs` says that it failed
    assert (code, reason.endswith(f"RuntimeError: {said}")) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["python", "torchrun"])
def test_an_error_on_one_rank_ends_all_and_is_named(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """The last sample of the second step, which rank 1 reads, is damaged inside, where headers do not show it."""
    data = write_camvid(tmp_path / "data", num_train=32)
    _, index = Order(0, 32, 4, 2).shard(1, 3)[-1]
    torn = data / "train" / f"frame{index:02d}.png"
    content = bytearray(torn.read_bytes())
    content[len(content) // 2] ^= 255
    torn.write_bytes(content)
    changes = (
        "data=camvid",
        f"data.root={data}",
        "data.verify=headers",
        "train.steps=9",
        "train.log_every=1",
        "compute.shards=4",
    )
    nproc = () if launcher else ("compute.nproc=2",)
    process = start(
        *launcher, "train.py", *settings(tmp_path / "run", *changes, *nproc)
    )
    wait_for(lambda: len(updates(tmp_path / "run")) == 1, process)
    done = finished(process)
    assert done.returncode == (
        1 if launcher else 2
    )  # torchrun has one code for everything
    assert f"rank 1: {torn} is damaged" in done.stderr
    if launcher:
        assert "exitcode  : 2 " in done.stderr[done.stderr.index("Root Cause") :]
    else:
        assert "Traceback" not in done.stderr
    assert [line["step"] for line in updates(tmp_path / "run")] == [1]
    assert not (tmp_path / "run" / "result.json").exists()
