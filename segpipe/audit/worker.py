"""One process of a replay, under torch's launcher: `python -m segpipe.audit.worker TASKS.json`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from segpipe.audit.task import ERROR, Task
from segpipe.determinism import flags
from segpipe.distributed import environment
from segpipe.errors import CollectiveError, SegpipeError
from segpipe.settings.config import config_hash


def work(listed: Path) -> int:
    """Exit code; the words of an error are left beside the list of tasks."""
    tasks = [Task.read(values) for values in json.loads(listed.read_text())]
    config = tasks[0].config
    flags.set_environment(environment.local_world_size() * config.compute.threads, config.compute.mode)
    from segpipe.audit.replay import replay
    from segpipe.distributed import group as processes

    flags.apply(config.compute.threads, config.compute.mode)  # before the group: NCCL reads switches when it is made
    rank = environment.rank()
    try:
        group = processes.join(config.compute, {"configuration": config_hash(config)})
        try:
            for number, task in enumerate(tasks):
                replay(task, group, partial(_say, number) if group.is_main else _be_silent)
            return 0
        finally:
            processes.leave(group)
    except SegpipeError as error:
        echo = isinstance(error, CollectiveError)  # of what another rank has to tell
        (listed.parent / f"{int(echo)}.rank{rank:02d}.{ERROR}").write_text(str(error))
        return error.exit_code


def _say(number: int, done: int) -> None:
    print(f"replayed {number} {done}", flush=True)


def _be_silent(done: int) -> None:
    """Ranks other than 0 have done the same."""


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1])))
