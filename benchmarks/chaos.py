"""Random faults on random layouts: each run that meets one ends named, leaves nothing, and goes on to the same bits.

A run is started by torchrun or by itself with 1 to 4 processes and 0 to 2 loader workers, meets a fault at a random
moment, and is resumed in another layout. What each fault leaves must have the digests that a run which was left alone
had at that step, and so must the end. Faults of links and machines need namespaces of their own: see `cluster`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import measure as measuring
from benchmarks.bits import DIGESTS, ROOT
from segpipe.train.checkpoint import load

TIMEOUT_S = 20
GRACE_S = 60  # beyond compute.timeout_s, until the last process has ended
SPREAD_S = 4.0  # of the moments of faults, after the run is set up
DISK, SHARED = "160m", "64m"  # what the run and /dev/shm may fill
FAULTS_OF_A_RUN = 5  # then it may come to its end
PROCESSES, WORKERS, LAUNCHERS = (1, 2, 4), (0, 1, 2), ("torchrun", "itself")
RECIPE = (
    "model=fast_scnn", "data.size=[96,128]", "data.num_train=64", "data.num_val=2", "augment.crop_size=[64,96]",
    "train.steps=60", "train.progress=false", "checkpoint.every=2", "compute.shards=4", "compute.samples_per_shard=2",
    "compute.threads=1", "compute.device=cpu", "optim.name=adamw", "optim.lr=1e-3", "export.enabled=false",
    "train.log_every=1", f"compute.timeout_s={TIMEOUT_S}", f"data.timeout_s={TIMEOUT_S}",
)  # fmt: skip
KEEPING = ("checkpoint.every=1", "checkpoint.keep_every=1")  # 20 MiB each
SMOKE = {
    "FAULTS_OF_A_RUN": 1, "RECIPE": (*RECIPE, "train.steps=6", "compute.shards=1"), "PROCESSES": (1,), "WORKERS": (0,),
    "LAUNCHERS": ("itself",), "SPREAD_S": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Started:
    """A run that was started, and what it says."""

    folder: Path
    launcher: subprocess.Popen[bytes]
    log: Path
    shared: Path  # its /dev/shm
    since: float

    def ranks(self) -> list[psutil.Process]:
        """Its training processes: those of torchrun, those that its server of ranks has forked, or the run itself."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.launcher.pid)
            children = launcher.children()
            forked = [
                rank
                for child in children
                if "forkserver" in " ".join(child.cmdline())
                for rank in child.children()
            ]
            return (
                [child for child in children if _has_rank(child)]
                or forked
                or [launcher]
            )
        return []

    def workers(self) -> list[psutil.Process]:
        """Loader processes of all ranks, and what augments again for the canary."""
        ranks = self.ranks()
        return [
            child for rank in ranks for child in rank.children() if child not in ranks
        ]

    def family(self) -> list[psutil.Process]:
        """All processes below the launcher."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.launcher.pid)
            return launcher.children(recursive=True)
        return []

    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.folder.glob(".last.pt.*.tmp"))


def _has_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "RANK" in process.environ() and process.name() != "pt_elastic"
    return False


# --- faults: each returns what undoes it

Undo = Callable[[], object]


def _signal(
    processes: list[psutil.Process], number: int, chance: random.Random
) -> Undo:
    with suppress(psutil.NoSuchProcess, IndexError):
        chance.choice(processes).send_signal(number)
    return lambda: None


def killed_rank(run: Started, chance: random.Random) -> Undo:
    return _signal(run.ranks(), signal.SIGKILL, chance)


def killed_in_a_write(run: Started, chance: random.Random) -> Undo:
    """Rank 0 writes: half of the kills hit it."""
    while not run.writing() and run.launcher.poll() is None:
        time.sleep(0.0005)
    ranks = sorted(run.ranks(), key=lambda process: process.pid)
    return _signal(chance.choice((ranks, ranks[:1])), signal.SIGKILL, chance)


def stopped_rank(run: Started, chance: random.Random) -> Undo:
    """With one process nobody is left to notice: it is killed."""
    ranks = run.ranks()
    return _signal(ranks, signal.SIGSTOP if len(ranks) > 1 else signal.SIGKILL, chance)


def killed_launcher(run: Started, chance: random.Random) -> Undo:
    run.launcher.kill()
    return lambda: None


def terminated(run: Started, chance: random.Random) -> Undo:
    """As a scheduler does at the end of the time."""
    run.launcher.terminate()
    return lambda: None


def interrupted(run: Started, chance: random.Random) -> Undo:
    """Ctrl-C: the terminal sends it to the whole process group."""
    with suppress(ProcessLookupError):
        os.killpg(run.launcher.pid, signal.SIGINT)
    return lambda: None


def killed_worker(run: Started, chance: random.Random) -> Undo:
    return _signal(run.workers() or run.ranks(), signal.SIGKILL, chance)


def stopped_worker(run: Started, chance: random.Random) -> Undo:
    """What only the canary waits for may stop unnoticed: the run then comes to its end."""
    workers = run.workers()
    return (
        _signal(workers, signal.SIGSTOP, chance)
        if workers
        else killed_rank(run, chance)
    )


def disk_full(run: Started, chance: random.Random) -> Undo:
    """All of the file system that holds the run."""
    return _filled(run.folder.parent)


def shared_memory_full(run: Started, chance: random.Random) -> Undo:
    return _filled(run.shared)


def clock_ahead(run: Started, chance: random.Random) -> Undo:
    """The heartbeat of a machine whose clock is an hour ahead; then a rank dies."""
    ahead = time.time() + 3600
    undo = killed_rank(run, chance)
    with suppress(FileNotFoundError):
        os.utime(run.folder / "run.lock", (ahead, ahead))
    return undo


def _filled(folder: Path) -> Undo:
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))
    return lambda: filler.unlink(missing_ok=True)


Fault = Callable[[Started, random.Random], Undo]
FAULTS: tuple[Fault, ...] = (
    killed_rank, killed_in_a_write, stopped_rank, killed_launcher, terminated, interrupted, killed_worker,
    stopped_worker, clock_ahead,
)  # fmt: skip
IN_NAMESPACES: tuple[Fault, ...] = (disk_full, shared_memory_full)
# It saves where it stops, so that there is always something to compare.
SMOKE |= {"FAULTS": (terminated,), "IN_NAMESPACES": ()}


# --- runs


@dataclass(frozen=True)
class Place:
    """Where runs live: a folder on a small disk of its own and a small /dev/shm, or both as they are here."""

    disk: Path
    shared: Path = Path("/dev/shm")
    within: tuple[str, ...] = ()  # what starts a command there

    @property
    def apart(self) -> bool:
        return bool(self.within)


@contextmanager
def place(parent: Path) -> Iterator[Place]:
    """A mount namespace with a disk and a /dev/shm that nobody else fills; without permission, what is here."""
    disk = parent / "disk"
    disk.mkdir()
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("nsenter")):
        yield Place(disk)
        return
    mounts = " && ".join(
        f"mount -t tmpfs -o size={size} tmpfs {where}"
        for size, where in ((DISK, disk), (SHARED, "/dev/shm"))
    )
    words = f"{mounts} && echo ready && exec sleep infinity"
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", words], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        try:
            if holder.stdout.readline() != "ready\n":
                yield Place(disk)
                return
            root = Path(f"/proc/{holder.pid}/root")
            within = ("nsenter", f"--target={holder.pid}", "--mount", f"--wd={ROOT}")
            yield Place(root / disk.relative_to("/"), root / "dev/shm", within)
        finally:
            holder.kill()


def start(folder: Path, here: Place, layout: dict[str, Any], *changes: str) -> Started:
    """The run in this layout, from its last checkpoint; anew if it has none, which needs asking."""
    seen = (
        Path("/", *folder.parts[4:]) if here.apart else folder
    )  # without /proc/PID/root
    changes = (
        *RECIPE,
        *changes,
        f"data.workers={layout['workers']}",
        f"run.root={seen.parent}",
        f"run.name={folder.name}",
        f"run.exists={'resume' if (folder / 'last.pt').is_file() else 'replace'}",
    )
    head = ["train.py"]
    if layout["by"] == "torchrun":
        head = f"-m torch.distributed.run --standalone --nproc-per-node={layout['processes']} train.py".split()
    else:
        changes = (*changes, f"compute.nproc={layout['processes']}")
    settings = dict(change.split("=", 1) for change in changes)
    words = [f"{key}={value}" for key, value in settings.items()]
    log = Path(tempfile.gettempdir(), f"chaos-{os.getpid()}.log")
    since = time.time()
    with log.open("wb") as out:
        launcher = subprocess.Popen(
            [*here.within, sys.executable, *head, *words],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
    return Started(folder, launcher, log, here.shared, since)


def layout_of(chance: random.Random) -> dict[str, Any]:
    return {
        "processes": chance.choice(PROCESSES),
        "workers": chance.choice(WORKERS),
        "by": chance.choice(LAUNCHERS),
    }


def set_up(run: Started) -> bool:
    """Waits until the run writes to its log: its first update, or a resume's opening. False: it has ended before."""
    metrics = run.folder / "metrics.jsonl"
    while not (
        metrics.exists()
        and (found := metrics.stat()).st_size
        and found.st_mtime >= run.since
    ):
        if run.launcher.poll() is not None:
            return False
        time.sleep(0.005)
    return True


