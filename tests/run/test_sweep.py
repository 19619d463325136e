"""Sweeps: every job is named and checked before the first starts; what came of each is told at the end."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from runs import settings, torch_restored
from segpipe.cli import api
from segpipe.cli.main import main as segpipe
from segpipe.errors import CollectiveError, ConfigError, DataError, NumericsError
from segpipe.run import launch, sweep
from segpipe.run.sweep import named
from segpipe.run.tracking import note_failure
from segpipe.settings.compose import compose
from segpipe.settings.config import Config, to_mapping

Trained = Callable[[Config], int]


class Sweeps:
    """`segpipe train --multirun` without training: what was started, what was examined, and the output."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys
        self.started: list[str] = []
        self.examined: list[Config] = []
        self.outcome: Callable[[Config], int | Exception] = lambda config: 0

    def train(self, config: Config) -> int:
        """Pretend to train: a score that grows with lr and seed."""
        self.started.append(config.run.name)
        code = self.outcome(config)
        if isinstance(code, Exception):
            raise code
        if code == 0:
            write_result(config)
        return code

    def __call__(self, *changes: str) -> tuple[int, str]:
        """Exit code and output of a sweep."""
        self.started.clear()
        self.examined.clear()
        code = segpipe(
            ["train", "--multirun", f"run.root={self.root}", "export=off", *changes]
        )
        said = self._capsys.readouterr()
        return code, said.out + said.err


def write_result(config: Config) -> None:
    config, _ = launch.with_steps(config)
    score = config.optim.lr + 0.01 * config.seed
    config.run_dir.mkdir(parents=True, exist_ok=True)
    iou = {"road": score + 0.1, "sky": score - 0.1 * config.seed, "lane": None}
    digest = {"ema_digest": "ab", "iou": iou}
    result = {"miou": score, "steps": config.train.steps, **digest}
    (config.run_dir / "result.json").write_text(json.dumps(result))
    (config.run_dir / "config.json").write_text(json.dumps(to_mapping(config)))
    for name in ("report.html", "last.pt"):
        (config.run_dir / name).touch()


@pytest.fixture
def sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sweeps:
    found = Sweeps(tmp_path, capsys)
    monkeypatch.setattr(api, "launch_apart", found.train)
    monkeypatch.setattr(api, "examine", found.examined.append)
    return found


def row(said: str, name: str) -> list[str]:
    """Name, score and state of a run in the table of the sweep."""
    line = next(
        line for line in said.splitlines() if "│" in line and f" {name} " in line
    )
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    return [cells[0], cells[1], cells[3]]


