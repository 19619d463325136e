"""segpipe from Python: the functions give what the commands give, raise what is wrong, and work in a thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import segpipe
from runs import outcome, run, settings, torch_restored
from segpipe.cli import api, predict
from segpipe.cli.api import RunResult, configuration
from segpipe.data import Sample
from segpipe.data.data_set import SyntheticSamples
from segpipe.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Interrupted,
    NumericsError,
    SegpipeError,
)
from segpipe.run.trackers import TRACKERS
from segpipe.settings.compose import compose
from segpipe.settings.config import Config
from segpipe.train import engine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a thread trained, as a notebook's server may, where torch has other defaults than ours."""
    folder = tmp_path_factory.mktemp("api") / "run"

    def train() -> RunResult:
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.inference_mode(),
            torch.device("meta"),
        ):
            torch.set_default_dtype(torch.float64)
            try:
                done = segpipe.train(settings(folder))
                assert segpipe.evaluate(folder)["miou"] == done.miou
                assert torch.is_autocast_enabled("cpu"), "it is the caller's"
                assert torch.is_inference_mode_enabled()
                found = torch.empty(0)
            finally:
                torch.set_default_dtype(torch.float32)
            assert (found.dtype, found.device.type) == (torch.float64, "meta")
        return done

    with torch_restored(), ThreadPoolExecutor(1) as thread:
        done = thread.submit(train).result()
    assert done.folder == folder
    assert done.miou == done.figures["miou"]
    return folder


def test_a_training_from_python_is_that_of_the_command(
    trained: Path, tmp_path: Path
) -> None:
    assert run(tmp_path / "run", "run.name=run") == 0
    assert outcome(tmp_path / "run") == outcome(trained)
    found = segpipe.compare(trained, tmp_path / "run")
    assert found.verdict == "identical"


