"""Switches that make torch's kernels deterministic: set in one place, read back, and written into the run."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from segpipe.errors import ConfigError

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
INSTRUCTIONS = (  # beyond `cpu_capability`; they select kernels, above all for bf16 and int8
    "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16", "bf16", "i8mm",
    "sve_bf16",
)  # fmt: skip
NATIVE = {  # instructions that make a precision fast on a CPU
    "bf16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def set_environment(threads: int = 1, mode: str = "elastic") -> None:
    """Set the variables that CUDA, NCCL and OpenMP read once at startup; call it before torch is imported.

    `threads` counts those of all processes on this machine. When they outnumber the cores, waiting OpenMP threads must
    sleep instead of spin, or an update takes 5 to 12 times as long. Neither changes a number.

    NVLS lets the NVSwitch do the sums of an all-reduce in an order of its own. torch turns it off only when the
    deterministic flag is set before the process group is made; here it is always off.

    Raises ConfigError when a variable already has another value, unless `mode` is off.
    """
    check_environment(mode)
    for name, value in ENVIRONMENT.items() if mode != "off" else ():
        assert name in os.environ or not _cuda_runs(), f"CUDA has already started: {name} would come too late"
        os.environ.setdefault(name, value)
    if threads > len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def check_environment(mode: str) -> None:
    """Raises ConfigError when an environment variable contradicts `compute.mode`."""
    for name, value in ENVIRONMENT.items() if mode != "off" else ():
        found = os.environ.get(name, value)
        if found != value:
            raise ConfigError(
                f"{name} = {found} in the environment, but compute.mode = {mode} needs {value} for equal bits. "
                f"Unset it, or set compute.mode=off to train without determinism."
            )


def apply(threads: int, mode: str = "elastic") -> None:
    """Set torch's switches for `compute.mode`, and the number of intra-op threads; call it before the process group.

    `off` selects the fastest kernels: cuDNN may benchmark, TF32 is allowed. All other modes select deterministic ones.
    The number of threads changes sums on a CPU and is set in every mode.

    Raises ConfigError when the environment contradicts the mode, or a switch does not keep its value.
    """
    set_environment(mode=mode)
    import cv2
    import torch

    exact = mode != "off"
    cv2.setNumThreads(0)
    torch.set_num_threads(threads)
    # What use_deterministic_algorithms sets, without importing torch's compiler: seconds in every process.
    torch.set_deterministic_debug_mode("error" if exact else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs bandwidth
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    torch.backends.cuda.matmul.allow_tf32 = not exact
    torch.backends.cudnn.allow_tf32 = not exact
    wanted = {
        "deterministic_algorithms": exact,
        "cudnn_benchmark": not exact,
        "cudnn_deterministic": exact,
        "matmul_tf32": not exact,
        "cudnn_tf32": not exact,
        "fill_uninitialized_memory": False,
        "threads": threads,
        "opencv_threads": 1,
    }
    found = switches()
    wrong = [f"{name} is {found[name]} instead of {value}" for name, value in wanted.items() if found[name] != value]
    if wrong:
        raise ConfigError(
            f"compute.mode = {mode}, but {', '.join(wrong)} right after it was set. Look for an environment variable "
            f"or a package that resets it."
        )


def _cuda_runs() -> bool:
    """Whether this process has a CUDA context; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def switches() -> dict[str, Any]:
    """The switches in force, read back from torch and the environment, as plain JSON values."""
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
    """Versions and hardware that the bits depend on, as plain JSON values."""
    import albumentations
    import cv2
    import numpy
    import torch

    cuda, machine, found = torch.cuda.is_available(), platform.processor() or platform.machine(), _capabilities()
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str, which weights_only loading would refuse
        "numpy": numpy.__version__,
        "opencv": cv2.__version__,
        "albumentations": albumentations.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "nccl": _nccl() if cuda else None,
        "driver": next(iter(_lines("/proc/driver/nvidia/version")), None),
        "device": torch.cuda.get_device_name() if cuda else machine,
        "cpu": models[0] if models else machine,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": " ".join(name for name in INSTRUCTIONS if found.get(name)) if found else None,
        "threads": torch.get_num_threads(),
    }


def emulated(precision: str) -> bool:
    """Whether this CPU lacks instructions for `precision` (fp32, bf16 or fp16); False when torch does not tell."""
    found = _capabilities()
    return bool(found) and precision in NATIVE and not any(found.get(name) for name in NATIVE[precision])


def _capabilities() -> dict[str, Any]:
    import torch

    ask = getattr(torch.cpu, "get_capabilities", None)
    return dict(ask()) if ask else {}


def _lines(path: str) -> list[str]:
    """Lines of a file of the system, stripped; empty where there is none."""
    try:
        return [line.strip() for line in Path(path).read_text().splitlines()]
    except OSError:
        return []


def _nccl() -> str | None:
    """Version of NCCL; None for a torch built without it."""
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None
