"""Answers frames one by one: input checks, inference within a deadline, and never the answer to another frame."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .artifact import Artifact, read_artifact
from .frames import NO_ANSWER, Pixels, Refused, RepeatCounter, Result, Status
from .session import Session

_WARMUP = 3  # onnxruntime plans its memory in the first runs


@dataclass(eq=False)
class Segmenter:
    """Answers the frames of one camera with an exported network; create it with `Segmenter.load`.

    Threads may share it: it answers one frame at a time. Processes may not: after a fork the child loads its own.
    """

    artifact: Artifact
    session: Session
    deadline_ms: float | None
    max_age_s: float
    frozen_after: int
    clock: Callable[[], float]
    last_error: str = ""  # why the last refused frame has no answer

    def __post_init__(self) -> None:
        self._repeats = RepeatCounter()
        self._newest = self._now = -math.inf  # stamp, and time of the last check
        self._lock = threading.Lock()
        self._process = os.getpid()

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        deadline_ms: float | None = None,
        threads: int = 1,
        precision: str = "fp32",
        max_age_s: float = 0.5,
        frozen_after: int = 5,
        clock: Callable[[], float] = time.time,
        engine: str = "onnxruntime",
        providers: Sequence[str] | None = None,
    ) -> Segmenter:
        """A warmed-up segmenter, after comparing checksums and checking the golden frames on this machine.

        deadline_ms: from the call of `infer` to its answer; None for no deadline. threads: per run. max_age_s: largest
        difference between a stamp and `clock()`. frozen_after: repetitions of a frame that make it FROZEN; 0 for never.
        engine: onnxruntime, or openvino or openvino_bf16 if installed. providers: onnxruntime's, or one device of
        OpenVINO; None for the CPU. Raises ArtifactError (altered or unknown files), SelfTestError (different answers on
        this machine), EngineError (missing engine, version or provider), ValueError. Warns (UserWarning) when the
        status of the export starts with UNVERIFIED.
        """
        deadline_fits = deadline_ms is None or 0 < deadline_ms < math.inf
        for name, value, fits in (
            ("deadline_ms", deadline_ms, deadline_fits),
            ("threads", threads, threads >= 1),
            ("max_age_s", max_age_s, max_age_s > 0),
            ("frozen_after", frozen_after, frozen_after >= 0),
        ):
            if not fits:
                raise ValueError(
                    f"{name} = {value}, but a number above 0 was needed (0 for frozen_after: never)."
                )
        artifact = read_artifact(folder, precision=precision)
        if artifact.status.startswith("UNVERIFIED"):
            warnings.warn(artifact.caveat, stacklevel=2)
        session = Session(artifact, threads=threads, providers=providers, engine=engine)
        session.self_test()
        for _ in range(_WARMUP):
            session.run(artifact.golden.image[0])
        return cls(
            artifact,
            session,
            deadline_ms=deadline_ms,
            max_age_s=max_age_s,
            frozen_after=frozen_after,
            clock=clock,
        )

    def infer(self, image: Pixels, stamp: float | None = None) -> Result:
        """Answer to a frame uint8 (H, W, 3) RGB; never raises because of a frame.

        stamp: when the frame was taken, in seconds of `clock`; None skips the check for STALE. latency_ms counts from
        the call and includes the wait for another thread's frame, which also counts towards the deadline.
        """
        start = time.perf_counter()
        due = math.inf if self.deadline_ms is None else start + self.deadline_ms / 1e3
        try:
            with self._turn(due):
                self._check(image, stamp)
                mask, confidence = self.session.run(image, due)
            highest = int(mask.max())
            if highest >= self.artifact.num_classes:
                raise ValueError(
                    f"mask holds id {highest}, but there are {self.artifact.num_classes} classes"
                )
            if time.perf_counter() > due:
                raise Refused(
                    Status.DEADLINE,
                    f"the answer came after deadline_ms = {self.deadline_ms}",
                )
            result = Result(Status.OK, mask, confidence, 0.0, self.artifact.model_id)
        except Refused as refused:
            self.last_error = str(refused)
            result = self.refuse(refused.status)
        # A robot needs the next frame more than a traceback of this one.
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"
            result = self.refuse(Status.ERROR)
        return result._replace(latency_ms=(time.perf_counter() - start) * 1e3)

    def refuse(self, status: Status) -> Result:
        """A result without an answer, for frames that were refused or could not be read."""
        shape, coarse = self.artifact.answers
        mask = np.full(shape, NO_ANSWER, np.uint8)
        confidence = np.zeros(coarse, np.uint8)
        return Result(status, mask, confidence, 0.0, self.artifact.model_id)

    @contextlib.contextmanager
    def _turn(self, due: float) -> Iterator[None]:
        """Context in which no other thread's frame is answered."""
        # Before the lock, which another thread may have held in the parent.
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this Segmenter was loaded in process {self._process}, and a fork does not copy the threads of its "
                "deadline and engine. Call Segmenter.load in the process that uses it."
            )
        left = min(max(due - time.perf_counter(), 0.0), threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=-1 if math.isinf(due) else left):
            raise Refused(
                Status.DEADLINE, "another thread's frame took until the deadline"
            )
        try:
            yield
        finally:
            self._lock.release()

    def _check(self, image: Pixels, stamp: float | None) -> None:
        """Raise Refused for a frame that must not reach the network."""
        # Masked elements of a masked array are not pixels.
        if not isinstance(image, np.ndarray) or isinstance(image, np.ma.MaskedArray):
            raise Refused(
                Status.BAD_DTYPE,
                f"{type(image).__name__}, but a numpy array of uint8 was needed",
            )
        frame = self.artifact.frame
        if image.shape != frame:
            raise Refused(
                Status.BAD_SHAPE,
                f"{image.shape}, but {frame} was needed: height, width, 3",
            )
        if image.dtype != np.uint8:
            raise Refused(
                Status.BAD_DTYPE, f"{image.dtype}, but uint8 was needed: 0 to 255"
            )
        repeated = self._repeats.count(image) if self.frozen_after else 0
        if stamp is not None:
            self._check_stamp(stamp)
        self.artifact.limits.check(image)
        if self.frozen_after and repeated >= self.frozen_after:
            raise Refused(
                Status.FROZEN,
                f"{repeated} frames in a row equal one of the last different ones",
            )

    def _check_stamp(self, stamp: float) -> None:
        """Raises Refused unless the frame is recent, and not older than its predecessors.

        Frames may overtake each other in a queue. After the clock was set back, earlier stamps do not count. NaN is not
        fresh.
        """
        now = self.clock()
        if now < self._now:
            self._newest = -math.inf
        self._now = now
        if not (abs(now - stamp) <= self.max_age_s and stamp >= self._newest):
            raise Refused(
                Status.STALE,
                f"stamp = {stamp} and the clock says {now}, but it must be within {self.max_age_s} s of the clock and "
                "not before that of an earlier frame",
            )
        self._newest = stamp
