"""Settings of the whole suite: seeded generators, the marker `slow`, fixtures for a strict torch and for exports."""

import random
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent
# What `make quick` leaves out: files as a whole, tests that start processes, and tests of what a pool of ranks found.
SLOW_FILES = (
    "audit/test_audit.py", "cli", "distributed/watch/test_contract.py", "examples", "export/test_artifact.py",
    "export/test_export.py", "export/test_int8.py", "export/test_plants.py",
    "export/test_tensorrt_example.py", "export/test_verify.py",
    "ledger/test_run_ledger.py", "run/test_folder.py", "runtime", "train/test_train.py",
)  # fmt: skip
SLOW_TESTS = {
    "test_a_command_that_takes_too_long_ends_with_all_that_it_started", "test_a_killed_process_leaves_what_it_flushed",
    "test_all_ranks_end_when_one_finds_it", "test_an_audit_replays_step_0_where_the_file_is_at_hand",
    "test_frozen_parts_keep_their_bits_and_a_resumed_run_needs_no_file", "test_an_artifact_is_timed_without_torch",
    "test_an_error_on_one_rank_ends_all_and_is_named", "test_command_line", "test_it_comes_as_told",
    "test_memory_that_really_runs_out_is_explained", "test_mode_ddp_keeps_its_promise_and_says_its_limit",
    "test_multirun_makes_two_runs_and_a_table", "test_multirun_under_torchrun_is_refused_with_the_form_to_use",
    "test_offline_records_in_the_run_folder_and_calls_nobody", "test_sixteen_processes_compute_the_same_bits",
    "test_the_command_names_its_claims", "test_the_command_speaks_json_and_ends_with_the_verdict",
    "test_the_same_scene_in_another_process",
    "test_two_processes_write_the_ledger_of_one", "test_unreachable_wandb_costs_a_warning",
    "test_workers_that_nobody_ends_do_not_hold_up_the_exit",
}  # fmt: skip
SLOW_FIXTURES = {"answers"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow."""
    files = {ROOT / name for name in SLOW_FILES}
    for item in items:
        names = {getattr(item, "originalname", ""), *getattr(item, "fixturenames", ())}
        if files & {item.path, *item.path.parents} or names & (
            SLOW_TESTS | SLOW_FIXTURES
        ):
            item.add_marker("slow")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that `make quick` and mutation runs leave out; under nohup, notice SIGHUP all the same."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line(
        "markers",
        "slow: starts processes or takes more than 2 s; `make quick` skips it",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators before any fixture, and undo the determinism that a command of an earlier test set.

    Tests of one process share both, and their order varies.
    """
    torch.set_deterministic_debug_mode("default")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def strict_torch() -> Iterator[None]:
    """Deterministic algorithms; new tensors are filled with NaN, which exposes a read before a write."""
    threads = torch.get_num_threads()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_deterministic_debug_mode("default")
    torch.set_num_threads(threads)


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """A user's folder, which is the current one: `project("net.py", text)` writes a file. Nothing named is trusted."""
    from segpipe import plugins
    from segpipe.losses import total

    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(plugins, "_trusted", set())
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # or a file written twice in a second would not be read again
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    yield write
    total._loss.cache_clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]


@pytest.fixture(scope="module")
def quick_exports() -> Iterator[None]:
    """One thread and no wait for steady latencies, which tests of exports do not measure."""
    from segpipe.export.gates import latency

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "SECONDS", 0.0)
        yield
    torch.set_num_threads(threads)
