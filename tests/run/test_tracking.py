"""metrics.jsonl through crashes and resumes, and wandb as a mirror that may break without consequence."""

import errno
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml

from ranks import launched
from runs import TINY, run, settings
from segpipe.errors import (
    ConfigError,
    ImpureAugmentError,
    LatencyError,
    NumericsError,
)
from segpipe.files import not_written
from segpipe.run import launch, trackers, tracking
from segpipe.run.pages import Picture
from segpipe.run.trackers import check_tracking, run_id
from segpipe.run.tracking import open_tracker, read_metrics
from segpipe.settings.compose import compose
from segpipe.settings.config import (
    SETTINGS,
    Config,
    check,
    from_mapping,
    to_mapping,
)
from segpipe.train import engine
from segpipe.train.step import TrainStep

ROOT = Path(__file__).resolve().parents[2]


# Imported by the process that needs them, not by each that collects tests: wandb takes 0.8 s.
def wandb() -> Any:
    return import_module("wandb")


def scalars(folder: Path, **given: Any) -> Any:
    """What TensorBoard shows of a folder."""
    events = "tensorboard.backend.event_processing.event_accumulator"
    shown = import_module(events).EventAccumulator(str(folder), **given)
    shown.Reload()
    return shown


def with_wandb(mode: str = "offline") -> Config:
    config = Config()
    return replace(config, track=replace(config.track, name="wandb", mode=mode))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


def steps(run_dir: Path) -> list[int]:
    return [entry["step"] for entry in lines(run_dir)]


def write_steps(run_dir: Path, numbers: range) -> None:
    tracker = open_tracker(Config(), run_dir, None, rank=0)
    for step in numbers:
        tracker.log(step, "train", {"loss": 1.0 / step})
    tracker.close()


def test_a_line_is_on_disk_before_log_returns(tmp_path: Path) -> None:
    tracker = open_tracker(Config(), tmp_path, None, rank=0)
    tracker.log(10, "train", {"loss": 1.5, "lr": 0.05})
    entry = lines(tmp_path)[0]  # not closed, not flushed by us
    tracker.close()
    assert list(entry) == ["step", "kind", "time_s", "loss", "lr"]
    assert entry["step"] == 10
    assert entry["kind"] == "train"
    assert 0 <= entry["time_s"] < 10


def test_what_json_lacks_becomes_null_and_arrays_become_lists(tmp_path: Path) -> None:
    tracker = open_tracker(Config(), tmp_path, None, rank=0)
    tracker.log(
        1,
        "validation",
        {"miou": math.nan, "iou": {"road": 0.5, "bus": None, "car": math.inf}},
    )
    tracker.log(
        2,
        "train",
        {
            "loss": torch.tensor(math.nan),
            "norms": np.array([1.0, math.inf]),
            "count": np.int64(3),
        },
    )
    tracker.close()
    first, second = lines(tmp_path)
    assert first["miou"] is None
    assert first["iou"] == {"road": 0.5, "bus": None, "car": None}
    assert (second["loss"], second["norms"], second["count"]) == (None, [1.0, None], 3)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_values_may_not_overwrite_the_step(tmp_path: Path) -> None:
    tracker = open_tracker(Config(), tmp_path, None, rank=0)
    with pytest.raises(AssertionError):
        tracker.log(1, "train", {"step": 7})
    tracker.close()


def test_resume_drops_what_will_be_written_again(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 8))
    tracker = open_tracker(Config(), tmp_path, 4, rank=0)
    tracker.log(5, "train", {"loss": 0.0})
    tracker.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_resume_cuts_a_torn_last_line(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "kind": "tr')
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [
        1,
        2,
        3,
    ]
    tracker = open_tracker(Config(), tmp_path, 3, rank=0)
    tracker.log(4, "train", {})
    tracker.close()
    assert steps(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "line",
    ['{"step": "4", "kind": "train", "time_s": 1}', '{"step": true, "kind": "train", "time_s": 1}',
     '{"step": 4, "kind": null, "time_s": 1}', '{"step": 4, "kind": "train", "time_s": "1"}', "4", "[" * 100_000, "\0"],
)  # fmt: skip
def test_lines_of_wrong_types_are_skipped(tmp_path: Path, line: str) -> None:
    write_steps(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [
        1,
        2,
        3,
    ]
    tracker = open_tracker(Config(), tmp_path, 9, rank=0)
    tracker.log(4, "train", {})
    tracker.close()
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_clock_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "kind": "train", "time_s": 5000.0}\n'
    )
    tracker = open_tracker(Config(), tmp_path, 1, rank=0)
    tracker.log(2, "train", {})
    tracker.close()
    assert 5000 <= lines(tmp_path)[-1]["time_s"] < 5060


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, range(1, 2))
    assert steps(tmp_path) == [1]
    assert read_metrics(tmp_path / "nowhere.jsonl") == []


