"""The switches that make torch's kernels deterministic: set in one place, asserted afterwards, written into the run."""

from __future__ import annotations

import os
import platform
from typing import Any

CUBLAS_WORKSPACE = ":4096:8"


def set_environment(threads: int = 1, mode: str = "elastic") -> None:
    """Set what CUDA, NCCL and OpenMP read once, at their start; so this runs before torch is imported.

    OpenMP threads spin while they wait for each other, which is fastest as long as each has a core. When `threads`, of
    all processes of this machine together, are more than the cores, those that spin starve those that work, and an
    update takes 5 to 12 times as long; then they sleep instead. Neither changes a number.

    NVLS lets the switch between GPUs do the sums of an all-reduce, in an order of its own. torch turns it off where the
    deterministic flag is on before the group is made; here it is off outright.
    """
    if mode != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if threads > len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def apply(threads: int, mode: str = "elastic") -> None:
    """Set torch's switches for `compute.mode`, before the process group is made; fixes the number of intra-op threads.

    `off` asks for the fastest kernels: cuDNN may measure and choose, TF32 is allowed. All others ask for kernels that
    repeat themselves. The number of threads changes sums on a CPU and is set in every mode.
    """
    set_environment(mode=mode)
    import cv2
    import torch

    exact = mode != "off"
    cv2.setNumThreads(0)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs bandwidth
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    torch.backends.cuda.matmul.allow_tf32 = not exact
    torch.backends.cudnn.allow_tf32 = not exact
    assert torch.are_deterministic_algorithms_enabled() == exact
    assert torch.get_num_threads() == threads


def switches() -> dict[str, Any]:
    """What is in force now, read back from torch and the environment, as plain JSON values."""
    import cv2
    import torch

    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "nccl_nvls": os.environ.get("NCCL_NVLS_ENABLE"),
        "threads": torch.get_num_threads(),
        "opencv_threads": cv2.getNumThreads(),
    }


def fingerprint() -> dict[str, Any]:
    """Versions and hardware on which the bits depend, as plain JSON values."""
    import albumentations
    import cv2
    import numpy
    import torch

    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a class of its own, which a checkpoint would not give back
        "numpy": numpy.__version__,
        "opencv": cv2.__version__,
        "albumentations": albumentations.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
