"""Switches that make torch's kernels deterministic: set in one place, read back, and recorded in the run."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

from segpipe.errors import ConfigError
from segpipe.processes import proc_lines

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
NEEDED = (
    ENVIRONMENT
    | {  # values of variables that may be unset, but not set to something else
        "NVIDIA_TF32_OVERRIDE": "0",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
        "OMP_DYNAMIC": "false",  # true lets the machine's load choose the number of threads
    }
)
SELECTING = re.compile(  # variables by which libraries choose kernels
    r"(ONEDNN|DNNL|MKL|OMP|KMP|GOMP|NCCL|TORCH|PYTORCH|TORCHINDUCTOR|TRITON)_|CUBLAS|CUDNN"
    r"|(NVIDIA_TF32_OVERRIDE|ATEN_CPU_CAPABILITY|OPENCV_CPU_DISABLE|OPENCV_IPP|OPENBLAS_CORETYPE|GLIBC_TUNABLES)$"
    r"|NPY_(DISABLE|ENABLE)_CPU_FEATURES$"
)
# Exceptions, which choose no kernel but are set by launchers or differ between machines: number of threads (set by
# compute.threads), their placement and waiting, memory, timeouts, connections, logs, caches, container labels, folders.
NOT_SELECTING = re.compile(
    r"(OMP|MKL)_NUM_THREADS$|OMP_(WAIT_POLICY|PLACES|PROC_BIND|STACKSIZE)$|PYTORCH_(CUDA_)?ALLOC_CONF$"
    r"|GOMP_(CPU_AFFINITY|SPINCOUNT|STACKSIZE)$"
    r"|KMP_(AFFINITY|BLOCKTIME|DUPLICATE_LIB_OK|INIT_AT_FORK|STACKSIZE|WARNINGS)$"
    r"|TORCH_(NCCL|ELASTIC|FR|SHOW|DISABLE_SHARE_RDZV)_|NCCL_(SOCKET|IB|NET)_|NCCL_(COMM_ID|HOSTID)$"
    r"|(TORCHINDUCTOR|TRITON)_\w*(CACHE|COMPILE_THREADS|PRINT|REDIS|WORKER)"
    r"|\w+_(DEBUG|DISPLAY|DUMP|LOG|VERBOSE)|\w+_(DIR|HOME|PATH|ROOT|TRACE|VERSION)$"
)
PLUGINS = "plugins"  # in a fingerprint: hashes of user code, from plugins.sources
LOSS = "loss"  # in a fingerprint: what computed the loss
INSTRUCTIONS = (  # beyond `cpu_capability`; they select kernels, mainly for bf16 and int8
    "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16", "amx_fp16", "bf16", "i8mm",
    "sve_bf16",
)  # fmt: skip


def set_environment(threads: int = 1, mode: str = "elastic") -> None:
    """Set the variables that CUDA, NCCL and OpenMP read once at startup; call it before torch is imported.

    `threads`: threads of all processes on this machine. If they outnumber the idle cores, waiting OpenMP threads must
    sleep instead of spin, or an update takes 5 to 12 times as long. Neither changes a number.

    NVLS lets the NVSwitch compute the sums of an all-reduce in its own order. torch only turns it off if the
    deterministic flag is set before the process group is created; here it is always off.

    Raises ConfigError when a variable already has another value or CUDA has started without it, unless `mode` is off.
    """
    if mode != "off":
        for name, value in NEEDED.items():
            given = os.environ.get(name, value)
            if given.lower() != value:
                raise ConfigError(
                    f"{name} = {given} in the environment, but compute.mode = {mode} needs {value} for equal bits. "
                    f"Unset it, or set compute.mode=off to train without determinism."
                )
        torch = sys.modules.get("torch")  # not imported here
        for name, value in ENVIRONMENT.items():
            if name not in os.environ and torch and torch.cuda.is_initialized():
                raise ConfigError(
                    f"this process has already used CUDA: it is too late to set {name}={value}, which equal bits need. "
                    f"Set {' and '.join(map('='.join, ENVIRONMENT.items()))} before Python starts, or restart it and "
                    f"call segpipe before anything uses CUDA."
                )
            os.environ.setdefault(name, value)
    if threads > 1 and threads > idle_cores():
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def idle_cores() -> int:
    """Number of cores for this process that no other process is using.

    The load of the last minute is capped by the tasks running now: otherwise a job of a sweep that has just ended would
    still count.
    """
    mine, busy = len(os.sched_getaffinity(0)), 0.0
    for line in proc_lines("loadavg"):
        minute, _, _, running, _ = line.split()
        busy = min(float(minute), int(running.partition("/")[0]) - 1)
    return min(mine, (os.cpu_count() or mine) - round(busy))


def apply(threads: int, mode: str = "elastic") -> None:
    """Set torch's switches for `compute.mode`, and the number of intra-op threads; call it before the group is joined.

    `off` selects the fastest kernels: cuDNN may benchmark, TF32 is allowed. All other modes select deterministic ones.
    The number of threads changes sums on a CPU and is set in every mode.

    Raises ConfigError when the environment contradicts the mode.
    """
    set_environment(mode=mode)
    import cv2
    import torch

    exact = mode != "off"
    cv2.setNumThreads(0)
    torch.set_num_threads(threads)
    # Like use_deterministic_algorithms, but without importing torch's compiler, which takes seconds in every process.
    torch.set_deterministic_debug_mode("error" if exact else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs bandwidth
    at: Any = torch.backends
    at.cudnn.deterministic = exact
    for place in (
        at, at.cuda.matmul, at.cudnn, at.cudnn.conv, at.cudnn.rnn,
        at.mkldnn, at.mkldnn.matmul, at.mkldnn.conv, at.mkldnn.rnn,
    ):  # fmt: skip
        place.fp32_precision = "ieee"  # also ends any mix of torch's two interfaces
    at.cuda.matmul.allow_tf32 = at.cudnn.allow_tf32 = at.cudnn.benchmark = not exact
    # Backward hooks run in the thread that calls backward, on GPU and CPU alike.
    torch.autograd.set_multithreading_enabled(False)


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


def processor() -> str:
    """Name of the CPU, or its architecture if the system does not report a name."""
    for line in proc_lines("cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def fingerprint(*, gpu: bool = True) -> dict[str, Any]:
    """Versions, hardware and environment variables that the bits depend on, as plain JSON values.

    Without `gpu`, as of a machine that has none: asking for one would start CUDA and a kernel there.
    """
    import albumentations
    import cv2
    import numpy
    import torch

    from segpipe import native

    cuda = gpu and torch.cuda.is_available()
    # Not every release of torch reports them.
    found: Mapping[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    machine = platform.processor() or platform.machine()
    driver = proc_lines("driver/nvidia/version")
    instructions = " ".join(name for name in INSTRUCTIONS if found.get(name))
    variables = {  # except those with the value that every run sets
        name: value
        for name, value in sorted(os.environ.items())
        if SELECTING.match(name)
        and not NOT_SELECTING.match(name)
        and ENVIRONMENT.get(name) != value
    }
    return {
        "python": platform.python_version(),
        "torch": str(
            torch.__version__
        ),  # a subclass of str, which weights_only loading would refuse
        "numpy": numpy.__version__,
        "opencv": cv2.__version__,
        "albumentations": albumentations.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "nccl": _nccl() if cuda else None,
        "resize": ("triton" if native.triton_builds() else "products")
        if cuda
        else None,
        "driver": driver[0] if cuda and driver else None,
        "device": torch.cuda.get_device_name() if cuda else machine,
        "cpu": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": instructions if found else None,
        "threads": torch.get_num_threads(),
        "variables": variables,
    }


def differences(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Entries of two fingerprints that differ, as name -> (value in a, value in b); None if missing.

    Each environment variable is its own entry, and so is each plug-in file.
    """
    return mapping_differences(_flat(a), _flat(b))


def mapping_differences(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Entries that differ, as name -> (value in a, value in b); None if missing."""
    return {
        name: (a.get(name), b.get(name))
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    }


def changed_plugins(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Files of the user's own code that differ between two fingerprints."""
    return list(mapping_differences(*(each.get(PLUGINS, {}) for each in (a, b))))


def _flat(entries: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(entries)
    for name in ("variables", PLUGINS):
        flat |= flat.pop(name, {})
    return flat


def _nccl() -> str | None:
    """Version of NCCL; None for a torch built without it."""
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return None
