"""Settings of the whole suite: seeded generators, the marker `slow`, fixtures for a strict torch and for exports."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent
# Files that `make quick` leaves out as a whole; single tests carry the marker themselves.
SLOW_FILES = (
    "distributed/watch/test_contract.py", "examples", "export/test_artifact.py", "export/test_dynamic.py",
    "export/test_export.py", "export/test_quantize.py", "export/test_verify.py", "ledger/test_run_ledger.py",
    "models/test_every_network.py", "cli", "runtime",
)  # fmt: skip

SLOW_FIXTURES = {"answers"}  # what a pool of gloo processes found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `SLOW_FILES` and those that need one of `SLOW_FIXTURES`."""
    slow = {ROOT / name for name in SLOW_FILES}
    for item in items:
        if slow & {item.path, *item.path.parents} or SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that `make quick` and mutation runs leave out."""
    config.addinivalue_line("markers", "slow: starts processes or takes more than 2 s; `make quick` skips it")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators before any fixture: tests of one process share them, and their order varies."""
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
