"""The switches that make torch's kernels deterministic: set in one place, asserted afterwards, written into the run."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from segpipe.errors import ConfigError

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
INSTRUCTIONS = (  # beyond what `cpu_capability` tells; kernels are chosen by them, above all for bf16 and int8
    "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16", "bf16", "i8mm",
    "sve_bf16",
)  # fmt: skip

NATIVE = {  # instructions that make a precision fast on a CPU
    "bf16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def set_environment(threads: int = 1, mode: str = "elastic") -> None:
    """Set what CUDA, NCCL and OpenMP read once, at their start; so this runs before torch is imported.

    OpenMP threads spin while they wait for each other, which is fastest as long as each has a core. When `threads`, of
    all processes of this machine together, are more than the cores, those that spin starve those that work, and an
    update takes 5 to 12 times as long; then they sleep instead. Neither changes a number.

    NVLS lets the switch between GPUs do the sums of an all-reduce, in an order of its own. torch turns it off where the
    deterministic flag is on before the group is made; here it is off outright.

    Raises ConfigError when a variable is there with another value, unless `mode` is off.
    """
    check_environment(mode)
    for name, value in ENVIRONMENT.items() if mode != "off" else ():
        assert name in os.environ or not _cuda_runs(), f"CUDA runs already: {name} would come too late"
        os.environ.setdefault(name, value)
    if threads > len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def check_environment(mode: str) -> None:
    """Raises ConfigError when a variable of the environment breaks what `compute.mode` promises."""
    for name, value in ENVIRONMENT.items() if mode != "off" else ():
        found = os.environ.get(name, value)
        if found != value:
            raise ConfigError(
                f"{name} = {found} in the environment, but compute.mode = {mode} needs {value} for equal bits. "
                f"Unset it, or set compute.mode=off and give up the promise."
            )


def apply(threads: int, mode: str = "elastic") -> None:
    """Set torch's switches for `compute.mode`, before the process group is made; fixes the number of intra-op threads.

    `off` asks for the fastest kernels: cuDNN may measure and choose, TF32 is allowed. All others ask for kernels that
    repeat themselves. The number of threads changes sums on a CPU and is set in every mode.

    Raises ConfigError when the environment, or afterwards one of the switches, is not as it must be.
    """
    set_environment(mode=mode)
    import cv2
    import torch

    exact = mode != "off"
    cv2.setNumThreads(0)
    torch.set_num_threads(threads)
    # The switch of use_deterministic_algorithms, which would also load torch's compiler: seconds for every process.
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
            f"compute.mode = {mode}, but {', '.join(wrong)} right after it was set. Look for a variable in the "
            f"environment, or a package, that sets it back."
        )


def _cuda_runs() -> bool:
    """Whether this process has a CUDA context; asks without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


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
        "nccl": _nccl() if cuda else None,
        "driver": _driver(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": _instructions(),
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    """Model of the CPU, or its kind where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def emulated(precision: str) -> bool:
    """Whether this CPU lacks instructions for `precision`, fp32, bf16 or fp16; False for a torch that does not tell."""
    found = _capabilities()
    return bool(found) and precision in NATIVE and not any(found.get(name) for name in NATIVE[precision])


def _instructions() -> str | None:
    """Those of `INSTRUCTIONS` that torch sees on this CPU; None for a torch that does not tell."""
    found = _capabilities()
    return " ".join(name for name in INSTRUCTIONS if found.get(name)) if found else None


def _capabilities() -> dict[str, Any]:
    import torch

    ask = getattr(torch.cpu, "get_capabilities", None)
    return dict(ask()) if ask else {}


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """What the driver of the GPU says of itself; None where there is none."""
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def _nccl() -> str | None:
    """Version of NCCL; None for a torch without it."""
    import torch

    try:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, version))
