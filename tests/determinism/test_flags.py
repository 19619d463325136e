"""The switches of every mode are set, read back and compared; the environment's own wishes are not overheard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch

import runs
from segpipe.cli.main import main as segpipe
from segpipe.determinism import flags
from segpipe.errors import CheckpointError, ConfigError
from segpipe.losses.total import backend
from segpipe.processes import proc_lines
from segpipe.settings.compose import compose
from segpipe.settings.groups import LossConfig
from segpipe.train.checkpoint import own_fingerprint

ROOT = Path(__file__).resolve().parents[2]
EXACT = {
    "deterministic_algorithms": True,
    "cudnn_benchmark": False,
    "cudnn_deterministic": True,
    "matmul_tf32": False,
    "cudnn_tf32": False,
    "fill_uninitialized_memory": False,
    "cublas_workspace": ":4096:8",
    "nccl_nvls": "0",
    "threads": 1,
    "opencv_threads": 1,
}
OFF = EXACT | {
    "deterministic_algorithms": False,
    "cudnn_benchmark": True,
    "cudnn_deterministic": False,
    "matmul_tf32": True,
    "cudnn_tf32": True,
}


def _set(where: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(where, name, value)


SETTERS: dict[str, Callable[[Any], None]] = {
    "deterministic_algorithms": torch.use_deterministic_algorithms,
    "cudnn_benchmark": _set(torch.backends.cudnn, "benchmark"),
    "cudnn_deterministic": _set(torch.backends.cudnn, "deterministic"),
    "matmul_tf32": _set(torch.backends.cuda.matmul, "allow_tf32"),
    "cudnn_tf32": _set(torch.backends.cudnn, "allow_tf32"),
    "fill_uninitialized_memory": _set(
        torch.utils.deterministic, "fill_uninitialized_memory"
    ),
    "threads": torch.set_num_threads,
    "opencv_threads": cv2.setNumThreads,
}
ENVIRONMENT = {
    "cublas_workspace": "CUBLAS_WORKSPACE_CONFIG",
    "nccl_nvls": "NCCL_NVLS_ENABLE",
}


@pytest.fixture(autouse=True)
def left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switches and environment are put back."""
    before = flags.switches()
    for name in ENVIRONMENT.values():
        monkeypatch.delenv(name, raising=False)
    yield
    for name, put in SETTERS.items():
        put(before[name])


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("elastic", EXACT), ("audit", EXACT), ("ddp", EXACT), ("off", OFF)],
    ids=lambda x: str(x)[:7],
)
def test_every_switch_is_set_whatever_it_was(mode: str, wanted: dict[str, Any]) -> None:
    for name, put in SETTERS.items():
        put(2 if name.endswith("threads") else not wanted[name])
    flags.apply(1, mode)
    found = flags.switches()
    if mode == "off":  # it asks nothing of the environment
        wanted = wanted | dict.fromkeys(ENVIRONMENT)
    assert found == wanted


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", ":4096:8"),
        ("NCCL_NVLS_ENABLE", "1", "0"),
        ("NVIDIA_TF32_OVERRIDE", "1", "0"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "0"),
        ("OMP_DYNAMIC", "TRUE", "FALSE"),
    ],
)
@pytest.mark.parametrize("mode", ["elastic", "audit", "ddp"])
def test_another_wish_of_the_environment_is_refused(
    name: str, value: str, needed: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError,
        match=f"^{name} = {value} in the environment, but compute.mode = {mode} needs",
    ):
        flags.apply(1, mode)
    assert os.environ[name] == value
    flags.apply(1, "off")
    monkeypatch.setenv(name, needed)
    flags.apply(1, mode)


def test_the_environment_is_not_set_after_cuda_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        ConfigError, match=r"Set CUBLAS_.*=:4096:8 and NCCL_.*=0 before"
    ):
        flags.set_environment()
    for name, value in flags.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    flags.set_environment()  # as a second call in a run does


def test_a_run_writes_down_what_was_in_force(tmp_path: Path) -> None:
    assert runs.run(tmp_path / "run", "train.steps=1") == 0
    result = runs.result(tmp_path / "run")
    assert result["switches"] == EXACT
    assert result["versions"] == flags.fingerprint() | {
        "threads": 1,
        "loss": backend(LossConfig(), "cpu"),
    }


