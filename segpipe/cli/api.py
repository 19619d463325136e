"""The Python API: the functions behind the commands of the same names.

    import segpipe
    run = segpipe.train(["model=ddrnet23_slim", "data=folder", "data.root=ours", "train.epochs=100"])
    ids, confidence = segpipe.load(run.folder).predict(image)  # uint8 RGB (H, W, 3)

Functions raise the errors of segpipe.errors. `settings` replace settings of the run, {"data.split": "test"}; `keys`
are the other keys of the command, as in `segpipe evaluate --help`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from segpipe import errors, plugins
from segpipe.cli.commands import COMMANDS, Given
from segpipe.distributed.environment import local_rank, rank, wait_to_be_ended
from segpipe.errors import ConfigError, Interrupted, SegpipeError
from segpipe.files import read_json
from segpipe.run.launch import alone, check_job, examine, launch, launch_apart
from segpipe.run.tracking import Failure, failure
from segpipe.settings.compose import command_line, complete, composed, quoted, resolve
from segpipe.settings.config import SETTINGS, Config, from_mapping, to_mapping
from segpipe.settings.setting import simple

# Most commands import torch, so a function imports its own when it is called.
if TYPE_CHECKING:
    from segpipe.export.verify_report import ExportReport
    from segpipe.ledger.divergence import Comparison
    from segpipe.predict.predictor import Predictor

Settings = Sequence[str] | Mapping[str, Any] | Config


# Replacements for settings of a run.
Replaced = Mapping[str, Any] | None


@dataclass(frozen=True)
class RunResult:
    """A finished training: its folder, the content of result.json, and the validation mIoU, from 0 to 1."""

    folder: Path
    figures: Given

    @property
    def miou(self) -> float | None:
        """Validation mIoU; None if no validation pixel is labelled."""
        found: float | None = self.figures["miou"]
        return found


def train(settings: Settings = ()) -> RunResult:
    """Train a network in its own run folder and export it; returns the run's result.

    settings: as typed (["model=pidnet_s", "optim.lr=0.1"]), by name ({"model": "pidnet_s", "optim": {"lr": 0.1}}),
    or a Config. For several processes or plug-ins, a script needs `if __name__ == "__main__":`. Sets torch's
    determinism in this process.
    """
    return run(configuration(settings))


def configuration(settings: Settings = ()) -> Config:
    """The configuration that `train` uses for these settings."""
    if isinstance(settings, Config):
        return from_mapping(to_mapping(settings))
    if isinstance(settings, Mapping):
        settings = list(_overrides(settings))
    line = command_line([settings] if isinstance(settings, str) else settings)
    if line.sweeps:
        raise ConfigError(
            "These settings are of a sweep. Add hydra.mode=RUN, or use `segpipe train`."
        )
    return composed(line)


@alone(reads=True)
def load(folder: Path | str, *, settings: Replaced = None, **keys: Any) -> Predictor:
    """The network of a run or of an exported folder: `.predict(image)` returns class ids and confidence.

    Shapes: image uint8 RGB (H, W, 3) -> uint8 (H, W), float32 (H, W) from 0 to 1. `.names` and `.palette` describe
    the classes. Takes the keys of `segpipe predict` except its files, such as which="best" or tta=["flip"].
    """
    from segpipe.cli import predict
    from segpipe.runtime.artifact import MANIFEST

    kind = "artifact" if (Path(folder) / MANIFEST).is_file() else "run"
    # The file arguments of `segpipe predict` do not matter here.
    values = keys | {kind: folder, "source": "-", "out": "-"}
    given = _given("predict", values, settings)
    predict.check(given, has_video=False)
    return predict.predictor(given)


@alone(reads=True)
def evaluate(run: Path | str, *, settings: Replaced = None, **keys: Any) -> Given:
    """Scores of a run on a split, by the names that `segpipe evaluate` prints."""
    from segpipe.cli.evaluate import scored

    return scored(_given("evaluate", keys | {"run": run}, settings))[0]


@alone(reads=True)
def export(run: Path | str, *, settings: Replaced = None, **keys: Any) -> ExportReport:
    """Export a run; returns the published folder and the result of every gate. Raises ExportMismatch if one fails."""
    from segpipe.cli import export as command

    return command.export(_given("export", keys | {"run": run}, settings))


def compare(a: Path | str, b: Path | str, **keys: Any) -> Comparison:
    """Whether two runs hold the same bits, and where they first differ."""
    from segpipe.cli.runs import compared

    return compared(_given("compare", keys | {"a": a, "b": b}, {}))


def _given(name: str, values: Mapping[str, Any], settings: Replaced) -> Given:
    """The values of a command's keys, as parsed from its command line."""
    given = complete({**values, **(settings or {})}, COMMANDS[name].known)
    plugins.trust(given["trust"])
    return given


