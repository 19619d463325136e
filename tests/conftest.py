"""What tests run under: random numbers that do not depend on the tests before; where asked for, a strict torch."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the global generators before any fixture: tests of a process share them, and come in an order of chance."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def strict_torch() -> Iterator[None]:
    """Deterministic algorithms, with new tensors full of NaN: who reads before writing is found out."""
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
    """One thread, and no waiting for steady latencies: what a test of exports does not measure."""
    from segpipe.export.gates import latency

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "SECONDS", 0.0)
        yield
    torch.set_num_threads(threads)
