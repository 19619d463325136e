"""Settings of the whole suite: seeded generators, the marker `slow`, fixtures for a strict torch and for exports."""

import functools
import gc
import random
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that `make quick` and mutation runs leave out; under nohup, notice SIGHUP all the same."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line(
        "markers",
        "slow: starts processes or takes more than 2 s; `make quick` skips it",
    )
    config.addinivalue_line(
        "markers",
        "daemons: starts Slurm or Prometheus where they are installed; only with -m daemons",
    )


# Files that take longest, the longest first: neither of two processes is left alone with one at the end.
LONGEST = (
    "benchmarks/test_smoke.py", "run/test_launch.py", "models/test_every_network.py", "run/test_folder.py",
    "train/test_train.py", "cli/test_gpu_check.py", "test_tutorial.py", "examples/test_cluster.py",
    "audit/test_audit.py",
    "train/test_recorder.py", "benchmarks/test_mutants.py", "export/test_export.py", "export/test_verify.py",
    "run/test_sweep.py", "data/test_loader.py", "examples/test_example_plugin.py", "checks/test_purity.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; the rest stays in its order."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Seek no garbage while tests are imported and rewritten, which took 4 of 11 s, and none among what stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators before any fixture, and undo the determinism that a command of an earlier test set.

    Tests of one process share both, and their order varies. Imported here: the process that hands out tests runs none.
    """
    import numpy as np
    import torch

    torch.set_deterministic_debug_mode("default")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a test before may have left more, with other sums


@pytest.fixture(scope="session", autouse=True)
def _one_fork_server() -> Iterator[None]:
    """All ranks of a test process are forks of one server, which imports what `ranks` lists: 5 s of processor time.

    A run of several processes that was started here would stop it at its end.
    """
    preload = forkserver.set_forkserver_preload

    def listed(_: object) -> None:
        from ranks import PRELOADED

        preload(PRELOADED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", listed)
        patch.setattr(forkserver._forkserver, "_stop", lambda: None)  # type: ignore[attr-defined]
        yield


@pytest.fixture
def strict_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic algorithms; new tensors are filled with NaN, which exposes a read before a write.

    They stay so: an update sets the switches of a training, which fills nothing.
    """
    import torch

    monkeypatch.setattr("segpipe.determinism.flags.apply", lambda *_: None)
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


@functools.cache
def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, which runs once in this process."""
    return functools.cache(make)


@pytest.fixture(scope="module")
def quick_exports() -> Iterator[None]:
    """One thread and no wait for steady latencies, which tests of exports do not measure.

    Conversions share torch's table of ONNX functions, which takes a third of their time to make.
    """
    import torch
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from segpipe.export.gates import judge

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "SECONDS", 0.0)
        once = made_once(ONNXRegistry.from_torchlib)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(once))
        yield
    torch.set_num_threads(threads)
