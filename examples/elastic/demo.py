"""A training run that loses a machine, continues without it, and takes it back: `make elastic-demo`, about 2 minutes.

    python examples/elastic/demo.py [FOLDER]

Two launchers on this host stand for two machines. One is killed with all its processes and restarted later. The weights
must equal those of an undisturbed run. Runs go to FOLDER (runs/elastic). Exit codes: 0 they are equal, 1 they differ,
or an event did not happen.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from rich.console import Console
from rich.table import Table

from segpipe.ledger.rows import read_file

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240  # for each event
# Seconds until torchrun considers a silent machine lost, and waits for more machines; for two on one host.
PATIENCE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=3"
RECIPE = (
    "model=fast_scnn", "data=synthetic", "data.size=[96,128]", "data.num_train=64", "data.num_val=4", "data.workers=1",
    "augment.crop_size=[64,96]", "augment.check=false", "train.progress=false", "train.log_every=1",
    "compute.shards=2", "compute.samples_per_shard=2", "compute.threads=1", "compute.device=cpu",
    "checkpoint.every=5", "export.enabled=false", "run.exists=resume",
)  # fmt: skip


@dataclass
class Demo:
    """The training on two machines, and its events."""

    folder: Path
    console: Console
    steps: int = 240
    after: int = 15  # steps between two events
    changes: tuple[str, ...] = ()  # settings besides RECIPE
    port: int = 0
    machines: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    events: list[tuple[str, float]] = field(default_factory=list)

    def story(self) -> bool:
        """Whether both runs have the same digests, and the machine was lost and taken back."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        try:
            self._disturbed()
        finally:
            for name in self.machines:
                self._kill(name)
        self._wait("the same training in one process, undisturbed", self._alone())
        return self._told()

    def _disturbed(self) -> None:
        self._start("A")
        self._start("B")
        self._wait(
            "A and B train",
            lambda: (
                self._sizes()[-1:] == [2]
                and self._step() > self.after
                and (self.folder / "two" / "last.pt").is_file()
            ),
        )
        self._kill("B")
        begun = self._step() + 3  # steps in progress may still be written
        self._wait(
            "B is killed; A continues alone",
            lambda: self._sizes()[-1:] == [1] and self._step() > begun,
        )
        begun = self._step()
        self._wait(
            f"{self.after} steps later", lambda: self._step() > begun + self.after
        )
        self._start("B")
        self._wait("B is restarted; both train", lambda: self._sizes()[-1:] == [2])
        self._wait("the end", lambda: (self.folder / "two" / "result.json").is_file())
        self._wait(
            "both launchers end",
            lambda: all(each.poll() == 0 for each in self.machines.values()),
        )

    def _start(self, name: str) -> None:
        """Start a machine's launcher. A's hosts the rendezvous."""
        words = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self.port}", "--rdzv-id=elastic",
            f"--rdzv-conf={PATIENCE},is_host={name == 'A'}", "--local-addr=localhost", "-m", "segpipe", "train",
            *self._settings("two"),
        ]  # fmt: skip
        with (self.folder / f"{name}.log").open("ab") as log:
            self.machines[name] = subprocess.Popen(
                words, cwd=ROOT, stdout=log, stderr=log, env=self._variables()
            )

    def _variables(self) -> dict[str, str]:
        # Otherwise a machine that comes back waits for an address that torchrun stored only for the first round.
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def _kill(self, name: str) -> None:
        """End all processes of a machine at once, as a power cut would."""
        process = self.machines[name]
        try:
            each = psutil.Process(process.pid)
            all_of_it = [each, *each.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for one in all_of_it:
            one.send_signal(signal.SIGKILL)
        process.wait()

    def _alone(self) -> Callable[[], bool]:
        words = [sys.executable, "-m", "segpipe", "train", *self._settings("one")]
        with (self.folder / "one.log").open("wb") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=log, stderr=log, env=self._variables()
            )
        return lambda: process.poll() == 0

    def _settings(self, name: str) -> list[str]:
        """Of the run `name`."""
        words = (*RECIPE, *self.changes, f"train.steps={self.steps}")
        settings = dict(word.split("=", 1) for word in words)
        settings |= {"run.root": str(self.folder), "run.name": name}
        return [f"{key}={value}" for key, value in settings.items()]

    def _step(self) -> int:
        """Last step that was logged."""
        path = self.folder / "two" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return max(
            (json.loads(line)["step"] for line in lines if line.endswith("}")),
            default=0,
        )

    def _sizes(self) -> list[int]:
        """Number of processes of each part of the training so far."""
        path = self.folder / "two" / "ledger" / "rank00.bin"
        if not path.is_file():
            return []
        return [each.header.world_size for each in read_file(path).sessions]

    def _wait(self, event: str, what: Callable[[], bool]) -> None:
        """Wait until `what` is true; records how long it took. Raises TimeoutError."""
        begun = time.monotonic()
        while not what():
            over = time.monotonic() - begun > PATIENCE_S
            if over or self.machines["A"].poll():
                raise TimeoutError(
                    f"{event}: not within {PATIENCE_S} s, or A has ended, see the logs in {self.folder}"
                )
            time.sleep(0.2)
        self.events.append((event, time.monotonic() - begun))
        self.console.print(f"{event}: {self.events[-1][1]:.0f} s")

    def _told(self) -> bool:
        """Print both digests; returns whether everything was as expected."""
        table = Table("training", "processes", "weights_digest", "ema_digest")
        results = [
            json.loads((self.folder / name / "result.json").read_text())
            for name in ("two", "one")
        ]
        sizes = [self._sizes(), [1]]
        digests = [(each["weights_digest"], each["ema_digest"]) for each in results]
        for name, size, digest in zip(
            ("disturbed", "alone"), sizes, digests, strict=True
        ):
            table.add_row(
                name, ", ".join(map(str, size)), *(each[:16] for each in digest)
            )
        self.console.print(table)
        return digests[0] == digests[1] and sizes[0] == [2, 1, 2]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/elastic"))
    console = Console()
    try:
        passed = Demo(parser.parse_args().folder.absolute(), console).story()
    except TimeoutError as error:
        console.print(str(error))
        passed = False
    console.print("the same weights" if passed else "not as expected")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
