"""Whole runs: interrupted, killed, diverged or out of disk space, they lose nothing and change no bit."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from exports import trained_network
from ranks import PATIENCE_S, forked, trained_by, wait_for
from runs import (
    metrics,
    outcome,
    result,
    run,
    script,
    settings,
    torch_restored,
    updates,
    write_camvid,
)
from segpipe import files
from segpipe.cli import evaluate as evaluating
from segpipe.cli.main import main as segpipe
from segpipe.data import Sample
from segpipe.data.catalog import STREET, ClassTable
from segpipe.data.data_set import Samples, SyntheticSamples
from segpipe.data.samples import open_samples
from segpipe.distributed.group import Group, leave
from segpipe.errors import CheckpointError, NumericsError
from segpipe.export.gates import judge
from segpipe.export.gates.controls import CONTROLS
from segpipe.export.graph.formats import FORMATS
from segpipe.models import build_model
from segpipe.models.preprocess import Preprocess
from segpipe.run import tracking
from segpipe.run.overview import read_row
from segpipe.settings.compose import compose
from segpipe.settings.groups import DataConfig
from segpipe.train import batches as batches_module
from segpipe.train import checkpoint, engine, state
from segpipe.train.checkpoint import agree_on_step
from segpipe.train.metrics import Validation
from segpipe.train.stop import StopRequest
from segpipe.train.validate import validate

pytestmark = pytest.mark.slow

STEPS = 24  # enough that a signal sent after the first lines of metrics.jsonl comes long before the end
LONG = (f"train.steps={STEPS}", "train.log_every=1", "compute.shards=2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(folder, *LONG, "train.validate_every=12") == 0
    return folder


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


def is_complete(folder: Path) -> bool:
    """Whether every step has its line once, in order, and the last one its validation."""
    lines = [
        (line["step"], line["kind"])
        for line in metrics(folder)
        if (line["step"], line["kind"]) != (12, "validation")
    ]
    each = [
        (step, kind) for step in range(1, STEPS + 1) for kind in ("train", "memory")
    ]
    return lines == [*each, (STEPS, "validation")]


def test_whole_run_logs_every_step_once(whole: Path) -> None:
    assert is_complete(whole)
    assert [
        line["step"] for line in metrics(whole) if line["kind"] == "validation"
    ] == [12, STEPS]
    losses = [line["loss"] for line in updates(whole)]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert all(
        line["rss_mib"][0] > 0 for line in metrics(whole) if line["kind"] == "memory"
    )


@pytest.fixture
def ending(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose updates are done, to be resumed with `ENDING`.

    Its network is one in which every changed weight shows: of another, the gates say that they prove nothing.
    """
    monkeypatch.setattr(judge, "SECONDS", 0.0)
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    weights = trained_network("fast_scnn", (64, 96), STREET).model.state_dict()
    checkpoint.save(
        folder / "last.pt",
        {**checkpoint.load(folder / "last.pt"), "model": weights, "ema": weights},
    )
    return folder


ENDING = (
    *LONG,
    "run.exists=resume",
    "export.enabled=true",
    "export.formats=[torchscript]",
    "export.images=1",
)