def test_jobs_train_in_other_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one that needs a single process."""
    spawned: list[int] = []

    def spawn(config: Config, size: int) -> int:
        spawned.append(size)
        write_result(config)
        return 0

    monkeypatch.setattr(launch, "_spawn", spawn)
    monkeypatch.setattr(
        launch,
        "work",
        lambda *_, **__: pytest.fail("it trained in the process of the sweep"),
    )
    assert segpipe(["train", "--multirun", *settings(tmp_path / "run")]) == 0
    assert spawned == [1]


def test_flags_without_a_sweep_start_the_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Config] = []
    monkeypatch.setattr(api, "launch", lambda config: started.append(config) or 7)
    arguments = [f"run.root={tmp_path}", "seed=4"]
    assert segpipe(["train", *arguments, "--config-dir", str(tmp_path)]) == 7
    assert started == [compose(arguments)]


def test_names_show_what_is_swept_and_values_reach_the_jobs(sweeps: Sweeps) -> None:
    code, said = sweeps("seed=1,2", "optim.lr=1", "optim.lr=0.25,0.5", "train.steps=9")
    assert code == 0, said
    names = [
        f"synthetic-fast_scnn-seed{seed}-lr{rate}"
        for seed in (1, 2)
        for rate in (0.25, 0.5)
    ]
    assert sweeps.started == names
    assert row(said, names[3])[1:] == ["52.00", "finished"]
    assert all(
        json.loads((sweeps.root / name / "config.json").read_text())["run"]["name"]
        == name
        for name in names
    )


@pytest.mark.parametrize(
    ("name", "swept", "expected"),
    [
        ("street-seed1", {"seed": "1"}, "street-seed1"),
        ("a_seed1_b-seed1.v2", {"seed": "1"}, "a_seed1_b-seed1.v2"),
        ("street-seed10", {"seed": "1"}, "street-seed10-seed1"),
        ("street-lr0.1-b", {"optim.lr": "0.1"}, "street-lr0.1-b"),
        ("street-fast_scnn", {"model": "fast_scnn"}, "street-fast_scnn"),
        ("n", {"run.name": "n", "seed": "1"}, "n-seed1"),
        ("n", {"seed": "1", "optim.name": "sgd"}, "n-seed1-name_sgd"),
        ("n", {"augment.crop_size": "[64,64]"}, "n-crop_size64_64"),
        ("n", {"data.root": "~/a b", "data.classes": ""}, "n-root_a_b-classes_empty"),
    ],
)
def test_a_name_gets_the_settings_that_it_does_not_show(
    name: str, swept: dict[str, str], expected: str
) -> None:
    assert named(name, swept) == expected


def test_long_names_are_short_and_differ() -> None:
    long = [
        named("n", {"model.weights": f"/data/{'w' * 200}/{which}.pt"})
        for which in ("one", "two")
    ]
    assert len(set(long)) == 2
    assert all(len(name) <= 121 and "/" not in name for name in long)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["train.steps=1,abc"], "train.steps=abc"),
        (["seed=1,-1"], "seed=-1: seed = -1, but a value of 0 to"),
        (["compute.shards=4,0"], "compute.shards=0: compute.shards = 0"),
        (["seed=1,2", "data=folder"], "seed=1: data.root is empty"),
        (["seed=1,2", "hydra/launcher=cloud"], "cloud"),
        (
            ["model=ddrnet23,ddrnet23_slim", "run.name=ddrnet23_slim"],
            "without their values.",
        ),
        (["seed=1,2", "hydra/sweeper=optuna2"], "optuna2"),
        (["seed=range(3,1)"], "no jobs"),
        (["seed=1,2", "optim.lr=0.1,"], "optim.lr=0.1, cannot be parsed"),
        (["model=glob(nosuch*)", "hydra.sweeper.max_batch_size=1"], "no jobs"),
        (["seed=1,2", "hydra.job.chdir=true"], "hydra.job.chdir = true"),
    ],
)
def test_a_job_that_cannot_start_starts_none(
    sweeps: Sweeps, changes: list[str], named: str
) -> None:
    code, said = sweeps(*changes)
    assert (code, sweeps.started) == (2, [])
    assert named in said
    assert "mIoU" not in said, "a table of nothing"
    assert "Traceback" not in said
    assert "HYDRA_FULL_ERROR" not in said


def test_data_is_examined_before_the_first_job_and_once_for_all(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweeps("seed=1,2", "data.num_val=8,9")[0] == 0
    assert len(sweeps.examined) == 2  # two data sets, four jobs

    def refused(config: Config) -> None:
        if config.data.num_val == 7:
            raise DataError("a mask is damaged.")

    monkeypatch.setattr(api, "examine", refused)
    code, said = sweeps("data.num_val=6,7")
    assert (code, sweeps.started) == (2, [])
    assert "data.num_val=7: a mask is damaged.\nNo job was started." in said


def test_the_data_is_examined_with_the_crop_that_it_gives(sweeps: Sweeps) -> None:
    assert sweeps("seed=1", "augment.crop_size=auto", "data.size=[128,160]")[0] == 0
    (examined,) = sweeps.examined
    assert examined.augment.crop_size == [96, 128]


def test_text_of_a_sweep_is_taken_as_it_was_typed(sweeps: Sweeps) -> None:
    """Commas part jobs; what Hydra's grammar would make of the rest is of no account."""
    texts = ["2011_09_26", "1e3", "null", r"^(\d+)_", "a b", "other"]
    assert sweeps(f"track.notes={', '.join(texts)}", "run.name=a")[0] == 0
    assert [each.track.notes for each in sweeps.examined] == texts
    assert len(set(sweeps.started)) == len(texts)