def test_another_rank_writes_nothing(tmp_path: Path) -> None:
    tracker = open_tracker(with_wandb(), tmp_path / "run", None, rank=1)
    tracker.log(1, "train", {"loss": 1.0})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder in which nobody ever logged in; returns it."""
    for name in [
        name for name in os.environ if name.startswith("WANDB") or name == "NETRC"
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wandb().teardown()
    yield tmp_path
    wandb().teardown()


def test_online_without_a_login_stops_before_training(no_login: Path) -> None:
    with pytest.raises(ConfigError, match=r"wandb login.*track\.mode=offline"):
        check_tracking(with_wandb("online"))
    check_tracking(with_wandb("offline"))
    check_tracking(Config())


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com"])
def test_login_in_netrc_is_found(no_login: Path, host: str) -> None:
    (no_login / ".netrc").write_text(
        "machine elsewhere.test login user password secret\n"
    )
    with pytest.raises(ConfigError):
        check_tracking(with_wandb("online"))
    (no_login / ".netrc").write_text(f"machine {host} login user password {'0' * 40}\n")
    check_tracking(with_wandb("online"))


def test_login_of_an_own_server_is_asked_for_that_server(
    no_login: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.robots.test")
    wandb().teardown()
    (no_login / ".netrc").write_text(
        "machine api.wandb.ai login user password " + "0" * 40
    )
    with pytest.raises(ConfigError):
        check_tracking(with_wandb("online"))
    (no_login / ".netrc").write_text(
        "machine wandb.robots.test login user password " + "0" * 40
    )
    check_tracking(with_wandb("online"))


def test_login_by_variable_or_settings_file_is_found(
    no_login: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = no_login / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[default]\napi_key = {'0' * 40}\n")
    check_tracking(with_wandb("online"))
    settings.write_text("torn [")
    wandb().teardown()  # it reads them once
    with pytest.raises(ConfigError):
        check_tracking(with_wandb("online"))
    wandb().teardown()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    check_tracking(with_wandb("online"))


@pytest.mark.parametrize(
    ("name", "wheel"),
    [("wandb", "wandb"), ("tensorboard", "tensorboard"), ("mlflow", "mlflow-skinny")],
)
def test_a_package_that_is_missing_is_told_at_the_start(
    name: str, wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=f"Run pip install {wheel}, or set track=none"
    ):
        check_tracking(compose([f"track={name}", "track.mode=offline"]))
    check_tracking(Config())


def test_run_id_follows_the_recipe_and_not_the_machine() -> None:
    config = with_wandb()
    resumed = replace(
        config,
        run=replace(config.run, exists="resume", root="elsewhere"),
        compute=replace(config.compute, nproc="8"),
        data=replace(config.data, workers=7, start_method="spawn"),
    )
    here = run_id(config, Path("runs/a"))
    assert run_id(resumed, Path("elsewhere/a")) == here
    assert run_id(config, Path("runs/b")) != here
    assert run_id(replace(config, seed=1), Path("runs/a")) != here


def _other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {**value, "other": 1}
    if isinstance(value, list):
        return [*value, *value[-1:]] or ["other"]
    return value + 1 if isinstance(value, int | float) else f"{value}1"


@pytest.mark.parametrize("key", SETTINGS)
def test_run_id_is_that_of_all_that_may_be_resumed(key: str) -> None:
    """What a resume may change continues the curve; what it may not is another run."""
    values = to_mapping(Config())
    group, _, name = key.rpartition(".")
    entries = values[group] if group else values
    entries[name] = [{"weight": 2.0}] if key == "data.mix" else _other(entries[name])
    same = run_id(from_mapping(values), Path("runs/a")) == run_id(
        Config(), Path("runs/a")
    )
    assert same is SETTINGS[key].free


class Recorded:
    """Stand-in for the MLflow client: remembers each call."""

    def __init__(self, **results: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._results = results

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, given, named))
            return self._results.get(name)

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(given, named) for called, given, named in self.calls if called == name]


RESULT = {"steps": 7, "miou": 0.25, "best_miou": 0.5, "iou": {"road": 0.5, "bus": None}}
SCORES = {
    "miou": 0.25,
    "iou": {"road": 0.5, "bus": None},
    "confusion": np.eye(2, dtype=np.int64),
    "names": ("road", "bus"),
    "palette": ((1, 2, 3), (4, 5, 6)),
}
PICTURE = Picture(
    "a&b",
    0.25,
    np.full((4, 6, 3), (250, 0, 0), np.uint8),
    np.zeros((4, 6), np.uint8),
    np.ones((4, 6), np.uint8),
)


@pytest.fixture
def finished(tmp_path: Path) -> Config:
    """A run with a report, and whose export has a file."""
    config = compose(["run.name=done", f"run.root={tmp_path}"])
    (config.run_dir / "export").mkdir(parents=True)
    (config.run_dir / "export" / "model.onnx").write_text("graph")
    (config.run_dir / "report.html").write_text("the report")
    return config


OWN = """
    import json

    class Lines:
        def on_start(self, config, step):
            self.file = (config.run_dir / "own.txt").open("a")
            print("from step", step, file=self.file)

        def on_metrics(self, step, metrics):
            print(step, json.dumps(metrics), file=self.file, flush=True)

        def on_validation(self, step, scores, pictures):
            shapes = [(picture.image.shape, picture.pred.shape) for picture in pictures]
            print(step, scores["miou"], scores["confusion"].sum(), shapes, file=self.file)

        def on_end(self, result):
            files = [path.name for path in result.get("files", [])]
            print("exit", result["exit_code"], files, file=self.file)
            self.file.close()

    class Quiet:
        def on_end(self, result):
            pass

    class Typo:
        def on_metric(self, step, metrics):
            pass

    class Late:
        def __init__(self):
            raise ConnectionError("no service")

    class Broken(Lines):
        def on_METHOD(self, *given):
            print("called", file=self.file)
            self.file.close()
            raise ConnectionError("the [bold]service[/bold] is gone")
