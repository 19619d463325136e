"""The network in onnxruntime, with runs that end at a deadline."""

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

from segpipe.runtime.artifact import EXPORT_AGAIN, MANIFEST_KEY, Artifact, ArtifactError, SelfTestError
from segpipe.runtime.options import session_options

_FATAL = 4  # onnxruntime would print every aborted run as an error
Bytes = NDArray[np.uint8]


class DeadlineError(Exception):
    """A run was ended because its time was up."""


class Watchdog:
    """One thread that sleeps until a run is overdue and then ends it; starting a thread per frame costs more."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._due = math.inf
        self._wakes = math.inf  # when the thread looks again by itself
        self._options: Any = None
        self._closed = False
        self.thread = threading.Thread(target=self._watch, name="segpipe-deadline", daemon=True)
        self.thread.start()

    @contextlib.contextmanager
    def ending(self, options: Any, due: float) -> Iterator[None]:
        """While inside, runs with these onnxruntime.RunOptions end at `due`, a time of time.perf_counter."""
        with self._condition:
            self._due, self._options = due, options
            # To wake it twice a frame would cost the run its core and the interpreter's lock. A thread that sleeps
            # until the time of an earlier frame looks again in time for this one.
            if due < self._wakes:
                self._condition.notify()
        try:
            yield
        finally:
            with self._condition:
                self._options = None

    def close(self) -> None:
        """Lets the thread end."""
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
    """The ONNX file of an artefact, loaded. Raises ArtifactError when it is not the file of the manifest."""

    def __init__(self, artifact: Artifact, *, threads: int, providers: Sequence[str]) -> None:
        self._artifact = artifact
        self._inner = _open(artifact, threads, providers)
        entries = artifact.manifest["io"]
        self._input = str(entries["inputs"][0]["name"])
        self._outputs = [str(entry["name"]) for entry in entries["outputs"]]
        _check_identity(artifact, self._inner)
        self._watchdog: Watchdog | None = None

    def run(self, image: Bytes, due: float = math.inf) -> tuple[Bytes, Bytes]:
        """Mask (H, W) and confidence (h, w) of a frame uint8 (H, W, 3), in fresh memory.

        Raises DeadlineError when they are not there at `due`, a time of time.perf_counter; the session can be used
        again at once. Raises whatever onnxruntime raises.
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
        """A run whose input and outputs stay in the memory of the device: no copies, nothing allocated."""
        binding = self._inner.io_binding()
        # The values are views of the arrays, and the binding one of the values: all must live as long as the run.
        held = [onnxruntime.OrtValue.ortvalue_from_numpy(image[None].copy())]
        binding.bind_ortvalue_input(self._input, held[0])
        for name, shape in self._shapes(image):
            held.append(onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype=np.uint8)))
            binding.bind_ortvalue_output(name, held[-1])

        def run(held: list[Any] = held) -> None:
            self._inner.run_with_iobinding(binding)

        return run

    def self_test(self) -> tuple[float, int]:
        """Lowest share of equal pixels and largest difference of confidence over the golden frames.

        Raises SelfTestError when this machine's answers are further from the recorded ones than the manifest allows,
        or when it gives none.
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
        except Exception as error:  # onnxruntime has an exception type per status code
            raise SelfTestError(
                f"{self._artifact.folder}: on this machine a golden frame cannot be run ({type(error).__name__}: "
                f"{error}). Try another onnxruntime or another provider."
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


def _open(artifact: Artifact, threads: int, providers: Sequence[str]) -> Any:
    try:
        return onnxruntime.InferenceSession(artifact.model, session_options(threads), providers=list(providers))
    except Exception as error:  # onnxruntime has an exception type per status code
        raise ArtifactError(
            f"onnxruntime {onnxruntime.__version__} cannot load the ONNX file in {artifact.folder} "
            f"({type(error).__name__}: {error})."
        ) from error


def _check_identity(artifact: Artifact, session: Any) -> None:
    """The manifest inside the file must speak of the same weights: checksums alone would let files be mixed."""
    inside = session.get_modelmeta().custom_metadata_map.get(MANIFEST_KEY, "")
    try:
        found = json.loads(inside)["source"]["weights_digest"]
    except (ValueError, KeyError, TypeError):
        found = "unknown"
    needed = artifact.manifest["source"]["weights_digest"]
    if found != needed:
        raise ArtifactError(
            f"the ONNX file in {artifact.folder} holds weights {found}, but the manifest speaks of {needed}. "
            f"{EXPORT_AGAIN}"
        )