def test_what_hydra_computes_in_a_sweep_stays_its_own(sweeps: Sweeps) -> None:
    name = "run.name=a${seed}-${oc.env:SEGPIPE_TEST_NOBODY_SETS,x}"
    assert sweeps("seed=1,2", name, "track.notes= choice(b,c)")[0] == 0
    assert {each.track.notes for each in sweeps.examined} == {"b", "c"}
    assert all(each.startswith(("a1-x", "a2-x")) for each in sweeps.started)


def test_epochs_of_a_finished_run_are_compared_as_steps(sweeps: Sweeps) -> None:
    changes = (
        "seed=1",
        "train.steps=0",
        "optim.schedule_steps=200",
        "data.num_train=16",
    )
    for epochs, started in (2, 1), (2, 0), (4, 1):
        more = (*changes, f"train.epochs={epochs}", "run.exists=resume")
        assert sweeps(*more)[0] == 0
        assert len(sweeps.started) == started, epochs


def test_a_folder_in_use_is_found_before_the_first_job(sweeps: Sweeps) -> None:
    """It was once found after the first job had trained to its end."""
    assert sweeps("seed=2")[0] == 0
    code, said = sweeps("seed=1,2")
    assert (code, sweeps.started) == (2, [])
    assert f"seed=2: {sweeps.root / 'synthetic-fast_scnn-seed2'} already holds" in said
    assert "run.exists=resume" in said
    assert sweeps("seed=2", "run.exists=replace")[0] == 0
    assert len(sweeps.started) == 1


def test_resume_skips_what_is_finished(sweeps: Sweeps) -> None:
    assert sweeps("seed=1,2,3")[0] == 0
    for seed, name in (
        (2, "result.json"),
        (3, "report.html"),
    ):  # killed during the training, and after it
        (sweeps.root / f"synthetic-fast_scnn-seed{seed}" / name).unlink()
    code, said = sweeps("seed=1,2,3", "run.exists=resume")
    assert (code, sweeps.started) == (
        0,
        [f"synthetic-fast_scnn-seed{seed}" for seed in (2, 3)],
    )
    assert row(said, "synthetic-fast_scnn-seed1")[1:] == ["6.00", "finished"]
    assert "\nsynthetic-fast_scnn-seed1 finished: was finished already\n" in said
    assert "│ 1,2,3 │ 7.00 " in said
    code, said = sweeps("seed=1,2", "run.exists=resume", "optim.lr=0.5")
    assert (code, sweeps.started) == (2, [])
    assert "optim.lr: 0.05 -> 0.5" in said
    assert sweeps("seed=1", "run.exists=resume", "export=on")[0] == 0
    assert len(sweeps.started) == 1  # its export is missing
    (sweeps.root / "synthetic-fast_scnn-seed1" / "export").mkdir()
    (sweeps.root / "synthetic-fast_scnn-seed1" / "export" / "manifest.json").touch()
    for changes, number in ((), 0), (("export.precision=[fp32,int8]",), 1):
        assert sweeps("seed=1", "run.exists=resume", "export=on", *changes)[0] == 0
        assert len(sweeps.started) == number, changes  # another export is asked for


def test_a_failed_job_does_not_cost_the_others(sweeps: Sweeps) -> None:
    def outcome(config: Config) -> int | Exception:
        if config.seed == 2:
            config.run_dir.mkdir()
            note_failure(config, NumericsError("loss nan\nat step 3"))
            return 6
        return ConfigError("a file is gone") if config.seed == 3 else 0

    sweeps.outcome = outcome
    code, said = sweeps("seed=1,2,3,4")
    assert (code, len(sweeps.started)) == (6, 4)
    for seed, ended in ((2, 6), (3, 2)):
        cells = row(said, f"synthetic-fast_scnn-seed{seed}")
        assert cells[1:] == ["n/a", f"failed, exit code {ended}"]
    for seed, reason in ((2, "loss nan at step 3"), (3, "a file is gone")):
        line = next(line for line in said.splitlines() if line.endswith(reason))
        assert line.startswith(f"synthetic-fast_scnn-seed{seed} failed")
    assert row(said, "synthetic-fast_scnn-seed4")[1:] == ["9.00", "finished"]
    sweeps.outcome = lambda config: 0
    code, said = sweeps("seed=1,2,3,4", "run.exists=resume")
    assert (code, len(sweeps.started)) == (0, 2)