def test_a_foreign_environment_ends_a_run_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert runs.run(tmp_path / "run", "train.steps=1") == 2
    assert "NCCL_NVLS_ENABLE = 1 in the environment" in capsys.readouterr().err


def test_a_fingerprint_tells_processor_instructions_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = flags.fingerprint()
    assert {
        "cpu",
        "cpu_capability",
        "instructions",
        "driver",
        "nccl",
        "cuda",
        "cudnn",
    } <= found.keys()
    assert json.loads(json.dumps(found)) == found
    info = Path("/proc/cpuinfo")
    if info.exists() and "model name" in info.read_text():
        assert f"model name\t: {found['cpu']}\n" in info.read_text()
    told = tmp_path / "version"
    told.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1\nGCC version: 12\n"
    )
    assert (
        proc_lines(str(told))[0]
        == "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1"
    )
    assert proc_lines(str(tmp_path / "none")) == []
    there = {"avx512_bf16": True, "amx_bf16": False, "avx2": True, "avx512_vnni": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: there, raising=False)
    assert flags.fingerprint()["instructions"] == "avx512_vnni avx512_bf16"


def test_a_run_on_a_cpu_neither_starts_a_gpu_nor_depends_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose(["compute.device=cpu"])
    before = own_fingerprint(config, "native")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: pytest.fail("started"))
    monkeypatch.setattr(flags, "proc_lines", lambda name: ["model name: 7", "570.1"])
    assert own_fingerprint(config, "native") == {**before, "cpu": "7"}


def test_a_fingerprint_holds_the_variables_that_select_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    selecting = {
        "ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_DEFAULT_FPMATH_MODE": "BF16", "MKL_CBWR": "COMPATIBLE", "GOMP_OTHER": "1",
        "KMP_HW_SUBSET": "1s", "OMP_SCHEDULE": "dynamic", "CUBLASLT_OTHER": "1", "NCCL_ALGO": "Tree",
        "NVIDIA_TF32_OVERRIDE": "0", "TORCH_BLAS_PREFER_CUBLASLT": "1", "PYTORCH_OTHER": "1", "CUDNN_OTHER": "1",
        "ATEN_CPU_CAPABILITY": "avx2", "OPENCV_CPU_DISABLE": "AVX2", "NPY_DISABLE_CPU_FEATURES": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2", "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "OPENCV_IPP": "disabled", "NPY_ENABLE_CPU_FEATURES": "AVX512F", "TRITON_DEFAULT_FP_FUSION": "0",
        "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1",
    }  # fmt: skip
    for name in selecting:
        monkeypatch.delenv(name, raising=False)
    before = flags.fingerprint()
    for name, value in selecting.items():
        monkeypatch.setenv(name, value)
    found = flags.fingerprint()
    assert selecting.items() <= found["variables"].items()
    assert list(found["variables"]) == sorted(found["variables"])
    assert flags.differences(before, found) == {
        name: (None, selecting[name]) for name in sorted(selecting)
    }


def test_a_fingerprint_does_not_hold_what_launchers_set_or_what_selects_no_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """These differ between ranks, machines, numbers of processes or launchers, whose bits are equal."""
    before = flags.fingerprint()
    for name in (
        "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY",
        "KMP_DUPLICATE_LIB_OK", "MKL_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
        "TORCHELASTIC_RUN_ID", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_FR_BUFFER_SIZE",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_DISTRIBUTED_DEBUG", "TORCH_HOME",
        "TORCH_LOGS", "TORCH_CPP_LOG_LEVEL", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA",
        "NCCL_HOSTID", "ONEDNN_VERBOSE", "MKL_VERBOSE", "CUDNN_LOGINFO_DBG", "CUBLASLT_LOG_LEVEL", "CUDNN_VERSION",
        "NCCL_VERSION", "PYTORCH_VERSION", "RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "HOME", "TRITON_CACHE_DIR",
        "TRITON_PRINT_AUTOTUNING", "TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_FX_GRAPH_CACHE",
    ):  # fmt: skip
        monkeypatch.setenv(name, "7")
    for (
        name,
        value,
    ) in (
        flags.ENVIRONMENT.items()
    ):  # set in every mode but off; another value is recorded
        monkeypatch.setenv(name, value)
    assert flags.fingerprint() == before


