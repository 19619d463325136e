"""What an audit trains again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from segpipe.settings.config import Config, from_mapping, to_mapping

Report = Callable[[int], None]  # updates done


class RunTask(Protocol):
    """`run_task` of audit/worker.py; commands pass it on, so that what judges a replay does not import training."""

    def __call__(self, task: Task, *, nproc: int, report: Report = ...) -> None: ...


@dataclass(frozen=True)
class Task:
    """Updates `first` to `last - 1` of a run; if there are none, only its state is written into a ledger."""

    config: Config  # of the run, with a folder of its own
    checkpoint: str  # the file to start from; empty: from the seed
    first: int
    last: int
    traced: int = -1  # the update in which every module is traced

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Task:
        """Inverse of `dataclasses.asdict`."""
        return cls(**{**values, "config": from_mapping(values["config"])})


def in_folder(
    config: Config, folder: Path, *, mode: str = "", any_environment: bool = False
) -> Config:
    """Configuration for a replay of a run into `folder`; settings that affect numbers are unchanged."""
    values = to_mapping(config)
    values["run"] |= {
        "root": str(folder.parent),
        "name": folder.name,
        "exists": "resume",
    }
    values["run"]["allow_fingerprint_change"] = any_environment
    values["compute"] |= {"ledger": True, "nproc": "auto"}
    if mode:
        values["compute"]["mode"] = mode
    return from_mapping(values)