"""


def tracked(config: Config, *names: str) -> Config:
    return replace(config, track=replace(config.track, name=list(names)))


def test_a_tracker_of_your_own_is_a_class_with_four_methods(
    finished: Config, project: Callable[[str, str], None]
) -> None:
    """It gets what the file gets, as numbers by name; methods may be missing."""
    project("mine.py", OWN)
    config = tracked(finished, "mine:Lines", "mine:Quiet")
    check(config, world_size=1)
    assert config.import_paths == [], "it cannot reach the numbers"
    check_tracking(config)
    tracker = open_tracker(config, config.run_dir, 4, rank=0)
    values = {
        "loss": 1.5,
        "lr": math.nan,
        "mib": [1.0, None],
        "iou": {"road": 0.5, "bus": None},
    }
    tracker.log(5, "train", values)
    tracker.call("on_validation", 7, SCORES, [PICTURE])
    tracker.close()
    tracker.end(config, RESULT)
    tracker.end(config, RESULT)
    assert (config.run_dir / "own.txt").read_text().splitlines() == [
        "from step 4",
        '5 {"train/loss": 1.5, "train/mib/0": 1.0, "train/iou/road": 0.5}',
        "7 0.25 2 [((4, 6, 3), (4, 6))]",
        "exit 0 ['report.html', 'export']",
    ]
    with pytest.raises(ConfigError, match=r"mine has no Line\. Did you mean Lines"):
        check_tracking(tracked(config, "mine:Line"))
    with pytest.raises(
        ConfigError, match="mine:Typo, but the class has none of the methods"
    ):
        check_tracking(tracked(config, "mine:Typo"))


@pytest.mark.parametrize(
    ("where", "raised", "code"),
    [
        ("train.step.TrainStep.__call__", NumericsError("loss nan"), 6),
        ("train.step.TrainStep.__call__", RuntimeError("gloo/transport: reset"), 9),
        ("train.step.TrainStep.__call__", KeyboardInterrupt(), 130),
        ("train.step.TrainStep.__call__", ValueError("a bug"), 1),
        ("run.launch.finish", LatencyError("too slow"), 12),
        ("run.launch.finish", OSError(28, "No space left on device"), 2),
    ],
)
def test_a_tracker_hears_the_exit_code_of_a_run_that_failed(
    tmp_path: Path,
    project: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    raised: BaseException,
    code: int,
) -> None:
    project("mine.py", OWN)

    def fail(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(f"segpipe.{where}", fail)
    monkeypatch.setattr("segpipe.distributed.environment.wait_to_be_ended", int)
    folder = tmp_path / "run"
    settings = ("train.steps=1", "track.name=mine:Lines")
    if code == 1:
        with pytest.raises(ValueError, match="a bug"):
            run(folder, *settings)
    else:
        assert run(folder, *settings) == code
    assert f"exit {code} [" in (folder / "own.txt").read_text()


def _in_project(folder: str, *changes: str) -> int:
    """Exit code of a rank with a tracker of the project."""
    os.chdir(Path(folder) / "project")
    sys.path.insert(0, os.getcwd())
    own = ("train.steps=1", "track.name=mine:Lines")
    return run(Path(folder) / "run", *own, *changes)


def _ranks_raise(rank: int, folder: str, *errors: Exception | None) -> int:
    def fail(*_: Any) -> None:
        time.sleep(0.5 * (1 - rank))  # rank 1 is first
        raise errors[rank]  # type: ignore[misc]

    if errors[rank]:
        TrainStep.__call__ = fail  # type: ignore[assignment, method-assign]
    return _in_project(folder)


def _is_stopped(rank: int, folder: str, where: str) -> int:
    def wait(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    if where == "report":  # which rank 0 writes alone
        launch.finish = wait
    else:
        engine.validate = wait
    return _in_project(folder)


FULL = OSError(errno.ENOSPC, "No space left on device", "there")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("errors", "code"),
    [
        # Not the gloo error by which rank 0 hears of it.
        ((None, ImpureAugmentError("counts")), 8),
        ((ValueError("later"), ImpureAugmentError("counts")), 8),
        ((not_written(Path("there"), FULL), None), 2),
        ((None, FULL), 2),
    ],
    ids=["other rank", "both", "disk of rank 0", "disk of rank 1"],
)
def test_a_tracker_hears_the_verdict_of_the_ranks(
    tmp_path: Path,
    project: Callable[[str, str], None],
    capfd: pytest.CaptureFixture[str],
    errors: tuple[Exception | None, ...],
    code: int,
) -> None:
    project("mine.py", OWN)
    assert launched(2, _ranks_raise, str(tmp_path), *errors) == [code, code]
    assert f"exit {code} [" in (tmp_path / "run" / "own.txt").read_text()
    failed = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failed["exit_code"] == code
    said = capfd.readouterr().err
    assert "was not reached by" not in said
    assert said.count("could not be written") == (code == 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "codes"), [("validation", [130, 130]), ("report", [130, 0])]
)
def test_a_tracker_hears_that_the_end_was_stopped(
    tmp_path: Path,
    project: Callable[[str, str], None],
    capfd: pytest.CaptureFixture[str],
    where: str,
    codes: list[int],
) -> None:
    """By SIGTERM, which ends a process of several without a word if nothing handles it."""
    project("mine.py", OWN)
    assert launched(2, _is_stopped, str(tmp_path), where) == codes
    assert "exit 130 [" in (tmp_path / "run" / "own.txt").read_text()
    assert capfd.readouterr().err.count("stopped. Continue with run.exists=resume") == 1
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_tracker_hears_of_a_ctrl_c_that_ends_the_wait_for_a_verdict(
    tmp_path: Path,
    project: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project("mine.py", OWN)

    def fail(error: BaseException) -> Callable[..., None]:
        def call(*_: Any) -> None:
            raise error

        return call

    monkeypatch.setattr(TrainStep, "__call__", fail(RuntimeError("gloo/transport")))
    monkeypatch.setattr(engine, "exit_code_of", fail(KeyboardInterrupt()))
    folder = tmp_path / "run"
    assert run(folder, "train.steps=1", "track.name=mine:Lines") == 130
    assert "exit 130 [" in (folder / "own.txt").read_text()


@pytest.mark.parametrize("method", ["metrics", "validation", "end"])
def test_a_tracker_that_breaks_is_told_once_and_training_goes_on(
    finished: Config,
    project: Callable[[str, str], None],
    method: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project("mine.py", OWN.replace("METHOD", method))
    config = tracked(finished, "mine:Broken", "mine:Late", "mine:Lines")
    tracker = open_tracker(config, config.run_dir, None, rank=0)
    for step in (1, 2, 3):
        tracker.log(step, "train", {"loss": 1.0})
        tracker.call("on_validation", step, SCORES, [PICTURE])
    tracker.close()
    tracker.end(config, RESULT)
    assert steps(config.run_dir) == [1, 2, 3]
    text = (config.run_dir / "own.txt").read_text()
    assert text.count("called") == 1
    assert "\n3 0.25 2" in text, "the other one goes on"
    said = capsys.readouterr().err
    gone = "mine:Broken stopped: ConnectionError: the [bold]service[/bold] is gone"
    assert said.count(gone) == 1
    assert said.count("mine:Late stopped: ConnectionError: no service") == 1


TAKES = """
    import sys
    import torch

    class Draws:
        def on_metrics(self, step, metrics):
            torch.rand(3, generator=torch.Generator())  # its own
            torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 4))
            torch.rand(3)

    class Exits:
        def on_metrics(self, step, metrics):
            sys.exit(4)

    class Interrupts:
        def on_metrics(self, step, metrics):
            raise KeyboardInterrupt("too slow")