@pytest.mark.parametrize("how", [130, KeyboardInterrupt()])
def test_ctrl_c_ends_the_sweep_and_lists_what_is_done(
    sweeps: Sweeps, how: int | KeyboardInterrupt
) -> None:
    def outcome(config: Config) -> int:
        if config.seed == 2 and isinstance(how, KeyboardInterrupt):
            raise how
        return how if config.seed == 2 and isinstance(how, int) else 0

    sweeps.outcome = outcome
    code, said = sweeps("seed=1,2,3")
    assert (code, sweeps.started) == (
        130,
        [f"synthetic-fast_scnn-seed{seed}" for seed in (1, 2)],
    )
    assert [row(said, f"synthetic-fast_scnn-seed{seed}")[1:] for seed in (1, 2, 3)] == [
        ["6.00", "finished"],
        ["n/a", "not started"],
        ["n/a", "not started"],
    ]
    assert "run.exists=resume continues it" in said


def test_seeds_of_one_recipe_are_summed_up(sweeps: Sweeps) -> None:
    sweeps.outcome = lambda config: 0 if config.seed < 4 else 6
    code, said = sweeps(
        "seed=1,2,4", "optim.lr=0.4,0.5", "run.name=s${seed}-${optim.lr}"
    )
    assert code == 6
    rows = [line for line in said.splitlines() if line.startswith("│ 1,2 ")]
    assert [[cell.strip() for cell in line.split("│")[2:-1]] for line in rows] == [
        ["51.50", "51.00", "52.00", "2 of 2", "0.5"],
        ["41.50", "41.00", "42.00", "2 of 2", "0.4"],
    ]


class HillClimber(Sweeper):
    """A search in two batches, as Optuna's sweeper does it: the second batch depends on the scores of the first."""

    seen: list[Any]
    direction: str

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.root = Path(config.run.root)
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: Sequence[str]) -> None:
        (self.root / "study.db").touch()  # a storage in run.root, open before any job
        rates = [0.25, 0.5]
        for first in (0, 2):
            batch = [[*arguments, f"optim.lr={rate}"] for rate in rates]
            for rate, returned in zip(
                rates, self.launcher.launch(batch, first), strict=True
            ):
                try:
                    self.seen.append((rate, returned.return_value))
                except sweep.JobFailedError as error:
                    self.seen.append((rate, str(error)))
            best = max(
                self.seen,
                key=lambda pair: pair[1] if isinstance(pair[1], float) else 0.0,
            )[0]
            rates = [best, 2 * best]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Scores that the search saw; it takes the place of Hydra's sweeper, as an installed plug-in would by a setting."""
    place = "hydra_plugins.hill.HillClimber"
    HillClimber.seen = []
    original = Plugins.instance().instantiate_sweeper

    def instantiate(**arguments: Any) -> Sweeper:
        OmegaConf.set_readonly(arguments["config"], False)
        OmegaConf.set_struct(arguments["config"], False)
        arguments["config"].hydra.sweeper = {
            "_target_": place,
            "direction": HillClimber.direction,
        }
        sweeper = HillClimber()
        sweeper.setup(**arguments)
        return sweeper

    assert original
    monkeypatch.setattr(Plugins.instance(), "instantiate_sweeper", instantiate)
    HillClimber.direction = "maximize"
    return HillClimber.seen


def test_a_search_gets_scores_and_a_job_that_it_repeats_is_not_trained_again(
    sweeps: Sweeps, searched: list[Any]
) -> None:
    sweeps.root /= "new"
    code, said = sweeps("run.name=x")
    assert code == 0, said
    assert searched == [(0.25, 0.25), (0.5, 0.5), (0.5, 0.5), (1.0, 1.0)]
    assert sweeps.started == ["x-lr0.25", "x-lr0.5", "x-lr1.0"]


