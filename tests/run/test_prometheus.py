"""track.name=prometheus: gauges of every rank, and what Debian's Prometheus makes of them (-m daemons)."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from runs import ROOT, kill_with_children, settings
from segpipe.run import trackers
from segpipe.run.trackers import Prometheus, check_tracking
from segpipe.run.tracking import open_tracker
from segpipe.settings.config import Config

MONITORING = ROOT / "examples" / "monitoring"
RULES = MONITORING / "alerts.yml"
needs_client = pytest.mark.skipif(
    find_spec("prometheus_client") is None, reason="needs prometheus-client"
)
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs Debian's package prometheus"
)


def configured(folder: Path, metrics: str) -> Config:
    track = replace(Config().track, name="prometheus", metrics=metrics)
    run = replace(Config().run, root=str(folder), name="alpha")
    return replace(Config(), track=track, run=run)


def free_port(number: int) -> int:
    """The first of some neighboring ports that nobody has."""
    for port in range(20000, 32000, number):
        held = []
        try:
            for each in range(port, port + number):
                held.append(socket.create_server(("127.0.0.1", each)))
            return port
        except OSError:
            continue
        finally:
            for server in held:
                server.close()
    raise OSError("no free ports")


def test_other_ranks_call_only_what_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Here:
        def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
            calls.append((type(self).__name__, step, metrics))

        def on_end(self, result: dict[str, Any]) -> None:
            calls.append((type(self).__name__, result))

    class Everywhere(Here):
        every_rank = True

    known = {"wandb": ("", Here), "prometheus": ("", Everywhere)}
    monkeypatch.setattr(trackers, "TRACKERS", known)
    config = configured(tmp_path, "")
    config = replace(
        config, track=replace(config.track, name=["wandb", "prometheus"], mode="")
    )
    tracker = open_tracker(config, tmp_path / "run", None, rank=1)
    tracker.log(4, "train", {"loss": 2.0})
    tracker.close()
    assert calls == [
        ("Everywhere", 4, {"train/loss": 2.0}),
        ("Everywhere", {"exit_code": 0}),
    ]
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(trackers.ConfigError, match="pip install prometheus-client"):
        check_tracking(configured(tmp_path, "9464"))


@needs_client
def test_a_text_file_has_the_figures_of_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    others = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "SLURM_RESTART_COUNT": "3"}
    for name, value in {**rank, **others}.items():
        monkeypatch.setenv(name, value)
    config = configured(tmp_path, str(tmp_path))
    config.run_dir.mkdir()
    (config.run_dir / "last.pt").write_bytes(b"12345")
    shown, path = Prometheus(), tmp_path / "segpipe_alpha_1.prom"
    shown.on_start(config, 5)
    figures = {"memory/rss_mib/0": 7.0, "memory/rss_mib/1": 8.0}
    shown.on_metrics(6, {**figures, "validation/iou/a road": 0.5, "train/loss": 1.5})
    text = path.read_text()
    for line in (
        "segpipe_restarts{of=,R} 3.0",
        "segpipe_resumed_step{of=,R} 5.0",
        "segpipe_world_size{of=,R} 2.0",
        "segpipe_step{of=,R} 6.0",
        "segpipe_train_loss{of=,R} 1.5",
        "segpipe_memory_rss_mib{of=,R} 8.0",
        "segpipe_validation_iou{of=a road,R} 0.5",
        "segpipe_file_bytes{of=checkpoint,R} 5.0",
    ):
        assert line.replace("R", "rank=1,run=alpha") in text.replace('"', ""), text
    assert "7.0" not in text
    shown.on_end({"exit_code": 9})
    assert "segpipe_exit_code" in path.read_text()
    shown.on_end({"exit_code": 0})
    assert not path.exists()


@needs_promtool
def test_the_alert_rules(tmp_path: Path) -> None:
    """promtool's own test of rules, on series as two ranks would leave them."""
    told = {"run": "a", "job": "segpipe"}

    def series(name: str, values: str, **labels: str) -> dict[str, str]:
        pairs = ",".join(f'{key}="{value}"' for key, value in {**told, **labels}.items())  # fmt: skip
        return {"series": f"segpipe_{name}{{{pairs}}}", "values": values}

    def fires(name: str, minutes: int, *given: dict[str, str]) -> dict[str, Any]:
        tested = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
        return {
            "interval": "1m",
            "input_series": list(given),
            "promql_expr_test": [
                {"expr": tested, "eval_time": f"{minutes}m", "exp_samples": [{"labels": "{}", "value": 1}]},
                # Early on nothing is wrong.
                {"expr": tested, "eval_time": "2m", "exp_samples": []},
            ],
        }  # fmt: skip

    sizes = [series("world_size", "2x30", rank=rank) for rank in "01"]
    tests = [
        fires("SegpipeRankMissing", 10, *sizes, series("step", "1x30", rank="0"),
              series("step", "1x3 stale", rank="1")),
        fires("SegpipeStandsStill", 20, series("time", "0+60x3 180x30", rank="0")),
        fires("SegpipeFailed", 10, series("exit_code", "130x4 9x30", rank="0"),
              series("exit_code", "130x34", rank="1")),
        fires("SegpipeCheckpointOld", 130, series("file_time", "0x200", rank="0", of="checkpoint")),
        fires("SegpipeRestartsOften", 30, series("restarts", "0x5 3x30", rank="0")),
        fires("SegpipeSlowRank", 25, series("train_rank_wait_s", "0x5 0+30x30", rank="0"),
              series("train_rank_wait_s", "0x5 0+3x30", rank="1")),
        fires("SegpipeWaitsForData", 25, series("train_part_s", "0+1x5 5+30x30", rank="0", of="data")),
    ]  # fmt: skip
    names = re.findall(r"alert: (\w+)", RULES.read_text())
    assert len(names) == len(tests)
    given = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(given))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "tests.yml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = str(MONITORING / "prometheus.yml")
    subprocess.run(["promtool", "check", "config", config], check=True)