"""


def test_a_tracker_takes_no_random_number_of_the_training_and_does_not_end_it(
    finished: Config,
    project: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    project("mine.py", TAKES)
    config = tracked(finished, "mine:Draws", "mine:Exits", "mine:Interrupts")
    state = torch.get_rng_state()
    tracker = open_tracker(config, config.run_dir, None, rank=0)
    tracker.log(1, "train", {"loss": 1.0})
    tracker.close()
    tracker.end(config, RESULT)
    assert torch.equal(torch.get_rng_state(), state)
    said = capsys.readouterr().err
    assert "mine:Draws stopped: RuntimeError: aten.rand.default would draw" in said
    assert "mine:Exits stopped: SystemExit: 4" in said
    assert "mine:Interrupts stopped: KeyboardInterrupt: too slow" in said


HANGS = """
    import threading

    class Hangs:
        def on_start(self, config, step):
            assert threading.current_thread().daemon
            threading.Event().wait()
"""


def test_a_tracker_that_hangs_holds_up_nobody(
    finished: Config,
    project: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither the other trackers, nor the end of the run, nor that of the process."""
    project("mine.py", OWN + HANGS)
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.1)
    config = tracked(finished, "mine:Hangs")
    tracker = open_tracker(config, config.run_dir, None, rank=0)
    for step in range(1, 5):
        tracker.log(step, "train", {"loss": 1.0})
    tracker.close()
    tracker.end(config, RESULT)
    assert steps(config.run_dir) == [1, 2, 3, 4]
    gone = "mine:Hangs stopped: TimeoutError: no end within 0.1 s"
    assert capsys.readouterr().err.count(gone) == 1
    monkeypatch.undo()
    config = tracked(finished, "mine:Hangs", "mine:Lines")
    monkeypatch.setattr(tracking, "PATIENCE_S", 5.0)
    tracker = open_tracker(config, config.run_dir, None, rank=0)
    tracker.log(1, "train", {"loss": 1.0})
    tracker.close()
    tracker.end(config, RESULT)
    assert "exit 0" in (config.run_dir / "own.txt").read_text(), "the other one ended"