def test_a_search_hears_of_failures_and_each_batch_is_checked(
    sweeps: Sweeps, searched: list[Any]
) -> None:
    sweeps.outcome = lambda config: 6 if config.optim.lr == 0.5 else 0
    code, said = sweeps("run.name=x")
    assert (code, searched[1]) == (6, (0.5, "see the messages above"))
    assert "'optim.lr=0.5'" in said, "Hydra names the failed job"
    shutil.rmtree(sweeps.root / "x-lr0.25")
    sweeps.outcome = lambda config: 0
    HillClimber.seen.clear()
    (sweeps.root / "x-lr1.0").mkdir()
    (sweeps.root / "x-lr1.0" / "result.json").write_text("{}")
    code, said = sweeps("run.name=x")  # the second batch finds a folder in use
    assert code == 2
    assert "x-lr1.0 already holds" in said
    assert row(said, "x-lr0.5")[1] == "50.00"  # the first batch is told all the same


@pytest.mark.parametrize("direction", ["minimize", ["maximize", "minimize"]])
def test_a_search_in_the_wrong_direction_is_refused(
    sweeps: Sweeps, searched: list[Any], direction: Any
) -> None:
    HillClimber.direction = direction
    code, said = sweeps()
    assert (code, sweeps.started) == (2, [])
    assert "hydra.sweeper.direction = minimize, but jobs return mIoU" in said


