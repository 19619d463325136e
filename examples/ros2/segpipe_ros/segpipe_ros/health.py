"""Diagnostics of the frames of the last second; needs no ROS."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import NamedTuple

from segpipe_runtime import Result, Status

OK, WARN, ERROR, STALE = range(4)  # of diagnostic_msgs/msg/DiagnosticStatus

# WARN clears by itself (a tunnel, the sun, a busy core); ERROR needs a person.
LEVELS = {
    Status.OK: OK,
    Status.TOO_DARK: WARN,
    Status.SATURATED: WARN,
    Status.DEADLINE: WARN,
    Status.IMPLAUSIBLE: ERROR,
    Status.FROZEN: ERROR,
    Status.BAD_SHAPE: ERROR,
    Status.BAD_DTYPE: ERROR,
    Status.ERROR: ERROR,
    Status.STALE: STALE,
}


class Diagnosis(NamedTuple):
    """Fields of a diagnostic_msgs/msg/DiagnosticStatus."""

    level: int
    message: str
    values: list[tuple[str, str]]


class Health:
    """Counts statuses between two reports. `silent_after_s` without a frame is also a fault."""

    def __init__(
        self, model_id: str, start_s: float, silent_after_s: float = 1.0
    ) -> None:
        self._model_id = model_id
        self._silent_after_s = silent_after_s
        self._last_s = start_s  # of the last frame
        self._total: Counter[Status] = Counter()
        self._recent: list[Result] = []
        self._reason = ""

    def note(self, result: Result, reason: str, now_s: float) -> None:
        """Count a result; `reason` comes from `answer`."""
        self._last_s = now_s
        self._total[result.status] += 1
        # Drop the arrays: if nobody calls report, masks must not accumulate.
        self._recent.append(
            result._replace(mask=result.mask[:0], confidence=result.confidence[:0])
        )
        if reason:
            self._reason = f"{result.status}: {reason}"

    def report(self, now_s: float) -> Diagnosis:
        """The worst status since the last report; level STALE after `silent_after_s` without a frame."""
        recent, self._recent = self._recent, []
        reason, self._reason = self._reason, ""
        level, message = _verdict(recent, reason)
        silent_s = abs(now_s - self._last_s)  # a clock can be set back
        if silent_s > self._silent_after_s:
            level, message = STALE, f"no frame for {silent_s:.1f} s"
        times = [result.latency_ms for result in recent]
        values = [
            ("model_id", self._model_id),
            *((str(status), str(self._total[status])) for status in Status),
        ]
        if times:
            values += [
                ("p50_ms", f"{statistics.median(times):.1f}"),
                ("max_ms", f"{max(times):.1f}"),
            ]
        return Diagnosis(level, message, values)


def _verdict(recent: list[Result], reason: str) -> tuple[int, str]:
    if not recent:
        return OK, "waiting for a frame"
    counts = Counter(result.status for result in recent)
    worst = max(counts, key=LEVELS.__getitem__)
    if worst is Status.OK:
        return OK, "OK"
    return LEVELS[worst], f"{counts[worst]} of {len(recent)} frames {worst}" + (
        f" ({reason})" if reason else ""
    )
