"""Slurm with two nodes on this machine: its daemons in namespaces, all their files in one folder, gone at the end.

    python tests/cluster/slurm.py COMMAND ...    # for example: sbatch --wait examples/cluster/train.sbatch

Runs COMMAND where the controller is, with sbatch, squeue, scontrol and the others at hand. Needs root, iproute2, and
slurm-wlm with munge (`apt-get install slurm-wlm munge`). The nodes are those of benchmarks/cluster.py: each has a host
name, a network and a /dev/shm of its own, and may lose its power. No cgroups: a job's processes are found in /proc.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import cluster as machines  # noqa: E402 - from this checkout

ADDRESS = "10.77.0.254"  # of the controller, on the bridge between the nodes
NODE_LOST_S = 60  # SlurmdTimeout; 300 where it is not set
CONF = """
ClusterName=segpipe
SlurmctldHost=control({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
SlurmdTimeout={lost_s}
GresTypes=gpu
{addresses}
PartitionName=normal Nodes={nodes} Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE PriorityTier=2
"""
# Files that stand for GPUs: Slurm hands them out, segpipe trains on the CPU.
GRES = "Name=gpu File=/dev/tty[1-8]\n"


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    for tool in ("slurmctld", "slurmd", "munged", "sbatch"):
        if not shutil.which(tool):
            return f"{tool} is missing (apt-get install slurm-wlm munge)"
    if os.geteuid():
        return "needs root, for namespaces"
    return machines.permitted()


@dataclass
class Slurm:
    """The running scheduler."""

    folder: Path
    made: machines.Cluster

    def words(self, *words: str) -> list[str]:
        """A command as the controller's machine would run it."""
        return ["ip", "netns", "exec", self.made.hub, *words]

    def call(self, *words: str, cwd: Path = ROOT, **variables: str) -> str:
        """What a command of Slurm prints. Raises RuntimeError with its complaint."""
        done = self.run(*words, cwd=cwd, **variables)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}{done.stdout}")
        return done.stdout

    def run(
        self, *words: str, cwd: Path = ROOT, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command where the controller is, at its end."""
        return subprocess.run(
            self.words(*words),
            env={**os.environ, "SLURM_CONF": str(self.conf), **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
        )

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    def submit(self, *words: str, cwd: Path = ROOT, **variables: str) -> str:
        """Id of the job."""
        return self.call("sbatch", "--parsable", *words, cwd=cwd, **variables).strip()

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job, such as JobState, Restarts and ExitCode."""
        told = self.call("scontrol", "--oneliner", "show", "job", number).splitlines()
        return dict(word.split("=", 1) for word in told[0].split() if "=" in word)

    def wait(self, number: str, *states: str, seconds: float = 240) -> dict[str, str]:
        """The job, once it is in one of these states. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            if time.monotonic() > end:
                raise TimeoutError(f"{job}\n{(self.folder / 'slurmctld.log').read_text()[-3000:]}")  # fmt: skip
            time.sleep(0.3)
        return job

    def node_states(self) -> str:
        return self.call(
            "sinfo", "--noheader", "--Node", "--partition=normal", "--format=%N %T"
        )

    def start_node(self, number: int) -> None:
        """Let a machine start its slurmd."""
        node = self.made.machines[number]
        daemon = [shutil.which("slurmd") or "", "-D", "-N", node.name, "-f", str(self.conf)]  # fmt: skip
        node.start(daemon)

    def power_off(self, number: int) -> None:
        """A node loses its power: no process of it says a last word."""
        self.made.connect(self.made.machines[number], up=False)
        self.made.machines[number].kill()

    def power_on(self, number: int) -> None:
        self.made.connect(self.made.machines[number], up=True)
        self.start_node(number)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A controller and two nodes; gone at the end, with all their processes."""
    for name in ("munge", "state"):
        (folder / name).mkdir(parents=True)
        (folder / name).chmod(0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o400)
    conf = CONF.format(
        address=ADDRESS,
        folder=folder,
        lost_s=NODE_LOST_S,
        nodes=",".join(machines.NAMES),
        addresses="\n".join(
            f"NodeName={name} NodeAddr=10.77.0.{number} CPUs=64 Gres=gpu:8 State=UNKNOWN"
            for number, name in enumerate(machines.NAMES, 1)
        ),
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text(GRES)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    place = {each: folder / "munge" / each for each in ("socket", "pid", "log", "seed")}
    munge = subprocess.Popen(
        ["munged", "--foreground", "--force", f"--key-file={folder}/munge/key",
         f"--socket={place['socket']}", f"--pid-file={place['pid']}",
         f"--log-file={place['log']}", f"--seed-file={place['seed']}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with machines.cluster(folder / "machines") as made:
            made_slurm = Slurm(folder, made)
            hub = ("ip", "-n", made.hub)
            for words in (
                ("addr", "add", f"{ADDRESS}/24", "dev", "hub"),
                ("link", "set", "lo", "up"),
            ):
                subprocess.run([*hub, *words], check=True)
            control = machines.Machine("control", made.hub, folder / "control")
            made.machines.append(control)
            control.start([shutil.which("slurmctld") or "", "-D", "-f", str(made_slurm.conf)])  # fmt: skip
            for number in range(len(machines.NAMES)):
                made_slurm.start_node(number)
            ready(made_slurm)
            yield made_slurm
    finally:
        munge.terminate()
        munge.wait()


def ready(made: Slurm) -> None:
    """Wait until both nodes may get jobs. Raises RuntimeError with what the daemons wrote."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError):
            if made.node_states().count(" idle") == len(machines.NAMES):
                return
        time.sleep(0.3)
    logs = [*made.folder.glob("*.log"), *made.folder.glob("*/*/log"), *made.folder.glob("*/log")]  # fmt: skip
    raise RuntimeError("\n".join(f"{log}\n{log.read_text()[-2000:]}" for log in logs))


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="slurm") as name, slurm(Path(name)) as made:
        given = {**os.environ, "SLURM_CONF": str(made.conf)}
        command = made.words(*(sys.argv[1:] or ["sinfo"]))
        sys.exit(subprocess.run(command, env=given).returncode)