def test_an_error_of_a_search_is_told_and_one_of_ours_is_a_traceback(
    sweeps: Sweeps, searched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: HillClimber, arguments: Sequence[str]) -> None:
        raise ValueError("`low` is above `high`.\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(HillClimber, "sweep", wrong)
        code, said = sweeps()
    assert (code, sweeps.started) == (2, [])
    assert "hydra/sweeper: ValueError: `low` is above `high`. Correct" in said
    monkeypatch.setattr(sweep, "named", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sweeps()


def test_a_sweep_under_torchrun_is_refused_with_the_form_to_use(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "under_launcher", lambda: True)
    code, said = sweeps("seed=1,2")
    assert (code, sweeps.started) == (2, [])
    assert "Use: segpipe train --multirun compute.nproc=N key=1,2,3" in said


class Pool:
    """A launcher that starts a batch at once, and one that is not there."""

    def __init__(self, sweeps: Sweeps, *, is_down: bool = False) -> None:
        self.sweeps, self.is_down = sweeps, is_down
        self.batches: list[list[list[str]]] = []

    def launch(self, job_overrides: list[list[str]], first: int) -> list[JobReturn]:
        if self.is_down:
            raise FileNotFoundError("sbatch is not installed\noutput of the job")
        self.batches.append(job_overrides)
        plain = (
            [text.replace('"', "") for text in overrides] for overrides in job_overrides
        )
        configs = [compose([*each, f"run.root={self.sweeps.root}"]) for each in plain]
        codes = [self.sweeps.train(config) for config in configs]
        return [JobReturn(_return_value=code) for code in codes]


PARALLEL = "hydra.launcher._target_=hydra_plugins.pool.Pool"


@pytest.mark.parametrize("is_down", [False, True])
def test_a_launcher_gets_a_batch_at_once(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch, is_down: bool
) -> None:
    pool = Pool(sweeps, is_down=is_down)
    monkeypatch.setattr(
        Plugins.instance(), "instantiate_launcher", lambda **given: pool
    )
    sweeps.outcome = lambda config: 6 if config.seed == 2 else 0
    names = [f"synthetic-fast_scnn-seed{seed}" for seed in (1, 2, 3)]
    code, said = sweeps("seed=1,2,3", PARALLEL)
    if is_down:
        assert code == 2
        assert "hydra/launcher: FileNotFoundError: sbatch is not installed. " in said
        assert "may still run" in said
        assert "output of the job" not in said
        return
    assert code == 6
    assert [len(batch) for batch in pool.batches] == [3]
    assert [row(said, name)[1:] for name in names] == [
        ["6.00", "finished"],
        ["n/a", "failed, exit code 6"],
        ["8.00", "finished"],
    ]
    sweeps("seed=1,3,4", PARALLEL, "run.exists=resume")
    assert sweeps.started == ["synthetic-fast_scnn-seed4"], "finished jobs are kept"


def test_a_job_that_a_cluster_killed_fails_alone(
    sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Job:
        """As submitit's: its results raise when it was killed."""

        paths = SimpleNamespace(stdout="1_log.out", stderr="1_log.err")

        def __init__(self, returned: JobReturn) -> None:
            self.returned = returned

        def results(self) -> list[JobReturn]:
            if self.returned._return_value == 6:
                raise RuntimeError("Job has not produced any output\nall its lines")
            return [self.returned]

    class Cluster(Pool):
        def launch(self, job_overrides: list[list[str]], first: int) -> list[JobReturn]:
            jobs = [Job(each) for each in super().launch(job_overrides, first)]
            return [job.results()[0] for job in jobs]

    cluster, original = Cluster(sweeps), Job.results
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(Job=Job))
    monkeypatch.setattr(
        Plugins.instance(), "instantiate_launcher", lambda **given: cluster
    )
    sweeps.outcome = lambda config: 6 if config.seed == 1 else 0
    code, said = sweeps("seed=1,2", PARALLEL)
    assert code == CollectiveError.exit_code
    assert "seed1 failed, exit code 9: RuntimeError: its process left no" in said
    assert "all its lines" not in said
    assert "1_log.err" in said
    assert row(said, "synthetic-fast_scnn-seed2")[1:] == ["7.00", "finished"]
    assert Job.results is original


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["submitit_local", "joblib"])
def test_jobs_of_a_launcher_of_hydra_train_on_processes_of_their_own(
    launcher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = launcher.partition("_")[0]
    pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher")
    tiny = settings(tmp_path / "run", "compute.nproc=2", "run.name=run${seed}")
    chosen = [f"hydra/launcher={launcher}", "seed=1,2"]
    with torch_restored():
        assert segpipe(["train", "--multirun", *tiny, *chosen]) == 0
    said = capfd.readouterr().out
    assert "validation mIoU" not in said, "whose line is it?"
    for seed in (1, 2):
        found = json.loads((tmp_path / f"run{seed}" / "result.json").read_bytes())
        assert found["world_size"] == 2
        assert row(said, f"run{seed}")[1:] == [f"{100 * found['miou']:.2f}", "finished"]


@pytest.mark.parametrize("method", ["loky", "spawn", None])
def test_jobs_that_run_at_once_print_to_files_of_their_own(
    method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of joblib, whose method is "loky" before the first job. Others: joblib with n_jobs=1, or basic."""
    monkeypatch.setattr(
        api.multiprocessing, "get_start_method", lambda allow_none: method
    )
    monkeypatch.setattr(api.multiprocessing, "set_start_method", lambda *_, **__: None)
    monkeypatch.setattr(api, "_is_of_joblib", api._is_of_joblib.__wrapped__)
    hydra = OmegaConf.create({"job": {"num": 0}})
    monkeypatch.setattr(api.HydraConfig, "get", lambda: hydra)
    config = compose(settings(tmp_path / "one"))
    monkeypatch.setattr(api, "resolve", lambda job: config)

    def train(config: Config) -> int:
        os.write(1, b"a line\n")
        os.write(2, b"a warning\n")
        return 0

    monkeypatch.setattr(api, "launch_apart", train)
    before = os.dup(1), os.dup(2)
    try:
        assert api.train_job(OmegaConf.create()) == 0
    finally:
        for number, each in enumerate(before, start=1):
            os.dup2(each, number)
            os.close(each)
    log = tmp_path / ".joblib" / "one.log"
    assert log.exists() == (method == "loky")
    if log.exists():
        assert "a line\na warning\n" in log.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # SQLAlchemy 1.4 warns of 2
def test_optuna_keeps_a_search_in_run_root(sweeps: Sweeps) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    sweeps.root /= "new"
    storage = f"hydra.sweeper.storage=sqlite:///{sweeps.root}/study.db"
    chosen = ["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"]
    bounds = ["hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    for number in (2, 4):  # another search of that name goes on
        code, said = sweeps(
            *chosen,
            *bounds,
            storage,
            "hydra.sweeper.study_name=one",
            "optim.lr=interval(0.01,0.1)",
            "run.exists=resume",
        )
        assert code == 0, said
        found = [path for path in sweeps.root.iterdir() if path.is_dir()]
        assert len(found) == number
