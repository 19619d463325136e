"""Ways to deadlock or desync the ranks of a real training: each must end, with its cause in words.

Over gloo on a CPU; with `compute.device=cuda ranks=2` over NCCL on two GPUs, or on one if it takes several ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import measure as measuring

ROOT = Path(__file__).resolve().parents[1]
RANKS, STEP, TIMEOUT_S = 4, 2, 5
MISMATCH_S = 2.0  # from the call that is wrong to the words, on a machine with a core for each rank
RECIPE = (
    "model=fast_scnn", "data=synthetic", "data.size=[64,96]", "data.num_train=16", "data.num_val=4", "data.workers=0",
    "augment.crop_size=[64,64]", "train.steps=6", "train.progress=false", "compute.device=cpu", "compute.shards=4",
    "compute.samples_per_shard=2", "compute.threads=1", f"compute.timeout_s={TIMEOUT_S}", "augment.check=false",
    "export.enabled=false",
)  # fmt: skip
CALL = r"\(?\S+\.py:\d+"  # where a call was made


@dataclass(frozen=True)
class Fault:
    """What the last rank does at step 2, and what must be said."""

    what: str
    do: Callable[[Any], None]  # given the process group
    said: str  # pattern of one line, in which LAST is the rank at fault
    limit_s: float = MISMATCH_S
    settings: tuple[str, ...] = ()  # besides RECIPE


def _wrong_shape(group: Any) -> None:
    import torch

    group.sum_tensor(torch.zeros(9, dtype=torch.int64))


def _swapped(group: Any) -> None:
    group.gather("before the sum, which the others do first")


def _asleep(group: Any) -> None:
    time.sleep(1000)


def _killed(group: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped(group: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raises(group: Any) -> None:
    raise ValueError("a planted mistake")


def _skips(group: Any) -> None:
    from segpipe.distributed.reduce import RankSum

    RankSum.start = lambda *_: None  # type: ignore[method-assign]


def _sleeps_in_forward(group: Any) -> None:
    from segpipe.train.forward import AllHeads

    AllHeads.forward = lambda *_: time.sleep(1000)  # type: ignore[method-assign, assignment, return-value]


BOTH = rf"collective \d+ is not the same on all ranks.*ranks? 0[, \d]*: \S+.* at {CALL}.*rank LAST: \S+.* at {CALL}"
FAULTS = {
    "shape": Fault("a tensor of another shape", _wrong_shape, BOTH),
    "extra": Fault("a barrier that the others do not make", lambda group: group.barrier(), BOTH),
    "order": Fault("a gather before the sum", _swapped, BOTH),
    "skipped": Fault("no part in the reduction of the gradients", _skips, BOTH),
    "asleep": Fault("does not come", _asleep, r"not reached by rank LAST, last seen (?!.*No answer)", TIMEOUT_S + 4.0),
    "forward": Fault(
        "sleeps in its forward pass, and the others wait inside of torch's DDP", _sleeps_in_forward,
        rf"backward of DDP at {CALL} __call__, was not reached by rank LAST, last seen after",
        TIMEOUT_S + 4.0, ("compute.mode=ddp",),
    ),
    "killed": Fault(
        "ended by SIGKILL", _killed,
        rf"not reached by rank LAST, last seen after .* at {CALL} .*No answer from rank LAST: ended", TIMEOUT_S + 4.0,
    ),
    "stopped": Fault(
        "stopped by SIGSTOP, as a debugger or a scheduler does", _stopped,
        r"not reached by rank LAST, .*No answer from rank LAST: ended, stopped", TIMEOUT_S + 4.0,
    ),
    "raises": Fault("an exception on one rank", _raises, r"^rank LAST: ValueError: a planted mistake"),
    "config": Fault(  # whoever came first is the one that the other is held against
        "another configuration", lambda group: None,
        r"configuration = \w+ on (?=.*rank LAST)rank \d .* but \w+ on rank",
    ),
}  # fmt: skip


def child(name: str, folder: str, *settings: str) -> int:
    """A rank of the run with the fault `name`."""
    from segpipe.distributed import environment
    from segpipe.distributed import group as meeting
    from segpipe.run import launch
    from segpipe.settings.compose import compose
    from segpipe.train import recorder

    rank, last = environment.rank(), int(os.environ["WORLD_SIZE"]) - 1
    seed = 1 if name == "config" and rank == last else 0
    config = compose(
        [
            *RECIPE,
            *FAULTS[name].settings,
            *settings,
            f"run.root={folder}",
            "run.name=run",
            f"seed={seed}",
        ]
    )
    right, meet, calls = recorder.Watch.sum, meeting.meet, [0]

    def sums(own: Any, *given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == STEP + 1 and rank == last:
            _mark(folder)
            FAULTS[name].do(own.group)
        return right(own, *given, **named)

    def meets(*given: Any) -> Any:
        _all_here(folder, rank, last)
        if name == "config" and rank == last:
            _mark(folder)
        return meet(*given)

    recorder.Watch.sum = sums  # type: ignore[method-assign]
    meeting.meet = meets
    return launch.work(config)


def _mark(folder: str) -> None:
    """From now on the fault is there."""
    Path(folder, "fault").write_text(str(time.time()))


def _all_here(folder: str, rank: int, last: int) -> None:
    """Wait until all ranks have imported torch, so that the seconds to a verdict are those of the verdict."""
    Path(folder, f"here{rank}").touch()
    while len([*Path(folder).glob("here*")]) <= last:
        time.sleep(0.01)


def judge(
    name: str,
    said: Sequence[tuple[float, str]],
    begun: float | None,
    exit_code: int | None,
    ranks: int = RANKS,
) -> dict[str, Any]:
    """Whether lines, each with its time, name the fault that began at `begun`, in time; exit code None: it hangs."""
    fault = FAULTS[name]
    pattern = fault.said.replace("LAST", str(ranks - 1))
    heard = next(
        ((when, line.strip()) for when, line in said if re.search(pattern, line)),
        None,
    )
    took = round(heard[0] - begun, 2) if heard and begun else None
    words = heard[1] if heard else "".join(line for _, line in said)[-1500:]
    late = took is None or took > fault.limit_s
    return {
        "fault": name, "what": fault.what, "said": words, "seconds": took, "limit_s": fault.limit_s, "late": late,
        "exit_code": exit_code, "passed": bool(heard) and bool(exit_code),
    }  # fmt: skip


def _without_names(line: str, folder: str) -> str:
    """A line as any machine would say it."""
    return line.replace(folder, "FOLDER").replace(
        f"(host {socket.gethostname()},", "(host HOST,"
    )


def provoke(name: str, ranks: int, settings: Sequence[str]) -> dict[str, Any]:
    """What a run with the fault said, how long after the fault, and how it ended."""
    said: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        process = subprocess.Popen(
            [*command, str(Path(__file__)), name, folder, *settings], cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

        def listen() -> None:
            assert process.stderr is not None
            with process.stderr as lines:
                for line in lines:
                    said.append((time.time(), _without_names(line, folder)))

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            exit_code: int | None = process.wait(180)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            exit_code = None
        listener.join()
        mark = Path(folder, "fault")
        begun = float(mark.read_text()) if mark.exists() else None
    return judge(name, said, begun, exit_code, ranks)


SMOKE = {"FAULTS": {"order": FAULTS["order"]}, "RANKS": 2}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The faults named, or every one, in turn; passed when each run ended with the right words in time."""
    rows = []
    number = [part for part in given.settings if part.startswith("ranks=")]
    names = [part for part in given.settings if part in FAULTS]
    settings = [part for part in given.settings if part not in (*number, *names)]
    ranks = int(number[-1].removeprefix("ranks=")) if number else RANKS
    for name in names or FAULTS:
        rows.append(provoke(name, ranks, settings))
        Console(stderr=True).print(rows[-1], soft_wrap=True)
    recipe = " ".join([*RECIPE, *settings])
    return {
        "what": f"{recipe}; {ranks} processes, rank {ranks - 1} at fault in step {STEP}",
        "machine": measuring.machine(),
        "faults": rows,
        "passed": all(row["passed"] and not row["late"] for row in rows),
    }


if __name__ == "__main__":
    sys.exit(child(*sys.argv[1:]))
