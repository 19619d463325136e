"""What every test runs under: one thread, deterministic kernels, and NaN in memory that nobody has written."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def strict_torch() -> Iterator[None]:
    """Deterministic algorithms, with new tensors full of NaN: who reads before writing is found out."""
    threads = torch.get_num_threads()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