def meet(
    folder: Path, here: Place, fault: Fault, chance: random.Random, alone: Path
) -> dict[str, Any]:
    """One start of the run, a fault at a random moment of it, and what came of it."""
    before = set(os.listdir(here.shared))
    layout = layout_of(chance)
    row: dict[str, Any] = {**layout, "fault": fault.__name__}
    run = start(folder, here, layout)
    family: list[psutil.Process] = []
    undo: Undo = lambda: None  # noqa: E731
    try:
        if set_up(run):
            time.sleep(chance.uniform(0, SPREAD_S))
        family = run.family()
        row["met"] = run.launcher.poll() is None
        moment = time.monotonic()
        if row["met"]:
            undo = fault(run, chance)
            row["writing"] = run.writing()  # a write that is cut off leaves its file
        with suppress(subprocess.TimeoutExpired):  # psutil would take its exit code
            run.launcher.wait(TIMEOUT_S + GRACE_S)
        remaining_s = max(0.0, moment + TIMEOUT_S + GRACE_S - time.monotonic())
        _, alive = psutil.wait_procs(family, timeout=remaining_s)
        row["seconds"] = round(time.monotonic() - moment, 1)
        # Who stopped a process wakes it: it cannot end by itself.
        row["left"] = [
            " ".join(process.cmdline()[:6]) or process.name()
            for process in alive
            if process.is_running() and process.status() != psutil.STATUS_STOPPED
        ]
        if run.launcher.poll() is None:
            row["left"].insert(0, "the launcher")
    finally:
        for process in {*family, *run.family()}:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        run.launcher.kill()
        run.launcher.wait()
        undo()
    said = run.log.read_text(errors="replace")
    row["code"] = run.launcher.returncode
    row["left"] += sorted(set(os.listdir(here.shared)) - before)
    row["traceback"] = has_traceback(said)
    row["said"] = sentence(said) if row["code"] else ""
    return {**row, **kept(folder, alone)}