def test_mode_of_the_environment_counts_where_the_setting_is_auto(
    no_login: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode in ("disabled", "offline"):
        monkeypatch.setenv("WANDB_MODE", mode)
        check_tracking(with_wandb("auto"))
        with pytest.raises(ConfigError, match="no wandb login"):
            check_tracking(with_wandb("online"))
    for wrong in (
        "ofline",
        "",
    ):  # wandb would fail at its start, also if track.mode is set
        monkeypatch.setenv("WANDB_MODE", wrong)
        with pytest.raises(ConfigError, match=f"WANDB_MODE = '{wrong}', but wandb"):
            check_tracking(with_wandb("offline"))
        check_tracking(Config())
    monkeypatch.delenv("WANDB_MODE")
    with pytest.raises(ConfigError, match="no wandb login"):
        check_tracking(with_wandb("auto"))


def wandb_records(folder: Path) -> Iterator[Any]:
    """Records of an offline run: protocol buffers in the log format of LevelDB, blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2 as messages

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, place, content = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        content += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = messages.Record()
            record.ParseFromString(content)
            content = b""
            yield record


SPY = """
    import time
    from segpipe.run.report import is_live

    class Spy:
        def on_start(self, config, step):
            self.folder = config.run_dir

        def note(self, what):
            with (self.folder / "spy.txt").open("a") as file:
                print(what, is_live(self.folder / "report.html"), file=file)

        def on_validation(self, step, scores, pictures):
            while not (self.folder / "report.html").exists():
                time.sleep(0.01)  # another thread writes it
            self.note(step)

        def on_end(self, result):
            self.note("end")
"""


FOLDER = f"dé ids{121 * 'x'}"  # neither letters nor length that wandb takes


@pytest.mark.parametrize("offline", [False, True])
def test_the_data_is_an_input_of_a_run_online(tmp_path: Path, offline: bool) -> None:
    """So that wandb's lineage leads from the data to the model; offline, wandb refuses to say so."""
    files = [tmp_path / "inputs.json", tmp_path / "best.pt"]
    for path in files:
        path.write_text("{}")
    calls: list[tuple[str, str]] = []
    tracker = trackers.Wandb()
    tracker._wandb = wandb()
    tracker._config = compose(["data=folder", f"data.root=/data/{FOLDER}"])
    tracker._run = SimpleNamespace(
        id="r1",
        offline=offline,
        log_artifact=lambda made: calls.append(("log", made.name)),
        use_artifact=lambda made: calls.append(("use", made.name)),
        summary={},
        finish=lambda exit_code: calls.append(("end", str(exit_code))),
    )
    tracker.on_end({"files": files, "miou": 0.5, "best_miou": 0.5, "exit_code": 0})
    first = "log" if offline else "use"
    data = f"folder-d--ids{121 * 'x'}"[:128]
    assert calls == [("log", "r1-model"), (first, data), ("end", "0")]


def test_a_real_run_is_in_wandb_and_tensorboard_with_pictures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    project: Callable[[str, str], None],
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "robots")
    monkeypatch.setenv("WANDB_RUN_GROUP", "night")
    monkeypatch.setenv("WANDB_RUN_ID", "run7")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    folder = tmp_path / "run"
    project("spy.py", SPY)
    names = "track.name=[wandb,tensorboard,spy:Spy]"
    trackers = (names, "track.tags=[a,b]", "track.notes=why")
    live = ("train.validate_every=1", "train.log_every=1", "track.job_type=train")
    assert run(folder, *trackers, *live) == 0
    speeds = [
        line["images_per_second"] for line in lines(folder) if line["kind"] == "train"
    ]
    assert speeds[0] is None, "the first update of a session is not timed"
    assert min(speeds[1:]) > 0
    # The page is there at each validation, and then the report takes its place.
    assert (folder / "spy.txt").read_text() == "1 True\n2 True\n3 True\nend False\n"
    records = list(wandb_records(folder))
    started = next(each.run for each in records if each.HasField("run"))
    assert (started.run_id, started.project) == ("run7", "robots")
    assert (started.run_group, started.job_type) == ("night", "train")
    assert (list(started.tags), started.notes) == (["a", "b"], "why")
    metrics = [each.metric for each in records if each.HasField("metric")]
    assert {"validation/miou"} <= {each.name for each in metrics if each.summary.max}
    logged = {
        (item.nested_key or [item.key])[0]
        for each in records
        for item in each.history.item
    }
    assert {"pictures", "confusion_table"} <= logged
    assert {"train/loss", "validation/miou"} <= logged
    artifacts = {
        each.artifact.type: [entry.path for entry in each.artifact.manifest.contents]
        for each in records
        if each.HasField("artifact")
    }
    assert artifacts["dataset"] == ["inputs.json"]
    assert {"best.pt", "report.html"} <= set(artifacts["model"])
    media = folder.glob("wandb/offline-run-*/files/media/images/**/*.png")
    shapes = {cv2.imread(str(path)).shape for path in media}
    assert shapes == {(64, 4 * 96, 3)}, "image, target, prediction and errors"
    shown = scalars(folder / "tensorboard", size_guidance={"images": 0})
    assert {"first_image", "worst_1"} <= set(shown.Tags()["images"])
    steps = [event.step for event in shown.Images("first_image")]
    assert steps == [1, 2, 3]


