"""Engines that run the ONNX file: onnxruntime, and OpenVINO if installed. No fallback to another device."""

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

# From 1.29 on, official builds for Linux send telemetry to Microsoft, unless this is set before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

from .frames import Pixels

_CPU = ("CPUExecutionProvider",)
BF16 = "openvino_bf16"
# Log severity: errors are raised anyway, including a run that its deadline ends.
_FATAL = 4
Run = Callable[[Pixels], list[Pixels]]
# A function that runs one input batch, and one that ends that run from another thread
Prepared = tuple[Run, Callable[[], None]]


class EngineError(ValueError):
    """The engine, its version, the provider or the device that is needed is missing on this machine."""

    exit_code = 2


class Engine(Protocol):
    """A loaded model with one input and one or more outputs."""

    @property
    def described(self) -> str:
        """Name and version, for messages."""

    def prepare(self, outputs: list[str]) -> Prepared:
        """A function that runs one input batch for these outputs, and one that ends that run from another thread."""


def make_session(
    model: bytes | str,
    *,
    threads: int = 1,
    providers: Sequence[str] = _CPU,
    optimize: bool = True,
) -> Any:
    """onnxruntime.InferenceSession of an ONNX model, given as bytes or path; its CPU threads sleep while they wait.

    optimize=False runs the graph node by node as written. Raises EngineError for a provider that onnxruntime does not
    have or cannot start, where onnxruntime itself would fall back to the CPU; otherwise whatever onnxruntime raises.
    """
    available = onnxruntime.get_available_providers()
    _require_providers(providers, available, f"has {', '.join(available)}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads would each take a core from the rest of the robot's software.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = _FATAL
    if not optimize:
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.graph_optimization_level = level
    session = onnxruntime.InferenceSession(model, options, providers=list(providers))
    started = session.get_providers()
    _require_providers(providers, started, f"started {', '.join(started)} only")
    return session


def _require_providers(
    providers: Sequence[str], there: Sequence[str], found: str
) -> None:
    if not providers or not set(providers) <= set(there):
        raise EngineError(
            f"providers = {', '.join(providers) or 'none'}, but onnxruntime {onnxruntime.__version__} {found}. Install "
            "the package and its libraries, or choose one of these."
        )


class OnnxRuntime:
    """The model in onnxruntime. `oldest`: the first version that runs the file. Raises EngineError for an older one."""

    def __init__(
        self,
        model: bytes,
        *,
        threads: int,
        providers: Sequence[str] | None,
        oldest: str = "0",
        optimize: bool = True,
    ) -> None:
        self.described = f"onnxruntime {onnxruntime.__version__}"
        if _numbers(onnxruntime.__version__) < _numbers(oldest):
            raise EngineError(
                f"{self.described} is too old for this file: version {oldest} or later was needed."
            )
        self.inner = make_session(
            model, threads=threads, providers=providers or _CPU, optimize=optimize
        )
        self._input = self.inner.get_inputs()[0].name

    def prepare(self, outputs: list[str]) -> Prepared:
        """As in `Engine`."""
        options = onnxruntime.RunOptions()
        options.log_severity_level = _FATAL

        def run(batch: Pixels) -> list[Pixels]:
            found: list[Pixels] = self.inner.run(outputs, {self._input: batch}, options)
            return found

        return run, lambda: setattr(options, "terminate", True)


class OpenVino:
    """The model in OpenVINO, on one device. `precision` of the arithmetic: f32 or bf16.

    Raises EngineError when OpenVINO or the device is missing.
    """

    def __init__(
        self,
        model: bytes,
        *,
        threads: int,
        providers: Sequence[str] | None,
        oldest: str = "0",
        precision: str = "f32",
    ) -> None:
        try:
            import openvino
        except ImportError as error:
            raise EngineError(
                f"engine = openvino, but it is not installed ({error}). pip install openvino."
            ) from None
        self.described = f"openvino {openvino.__version__}"
        core = openvino.Core()
        devices = tuple(providers or ("CPU",))
        if len(devices) != 1 or devices[0] not in core.available_devices:
            raise EngineError(
                f"providers = {', '.join(devices)}, but {self.described} needs one of its devices: "
                f"{', '.join(core.available_devices)}."
            )
        # By default OpenVINO computes in bf16 or fp16 if the device can.
        options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if devices[0] == "CPU":
            options["INFERENCE_NUM_THREADS"] = threads
        compiled = core.compile_model(core.read_model(model), devices[0], options)
        self._request = compiled.create_infer_request()

    def prepare(self, outputs: list[str]) -> Prepared:
        """As in `Engine`."""

        def run(batch: Pixels) -> list[Pixels]:
            inputs = {0: np.ascontiguousarray(batch)}
            found = self._request.infer(inputs, share_inputs=True)
            return [found[name] for name in outputs]

        return run, self._request.cancel


ENGINES: dict[str, Callable[..., Engine]] = {
    "onnxruntime": OnnxRuntime,
    "openvino": OpenVino,
    # Twice as fast on a CPU with bf16; it has its own limits
    BF16: partial(OpenVino, precision="bf16"),
}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
