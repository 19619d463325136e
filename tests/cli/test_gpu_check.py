"""The GPU checks, run on a CPU at toy sizes: their code works, and a broken promise is reported as one."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_speed
from benchmarks.gpu_bench import GoalMissed, latest
from runs import torch_restored
from segpipe.cli.main import main as segpipe
from segpipe.determinism import flags
from segpipe.settings.compose import compose
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
    "machine",
    "preprocessing",
    "networks",
    "loss_and_gradients",
    "gradients",
    "digest",
    "syncs",
    "alignment",
    "graphs",
    "loss",
)


def ran(bench: gpu.Bench, name: str) -> tuple[bool, dict[str, Any]]:
    """Whether a check passed, and its figures."""
    [row] = gpu.run(bench, [name])
    return row["verdict"] == gpu.PASSED, row["figures"]


@pytest.mark.parametrize("name", [*QUICK, "loader"])
def test_checks_pass_on_a_sound_device(bench: gpu.Bench, name: str) -> None:
    passed, figures = ran(bench, name)
    assert passed, figures
    assert figures


def test_the_parts_fit_into_their_calls() -> None:
    for part in (1, 2):
        checks = [check for check in gpu.CHECKS.values() if check.part == part]
        assert 10 + sum(check.seconds for check in checks) < 570


def test_the_page_names_every_check_with_its_estimate() -> None:
    page = (gpu.ROOT / "docs/gpu.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| (\S+) \|", page, re.MULTILINE)
    assert rows == [
        (name, str(check.part), str(check.seconds or "rest"))
        for name, check in gpu.CHECKS.items()
    ]


def test_what_was_found_stays_when_a_check_breaks_and_when_the_call_is_killed(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"

    def breaks(bench: gpu.Bench) -> dict[str, Any]:
        bench.keep({"found": 1})
        now.update(latest(rows)["breaks"])
        raise AssertionError("broken")

    def slow(bench: gpu.Bench) -> dict[str, Any]:
        bench.keep({"found": 2})
        raise GoalMissed("rate")

    now: dict[str, Any] = {}
    checks = {"breaks": gpu.Check(breaks, 1, 5), "slow": gpu.Check(slow, 1, 5)}
    monkeypatch.setattr(gpu, "CHECKS", checks)
    with torch_restored():
        assert len(list(gpu.run(bench, list(checks), rows))) == 2
    assert (now["verdict"], now["figures"]) == ("unfinished", {"found": 1})
    found = latest(rows)
    assert found["breaks"]["verdict"] == "FAILED"
    assert found["breaks"]["figures"]["found"] == 1
    assert "broken" in found["breaks"]["figures"]["error"]
    assert found["slow"]["verdict"] == "goal missed"
    assert found["slow"]["figures"] == {"found": 2, "missed": "rate"}


def test_the_same_updates_give_the_same_weights(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MODELS", {"fast_scnn": gpu.MODELS["fast_scnn"]})
    passed, figures = ran(replace(bench, size=32), "steps")
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
    wrong, sound = gpu.run(bench, ["loss_and_gradients", "preprocessing"])
    assert wrong["verdict"] == gpu.FAILED
    assert "differs by" in wrong["figures"]["error"]
    assert sound["verdict"] == gpu.PASSED


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
    passed, figures = ran(bench, "gradients")
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
    passed, figures = ran(replace(bench, camvid=Path("camvid")), "camvid")
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
    passed, figures = ran(replace(bench, size=32), "steps")
    assert not passed, figures


def test_a_check_finds_the_switches_of_training_whatever_ran_before(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(bench: gpu.Bench) -> dict[str, bool]:
        flags.apply(torch.get_num_threads(), "off")
        return {}

    exact = torch.are_deterministic_algorithms_enabled
    checks = {"off": off, "next": lambda bench: {"exact": exact()}}
    monkeypatch.setattr(
        gpu, "CHECKS", {name: gpu.Check(check, 1, 5) for name, check in checks.items()}
    )
    with torch_restored():
        assert [row["figures"] for row in gpu.run(bench, ["off", "next"])] == [
            {},
            {"exact": True},
        ]


def test_the_device_has_its_number_as_tensors_say_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Self-tests of kernels are kept by device: for another name of it they ran again, where nothing may wait."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    keys = {"device": "cuda", "size": 64, "batch": 2, "updates": 1, "camvid": ""}
    bench = gpu.bench_of({**keys, "folder": str(tmp_path)}, 10)
    assert bench.device == torch.device("cuda", 0)


def test_a_check_that_hangs_or_ends_the_process_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks run in a process of their own, whose figures and stacks are kept."""
    code = """
import os, sys, time
from benchmarks import gpu
def hangs(bench):
    bench.keep({"found": 1})
    time.sleep(600)
gpu.CHECKS = {
    "first": gpu.Check(lambda bench: {"found": 0}, 1, 5),
    "hangs": gpu.Check(hangs, 1, 5),
    "dies": gpu.Check(lambda bench: os._exit(7), 1, 5),
    "sound": gpu.Check(lambda bench: {"found": 2}, 1, 5),
}
gpu.work(sys.argv[1])
"""
    row = gpu.Worker.row

    def row_soon(worker: Any, name: str, seconds: float, limit: float) -> Any:
        """It would wait for all the time that is left."""
        return row(worker, name, seconds, 10 if name == "hangs" else limit)

    names = ("first", "hangs", "dies", "sound")
    checks = {name: gpu.Check(lambda bench: {}, 1, 5) for name in names}
    monkeypatch.setattr(gpu, "CHECKS", checks)
    monkeypatch.setattr(gpu, "START", code)
    monkeypatch.setattr(gpu.Worker, "row", row_soon)
    out = tmp_path / "found.jsonl"
    with torch_restored():
        assert segpipe(["gpu-check", "--device", "cpu", "--out", str(out)]) == 1
    found = latest(out)
    assert found["hangs"]["figures"]["found"] == 1
    assert "in hangs" in found["hangs"]["figures"]["error"]
    assert "ended with 7" in found["dies"]["figures"]["error"]
    assert [found[name]["verdict"] for name in ("hangs", "dies", "sound")] == [
        "FAILED",
        "FAILED",
        "passed",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_so_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert segpipe(["gpu-check"]) == 2
    assert "torch sees none: nothing was checked" in capsys.readouterr().err


def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.jsonl"
    small = ["--device", "cpu", "--size", "64", "--batch", "2"]
    only = ["--only", "preprocessing", "camvid", "--out", str(out)]
    assert segpipe(["gpu-check", *small, *only]) == 0
    found = latest(out)
    assert found["preprocessing"]["verdict"] == "passed"
    # Nor has it failed: there is no data.
    assert found["camvid"]["verdict"] == "left out"
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()][
        :2
    ] == ["passed", "left out"]
    assert found["preprocessing"]["device"] == "cpu"
    assert segpipe(["gpu-check", "--only", "nothing"]) == 2
    assert "only = nothing is not one of" in capsys.readouterr().err
    assert segpipe(["gpu-check", "--camvid", "drives", "--device", "cpu"]) == 2
    assert "part = 1 does not train on it. Set part=2" in capsys.readouterr().err


def test_settings_of_the_timed_loop_are_valid(bench: gpu.Bench, tmp_path: Path) -> None:
    """A run of each takes half a minute without a GPU, so nobody trains them here."""
    for name, pack in gpu_speed.PACKS.items():
        config = compose(gpu_speed.loop_settings(bench, tmp_path, name, pack))
        check(config, world_size=1)
        assert config.data.pack == pack