def test_mlflow_gets_settings_figures_and_files_and_a_resumed_run_continues(
    finished: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in for the package, which is not locked; mlflow-skinny 3.17.2 was tried by hand."""
    made = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = Recorded(create_experiment="e1", create_run=made, search_runs=[made])
    opened: list[str] = []
    module = SimpleNamespace(
        MlflowClient=lambda uri: opened.append(uri) or client,
        entities=SimpleNamespace(),
    )
    module.entities.Param, module.entities.Metric = (
        lambda *given: given,
        lambda *given: (given[0], given[1], given[3]),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = tracked(finished, "mlflow")
    tracker = open_tracker(config, config.run_dir, None, rank=0)
    tracker.log(1, "train", {"loss": 1.5})
    tracker.close(1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker.test")
    tracker = open_tracker(config, config.run_dir, 1, rank=0)
    tracker.call("on_validation", 7, SCORES, [PICTURE])
    tracker.close()
    tracker.end(config, RESULT)
    assert opened == [
        (Path(config.run.root) / "mlruns").as_uri(),
        "http://tracker.test",
    ]
    params = [
        pair
        for _, named in client.named("log_batch")
        for pair in named.get("params", [])
    ]
    assert ("optim.lr", "0.05") in params
    metrics = [
        each
        for _, named in client.named("log_batch")
        for each in named.get("metrics", [])
    ]
    assert metrics == [("train/loss", 1.5, 1)]
    assert len(client.named("create_run")) == 1
    assert client.named("search_runs")[0][0] == (
        ["e1"],
        f"tags.`segpipe.id` = '{run_id(config, config.run_dir)}'",
    )
    assert client.named("log_artifacts") == [
        (("r1", str(config.run_dir / "export"), "export"), {})
    ]
    assert [Path(given[1]).name for given, _ in client.named("log_artifact")] == [
        "report.html",
    ]
    ((_, panels, name), _), *_ = client.named("log_image")
    assert (panels.shape, name) == ((4, 24, 3), "step_000007/first_image.png")
    assert [given for given, _ in client.named("set_terminated")] == [
        ("r1", "FAILED"),
        ("r1", "FINISHED"),
    ]


def test_mlflow_hangs_a_group_below_one_run(
    finished: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in."""
    made = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client = Recorded(create_run=made)
    parents = iter([[], [made], [made], [made]])
    client.search_runs = lambda *given, **named: next(parents)  # type: ignore[attr-defined]
    module = SimpleNamespace(
        MlflowClient=lambda uri: client,
        entities=SimpleNamespace(Param=lambda *given: given),
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = tracked(finished, "mlflow")
    config = replace(config, track=replace(config.track, group="it's"))
    for _ in range(2):  # the parent is made once
        tracker = open_tracker(config, config.run_dir, None, rank=0)
        tracker.end(config, RESULT)
    tags = [named["tags"] for _, named in client.named("create_run")]
    assert tags[0] == {"segpipe.group": "it_s"}
    assert [each["mlflow.parentRunId"] for each in tags[1:]] == ["r1", "r1"]


def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path) -> None:
    """A real run: figures of all sessions once, and settings with the score."""
    folder = tmp_path / "run"
    changes = (
        "track=tensorboard",
        "train.log_every=1",
        "train.steps=2",
        "checkpoint.every=1",
    )
    killed = trackers.Tensorboard()  # before its first checkpoint
    killed.on_start(compose(settings(folder, *changes)), 0)
    killed.on_metrics(1, {"train/loss": 9.0})
    assert run(folder, *changes) == 0
    assert run(folder, *changes, "run.exists=resume") == 0
    shown = scalars(folder / "tensorboard")
    losses = [
        (entry["step"], entry["loss"])
        for entry in lines(folder)
        if entry["kind"] == "train"
    ]
    assert [
        (event.step, pytest.approx(event.value))
        for event in shown.Scalars("train/loss")
    ] == losses
    score = json.loads((folder / "result.json").read_text())["miou"]
    assert shown.Scalars("miou")[-1].value == pytest.approx(score)
    assert b"optim.lr" in b"".join(
        path.read_bytes() for path in (folder / "tensorboard").iterdir()
    )


TRAINING = """
import sys
from pathlib import Path
from segpipe.settings.config import from_mapping
from segpipe.run.tracking import open_tracker

mode, folder, resume_step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
run = {"root": str(folder.parent), "name": folder.name}
config = from_mapping({"run": run, "track": {"name": "wandb", "mode": mode}})
tracker = open_tracker(config, folder, resume_step if resume_step else None, rank=0)
for step in range(resume_step + 1, resume_step + 4):
    tracker.log(step, "train", {"loss": 1.0 / step, "iou": {"road": 0.5, "bus": None}})
tracker.close()
tracker.end(config, {})
"""


@pytest.fixture
def proxy() -> Iterator[tuple[int, list[bytes]]]:
    """A proxy that lets nobody out and remembers who tried: (port, first bytes of each attempt)."""
    attempts: list[bytes] = []

    def refuse() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                attempts.append(connection.recv(200))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        yield server.getsockname()[1], attempts
        server.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=60)