def has_traceback(said: str) -> bool:
    """Whether a traceback goes through our own code, as those of torchrun's own errors do not."""
    blocks = re.findall(
        r"^Traceback \(most recent call last\):\n((?:[ \t].*\n)+)", said, re.MULTILINE
    )
    return any(f'"{ROOT}/' in block.replace(f"{ROOT}/.venv", "") for block in blocks)


def sentence(said: str) -> str:
    """The last sentence of an error."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if line.startswith(("ERROR:", "error:", "rank ", "segpipe", "stopped"))
        or "exitcode" in line
    ]
    return (errors or lines or [""])[-1][:200]


def kept(folder: Path, alone: Path) -> dict[str, Any]:
    """Step of the checkpoint that a run left, and whether it has the digests that the other run had then; None where
    nothing had been written yet."""
    if not (folder / "last.pt").is_file():
        return {"checkpoint_step": 0, "equal": None}
    left = load(folder / "last.pt")
    if not left["step"]:  # stopped before the first update: nothing is kept of it
        return {"checkpoint_step": 0, "equal": None}
    then = alone / f"step_{left['step']:06d}.pt"
    # None is kept of the last step, which last.pt is of.
    other = load(then if then.is_file() else alone / "last.pt")
    same = all(
        left["digests"][part] == other["digests"][part] for part in ("model", "ema")
    )
    return {
        "checkpoint_step": left["step"],
        "equal": same and left["step"] == other["step"],
    }


def finish(run: Started) -> int:
    """The exit code of a run that meets nothing."""
    try:
        return run.launcher.wait(600)
    finally:
        measuring.kill_with_children(run.launcher)


def digests(folder: Path) -> dict[str, Any]:
    """What must be equal, of a run's result.json."""
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in DIGESTS}