def ask(port: int, path: str, **given: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(given)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


def queried(port: int, expression: str) -> list[tuple[dict[str, str], float]]:
    found = ask(port, "query", query=expression)["result"]
    return [(one["metric"], float(one["value"][1])) for one in found]


@contextmanager
def prometheus(folder: Path, first: int) -> Iterator[int]:
    """Debian's Prometheus, which scrapes two processes from port `first` on; gives its own, the next one."""
    port = first + 2
    rules = re.sub(r"for: \d+m", "for: 2s", RULES.read_text())
    (folder / "alerts.yml").write_text(rules)
    text = (MONITORING / "prometheus.yml").read_text().replace("15s", "1s")
    targets = json.dumps([f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"])
    text = re.sub(r"targets: \[.*?\]", f"targets: {targets}", text, flags=re.S)
    (folder / "prometheus.yml").write_text(text)
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'db'}",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield port
    finally:
        server.terminate()
        server.wait()


def eventually(what: Any, seconds: float = 90) -> Any:
    """The first true answer; the server may not be there yet."""
    end, last = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            if last := what():
                return last
        except OSError as error:
            last = error
        time.sleep(0.3)
    raise TimeoutError(str(last))


@needs_client
@needs_promtool
@pytest.mark.slow
@pytest.mark.daemons
def test_a_run_of_two_ranks_is_scraped_and_a_stopped_one_raises_an_alert(
    tmp_path: Path,
) -> None:
    first = free_port(3)
    given = settings(
        tmp_path / "seen", "train.steps=100000", "train.log_every=1", "compute.nproc=2", "compute.shards=2",
        "track.name=prometheus", f"track.metrics={first}", "checkpoint.every=5", "train.validate_every=20",
        "compute.timeout_s=600",
    )  # fmt: skip
    with (tmp_path / "run.log").open("wb") as log:
        words = [sys.executable, "-m", "segpipe", "train", *given]
        training = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
    try:
        with prometheus(tmp_path, first) as port:
            steps = eventually(lambda: sorted(
                (labels["rank"], value) for labels, value in queried(port, 'segpipe_step{run="seen"} > 10')
                if len(queried(port, "segpipe_step > 10")) == 2
            ))  # fmt: skip
            assert [rank for rank, _ in steps] == ["0", "1"]
            eventually(lambda: queried(port, "segpipe_validation_miou"))
            known = set(ask(port, "label/__name__/values"))
            shown = json.loads((MONITORING / "dashboard.json").read_text())
            asked = [
                target["expr"] for panel in shown["panels"] for target in panel["targets"]
            ]  # fmt: skip
            names = {
                name
                for text in [*asked, RULES.read_text()]
                for name in re.findall(r"\bsegpipe_\w+", text)
            }
            on_gpus = {
                name for name in names if re.search("_gpu_|reserved|fragmented", name)
            }
            assert names - known - on_gpus == {
                "segpipe_exit_code"
            }  # of ended runs alone
            for expression in asked:
                ready = expression.replace("$run", "seen")
                if not on_gpus & set(re.findall(r"\bsegpipe_\w+", ready)):
                    # A rate has to have two figures first.
                    print(ready, eventually(lambda e=ready: queried(port, e)))
            assert not queried(port, 'ALERTS{alertstate="firing"}')
            _listener(first + 1).send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            found = eventually(
                lambda: queried(port, 'ALERTS{alertstate="firing",run="seen"}')
            )
            print(f"alert after {time.monotonic() - begun:.0f} s: {found}")
            assert found[0][0]["alertname"] == "SegpipeRankMissing"
    finally:
        kill_with_children(training)
        training.wait()


def _listener(port: int) -> psutil.Process:
    """The process that listens on a port of this machine."""
    return next(
        psutil.Process(one.pid)
        for one in psutil.net_connections("tcp4")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    )
