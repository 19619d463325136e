"""The network in an engine: loading, golden frames, and runs that end at a deadline."""

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np

from .artifact import OUTPUTS, Artifact, ArtifactError, SelfTestError
from .engines import BF16, ENGINES, Engine, EngineError
from .frames import Pixels, Refused, Status


class Watchdog:
    """One thread that sleeps until a run is overdue and then ends it. A new thread per frame would cost more."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._due = math.inf
        self._wakes = math.inf  # when the thread wakes up by itself
        self._end: Callable[[], None] | None = None
        self._closed = False
        self.thread = threading.Thread(
            target=self._watch, name="segpipe-deadline", daemon=True
        )
        self.thread.start()

    @contextmanager
    def ending(self, end: Callable[[], None], due: float) -> Iterator[None]:
        """Context that calls `end` at `due`, a time of time.perf_counter."""
        with self._condition:
            self._due, self._end = due, end
            # Waking the thread twice per frame would take the core and the GIL from the run. A thread that still sleeps
            # until an earlier frame's deadline wakes up in time for this one.
            if due < self._wakes:
                self._condition.notify()
        try:
            yield
        finally:
            with self._condition:
                self._end = None

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
                    self._condition.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                if self._end is not None:
                    self._end()
                self._due = math.inf


class Session:
    """The loaded ONNX file of an artifact. Raises ArtifactError if the engine cannot load it."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        threads: int = 1,
        providers: Sequence[str] | None = None,
        engine: str = "onnxruntime",
    ) -> None:
        self._artifact = artifact
        golden = artifact.golden
        self._golden = golden.in_bf16() if engine == BF16 else golden
        if engine not in ENGINES:
            raise EngineError(
                f"engine = {engine}, but it must be one of {', '.join(ENGINES)}."
            )
        oldest = artifact.requires.get(engine, "0")
        try:
            self.engine: Engine = ENGINES[engine](
                artifact.model, threads=threads, providers=providers, oldest=oldest
            )
        except EngineError:
            raise
        except Exception as error:  # onnxruntime has one exception type per status code
            raise ArtifactError(
                f"{engine} cannot load the ONNX file in {artifact.folder} ({type(error).__name__}: {error})."
            ) from error

    def run(self, image: Pixels, due: float = math.inf) -> tuple[Pixels, Pixels]:
        """Mask (H, W) and confidence (h, w) of a frame uint8 (H, W, 3), in newly allocated memory.

        Raises Refused when they are not ready at `due`, a time of time.perf_counter; the session stays usable.
        Otherwise raises whatever the engine raises.
        """
        if time.perf_counter() >= due:
            raise Refused(Status.DEADLINE, "the deadline had passed before the run")
        run, end = self.engine.prepare(OUTPUTS)
        try:
            with self._watchdog.ending(end, due) if due < math.inf else nullcontext():
                outputs = run(image[None])
        except Exception as error:
            if time.perf_counter() < due:
                raise
            raise Refused(
                Status.DEADLINE, "the run was ended at its deadline"
            ) from error
        shapes = self._artifact.answers
        for name, output, shape in zip(OUTPUTS, outputs, shapes, strict=True):
            if output.shape != (1, *shape) or output.dtype != np.uint8:
                raise ValueError(
                    f"{name} is {output.dtype} {output.shape}, but uint8 {(1, *shape)} was needed"
                )
        mask, confidence = outputs
        return mask[0], confidence[0]

    def self_test(self) -> tuple[float, int]:
        """Lowest fraction of equal mask pixels, and largest confidence difference in levels, over the golden frames.

        The difference covers the share `golden.confidence_share` of the cells that differ least.

        Raises SelfTestError when a golden frame fails, or the answers differ by more than the manifest allows.
        """
        golden = self._golden
        other = f"Try another version than {self.engine.described}, or another provider"
        agreement, levels = 1.0, 0
        for image, mask, confidence in zip(
            golden.image, golden.mask, golden.confidence, strict=True
        ):
            try:
                own_mask, own_confidence = self.run(image)
            # onnxruntime has one exception type per status code.
            except Exception as error:
                raise SelfTestError(
                    f"{self._artifact.folder}: a golden frame fails on this machine ({type(error).__name__}: {error}). "
                    f"{other}."
                ) from error
            differences = np.abs(own_confidence.astype(np.int16) - confidence)
            agreement = min(agreement, float((own_mask == mask).mean()))
            ranked = np.sort(differences, axis=None)
            place = math.ceil(golden.confidence_share * (ranked.size - 1))
            levels = max(levels, int(ranked[place]))
        lowest = golden.image_agreement
        if agreement < lowest or levels > golden.confidence_levels:
            raise SelfTestError(
                f"{self._artifact.folder}: on this machine {100 * agreement:.3f} % of a golden mask is equal and "
                f"confidence differs by {levels} levels, but at least {100 * lowest:g} % and at most "
                f"{golden.confidence_levels} were needed. {other}."
            )
        return agreement, levels

    @functools.cached_property
    def _watchdog(self) -> Watchdog:
        """Starts with the first run that has a deadline, ends with the session."""
        watchdog = Watchdog()
        weakref.finalize(self, watchdog.close)
        return watchdog
