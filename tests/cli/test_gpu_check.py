"""The GPU checks, run on a CPU at toy sizes: their code works, and a broken promise is reported as one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from runs import torch_restored
from segpipe.cli.main import main as segpipe
from segpipe.determinism import flags
from segpipe.settings.config import Config, check

pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path: Path) -> gpu.Bench:
    return gpu.Bench(
        torch.device("cpu"),
        time.monotonic() + 100,
        size=64,
        batch=2,
        updates=1,
        folder=tmp_path,
    )


QUICK = (
    "preprocessing",
    "networks",
    "loss_and_gradients",
    "gradients",
    "speed",
    "digest",
    "syncs",
    "alignment",
)


@pytest.mark.parametrize("name", [*QUICK, "recipes", "loader"])
def test_checks_pass_on_a_sound_device(bench: gpu.Bench, name: str) -> None:
    [(found, passed, figures)] = list(gpu.run(bench, [name]))
    assert found == name
    assert passed, figures
    assert figures


def test_the_same_updates_give_the_same_weights(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MODELS", {"fast_scnn": gpu.MODELS["fast_scnn"]})
    [(_, passed, figures)] = list(gpu.run(bench, ["steps"]))
    assert passed, figures
    assert {"fast_scnn_fp32", "fast_scnn_bf16", "fast_scnn_fp16"} <= figures.keys()


def test_control_a_wrong_loss_fails_and_the_next_check_still_runs(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = gpu.shard_loss, []

    def sometimes_wrong(*args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        calls.append(1)
        parts = right(*args, **kwargs)  # type: ignore[arg-type]
        return {
            name: part * (1.01 if len(calls) % 2 else 1.0)
            for name, part in parts.items()
        }

    monkeypatch.setattr(gpu, "shard_loss", sometimes_wrong)
    (_, failed, figures), (_, passed, _) = list(
        gpu.run(bench, ["loss_and_gradients", "preprocessing"])
    )
    assert not failed
    assert "differs by" in figures["error"]
    assert passed


def test_control_a_wrong_gradient_of_one_parameter_fails(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MODELS", {"fast_scnn": gpu.MODELS["fast_scnn"]})
    right, calls = gpu._gradients, []

    def third_wrong(*args: object) -> list[torch.Tensor]:
        calls.append(1)
        found = right(*args)  # type: ignore[arg-type]
        return [*found[:-1], found[-1] * 1.1] if len(calls) == 3 else found

    monkeypatch.setattr(gpu, "_gradients", third_wrong)
    [(_, passed, figures)] = list(gpu.run(bench, ["gradients"]))
    assert not passed
    assert "fast_scnn: a gradient differs by" in figures["error"]


def test_camvid_ends_its_schedule_with_its_steps(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def pretend(config: Config, *_: object) -> tuple[None, None, dict[str, float]]:
        trained.append(config)
        keys = (
            "miou",
            "iou",
            "steps",
            "images_per_second",
            "train_seconds",
            "ema_digest",
        )
        return None, None, dict.fromkeys(keys, 120.0)

    monkeypatch.setattr(gpu, "train", pretend)
    [(_, passed, figures)] = list(
        gpu.run(replace(bench, camvid=Path("camvid")), ["camvid"])
    )
    assert passed, figures
    assert trained[1].train.steps > 60
    assert all(
        config.optim.schedule_steps == 0 and config.compute.device == "cpu"
        for config in trained
    )
    check(trained[1], world_size=1)


def test_control_weights_that_differ_fail(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MODELS", {"fast_scnn": gpu.MODELS["fast_scnn"]})
    right = gpu.build_state

    def drifting(*args: object) -> object:
        state = right(*args)  # type: ignore[arg-type]
        with torch.no_grad():
            next(state.model.parameters()).add_(torch.rand(()) * 1e-3)
        return state

    torch.seed()
    monkeypatch.setattr(gpu, "build_state", drifting)
    monkeypatch.setattr("segpipe.train.state.torch_seed", lambda *args: torch.seed())
    [(_, passed, figures)] = list(gpu.run(bench, ["steps"]))
    assert not passed, figures


def test_a_check_finds_the_switches_of_training_whatever_ran_before(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(bench: gpu.Bench) -> dict[str, bool]:
        flags.apply(torch.get_num_threads(), "off")
        return {}

    exact = torch.are_deterministic_algorithms_enabled
    monkeypatch.setattr(
        gpu, "CHECKS", {"off": off, "next": lambda bench: {"exact": exact()}}
    )
    with torch_restored():
        assert [
            figures.get("exact") for _, _, figures in gpu.run(bench, ["off", "next"])
        ] == [None, True]


def test_the_device_has_its_number_as_tensors_say_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Self-tests of kernels are kept by device: for another name of it they ran again, where nothing may wait."""
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu.flags, "fingerprint", dict)
    monkeypatch.setattr(
        gpu, "run", lambda bench, names: seen.append(bench.device) or []
    )
    with torch_restored():
        assert segpipe(["gpu-check"]) == 0
    assert seen == [torch.device("cuda", 0)]


def test_a_check_that_hangs_ends_the_call_and_keeps_what_was_found(
    tmp_path: Path,
) -> None:
    code = """
import sys, time
from benchmarks import gpu
from segpipe.cli.main import main
gpu.GRACE_S = 1.0
gpu.CHECKS = {"sound": lambda bench: {"found": 1}, "hangs": lambda bench: time.sleep(600)}
sys.exit(main(["gpu-check", "--device", "cpu", "--seconds", "1", "--out", sys.argv[1]]))
"""
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "Timeout" in done.stderr
    assert "in <lambda>" in done.stderr
    assert list(json.loads(out.read_text())["checks"]) == ["sound"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_so_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert segpipe(["gpu-check"]) == 2
    assert "torch sees none: nothing was checked" in capsys.readouterr().err


def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    with torch_restored():
        small = ["--device", "cpu", "--size", "64", "--batch", "2"]
        assert (
            segpipe(
                [
                    "gpu-check",
                    *small,
                    "--only",
                    "preprocessing",
                    "camvid",
                    "--out",
                    str(out),
                ]
            )
            == 0
        )
    report = json.loads(out.read_text())
    assert report["checks"]["preprocessing"]["passed"]
    assert not report["checks"]["camvid"][
        "passed"
    ]  # nor has it failed: there is no data
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "passed",
        "left out",
    ]
    assert report["device"] == "cpu"
    assert segpipe(["gpu-check", "--only", "nothing"]) == 2
    assert "only = nothing is not one of" in capsys.readouterr().err