def is_sound(row: dict[str, Any]) -> bool:
    """Ended in time and by itself, with an error that is told, nothing left, and a checkpoint of equal bits.

    A process that was killed can say nothing where no other is left.
    """
    told = bool(row["said"]) or row["code"] <= 0
    return (
        told and not row["traceback"] and not row["left"] and row["equal"] is not False
    )


def verdict(rows: list[dict[str, Any]], ends: list[dict[str, Any]]) -> dict[str, Any]:
    """What was met and compared, and whether each row is sound and each end equal."""
    met = [row for row in rows if row["met"]]
    return {
        "faults_met": len(met),
        "by_fault": dict(sorted(Counter(row["fault"] for row in met).items())),
        "while_a_checkpoint_was_written": sum(row["writing"] for row in met),
        "longest_s": max((row["seconds"] for row in met), default=0.0),
        "checkpoints_equal": sum(row["equal"] is True for row in rows),
        "runs_ended": len(ends),
        "runs_equal": sum(end["equal"] for end in ends),
        "unsound": [row for row in rows if not is_sound(row)],
        "differing": [end for end in ends if not end["equal"]],
        "passed": bool(met and ends)
        and any(row["equal"] for row in rows)
        and all(map(is_sound, rows))
        and all(end["equal"] for end in ends),
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """`--repeats` faults (200). Passed when each is sound and every run comes to an equal end."""
    chance, console = random.Random(0), Console(stderr=True)
    number = given.repeats or 200
    rows: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="chaos") as name, place(Path(name)) as here:
        alone = Path(name, "alone")
        by_itself = {"processes": 1, "workers": 1, "by": "itself"}
        quiet = Place(Path(name))
        if code := finish(start(alone, quiet, by_itself, *KEEPING)):
            raise RuntimeError(f"a run that met nothing ended with {code}")
        wanted = digests(alone)
        faults = FAULTS + (IN_NAMESPACES if here.apart else ())
        while len(rows) < number:
            folder = here.disk / f"run{len(ends)}"
            for _ in range(min(FAULTS_OF_A_RUN, number - len(rows))):
                rows.append(meet(folder, here, chance.choice(faults), chance, alone))
                console.print(rows[-1], soft_wrap=True)
                if (folder / "result.json").exists():  # it came to its end
                    break
            layout = layout_of(chance)
            last = start(folder, here, layout)
            code = finish(last)
            equal = code == 0 and digests(folder) == wanted
            said = "" if equal else last.log.read_text(errors="replace")[-600:]
            ends.append({**layout, "code": code, "equal": equal, "said": said})
            console.print(ends[-1], soft_wrap=True)
            shutil.rmtree(folder)
        last.log.unlink()
    return {
        "what": " ".join(RECIPE),
        "machine": measuring.machine(),
        **verdict(rows, ends),
    }
