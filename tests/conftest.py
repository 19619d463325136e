"""What tests run under: random numbers that do not depend on the tests before; where asked for, a strict torch."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

LONGEST = (  # files, in seconds from 400 to 40; two processes share all of them
    "test_launch", "test_train", "test_verify", "test_every_network", "test_export", "test_audit", "test_dynamic",
    "test_contract", "test_locate", "test_canary", "test_agreement", "test_gradients", "test_gpu_check",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no process is left with one of them when the other has done."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


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
