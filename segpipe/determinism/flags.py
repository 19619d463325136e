"""The switches that make torch's kernels deterministic: set in one place, asserted afterwards, written into the run."""

from __future__ import annotations

import os
import platform
from typing import Any

CUBLAS_WORKSPACE = ":4096:8"


def set_environment(threads: int = 1) -> None:
    """Set what CUDA and OpenMP read once, at their start; so this runs before torch is imported.

    OpenMP threads spin while they wait for each other, which is fastest as long as each has a core. When `threads`, of
    all processes of this machine together, are more than the cores, those that spin starve those that work, and an
    update takes 5 to 12 times as long; then they sleep instead. Neither changes a number.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    if threads > len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def apply(threads: int) -> None:
    """Make kernels deterministic and fix the number of intra-op threads, which changes sums on a CPU."""
    set_environment()
    import cv2
    import torch

    cv2.setNumThreads(0)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs bandwidth
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads


def fingerprint() -> dict[str, Any]:
    """Versions and hardware on which the bits depend, as plain JSON values."""
    import albumentations
    import cv2
    import numpy
    import torch

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "opencv": cv2.__version__,
        "albumentations": albumentations.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