def train(
    mode: str, run_dir: Path, port: int, resume_step: int = 0
) -> subprocess.CompletedProcess[str]:
    hidden = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    env = {
        k: v
        for k, v in os.environ.items()
        if k.lower() not in hidden and not k.startswith("WANDB")
    }
    env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), f"http://127.0.0.1:{port}")
    env |= {
        "HOME": str(run_dir.parent / "home"),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
    }
    env["WANDB_API_KEY"] = "0" * 40
    if (
        mode == "online"
    ):  # which nobody answers; offline, a busy machine may well take longer to start the service
        env["WANDB_INIT_TIMEOUT"] = "2"
    command = [sys.executable, "-c", TRAINING, mode, str(run_dir), str(resume_step)]
    return subprocess.run(
        command,
        env=env,
        cwd=run_dir.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_offline_records_in_the_run_folder_and_calls_nobody(
    tmp_path: Path, proxy: tuple[int, list[bytes]]
) -> None:
    port, attempts = proxy
    run_dir = tmp_path / "street"
    first = train("offline", run_dir, port)
    again = train("offline", run_dir, port, resume_step=3)
    assert (first.returncode, first.stdout, first.stderr) == (0, "", "")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6]
    records = list(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    expected = run_id(with_wandb(), run_dir)
    assert len(records) == 2  # one folder per process, one id: wandb sync joins them
    assert {path.name for path in records} == {f"run-{expected}.wandb"}
    assert all(b"train/loss" in path.read_bytes() for path in records)
    assert attempts == []


@pytest.mark.slow
def test_the_agent_of_wandb_starts_a_training_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own agent, with the command of docs/sweeps.md and one proposal of a server."""
    text = (ROOT / "docs/sweeps.md").read_text().split("```yaml\n")[1].split("```")[0]
    sweep = yaml.safe_load(text)
    proposal = {"optim.lr": {"value": 0.02}, "model": {"value": "fast_scnn"}}
    assert sweep["parameters"].keys() == proposal.keys()
    given = [part for part in TINY if not part.startswith("model=")]
    command = [part for part in sweep["command"] if not part.startswith("data")]
    monkeypatch.chdir(tmp_path)
    given_by_agent = {"RUN_ID": "", "SWEEP_PARAM_PATH": "", "DIR": str(tmp_path)}
    variables = {"MODE": "offline", "SWEEP_ID": "sweep", **given_by_agent}
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    agent = import_module("wandb.wandb_agent").Agent(None, None, "sweep")
    agent._sweep_command = [*command, *given]
    program = str(ROOT / sweep["program"])
    agent._command_run({"run_id": "r1", "program": program, "args": proposal})
    assert agent._run_processes["r1"].wait(300) == 0
    run_dir = tmp_path / "runs/sweep-r1"
    saved = json.loads((run_dir / "config.json").read_text())
    assert saved["optim"]["lr"] == 0.02
    assert list(run_dir.glob("wandb/offline-run-*/run-r1.wandb"))
    name = sweep["metric"]["name"].removeprefix("validation/")
    found = [line for line in lines(run_dir) if line["kind"] == "validation"]
    assert found
    assert all(name in line for line in found)


@pytest.mark.slow
def test_unreachable_wandb_costs_a_warning(
    tmp_path: Path, proxy: tuple[int, list[bytes]]
) -> None:
    """Also the control of the test above: the proxy does see an attempt when there is one."""
    port, attempts = proxy
    done = train("online", tmp_path / "street", port)
    assert done.returncode == 0
    assert "wandb stopped: " in done.stderr
    assert steps(tmp_path / "street") == [1, 2, 3]
    assert attempts


def test_a_tracker_gets_copies(
    finished: Config, project: Callable[[str, str], None]
) -> None:
    """What it changes reaches neither the training nor another tracker."""
    project(
        "mine.py",
        """
        import json
        from pathlib import Path

        class Changes:
            def on_start(self, config, step):
                self.path = Path(config.run.root, "seen.txt")
                config.optim.lr = 5.0

            def on_metrics(self, step, metrics):
                with self.path.open("a") as file:
                    file.write(json.dumps(metrics))
                metrics.clear()

            def on_end(self, result):
                self.path.with_suffix(f".{type(self).__name__}").write_text(" ".join(result))
                result.clear()

        class Other(Changes):
            pass
        """,
    )
    config = tracked(finished, "mine:Changes", "mine:Other")
    before = config.optim.lr
    tracker = open_tracker(config, config.run_dir, 4, rank=0)
    tracker.log(5, "train", {"loss": 1.5})
    tracker.close()
    tracker.end(config, RESULT)
    assert config.optim.lr == before
    seen = Path(config.run.root, "seen.txt").read_text()
    assert seen == 2 * '{"train/loss": 1.5}'
    ends = [Path(config.run.root, f"seen.{name}") for name in ("Changes", "Other")]
    assert all("miou" in end.read_text().split() for end in ends)