def test_a_run_is_scored_and_answers_images(trained: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    with torch_restored():
        network = segpipe.load(trained, which="last")
        ids, confidence = network.predict(image)
        figures = segpipe.evaluate(trained, settings={"data.workers": np.int64(0)})
    assert (ids.shape, ids.dtype) == ((64, 96), np.uint8)
    assert (confidence.shape, confidence.dtype) == ((64, 96), np.float32)
    assert figures["miou"] == json.loads((trained / "result.json").read_bytes())["miou"]
    with pytest.raises(ConfigError, match=r"'whihc' is not an argument.*which"):
        segpipe.load(trained, whihc="best")
    with pytest.raises(ConfigError, match=r"'optim\.lr' is not an argument"):
        segpipe.evaluate(trained, settings={"optim.lr": 1})


def test_an_error_is_raised_with_its_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = settings(tmp_path / "run", "optim.lr=1e38", "train.steps=9")
    with torch_restored(), pytest.raises(NumericsError, match="step") as caught:
        segpipe.train(broken)
    assert caught.value.told  # it is on stderr, where the run said it
    assert str(caught.value).split(".")[0] in " ".join(capsys.readouterr().err.split())
    with torch_restored(), pytest.raises(ConfigError, match="already holds"):
        segpipe.train(settings(tmp_path / "run"))
    assert capsys.readouterr().err == ""
    with torch_restored(), pytest.raises(NumericsError, match="step"):
        segpipe.train([*broken, "run.exists=replace"])  # the same once more


def test_an_error_of_a_training_has_its_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several classes share exit code 2: a damaged image was a CheckpointError."""
    for kind in (DataError, CheckpointError):
        monkeypatch.setattr(engine, "train", Mock(side_effect=kind("a.png is damaged")))
        with torch_restored(), pytest.raises(kind, match="is damaged") as caught:
            segpipe.train(settings(tmp_path / kind.__name__))
        assert (caught.value.exit_code, caught.value.told) == (2, True)


def test_an_unforeseen_error_of_a_rank_has_no_special_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was that of a check that got no answer, which has exit code 1, too. A late Ctrl-C has no record either."""
    from segpipe.checks import elsewhere

    assert elsewhere.UnansweredError.exit_code == 1
    for code, kind in ((1, SegpipeError), (130, Interrupted)):
        monkeypatch.setattr(api, "launch", lambda config, code=code: code)
        with pytest.raises(SegpipeError) as caught:
            segpipe.train(settings(tmp_path / "run"))
        assert (type(caught.value), caught.value.exit_code) == (kind, code)


def test_a_second_training_of_a_process_is_refused(
    trained: Path, tmp_path: Path
) -> None:
    """The two would share switches and generators of torch, and each would get other bits."""
    begun, end = threading.Event(), threading.Event()

    class Waits:
        def on_start(self, config: Config, step: int) -> None:
            begun.set()
            assert end.wait(60)

    waits = settings(tmp_path / "first", "track.name=tensorboard")
    with pytest.MonkeyPatch.context() as patch, torch_restored():
        patch.setitem(TRACKERS, "tensorboard", ("tensorboard", Waits))
        with ThreadPoolExecutor(1) as thread:
            first = thread.submit(segpipe.train, waits)
            try:
                assert begun.wait(60)
                with pytest.raises(ConfigError, match="another thread"):
                    segpipe.train(settings(tmp_path / "second"))
                with pytest.raises(ConfigError, match="another thread"):
                    segpipe.load(trained)  # which draws initial weights
                assert segpipe.compare(trained, trained).verdict == "identical"
            finally:
                end.set()
            assert first.result().miou is not None


def test_threads_load_networks_in_turn_and_a_training_loads_its_own(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service answers from a pool of threads; a data set may ask a teacher."""
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(segpipe.load, [trained] * 3)]
    assert all(each.names for each in found)

    def loads(*given: Any) -> Any:
        with pytest.raises(ConfigError, match="another thread"):
            others.submit(segpipe.train, settings(tmp_path / "no")).result()
        patch.setattr(predict, "predictor", real)
        assert others.submit(segpipe.load, trained).result(60)  # it does not wait
        begun.set()
        time.sleep(0.3)
        return real(*given)

    real, begun = predict.predictor, threading.Event()
    with ThreadPoolExecutor(2) as others, monkeypatch.context() as patch:
        patch.setattr(predict, "predictor", loads)
        reader = others.submit(segpipe.load, trained)
        assert begun.wait(60)
        assert run(tmp_path / "waits", "train.steps=1") == 0  # for the reader
        assert reader.result()

    read = SyntheticSamples.read

    def taught(self: SyntheticSamples, index: int) -> Sample:
        if index == 0:
            segpipe.load(trained)
        return read(self, index)

    monkeypatch.setattr(SyntheticSamples, "read", taught)
    for workers in (0, 1):
        folder = tmp_path / f"run{workers}"
        assert run(folder, "train.steps=1", f"data.workers={workers}") == 0


def test_settings_are_given_as_typed_by_name_or_whole() -> None:
    typed = ["model=pidnet_s", "optim.lr=0.2", "seed=3", "model.args.width=[1,a b]"]
    named = {
        "model": "pidnet_s",
        "optim": {"lr": 0.2},
        "seed": 3,
        "model.args": {"width": [1, "a b"]},
    }
    assert configuration(typed) == configuration(named) == compose(typed)
    assert configuration(compose(typed)) == compose(typed)
    whole = compose(typed)
    whole.optim.lr, whole.augment.crop_size = np.float64(0.1), (64, 96)  # type: ignore[assignment]
    whole.compute.nproc = 2  # type: ignore[assignment]
    found = configuration(whole)
    assert (type(found.optim.lr), found.augment.crop_size) == (float, [64, 96])
    assert (found.compute.nproc, whole.compute.nproc) == ("2", 2), "it is a copy"
    with pytest.raises(AttributeError, match="learning_rate"):
        whole.optim.learning_rate = 5  # type: ignore[attr-defined]
    assert configuration({"run.name": 'a "b" \\'}).run.name == 'a "b" \\'
    assert configuration({"seed": np.int64(3)}).seed == 3
    crop = configuration({"augment": {"crop_size": np.array([64, 96])}})
    assert crop.augment.crop_size == [64, 96]
    args = configuration({"model.args": {"a (b), c:d": 1}}).model.args
    assert args == {"a (b), c:d": 1}
    formats = ["onnx", "torchscript"]
    for given in (set(formats), iter(formats)):
        assert configuration({"export.formats": given}).export.formats == formats
    mixed = configuration({"model.args": {"a": {"b", None, 2, 10}}}).model.args
    assert mixed == {"a": ["b", 10, 2, None]}, "in this order in each process"
    assert configuration({"augment.scale": {1.5, 1}}).augment.scale == [1, 1.5]
    wrongs = {"model.weights": None}, {"optim.lr": object()}, {"run.name": np.ones(2)}
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} = .* was needed"):
            configuration(wrong)
    with pytest.raises(ConfigError, match="not of the form"):
        configuration("seed")
    assert configuration("seed=3").seed == 3
    drives = {"experiment": "camvid_drives", "data.root": "x"}
    with pytest.raises(ConfigError, match="of a sweep"):
        configuration(drives)
    assert configuration(drives | {"hydra.mode": "RUN"}).data.hold_out == "0001TP"
    with pytest.raises(ConfigError) as caught:
        configuration({"optim.lrr": 1, "train": {"steps": "x"}})
    assert len(str(caught.value).splitlines()) == 2


def test_importing_segpipe_is_light() -> None:
    code = (
        "import sys, segpipe; print([n for n in ('torch', 'hydra', 'numpy') if n in sys.modules]); "
        "print(callable(segpipe.train), callable(segpipe.export), 'torch' in sys.modules); "
        "import segpipe.train.stop; print(callable(segpipe.train), segpipe.train.stop.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "[]",
        "True True False",
        "True segpipe.train.stop",
    ]


def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells, one after another in one namespace, as a kernel executes them."""
    notebook = json.loads((ROOT / "examples/notebook/segpipe.ipynb").read_text())
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with torch_restored():
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
            assert not cell.get("outputs")
    assert "optim.lrr is not a setting" in capsys.readouterr().out
    same = segpipe.compare(names["run"].folder, names["again"].folder)  # type: ignore[attr-defined]
    assert same.verdict == "identical"
