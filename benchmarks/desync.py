"""Ways to deadlock or desync 4 ranks of a real training over gloo: each must end, with its cause in words."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import measure as measuring

ROOT = Path(__file__).resolve().parents[1]
RANK, STEP, TIMEOUT_S = 3, 2, 5
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
    """What rank 3 does at step 2, and what must be said."""

    what: str
    do: Callable[[Any], None]  # given the process group
    said: str  # pattern
    limit_s: float = MISMATCH_S


def _wrong_shape(group: Any) -> None:
    import torch

    group.sum_tensor(torch.zeros(9, dtype=torch.int64))


def _swapped(group: Any) -> None:
    group.gather("before the sum, which the others do first")


def _asleep(group: Any) -> None:
    time.sleep(1000)


def _killed(group: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(group: Any) -> None:
    raise ValueError("a mistake of rank 3")


def _skips(group: Any) -> None:
    from segpipe.distributed.reduce import RankSum

    RankSum.start = lambda *_: None  # type: ignore[method-assign]


BOTH = rf"collective \d+ is not the same on all ranks.*ranks? 0, 1[, 2]*: \S+.* at {CALL}.*rank 3: \S+.* at {CALL}"
FAULTS = {
    "shape": Fault("a tensor of another shape", _wrong_shape, BOTH),
    "extra": Fault("a barrier that the others do not make", lambda group: group.barrier(), BOTH),
    "order": Fault("a gather before the sum", _swapped, BOTH),
    "skipped": Fault("no part in the reduction of the gradients", _skips, BOTH),
    "asleep": Fault("does not come", _asleep, r"not reached by rank 3 .*Rank 3 stands in \S+", TIMEOUT_S + 4.0),
    "killed": Fault("ended by SIGKILL", _killed, r"another rank ended|Signal 9", 60.0),
    "raises": Fault("an exception on one rank", _raises, r"ValueError: a mistake of rank 3"),
    "config": Fault("another configuration", lambda group: None, r"configuration = \w+ on rank 3 .* but \w+ on rank"),
}


def child(name: str, folder: str) -> int:
    """A rank of the run with the fault `name`."""
    from segpipe import agreement, launch
    from segpipe.compose import compose
    from segpipe.distributed import environment

    rank = environment.rank()
    seed = 1 if name == "config" and rank == RANK else 0
    config = compose([*RECIPE, f"run.root={folder}", "run.name=run", f"seed={seed}"])
    right, calls = agreement.Agreement.sum, [0]

    def sums(own: Any, *given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == STEP + 1 and rank == RANK:
            Path(folder, "fault").write_text(str(time.time()))
            FAULTS[name].do(own._group)
        return right(own, *given, **named)

    agreement.Agreement.sum = sums  # type: ignore[method-assign]
    return launch.work(config)


def provoke(name: str) -> dict[str, Any]:
    """What a run with the fault said, how long after the fault, and how it ended."""
    fault, said, heard = FAULTS[name], [], []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        process = subprocess.Popen(
            [*command, str(Path(__file__)), name, folder], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip

        def listen() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                said.append(line)
                if not heard and re.search(fault.said, line):
                    heard.append(time.time())

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            process.wait(180)
            hangs = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            hangs = True
        listener.join()
        mark = Path(folder, "fault")
        begun = float(mark.read_text()) if mark.exists() else None
    took = round(heard[0] - begun, 2) if heard and begun else None
    words = next((line.strip() for line in said if re.search(fault.said, line)), "".join(said)[-1500:])
    late = took is not None and took > fault.limit_s
    return {
        "fault": name, "what": fault.what, "said": words, "seconds": took, "limit_s": fault.limit_s, "late": late,
        "exit_code": process.returncode, "passed": bool(heard) and not hangs and process.returncode != 0,
    }  # fmt: skip


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Every fault in turn; passed when each run ended with the right words in time."""
    rows = []
    for name in FAULTS:
        rows.append(provoke(name))
        Console(stderr=True).print(rows[-1], soft_wrap=True)
    return {
        "what": f"{' '.join(RECIPE)}; 4 processes, rank {RANK} at fault in step {STEP}",
        "machine": measuring.machine(),
        "faults": rows,
        "passed": all(row["passed"] and not row["late"] for row in rows),
    }


if __name__ == "__main__":
    sys.exit(child(*sys.argv[1:]))
