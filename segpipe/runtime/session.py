"""The network in onnxruntime: loading, identity, golden frames, and runs that end at a deadline."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from .artifact import EXPORT_AGAIN, MANIFEST_KEY, Artifact, ArtifactError, SelfTestError

_FATAL = 4  # log severity: errors are raised, and every run that a deadline ends would be logged as one
Bytes = NDArray[np.uint8]


def make_session(
    model: bytes | str,
    *,
    threads: int = 1,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    optimize: bool = True,
) -> Any:
    """onnxruntime.InferenceSession of an ONNX model, given as bytes or path; its CPU threads sleep while they wait.

    optimize=False runs the graph node by node as written. Raises whatever onnxruntime raises.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads would each take a core from the rest of the robot.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    options.log_severity_level = _FATAL
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=list(providers))


class DeadlineError(Exception):
    """A run was ended at its deadline."""


class Watchdog:
    """One thread that sleeps until a run is overdue and then ends it. A new thread per frame would cost more."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._due = math.inf
        self._wakes = math.inf  # when the thread wakes up by itself
        self._options: Any = None
        self._closed = False
        self.thread = threading.Thread(target=self._watch, name="segpipe-deadline", daemon=True)
        self.thread.start()

    @contextlib.contextmanager
    def ending(self, options: Any, due: float) -> Iterator[None]:
        """Context in which runs with these onnxruntime.RunOptions end at `due`, a time of time.perf_counter."""
        with self._condition:
            self._due, self._options = due, options
            # Waking the thread twice per frame would cost the run its core and the GIL. A thread that still sleeps
            # until an earlier frame's deadline wakes up in time for this one.
            if due < self._wakes:
                self._condition.notify()
        try:
            yield
        finally:
            with self._condition:
                self._options = None

    def close(self) -> None:
        """End the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def _watch(self) -> None:
        with self._condition:
            while not self._closed:
                left = self._due - time.perf_counter()
                if left > 0:
                    self._wakes = self._due
                    self._condition.wait(None if math.isinf(left) else min(left, threading.TIMEOUT_MAX))
                    continue
                if self._options is not None:
                    self._options.terminate = True
                self._due = math.inf


class Session:
    """The loaded ONNX file of an artifact. Raises ArtifactError if it is not the one that the manifest describes."""

    def __init__(self, artifact: Artifact, *, threads: int, providers: Sequence[str]) -> None:
        self._artifact = artifact
        try:
            self._inner = make_session(artifact.model, threads=threads, providers=providers)
        except Exception as error:  # onnxruntime has one exception type per status code
            raise ArtifactError(
                f"onnxruntime {onnxruntime.__version__} cannot load the ONNX file in {artifact.folder} "
                f"({type(error).__name__}: {error})."
            ) from error
        entries = artifact.manifest["io"]
        self._input = str(entries["inputs"][0]["name"])
        self._outputs = [str(entry["name"]) for entry in entries["outputs"]]
        _check_identity(artifact, self._inner)
        self._watchdog: Watchdog | None = None

    def run(self, image: Bytes, due: float = math.inf) -> tuple[Bytes, Bytes]:
        """Mask (H, W) and confidence (h, w) of a frame uint8 (H, W, 3), in newly allocated memory.

        Raises DeadlineError when they are not ready at `due`, a time of time.perf_counter; the session stays usable.
        Otherwise raises whatever onnxruntime raises.
        """
        options = onnxruntime.RunOptions()
        options.log_severity_level = _FATAL
        try:
            with self._guard(options, due):
                outputs = self._inner.run(self._outputs, {self._input: image[None]}, options)
        except Exception as error:
            if time.perf_counter() >= due:
                raise DeadlineError("the run was ended at its deadline") from error
            raise
        for output, (name, shape) in zip(outputs, self._shapes(image), strict=True):
            if output.shape != shape or output.dtype != np.uint8:
                raise ValueError(f"{name} is {output.dtype} {output.shape}, but uint8 {shape} was needed")
        return outputs[0][0], outputs[1][0]

    def bound(self, image: Bytes) -> Callable[[], None]:
        """A function that runs one frame with input and outputs kept on the device: no copies, no allocations."""
        binding = self._inner.io_binding()
        # Each OrtValue is a view of its array, and the binding refers to the values: keep all alive with the function.
        held = [onnxruntime.OrtValue.ortvalue_from_numpy(image[None].copy())]
        binding.bind_ortvalue_input(self._input, held[0])
        for name, shape in self._shapes(image):
            held.append(onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype=np.uint8)))
            binding.bind_ortvalue_output(name, held[-1])

        def run(held: list[Any] = held) -> None:
            self._inner.run_with_iobinding(binding)

        return run

    def self_test(self) -> tuple[float, int]:
        """Lowest fraction of equal mask pixels and largest difference of confidence over the golden frames.

        Raises SelfTestError when a golden frame fails, or the answers are further off than the manifest allows.
        """
        golden = self._artifact.golden
        agreement, levels = 1.0, 0
        for image, mask, confidence in zip(golden.image, golden.mask, golden.confidence, strict=True):
            own_mask, own_confidence = self._golden_run(image)
            agreement = min(agreement, float((own_mask == mask).mean()))
            levels = max(levels, int(np.abs(own_confidence.astype(np.int16) - confidence).max()))
        if agreement < golden.image_agreement or levels > golden.confidence_levels:
            raise SelfTestError(
                f"{self._artifact.folder}: on this machine {100 * agreement:.3f} % of a golden mask is equal and "
                f"confidence differs by {levels} levels, but at least {100 * golden.image_agreement:g} % and at most "
                f"{golden.confidence_levels} were needed. Try another onnxruntime or another provider."
            )
        return agreement, levels

    def _golden_run(self, image: Bytes) -> tuple[Bytes, Bytes]:
        try:
            return self.run(image)
        except Exception as error:  # onnxruntime has one exception type per status code
            raise SelfTestError(
                f"{self._artifact.folder}: a golden frame fails on this machine ({type(error).__name__}: {error}). "
                f"Try another onnxruntime or another provider."
            ) from error

    def _shapes(self, image: Bytes) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the outputs for a frame."""
        shapes = self._artifact.shapes.answers(image.shape)
        return [(name, (1, *shape)) for name, shape in zip(self._outputs, shapes, strict=True)]

    def _guard(self, options: Any, due: float) -> contextlib.AbstractContextManager[None]:
        if math.isinf(due):
            return contextlib.nullcontext()
        if self._watchdog is None:
            self._watchdog = Watchdog()
            weakref.finalize(self, self._watchdog.close)
        return self._watchdog.ending(options, due)


def _check_identity(artifact: Artifact, session: Any) -> None:
    """Compare the weights digest inside the file with the manifest's: files of two exports have valid checksums too."""
    inside = session.get_modelmeta().custom_metadata_map.get(MANIFEST_KEY, "")
    try:
        found = json.loads(inside)["source"]["weights_digest"]
    except (ValueError, KeyError, TypeError):
        found = "unknown"
    needed = artifact.manifest["source"]["weights_digest"]
    if found != needed:
        raise ArtifactError(
            f"the ONNX file in {artifact.folder} holds weights {found}, but the manifest describes {needed}. "
            f"{EXPORT_AGAIN}"
        )