def test_variables_and_plug_ins_are_entries_of_their_own() -> None:
    plain = {"torch": "2.14.1", "threads": 1, "variables": {}}
    narrow = {
        "torch": "2.14.1",
        "variables": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        "plugins": {"net.py": "a"},
    }
    assert flags.differences(plain, narrow) == {
        "threads": (1, None),
        "ONEDNN_MAX_CPU_ISA": (None, "AVX2"),
        "net.py": (None, "a"),
    }


def test_another_backend_of_the_loss_is_refused_and_the_same_one_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, steps = tmp_path / "run", "train.steps=1"
    assert runs.run(folder, steps, "loss.backend=plain") == 0
    assert (
        runs.run(folder, steps, "run.exists=resume", "loss.backend=native")
        == CheckpointError.exit_code
    )
    assert (
        "loss: plain -> native). Resume with loss.backend=plain, or"
        in capsys.readouterr().err
    )
    assert runs.run(folder, steps, "run.exists=resume", "loss.backend=plain") == 0


def test_compare_names_a_variable_and_a_resume_under_another_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    a, b = tmp_path / "a", tmp_path / "b"
    assert runs.run(a, "train.steps=1") == 0
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert runs.run(b, "train.steps=1") == 0
    assert runs.result(a)["versions"] != runs.result(b)["versions"]
    capsys.readouterr()
    segpipe(["compare", str(a), str(b)])
    assert (
        "environment ONEDNN_MAX_CPU_ISA: None in A, AVX2 in B"
        in capsys.readouterr().out
    )
    again = ("train.steps=1", "run.exists=resume")
    assert runs.run(a, *again) == CheckpointError.exit_code
    assert "ONEDNN_MAX_CPU_ISA: None -> AVX2" in capsys.readouterr().err
    assert runs.run(a, *again, "run.allow_fingerprint_change=true") == 0


def test_importing_the_flags_does_not_import_torch() -> None:
    """`set_environment` has to come before OpenMP starts."""
    code = (
        "from segpipe.determinism import flags; flags.set_environment(); "
        "import sys; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("load", "policy"),
    [
        ("1.20 2 1 3/90 7", "PASSIVE"),  # another process has been busy and is
        ("1.90 2 1 1/90 7", None),  # it has just ended
        ("0.10 0 0 3/90 7", None),  # two start for a moment
        ("", None),
    ],
)
def test_threads_sleep_where_others_keep_the_cores_busy(
    load: str, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training of 2 threads beside 3 busy processes on 2 cores made 1.8 images/s spinning and 10.9 asleep."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "unset")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(flags, "proc_lines", lambda _: [load] if load else [])
    flags.set_environment(2)
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    flags.set_environment(1)  # the control: one thread waits for nobody
    assert "OMP_WAIT_POLICY" not in os.environ


def test_every_command_lets_threads_sleep_where_cores_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`segpipe describe` beside busy processes, 360x480: 1,818 ms per image spinning, 193 asleep."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "unset")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.chdir(tmp_path)
    for idle, policy in ((2, None), (1, "PASSIVE")):
        monkeypatch.setattr(flags, "idle_cores", lambda idle=idle: idle)
        segpipe(["runs"])
        assert os.environ.get("OMP_WAIT_POLICY") == policy


def test_gradients_arrive_in_the_thread_that_asks_for_them() -> None:
    """On a GPU autograd has a thread of its own, in which the hooks of the exchange would run."""
    with runs.torch_restored(), torch.autograd.set_multithreading_enabled(True):
        flags.apply(torch.get_num_threads())
        assert not torch._C._is_multithreading_enabled()


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    ],
)
def test_products_in_fp32_are_exact_whatever_was_set(
    change: Callable[[], None],
) -> None:
    """By either of torch's two interfaces, which raise when they are mixed."""
    generator = torch.Generator().manual_seed(0)
    one = torch.randn(64, 64, generator=generator)
    images, kernels = one.view(1, 4, 32, 32), one.view(-1)[:144].view(4, 4, 3, 3)
    flags.apply(1)
    expected = one @ one, torch.conv2d(images, kernels)
    change()
    flags.apply(1)
    found = one @ one, torch.conv2d(images, kernels)
    assert all(map(torch.equal, expected, found))
    assert flags.switches()["matmul_tf32"] is flags.switches()["cudnn_tf32"] is False