def _overrides(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings as command-line arguments."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in SETTINGS:
            yield from _overrides(value, f"{key}.")
        else:
            entry = SETTINGS.get(key)
            if entry and entry.is_text:
                value = entry.convert(value)  # refuses None, say
            yield f"{key}={value if isinstance(value, str | Path) else _typed(value)}"


def _typed(value: Any) -> str:
    value = simple(value)
    if isinstance(value, Mapping):
        entries = (f"{_key(name)}: {_typed(each)}" for name, each in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Iterable):
        return f"[{', '.join(map(_typed, value))}]"
    return json.dumps(value, default=repr)


def _key(name: Any) -> str:
    """A key of a mapping in Hydra's grammar, which does not allow quotes there."""
    return re.sub(r"([\\()\[\]{}:=,\s])", r"\\\1", str(name))


def train_main(given: Given) -> int:
    """Exit code of `segpipe train`: of one training, or with --multirun of a sweep."""
    try:
        line = command_line(given["overrides"])
        if line.sweeps:
            from segpipe.run.sweep import sweep

            return sweep(line, train_job, check_job, examine)
        config = composed(line)
        if line.shows:
            print(OmegaConf.to_yaml(OmegaConf.create(to_mapping(config))), end="")
            return 0
        run(config)
    except SegpipeError as error:
        # The other ranks of this machine have the same command line.
        if error.told or local_rank() == 0:
            raise
        wait_to_be_ended()
        return error.exit_code
    return 0


@cache
def _is_of_joblib() -> bool:
    """Whether this is a joblib process. Sets a start method that our child processes know."""
    found = multiprocessing.get_start_method(allow_none=True) == "loky"
    if found:
        multiprocessing.set_start_method("spawn", force=True)
    return found


def train_job(job: DictConfig) -> int:
    """Exit code of a sweep's job, in its launcher's process; child processes do the training."""
    config = resolve(job)
    if _is_of_joblib():
        # Console lines of concurrent jobs could not be told apart.
        log = Path(config.run.root, ".joblib", f"{config.run.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    print(f"job {HydraConfig.get().job.num}: {config.run_dir}", flush=True)
    code = launch_apart(config)
    if code == Interrupted.exit_code:
        raise KeyboardInterrupt
    return code


def run(config: Config) -> RunResult:
    """Train and export, in this process or in compute.nproc others; returns the run's result.

    Raises the SegpipeError of the exit code; its `told` says whether the message was printed.
    """
    before = failure(config.run_dir)
    code = launch(config)
    if not code:
        # Rank 0 writes.
        return RunResult(
            config.run_dir, {} if rank() else read_json(config.run_dir / "result.json")
        )
    now = failure(config.run_dir)
    if now == before:
        now = Failure()
    # A Ctrl-C outside the updates is not recorded.
    kind = Interrupted if code == Interrupted.exit_code else SegpipeError
    error = getattr(errors, now.kind, kind)(now.reason)
    error.exit_code, error.told = code, True
    raise error