def test_a_run_ends_with_a_checked_export_and_three_lines(
    ending: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, git = ending, {"commit": "0" * 40, "dirty": True}
    monkeypatch.setattr(files, "git_state", lambda root: {**git, "known_at": "export"})
    assert run(folder, *ENDING) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(
        number for number, line in enumerate(lines) if line.startswith("mIoU ")
    )
    (score, place, following), below = lines[start : start + 3], lines[start + 3 :]
    assert score == f"mIoU {100 * result(folder)['miou']:.2f} % on 4 val images"
    assert place.startswith(f"run {folder} ")
    assert any("IoU per class" in line for line in lines[:start])
    assert any("EXPORT" in line for line in below), "the export comes last"
    assert (folder / "report.html").is_file()
    manifest = json.loads((folder / "export" / "manifest.json").read_text())
    assert manifest["source"]["ema_digest"] == result(folder)["ema_digest"]
    assert result(folder)["git"] == git
    assert manifest["source"]["git"] == {**git, "known_at": "train"}
    _runs_as_it_is(following, folder)
    # There was no update left to measure.


def _runs_as_it_is(line: str, folder: Path) -> None:
    """The command to try next: this interpreter, and settings with which it works."""
    word, interpreter, *rest = shlex.split(line)
    assert (word, rest) == ("next", ["-m", "segpipe", "evaluate", f"run={folder}"])
    assert Path.cwd() / interpreter == Path(sys.executable)
    assert evaluate(rest[3:]) == 0


def test_an_export_that_differs_ends_the_command_with_its_code(
    ending: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the training stay; there is no file for a robot."""
    folder, right = ending, FORMATS["torchscript"]
    for name in ("report.html", "result.json"):
        (folder / name).unlink()

    def swapped(model: Any, *rest: Any) -> None:
        faulty = copy.deepcopy(model)
        CONTROLS["bgr"](faulty)
        right.convert(faulty, *rest)

    monkeypatch.setitem(
        FORMATS, "torchscript", dataclasses.replace(right, convert=swapped)
    )
    assert run(folder, *ENDING) == 4
    said = capsys.readouterr()
    assert "EXPORT REJECTED: G2 logits differ" in said.err
    for line in ("mIoU ", f"run {folder} ", "next "):
        assert f"\n{line}" in said.out, "a refused export hides nothing of the training"
    assert not (folder / "export").exists()
    assert all(
        (folder / name).is_file() for name in ("report.html", "result.json", "last.pt")
    )


def test_ctrl_c_of_two_processes_then_resume_in_one(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C reaches parent and children, as in a terminal, and the parent sends it on: children see it twice.

    SIGUSR1, with which schedulers warn a job, does not end the parent, which only waits for its children.
    """
    folder = tmp_path / "run"
    changes = (*LONG, "checkpoint.every=0", "compute.nproc=2")
    process = forked(_train, folder, changes, stderr=tmp_path / "stderr")
    wait_for(lambda: len(updates(folder)) >= 3, process)
    os.kill(process.pid, signal.SIGUSR1)
    warned = len(updates(folder))
    wait_for(lambda: len(updates(folder)) > warned, process)
    os.killpg(process.pid, signal.SIGINT)
    process.join(PATIENCE_S)
    assert process.exitcode == 130
    stderr = (tmp_path / "stderr").read_text()
    step = checkpoint.load(folder / "last.pt")["step"]
    assert 3 <= step < STEPS
    said = f"stopped at step {step}; {folder / 'last.pt'} is written."
    assert stderr.count(said) == 1, "by one rank"
    row = read_row(folder, "run")
    assert (row.state, said in row.reason) == ("interrupted", True)
    assert "Traceback" not in stderr
    assert not (folder / "result.json").exists()

    assert run(folder, *LONG) == 2
    assert f"{folder} already holds step {step}. Set run.exists=resume" in told(capsys)
    assert run(folder, *LONG, "run.exists=resume", "optim.lr=0.04") == 2
    assert "optim.lr: 0.05 -> 0.04" in told(capsys)

    assert run(folder, *LONG, "run.exists=resume", "data.workers=1") == 0
    assert outcome(folder) == outcome(whole)
    assert is_complete(folder)


def _train(folder: Path, changes: Sequence[str]) -> int:
    return segpipe(["train", *settings(folder, *changes)])


def _torn(folder: Path, changes: Sequence[str]) -> int:
    """As `_train`, but the second last.pt is half written only."""
    whole, writes = Path.write_bytes, []

    def write_bytes(path: Path, content: bytes) -> int:
        writes.extend([path] if path.name.startswith(".last.pt.") else [])
        if len(writes) < 2:
            return whole(path, content)
        whole(path, content[: len(content) // 2])
        time.sleep(600)
        return 0

    Path.write_bytes = write_bytes  # type: ignore[method-assign, assignment]
    return _train(folder, changes)


def test_sigkill_in_a_write_then_resume_in_two_processes(
    whole: Path, tmp_path: Path
) -> None:
    """Updates go on while the checkpoint of step 8 is written; half of it is there when the process dies.

    The lines of the steps after the checkpoint before it must not come twice.
    """
    folder = tmp_path / "run"
    changes = (*LONG, "checkpoint.every=4", "data.workers=1")
    process = forked(_torn, folder, changes)
    wait_for(lambda: len(updates(folder)) >= 11, process)
    assert list(folder.glob(".last.pt.*.tmp"))
    os.killpg(process.pid, signal.SIGKILL)
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    assert checkpoint.load(folder / "last.pt")["step"] == 4
    trained_by(2, folder, *LONG, "run.exists=resume")
    assert outcome(folder) == outcome(whole)
    assert is_complete(folder)


def test_sigterm_of_one_process_is_kept_as_ctrl_c(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a step, before the last checkpoint, and while the weights are validated, when only that is left to do."""
    folder = tmp_path / "run"
    apply = engine.TrainStep.apply
    monkeypatch.setattr(
        engine.TrainStep,
        "apply",
        lambda step: (apply(step), step.state.step == 9 and _terminate()),
    )
    assert run(folder, *LONG, "checkpoint.every=0") == 130
    assert checkpoint.load(folder / "last.pt")["step"] == 9
    monkeypatch.undo()
    snapshot = checkpoint.snapshot
    monkeypatch.setattr(
        checkpoint, "snapshot", lambda *given: (_terminate(), snapshot(*given))[1]
    )
    assert run(folder, *LONG, "run.exists=resume") == 130
    assert checkpoint.load(folder / "last.pt")["step"] == STEPS
    assert not (folder / "result.json").exists()
    monkeypatch.undo()

    def interrupted(*_: object, **__: object) -> Validation:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "validate", interrupted)
    assert run(folder, *LONG, "run.exists=resume") == 130
    assert checkpoint.load(folder / "last.pt")["step"] == STEPS
    monkeypatch.undo()
    assert run(folder, *LONG, "run.exists=resume") == 0
    assert outcome(folder) == outcome(whole)
    assert (
        run(folder, *LONG, "run.exists=resume") == 0
    )  # of a finished run: validates once more, changes nothing
    assert outcome(folder) == outcome(whole)
    assert is_complete(folder)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_second_ctrl_c_interrupts_at_once_but_an_echo_does_not() -> None:
    with StopRequest() as stop:
        assert not _interrupts(signal.SIGINT)
        assert stop.asked
        assert not _interrupts(signal.SIGINT)
        stop._first -= stop.ECHO_S
        assert not _interrupts(signal.SIGTERM)
        assert _interrupts(signal.SIGINT)


@pytest.mark.parametrize("outlive_error", [True, False])
def test_a_rank_that_failed_outlives_the_launchers_sigterm(outlive_error: bool) -> None:
    """Otherwise it would be ended before it could say which rank broke the contract."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    }
    try:
        with (
            pytest.raises(ValueError, match="lost"),
            StopRequest(outlive_error=outlive_error),
        ):
            raise ValueError("lost")
        assert (signal.getsignal(signal.SIGTERM) == signal.SIG_IGN) is outlive_error
        with StopRequest(outlive_error=True):
            pass
        assert (
            signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        ) is outlive_error  # as it was found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_what_a_scheduler_sends_stops_at_the_end_of_the_step(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not _interrupts(number)
        assert stop.asked
    assert signal.getsignal(number) == before


def test_nohup_keeps_a_run_alive() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def _interrupts(number: signal.Signals) -> bool:
    try:
        os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_diverged_run_names_step_rank_and_rate_and_keeps_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    folder = tmp_path / "run"
    changes = (
        "optim.lr=1e30",
        "optim.warmup_steps=0",
        f"train.precision={precision}",
        "checkpoint.every=1",
    )
    assert run(folder, *changes) == 6
    text = told(capsys)
    for part in (
        "step 1: loss nan",
        "rank 0 shard 0",
        "lr 6.94",
        f"precision {precision}",
        "Lower optim.lr",
    ):
        assert part in text
    kept = checkpoint.load(folder / "last.pt")
    assert "The checkpoint of step 1 is the last good state" in text
    assert kept["step"] == 1
    assert all(
        value.isfinite().all() for value in kept["optimizer"]["state"][0].values()
    )
    assert not (folder / "result.json").exists()


def test_a_run_without_a_checkpoint_says_that_it_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, says = (
        tmp_path / "run",
        "holds no checkpoint yet: the run starts again at step 0",
    )
    assert run(folder, "train.progress=true", "run.exists=resume") == 0
    assert says not in capsys.readouterr().out  # the control: nothing was there
    for path in folder.iterdir():
        if path.name != "config.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run(folder, "train.progress=true", "run.exists=resume") == 0
    assert f"{folder} {says}" in capsys.readouterr().out


OWN_LOSS = """
import torch
import torch.nn.functional as F

def own(logits, target, *, ignore_index):
    loss = F.cross_entropy(logits, target.long(), ignore_index=ignore_index, reduction="none")
    counts = torch.bincount(target.flatten().long(), minlength=256)
    return loss * (float("nan") if counts.max() > max(0.3 * target.numel(), 1000) else 1.0)  # in scenes, not in noise
"""


@pytest.mark.parametrize("own", [True, False])
def test_an_own_loss_that_is_not_finite_is_to_be_tested(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own: bool,
) -> None:
    """The control: a loss of segpipe that diverges by the learning rate."""
    (tmp_path / "spoils.py").write_text(OWN_LOSS)
    monkeypatch.chdir(tmp_path)
    name, rate = ("spoils:own", "0.01") if own else ("cross_entropy", "1e30")
    changes = (f"loss.name={name}", f"optim.lr={rate}", "optim.warmup_steps=0")
    assert run(tmp_path / "run", *changes, "train.precision=fp32") == 6
    text = told(capsys)
    assert "Lower optim.lr" in text
    assert ("`segpipe check-plugin loss.name=spoils:own`" in text) == own


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped meanwhile"])
def test_a_loss_that_nobody_looked_at_is_dated_and_not_kept(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stopped: bool,
) -> None:
    """As on a GPU, where the host waits for some updates only: it sees the second bad update, not the first."""
    folder, apply = tmp_path / "run", engine.TrainStep.apply

    def spoiled(step: engine.TrainStep) -> None:
        apply(step)
        if step.state.step == 4:
            with torch.no_grad():
                step.parameters[0].fill_(float("nan"))
        if stopped and step.state.step == 5:
            _terminate()

    monkeypatch.setattr(engine, "_waits", lambda run: (run.state.step + 1) % 3 == 0)
    monkeypatch.setattr(engine.TrainStep, "apply", spoiled)
    assert run(folder, "train.steps=9", "checkpoint.every=3", "compute.shards=1") == 6
    text = told(capsys)
    assert "step 5: loss nan" in text
    assert (
        "Step 4 was the first non-finite one. The checkpoint of step 3 is the last good"
        in text
    )
    assert all(
        value.isfinite().all()
        for value in checkpoint.load(folder / "last.pt")["model"].values()
    )
    assert checkpoint.load(folder / "last.pt")["step"] == 3


def test_fp16_that_overflows_at_any_scale_has_diverged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaler skips every such update, so the run would finish with its initial weights."""
    build = state.build_state

    def overflowing(*args: Any) -> Any:
        state = build(*args)
        state.scaler = torch.amp.GradScaler(
            "cpu", init_scale=1.0
        )  # as after 16 overflows
        next(state.model.parameters()).register_hook(lambda grad: grad * float("nan"))
        return state

    monkeypatch.setattr(checkpoint, "build_state", overflowing)
    small = ("train.steps=2", "compute.shards=1", "augment.crop_size=[32,32]")
    assert run(tmp_path / "run", "train.precision=fp16", *small) == 6
    text = told(capsys)
    assert (
        "step 1: " in text
    )  # and not step 0, whose overflow is one that a lower scale may mend
    assert "precision fp16 at loss scale 0.5" in text


@pytest.mark.parametrize(
    ("owner", "name"), [(engine.TrainStep, "__call__"), (engine, "validate")]
)
def test_memory_that_runs_out_is_explained(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
) -> None:
    def short(*_: object, **__: object) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes"
        )

    monkeypatch.setattr(owner, name, short)
    assert run(tmp_path / "run", "train.steps=1") == 10
    step = 0 if name == "__call__" else 1
    assert f"step {step}: the memory of the machine ran out on rank 0" in told(capsys)


def test_a_validation_without_a_label_is_refused_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_camvid(tmp_path / "data")
    for path in (data / "valannot").iterdir():
        cv2.imwrite(str(path), np.full((72, 96), 11, np.uint8))  # void
    folder = tmp_path / "run"
    assert run(folder, "data=camvid", f"data.root={data}", "train.steps=1") == 2
    assert "val" in capsys.readouterr().err
    assert not folder.exists()


def test_full_disk_leaves_the_last_good_checkpoint(
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, sync, written = tmp_path / "run", os.fsync, []

    def full(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        written.append(os.readlink(f"/proc/self/fd/{number}"))
        if sum(".last.pt." in path for path in written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    assert run(folder, *LONG, "checkpoint.every=1") == 2
    text = told(capsys)
    for part in (
        str(folder / "last.pt"),
        "No space left",
        "unharmed",
        "run.exists=resume",
    ):
        assert part in text
    assert checkpoint.load(folder / "last.pt")["step"] == 2
    kept = [
        "config.json",
        "inputs.json",
        "last.pt",
        "ledger",
        "metrics.jsonl",
    ]
    assert sorted(path.name for path in folder.iterdir()) == kept
    monkeypatch.undo()
    assert run(folder, *LONG, "run.exists=resume") == 0
    assert outcome(folder) == outcome(whole)


def test_full_disk_under_metrics_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tracking.Tracker, "log", full)
    assert run(tmp_path / "run") == 2
    assert f"{tmp_path / 'run'} could not be written: No space left" in told(capsys)


def test_evaluate_computes_what_the_last_validation_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit of the confidences, of which one in ten million parts two classes."""
    seen = []

    def seeing(*given: Any, **named: Any) -> Validation:
        seen.append(validate(*given, **named))
        return seen[-1]

    for module in (engine, evaluating):
        monkeypatch.setattr(module, "validate", seeing)
    changes = ("train.steps=1", "data.size=[360,480]")  # smaller ones round alike
    assert run(tmp_path / "run", *changes) == 0
    with torch_restored():
        assert evaluate([f"run={tmp_path / 'run'}", "data.workers=0"]) == 0
    of_run, again = (found.calibration for found in seen)
    assert of_run[:, 1].sum() > 0
    assert torch.equal(of_run, again)


def test_evaluate_repeats_the_miou_of_the_run(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch_restored():
        assert script("evaluate.py", f"run={whole}", "data.workers=1") == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    printed, found = json.loads(said), result(whole)
    assert printed["miou"] == found["miou"]
    assert printed["iou"] == found["iou"]
    assert list(printed["iou"]) == list(STREET.names)
    assert (printed["images"], printed["step"]) == (4, STEPS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["which=first"], "which = 'first'"),
        (["model.name=pidnet_s"], "'model.name=pidnet_s'"),
        (["run=nowhere"], "nowhere"),
    ],
)
def test_evaluate_refuses_what_it_does_not_know(
    whole: Path, capsys: pytest.CaptureFixture[str], changes: list[str], said: str
) -> None:
    assert evaluate([f"run={whole}", *changes]) == 2
    assert said in told(capsys)


def test_evaluate_refuses_data_of_other_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_camvid(tmp_path / "files")
    for root, last in (("here", "void"), ("there", "water")):
        for folder, suffix in (("images", ""), ("masks", "annot")):
            (tmp_path / root / folder).mkdir(parents=True)
            for split in ("train", "val"):
                (tmp_path / root / folder / split).symlink_to(
                    files / f"{split}{suffix}"
                )
        names = [f"class{number}" for number in range(11)] + [last]
        palette = [[number, 0, 0] for number in range(12)]
        (tmp_path / root / "classes.yaml").write_text(
            json.dumps({"names": names, "palette": palette})
        )
    assert (
        run(
            tmp_path / "run",
            "data=folder",
            f"data.root={tmp_path / 'here'}",
            "train.steps=1",
        )
        == 0
    )
    capsys.readouterr()
    assert evaluate([f"run={tmp_path / 'run'}"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["miou"] == result(tmp_path / "run")["miou"]
    )
    assert evaluate([f"run={tmp_path / 'run'}", f"data.root={tmp_path / 'there'}"]) == 2
    text = told(capsys)
    assert "split val of there has the classes " in text
    assert ", but the network has " in text
    assert "water" in text


def evaluate(arguments: list[str]) -> int:
    threads = torch.get_num_threads()
    try:
        return segpipe(["evaluate", *arguments])
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.set_num_threads(threads)


class Frames:
    """Seven images of five sizes; image i has i + 1 pixels to ignore."""

    classes: ClassTable = STREET
    sizes = ((40, 56), (32, 48), (56, 40), (40, 56), (64, 64), (32, 48), (33, 71))

    def __len__(self) -> int:
        return len(self.sizes)

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        noise = np.random.Generator(np.random.Philox(index))
        target = noise.integers(0, STREET.num_classes, self.sizes[index], np.uint8)
        target.ravel()[: index + 1] = 255
        return noise.integers(0, 256, (*self.sizes[index], 3), np.uint8), target


class Rank:
    """A fake segpipe.distributed.group.Group; `gather` ends a first pass, and answers in a second one."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.others: Sequence[Any] | None = None

    def gather(self, item: Any) -> Sequence[Any]:
        if self.others is None:
            raise StopIteration(item)
        return self.others


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_validation_counts_every_image_once(world_size: int) -> None:
    samples: Samples = Frames()
    torch.manual_seed(0)
    model = build_model("fast_scnn", STREET.num_classes).eval()

    def found(rank: Rank) -> Validation:
        return validate(
            model, Preprocess(), samples, rank, DataConfig(workers=0), precision="fp32"  # type: ignore[arg-type]
        )  # fmt: skip

    ranks, parts = [Rank(rank, world_size) for rank in range(world_size)], []
    for rank in ranks:
        with pytest.raises((StopIteration, RuntimeError)) as stopped:
            found(rank)
        parts.append(stopped.value.args[0])
    assert sorted(index for part in parts for index in part) == list(
        range(len(samples))
    )
    for rank in ranks:
        rank.others = parts
    total = found(ranks[-1]).total
    labels = np.concatenate(
        [samples.read(index)[1].ravel() for index in range(len(samples))]
    )
    assert (
        total.sum(1).tolist()
        == np.bincount(labels, minlength=256)[: STREET.num_classes].tolist()
    )
    assert torch.equal(total, found(ranks[0]).total)


class Levit(nn.Module):
    """As networks of timm: in eval mode it keeps what it computed from its weights, until train()."""

    align_corners = False

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.eye(STREET.num_classes)[0])
        self.kept: Tensor | None = None

    def train(self, mode: bool = True) -> nn.Module:
        self.kept = None if mode else self.kept
        return super().train(mode)

    def forward(self, image: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.bias[:, None, None].clone()
        return self.kept + image[:, :1] * 0


def test_validation_scores_the_present_weights() -> None:
    group: Any = Rank(0, 1)
    group.gather = lambda item: [item]
    model: Any = Levit().eval()
    for place in (0, 3):
        model.bias.data = torch.eye(STREET.num_classes)[place]
        found = validate(
            model, Preprocess(), Frames(), group, DataConfig(workers=0), precision="fp32"
        )  # fmt: skip
        assert found.total.sum(0).nonzero().tolist() == [[place]]


def test_validation_keeps_the_logits_of_one_image() -> None:
    """Those of a network of stride 1 take 160 MB per image of 2048x1024."""
    model, kept = build_model("fast_scnn", STREET.num_classes).eval(), list[Any]()
    forward = model.forward

    def counted(image: torch.Tensor) -> torch.Tensor:
        assert [logits() for logits in kept] == [None] * len(kept)
        logits = forward(image)
        kept.append(weakref.ref(logits))
        return logits

    model.forward = counted  # type: ignore[method-assign]
    alone = Group(0, 1, torch.device("cpu"))
    given = model, Preprocess(), Frames(), alone, DataConfig(workers=0)
    validate(*given, precision="fp32")
    assert len(kept) == len(Frames())


def test_all_ranks_name_the_image_for_which_the_logits_of_one_are_not_finite() -> None:
    """Only rank 1 reads images of that size. If it alone raised, rank 0 would wait and blame a silent rank."""
    torch.manual_seed(0)
    model, samples = build_model("fast_scnn", STREET.num_classes).eval(), Frames()
    forward = model.forward

    def overflows(image: torch.Tensor) -> torch.Tensor:
        logits = forward(image)
        return logits * math.inf if image.shape[2:] == samples.sizes[1] else logits

    model.forward = overflows  # type: ignore[method-assign]

    def found(rank: Rank) -> Validation:
        return validate(
            model, Preprocess(), samples, rank, DataConfig(workers=0), precision="fp32"  # type: ignore[arg-type]
        )  # fmt: skip

    ranks, parts = [Rank(rank, 2) for rank in range(2)], []
    for rank in ranks:
        with pytest.raises((StopIteration, RuntimeError)) as stopped:
            found(rank)
        parts.append(stopped.value.args[0])
    for rank in ranks:
        rank.others = parts
        with pytest.raises(NumericsError, match=f"logits of {samples.name(1)} are not"):
            found(rank)


def test_a_network_that_overflowed_in_its_last_update_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of that update was finite; the network's answers after it are not."""
    changes = ("train.steps=1", "optim.warmup_steps=0", "train.precision=fp32")
    assert run(tmp_path / "run", *changes, "optim.lr=1e30") == 6
    assert "the logits of val_000000 are not finite" in told(capsys)
    assert not (tmp_path / "run" / "result.json").exists()
    assert run(tmp_path / "control", *changes, "optim.lr=1e-3") == 0


def test_ranks_that_see_different_checkpoints_are_told_apart() -> None:
    """As on machines without a common disk: one would resume, the other start anew."""
    rank = Rank(0, 2)
    rank.others = [20, 20]
    agree_on_step(Path("last.pt"), 20, rank)  # type: ignore[arg-type]
    rank.others = [20, 0]
    with pytest.raises(
        CheckpointError,
        match=r"not the same file on every machine.*\[20, 0\].*run\.root",
    ):
        agree_on_step(Path("last.pt"), 20, rank)  # type: ignore[arg-type]


def test_ranks_with_and_without_a_checkpoint_of_step_0_call_the_same_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are at step 0: one was interrupted before the first update, and has no disk in common with the other."""
    config = compose(settings(tmp_path / "run", "run.exists=resume"))
    config.run_dir.mkdir()
    calls: list[object] = []
    found: checkpoint.Found | None = None
    gather = Group.gather
    monkeypatch.setattr(
        Group, "gather", lambda self, item: calls.append(item) or gather(self, item)
    )
    monkeypatch.setattr(checkpoint, "newest_whole", lambda folder: found)
    numbers = []
    with torch_restored():
        for _ in range(2):
            calls.clear()
            group = Group(0, 1, torch.device("cpu"))
            run, stream, _ = engine._open(config, group, lambda _: (None, None), None)  # type: ignore[arg-type, return-value]
            numbers.append(len(calls))
            stream.close()
            run.watch.close()
            leave(group)
            path, classes = config.run_dir / "last.pt", run.train_samples.classes
            content = checkpoint.snapshot(run.state, config, classes, run.fingerprint)
            checkpoint.save(path, content)
            found = checkpoint.Found(path, checkpoint.load(path))
    assert numbers[0] == numbers[1]


def test_training_and_validation_each_read_their_own_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Samples] = {}
    batches, check = batches_module.train_batches, engine.validate

    def spied_batches(samples: Samples, *rest: Any, **named: Any) -> Any:
        seen["train"] = samples
        return batches(samples, *rest, **named)

    def spied_validate(
        model: Any, preprocess: Any, samples: Samples, *rest: Any, **named: Any
    ) -> Validation:
        seen["val"] = samples
        return check(model, preprocess, samples, *rest, **named)

    monkeypatch.setattr(batches_module, "train_batches", spied_batches)
    monkeypatch.setattr(engine, "validate", spied_validate)
    assert run(tmp_path / "run", "train.steps=1") == 0
    config = compose(settings(tmp_path / "run"))
    for split in ("train", "val"):
        own = open_samples(config.data, split, config.seed)
        for index in range(len(own)):
            image, target = seen[split].read(index)
            assert np.array_equal(image, own.read(index)[0])
            assert np.array_equal(target, own.read(index)[1])


def test_with_a_cache_later_validations_read_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And score the same to the bit; the control, without a cache, reads all images again."""
    read, reads = SyntheticSamples.read, []

    def counted(self: SyntheticSamples, index: int) -> Sample:
        reads.extend([index] if self.split == "val" else [])
        return read(self, index)

    monkeypatch.setattr(SyntheticSamples, "read", counted)
    found = {}
    for mib in (0, 64):
        reads.clear()
        folder = tmp_path / f"run{mib}"
        assert (
            run(
                folder,
                "train.steps=3",
                "train.validate_every=1",
                f"data.cache_mib={mib}",
            )
            == 0
        )
        scores = [
            (line["miou"], line["iou"])
            for line in metrics(folder)
            if line["kind"] == "validation"
        ]
        assert len(scores) == 3
        found[mib] = scores, outcome(folder), len(reads)
    assert found[0][:2] == found[64][:2]
    assert found[0][2] - found[64][2] == 2 * 4 + 3 * 4, (
        "two validations of four images, and four pictures for the page at each of three"
    )
