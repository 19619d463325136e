"""Two machines on one: torchrun in two network namespaces whose link is cut, slowed and made to lose packets.

Each machine is a network, process and host-name namespace with its own /dev/shm and TMPDIR; a bridge in a third network
namespace joins them, and the run's folder is shared. Needs root and `ip` (iproute2); packets are delayed and dropped
by `tc netem`, or where the kernel lacks it by `tc tbf` and `nft`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks import measure as measuring
from benchmarks.bits import DIGESTS, ROOT

TIMEOUT_S = 10  # compute.timeout_s
MARGIN_S = 30  # within which all ends after that
PATIENCE_S = 240  # for what has no fault, on a loaded machine
STARTED_S = 150  # for the first steps
STEPS = 40
FAULT_STEP = 6
NAMES = ("node0", "node1")
PORT = 29511
RECIPE = (
    "model=fast_scnn", "data=synthetic", "data.size=[96,128]", "data.num_train=64", "data.num_val=2",
    "data.workers=1",
    "augment.crop_size=[64,96]", "augment.check=false", "train.progress=false", "train.log_every=1",
    "checkpoint.every=2", "compute.shards=2", "compute.samples_per_shard=2", "compute.threads=1",
    "compute.device=cpu", "export.enabled=false", "run.exists=resume",
)  # fmt: skip
# The first process of a machine: it outlives torchrun, and lists what is left 3 s after its end.
INIT = """
hostname "$NODE"; sysctl -q -w net.ipv4.tcp_retries2=5
mount --bind "$PLACE/shm" /dev/shm
mount --bind "$PLACE/hosts" /etc/hosts
"$@" & wait $!; echo $? > "$PLACE/code"; sleep 3
for dir in /proc/[0-9]*; do
  pid=${dir#/proc/}
  [ "$pid" = 1 ] || [ ! -s "$dir/cmdline" ] || tr '\\0' ' ' < "$dir/cmdline" 2>/dev/null
done | grep -v -e ^grep -e ^tr > "$PLACE/left"
touch "$PLACE/done"
"""


def permitted() -> str:
    """Why there can be no machines here; empty if there can."""
    for tool in ("ip", "tc", "unshare"):
        if not shutil.which(tool):
            return f"{tool} is missing (apt-get install iproute2 util-linux)"
    name = f"segpipe-{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "hub", "type", "bridge")
        _run("unshare", "--uts", "--pid", "--mount", "--fork", "true")
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip() or str(error)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


def _run(*words: str, **given: Any) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, **given)


@dataclass
class Machine:
    """A namespace that counts as a machine, and the torchrun in it."""

    name: str
    space: str
    place: Path  # shm, tmp, log
    process: subprocess.Popen[bytes] | None = None
    log: str = ""
    ended: float | None = None
    lost: bool = False

    def start(self, command: list[str], **environment: str) -> None:
        """Run `command`."""
        for folder in ("shm", "tmp"):
            (self.place / folder).mkdir(parents=True, exist_ok=True)
        hosts = [f"10.77.0.{number} {name}" for number, name in enumerate(NAMES, 1)]
        (self.place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]))
        for path in (
            *self.place.glob("*code"),
            self.place / "left",
            self.place / "done",
        ):
            path.unlink(missing_ok=True)
        self.ended, self.lost = None, False
        variables = {
            **os.environ, "OMP_NUM_THREADS": "1", "NODE": self.name, "PLACE": str(self.place),
            "TMPDIR": str(self.place / "tmp"), "GLOO_SOCKET_IFNAME": "eth0", "SLURM_JOB_ID": "24",
            **environment,
        }  # fmt: skip
        words = [
            "ip",
            "netns",
            "exec",
            self.space,
            "unshare",
            "--uts",
            "--pid",
            "--mount",
            "--fork",
            "--mount-proc",
        ]
        words += ["--kill-child", "bash", "-c", INIT, "init", *command]  # fmt: skip
        with (self.place / "log").open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=variables, stdout=log, stderr=log
            )

    def look(self) -> bool:
        """Whether torchrun has ended; notes when."""
        if self.ended is None and (self.place / "code").exists():
            self.ended = time.monotonic()
        return self.ended is not None or self.lost

    def said(self) -> str:
        return (self.place / "log").read_text(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """Its processes of segpipe, without loaders: children of torchrun."""
        found = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if (
                    "RANK" in process.environ()
                    and "RANK" not in psutil.Process(process.ppid()).environ()
                ):
                    found.append(process)
        return found

    def _processes(self) -> list[psutil.Process]:
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """End all its processes at once, as a power cut would."""
        self.lost = True
        if self.process is not None:
            for process in self._processes()[
                :1
            ]:  # unshare, whose end is the end of all
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.kill()
            self.process.wait()

    def left(self) -> list[str]:
        """Processes, shared memory and folders that remain after the end."""
        end = time.monotonic() + 10
        while not (self.place / "done").exists() and time.monotonic() < end:
            time.sleep(0.1)
        processes = (self.place / "left").read_text().splitlines()
        files = [*(self.place / "shm").iterdir(), *(self.place / "tmp").iterdir()]
        # .ses is left by a library of the machine, also by `python -c "import torch"`.
        return processes + [path.name for path in files if path.name != ".ses"]


@dataclass
class Cluster:
    """Two machines and their network."""

    folder: Path
    machines: list[Machine] = field(default_factory=list)

    @property
    def hub(self) -> str:
        return f"segpipe-{os.getpid()}-hub"

    def port(self, machine: Machine) -> str:
        return f"port{NAMES.index(machine.name)}"

    def connect(self, machine: Machine, up: bool) -> None:
        """Cut or mend the link of a machine; its own interface notices nothing."""
        state = "up" if up else "down"
        _run("ip", "-n", self.hub, "link", "set", self.port(machine), state)

    def disturb(self, machine: Machine, delay_ms: int, loss_percent: int) -> str:
        """Delay and drop what a machine sends; returns by which means."""
        inside = ("ip", "netns", "exec", machine.space)
        netem = ["netem", "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%"]
        device = ["tc", "qdisc", "replace", "dev", "eth0", "root"]
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(*inside, *device, *netem)
            return " ".join(netem)
        # A kernel without netem: a narrow link instead of a delay.
        tbf = ["tbf", "rate", "200mbit", "burst", "32kb", "limit", "3000000"]  # fmt: skip
        _run(*inside, *device, *tbf)
        rule = (
            "table inet f {\n chain out {\n type filter hook output priority 0;\n"
            f" numgen random mod 100 < {loss_percent} drop\n }}\n}}\n"
        )
        _run(*inside, "nft", "-f", "-", input=rule)
        return f"{' '.join(tbf)}, nft drop {loss_percent}%"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Two machines that reach each other and nothing else; gone at the end, with all their processes."""
    made = Cluster(folder)
    spaces = [made.hub]
    try:
        _run("ip", "netns", "add", made.hub)
        _run("ip", "-n", made.hub, "link", "add", "hub", "type", "bridge")
        _run("ip", "-n", made.hub, "link", "set", "hub", "up")
        for number, name in enumerate(NAMES):
            machine = Machine(name, f"segpipe-{os.getpid()}-{name}", folder / name)
            machine.place.mkdir(parents=True)
            made.machines.append(machine)
            spaces.append(machine.space)
            _run("ip", "netns", "add", machine.space)
            port = f"port{number}"
            _run("ip", "-n", made.hub, "link", "add", port, "type", "veth",
                 "peer", "name", "eth0", "netns", machine.space)  # fmt: skip
            _run("ip", "-n", made.hub, "link", "set", port, "master", "hub", "up")
            for words in (
                ("addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                _run("ip", "-n", machine.space, *words)
        yield made
    finally:
        for machine in made.machines:
            machine.kill()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def command(folder: Path, name: str, *options: str) -> list[str]:
    """The words that start the run on a machine."""
    launcher = {
        "--nnodes": "2", "--nproc-per-node": "1", "--max-restarts": "0", "--shutdown-timeout": "10",
        "--rdzv-backend": "c10d", "--rdzv-endpoint": f"node0:{PORT}", "--rdzv-id": "cluster",
        "--rdzv-conf": "read_timeout=15",
        "--log-dir": "/dev/null",
    } | dict(option.split("=", 1) for option in options)  # fmt: skip
    words = [sys.executable, "-m", "torch.distributed.run"]
    words += [f"{key}={value}" for key, value in launcher.items()]
    settings = [*RECIPE, f"train.steps={STEPS}", f"compute.timeout_s={TIMEOUT_S}"]
    words += ["-m", "benchmarks.cluster", "train", *settings]
    return [*words, f"run.root={folder}", f"run.name={name}"]


# As the next attempt of the same job.
NEXT = {"SLURM_JOB_ID": "24", "SLURM_RESTART_COUNT": "1"}


def by_itself(folder: Path, name: str) -> list[str]:
    """Settings of the run in one process."""
    words = [*RECIPE, f"train.steps={STEPS}", "compute.nproc=1"]
    return [*words, f"run.root={folder}", f"run.name={name}"]


def alone(folder: Path, name: str) -> int:
    """Exit code of the run in one process on this machine."""
    words = [sys.executable, "-m", "segpipe", "train", *by_itself(folder, name)]
    with (folder / f"{name}.log").open("ab") as log:
        done = subprocess.run(words, cwd=ROOT, stdout=log, stderr=log, env=os.environ | NEXT)  # fmt: skip
    return done.returncode


def steps_done(run: Path) -> int:
    """Last step in metrics.jsonl."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"])  # fmt: skip
    return 0


def over(machines: Sequence[Machine]) -> bool:
    """Whether the launchers of these machines have ended; notes when each was first seen so."""
    return all([each.look() for each in machines])  # noqa: C419 - each is looked at


def wait_for(what: Callable[[], Any], seconds: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(0.05)
    return False


def digests(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    return {name: result[name] for name in DIGESTS}


# Each fault gives the machines that survive it, and the rank and machine that they must name.
Fault = Callable[[Cluster], tuple[list[Machine], str]]


def cut(made: Cluster) -> tuple[list[Machine], str]:
    """the link is cut"""
    made.connect(made.machines[1], up=False)
    return made.machines, "other"


def _power_off(made: Cluster, number: int) -> tuple[list[Machine], str]:
    made.connect(made.machines[number], up=False)
    made.machines[number].kill()
    return [made.machines[1 - number]], NAMES[number]


def dead_0(made: Cluster) -> tuple[list[Machine], str]:
    """the machine of rank 0 and the rendezvous loses power"""
    return _power_off(made, 0)


def dead_1(made: Cluster) -> tuple[list[Machine], str]:
    """the other machine loses power"""
    return _power_off(made, 1)


def _signal(made: Cluster, number: int, sent: signal.Signals) -> tuple[list[Machine], str]:  # fmt: skip
    for process in made.machines[number].ranks():
        process.send_signal(sent)
    # Nothing ends a stopped process from outside but its scheduler.
    stopped = sent == signal.SIGSTOP
    return [made.machines[1 - number]] if stopped else made.machines, NAMES[number]


def killed_0(made: Cluster) -> tuple[list[Machine], str]:
    """rank 0 is killed"""
    return _signal(made, 0, signal.SIGKILL)


def killed_1(made: Cluster) -> tuple[list[Machine], str]:
    """rank 1 is killed"""
    return _signal(made, 1, signal.SIGKILL)


def stopped_0(made: Cluster) -> tuple[list[Machine], str]:
    """rank 0 is stopped"""
    return _signal(made, 0, signal.SIGSTOP)


def stopped_1(made: Cluster) -> tuple[list[Machine], str]:
    """rank 1 is stopped"""
    return _signal(made, 1, signal.SIGSTOP)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (cut, dead_0, dead_1, killed_0, killed_1, stopped_0, stopped_1)
}
CASES = (*FAULTS, "delay", "late", "version")
SMOKE = {"CASES": ("cut",), "FAULT_STEP": 2, "STEPS": 10}


def provoke(folder: Path, name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """What became of the run under one fault, and of its resume."""
    row: dict[str, Any] = {"case": name}
    run = folder / name
    with cluster(folder / f"{name}.machines") as made:
        survivors, lost = made.machines, ""
        first, second = made.machines
        environment = {each: {} for each in NAMES}
        if name == "version":
            environment["node1"] = other_version(folder)
            lost = "node1"
        if name == "delay":
            row["means"] = [made.disturb(each, 5, 3) for each in made.machines]
        first.start(command(folder, name), **environment["node0"])
        if name == "late":
            time.sleep(TIMEOUT_S + 10)
        second.start(command(folder, name), **environment["node1"])
        begun = time.monotonic()
        if name in FAULTS:
            wait_for(
                lambda: steps_done(run) >= FAULT_STEP or over(made.machines), STARTED_S
            )
            if steps_done(run) < FAULT_STEP:
                said = [each.said()[-1500:] for each in made.machines]
                return {**row, "passed": False, "problem": "no step", "said": said}
            begun = time.monotonic()
            survivors, lost = FAULTS[name](made)
        limit = TIMEOUT_S + MARGIN_S if name in FAULTS else PATIENCE_S
        ended = wait_for(lambda: over(survivors), limit + 60)
        row["seconds"] = {
            each.name: round(each.ended - begun, 1) if each.ended else None
            for each in survivors
        }
        row["codes"] = {each.name: exit_codes(each) for each in survivors}
        if name in ("delay", "late"):
            row["passed"] = ended and all((each.place / "code").read_text() == "0\n" for each in survivors)  # fmt: skip
        else:
            row["named"] = {each.name: names(each, lost) for each in survivors}
            row["left"] = {each.name: each.left() if each.ended else ["torchrun"] for each in survivors}  # fmt: skip
            # The machine of a rank that was killed or stopped has torchrun's word for it.
            judged = [
                each for each in survivors if name == "version" or each.name != lost
            ]
            if name.startswith("stopped"):
                row["woken"] = woken(
                    next(each for each in made.machines if each.name == lost)
                )
            row["lock"] = (run / "run.lock").exists()
            row["passed"] = (
                ended
                and max(row["seconds"].values()) <= limit
                and all(row["codes"][each.name] == [9] for each in judged)
                and all(row["named"][each.name] for each in judged)
                and not any(row["left"].values())
                and row.get("woken", True)
            )
        row["said"] = {each.name: speech(each) for each in survivors}
    if name not in ("delay", "late"):
        began = time.monotonic()
        row["resume"] = alone(folder, name)
        row["resume_seconds"] = round(time.monotonic() - began, 1)
        if row["resume"] != 0:
            row["said"]["resume"] = (
                (folder / f"{name}.log").read_text().splitlines()[-9:]
            )
        row["passed"] = row["passed"] and row["resume"] == 0
    row["equal"] = (run / "result.json").is_file() and digests(run) == wanted
    row["passed"] = row["passed"] and row["equal"]
    if not row["passed"]:
        row["logs"] = {each.name: each.said()[-3000:] for each in made.machines}
    return row


def woken(machine: Machine) -> bool:
    """Whether a stopped rank that is continued ends, and its launcher with it."""
    for process in machine.ranks():
        process.send_signal(signal.SIGCONT)
    return wait_for(machine.look, MARGIN_S)


def exit_codes(machine: Machine) -> list[int]:
    """Of the ranks of a machine that ended on their own; each start adds one."""
    return [int(path.read_text()) for path in sorted(machine.place.glob("rank*.code"))]


def names(machine: Machine, lost: str) -> bool:
    """Whether a machine's output names the rank and the machine that were lost."""
    other = NAMES[1 - NAMES.index(machine.name)] if lost == "other" else lost
    own_words = "\n".join(speech(machine))
    return f"rank {NAMES.index(other)}" in own_words and other in own_words


def speech(machine: Machine) -> list[str]:
    """Lines of segpipe itself: without torchrun's."""
    lines = machine.said().splitlines()
    ours = [line for line in lines if re.match(r"rank|collective|\S+ = |lost|the last", line)]  # fmt: skip
    return ours or ["nothing of segpipe"]


def other_version(folder: Path) -> dict[str, str]:
    """Variables that make a machine import another version of segpipe."""
    copy = folder / "other"
    if not copy.exists():
        shutil.copytree(ROOT / "segpipe", copy / "segpipe", ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
        shutil.copytree(ROOT / "conf", copy / "conf")
        path = copy / "segpipe" / "__init__.py"
        path.write_text(re.sub(r'__version__ = ".*"', '__version__ = "0.0.1"', path.read_text()))  # fmt: skip
    return {"PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"}


def child(words: list[str]) -> int:
    """segpipe as a rank that writes down its exit code."""
    from segpipe.cli.main import main

    code, end = Path(os.environ["PLACE"], f"rank{os.environ['RANK']}.code"), os._exit

    def end_at_once(number: int) -> None:
        if os.getpid() == own:
            code.write_text(str(number))
        end(number)

    own = os.getpid()
    os._exit = end_at_once  # type: ignore[assignment]
    number = main(words)
    code.write_text(str(number))
    return number


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Every case in turn. Passed when all processes ended in time with code 9, both sides of what was lost are named,
    nothing is left, and a resume has the digests of a run that was left alone."""
    if reason := permitted():
        return {"what": "skipped", "reason": reason, "passed": False}
    rows = []
    only = given.settings or CASES
    with tempfile.TemporaryDirectory(prefix="sp") as name:
        folder = Path(name)
        assert alone(folder, "alone") == 0, (folder / "alone.log").read_text()
        wanted = digests(folder / "alone")
        for case in only:
            row = json.dumps(provoke(folder, case, wanted))
            rows.append(json.loads(row.replace(name, "RUNS")))
            Console(stderr=True).print(rows[-1], soft_wrap=True)
    return {
        "what": " ".join(command(Path("RUNS"), "NAME")[1:]),
        "machine": measuring.machine(),
        "cases": rows,
        "passed": all(row["passed"] for row in rows),
    }


if __name__ == "__main__":
    sys.exit(child(sys.argv[1:]))
